//! The embedded store as a backend, with a simulated GPU tier before it.

use std::path::Path;
use std::time::Duration;

use cascade_block::BlockKey;
use cascade_runtime::{Clock, SystemClock};
use cascade_store::{
    CallOptions, FilesConfig, Put, PutOutcome, PutSlab, Store, StoreConfig, StoreError, StoreStats,
    ViewOutcome, WritePolicy,
};

use crate::KvBenchError;
use crate::backend::{Backend, Held, KvTier, NewBlock, Read, Space, Stored};

/// How long a call may take. A full device queue can take minutes.
const CALL_TIMEOUT: Duration = Duration::from_secs(300);
/// How long to wait before memory is asked for again: all of it is in the hands of other users.
const RETRY: Duration = Duration::from_millis(1);

/// The sizes of the tiers in bytes.
#[derive(Debug, Clone, Copy)]
pub struct TierSizes {
    /// The simulated GPU tier; 0: none.
    pub gpu_bytes: u64,
    /// The DRAM tier; 0: none.
    pub cpu_bytes: u64,
    /// The pool that blocks pass through if there is no DRAM tier.
    pub staging_bytes: u64,
    /// The file tier.
    pub files_bytes: u64,
}

/// The embedded store.
#[derive(Debug)]
pub struct StoreBackend {
    store: Store,
    gpu: Option<Store>,
}

impl StoreBackend {
    /// Opens a store with a file tier in `directory`.
    ///
    /// Puts are write-through: a put returns once the file tier has the block, so that its latency
    /// is that of the storage.
    ///
    /// # Errors
    /// If the directory or the memory cannot be used.
    pub fn open(directory: &Path, sizes: TierSizes) -> Result<Self, KvBenchError> {
        let failed = |source| KvBenchError::Store { doing: "opening", source };
        let has_dram = sizes.cpu_bytes > 0;
        let mut files = FilesConfig::new(directory);
        files.capacity_bytes = sizes.files_bytes;
        let config = StoreConfig {
            pipeline: if has_dram { "Dram|Files" } else { "Files" }.to_owned(),
            dram_bytes: if has_dram { sizes.cpu_bytes } else { sizes.staging_bytes },
            files: Some(files),
            write: WritePolicy::Through,
            timeout: CALL_TIMEOUT,
            changes_max: 0,
            ..StoreConfig::default()
        };
        let store = Store::open(config).map_err(failed)?;
        let gpu = if sizes.gpu_bytes > 0 {
            let config = StoreConfig {
                dram_bytes: sizes.gpu_bytes,
                changes_max: 0,
                timeout: CALL_TIMEOUT,
                ..StoreConfig::default()
            };
            Some(Store::open(config).map_err(failed)?)
        } else {
            None
        };
        Ok(Self { store, gpu })
    }

    /// Statistics of the store.
    pub fn stats(&self) -> StoreStats {
        self.store.stats()
    }

    /// Whether the file tier bypasses the page cache. Its notes say if it cannot.
    pub fn has_direct_io(&self) -> bool {
        let stages = self.store.stats().stages;
        !stages.iter().any(|(_, stage)| stage.notes.iter().any(|note| note.contains("O_DIRECT")))
    }

    /// Statistics of the simulated GPU tier.
    pub fn gpu_stats(&self) -> Option<StoreStats> {
        self.gpu.as_ref().map(Store::stats)
    }

    /// Ends the store; its files stay.
    ///
    /// # Errors
    /// If blocks could not be written.
    pub fn close(&self) -> Result<(), KvBenchError> {
        let closed = self.store.close().and(self.gpu.as_ref().map_or(Ok(()), Store::close));
        closed.map_err(|source| KvBenchError::Store { doing: "closing", source })
    }

    fn read_store(&self, keys: &[BlockKey]) -> Vec<Read> {
        let outcomes = self.store.view(keys, CallOptions::default());
        outcomes.into_iter().map(|outcome| read_of(outcome, None)).collect()
    }
}

fn read_of(outcome: ViewOutcome, as_tier: Option<KvTier>) -> Read {
    match outcome {
        ViewOutcome::Hit { slab, tier } => {
            let tier = as_tier.unwrap_or(match tier {
                "dram" => KvTier::Cpu,
                _ => KvTier::Storage,
            });
            Read::Hit { held: Held::Slab(slab), tier }
        }
        ViewOutcome::Miss => Read::Miss,
        ViewOutcome::Failed(error) => Read::Failed(reason(&error)),
    }
}

fn reason(error: &StoreError) -> String {
    cascade_block::with_causes(error)
}

fn stored(outcome: PutOutcome) -> Stored {
    match outcome {
        PutOutcome::Stored | PutOutcome::Deduplicated => Stored::Yes,
        PutOutcome::Present => Stored::Present,
        PutOutcome::Conflict => Stored::No("the key is present with other bytes".to_owned()),
        PutOutcome::Declined(why) => Stored::No(format!("declined: {why:?}")),
        PutOutcome::Failed(error) => Stored::No(reason(&error)),
    }
}

impl Backend for StoreBackend {
    fn reserve(&self, bytes: usize) -> Result<Space, String> {
        let deadline = SystemClock.monotonic() + CALL_TIMEOUT;
        loop {
            match self.store.reserve(bytes, CallOptions::default()) {
                Ok(slab) => return Ok(Space::Slab(slab)),
                Err(StoreError::NoRoom { .. }) if SystemClock.monotonic() < deadline => {
                    cascade_runtime::sleep(RETRY);
                }
                Err(error) => return Err(reason(&error)),
            }
        }
    }

    fn put(&self, blocks: Vec<NewBlock>) -> Vec<Stored> {
        if let Some(gpu) = &self.gpu {
            let puts = blocks.iter().filter_map(|block| {
                let Space::Slab(slab) = &block.space else { return None };
                Some(Put { parent: block.parent, ..Put::new(block.key, slab.host()?) })
            });
            let puts: Vec<Put<'_>> = puts.collect();
            // Whatever the simulated tier does not take is in the store.
            drop(gpu.put(&puts, CallOptions::default()));
        }
        let puts = blocks.into_iter().filter_map(|block| match block.space {
            Space::Slab(slab) => {
                Some(PutSlab { parent: block.parent, ..PutSlab::new(block.key, slab) })
            }
            Space::Owned(_) => None,
        });
        let outcomes = self.store.put_slabs(puts.collect(), CallOptions::default());
        outcomes.into_iter().map(stored).collect()
    }

    fn read(&self, keys: &[BlockKey]) -> Vec<Read> {
        let Some(gpu) = &self.gpu else { return self.read_store(keys) };
        let outcomes = gpu.view(keys, CallOptions::default());
        let mut reads: Vec<Read> =
            outcomes.into_iter().map(|outcome| read_of(outcome, Some(KvTier::Gpu))).collect();
        let is_open = |read: &Read| !matches!(read, Read::Hit { .. });
        let missing: Vec<usize> = (0..reads.len()).filter(|at| is_open(&reads[*at])).collect();
        let missing_keys: Vec<BlockKey> = missing.iter().map(|at| keys[*at]).collect();
        let below = self.read_store(&missing_keys);
        for (at, read) in missing.into_iter().zip(below) {
            if let Read::Hit { held, .. } = &read {
                // As a GPU would: what is read once is kept.
                drop(gpu.put(&[Put::new(keys[at], held.bytes())], CallOptions::default()));
            }
            reads[at] = read;
        }
        reads
    }

    fn clear(&self) {
        self.store.clear();
        if let Some(gpu) = &self.gpu {
            gpu.clear();
        }
    }
}
