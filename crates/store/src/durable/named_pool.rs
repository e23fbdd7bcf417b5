//! Opens the pool of a configuration, with the ledger and the recovered blocks of a named one.

use std::collections::HashSet;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use cascade_memory::{DeviceMemory, Pool};
use cascade_runtime::Clock;
use cascade_tier::{StoreError, WarmStats};

use crate::core::state::StoreState;
use crate::durable::ledger;
use crate::durable::ledger::{Holders, Ledger, Recovered};
use crate::stages::Pipeline;
use crate::{KeepPool, StoreConfig};

/// The named pool of a store, except for its ledger, which is part of the state.
#[derive(Debug)]
pub(crate) struct NamedPool {
    pub(crate) holders: Arc<Holders>,
    pub(crate) stats: WarmStats,
    pub(crate) notes: Vec<String>,
}

/// A pool, with the ledger and the recovered blocks of a named one.
pub(crate) struct OpenedPool {
    pub(crate) pool: Pool,
    pub(crate) ledger: Option<Ledger>,
    pub(crate) recovered: Vec<Recovered>,
    pub(crate) warm: Option<NamedPool>,
}

/// Opens the pool of a configuration. The recovered blocks of an earlier run are allocated in it.
pub(crate) fn open_pool(
    config: &StoreConfig,
    device: Option<Arc<dyn DeviceMemory>>,
    pipeline: &Pipeline,
    clock: &dyn Clock,
) -> Result<OpenedPool, StoreError> {
    let refused = |error| StoreError::Memory(Arc::new(error));
    let bare = |pool| OpenedPool { pool, ledger: None, recovered: Vec::new(), warm: None };
    if let Some(device) = device {
        return Pool::of_device(device).map(bare).map_err(refused);
    }
    let settings = config.pool();
    let Some(path) = &config.pool_file else {
        return Pool::new(&settings).map(bare).map_err(refused);
    };
    if !pipeline.keeps_in_memory {
        let reason = "the pipeline keeps no blocks in DRAM; leave it out".to_owned();
        return Err(StoreError::Config { setting: "pool_file", reason });
    }
    if config.keep_pool == KeepPool::Never {
        ledger::remove(path).map_err(refused)?;
        return Pool::new(&settings).map(bare).map_err(refused);
    }
    // First remove pools of starts that were killed: their memory may be needed for this pool.
    let removed = path.parent().map_or_else(Vec::new, |at| ledger::remove_unused(at, path));
    let mut opened = ledger::open(path, &settings, &pipeline.lower, clock).map_err(refused)?;
    opened.notes.extend(removed);
    let started = clock.monotonic();
    let (intact, damaged) = compare_checksums(opened.recovered);
    opened.recovered = intact;
    opened.stats.rejected_records += damaged.len() as u64;
    // The records are cleared before `damaged` is dropped, which frees the slabs.
    for one in &damaged {
        opened.ledger.discard(one);
    }
    opened.stats.recover_ms += millis(clock.monotonic().saturating_sub(started));
    Ok(OpenedPool {
        pool: opened.pool,
        ledger: Some(opened.ledger),
        recovered: opened.recovered,
        warm: Some(NamedPool { holders: opened.holders, stats: opened.stats, notes: opened.notes }),
    })
}

/// Maximum number of threads that compare checksums; more would only wait for the memory.
const COMPARE_THREADS_MAX: usize = 16;

/// Separates intact blocks from those with bytes that do not match their checksums. If one
/// block of a piece of memory is damaged, all blocks of that piece are.
fn compare_checksums(recovered: Vec<Recovered>) -> (Vec<Recovered>, Vec<Recovered>) {
    let threads = thread::available_parallelism().map_or(1, usize::from).min(COMPARE_THREADS_MAX);
    let share = recovered.len().div_ceil(threads).max(1);
    let compare = |part: &[Recovered]| -> Vec<usize> {
        let damaged = part.iter().filter(|one| !one.is_intact());
        damaged.map(|one| one.slab().offset()).collect()
    };
    // Blocks of one piece may be in the shares of different threads, so the damaged pieces are
    // collected before the blocks are separated.
    let damaged: HashSet<usize> = thread::scope(|scope| {
        let parts = recovered.chunks(share);
        let workers: Vec<_> = parts.map(|part| scope.spawn(move || compare(part))).collect();
        let join = |worker: thread::ScopedJoinHandle<'_, Vec<usize>>| {
            worker.join().expect("comparing checksums does not panic")
        };
        workers.into_iter().flat_map(join).collect()
    });
    recovered.into_iter().partition(|one| !damaged.contains(&one.slab().offset()))
}

pub(crate) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

impl NamedPool {
    pub(crate) fn stats(&self, state: &StoreState) -> WarmStats {
        let mut stats = self.stats;
        if let Some(ledger) = &state.ledger {
            ledger.add_to(&mut stats);
        }
        self.holders.add_to(&mut stats);
        stats
    }

    /// Whether to look for processes of an earlier run that have ended.
    pub(crate) fn is_sweep_due(&self, clock: &dyn Clock) -> bool {
        self.holders.is_sweep_due(clock.monotonic())
    }

    /// Frees memory held by processes of an earlier run that have ended.
    pub(crate) fn sweep(&self, clock: &dyn Clock) {
        self.holders.sweep(clock.monotonic());
    }

    /// At the end of a clean close: removes the files of the pool, unless its blocks are kept.
    pub(crate) fn close(&self, keep_pool: KeepPool) -> Result<(), StoreError> {
        match keep_pool {
            KeepPool::AfterCrash => {
                self.holders.remove_files().map_err(|error| StoreError::Memory(Arc::new(error)))
            }
            _ => Ok(()),
        }
    }
}
