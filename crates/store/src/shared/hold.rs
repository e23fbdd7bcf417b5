//! The lock of the state: who gets it next, for how many keys, and how long each hold takes.
//!
//! A call over many keys takes the lock for at most [`KEYS_PER_HOLD`] keys, releases it, and takes
//! it again *in turn*. Without turns, a thread that releases a lock and takes it again at once
//! keeps it from the threads that wait: they are only being woken up when it is taken again.

use std::ops::{Deref, DerefMut};
use std::panic::Location;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{PoisonError, TryLockError};
use std::time::Duration;

use cascade_runtime::{Clock, Condvar, Deadline, Mutex, MutexGuard, now};
use cascade_tier::{CallOptions, HoldTimes, StoreError};

pub(crate) use crate::core::bound::KEYS_PER_HOLD;
use crate::core::catalog::Discarded;
use crate::core::state::StoreState;
use crate::hold_recorder::{BegunHold, HoldCounters, HoldRecorder};
use crate::shared::StoreCore;
use crate::shared::call::CallContext;

/// Holds for at least this many keys are timed, and wait for their turn: also rounds of a put.
/// Where these took a free lock at once, two threads put 4 KiB blocks 6 % faster, but the P99.9 of
/// a `contains` beside a put of 24,000 blocks was up to 4.8 ms.
const TIMED_KEYS_MIN: usize = 64;

const POISONED: &str = "no thread panics while it holds the lock of the store";

/// The state and its lock.
#[derive(Debug)]
pub(crate) struct StateLock {
    state: Mutex<StoreState>,
    /// Held by the next thread that gets `state` in turn, and waited for by those after it.
    turn: Mutex<()>,
    recorder: Option<HoldRecorder>,
    counters: HoldCounters,
    /// Slabs in flight that were freed without the lock, and are still counted by the state.
    freed_slabs: AtomicU64,
}

/// Releases the lock when dropped.
#[derive(Debug)]
#[must_use = "the lock is released at once if the guard is not kept"]
pub(crate) struct StateGuard<'a> {
    lock: &'a StateLock,
    /// `None` only once it is released.
    held: Option<Held<'a>>,
}

#[derive(Debug)]
struct Held<'a> {
    // Dropped in this order: the hold ends before the lock is released, so that the recorder has
    // one hold at a time.
    hold: CurrentHold<'a>,
    state: MutexGuard<'a, StoreState>,
}

const HELD: &str = "the lock is held until the guard is dropped";

/// Measures a hold, if that is wanted, until it is dropped.
#[derive(Debug)]
struct CurrentHold<'a> {
    lock: &'a StateLock,
    /// For the recorder, if there is one.
    begun: Option<BegunHold>,
    /// When it began, if it is for many keys.
    began: Option<Duration>,
}

impl StateLock {
    pub(crate) fn new(mut state: StoreState, recorder: Option<HoldRecorder>) -> Self {
        state.recorder.clone_from(&recorder);
        let (state, turn) = (Mutex::new(state), Mutex::new(()));
        let (counters, freed_slabs) = (HoldCounters::default(), AtomicU64::new(0));
        Self { state, turn, recorder, counters, freed_slabs }
    }

    /// Takes the lock for a few keys: at once if it is free, otherwise in turn.
    #[inline]
    #[track_caller]
    pub(crate) fn lock(&self) -> StateGuard<'_> {
        match self.try_lock() {
            Some(guard) => guard,
            None => self.lock_in_turn(0),
        }
    }

    /// Takes the lock for this many keys, after the thread that waits for it first.
    #[track_caller]
    pub(crate) fn lock_in_turn(&self, keys: usize) -> StateGuard<'_> {
        let turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let state = self.state.lock().expect(POISONED);
        drop(turn);
        self.guard(state, keys)
    }

    /// As `lock` for few keys and `lock_in_turn` for many, until the deadline. `None` if it passes
    /// first.
    #[track_caller]
    fn lock_until(
        &self,
        keys: usize,
        deadline: Deadline,
        clock: &dyn Clock,
    ) -> Option<StateGuard<'_>> {
        if keys < TIMED_KEYS_MIN
            && let Some(guard) = self.try_lock()
        {
            return Some(guard);
        }
        let turn = self.turn.lock_until(deadline, clock)?.unwrap_or_else(PoisonError::into_inner);
        let state = self.state.lock_until(deadline, clock)?.expect(POISONED);
        drop(turn);
        Some(self.guard(state, keys))
    }

    /// The lock, if it is free.
    #[inline]
    #[track_caller]
    fn try_lock(&self) -> Option<StateGuard<'_>> {
        match self.state.try_lock() {
            Ok(state) => Some(self.guard(state, 0)),
            Err(TryLockError::WouldBlock) => None,
            // After a panic under the lock the invariants may not hold; continuing could serve
            // wrong bytes.
            Err(TryLockError::Poisoned(_)) => panic!("{POISONED}"),
        }
    }

    pub(crate) fn is_poisoned(&self) -> bool {
        self.state.is_poisoned()
    }

    /// The times of the holds for many keys.
    pub(crate) fn times(&self) -> HoldTimes {
        self.counters.times()
    }

    /// Releases the lock until notified, or until the deadline if there is one.
    #[track_caller]
    pub(crate) fn wait<'a>(
        &'a self,
        guard: StateGuard<'a>,
        condition: &Condvar,
        until: Option<(Deadline, &dyn Clock)>,
    ) -> StateGuard<'a> {
        let mut guard = guard;
        // Under the lock: a call that waits for memory must not wait for slabs that it discarded.
        drop(guard.catalog.take_discarded());
        let Held { hold, state } = guard.held.take().expect(HELD);
        drop(hold);
        let state = match until {
            Some((deadline, clock)) => {
                condition
                    .wait_until(state, deadline, clock)
                    .unwrap_or_else(PoisonError::into_inner)
                    .0
            }
            None => condition.wait(state).unwrap_or_else(PoisonError::into_inner),
        };
        self.guard(state, 0)
    }

    #[inline]
    #[track_caller]
    fn guard<'a>(&'a self, mut state: MutexGuard<'a, StoreState>, keys: usize) -> StateGuard<'a> {
        state.cost = 0;
        state.memory.eviction.begin_hold();
        let at = Location::caller();
        let begun = self.recorder.as_ref().map(|recorder| recorder.begin(at));
        let began = (keys >= TIMED_KEYS_MIN).then(now);
        let hold = CurrentHold { lock: self, begun, began };
        StateGuard { lock: self, held: Some(Held { hold, state }) }
    }

    /// Counts slabs in flight that were freed without the lock.
    pub(crate) fn note_freed(&self, slabs: u64) {
        // Release: the memory is free for each thread that reads the new number.
        self.freed_slabs.fetch_add(slabs, Ordering::Release);
    }

    /// The slabs counted by `note_freed` since the last call.
    pub(crate) fn take_freed(&self) -> u64 {
        match self.freed_slabs.load(Ordering::Relaxed) {
            0 => 0,
            _ => self.freed_slabs.swap(0, Ordering::Acquire),
        }
    }
}

impl Drop for CurrentHold<'_> {
    #[inline]
    fn drop(&mut self) {
        if let Some(began) = self.began {
            self.lock.counters.count(now().saturating_sub(began));
        }
        if let (Some(recorder), Some(begun)) = (&self.lock.recorder, &self.begun) {
            recorder.end(begun);
        }
    }
}

/// Releases the lock, and then drops what the hold has discarded: up to a millisecond for the
/// slabs of many small blocks.
impl Drop for StateGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        let Some(mut held) = self.held.take() else { return };
        let discarded = held.state.catalog.take_discarded();
        if discarded.is_empty() {
            return;
        }
        // Until they are free, other calls wait for their memory instead of failing.
        let slabs = discarded.iter().filter(|it| matches!(it, Discarded::Slab(_))).count() as u64;
        held.state.memory.slabs_in_flight += slabs;
        drop(held);
        drop(discarded);
        self.lock.note_freed(slabs);
    }
}

impl Deref for StateGuard<'_> {
    type Target = StoreState;

    #[inline]
    fn deref(&self) -> &StoreState {
        &self.held.as_ref().expect(HELD).state
    }
}

impl DerefMut for StateGuard<'_> {
    #[inline]
    fn deref_mut(&mut self) -> &mut StoreState {
        &mut self.held.as_mut().expect(HELD).state
    }
}

impl StoreCore {
    /// Takes the lock for this many keys of a batch: in turn, if they are many.
    #[track_caller]
    pub(crate) fn lock_for(&self, keys: usize) -> StateGuard<'_> {
        if keys < TIMED_KEYS_MIN { self.state.lock() } else { self.state.lock_in_turn(keys) }
    }

    /// As `lock_for`, until the deadline of the call. `None` if it passes first. A call with a
    /// timeout of zero waits for the lock: it does all that needs no other waiting.
    #[track_caller]
    pub(crate) fn lock_within(&self, keys: usize, call: CallContext) -> Option<StateGuard<'_>> {
        if call.is_immediate() {
            return Some(self.lock_for(keys));
        }
        self.state.lock_until(keys, call.deadline, &*self.clock)
    }

    /// As `lock_within`, with the error of a call that did not get the lock.
    #[track_caller]
    pub(crate) fn lock_or_time_out(
        &self,
        operation: &'static str,
        call: CallContext,
    ) -> Result<StateGuard<'_>, StoreError> {
        self.lock_within(0, call).ok_or_else(|| call.timeout_error(operation))
    }

    /// As `lock_within` for a call without a timeout of its own: until that of the store, from the
    /// first time that the call has to wait.
    #[track_caller]
    pub(crate) fn lock_in_time(
        &self,
        keys: usize,
        call: &mut Option<CallContext>,
    ) -> Option<StateGuard<'_>> {
        // Without a look at the clock, which would show in a call for one key.
        if keys < TIMED_KEYS_MIN
            && let Some(guard) = self.state.try_lock()
        {
            return Some(guard);
        }
        let call = *call.get_or_insert_with(|| self.call(CallOptions::default()));
        self.lock_within(keys, call)
    }

    /// The times of the holds of the lock for many keys.
    pub(crate) fn lock_holds(&self) -> HoldTimes {
        self.state.times()
    }

    /// Releases the lock and takes it again in turn, if this hold has done enough.
    #[track_caller]
    pub(crate) fn end_full_hold<'a>(&'a self, state: StateGuard<'a>) -> StateGuard<'a> {
        if !state.is_hold_full() {
            return state;
        }
        self.unlock(state);
        self.lock_for(KEYS_PER_HOLD)
    }

    /// Handles items in as many holds of the lock as needed, until the deadline of the call.
    /// Returns how many were handled: all of the first hold, also after the deadline, unless it
    /// passed before the call got the lock.
    #[track_caller]
    pub(crate) fn in_holds<T>(
        &self,
        call: Option<CallContext>,
        items: &[T],
        mut handle: impl FnMut(&mut StoreState, &T),
    ) -> usize {
        let mut done = 0;
        while done < items.len() {
            if done > 0 && call.is_some_and(|call| call.has_timed_out(&*self.clock)) {
                break;
            }
            let left = items.len() - done;
            let state = match call {
                Some(call) => self.lock_within(left, call),
                None => Some(self.lock_for(left)),
            };
            let Some(mut state) = state else { break };
            state.history.set_time(self.clock.unix_ms());
            while done < items.len() && !state.is_hold_full() {
                state.charge(1);
                handle(&mut state, &items[done]);
                done += 1;
            }
            self.unlock(state);
        }
        done
    }
}
