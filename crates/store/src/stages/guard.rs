//! The guard around a stage, which bounds the damage that a faulty stage can do.
//!
//! A stage that panics, exceeds its deadline, or returns too few results or slabs of the wrong
//! length loses its blocks, and nothing else. Calls that may hang run on their own threads. What
//! was passed to a late call, slabs above all, stays with that call until it ends.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use cascade_block::{BlockKey, Manifest, Namespace, NamespaceId};
use cascade_memory::Slab;
use cascade_runtime::{CallError, CallLimit, Calls, Cancel, Clock, Deadline, LeafMutex};
use cascade_tier::TierName;
use cascade_tier::tier::{
    Address, BlockFacts, EraseOutcome, Load, LoadOutcome, LoadQueue, MakeRoomOutcome, Tier,
    TierError, TierStats, next_loads,
};

use crate::core::circuit::Direction;

/// Most concurrent loads of a stage that may exceed its deadlines.
const LOADS_MAX: usize = 16;
/// Most concurrent calls that neither load nor change blocks.
const OTHER_CALLS_MAX: usize = 4;
/// Time after the deadline in which a stage can still report a time-out itself.
const GRACE: Duration = Duration::from_millis(20);
/// Time-out of statistics.
const STATS_TIMEOUT: Duration = Duration::from_secs(1);

const READS: Direction = Direction::Reads;
const WRITES: Direction = Direction::Writes;

/// Decides which blocks are kept when room is made.
pub(crate) type Keep = Box<dyn FnMut(&BlockKey, Address) -> bool + Send>;

/// A stage with its guard.
#[derive(Debug)]
pub(crate) struct Guarded {
    stage: Arc<dyn Tier>,
    name: TierName,
    keeps_names_only: bool,
    keeps_deadlines: bool,
    checks_slabs: bool,
    loads: Calls,
    /// One at a time, so that changes happen in order.
    changes: Calls,
    other_calls: Calls,
    probes: Calls,
    read_probes: Calls,
    clock: Arc<dyn Clock>,
    /// Set while the circuit is open: callers stop waiting for results.
    open_read_circuit: Cancel,
    open_write_circuit: Cancel,
    closed: Cancel,
    stats: LeafMutex<TierStats>,
    /// Whether the stage has to make room because its capacity was reduced, as last known.
    is_shrinking: Arc<AtomicBool>,
    /// Set by a change of the capacity, for the mover.
    is_resized: Arc<AtomicBool>,
    /// The error of a flush that failed after its caller had gone, until a flush reports it.
    late_flush_error: Arc<LeafMutex<Option<TierError>>>,
}

impl Guarded {
    pub(crate) fn new(stage: Arc<dyn Tier>, clock: &Arc<dyn Clock>) -> Self {
        let threads = |calls_max| Calls::new("cascade-stage", calls_max, Arc::clone(clock));
        let is_shrinking = Arc::new(AtomicBool::new(stage.is_shrinking()));
        Self {
            name: stage.name(),
            keeps_names_only: stage.keeps_names_only(),
            keeps_deadlines: stage.keeps_deadlines(),
            checks_slabs: stage.checks_slabs(),
            stage,
            loads: threads(LOADS_MAX),
            changes: threads(1),
            other_calls: threads(OTHER_CALLS_MAX),
            probes: threads(1),
            read_probes: threads(1),
            clock: Arc::clone(clock),
            open_read_circuit: Cancel::new(),
            open_write_circuit: Cancel::new(),
            closed: Cancel::new(),
            stats: LeafMutex::default(),
            is_shrinking,
            is_resized: Arc::default(),
            late_flush_error: Arc::default(),
        }
    }

    pub(crate) fn name(&self) -> TierName {
        self.name
    }

    pub(crate) fn keeps_names_only(&self) -> bool {
        self.keeps_names_only
    }

    pub(crate) fn checks_slabs(&self) -> bool {
        self.checks_slabs
    }

    /// Opens or closes the circuit of one direction. Opening it ends all waits for its calls.
    pub(crate) fn set_circuit_open(&self, direction: Direction, is_open: bool) {
        let open_circuit = self.open_circuit(direction);
        if is_open { open_circuit.set() } else { open_circuit.clear() }
    }

    fn open_circuit(&self, direction: Direction) -> &Cancel {
        match direction {
            Direction::Reads => &self.open_read_circuit,
            Direction::Writes => &self.open_write_circuit,
        }
    }

    /// See [`Tier::recover`].
    pub(crate) fn recover(&self) -> Vec<(BlockFacts, Address)> {
        self.stage.recover()
    }

    /// [`Tier::store`] with exactly one result for each block. Addresses returned after the
    /// deadline go to `late`.
    pub(crate) fn store(
        &self,
        batch: Vec<(BlockFacts, Slab)>,
        deadline: Deadline,
        late: impl FnOnce(Vec<(BlockKey, Address)>) + Send + 'static,
    ) -> Vec<Result<Address, TierError>> {
        // For a late result: the batch itself goes to the stage.
        let keys: Vec<BlockKey> = batch.iter().map(|(facts, _)| facts.key).collect();
        let count = keys.len();
        let stage = Arc::clone(&self.stage);
        let late = move |results: Vec<Result<Address, TierError>>| {
            let stored = keys.into_iter().zip(results);
            late(stored.filter_map(|(key, result)| Some((key, result.ok()?))).collect());
        };
        let work = move || stage.store(batch, deadline);
        let stored = call(&self.changes, self.limit(WRITES, deadline, true), work, late);
        let mut results = stored.unwrap_or_else(|error| vec![Err(error); count]);
        results.resize_with(count, || Err(TierError::NoResult));
        results
    }

    /// [`Tier::load_each`] with exactly one result for each block that was taken, each slab of the
    /// right length.
    pub(crate) fn load_each(&self, queue: &mut dyn LoadQueue, deadline: Deadline) {
        let mut checked = CheckedLoads::new(queue);
        if self.keeps_deadlines {
            let call = AssertUnwindSafe(|| self.stage.load_each(&mut checked, deadline));
            if let Err(panic) = catch_unwind(call)
                && checked.is_in_store
            {
                // Not a fault of the stage.
                resume_unwind(panic);
            }
            // After a panic of the stage, every block without a result fails.
            return checked.fail_rest();
        }
        loop {
            let (numbers, batch) = next_loads(&mut checked);
            if batch.is_empty() {
                return;
            }
            let stage = Arc::clone(&self.stage);
            let work = move || stage.load(batch, deadline);
            // A late load has only slabs to release.
            let loaded = call(&self.loads, self.limit(READS, deadline, true), work, drop);
            let (mut outcomes, error) = match loaded {
                Ok(outcomes) => (outcomes.into_iter(), TierError::NoResult),
                Err(error) => (Vec::new().into_iter(), error),
            };
            for number in numbers {
                let missing = || LoadOutcome::Failed(error.clone());
                checked.ended(number, outcomes.next().unwrap_or_else(missing));
            }
        }
    }

    /// See [`Tier::alias`].
    pub(crate) fn alias(
        &self,
        batch: Vec<(BlockFacts, Address)>,
        deadline: Deadline,
    ) -> Result<(), TierError> {
        self.run(&self.changes, WRITES, deadline, true, move |stage| stage.alias(batch, deadline))
    }

    /// See [`Tier::remove`].
    pub(crate) fn remove(
        &self,
        batch: Vec<(BlockKey, Address)>,
        deadline: Deadline,
    ) -> Result<(), TierError> {
        self.run(&self.changes, WRITES, deadline, true, move |stage| stage.remove(&batch, deadline))
    }

    /// [`Tier::make_room`]; room made after the deadline goes to `late`.
    pub(crate) fn make_room(
        &self,
        mut keep: Keep,
        deadline: Deadline,
        late: impl FnOnce(MakeRoomOutcome) + Send + 'static,
    ) -> Result<MakeRoomOutcome, TierError> {
        let (stage, is_shrinking) = (Arc::clone(&self.stage), Arc::clone(&self.is_shrinking));
        let work = move || {
            let room = stage.make_room(&mut keep, deadline);
            is_shrinking.store(stage.is_shrinking(), Ordering::Relaxed);
            room
        };
        let late = move |room: Result<MakeRoomOutcome, TierError>| room.map_or_else(drop, late);
        // Not watched for hanging: moving kept blocks may take longer than storing a batch.
        let limit = self.limit(WRITES, deadline, false);
        call(&self.changes, limit, work, late)?
    }

    /// See [`Tier::resize`]. In turn with the changes, as room is made for them.
    pub(crate) fn resize(&self, capacity_bytes: u64, deadline: Deadline) -> Result<(), TierError> {
        let is_shrinking = Arc::clone(&self.is_shrinking);
        let is_resized = Arc::clone(&self.is_resized);
        self.run(&self.changes, WRITES, deadline, false, move |stage| {
            let resized = stage.resize(capacity_bytes, deadline);
            is_shrinking.store(stage.is_shrinking(), Ordering::Relaxed);
            is_resized.store(true, Ordering::Relaxed);
            resized
        })
    }

    /// See [`Tier::release_pool`]. Also while a circuit is open.
    pub(crate) fn release_pool(&self, deadline: Deadline) -> Result<(), TierError> {
        let (stage, limit) = (Arc::clone(&self.stage), limit(deadline, Some(&self.closed), false));
        call(&self.other_calls, limit, move || stage.release_pool(), drop)
    }

    /// Whether the capacity has changed since the last call.
    pub(crate) fn take_resized(&self) -> bool {
        self.is_resized.swap(false, Ordering::Relaxed)
    }

    /// See [`Tier::is_shrinking`]; as last known, without a call of the stage.
    pub(crate) fn is_shrinking(&self) -> bool {
        // Relaxed: a mover that misses a change sees it with its next batch.
        self.is_shrinking.load(Ordering::Relaxed)
    }

    /// See [`Tier::flush`]. Fails, too, if an earlier flush has failed after its deadline: what it
    /// has lost, no later one can save.
    pub(crate) fn flush(&self, deadline: Deadline) -> Result<(), TierError> {
        let (stage, late_error) = (Arc::clone(&self.stage), Arc::clone(&self.late_flush_error));
        let late = move |result: Result<(), TierError>| match result {
            Ok(()) | Err(TierError::Timeout | TierError::CircuitOpen) => {}
            Err(error) => {
                *late_error.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
            }
        };
        // Not in turn with the changes: blocks are stored while a long flush runs.
        let limit = self.limit(WRITES, deadline, false);
        call(&self.other_calls, limit, move || stage.flush(deadline), late)??;
        let earlier = self.late_flush_error.lock().unwrap_or_else(PoisonError::into_inner).take();
        earlier.map_or(Ok(()), Err)
    }

    /// [`Tier::erase`], even while a circuit is open. It runs in turn with the changes: a late
    /// erase blocks later changes until it ends, so it never meets a block stored after it.
    pub(crate) fn erase(&self, deadline: Deadline) -> Result<EraseOutcome, TierError> {
        let stage = Arc::clone(&self.stage);
        let limit = limit(deadline, Some(&self.closed), false);
        call(&self.changes, limit, move || stage.erase(deadline), drop)?
    }

    /// See [`Tier::register`].
    pub(crate) fn register(
        &self,
        namespace: &Namespace,
        deadline: Deadline,
    ) -> Result<(), TierError> {
        let namespace = namespace.clone();
        let work = move |stage: &dyn Tier| stage.register(&namespace, deadline);
        self.run(&self.other_calls, WRITES, deadline, false, work)
    }

    /// See [`Tier::manifests`].
    pub(crate) fn manifests(
        &self,
        deadline: Deadline,
    ) -> Result<Vec<(NamespaceId, Manifest)>, TierError> {
        self.run(&self.other_calls, READS, deadline, false, move |stage| stage.manifests(deadline))
    }

    /// [`Tier::probe`] or [`Tier::probe_reads`], even while the circuit is open. Each direction
    /// has its own thread: a hung write shows nothing about reads.
    pub(crate) fn probe(&self, direction: Direction, deadline: Deadline) -> Result<(), TierError> {
        let stage = Arc::clone(&self.stage);
        let limit = limit(deadline, Some(&self.closed), false);
        let probed = match direction {
            WRITES => call(&self.probes, limit, move || stage.probe(deadline), drop),
            READS => call(&self.read_probes, limit, move || stage.probe_reads(deadline), drop),
        };
        match probed {
            // The previous probe is still stuck.
            Err(TierError::CircuitOpen) => Err(TierError::Timeout),
            result => result?,
        }
    }

    /// See [`Tier::close`].
    pub(crate) fn close(&self, deadline: Deadline) {
        let stage = Arc::clone(&self.stage);
        // A late close keeps running on its thread; the store does not wait for it.
        drop(call(&self.other_calls, limit(deadline, None, false), move || stage.close(), drop));
    }

    /// Ends all waits for this stage, for good.
    pub(crate) fn end_all_waits(&self) {
        // Probes and erases ignore the circuits: `closed` ends their waits.
        self.closed.set();
        self.open_read_circuit.set();
        self.open_write_circuit.set();
    }

    /// [`Tier::stats`], or the latest earlier ones while the stage does not respond.
    pub(crate) fn stats(&self) -> TierStats {
        let current = if self.keeps_deadlines {
            catch(|| self.stage.stats())
        } else {
            let stage = Arc::clone(&self.stage);
            let deadline = Deadline::after(&*self.clock, STATS_TIMEOUT);
            let limit = self.limit(READS, deadline, false);
            call(&self.other_calls, limit, move || stage.stats(), drop).ok()
        };
        let mut last = self.stats.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(current) = current {
            *last = current;
        }
        last.clone()
    }

    /// Number of calls still running after their callers stopped waiting.
    pub(crate) fn stuck_calls(&self) -> u64 {
        let (probes, read_probes) = (&self.probes, &self.read_probes);
        let threads = [&self.loads, &self.changes, &self.other_calls, probes, read_probes];
        let ours: u64 = threads.iter().map(|threads| threads.stuck_calls()).sum();
        ours + catch(|| self.stage.stuck_calls()).unwrap_or(0)
    }

    /// The directions with a call that has lasted as long as `limit`; each call is reported
    /// once. Stages that keep their deadlines are left out: their probe finds out what is slow.
    pub(crate) fn hung_directions(&self, limit: Duration) -> Vec<Direction> {
        if self.keeps_deadlines {
            return Vec::new();
        }
        let threads = [(READS, &self.loads), (WRITES, &self.changes)];
        let hung = threads.into_iter().filter(|(_, threads)| threads.has_hung(limit));
        hung.map(|(direction, _)| direction).collect()
    }

    fn limit(&self, direction: Direction, deadline: Deadline, is_watched: bool) -> CallLimit<'_> {
        limit(deadline, Some(self.open_circuit(direction)), is_watched)
    }

    /// Makes a call that needs no handling of late results.
    fn run<T: Send + 'static>(
        &self,
        calls: &Calls,
        direction: Direction,
        deadline: Deadline,
        is_watched: bool,
        work: impl FnOnce(&dyn Tier) -> Result<T, TierError> + Send + 'static,
    ) -> Result<T, TierError> {
        let stage = Arc::clone(&self.stage);
        call(calls, self.limit(direction, deadline, is_watched), move || work(&*stage), drop)?
    }
}

/// A queue whose blocks each end once, with a slab of their length.
pub(super) struct CheckedLoads<'a> {
    queue: &'a mut dyn LoadQueue,
    /// Lengths of the blocks that the stage has taken, by their numbers.
    taken: Vec<Option<usize>>,
    /// Whether a method of the queue runs.
    is_in_store: bool,
}

impl<'a> CheckedLoads<'a> {
    pub(super) fn new(queue: &'a mut dyn LoadQueue) -> Self {
        Self { queue, taken: Vec::new(), is_in_store: false }
    }

    pub(super) fn fail_rest(&mut self) {
        for number in 0..self.taken.len() {
            self.ended(number, LoadOutcome::Failed(TierError::NoResult));
        }
    }
}

impl LoadQueue for CheckedLoads<'_> {
    fn next_load(&mut self) -> Option<(usize, Load)> {
        self.is_in_store = true;
        let next = self.queue.next_load();
        self.is_in_store = false;
        let (number, load) = next?;
        if number >= self.taken.len() {
            self.taken.resize(number + 1, None);
        }
        self.taken[number] = Some(load.slab.len());
        Some((number, load))
    }

    fn ended(&mut self, number: usize, outcome: LoadOutcome) {
        // A stage may report a block twice, or one that it never had.
        let Some(bytes) = self.taken.get_mut(number).and_then(Option::take) else { return };
        let outcome = match outcome {
            // The caller would serve a slab of another length as the block.
            LoadOutcome::Hit(slab) if slab.len() != bytes => LoadOutcome::Damaged,
            outcome => outcome,
        };
        self.is_in_store = true;
        self.queue.ended(number, outcome);
        self.is_in_store = false;
    }

    fn idle(&mut self) -> bool {
        self.is_in_store = true;
        let has_worked = self.queue.idle();
        self.is_in_store = false;
        has_worked
    }
}

/// The limit of a call. A call that is watched opens the circuit if it takes too long.
pub(super) fn limit(
    deadline: Deadline,
    cancel: Option<&Cancel>,
    is_watched: bool,
) -> CallLimit<'_> {
    CallLimit { deadline, grace: GRACE, cancel, is_watched, refuse_if_stuck: true }
}

/// Makes a call that may hang. A late result goes to `late`.
pub(super) fn call<T: Send + 'static>(
    calls: &Calls,
    limit: CallLimit<'_>,
    work: impl FnOnce() -> T + Send + 'static,
    late: impl FnOnce(T) + Send + 'static,
) -> Result<T, TierError> {
    calls.call(limit, work, late).map_err(without_result)
}

/// The error of a call that has no result.
pub(super) fn without_result(error: CallError) -> TierError {
    match error {
        CallError::TimedOut => TierError::Timeout,
        CallError::Cancelled | CallError::AllStuck => TierError::CircuitOpen,
        CallError::NoThread(error) => TierError::Failed(Arc::new(error)),
        // It panicked: the store shares no state with the stage that could be left inconsistent.
        _ => TierError::NoResult,
    }
}

/// Catches a panic: the store shares no state with the stage that could be left inconsistent.
pub(super) fn catch<T>(call: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(call)).ok()
}
