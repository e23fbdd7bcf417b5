//! The file tier on a simulated disk: its conformance suite, in worlds and outside of them, and
//! crashes at any scheduling point.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use cascade_block::{Manifest, Namespace, TenantSecret};
use cascade_disk::conformance::{
    self, Reopen, StoredBlock, assert_hits, assert_recovered, block, content, deadline, key, meta,
    open_with,
};
use cascade_disk::{
    Address, BlockFacts, DiskError, FilesConfig, Load, LoadOutcome, Recovery, SegmentFiles,
};
use cascade_memory::{HugePages, Pool, PoolConfig, Slab};
use cascade_runtime::simulated::{Domain, Ending, Random, Report, Settings, World};
use cascade_runtime::{Clock, Deadline, LeafMutex, SystemClock, now, sleep};
use cascade_sim::disk::{CallKind, DiskFault, DiskSettings, Episode, Latency, SimDisk};
use cascade_tier::tier::Tier as _;

const DIRECTORY: &str = "/tier/files";
const CAPACITY_BYTES: u64 = 24 << 20;

fn new_disk(settings: DiskSettings) -> SimDisk {
    let disk = SimDisk::new(settings);
    // The tier creates its own directory.
    disk.make_durable_directory(Path::new("/tier")).unwrap();
    disk
}

fn open(disk: &SimDisk, config: &FilesConfig) -> (Arc<SegmentFiles>, Recovery) {
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    open_with(config.clone(), disk.file_io(&clock), deadline()).unwrap()
}

/// Runs a check of the conformance suite on new disks, one for each kind of tier.
fn for_each_tier(settings: DiskSettings, check: fn(&mut Reopen<'_>)) {
    for (durable, direct) in [(false, true), (true, true), (false, false)] {
        let disk = new_disk(settings);
        let config = FilesConfig {
            capacity_bytes: CAPACITY_BYTES,
            segment_bytes: 4 << 20,
            durable,
            direct,
            ..FilesConfig::new(DIRECTORY)
        };
        check(&mut |_pool| open(&disk, &config));
        assert_eq!(disk.violations(), [], "durable: {durable}, direct: {direct}");
    }
}

fn in_world(seed: u64, body: impl FnOnce() + Send + 'static) -> Report {
    let report = World::run(Settings::from_seed(seed), body);
    assert_eq!(report.ending, Ending::Finished, "seed {seed}");
    assert_eq!(report.panics, [""; 0], "seed {seed}");
    report
}

macro_rules! suite {
    ($($check:ident: $run:expr;)*) => {
        mod outside_of_a_world {
            use super::*;
            $(
                #[test]
                fn $check() {
                    for_each_tier(DiskSettings::without_latency(1), $run);
                }
            )*
        }

        mod in_a_world {
            use super::*;
            $(
                #[test]
                fn $check() {
                    for seed in 0..2 {
                        let settings = DiskSettings { seed, ..DiskSettings::default() };
                        in_world(seed, move || for_each_tier(settings, $run));
                    }
                }
            )*
        }
    };
}

suite! {
    blocks_are_read_back: conformance::blocks_are_read_back;
    removals_persist: conformance::removals_persist;
    aliases_keep_bytes: conformance::aliases_keep_bytes;
    capacity_is_respected:
        |reopen| conformance::capacity_is_respected(reopen, CAPACITY_BYTES);
    restarts_leave_space_for_reclaim:
        |reopen| conformance::restarts_leave_space_for_reclaim(reopen, CAPACITY_BYTES);
    reclaim_keeps_selected_blocks: conformance::reclaim_keeps_selected_blocks;
    invalid_requests_fail_alone: conformance::invalid_requests_fail_alone;
    manifests_are_kept: conformance::manifests_are_kept;
}

#[test]
fn a_seed_gives_the_same_run_each_time() {
    let run = |seed| {
        in_world(seed, move || {
            let disk = new_disk(DiskSettings { seed, ..DiskSettings::default() });
            let config = small_config(false);
            conformance::removals_persist(&mut |_pool| open(&disk, &config));
        })
    };
    for seed in 0..5 {
        let first = run(seed);
        let shift = vec![vec![0_u8; 1 << (seed + 5)]; 3];
        assert_eq!(first, run(seed), "seed {seed}");
        drop(shift);
    }
}

fn small_config(durable: bool) -> FilesConfig {
    FilesConfig {
        capacity_bytes: 8 << 20,
        segment_bytes: 1 << 20,
        durable,
        ..FilesConfig::new(DIRECTORY)
    }
}

fn small_pool() -> Pool {
    let config =
        PoolConfig { capacity_bytes: 4 << 20, huge_pages: HugePages::Never, populate: false };
    Pool::new(&config).unwrap()
}

fn length(number: u64) -> usize {
    [300, 4096, 20_000, 65_536, 1][usize::try_from(number % 5).unwrap()]
}

/// What a writer has acknowledged before its crash.
#[derive(Debug, Default)]
struct Acknowledged {
    /// Stored blocks, until their removal begins.
    stored: BTreeMap<u64, Address>,
    /// Blocks whose removal was acknowledged, and whether a sync was since.
    removed: BTreeMap<u64, bool>,
    next: u64,
}

/// Writes, removes and reclaims until it is killed.
fn write_until_killed(
    files: &SegmentFiles,
    pool: &Pool,
    shared: &LeafMutex<Acknowledged>,
    batch_blocks: u64,
) {
    loop {
        let start = shared.lock().unwrap().next;
        shared.lock().unwrap().next += batch_blocks;
        let numbers = start..start + batch_blocks;
        let blocks = numbers.map(|number| block(pool, number, length(number))).collect();
        let mut is_full = false;
        for (number, result) in (start..).zip(files.append(blocks, deadline())) {
            match result {
                Ok(address) => drop(shared.lock().unwrap().stored.insert(number, address)),
                Err(DiskError::Full { .. }) => is_full = true,
                Err(error) => panic!("block {number}: {error:?}"),
            }
        }
        if start.is_multiple_of(12) {
            remove_one(files, start, shared);
        }
        if start.is_multiple_of(40) {
            files.checkpoint(deadline()).unwrap();
            for synced in shared.lock().unwrap().removed.values_mut() {
                *synced = true;
            }
        }
        if is_full {
            // A block that is not kept may be gone from here on.
            let keep = &mut |meta: &BlockFacts, _| {
                let is_kept = meta.is_prefix && meta.written_unix_ms + 40 > start;
                if !is_kept {
                    shared.lock().unwrap().stored.remove(&meta.written_unix_ms);
                }
                is_kept
            };
            files.reclaim(keep, deadline()).unwrap();
        }
    }
}

fn remove_one(files: &SegmentFiles, number: u64, shared: &LeafMutex<Acknowledged>) {
    let stored = shared.lock().unwrap().stored.remove(&number);
    if let Some(address) = stored {
        files.remove(&[(key(number), address)], deadline()).unwrap();
        shared.lock().unwrap().removed.insert(number, false);
    }
}

/// Crashes a writer again and again at any scheduling point, and checks what is left.
fn crash_rounds(seed: u64, has_power_losses: bool) {
    let disk = new_disk(DiskSettings { seed, ..DiskSettings::default() });
    let config = small_config(has_power_losses);
    // In every other run a batch fills several segments: while it is written, full ones are sealed
    // and new ones are created.
    let (segment_bytes, batch_blocks) = [(1 << 20, 4), (128 << 10, 24)][(seed % 2) as usize];
    let config = FilesConfig { segment_bytes, ..config };
    let shared = Arc::new(LeafMutex::new(Acknowledged::default()));
    let world = World::current().unwrap();
    for round in 1..=8 {
        let (io_disk, io_config, writer) = (disk.clone(), config.clone(), Arc::clone(&shared));
        world.spawn_in(Domain(1), "writer", move || {
            let pool = small_pool();
            let (files, _) = open(&io_disk, &io_config);
            write_until_killed(files.as_ref(), &pool, &writer, batch_blocks);
        });
        let random = cascade_runtime::random_u64().unwrap();
        if random.is_multiple_of(2) {
            world.kill_after(50 + random % (400 * round), Domain(1));
            assert!(world.wait_for_kill(Duration::from_secs(3600)));
        } else {
            // There is no scheduling point while the disk works.
            sleep(Duration::from_micros(random % (3000 * round)));
            world.kill(Domain(1));
        }
        if has_power_losses {
            disk.power_loss();
        } else {
            disk.kill();
        }
        let pool = small_pool();
        let (files, recovery) = open(&disk, &config);
        check(files.as_ref(), &pool, &recovery, &shared, has_power_losses);
    }
    let harmful: Vec<_> =
        disk.violations().into_iter().filter(|violation| !violation.is_late).collect();
    assert_eq!(harmful, []);
}

fn check(
    files: &SegmentFiles,
    pool: &Pool,
    recovery: &Recovery,
    shared: &LeafMutex<Acknowledged>,
    after_power_loss: bool,
) {
    let live: BTreeMap<u64, StoredBlock> = recovery
        .live
        .iter()
        .map(|(meta, address)| {
            let number = meta.written_unix_ms;
            (number, StoredBlock { number, length: length(number), address: *address })
        })
        .collect();
    let all: Vec<_> = live.values().copied().collect();
    for chunk in all.chunks(16) {
        assert_hits(files, pool, chunk);
    }
    let mut shared = shared.lock().unwrap();
    let lost: Vec<_> = shared.stored.keys().filter(|number| !live.contains_key(number)).collect();
    assert!(lost.is_empty(), "acknowledged but lost: {lost:?}; {recovery:?}");
    // A power loss may undo a removal that was not synced.
    shared
        .removed
        .retain(|number, is_synced| *is_synced || !after_power_loss || !live.contains_key(number));
    let back: Vec<_> = shared.removed.keys().filter(|number| live.contains_key(number)).collect();
    assert!(back.is_empty(), "removed but recovered: {back:?}");
    // What was recovered without an acknowledgement has to stay from now on.
    shared.stored = live.into_iter().map(|(number, block)| (number, block.address)).collect();
}

/// The names of directories that a tier had created were not synced.
#[test]
fn a_power_loss_after_the_first_acknowledgement_loses_nothing() {
    for seed in 0..100 {
        let disk = new_disk(DiskSettings::without_latency(seed));
        let config = small_config(seed % 2 == 0);
        let pool = small_pool();
        let (files, _) = open(&disk, &config);
        let stored = conformance::append(files.as_ref(), &pool, &[(1, 5000), (2, 300)]);
        let manifest = Manifest::new().with("dtype", "bf16");
        let namespace = Namespace::new(manifest, &TenantSecret::new([1, 2, 3]));
        files.register(&namespace, deadline()).unwrap();
        if !config.durable {
            files.sync(deadline()).unwrap();
        }
        disk.power_loss();
        drop(files);
        let (files, recovery) = open(&disk, &config);
        assert_recovered(&recovery, &stored);
        assert_hits(files.as_ref(), &pool, &stored);
        assert_eq!(files.manifests(deadline()).unwrap().len(), 1, "seed {seed}");
    }
}

/// Erases a tier with a manifest, a block, and one that was removed just before; then the power is
/// lost. Syncs may fail during the erase.
fn lose_power_after_an_erase(seed: u64, syncs_fail: bool) {
    let disk = new_disk(DiskSettings::without_latency(seed));
    let config = small_config(false);
    let (files, _) = open(&disk, &config);
    let manifest = Manifest::new().with("dtype", "bf16");
    let namespace = Namespace::new(manifest, &TenantSecret::new([1, 2, 3]));
    files.register(&namespace, deadline()).unwrap();
    let stored = conformance::append(files.as_ref(), &small_pool(), &[(1, 5000), (2, 300)]);
    files.sync(deadline()).unwrap();
    files.remove(&[(key(1), stored[0].address)], deadline()).unwrap();
    if syncs_fail {
        let fault = DiskFault::Error(CallKind::Sync);
        disk.inject(Episode::new(fault, Duration::ZERO, Duration::MAX));
    }
    let erased = files.erase(deadline()).unwrap();
    disk.clear_faults();
    disk.power_loss();
    drop(files);
    let (files, recovery) = open(&disk, &config);
    let manifests = files.manifests(deadline()).unwrap();
    let what = format!("seed {seed}: {} blocks, {erased:?}", recovery.live.len());
    assert_eq!(erased.left.is_empty(), !syncs_fail, "{what}");
    assert!(recovery.live.is_empty() || syncs_fail, "{what}");
    assert_eq!(manifests.len(), usize::from(syncs_fail), "{what}");
}

/// An erase removed the manifests before the removals of blocks were on stable storage. A power
/// loss then left a block of an encrypted tier that nothing marked as encrypted, and the store
/// refused to open.
#[test]
fn a_power_loss_after_an_erase_leaves_no_block_without_its_manifest() {
    for seed in 0..100 {
        lose_power_after_an_erase(seed, false);
        lose_power_after_an_erase(seed, true);
    }
}

#[test]
fn no_block_of_segments_is_lost_or_wrong_after_kills() {
    for seed in 0..30 {
        in_world(seed, move || crash_rounds(seed, false));
    }
}

#[test]
fn no_block_of_durable_segments_is_lost_or_wrong_after_power_losses() {
    for seed in 0..30 {
        in_world(seed, move || crash_rounds(seed, true));
    }
}

/// A write waited for the footer, the truncation and the sync of each full segment, and for the
/// file and the header of the next one.
#[test]
fn a_full_segment_is_sealed_and_the_next_one_created_while_others_are_written() {
    let ms = Duration::from_millis;
    for durable in [false, true] {
        let body = move || {
            let call = |time| Latency { min: ms(time), ..Latency::default() };
            let settings = DiskSettings {
                write: call(40),
                sync: call(10),
                name: call(10),
                ..DiskSettings::without_latency(1)
            };
            let (disk, pool) = (new_disk(settings), conformance::pool());
            let (files, _) = open(&disk, &small_config(durable));
            let began = now();
            let blocks: Vec<_> = (0..60).map(|number| (number, 64 << 10)).collect();
            let stored = conformance::append(files.as_ref(), &pool, &blocks);
            let took = now().saturating_sub(began);
            let stats = files.disk_stats();
            assert!(stats.files >= 4 && stats.segments_failed == 0, "{stats:?}");
            // One after the other: 40 for blocks, 60 to seal, 50 to create, 10 to sync.
            assert!(took <= ms(100) * u32::try_from(stats.files).unwrap(), "{took:?}");
            assert_hits(files.as_ref(), &pool, &stored);
            assert_eq!(disk.violations(), []);
        };
        in_world(1, body);
    }
}

fn soon() -> Deadline {
    Deadline::after(&SystemClock, Duration::from_millis(100))
}

/// Reads blocks. Each is right, or it is not there. Returns how many were there.
fn count_hits(files: &SegmentFiles, pool: &Pool, blocks: &[StoredBlock]) -> usize {
    let mut hits = 0;
    for stored in blocks {
        let Some(slab) = pool.allocate(stored.length) else { continue };
        let request = Load { address: stored.address, key: key(stored.number), slab };
        if let LoadOutcome::Hit(slab) = files.load(vec![request], soon()).remove(0) {
            assert!(slab.host() == Some(&content(stored.number, stored.length)), "{stored:?}");
            hits += 1;
        }
    }
    hits
}

/// Runs a tier through faults, and checks every byte that it returns meanwhile and afterwards.
/// Returns the number of calls that failed.
fn fault_rounds(seed: u64) -> usize {
    let disk = new_disk(DiskSettings { seed, ..DiskSettings::default() });
    let config = small_config(seed.is_multiple_of(2));
    let pool = small_pool();
    let (files, _) = open(&disk, &config);
    let mut random = Random::new(seed, 0);
    for _ in 0..6 {
        disk.inject(Episode::draw(&mut random, now()..now() + Duration::from_millis(300)));
    }
    let (mut stored, mut failed) = (Vec::new(), 0);
    for start in (0..160).step_by(4) {
        let numbers = start..start + 4;
        let Some(slabs) = numbers.clone().map(|number| new_block(&pool, number)).collect() else {
            // Late transfers still have the memory.
            sleep(Duration::from_millis(50));
            continue;
        };
        for (number, result) in numbers.zip(files.append(slabs, soon())) {
            match result {
                Ok(address) => stored.push(StoredBlock { number, length: length(number), address }),
                Err(_) => failed += 1,
            }
        }
        let first = random.index_below(stored.len() + 1);
        count_hits(files.as_ref(), &pool, &stored[first..stored.len().min(first + 4)]);
        failed += usize::from(start % 20 == 0 && files.sync(soon()).is_err());
    }
    let end = disk.faults_end();
    disk.clear_faults();
    sleep(end.saturating_sub(now()) + Duration::from_secs(1));
    count_hits(files.as_ref(), &pool, &stored);
    drop(files);
    let (files, recovery) = open(&disk, &config);
    let recovered = recovery.live.iter().map(|(meta, address)| {
        let number = meta.written_unix_ms;
        StoredBlock { number, length: length(number), address: *address }
    });
    count_hits(files.as_ref(), &pool, &recovered.collect::<Vec<_>>());
    failed
}

fn new_block(pool: &Pool, number: u64) -> Option<(BlockFacts, Slab)> {
    let mut slab = pool.allocate(length(number))?;
    slab.fill_from(&content(number, length(number))).unwrap();
    Some((meta(number, length(number)), slab.seal()))
}

#[test]
fn a_tier_with_faults_returns_no_wrong_byte() {
    let failed = Arc::new(LeafMutex::new(0));
    for seed in 0..120 {
        let sum = Arc::clone(&failed);
        in_world(seed, move || *sum.lock().unwrap() += fault_rounds(seed));
    }
    assert!(*failed.lock().unwrap() > 500, "{failed:?}");
}
