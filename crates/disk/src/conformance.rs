//! What every layout and engine must do, as a library of checks that tests run over each.
//!
//! A check panics when an implementation breaks the contract of [`BlockFiles`].

use std::sync::Arc;
use std::time::Duration;

use cascade_block::{
    BlockKey, Deadline, Manifest, Namespace, NamespaceId, SystemClock, TenantSecret,
};
use cascade_memory::{HugePages, Pool, PoolConfig, Slab};

use crate::{Address, BlockFiles, DiskError, ReadOutcome, ReadRequest, RecordMeta, Recovery};

/// Opens the same file tier again, after the last handle on it was dropped.
pub type Reopen<'a> = dyn FnMut(&Pool) -> (Arc<dyn BlockFiles>, Recovery) + 'a;

/// A block that a check has stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoredBlock {
    /// Which one.
    pub number: u64,
    /// Its length.
    pub length: usize,
    /// Where it lies.
    pub address: Address,
}

/// Lengths around every boundary: pages, alignment of slabs, several pages.
pub const LENGTHS: [usize; 8] =
    [1, 511, 4096, 4097, 16 << 10, 128 << 10, (128 << 10) + 512, (256 << 10) + 5];

/// A pool of 64 MiB.
///
/// # Panics
/// If the machine has not that much memory.
pub fn pool() -> Pool {
    let capacity_bytes = 64 << 20;
    let config = PoolConfig { capacity_bytes, huge_pages: HugePages::Never, populate: false };
    Pool::new(&config).expect("64 MiB of memory")
}

/// A minute from now.
pub fn deadline() -> Deadline {
    Deadline::after(&SystemClock, Duration::from_secs(60))
}

/// The key of a block of these checks.
pub fn key(number: u64) -> BlockKey {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    bytes[8..16].copy_from_slice(&number.to_le_bytes());
    BlockKey::from_bytes(bytes)
}

/// The bytes of a block: different for every number, and of no period.
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

/// What a block's record says.
///
/// # Panics
/// If the block is 4 GiB or longer.
pub fn meta(number: u64, length: usize) -> RecordMeta {
    RecordMeta {
        key: key(number),
        digest: None,
        parent: number.checked_sub(1).map(key),
        namespace: NamespaceId::from_bytes([7; 16]),
        payload_bytes: u32::try_from(length).expect("blocks are short"),
        is_prefix: number.is_multiple_of(2),
        written_unix_ms: number,
        expires_unix_ms: None,
    }
}

/// A block, ready to be appended.
///
/// # Panics
/// If the pool is full.
pub fn block(pool: &Pool, number: u64, length: usize) -> (RecordMeta, Slab) {
    let mut slab = pool.allocate(length).expect("the pool has room");
    slab.copy_from_slice(&content(number, length));
    (meta(number, length), slab.seal())
}

/// Appends blocks one after the other in a batch.
///
/// # Panics
/// If one is refused.
pub fn append(files: &dyn BlockFiles, pool: &Pool, blocks: &[(u64, usize)]) -> Vec<StoredBlock> {
    let batch = blocks.iter().map(|&(number, length)| block(pool, number, length)).collect();
    let answers = files.append(batch, deadline());
    let stored = blocks.iter().zip(answers).map(|(&(number, length), address)| {
        let address = address.unwrap_or_else(|error| panic!("append block {number}: {error:?}"));
        StoredBlock { number, length, address }
    });
    stored.collect()
}

/// Reads blocks under a key that each is said to have.
///
/// # Panics
/// If the pool is full.
pub fn read_as(
    files: &dyn BlockFiles,
    pool: &Pool,
    blocks: &[(BlockKey, StoredBlock)],
) -> Vec<ReadOutcome> {
    let request = |(key, stored): &(BlockKey, StoredBlock)| ReadRequest {
        address: stored.address,
        key: *key,
        slab: pool.allocate(stored.length).expect("the pool has room"),
    };
    files.read(blocks.iter().map(request).collect(), deadline())
}

/// Reads blocks and demands every byte of them.
///
/// # Panics
/// If one is missing or wrong.
pub fn assert_hits(files: &dyn BlockFiles, pool: &Pool, blocks: &[StoredBlock]) {
    for chunk in blocks.chunks(64) {
        let requests: Vec<_> = chunk.iter().map(|stored| (key(stored.number), *stored)).collect();
        for (outcome, stored) in read_as(files, pool, &requests).into_iter().zip(chunk) {
            match outcome {
                ReadOutcome::Hit(slab) => {
                    assert!(slab[..] == content(stored.number, stored.length), "{stored:?}");
                }
                other => panic!("{stored:?}: {other:?}"),
            }
        }
    }
}

/// Reads blocks and demands that none is there.
///
/// # Panics
/// If one is.
pub fn assert_gone(files: &dyn BlockFiles, pool: &Pool, blocks: &[StoredBlock]) {
    let requests: Vec<_> = blocks.iter().map(|stored| (key(stored.number), *stored)).collect();
    for (outcome, stored) in read_as(files, pool, &requests).into_iter().zip(blocks) {
        assert!(matches!(outcome, ReadOutcome::Gone), "{stored:?}: {outcome:?}");
    }
}

/// Asserts that a recovery found these blocks and no others.
///
/// # Panics
/// If it did not.
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
    assert!(metas_match, "what was stored about the blocks came back");
}

fn numbered(numbers: std::ops::Range<u64>) -> Vec<(u64, usize)> {
    let length = |number: u64| LENGTHS[usize::try_from(number % 8).expect("below eight")];
    numbers.map(|number| (number, length(number))).collect()
}

/// Blocks of every length come back, in this process and after restarts.
///
/// # Panics
/// If they do not.
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

/// Removed blocks stay away, also after restarts with and without a checkpoint.
///
/// # Panics
/// If they do not.
pub fn removals_persist(reopen: &mut Reopen<'_>) {
    let pool = pool();
    let (files, _) = reopen(&pool);
    let stored = append(files.as_ref(), &pool, &numbered(0..48));
    let remove = |files: &dyn BlockFiles, gone: &[StoredBlock]| {
        let keys: Vec<_> = gone.iter().map(|each| (key(each.number), each.address)).collect();
        files.remove(&keys, deadline()).expect("a removal");
        assert_gone(files, &pool, gone);
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

/// A second key finds the same bytes, and keeps them when the first is removed.
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
        .alias(&aliases, deadline())
        .into_iter()
        .map(|address| address.expect("an alias"))
        .collect();
    let check = |files: &dyn BlockFiles| {
        let requests: Vec<_> = stored
            .iter()
            .zip(&addresses)
            .map(|(each, &address)| (key(each.number + 1000), StoredBlock { address, ..*each }))
            .collect();
        for (outcome, each) in read_as(files, &pool, &requests).into_iter().zip(&stored) {
            let ReadOutcome::Hit(slab) = outcome else { panic!("alias of {each:?}: {outcome:?}") };
            assert!(slab[..] == content(each.number, each.length), "alias of {each:?}");
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

/// With a capacity of at most 64 MiB, 128 MiB pass through, the oldest leaving first.
///
/// # Panics
/// If more is used than allowed, or something else is lost.
pub fn capacity_is_respected(reopen: &mut Reopen<'_>, capacity_bytes: u64) {
    let pool = pool();
    let (files, _) = reopen(&pool);
    let mut live: Vec<StoredBlock> = Vec::new();
    let mut is_full = false;
    for batch in 0..64 {
        let blocks: Vec<_> = (0..16).map(|at| (batch * 16 + at, 128 << 10)).collect();
        let mut open = blocks.clone();
        while !open.is_empty() {
            let slabs = open.iter().map(|&(number, length)| block(&pool, number, length)).collect();
            let answers = files.append(slabs, deadline());
            let mut refused = Vec::new();
            for (&(number, length), answer) in open.iter().zip(answers) {
                match answer {
                    Ok(address) => live.push(StoredBlock { number, length, address }),
                    Err(DiskError::Full { .. }) => refused.push((number, length)),
                    Err(error) => panic!("block {number}: {error:?}"),
                }
            }
            if !refused.is_empty() {
                is_full = true;
                let reclaimed = files.reclaim(&mut |_, _| false, deadline()).expect("a reclaim");
                assert!(reclaimed.bytes_freed > 0, "{reclaimed:?}");
                live.retain(|each| !reclaimed.dropped.contains(&(key(each.number), each.address)));
            }
            open = refused;
            assert!(files.used_bytes() <= capacity_bytes, "{:?}", files.stats());
        }
    }
    assert!(is_full, "the checks must fill the capacity");
    assert!(!live.iter().any(|each| each.number == 0), "the oldest is gone");
    assert_hits(files.as_ref(), &pool, &live);
    drop(files);
    let (files, recovery) = reopen(&pool);
    assert_recovered(&recovery, &live);
    assert_hits(files.as_ref(), &pool, &live);
    assert!(files.used_bytes() <= capacity_bytes, "{:?}", files.stats());
}

/// Restarts of a full tier, each with a removal, take nothing from what reclaiming needs.
///
/// # Panics
/// If a removal or a reclaim is refused, more is used than allowed, or what was removed comes back.
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
        let gone = live.swap_remove(live.len() / 2);
        files.remove(&[(key(gone.number), gone.address)], deadline()).expect("a removal");
        assert!(files.used_bytes() <= capacity_bytes, "{:?}", files.stats());
    }
    let (files, recovery) = reopen(&pool);
    assert_recovered(&recovery, &live);
    for _ in 0..60 {
        let reclaimed = files.reclaim(&mut |_, _| false, deadline()).expect("a reclaim");
        live.retain(|each| !reclaimed.dropped.contains(&(key(each.number), each.address)));
    }
    assert!(files.used_bytes() < capacity_bytes / 2, "{:?}", files.stats());
    drop(files);
    let (files, recovery) = reopen(&pool);
    assert_recovered(&recovery, &live);
    assert_hits(files.as_ref(), &pool, &live);
}

/// What a reclaim is told to keep is kept, with its aliases and across restarts.
///
/// # Panics
/// If it is not.
pub fn reclaim_keeps_selected_blocks(reopen: &mut Reopen<'_>) {
    let pool = pool();
    let (files, _) = reopen(&pool);
    let mut live = append(files.as_ref(), &pool, &numbered(0..64));
    for _ in 0..12 {
        let reclaimed =
            files.reclaim(&mut |meta, _| meta.is_prefix, deadline()).expect("a reclaim");
        for (moved, from, to) in &reclaimed.moved {
            let each = live.iter_mut().find(|each| key(each.number) == *moved).expect("known");
            assert_eq!(each.address, *from);
            // The old address leads to the new one until the next reclaim.
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

/// Wrong questions get the answer that they deserve, and break nothing.
///
/// # Panics
/// If they do not.
pub fn invalid_requests_fail_alone(reopen: &mut Reopen<'_>) {
    let pool = pool();
    let (files, _) = reopen(&pool);
    let stored = append(files.as_ref(), &pool, &[(1, 4096), (2, 8192)]);
    let (one, two) = (stored[0], stored[1]);
    let wrong_key = read_as(files.as_ref(), &pool, &[(key(2), one), (key(9), one)]);
    assert!(wrong_key.iter().all(|outcome| matches!(outcome, ReadOutcome::Gone)), "{wrong_key:?}");
    let wrong_length = StoredBlock { length: 4096, ..two };
    let outcome = read_as(files.as_ref(), &pool, &[(key(2), wrong_length)]).remove(0);
    assert!(
        matches!(outcome, ReadOutcome::Failed(DiskError::LengthMismatch { .. })),
        "{outcome:?}"
    );
    let nowhere = StoredBlock { address: Address::from_u64(u64::MAX - 12345), ..one };
    assert_gone(files.as_ref(), &pool, &[StoredBlock { address: nowhere.address, ..one }]);
    let (meta_one, slab) = block(&pool, 3, 4096);
    let lying = RecordMeta { payload_bytes: 4095, ..meta_one };
    let refused = files.append(vec![(lying, slab)], deadline()).remove(0);
    assert!(matches!(refused, Err(DiskError::LengthMismatch { .. })), "{refused:?}");
    let lost = files.alias(&[(meta(5, 4096), nowhere.address)], deadline()).remove(0);
    assert!(matches!(lost, Err(DiskError::NoTarget)), "{lost:?}");
    files.remove(&[(key(1), two.address), (key(77), one.address)], deadline()).expect("skipped");
    assert_hits(files.as_ref(), &pool, &stored);
}

/// Manifests stand beside the blocks, and a damaged one is reported.
///
/// # Panics
/// If they do not.
pub fn manifests_are_kept(reopen: &mut Reopen<'_>) {
    let pool = pool();
    let (files, _) = reopen(&pool);
    let manifest = Manifest::new().with("dtype", "bf16").with("block_tokens", "128");
    let namespace = Namespace::new(manifest, &TenantSecret::new([1, 2, 3]));
    for _ in 0..2 {
        files.register_manifest(&namespace, deadline()).expect("a manifest");
    }
    drop(files);
    let (files, recovery) = reopen(&pool);
    assert!(recovery.bad_manifests.is_empty(), "{recovery:?}");
    let found = files.manifests(deadline()).expect("manifests");
    let expected = crate::StoredManifest::Good {
        namespace: namespace.id(),
        manifest: namespace.manifest().clone(),
    };
    assert_eq!(found, [expected]);
}
