//! A stage over records by name: the checks of every stage, restarts, and a keeper that lies.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use cascade_block::{
    BlockKey, Clock, Deadline, Digest, Manifest, Namespace, NamespaceId, SystemClock, TenantSecret,
};
use cascade_memory::Pool;
use cascade_store::StoreConfig;
use cascade_store::stage::{
    Address, BlockFacts, Load, Loaded, RecordAnswer, RecordCall, RecordStage, Records, Stage,
    StageContext, StageError, conformance,
};

const HEADER_BYTES: u64 = 160;

/// Records in a map.
#[derive(Debug, Default)]
struct MapRecords {
    records: Mutex<BTreeMap<String, Vec<u8>>>,
    fails: AtomicBool,
    /// What it has room for, however much it said; 0 for no limit.
    device_bytes: AtomicU64,
}

impl MapRecords {
    fn map(&self) -> MutexGuard<'_, BTreeMap<String, Vec<u8>>> {
        self.records.lock().unwrap()
    }

    fn answer(&self, call: RecordCall) -> Result<RecordAnswer, StageError> {
        if self.fails.load(Ordering::Relaxed) {
            return Err(StageError::Failed(Arc::new(std::io::Error::other("injected"))));
        }
        match call {
            RecordCall::Put { name, record } => {
                let record = record.seal()?.to_vec();
                let device_bytes = self.device_bytes.load(Ordering::Relaxed);
                let used: usize = self.map().values().map(Vec::len).sum();
                if device_bytes > 0 && (used + record.len()) as u64 > device_bytes {
                    return Err(StageError::Full);
                }
                assert!(self.map().insert(name, record).is_none(), "a name is never used twice");
                Ok(RecordAnswer::Done)
            }
            RecordCall::Get { name, into } => {
                let Some(record) = self.map().get(&name).cloned() else {
                    return Ok(RecordAnswer::Missing);
                };
                let mut buffer = into.take()?;
                let bytes = buffer.len().min(record.len());
                buffer[..bytes].copy_from_slice(&record[..bytes]);
                Ok(RecordAnswer::Got { buffer, bytes })
            }
            RecordCall::Delete { names } => {
                self.map().retain(|name, _| !names.contains(name));
                Ok(RecordAnswer::Done)
            }
            RecordCall::Names => {
                let length =
                    |(name, record): (&String, &Vec<u8>)| (name.clone(), record.len() as u64);
                Ok(RecordAnswer::Names(self.map().iter().map(length).collect()))
            }
            RecordCall::Flush => Ok(RecordAnswer::Done),
            RecordCall::Probe => Ok(RecordAnswer::Missing),
        }
    }
}

impl Records for MapRecords {
    fn perform(
        &self,
        calls: Vec<RecordCall>,
        _deadline: Deadline,
    ) -> Vec<Result<RecordAnswer, StageError>> {
        calls.into_iter().map(|call| self.answer(call)).collect()
    }
}

/// A keeper of records, and the stages that are opened over it, one after the other.
struct Bench {
    records: Arc<MapRecords>,
    pool: Pool,
}

impl Bench {
    fn new() -> Self {
        Self { records: Arc::default(), pool: conformance::pool() }
    }

    fn open(&self, capacity_bytes: Option<u64>) -> Arc<dyn Stage> {
        open(&self.records, capacity_bytes, &self.pool)
    }

    fn store(&self, stage: &dyn Stage, n: u8, bytes: usize) -> Result<Address, StageError> {
        let mut slab = self.pool.allocate(bytes).unwrap();
        slab.fill(n);
        stage.store(vec![(facts(n, bytes), slab.seal())], deadline()).pop().unwrap()
    }

    fn load(&self, stage: &dyn Stage, n: u8, address: Address, bytes: usize) -> Loaded {
        let slab = self.pool.allocate(bytes).unwrap();
        stage.load(vec![Load { key: key(n), address, slab }], deadline()).pop().unwrap()
    }

    fn assert_hit(&self, stage: &dyn Stage, n: u8, address: Address, byte: u8, bytes: usize) {
        let loaded = self.load(stage, n, address, bytes);
        let is_right = matches!(&loaded, Loaded::Hit(slab) if slab[..] == vec![byte; bytes]);
        assert!(is_right, "{n}: {loaded:?}");
    }
}

fn open(records: &Arc<MapRecords>, capacity_bytes: Option<u64>, pool: &Pool) -> Arc<dyn Stage> {
    let config = StoreConfig { dram_bytes: 8 << 20, ..StoreConfig::default() };
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    let context = StageContext { config: &config, pool, clock: &clock };
    RecordStage::open("map", records.clone(), capacity_bytes, &context).unwrap()
}

fn key(n: u8) -> BlockKey {
    BlockKey::from_bytes([n; 32])
}

fn facts(n: u8, bytes: usize) -> BlockFacts {
    BlockFacts {
        key: key(n),
        digest: Some(Digest::from_bytes([n; 32])),
        parent: Some(key(n.wrapping_sub(1))),
        namespace: NamespaceId::from_bytes([n; 16]),
        bytes: u32::try_from(bytes).unwrap(),
        is_prefix: n.is_multiple_of(2),
        expires_unix_ms: n.is_multiple_of(3).then_some(u64::MAX / 2),
    }
}

fn deadline() -> Deadline {
    Deadline::after(&SystemClock, std::time::Duration::from_secs(30))
}

#[test]
fn a_record_stage_conforms() {
    let pool = conformance::pool();
    conformance::all(&pool, &mut || open(&Arc::default(), None, &pool));
    conformance::all(&pool, &mut || open(&Arc::default(), Some(1 << 30), &pool));
}

#[test]
fn blocks_and_all_that_is_known_of_them_survive() {
    let bench = Bench::new();
    let stage = bench.open(None);
    let addresses: Vec<_> =
        (0..40).map(|n| bench.store(&*stage, n, 1000 + usize::from(n)).unwrap()).collect();
    drop(stage);
    let stage = bench.open(None);
    let mut recovered = stage.recover();
    recovered.sort_by_key(|(facts, _)| facts.key);
    let expected: Vec<_> =
        (0..40).map(|n| (facts(n, 1000 + usize::from(n)), addresses[usize::from(n)])).collect();
    assert_eq!(recovered, expected);
    assert_eq!(stage.recover(), [], "handed over once");
    for (n, address) in (0..40).zip(&addresses) {
        bench.assert_hit(&*stage, n, *address, n, 1000 + usize::from(n));
    }
    let next = bench.store(&*stage, 50, 10).unwrap();
    assert!(next > *addresses.iter().max().unwrap(), "no address is given twice");
    assert_eq!(stage.stats().files, 41);
}

#[test]
fn names_survive_and_those_that_are_gone_stay_gone() {
    let bench = Bench::new();
    let stage = bench.open(None);
    let address = bench.store(&*stage, 1, 100).unwrap();
    for n in [2, 3] {
        stage.alias(vec![(facts(n, 100), address)], deadline()).unwrap();
    }
    stage.remove(&[(key(1), address), (key(3), address)], deadline()).unwrap();
    let named = |stage: &Arc<dyn Stage>| -> Vec<_> {
        stage.recover().into_iter().map(|(facts, at)| (facts.key, at)).collect()
    };
    let stage = bench.open(None);
    assert_eq!(named(&stage), [(key(2), address)]);
    bench.assert_hit(&*stage, 2, address, 1, 100);
    assert!(matches!(bench.load(&*stage, 1, address, 100), Loaded::Gone));
    // Its first name may come back.
    stage.alias(vec![(facts(1, 100), address)], deadline()).unwrap();
    bench.assert_hit(&*stage, 1, address, 1, 100);
    let stage = bench.open(None);
    assert_eq!(named(&stage).len(), 2);
    stage.remove(&[(key(1), address), (key(2), address)], deadline()).unwrap();
    assert_eq!(bench.records.map().len(), 0, "nothing is left");
    assert_eq!(stage.stats().used_bytes, 0);
}

#[test]
fn no_damage_is_ever_served() {
    let bench = Bench::new();
    let stage = bench.open(None);
    let address = bench.store(&*stage, 1, 40).unwrap();
    let whole = bench.records.map().clone();
    let bits = (HEADER_BYTES + 40) * 8;
    for bit in 0..usize::try_from(bits).unwrap() {
        bench.records.map().values_mut().for_each(|record| record[bit / 8] ^= 1 << (bit % 8));
        let loaded = bench.load(&*stage, 1, address, 40);
        assert!(matches!(loaded, Loaded::Damaged), "bit {bit}: {loaded:?}");
        bench.records.map().clone_from(&whole);
    }
    for bytes in 0..usize::try_from(HEADER_BYTES + 40).unwrap() {
        bench.records.map().values_mut().for_each(|record| record.truncate(bytes));
        let loaded = bench.load(&*stage, 1, address, 40);
        assert!(matches!(loaded, Loaded::Damaged), "{bytes} bytes: {loaded:?}");
        bench.records.map().clone_from(&whole);
    }
    bench.assert_hit(&*stage, 1, address, 1, 40);
    assert_eq!(stage.stats().damaged_blocks, bits + HEADER_BYTES + 40);
    bench.records.map().clear();
    assert!(matches!(bench.load(&*stage, 1, address, 40), Loaded::Gone));
    assert_eq!(stage.stats().used_bytes, 0, "what is gone takes no room");
}

#[test]
fn swapped_and_replayed_records_are_damaged() {
    let bench = Bench::new();
    let stage = bench.open(None);
    let first = bench.store(&*stage, 1, 40).unwrap();
    let again = bench.store(&*stage, 1, 40).unwrap();
    let other = bench.store(&*stage, 2, 40).unwrap();
    let mut records = bench.records.map();
    let mut all: Vec<Vec<u8>> = records.values().cloned().collect();
    all.rotate_left(1);
    records.values_mut().zip(all).for_each(|(record, bytes)| *record = bytes);
    drop(records);
    for (n, address) in [(1, first), (1, again), (2, other)] {
        let loaded = bench.load(&*stage, n, address, 40);
        assert!(matches!(loaded, Loaded::Damaged), "{n}: {loaded:?}");
    }
}

#[test]
fn what_is_damaged_or_for_nothing_at_opening_is_deleted_and_others_things_stay() {
    let bench = Bench::new();
    let stage = bench.open(None);
    let kept = bench.store(&*stage, 1, 40).unwrap();
    let cut = bench.store(&*stage, 2, 40).unwrap();
    let flipped = bench.store(&*stage, 3, 40).unwrap();
    let lost = bench.store(&*stage, 4, 40).unwrap();
    stage.alias(vec![(facts(5, 40), lost)], deadline()).unwrap();
    let name = |address: Address| format!("cascade-{:016x}", address.0);
    {
        let mut records = bench.records.map();
        records.get_mut(&name(cut)).unwrap().truncate(170);
        records.get_mut(&name(flipped)).unwrap()[20] ^= 1;
        records.remove(&name(lost));
        records.insert("somebody else's".to_owned(), vec![1, 2, 3]);
        records.insert("cascade-1".to_owned(), vec![1, 2, 3]);
    }
    let stage = bench.open(None);
    let recovered: Vec<_> =
        stage.recover().into_iter().map(|(facts, at)| (facts.key, at)).collect();
    assert_eq!(recovered, [(key(1), kept)]);
    let names: Vec<_> = bench.records.map().keys().cloned().collect();
    assert_eq!(names, ["cascade-1".to_owned(), name(kept), "somebody else's".to_owned()]);
    assert_eq!(stage.stats().damaged_blocks, 2);
    assert_eq!(stage.stats().notes.len(), 2);
}

#[test]
fn room_is_made_oldest_first() {
    let bench = Bench::new();
    let stage = bench.open(Some(10 * (HEADER_BYTES + 100)));
    let addresses: Vec<_> = (0..10).map(|n| bench.store(&*stage, n, 100).unwrap()).collect();
    assert!(matches!(bench.store(&*stage, 10, 100), Err(StageError::Full)));
    let room = stage.make_room(&mut |key, _| *key == self::key(0), deadline()).unwrap();
    assert_eq!(room.dropped, [(key(1), addresses[1])]);
    assert_eq!(room.freed_bytes, HEADER_BYTES + 100);
    bench.store(&*stage, 10, 100).unwrap();
    bench.assert_hit(&*stage, 0, addresses[0], 0, 100);
    let declined = bench.store(&*stage, 11, 5000);
    assert!(matches!(declined, Err(StageError::Declined { bytes: 5000 })), "{declined:?}");
    assert_eq!(stage.stats().used_bytes, stage.stats().capacity_bytes);
    // A tenth of it from now on: one round makes room for what is more, too.
    let stage = bench.open(Some(HEADER_BYTES + 100));
    assert!(matches!(bench.store(&*stage, 12, 100), Err(StageError::Full)));
    stage.make_room(&mut |_, _| false, deadline()).unwrap();
    bench.store(&*stage, 12, 100).unwrap();
    assert_eq!(bench.records.map().len(), 1);
}

#[test]
fn a_device_that_says_it_is_full_gets_room() {
    let bench = Bench::new();
    bench.records.device_bytes.store(3 * (HEADER_BYTES + 100), Ordering::Relaxed);
    let stage = bench.open(None);
    for n in 0..3 {
        bench.store(&*stage, n, 100).unwrap();
    }
    assert!(matches!(bench.store(&*stage, 3, 100), Err(StageError::Full)));
    stage.probe(deadline()).unwrap();
    assert_eq!(stage.make_room(&mut |_, _| false, deadline()).unwrap().dropped.len(), 1);
    bench.store(&*stage, 3, 100).unwrap();
}

#[test]
fn a_keeper_that_fails_loses_nothing_and_is_seen_by_the_probe() {
    let bench = Bench::new();
    let stage = bench.open(Some(1 << 20));
    let address = bench.store(&*stage, 1, 100).unwrap();
    let used_bytes = stage.stats().used_bytes;
    bench.records.fails.store(true, Ordering::Relaxed);
    assert!(matches!(bench.store(&*stage, 2, 100), Err(StageError::Failed(_))));
    assert!(matches!(bench.load(&*stage, 1, address, 100), Loaded::Failed(_)));
    stage.alias(vec![(facts(3, 100), address)], deadline()).unwrap_err();
    stage.remove(&[(key(1), address)], deadline()).unwrap_err();
    stage.make_room(&mut |_, _| false, deadline()).unwrap_err();
    stage.probe(deadline()).unwrap_err();
    bench.records.fails.store(false, Ordering::Relaxed);
    assert_eq!(stage.stats().used_bytes, used_bytes);
    bench.assert_hit(&*stage, 1, address, 1, 100);
    stage.probe(deadline()).unwrap();
    assert_eq!(bench.records.map().len(), 1, "a probe leaves nothing");
}

#[test]
fn manifests_survive_and_all_can_be_erased() {
    let bench = Bench::new();
    let stage = bench.open(None);
    let manifest = Manifest::new().with("weights", "sha256:9f86");
    let space = Namespace::new(manifest.clone(), &TenantSecret::new("secret"));
    for _ in 0..2 {
        stage.register(&space, deadline()).unwrap();
    }
    bench.store(&*stage, 1, 100).unwrap();
    bench.records.map().insert("somebody else's".to_owned(), vec![1]);
    let stage = bench.open(None);
    assert_eq!(stage.manifests(deadline()).unwrap(), [(space.id(), manifest)]);
    assert_eq!(stage.erase(deadline()).unwrap().files_removed, 2);
    assert_eq!(bench.records.map().len(), 1);
    assert_eq!(stage.manifests(deadline()).unwrap(), []);
    assert_eq!(stage.stats().used_bytes, 0);
    assert_eq!(bench.open(None).recover(), []);
}
