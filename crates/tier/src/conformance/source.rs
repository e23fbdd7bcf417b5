//! Conformance checks of sources, for the built-in one and for third parties'.
//!
//! Each check takes a new source and panics with a description of the failure. Call [`all`] from a
//! test.

mod queue;

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use cascade_block::{BlockKey, checksum};
use cascade_memory::Pool;
use cascade_runtime::{Cancel, Clock, Deadline, SystemClock, thread};

use crate::conformance::block_store::bytes_of;
use crate::source::{LocatedBlock, Source, SourceLimit};
use crate::tier::{Address, Load, LoadOutcome, TierError};

use queue::CheckedQueue;

/// Blocks that a source may take after its deadline has passed or it was cancelled: those that are
/// in flight by then.
const LATE_BLOCKS_MAX: u64 = 4096;
/// Blocks of a large call that may end before a call for one block does.
const BLOCKS_BEFORE_SMALL_MAX: u64 = 20_000;

/// Puts a block at the place that a source looks at.
type PutBlock = Box<dyn Fn(&BlockKey, &[u8])>;
/// Makes all calls wait until the value is dropped.
type Stall = Box<dyn Fn() -> Box<dyn Any>>;

/// The source of one check, and how somebody else changes what it finds.
pub struct SourceSubject {
    /// A new source, which finds no block.
    pub source: Arc<dyn Source>,
    /// Adds a block, or replaces its bytes.
    pub put: PutBlock,
    /// Removes a block.
    pub remove: Box<dyn Fn(&BlockKey)>,
    /// Makes all calls to the source wait, if that is possible. Without it, the checks of a source
    /// that does not answer are left out.
    pub stall: Option<Stall>,
}

/// Runs every check, each on a new source.
///
/// # Panics
/// If a check fails.
pub fn all(pool: &Pool, make: &mut dyn FnMut() -> SourceSubject) {
    let checks: [fn(&SourceSubject, &Pool); 13] = [
        a_new_source_has_no_blocks,
        an_empty_batch_succeeds,
        a_located_block_is_fetched,
        blocks_of_any_size_are_fetched,
        a_removed_block_is_not_found,
        a_removed_block_is_gone,
        a_replaced_block_is_never_other_bytes,
        a_block_that_was_never_there_is_no_hit,
        a_slab_of_another_length_is_no_hit,
        each_block_of_a_queue_ends_once,
        a_call_after_its_deadline_ends,
        a_cancelled_call_ends,
        a_call_for_one_block_ends_beside_one_for_many,
    ];
    for check in checks {
        check(&make(), pool);
    }
    let stalled: [fn(&SourceSubject, &Pool, &Stall); 2] =
        [a_call_ends_at_its_deadline_without_an_answer, a_call_ends_when_it_is_cancelled];
    for check in stalled {
        let subject = make();
        if let Some(stall) = &subject.stall {
            check(&subject, pool, stall);
        }
    }
    let subject = make();
    subject.source.probe(soon()).expect("a source that works can be reached");
    assert_eq!(subject.source.stuck_calls(), 0);
    subject.source.close();
}

impl SourceSubject {
    fn put(&self, keys: &[BlockKey], bytes: usize) {
        for key in keys {
            (self.put)(key, &bytes_of(key, bytes));
        }
    }

    fn locate(&self, keys: &[BlockKey]) -> Vec<Option<LocatedBlock>> {
        let cancel = Cancel::new();
        let limit = SourceLimit { deadline: soon(), cancel: &cancel };
        let located = self.source.locate(keys, &limit).expect("a source that works answers");
        assert_eq!(located.len(), keys.len(), "one answer for each key");
        located
    }

    fn locate_one(&self, key: BlockKey) -> LocatedBlock {
        self.locate(&[key])[0].unwrap_or_else(|| panic!("{key} is there and was not located"))
    }

    fn fetch(&self, pool: &Pool, key: BlockKey, address: Address, bytes: usize) -> LoadOutcome {
        let cancel = Cancel::new();
        let limit = SourceLimit { deadline: soon(), cancel: &cancel };
        let slab = pool.allocate(bytes).expect("the checks fit the pool");
        let mut fetched = self.source.fetch(vec![Load { key, address, slab }], &limit);
        assert_eq!(fetched.len(), 1, "one result for each block");
        fetched.remove(0)
    }

    /// Fetches blocks of a queue.
    fn fetch_all(&self, queue: &mut CheckedQueue<'_>, deadline: Deadline, cancel: &Cancel) {
        self.source.fetch_each(queue, &SourceLimit { deadline, cancel });
        queue.assert_ended();
    }
}

impl fmt::Debug for SourceSubject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SourceSubject").field("source", &self.source).finish_non_exhaustive()
    }
}

fn soon() -> Deadline {
    Deadline::after(&SystemClock, Duration::from_secs(30))
}

fn keys(range: std::ops::Range<u8>) -> Vec<BlockKey> {
    range.map(|n| BlockKey::from_bytes([n.wrapping_mul(37); 32])).collect()
}

fn assert_bytes(key: BlockKey, outcome: &LoadOutcome) {
    match outcome {
        LoadOutcome::Hit(slab) => {
            assert!(
                slab.host() == Some(&bytes_of(&key, slab.len())),
                "{key} came back with other bytes"
            );
        }
        other => panic!("{key} is there and is {other:?}"),
    }
}

fn a_new_source_has_no_blocks(subject: &SourceSubject, _: &Pool) {
    assert_eq!(subject.locate(&keys(0..20)), [None; 20]);
}

fn an_empty_batch_succeeds(subject: &SourceSubject, pool: &Pool) {
    assert_eq!(subject.locate(&[]), []);
    let cancel = Cancel::new();
    let limit = SourceLimit { deadline: soon(), cancel: &cancel };
    assert!(subject.source.fetch(Vec::new(), &limit).is_empty());
    subject.fetch_all(&mut CheckedQueue::new(pool, &[]), soon(), &cancel);
}

fn a_located_block_is_fetched(subject: &SourceSubject, pool: &Pool) {
    let keys = keys(0..40);
    // Every other block.
    let there: Vec<BlockKey> = keys.iter().copied().step_by(2).collect();
    subject.put(&there, 5000);
    let located = subject.locate(&keys);
    for (at, (key, block)) in keys.iter().zip(&located).enumerate() {
        let Some(block) = block else {
            assert!(at % 2 == 1, "{key} is there and was not located");
            continue;
        };
        assert!(at % 2 == 0, "{key} was never there and was located");
        assert_eq!((block.facts.key, block.facts.bytes), (*key, 5000));
        assert_eq!(block.checksum, checksum(&bytes_of(key, 5000)), "the checksum of {key}");
        assert_bytes(*key, &subject.fetch(pool, *key, block.address, 5000));
    }
}

fn blocks_of_any_size_are_fetched(subject: &SourceSubject, pool: &Pool) {
    let sizes = [1, 2, 511, 512, 513, 4095, 4096, 4097, 65_535, 65_537, 1_000_003];
    for (key, size) in keys(0..11).into_iter().zip(sizes) {
        subject.put(&[key], size);
        let block = subject.locate_one(key);
        assert_eq!(block.facts.bytes as usize, size);
        assert_bytes(key, &subject.fetch(pool, key, block.address, size));
    }
}

fn a_removed_block_is_not_found(subject: &SourceSubject, _: &Pool) {
    let keys = keys(1..3);
    subject.put(&keys, 5000);
    subject.locate(&keys);
    (subject.remove)(&keys[0]);
    let located = subject.locate(&keys);
    assert_eq!(located[0], None, "it was removed");
    assert!(located[1].is_some(), "it is there");
}

fn a_removed_block_is_gone(subject: &SourceSubject, pool: &Pool) {
    let key = keys(1..2)[0];
    subject.put(&[key], 5000);
    let block = subject.locate_one(key);
    (subject.remove)(&key);
    let fetched = subject.fetch(pool, key, block.address, 5000);
    assert!(matches!(fetched, LoadOutcome::Gone), "it was removed and is {fetched:?}");
}

/// The block that was located is gone, although its key is there.
fn a_replaced_block_is_never_other_bytes(subject: &SourceSubject, pool: &Pool) {
    let key = keys(1..2)[0];
    subject.put(&[key], 5000);
    let block = subject.locate_one(key);
    (subject.remove)(&key);
    let other: Vec<u8> = bytes_of(&key, 5000).iter().map(|byte| !byte).collect();
    (subject.put)(&key, &other);
    let fetched = subject.fetch(pool, key, block.address, 5000);
    let is_refused = matches!(fetched, LoadOutcome::Gone | LoadOutcome::Damaged);
    assert!(is_refused, "its bytes were replaced and it is {fetched:?}");
}

fn a_block_that_was_never_there_is_no_hit(subject: &SourceSubject, pool: &Pool) {
    let keys = keys(1..3);
    subject.put(&keys[..1], 5000);
    let block = subject.locate_one(keys[0]);
    for (key, address) in [(keys[1], block.address), (keys[1], Address(u64::MAX - 1))] {
        let fetched = subject.fetch(pool, key, address, 5000);
        assert!(!matches!(fetched, LoadOutcome::Hit(_)), "{key} was never there and is a hit");
    }
}

fn a_slab_of_another_length_is_no_hit(subject: &SourceSubject, pool: &Pool) {
    let key = keys(1..2)[0];
    subject.put(&[key], 5000);
    let block = subject.locate_one(key);
    for bytes in [4999, 5001] {
        let fetched = subject.fetch(pool, key, block.address, bytes);
        assert!(!matches!(fetched, LoadOutcome::Hit(_)), "{bytes} bytes are a hit");
    }
}

/// A queue of more blocks than the pool has memory for; some were removed since they were located.
fn each_block_of_a_queue_ends_once(subject: &SourceSubject, pool: &Pool) {
    let keys = keys(0..200);
    subject.put(&keys, 4096);
    let located: Vec<LocatedBlock> = subject.locate(&keys).into_iter().flatten().collect();
    assert_eq!(located.len(), keys.len());
    for key in &keys[..50] {
        (subject.remove)(key);
    }
    let mut queue = CheckedQueue::new(pool, &located);
    queue.in_flight_max = 16;
    subject.fetch_all(&mut queue, soon(), &Cancel::new());
    assert_eq!((queue.hits, queue.misses, queue.failures), (150, 50, 0));
}

fn a_call_after_its_deadline_ends(subject: &SourceSubject, pool: &Pool) {
    subject.put(&keys(0..4), 4096);
    let located: Vec<LocatedBlock> = subject.locate(&keys(0..4)).into_iter().flatten().collect();
    let (passed, cancel) = (Deadline::at(Duration::ZERO), Cancel::new());
    let limit = SourceLimit { deadline: passed, cancel: &cancel };
    if let Ok(answers) = subject.source.locate(&keys(0..4), &limit) {
        assert_eq!(answers.len(), 4, "one answer for each key");
    }
    subject.fetch_all(&mut CheckedQueue::new(pool, &located), passed, &cancel);
    // A queue that never ends: the call has to.
    let deadline = Deadline::after(&SystemClock, Duration::from_millis(20));
    let mut queue = CheckedQueue::new(pool, &located);
    queue.is_endless = true;
    queue.is_over = Box::new(move || deadline.has_passed(&SystemClock));
    subject.fetch_all(&mut queue, deadline, &cancel);
}

fn a_cancelled_call_ends(subject: &SourceSubject, pool: &Pool) {
    subject.put(&keys(0..4), 4096);
    let located: Vec<LocatedBlock> = subject.locate(&keys(0..4)).into_iter().flatten().collect();
    let cancel = Arc::new(Cancel::new());
    let mut queue = CheckedQueue::new(pool, &located);
    queue.is_endless = true;
    let (ended, cancelled) = (AtomicU64::new(0), Arc::clone(&cancel));
    queue.is_over = Box::new(move || {
        if ended.fetch_add(1, Ordering::Relaxed) == 100 {
            cancelled.set();
        }
        cancelled.is_set()
    });
    subject.fetch_all(&mut queue, soon(), &cancel);
}

fn a_call_for_one_block_ends_beside_one_for_many(subject: &SourceSubject, pool: &Pool) {
    subject.put(&keys(0..8), 64 << 10);
    subject.put(&keys(8..9), 4096);
    let many: Vec<LocatedBlock> = subject.locate(&keys(0..8)).into_iter().flatten().collect();
    let one = [subject.locate_one(keys(8..9)[0])];
    let has_ended = Arc::new(AtomicBool::new(false));
    let (begun, begins) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let (source, of_many) = (Arc::clone(&subject.source), pool.clone());
    let (ended, has_begun, blocks) =
        (Arc::clone(&has_ended), Arc::clone(&begun), Arc::clone(&begins));
    let large = thread::spawn(move || {
        let mut queue = CheckedQueue::new(&of_many, &many);
        queue.is_endless = true;
        queue.ends = Box::new(move || {
            blocks.fetch_add(u64::from(has_begun.load(Ordering::Acquire)), Ordering::Relaxed);
            let is_too_late = blocks.load(Ordering::Relaxed) > BLOCKS_BEFORE_SMALL_MAX;
            ended.load(Ordering::Acquire) || is_too_late
        });
        let cancel = Cancel::new();
        let deadline = Deadline::after(&SystemClock, Duration::from_secs(600));
        source.fetch_each(&mut queue, &SourceLimit { deadline, cancel: &cancel });
        queue.assert_ended();
    });
    begun.store(true, Ordering::Release);
    let mut queue = CheckedQueue::new(pool, &one);
    subject.fetch_all(&mut queue, soon(), &Cancel::new());
    has_ended.store(true, Ordering::Release);
    assert_eq!(queue.hits, 1, "a call for one block beside one for many");
    large.join().expect("the large call has no failure");
    let blocks = begins.load(Ordering::Relaxed);
    assert!(blocks <= BLOCKS_BEFORE_SMALL_MAX, "a call for one block ended behind {blocks} others");
}

fn a_call_ends_at_its_deadline_without_an_answer(
    subject: &SourceSubject,
    pool: &Pool,
    stall: &Stall,
) {
    let keys = keys(0..3);
    subject.put(&keys, 4096);
    let located: Vec<LocatedBlock> = subject.locate(&keys).into_iter().flatten().collect();
    let stalled = stall();
    let cancel = Cancel::new();
    let deadline = Deadline::after(&SystemClock, Duration::from_millis(50));
    let limit = SourceLimit { deadline, cancel: &cancel };
    let located_late = subject.source.locate(&keys, &limit);
    assert!(matches!(located_late, Err(TierError::Timeout)), "{located_late:?}");
    let deadline = Deadline::after(&SystemClock, Duration::from_millis(50));
    let mut queue = CheckedQueue::new(pool, &located);
    subject.fetch_all(&mut queue, deadline, &cancel);
    assert_eq!(queue.hits + queue.misses, 0, "it did not answer");
    drop(stalled);
    let mut queue = CheckedQueue::new(pool, &located);
    subject.fetch_all(&mut queue, soon(), &cancel);
    assert_eq!(queue.hits, 3, "it answers again");
}

fn a_call_ends_when_it_is_cancelled(subject: &SourceSubject, pool: &Pool, stall: &Stall) {
    let keys = keys(0..3);
    subject.put(&keys, 4096);
    let located: Vec<LocatedBlock> = subject.locate(&keys).into_iter().flatten().collect();
    let stalled = stall();
    let cancel = Arc::new(Cancel::new());
    let (source, cancelled, of_call) =
        (Arc::clone(&subject.source), Arc::clone(&cancel), pool.clone());
    let call = thread::spawn(move || {
        let deadline = Deadline::after(&SystemClock, Duration::from_secs(3600));
        let mut queue = CheckedQueue::new(&of_call, &located);
        source.fetch_each(&mut queue, &SourceLimit { deadline, cancel: &cancelled });
        queue.assert_ended();
        queue.hits
    });
    cascade_runtime::sleep(Duration::from_millis(20));
    cancel.set();
    let limit = Deadline::after(&SystemClock, Duration::from_secs(60));
    while !call.is_finished() {
        let now = SystemClock.monotonic();
        assert!(!limit.has_passed(&SystemClock), "a cancelled call runs at {now:?}");
        cascade_runtime::sleep(Duration::from_millis(1));
    }
    assert_eq!(call.join().expect("the call has no failure"), 0, "it did not answer");
    drop(stalled);
}
