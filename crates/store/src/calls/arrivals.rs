//! What sources send to the call that waits for them: answers and blocks, from other threads.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use cascade_block::checksum;
use cascade_runtime::{Clock, Condvar, Deadline, Mutex, MutexGuard};
use cascade_tier::source::LocatedBlock;
use cascade_tier::tier::{Load, LoadOutcome, LoadQueue, TierError};

/// Poll interval of waits, for events without a notification, such as a circuit that opens.
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Bytes that one call to a source fetches before calls of other callers get their turn.
const BYTES_PER_CALL: usize = 16 << 20;

/// The answer of a source to the question which blocks it has.
pub(super) type LocateAnswer = Result<Vec<Option<LocatedBlock>>, TierError>;

/// The results for one call of the store.
#[derive(Debug, Default)]
pub(super) struct Arrivals {
    arrived: Mutex<Arrived>,
    changed: Condvar,
}

/// Results that the call has yet to take.
#[derive(Debug, Default)]
pub(super) struct Arrived {
    /// Answers, with the numbers of the round and of the source.
    pub(super) answers: Vec<((u64, usize), LocateAnswer)>,
    /// Fetches that ended, with their numbers.
    pub(super) ended: Vec<(usize, LoadOutcome)>,
    /// Whether a call to fetch blocks has ended.
    pub(super) has_call_ended: bool,
    /// The call of the store has ended: what arrives now is dropped.
    is_abandoned: bool,
}

/// A block to fetch, with its number and the checksum that its source has stated.
#[derive(Debug)]
pub(super) struct FetchTask {
    pub(super) number: usize,
    pub(super) load: Load,
    pub(super) checksum: u32,
}

/// The blocks that one call to a source fetches.
#[derive(Debug, Default)]
pub(super) struct FetchQueue(Mutex<QueuedFetches>);

#[derive(Debug, Default)]
struct QueuedFetches {
    waiting: VecDeque<FetchTask>,
    has_taken: bool,
    /// The call has ended, and takes no more blocks.
    is_over: bool,
}

/// The side of a queue that a source takes blocks from.
pub(super) struct FetchSide {
    queue: Arc<FetchQueue>,
    arrivals: Arc<Arrivals>,
    checksums: BTreeMap<usize, u32>,
    bytes: usize,
}

impl Arrivals {
    fn lock(&self) -> MutexGuard<'_, Arrived> {
        self.arrived.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn add_answer(&self, from: (u64, usize), answer: LocateAnswer) {
        self.lock().answers.push((from, answer));
        self.changed.notify_all();
    }

    fn add_ended(&self, number: usize, outcome: LoadOutcome) {
        let mut arrived = self.lock();
        if !arrived.is_abandoned {
            arrived.ended.push((number, outcome));
            drop(arrived);
            self.changed.notify_all();
        }
    }

    /// Takes what has arrived.
    pub(super) fn take(&self) -> Arrived {
        let mut arrived = self.lock();
        let is_abandoned = arrived.is_abandoned;
        std::mem::replace(&mut arrived, Arrived { is_abandoned, ..Arrived::default() })
    }

    /// Takes what has arrived; drops what arrives later.
    pub(super) fn abandon(&self) -> Arrived {
        self.lock().is_abandoned = true;
        self.take()
    }

    /// Waits until something has arrived, the deadline passes, or for the poll interval.
    pub(super) fn wait(&self, deadline: Deadline, clock: &dyn Clock) {
        let poll = clock.monotonic().saturating_add(POLL_INTERVAL);
        let until = Deadline::at(deadline.time().min(poll));
        let arrived = self.lock();
        let Arrived { answers, ended, has_call_ended, .. } = &*arrived;
        if answers.is_empty() && ended.is_empty() && !has_call_ended {
            drop(self.changed.wait_until(arrived, until, clock));
        }
    }
}

impl FetchQueue {
    pub(super) fn new(tasks: VecDeque<FetchTask>) -> Self {
        Self(Mutex::new(QueuedFetches { waiting: tasks, ..QueuedFetches::default() }))
    }

    fn lock(&self) -> MutexGuard<'_, QueuedFetches> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds blocks to a call. Returns them if the call has ended.
    pub(super) fn add(&self, tasks: VecDeque<FetchTask>) -> VecDeque<FetchTask> {
        let mut queued = self.lock();
        if queued.is_over {
            return tasks;
        }
        queued.waiting.extend(tasks);
        VecDeque::new()
    }

    /// What a call that has ended did not take, and whether it took anything. `None` while it runs.
    pub(super) fn take_rest(&self) -> Option<(VecDeque<FetchTask>, bool)> {
        let mut queued = self.lock();
        let has_taken = queued.has_taken;
        queued.is_over.then(|| (std::mem::take(&mut queued.waiting), has_taken))
    }

    /// Takes what the call has not taken yet. It gets no more.
    pub(super) fn end(&self) -> VecDeque<FetchTask> {
        let mut queued = self.lock();
        queued.is_over = true;
        std::mem::take(&mut queued.waiting)
    }
}

impl FetchSide {
    pub(super) fn new(queue: &Arc<FetchQueue>, arrivals: &Arc<Arrivals>) -> Self {
        let (queue, arrivals) = (Arc::clone(queue), Arc::clone(arrivals));
        Self { queue, arrivals, checksums: BTreeMap::new(), bytes: 0 }
    }
}

/// Ends a call to fetch blocks.
pub(super) fn end_call(queue: &FetchQueue, arrivals: &Arrivals) {
    queue.lock().is_over = true;
    arrivals.lock().has_call_ended = true;
    arrivals.changed.notify_all();
}

impl LoadQueue for FetchSide {
    fn next_load(&mut self) -> Option<(usize, Load)> {
        // The rest is fetched by another call, behind those that wait for a thread.
        if self.bytes >= BYTES_PER_CALL {
            return None;
        }
        let mut queued = self.queue.lock();
        if queued.is_over {
            return None;
        }
        let FetchTask { number, load, checksum } = queued.waiting.pop_front()?;
        queued.has_taken = true;
        drop(queued);
        self.bytes += load.slab.len();
        self.checksums.insert(number, checksum);
        Some((number, load))
    }

    fn ended(&mut self, number: usize, outcome: LoadOutcome) {
        let stated = self.checksums.remove(&number);
        let outcome = match outcome {
            // Here, on the thread of the source: the caller reads other blocks meanwhile.
            LoadOutcome::Hit(slab) => match slab.bytes_or_copy().map(|bytes| checksum(&bytes)) {
                Ok(sum) if stated == Some(sum) => LoadOutcome::Hit(slab),
                Ok(_) => LoadOutcome::Damaged,
                Err(error) => LoadOutcome::Failed(TierError::Device(error)),
            },
            outcome => outcome,
        };
        self.arrivals.add_ended(number, outcome);
    }
}

#[cfg(test)]
mod tests {
    use cascade_block::BlockKey;
    use cascade_memory::{HugePages, Pool, PoolConfig};
    use cascade_tier::tier::Address;

    use super::*;

    fn task(pool: &Pool, number: usize, bytes: usize) -> FetchTask {
        let mut slab = pool.allocate(bytes).unwrap();
        slab.host_mut().unwrap().fill(1);
        let checksum = checksum(slab.host().expect("host memory"));
        let key = BlockKey::from_bytes([0; 32]);
        FetchTask { number, load: Load { key, address: Address(0), slab }, checksum }
    }

    fn pool() -> Pool {
        let config =
            PoolConfig { capacity_bytes: 64 << 20, huge_pages: HugePages::Never, populate: false };
        Pool::new(&config).unwrap()
    }

    /// Otherwise a large call would keep the threads of a source from small ones.
    #[test]
    fn a_call_takes_a_share_of_a_long_queue() {
        let (pool, arrivals) = (pool(), Arc::new(Arrivals::default()));
        let tasks = (0..40).map(|number| task(&pool, number, 1 << 20)).collect();
        let queue = Arc::new(FetchQueue::new(tasks));
        let mut side = FetchSide::new(&queue, &arrivals);
        let taken: Vec<_> = std::iter::from_fn(|| side.next_load()).collect();
        assert_eq!(taken.len(), 16);
        end_call(&queue, &arrivals);
        let (rest, has_taken) = queue.take_rest().unwrap();
        assert_eq!((rest.len(), has_taken), (24, true));
        assert!(arrivals.take().has_call_ended);
    }

    #[test]
    fn only_bytes_with_the_stated_checksum_arrive() {
        let (pool, arrivals) = (pool(), Arc::new(Arrivals::default()));
        let mut tasks: VecDeque<_> = (0..2).map(|number| task(&pool, number, 100)).collect();
        tasks[1].checksum ^= 1;
        let queue = Arc::new(FetchQueue::new(tasks));
        let mut side = FetchSide::new(&queue, &arrivals);
        while let Some((number, load)) = side.next_load() {
            side.ended(number, LoadOutcome::Hit(load.slab));
        }
        let ended = arrivals.take().ended;
        assert!(matches!(ended[0], (0, LoadOutcome::Hit(_))), "{ended:?}");
        assert!(matches!(ended[1], (1, LoadOutcome::Damaged)), "{ended:?}");
    }

    /// Its memory is free at once, not when the late call ends.
    #[test]
    fn what_arrives_after_the_end_is_dropped() {
        let (pool, arrivals) = (pool(), Arc::new(Arrivals::default()));
        let tasks = (0..2).map(|number| task(&pool, number, 100)).collect();
        let queue = Arc::new(FetchQueue::new(tasks));
        let mut side = FetchSide::new(&queue, &arrivals);
        let (number, load) = side.next_load().unwrap();
        drop(queue.end());
        assert!(arrivals.abandon().ended.is_empty());
        assert!(side.next_load().is_none(), "the rest was taken back");
        side.ended(number, LoadOutcome::Hit(load.slab));
        assert_eq!(pool.stats().requested_bytes, 0);
    }
}
