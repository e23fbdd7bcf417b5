//! The cost of encryption: blocks through an encrypted stage over a stage in memory.

use std::collections::HashMap;
use std::fs;
use std::hint::black_box;
use std::os::unix::fs::PermissionsExt as _;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use cascade_block::{BlockKey, NamespaceId};
use cascade_memory::{HugePages, Pool, PoolConfig, Slab};
use cascade_runtime::{Clock, Deadline, SystemClock};
use cascade_store::stages::{EncryptedStage, StageContext};
use cascade_store::{EncryptionConfig, StoreConfig};
use cascade_tier::tier::{
    Address, BlockFacts, Load, LoadOutcome, MakeRoomOutcome, Tier, TierError, TierStats,
};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

/// Keeps only the last record, so that its own cost is negligible.
#[derive(Debug, Default)]
struct Last(Mutex<HashMap<u64, Slab>>);

impl Tier for Last {
    fn name(&self) -> &'static str {
        "last"
    }

    fn store(
        &self,
        batch: Vec<(BlockFacts, Slab)>,
        _: Deadline,
    ) -> Vec<Result<Address, TierError>> {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let keep = |(_, slab)| {
            kept.insert(0, slab);
            Ok(Address(0))
        };
        batch.into_iter().map(keep).collect()
    }

    fn load(&self, batch: Vec<Load>, _: Deadline) -> Vec<LoadOutcome> {
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let copy = |mut load: Load| {
            load.slab
                .fill_from(kept[&0].host().expect("host memory"))
                .expect("host memory does not fail");
            LoadOutcome::Hit(load.slab)
        };
        batch.into_iter().map(copy).collect()
    }

    fn alias(&self, _: Vec<(BlockFacts, Address)>, _: Deadline) -> Result<(), TierError> {
        Ok(())
    }

    fn remove(&self, _: &[(BlockKey, Address)], _: Deadline) -> Result<(), TierError> {
        Ok(())
    }

    fn make_room(
        &self,
        _: &mut dyn FnMut(&BlockKey, Address) -> bool,
        _: Deadline,
    ) -> Result<MakeRoomOutcome, TierError> {
        Ok(MakeRoomOutcome::default())
    }

    fn recover(&self) -> Vec<(BlockFacts, Address)> {
        Vec::new()
    }

    fn flush(&self, _: Deadline) -> Result<(), TierError> {
        Ok(())
    }

    fn stats(&self) -> TierStats {
        TierStats::default()
    }
}

fn encryption(criterion: &mut Criterion) {
    let directory = tempfile::tempdir().expect("a directory for the key");
    let key = directory.path().join("key");
    fs::write(&key, [7; 32]).expect("the key is written");
    fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).expect("it is ours");
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    let pool =
        PoolConfig { capacity_bytes: 64 << 20, huge_pages: HugePages::Never, populate: true };
    let pool = Pool::new(&pool).expect("64 MiB");
    let config = StoreConfig { dram_bytes: 512 << 20, ..StoreConfig::default() };
    let context = StageContext { config: &config, pool: &pool, clock: &clock };
    let stage =
        EncryptedStage::open(Arc::new(Last::default()), &EncryptionConfig::new(key), &context);
    let stage = stage.expect("the key is fine");
    let deadline = Deadline::after(&*clock, Duration::from_secs(3600));
    let mut group = criterion.benchmark_group("encryption");
    for bytes in [128 << 10, 2 << 20] {
        let facts = BlockFacts {
            key: BlockKey::from_bytes([1; 32]),
            digest: None,
            parent: None,
            namespace: NamespaceId::default(),
            bytes: u32::try_from(bytes).expect("a small block"),
            is_prefix: false,
            written_unix_ms: 0,
            expires_unix_ms: None,
        };
        let block = pool.allocate(bytes).expect("the pool has room").seal();
        let source = block.host().expect("host memory");
        let mut target = vec![0; bytes];
        group.throughput(Throughput::Bytes(bytes as u64));
        group.bench_function(BenchmarkId::new("memcpy", bytes), |bencher| {
            bencher.iter(|| target.copy_from_slice(black_box(source)));
        });
        group.bench_function(BenchmarkId::new("seal", bytes), |bencher| {
            bencher.iter(|| stage.store(vec![(facts, block.clone())], deadline));
        });
        group.bench_function(BenchmarkId::new("open", bytes), |bencher| {
            bencher.iter(|| {
                let slab = pool.allocate(bytes).expect("the pool has room");
                let load = Load { key: facts.key, address: Address(0), slab };
                let loaded = stage.load(vec![load], deadline);
                assert!(matches!(loaded[0], LoadOutcome::Hit(_)));
            });
        });
    }
    group.finish();
}

criterion_group!(benches, encryption);
criterion_main!(benches);
