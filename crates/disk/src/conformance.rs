//! The conformance suite: checks that the file tier must pass with every I/O engine.
//!
//! A check panics if the tier breaks the contract of [`SegmentFiles`].

use std::sync::Arc;
use std::time::Duration;

use cascade_block::{BlockKey, Manifest, Namespace, NamespaceId, TenantSecret};
use cascade_memory::{HugePages, Pool, PoolConfig, Slab};
use cascade_runtime::{Clock, Deadline, SystemClock};
use cascade_tier::tier::{Tier as _, TierError};

use crate::io::FileIo;
use crate::{
    Address, BlockFacts, DiskError, FilesConfig, Load, LoadOutcome, Recovery, SegmentFiles,
};

/// Opens the same file tier again after the last handle to it was dropped.
pub type Reopen<'a> = dyn FnMut(&Pool) -> (Arc<SegmentFiles>, Recovery) + 'a;

/// Opens a file tier. Also returns what it recovered.
///
/// # Errors
/// As [`SegmentFiles::open`].
pub fn open(
    config: FilesConfig,
    clock: Arc<dyn Clock>,
    pool: &Pool,
    deadline: Deadline,
) -> Result<(Arc<SegmentFiles>, Recovery), DiskError> {
    let files = SegmentFiles::open(config, clock, pool, deadline)?;
    let recovery = files.recovery();
    Ok((Arc::new(files), recovery))
}

/// As [`open`], with the caller's I/O.
///
/// # Errors
/// As [`SegmentFiles::open_with`].
pub fn open_with(
    config: FilesConfig,
    io: FileIo,
    deadline: Deadline,
) -> Result<(Arc<SegmentFiles>, Recovery), DiskError> {
    let files = SegmentFiles::open_with(config, io, deadline)?;
    let recovery = files.recovery();
    Ok((Arc::new(files), recovery))
}

/// A block that a check stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoredBlock {
    /// Its number; key and content follow from it.
    pub number: u64,
    /// Its length.
    pub length: usize,
    /// Its address.
    pub address: Address,
}

/// Lengths around each boundary: one page, slab alignment, several pages.
pub const LENGTHS: [usize; 8] =
    [1, 511, 4096, 4097, 16 << 10, 128 << 10, (128 << 10) + 512, (256 << 10) + 5];

/// A pool of 64 MiB.
///
/// # Panics
/// If the machine does not have 64 MiB of memory.
pub fn pool() -> Pool {
    let capacity_bytes = 64 << 20;
    let config = PoolConfig { capacity_bytes, huge_pages: HugePages::Never, populate: false };
    Pool::new(&config).expect("the machine has 64 MiB of memory")
}

/// A deadline one minute from now.
pub fn deadline() -> Deadline {
    Deadline::after(&SystemClock, Duration::from_secs(60))
}

/// The key of the block with this number.
pub fn key(number: u64) -> BlockKey {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    bytes[8..16].copy_from_slice(&number.to_le_bytes());
    BlockKey::from_bytes(bytes)
}

/// The content of a block: pseudo-random bytes that differ for every number.
pub fn content(number: u64, length: usize) -> Vec<u8> {
    let mut state = number.wrapping_add(0x5851_f42d_4c95_7f2d);
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

/// The metadata of the block with this number.
///
/// # Panics
/// If the block is 4 GiB or longer.
pub fn meta(number: u64, length: usize) -> BlockFacts {
    BlockFacts {
        key: key(number),
        digest: None,
        parent: number.checked_sub(1).map(key),
        namespace: NamespaceId::from_bytes([7; 16]),
        bytes: u32::try_from(length).expect("blocks are short"),
        is_prefix: number.is_multiple_of(2),
        written_unix_ms: number,
        expires_unix_ms: None,
    }
}

/// A block to append.
///
/// # Panics
/// If the pool is full.
pub fn block(pool: &Pool, number: u64, length: usize) -> (BlockFacts, Slab) {
    let mut slab = pool.allocate(length).expect("the pool has room");
    slab.fill_from(&content(number, length)).expect("host memory never fails");
    (meta(number, length), slab.seal())
}

/// Appends blocks as one batch.
///
/// # Panics
/// If a block is rejected.
pub fn append(files: &SegmentFiles, pool: &Pool, blocks: &[(u64, usize)]) -> Vec<StoredBlock> {
    let batch = blocks.iter().map(|&(number, length)| block(pool, number, length)).collect();
    let results = files.append(batch, deadline());
    let stored = blocks.iter().zip(results).map(|(&(number, length), address)| {
        let address = address.unwrap_or_else(|error| panic!("append block {number}: {error:?}"));
        StoredBlock { number, length, address }
    });
    stored.collect()
}

/// Reads blocks, each under the given key.
///
/// # Panics
/// If the pool is full.
pub fn read_as(
    files: &SegmentFiles,
    pool: &Pool,
    blocks: &[(BlockKey, StoredBlock)],
) -> Vec<LoadOutcome> {
    let request = |(key, stored): &(BlockKey, StoredBlock)| Load {
        address: stored.address,
        key: *key,
        slab: pool.allocate(stored.length).expect("the pool has room"),
    };
    files.load(blocks.iter().map(request).collect(), deadline())
}

/// Reads blocks and compares every byte.
///
/// # Panics
/// If a block is missing or wrong.
pub fn assert_hits(files: &SegmentFiles, pool: &Pool, blocks: &[StoredBlock]) {
    for chunk in blocks.chunks(64) {
        let requests: Vec<_> = chunk.iter().map(|stored| (key(stored.number), *stored)).collect();
        for (outcome, stored) in read_as(files, pool, &requests).into_iter().zip(chunk) {
            match outcome {
                LoadOutcome::Hit(slab) => {
                    assert!(
                        slab.host() == Some(&content(stored.number, stored.length)),
                        "{stored:?}"
                    );
                }
                other => panic!("{stored:?}: {other:?}"),
            }
        }
    }
}

/// Reads blocks and checks that each is `Gone`.
///
/// # Panics
/// If a block is found.
pub fn assert_gone(files: &SegmentFiles, pool: &Pool, blocks: &[StoredBlock]) {
    let requests: Vec<_> = blocks.iter().map(|stored| (key(stored.number), *stored)).collect();
    for (outcome, stored) in read_as(files, pool, &requests).into_iter().zip(blocks) {
        assert!(matches!(outcome, LoadOutcome::Gone), "{stored:?}: {outcome:?}");
    }
}

/// Asserts that a recovery found exactly these blocks.
///
/// # Panics
/// If it found others.
pub fn assert_recovered(recovery: &Recovery, blocks: &[StoredBlock]) {
    let mut found: Vec<_> = recovery.live.iter().map(|(meta, at)| (meta.key, *at)).collect();
    let mut expected: Vec<_> =
        blocks.iter().map(|stored| (key(stored.number), stored.address)).collect();
    found.sort_unstable();
    expected.sort_unstable();
    assert_eq!(found.len(), expected.len(), "{recovery:?}");
    assert!(found == expected, "{recovery:?}");
    let metas_match = recovery.live.iter().all(|(found, _)| {
        let stored = blocks.iter().find(|stored| key(stored.number) == found.key);
        stored.is_some_and(|stored| *found == meta(stored.number, stored.length))
    });
    assert!(metas_match, "the metadata of the blocks was recovered");
}

fn numbered(numbers: std::ops::Range<u64>) -> Vec<(u64, usize)> {
    let length = |number: u64| LENGTHS[usize::try_from(number % 8).expect("below eight")];
    numbers.map(|number| (number, length(number))).collect()
}

/// Blocks of every length are read back, in the same process and after restarts.
///
/// # Panics
/// If they are not.
pub fn blocks_are_read_back(reopen: &mut Reopen<'_>) {
    let pool = pool();
    let (files, recovery) = reopen(&pool);
    assert!(recovery.live.is_empty(), "{recovery:?}");
    let mut stored = Vec::new();
    for start in [0, 30, 60, 90] {
        stored.extend(append(files.as_ref(), &pool, &numbered(start..start + 30)));
    }
    assert_hits(files.as_ref(), &pool, &stored);
    drop(files);
    for _ in 0..2 {
        let (files, recovery) = reopen(&pool);
        assert_recovered(&recovery, &stored);
        assert_eq!((recovery.torn_records, recovery.damaged_structures), (0, 0));
        assert_hits(files.as_ref(), &pool, &stored);
        files.checkpoint(deadline()).expect("a checkpoint");
    }
}

/// Removed blocks stay removed after restarts with and without a checkpoint.
///
/// # Panics
/// If a removed block comes back.
pub fn removals_persist(reopen: &mut Reopen<'_>) {
    let pool = pool();
    let (files, _) = reopen(&pool);
    let stored = append(files.as_ref(), &pool, &numbered(0..48));
    let remove = |files: &SegmentFiles, removed: &[StoredBlock]| {
        let keys: Vec<_> = removed.iter().map(|each| (key(each.number), each.address)).collect();
        files.remove(&keys, deadline()).expect("a removal");
        assert_gone(files, &pool, removed);
    };
    remove(files.as_ref(), &stored[..16]);
    assert_hits(files.as_ref(), &pool, &stored[16..]);
    drop(files);
    let (files, recovery) = reopen(&pool);
    assert_recovered(&recovery, &stored[16..]);
    files.checkpoint(deadline()).expect("a checkpoint");
    remove(files.as_ref(), &stored[16..32]);
    drop(files);
    let (files, recovery) = reopen(&pool);
    assert_recovered(&recovery, &stored[32..]);
    assert_gone(files.as_ref(), &pool, &stored[..32]);
    let again = append(files.as_ref(), &pool, &numbered(0..8));
    drop(files);
    let (files, recovery) = reopen(&pool);
    let all: Vec<_> = stored[32..].iter().chain(&again).copied().collect();
    assert_recovered(&recovery, &all);
    assert_hits(files.as_ref(), &pool, &all);
}

/// An alias finds the same bytes and keeps them when the first key is removed.
///
/// # Panics
/// If it does not.
pub fn aliases_keep_bytes(reopen: &mut Reopen<'_>) {
    let pool = pool();
    let (files, _) = reopen(&pool);
    let stored = append(files.as_ref(), &pool, &numbered(0..8));
    let aliases: Vec<_> =
        stored.iter().map(|each| (meta(each.number + 1000, each.length), each.address)).collect();
    let addresses: Vec<_> = files
        .alias_blocks(&aliases, deadline())
        .into_iter()
        .map(|address| address.expect("an alias"))
        .collect();
    let check = |files: &SegmentFiles| {
        let requests: Vec<_> = stored
            .iter()
            .zip(&addresses)
            .map(|(each, &address)| (key(each.number + 1000), StoredBlock { address, ..*each }))
            .collect();
        for (outcome, each) in read_as(files, &pool, &requests).into_iter().zip(&stored) {
            let LoadOutcome::Hit(slab) = outcome else { panic!("alias of {each:?}: {outcome:?}") };
            assert!(slab.host() == Some(&content(each.number, each.length)), "alias of {each:?}");
        }
    };
    check(files.as_ref());
    let firsts: Vec<_> = stored.iter().map(|each| (key(each.number), each.address)).collect();
    files.remove(&firsts, deadline()).expect("a removal");
    assert_gone(files.as_ref(), &pool, &stored);
    check(files.as_ref());
    files.checkpoint(deadline()).expect("a checkpoint");
    drop(files);
    let (files, recovery) = reopen(&pool);
    assert_eq!(recovery.live.len(), stored.len(), "{recovery:?}");
    check(files.as_ref());
    let seconds: Vec<_> = aliases.iter().zip(&addresses).map(|((m, _), at)| (m.key, *at)).collect();
    files.remove(&seconds, deadline()).expect("a removal");
    drop(files);
    let (_files, recovery) = reopen(&pool);
    assert!(recovery.live.is_empty(), "{recovery:?}");
}

/// Appends 128 MiB to a tier of at most 64 MiB; the oldest blocks are evicted first.
///
/// # Panics
/// If more than the capacity is used, or another block is lost.
pub fn capacity_is_respected(reopen: &mut Reopen<'_>, capacity_bytes: u64) {
    let pool = pool();
    let (files, _) = reopen(&pool);
    let mut live: Vec<StoredBlock> = Vec::new();
    let mut is_full = false;
    for batch in 0..64 {
        let blocks: Vec<_> = (0..16).map(|at| (batch * 16 + at, 128 << 10)).collect();
        let mut unstored = blocks.clone();
        while !unstored.is_empty() {
            let slabs =
                unstored.iter().map(|&(number, length)| block(&pool, number, length)).collect();
            let results = files.append(slabs, deadline());
            let mut rejected = Vec::new();
            for (&(number, length), result) in unstored.iter().zip(results) {
                match result {
                    Ok(address) => live.push(StoredBlock { number, length, address }),
                    Err(DiskError::Full { .. }) => rejected.push((number, length)),
                    Err(error) => panic!("block {number}: {error:?}"),
                }
            }
            if !rejected.is_empty() {
                is_full = true;
                let reclaimed = files.reclaim(&mut |_, _| false, deadline()).expect("a reclaim");
                assert!(reclaimed.freed_bytes > 0, "{reclaimed:?}");
                live.retain(|each| !reclaimed.dropped.contains(&(key(each.number), each.address)));
            }
            unstored = rejected;
            assert!(files.used_bytes() <= capacity_bytes, "{:?}", files.disk_stats());
        }
    }
    assert!(is_full, "the check fills the capacity");
    assert!(!live.iter().any(|each| each.number == 0), "the oldest block was evicted");
    assert_hits(files.as_ref(), &pool, &live);
    drop(files);
    let (files, recovery) = reopen(&pool);
    assert_recovered(&recovery, &live);
    assert_hits(files.as_ref(), &pool, &live);
    assert!(files.used_bytes() <= capacity_bytes, "{:?}", files.disk_stats());
}

/// Restarts of a full tier, each with one removal, do not use up the reserve for reclaims.
///
/// # Panics
/// If a removal or a reclaim fails, more than the capacity is used, or a removed block
/// comes back.
pub fn restarts_leave_space_for_reclaim(reopen: &mut Reopen<'_>, capacity_bytes: u64) {
    let pool = pool();
    let (files, _) = reopen(&pool);
    let mut live: Vec<StoredBlock> = Vec::new();
    for number in 0.. {
        match files.append(vec![block(&pool, number, 128 << 10)], deadline()).remove(0) {
            Ok(address) => live.push(StoredBlock { number, length: 128 << 10, address }),
            Err(DiskError::Full { .. }) => break,
            Err(error) => panic!("block {number}: {error:?}"),
        }
    }
    drop(files);
    for _ in 0..40 {
        let (files, _) = reopen(&pool);
        let removed = live.swap_remove(live.len() / 2);
        files.remove(&[(key(removed.number), removed.address)], deadline()).expect("a removal");
        assert!(files.used_bytes() <= capacity_bytes, "{:?}", files.disk_stats());
    }
    let (files, recovery) = reopen(&pool);
    assert_recovered(&recovery, &live);
    for _ in 0..60 {
        let reclaimed = files.reclaim(&mut |_, _| false, deadline()).expect("a reclaim");
        live.retain(|each| !reclaimed.dropped.contains(&(key(each.number), each.address)));
    }
    assert!(files.used_bytes() < capacity_bytes / 2, "{:?}", files.disk_stats());
    drop(files);
    let (files, recovery) = reopen(&pool);
    assert_recovered(&recovery, &live);
    assert_hits(files.as_ref(), &pool, &live);
}

/// Blocks that `keep` selects survive a reclaim, with their aliases and across restarts.
///
/// # Panics
/// If they do not.
pub fn reclaim_keeps_selected_blocks(reopen: &mut Reopen<'_>) {
    let pool = pool();
    let (files, _) = reopen(&pool);
    let mut live = append(files.as_ref(), &pool, &numbered(0..64));
    for _ in 0..12 {
        let reclaimed =
            files.reclaim(&mut |meta, _| meta.is_prefix, deadline()).expect("a reclaim");
        for (moved, from, to) in &reclaimed.moved {
            let each = live
                .iter_mut()
                .find(|each| key(each.number) == *moved)
                .expect("a moved block was live");
            assert_eq!(each.address, *from);
            // The old address resolves to the new one until the next reclaim.
            assert_hits(files.as_ref(), &pool, &[*each]);
            each.address = *to;
        }
        live.retain(|each| !reclaimed.dropped.contains(&(key(each.number), each.address)));
        assert_hits(files.as_ref(), &pool, &live);
    }
    drop(files);
    let (files, recovery) = reopen(&pool);
    assert_recovered(&recovery, &live);
    assert_hits(files.as_ref(), &pool, &live);
}

/// An invalid request fails with its own error and changes no other block.
///
/// # Panics
/// If it does not.
pub fn invalid_requests_fail_alone(reopen: &mut Reopen<'_>) {
    let pool = pool();
    let (files, _) = reopen(&pool);
    let stored = append(files.as_ref(), &pool, &[(1, 4096), (2, 8192)]);
    let (one, two) = (stored[0], stored[1]);
    let wrong_key = read_as(files.as_ref(), &pool, &[(key(2), one), (key(9), one)]);
    assert!(wrong_key.iter().all(|outcome| matches!(outcome, LoadOutcome::Gone)), "{wrong_key:?}");
    let wrong_length = StoredBlock { length: 4096, ..two };
    let outcome = read_as(files.as_ref(), &pool, &[(key(2), wrong_length)]).remove(0);
    assert!(matches!(outcome, LoadOutcome::Failed(TierError::Failed(_))), "{outcome:?}");
    let nowhere = StoredBlock { address: Address(u64::MAX - 12345), ..one };
    assert_gone(files.as_ref(), &pool, &[StoredBlock { address: nowhere.address, ..one }]);
    let (meta_one, slab) = block(&pool, 3, 4096);
    let wrong_meta = BlockFacts { bytes: 4095, ..meta_one };
    let rejected = files.append(vec![(wrong_meta, slab)], deadline()).remove(0);
    assert!(matches!(rejected, Err(DiskError::LengthMismatch { .. })), "{rejected:?}");
    let no_target = files.alias_blocks(&[(meta(5, 4096), nowhere.address)], deadline()).remove(0);
    assert!(matches!(no_target, Err(DiskError::NoTarget)), "{no_target:?}");
    files
        .remove(&[(key(1), two.address), (key(77), one.address)], deadline())
        .expect("unknown pairs are skipped");
    assert_hits(files.as_ref(), &pool, &stored);
}

/// Manifests are stored beside the blocks and read back after a restart.
///
/// # Panics
/// If they are not.
pub fn manifests_are_kept(reopen: &mut Reopen<'_>) {
    let pool = pool();
    let (files, _) = reopen(&pool);
    let manifest = Manifest::new().with("dtype", "bf16").with("block_tokens", "128");
    let namespace = Namespace::new(manifest, &TenantSecret::new([1, 2, 3]));
    for _ in 0..2 {
        files.register(&namespace, deadline()).expect("a manifest");
    }
    drop(files);
    let (files, recovery) = reopen(&pool);
    assert!(recovery.invalid_manifests.is_empty(), "{recovery:?}");
    let found = files.manifests(deadline()).expect("manifests");
    assert_eq!(found, [(namespace.id(), namespace.manifest().clone())]);
}
