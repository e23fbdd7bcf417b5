//! Random operations on a file tier compared with a map in memory.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::sync::Arc;

use cascade_block::BlockKey;
use cascade_disk::conformance::{block, content, deadline, key, meta, open, pool};
use cascade_disk::{Address, DiskError, FilesConfig, Load, LoadOutcome, Recovery, SegmentFiles};
use cascade_memory::Pool;
use cascade_runtime::SystemClock;
use cascade_tier::tier::Tier as _;
use proptest::prelude::*;

#[derive(Debug, Clone)]
enum Step {
    Append(Vec<usize>),
    Alias(usize),
    Remove(Vec<usize>),
    Reclaim(u8),
    Checkpoint,
    Reopen,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        5 => prop::collection::vec(1_usize..40_000, 1..12).prop_map(Step::Append),
        2 => any::<usize>().prop_map(Step::Alias),
        3 => prop::collection::vec(any::<usize>(), 1..6).prop_map(Step::Remove),
        2 => any::<u8>().prop_map(Step::Reclaim),
        1 => Just(Step::Checkpoint),
        1 => Just(Step::Reopen),
    ]
}

/// The expected content of the tier: address, content number and length by key.
type Model = BTreeMap<BlockKey, (Address, u64, usize)>;

struct ModelRun {
    config: FilesConfig,
    pool: Pool,
    files: Option<Arc<SegmentFiles>>,
    model: Model,
    next: u64,
}

impl ModelRun {
    fn files(&self) -> &SegmentFiles {
        self.files.as_deref().unwrap()
    }

    fn reopen(&mut self) -> Recovery {
        self.files = None;
        let clock = Arc::new(SystemClock);
        let (files, recovery) = open(self.config.clone(), clock, &self.pool, deadline()).unwrap();
        self.files = Some(files);
        recovery
    }

    fn run_step(&mut self, step: Step) {
        match step {
            Step::Append(lengths) => self.append(&lengths),
            Step::Alias(which) => self.alias(which),
            Step::Remove(which) => self.remove(&which),
            Step::Reclaim(mask) => self.reclaim(mask),
            Step::Checkpoint => self.files().checkpoint(deadline()).unwrap(),
            Step::Reopen => {
                let recovery = self.reopen();
                let found: BTreeMap<_, _> =
                    recovery.live.iter().map(|(meta, at)| (meta.key, *at)).collect();
                let expected: BTreeMap<_, _> =
                    self.model.iter().map(|(key, (at, _, _))| (*key, *at)).collect();
                assert_eq!(found, expected);
            }
        }
        self.check();
    }

    fn append(&mut self, lengths: &[usize]) {
        let first = self.next;
        self.next += lengths.len() as u64;
        let batch =
            (first..).zip(lengths).map(|(number, &length)| block(&self.pool, number, length));
        let results = self.files().append(batch.collect(), deadline());
        for ((number, &length), result) in (first..).zip(lengths).zip(results) {
            match result {
                Ok(address) => drop(self.model.insert(key(number), (address, number, length))),
                Err(DiskError::Full { .. }) => {}
                Err(error) => panic!("{error:?}"),
            }
        }
    }

    fn nth(&self, which: usize) -> Option<(BlockKey, (Address, u64, usize))> {
        let count = self.model.len();
        (count > 0).then(|| self.model.iter().nth(which % count).map(|(k, v)| (*k, *v)).unwrap())
    }

    fn alias(&mut self, which: usize) {
        let Some((_, (address, number, length))) = self.nth(which) else { return };
        self.next += 1;
        let name = self.next - 1;
        match self.files().alias_blocks(&[(meta(name, length), address)], deadline()).remove(0) {
            Ok(address) => drop(self.model.insert(key(name), (address, number, length))),
            Err(DiskError::Full { .. }) => {}
            Err(error) => panic!("{error:?}"),
        }
    }

    fn remove(&mut self, which: &[usize]) {
        let gone: Vec<_> = which.iter().filter_map(|&which| self.nth(which)).collect();
        let keys: Vec<_> = gone.iter().map(|(key, (address, _, _))| (*key, *address)).collect();
        self.files().remove(&keys, deadline()).unwrap();
        for (key, _) in keys {
            self.model.remove(&key);
        }
    }

    fn reclaim(&mut self, mask: u8) {
        let keep =
            &mut |meta: &cascade_disk::BlockFacts, _| mask >> (meta.key.as_bytes()[8] % 8) & 1 == 1;
        let reclaimed = self.files().reclaim(keep, deadline()).unwrap();
        for (key, from, to) in reclaimed.moved {
            let held = self.model.get_mut(&key).unwrap();
            assert_eq!(held.0, from);
            held.0 = to;
        }
        for (key, address) in reclaimed.dropped {
            assert_eq!(self.model.remove(&key).unwrap().0, address);
        }
    }

    fn check(&self) {
        assert!(self.files().used_bytes() <= self.config.capacity_bytes);
        let request = |(key, (address, _, length)): (&BlockKey, &(Address, u64, usize))| {
            let slab = self.pool.allocate(*length).unwrap();
            Load { address: *address, key: *key, slab }
        };
        let outcomes = self.files().load(self.model.iter().map(request).collect(), deadline());
        for ((key, (_, number, length)), outcome) in self.model.iter().zip(outcomes) {
            let LoadOutcome::Hit(slab) = outcome else { panic!("{key}: {outcome:?}") };
            assert!(slab.host() == Some(&content(*number, *length)), "{key} has wrong bytes");
        }
    }
}

fn run_steps(steps: Vec<Step>) {
    let directory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let config = FilesConfig {
        capacity_bytes: 2 << 20,
        segment_bytes: 256 << 10,
        ..FilesConfig::new(directory.path())
    };
    let mut run = ModelRun { config, pool: pool(), files: None, model: Model::new(), next: 0 };
    run.reopen();
    for step in steps {
        run.run_step(step);
    }
    run.run_step(Step::Reopen);
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 48,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn segments_match_a_map(steps in prop::collection::vec(step(), 1..40)) {
        run_steps(steps);
    }
}
