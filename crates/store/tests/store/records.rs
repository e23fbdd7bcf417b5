//! A stage over named records: conformance, restarts, damaged and swapped records.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use cascade_block::{BlockKey, Digest, Manifest, Namespace, NamespaceId, TenantSecret};
use cascade_memory::Pool;
use cascade_runtime::{Clock, Deadline, SystemClock};
use cascade_store::StoreConfig;
use cascade_store::stages::{RecordAnswer, RecordCall, RecordStage, Records, StageContext};
use cascade_tier::conformance::tier as conformance;
use cascade_tier::tier::{Address, BlockFacts, Load, LoadOutcome, Tier, TierError};

const HEADER_BYTES: u64 = 160;

/// Records in a map.
#[derive(Debug, Default)]
struct MapRecords {
    records: Mutex<BTreeMap<String, Vec<u8>>>,
    fails: AtomicBool,
    /// Actual capacity, whatever the stage was configured with; 0 for no limit.
    device_bytes: AtomicU64,
    /// Every name is listed twice.
    lists_twice: AtomicBool,
}

impl MapRecords {
    fn map(&self) -> MutexGuard<'_, BTreeMap<String, Vec<u8>>> {
        self.records.lock().unwrap()
    }

    fn answer(&self, call: RecordCall) -> Result<RecordAnswer, TierError> {
        if self.fails.load(Ordering::Relaxed) {
            return Err(TierError::Failed(Arc::new(std::io::Error::other("injected"))));
        }
        match call {
            RecordCall::Put { name, record } => {
                let record = record.seal()?.to_vec();
                let device_bytes = self.device_bytes.load(Ordering::Relaxed);
                let used: usize = self.map().values().map(Vec::len).sum();
                if device_bytes > 0 && (used + record.len()) as u64 > device_bytes {
                    return Err(TierError::Full);
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
                let mut names: Vec<_> = self.map().iter().map(length).collect();
                if self.lists_twice.load(Ordering::Relaxed) {
                    names.extend(names.clone());
                }
                Ok(RecordAnswer::Names(names))
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
    ) -> Vec<Result<RecordAnswer, TierError>> {
        calls.into_iter().map(|call| self.answer(call)).collect()
    }
}

/// A record service, and stages that are opened over it one after the other.
struct Fixture {
    records: Arc<MapRecords>,
    pool: Pool,
}

impl Fixture {
    fn new() -> Self {
        Self { records: Arc::default(), pool: conformance::pool() }
    }

    fn open(&self, capacity_bytes: Option<u64>) -> Arc<dyn Tier> {
        open(&self.records, capacity_bytes, &self.pool)
    }

    fn store(&self, stage: &dyn Tier, n: u8, bytes: usize) -> Result<Address, TierError> {
        let mut slab = self.pool.allocate(bytes).unwrap();
        slab.host_mut().unwrap().fill(n);
        stage.store(vec![(facts(n, bytes), slab.seal())], deadline()).pop().unwrap()
    }

    fn load(&self, stage: &dyn Tier, n: u8, address: Address, bytes: usize) -> LoadOutcome {
        let slab = self.pool.allocate(bytes).unwrap();
        stage.load(vec![Load { key: key(n), address, slab }], deadline()).pop().unwrap()
    }

    fn assert_hit(&self, stage: &dyn Tier, n: u8, address: Address, byte: u8, bytes: usize) {
        let loaded = self.load(stage, n, address, bytes);
        let right = vec![byte; bytes];
        let is_right = matches!(&loaded, LoadOutcome::Hit(slab) if slab.host() == Some(&right[..]));
        assert!(is_right, "{n}: {loaded:?}");
    }
}

fn open(records: &Arc<MapRecords>, capacity_bytes: Option<u64>, pool: &Pool) -> Arc<dyn Tier> {
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
        written_unix_ms: 0,
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
fn blocks_and_their_metadata_survive_a_restart() {
    let fixture = Fixture::new();
    let stage = fixture.open(None);
    let addresses: Vec<_> =
        (0..40).map(|n| fixture.store(&*stage, n, 1000 + usize::from(n)).unwrap()).collect();
    drop(stage);
    let stage = fixture.open(None);
    let mut recovered = stage.recover();
    recovered.sort_by_key(|(facts, _)| facts.key);
    let expected: Vec<_> =
        (0..40).map(|n| (facts(n, 1000 + usize::from(n)), addresses[usize::from(n)])).collect();
    assert_eq!(recovered, expected);
    assert_eq!(stage.recover(), [], "returned once");
    for (n, address) in (0..40).zip(&addresses) {
        fixture.assert_hit(&*stage, n, *address, n, 1000 + usize::from(n));
    }
    let next = fixture.store(&*stage, 50, 10).unwrap();
    assert!(next > *addresses.iter().max().unwrap(), "no address is given twice");
    assert_eq!(stage.stats().files, 41);
}

#[test]
fn names_survive_a_restart_and_removed_names_do_not() {
    let fixture = Fixture::new();
    let stage = fixture.open(None);
    let address = fixture.store(&*stage, 1, 100).unwrap();
    for n in [2, 3] {
        stage.alias(vec![(facts(n, 100), address)], deadline()).unwrap();
    }
    stage.remove(&[(key(1), address), (key(3), address)], deadline()).unwrap();
    let named = |stage: &Arc<dyn Tier>| -> Vec<_> {
        stage.recover().into_iter().map(|(facts, at)| (facts.key, at)).collect()
    };
    let stage = fixture.open(None);
    assert_eq!(named(&stage), [(key(2), address)]);
    fixture.assert_hit(&*stage, 2, address, 1, 100);
    assert!(matches!(fixture.load(&*stage, 1, address, 100), LoadOutcome::Gone));
    // Its first name can be added again.
    stage.alias(vec![(facts(1, 100), address)], deadline()).unwrap();
    fixture.assert_hit(&*stage, 1, address, 1, 100);
    let stage = fixture.open(None);
    assert_eq!(named(&stage).len(), 2);
    stage.remove(&[(key(1), address), (key(2), address)], deadline()).unwrap();
    assert_eq!(fixture.records.map().len(), 0, "nothing is left");
    assert_eq!(stage.stats().used_bytes, 0);
}

#[test]
fn damaged_records_are_never_served() {
    let fixture = Fixture::new();
    let stage = fixture.open(None);
    let address = fixture.store(&*stage, 1, 40).unwrap();
    let whole = fixture.records.map().clone();
    let bits = (HEADER_BYTES + 40) * 8;
    for bit in 0..usize::try_from(bits).unwrap() {
        fixture.records.map().values_mut().for_each(|record| record[bit / 8] ^= 1 << (bit % 8));
        let loaded = fixture.load(&*stage, 1, address, 40);
        assert!(matches!(loaded, LoadOutcome::Damaged), "bit {bit}: {loaded:?}");
        fixture.records.map().clone_from(&whole);
    }
    for bytes in 0..usize::try_from(HEADER_BYTES + 40).unwrap() {
        fixture.records.map().values_mut().for_each(|record| record.truncate(bytes));
        let loaded = fixture.load(&*stage, 1, address, 40);
        assert!(matches!(loaded, LoadOutcome::Damaged), "{bytes} bytes: {loaded:?}");
        fixture.records.map().clone_from(&whole);
    }
    fixture.assert_hit(&*stage, 1, address, 1, 40);
    assert_eq!(stage.stats().damaged_blocks, bits + HEADER_BYTES + 40);
    fixture.records.map().clear();
    assert!(matches!(fixture.load(&*stage, 1, address, 40), LoadOutcome::Gone));
    assert_eq!(stage.stats().used_bytes, 0, "missing records use no capacity");
}

#[test]
fn swapped_and_replayed_records_are_damaged() {
    let fixture = Fixture::new();
    let stage = fixture.open(None);
    let first = fixture.store(&*stage, 1, 40).unwrap();
    let again = fixture.store(&*stage, 1, 40).unwrap();
    let other = fixture.store(&*stage, 2, 40).unwrap();
    let mut records = fixture.records.map();
    let mut all: Vec<Vec<u8>> = records.values().cloned().collect();
    all.rotate_left(1);
    records.values_mut().zip(all).for_each(|(record, bytes)| *record = bytes);
    drop(records);
    for (n, address) in [(1, first), (1, again), (2, other)] {
        let loaded = fixture.load(&*stage, n, address, 40);
        assert!(matches!(loaded, LoadOutcome::Damaged), "{n}: {loaded:?}");
    }
}

#[test]
fn opening_deletes_damaged_and_orphaned_records_and_keeps_foreign_ones() {
    let fixture = Fixture::new();
    let stage = fixture.open(None);
    let kept = fixture.store(&*stage, 1, 40).unwrap();
    let cut = fixture.store(&*stage, 2, 40).unwrap();
    let flipped = fixture.store(&*stage, 3, 40).unwrap();
    let lost = fixture.store(&*stage, 4, 40).unwrap();
    stage.alias(vec![(facts(5, 40), lost)], deadline()).unwrap();
    let name = |address: Address| format!("cascade-{:016x}", address.0);
    {
        let mut records = fixture.records.map();
        records.get_mut(&name(cut)).unwrap().truncate(170);
        records.get_mut(&name(flipped)).unwrap()[20] ^= 1;
        records.remove(&name(lost));
        records.insert("foreign record".to_owned(), vec![1, 2, 3]);
        records.insert("cascade-1".to_owned(), vec![1, 2, 3]);
    }
    let stage = fixture.open(None);
    let recovered: Vec<_> =
        stage.recover().into_iter().map(|(facts, at)| (facts.key, at)).collect();
    assert_eq!(recovered, [(key(1), kept)]);
    let names: Vec<_> = fixture.records.map().keys().cloned().collect();
    assert_eq!(names, ["cascade-1".to_owned(), name(kept), "foreign record".to_owned()]);
    assert_eq!(stage.stats().damaged_blocks, 2);
    assert_eq!(stage.stats().notes.len(), 2);
}

#[test]
fn the_oldest_records_are_reclaimed_first() {
    let fixture = Fixture::new();
    let stage = fixture.open(Some(10 * (HEADER_BYTES + 100)));
    let addresses: Vec<_> = (0..10).map(|n| fixture.store(&*stage, n, 100).unwrap()).collect();
    assert!(matches!(fixture.store(&*stage, 10, 100), Err(TierError::Full)));
    let room = stage.make_room(&mut |key, _| *key == self::key(0), deadline()).unwrap();
    assert_eq!(room.dropped, [(key(1), addresses[1])]);
    assert_eq!(room.freed_bytes, HEADER_BYTES + 100);
    fixture.store(&*stage, 10, 100).unwrap();
    fixture.assert_hit(&*stage, 0, addresses[0], 0, 100);
    let declined = fixture.store(&*stage, 11, 5000);
    assert!(matches!(declined, Err(TierError::Declined { bytes: 5000 })), "{declined:?}");
    assert_eq!(stage.stats().used_bytes, stage.stats().capacity_bytes);
    // Reopened with a tenth of the capacity: one call frees the excess, too.
    let stage = fixture.open(Some(HEADER_BYTES + 100));
    assert!(matches!(fixture.store(&*stage, 12, 100), Err(TierError::Full)));
    stage.make_room(&mut |_, _| false, deadline()).unwrap();
    fixture.store(&*stage, 12, 100).unwrap();
    assert_eq!(fixture.records.map().len(), 1);
}

#[test]
fn a_full_device_is_reclaimed_from() {
    let fixture = Fixture::new();
    fixture.records.device_bytes.store(3 * (HEADER_BYTES + 100), Ordering::Relaxed);
    let stage = fixture.open(None);
    for n in 0..3 {
        fixture.store(&*stage, n, 100).unwrap();
    }
    assert!(matches!(fixture.store(&*stage, 3, 100), Err(TierError::Full)));
    stage.probe(deadline()).unwrap();
    assert_eq!(stage.make_room(&mut |_, _| false, deadline()).unwrap().dropped.len(), 1);
    fixture.store(&*stage, 3, 100).unwrap();
}

#[test]
fn a_failing_record_service_loses_nothing_and_fails_the_probe() {
    let fixture = Fixture::new();
    let stage = fixture.open(Some(1 << 20));
    let address = fixture.store(&*stage, 1, 100).unwrap();
    let used_bytes = stage.stats().used_bytes;
    fixture.records.fails.store(true, Ordering::Relaxed);
    assert!(matches!(fixture.store(&*stage, 2, 100), Err(TierError::Failed(_))));
    assert!(matches!(fixture.load(&*stage, 1, address, 100), LoadOutcome::Failed(_)));
    stage.alias(vec![(facts(3, 100), address)], deadline()).unwrap_err();
    stage.remove(&[(key(1), address)], deadline()).unwrap_err();
    stage.make_room(&mut |_, _| false, deadline()).unwrap_err();
    stage.probe(deadline()).unwrap_err();
    fixture.records.fails.store(false, Ordering::Relaxed);
    assert_eq!(stage.stats().used_bytes, used_bytes);
    fixture.assert_hit(&*stage, 1, address, 1, 100);
    stage.probe(deadline()).unwrap();
    assert_eq!(fixture.records.map().len(), 1, "a probe leaves nothing");
}

#[test]
fn manifests_survive_a_restart_and_can_be_erased() {
    let fixture = Fixture::new();
    let stage = fixture.open(None);
    let manifest = Manifest::new().with("weights", "sha256:9f86");
    let space = Namespace::new(manifest.clone(), &TenantSecret::new("secret"));
    for _ in 0..2 {
        stage.register(&space, deadline()).unwrap();
    }
    fixture.store(&*stage, 1, 100).unwrap();
    fixture.records.map().insert("foreign record".to_owned(), vec![1]);
    let stage = fixture.open(None);
    assert_eq!(stage.manifests(deadline()).unwrap(), [(space.id(), manifest)]);
    assert_eq!(stage.erase(deadline()).unwrap().files_removed, 2);
    assert_eq!(fixture.records.map().len(), 1);
    assert_eq!(stage.manifests(deadline()).unwrap(), []);
    assert_eq!(stage.stats().used_bytes, 0);
    assert_eq!(fixture.open(None).recover(), []);
}

/// A listing that returned a name twice made the opening panic.
#[test]
fn a_name_that_is_listed_twice_counts_once() {
    let fixture = Fixture::new();
    let stage = fixture.open(None);
    let address = fixture.store(&*stage, 1, 5000).unwrap();
    fixture.records.lists_twice.store(true, Ordering::Relaxed);
    let again = fixture.open(None);
    assert_eq!(again.stats().used_bytes, stage.stats().used_bytes);
    assert_eq!(again.recover().len(), 1);
    fixture.assert_hit(&*again, 1, address, 1, 5000);
}
