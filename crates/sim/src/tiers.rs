//! The simulated devices of a world, how a store gets them, and what happens to them.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use cascade_runtime::simulated::Random;
use cascade_runtime::{now, sleep};
use cascade_store::StoreError;
use cascade_store::stages::{StageContext, StageRegistry, open_files_with};

use crate::disk::{CallKind, ContractViolation, DiskFault, DiskSettings, Episode, SimDisk};
use crate::kept_pool::KeptPool;
use crate::profile::{DIRECTORY, Profile, Trouble};

/// Faults of one opening of a store at most.
const EPISODES_MAX: u64 = 6;
/// Virtual time after the opening in which faults begin.
const EPISODES_WITHIN: Duration = Duration::from_secs(2);
/// A call that hangs for longer than its caller may wait.
const LONG_HANG: Duration = Duration::from_secs(1);
/// Virtual time in which circuits close again, once the faults have ended.
const RECOVERY: Duration = Duration::from_secs(2);

/// The devices of a world. They survive crashes of the store; clones are handles on the same.
#[derive(Debug, Clone)]
pub(crate) struct Devices {
    disk: SimDisk,
    /// The memory of the store's pool, if it outlives a process.
    pool: Option<Arc<KeptPool>>,
}

impl Devices {
    pub(crate) fn new(profile: &Profile, random: &mut Random) -> Self {
        let disk = SimDisk::new(DiskSettings {
            seed: random.next_u64(),
            supports_direct: !random.one_in(4),
            has_journal: profile.has_journal,
            ..DiskSettings::default()
        });
        let made = disk.make_durable_directory(Path::new(DIRECTORY));
        made.expect("an empty disk has no file with its name");
        let keep = || KeptPool::new().expect("the machine has memory for one more pool");
        let pool = profile.keeps_pool.then(|| Arc::new(keep()));
        Self { disk, pool }
    }

    /// Removes the memory of the store's pool.
    pub(crate) fn remove_pool(&self) {
        if let Some(pool) = &self.pool {
            pool.remove();
        }
    }

    /// The file of the store's pool, if it has one.
    pub(crate) fn pool_file(&self) -> Option<PathBuf> {
        self.pool.as_ref().map(|pool| pool.path())
    }

    /// The stages that a store can have.
    pub(crate) fn registry(&self) -> StageRegistry {
        let mut registry = StageRegistry::default();
        let disk = self.disk.clone();
        let open = move |context: &StageContext<'_>| -> Result<_, StoreError> {
            open_files_with(context, disk.file_io(context.clock))
        };
        registry.register("Files", Arc::new(open));
        registry
    }

    /// Draws the faults of the time from now on.
    pub(crate) fn trouble(&self, profile: &Profile, random: &mut Random) {
        if profile.trouble != Trouble::Faults {
            return;
        }
        for _ in 0..=random.below(EPISODES_MAX) {
            self.disk.inject(Episode::draw(random, now()..now() + EPISODES_WITHIN));
        }
        // Longer than the time-out of a call.
        if random.one_in(2) {
            let kind = [CallKind::Sync, CallKind::Name][random.index_below(2)];
            let from = now() + Duration::from_micros(random.below(500_000));
            self.disk.inject(Episode::new(DiskFault::Hang(kind), from, from + LONG_HANG));
        }
    }

    /// Ends the faults, and waits until the store can have recovered from them.
    pub(crate) fn calm(&self) {
        let end = self.disk.faults_end();
        self.disk.clear_faults();
        if !end.is_zero() {
            sleep(end.saturating_sub(now()) + RECOVERY);
        }
    }

    /// The process that used the devices was killed, perhaps because the machine lost its power.
    pub(crate) fn crashed(&self, has_lost_power: bool) {
        if has_lost_power {
            self.disk.power_loss();
        } else {
            self.disk.kill();
        }
        self.disk.clear_faults();
        if let Some(pool) = &self.pool {
            pool.crashed(has_lost_power).expect("the files of a pool can be renamed");
        }
    }

    /// What callers did that a device answers with arbitrary bytes.
    pub(crate) fn violations(&self) -> Vec<String> {
        // No caller reads what a late transfer brings, and the disk keeps its memory for it.
        let violations = self.disk.violations().into_iter().filter(|violation| !violation.is_late);
        violations
            .map(|ContractViolation { at, path, text, .. }| format!("{path:?} at {at:?}: {text}"))
            .collect()
    }

    /// How often callers did that to a transfer whose call the deadline had ended.
    pub(crate) fn count_late_transfers(&self) -> u64 {
        self.disk.counts().late_violations
    }
}
