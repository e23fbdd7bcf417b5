//! The guard around a source: calls on threads of their own, a circuit breaker, counts.
//!
//! What holds for a stage holds here: a source that panics, exceeds its deadline, or returns
//! results that nothing asked for loses its blocks, and nothing else.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};

use cascade_block::BlockKey;
use cascade_runtime::{Calls, Cancel, Clock, Deadline, LeafMutex, StartedCall};
use cascade_tier::source::{LocatedBlock, Source, SourceLimit};
use cascade_tier::tier::{LoadQueue, TierError};
use cascade_tier::{SourceStats, StageHealth, TierName};

use super::guard::{CheckedLoads, call, catch, limit, without_result};
use crate::HealthConfig;
use crate::core::circuit::{Breaker, CircuitChange, Direction};
use crate::core::health_signal::HealthSignal;

/// Most concurrent fetches from a source.
const FETCHES_MAX: usize = 16;
/// Most concurrent questions to a source which blocks it has.
const LOCATES_MAX: usize = 16;

const READS: Direction = Direction::Reads;

/// A source with its guard.
#[derive(Debug)]
pub(crate) struct GuardedSource {
    source: Arc<dyn Source>,
    name: TierName,
    locates: Calls,
    fetches: Calls,
    other_calls: Calls,
    clock: Arc<dyn Clock>,
    breaker: LeafMutex<Breaker>,
    is_open: AtomicBool,
    closed: Cancel,
    counts: LeafMutex<FetchCounts>,
}

/// Counts of blocks since the store was opened.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct FetchCounts {
    pub(crate) located: u64,
    pub(crate) fetched: u64,
    pub(crate) fetched_bytes: u64,
    pub(crate) stale: u64,
    pub(crate) damaged: u64,
    pub(crate) failed: u64,
}

/// A call to a source. Dropping it cancels the call.
pub(crate) struct SourceCall {
    started: StartedCall,
    cancel: Arc<Cancel>,
}

impl GuardedSource {
    pub(crate) fn new(
        source: Arc<dyn Source>,
        health: HealthConfig,
        clock: &Arc<dyn Clock>,
    ) -> Self {
        let threads = |calls_max| Calls::new("cascade-source", calls_max, Arc::clone(clock));
        let breaker = Breaker::new(health, clock.monotonic(), clock.unix_ms());
        Self {
            name: source.name(),
            source,
            locates: threads(LOCATES_MAX),
            fetches: threads(FETCHES_MAX),
            other_calls: threads(1),
            clock: Arc::clone(clock),
            breaker: LeafMutex::new(breaker),
            is_open: AtomicBool::new(false),
            closed: Cancel::new(),
            counts: LeafMutex::default(),
        }
    }

    pub(crate) fn name(&self) -> TierName {
        self.name
    }

    /// Whether it must not be called: its circuit is open, or the store is closed.
    pub(crate) fn is_unusable(&self) -> bool {
        self.is_open.load(Ordering::Acquire) || self.closed.is_set()
    }

    /// Asks which of these blocks it has. `answer` gets one result for each key, or the error, on
    /// another thread.
    pub(crate) fn start_locating(
        &self,
        keys: Vec<BlockKey>,
        deadline: Deadline,
        answer: impl FnOnce(Result<Vec<Option<LocatedBlock>>, TierError>) + Send + 'static,
    ) -> Result<SourceCall, TierError> {
        let (source, cancel) = (Arc::clone(&self.source), Arc::new(Cancel::new()));
        let cancelled = Arc::clone(&cancel);
        self.start(&self.locates, cancel, move || {
            let limit = SourceLimit { deadline, cancel: &cancelled };
            let located = catch(|| source.locate(&keys, &limit));
            answer(located.unwrap_or(Err(TierError::NoResult)).and_then(|located| {
                let is_asked = |(key, block): (&BlockKey, &Option<LocatedBlock>)| {
                    block.is_none_or(|block| block.facts.key == *key)
                };
                let is_complete = located.len() == keys.len();
                let is_right = is_complete && keys.iter().zip(&located).all(is_asked);
                if is_right { Ok(located) } else { Err(TierError::NoResult) }
            }));
        })
    }

    /// Fetches the blocks of a queue on another thread: exactly one result for each block that was
    /// taken, each slab of the right length. `end` is called last.
    pub(crate) fn start_fetching(
        &self,
        mut queue: impl LoadQueue + Send + 'static,
        deadline: Deadline,
        end: impl FnOnce() + Send + 'static,
    ) -> Result<SourceCall, TierError> {
        let (source, cancel) = (Arc::clone(&self.source), Arc::new(Cancel::new()));
        let cancelled = Arc::clone(&cancel);
        self.start(&self.fetches, cancel, move || {
            let mut checked = CheckedLoads::new(&mut queue);
            let limit = SourceLimit { deadline, cancel: &cancelled };
            // After a panic of the source, every block without a result fails.
            catch(|| source.fetch_each(&mut checked, &limit));
            checked.fail_rest();
            end();
        })
    }

    fn start(
        &self,
        calls: &Calls,
        cancel: Arc<Cancel>,
        work: impl FnOnce() + Send + 'static,
    ) -> Result<SourceCall, TierError> {
        if self.is_unusable() {
            return Err(TierError::CircuitOpen);
        }
        let started = calls.start(true, work).map_err(without_result)?;
        Ok(SourceCall { started, cancel })
    }

    /// Records what a call says about the health of the source. Returns whether to probe it now.
    pub(crate) fn note(&self, signal: HealthSignal) -> bool {
        let (now, now_unix_ms) = (self.clock.monotonic(), self.clock.unix_ms());
        let is_suspect = matches!(signal, HealthSignal::Failure(_) | HealthSignal::Inconclusive);
        self.change(|breaker| match signal {
            HealthSignal::Success => {
                breaker.succeed(READS, now);
                CircuitChange::None
            }
            HealthSignal::Failure(error) => breaker.fail(READS, error, now, now_unix_ms),
            HealthSignal::Hang => breaker.hang(READS, now, now_unix_ms),
            HealthSignal::Inconclusive => {
                breaker.suspect(READS, now);
                CircuitChange::None
            }
            HealthSignal::None => CircuitChange::None,
        });
        is_suspect
    }

    /// Looks for hung calls, and probes the source if that is due. Returns whether it did.
    pub(crate) fn probe_if_due(&self, health: HealthConfig) -> bool {
        let hang = health.probe_timeout * health.threshold;
        // Not `||`: each list reports its hung calls once.
        if self.fetches.has_hung(hang) | self.locates.has_hung(hang) {
            self.note(HealthSignal::Hang);
        }
        let now = self.clock.monotonic();
        let mut is_due = false;
        self.change(|breaker| {
            is_due = breaker.begin_probe(READS, now);
            CircuitChange::None
        });
        if !is_due {
            return false;
        }
        let deadline = Deadline::after(&*self.clock, health.probe_timeout);
        let source = Arc::clone(&self.source);
        let limit = limit(deadline, Some(&self.closed), false);
        let probed = call(&self.other_calls, limit, move || source.probe(deadline), drop);
        let result = match probed {
            // The previous probe is still stuck.
            Err(TierError::CircuitOpen) => Err(TierError::Timeout),
            result => result.and_then(|probed| probed),
        };
        // The close has aborted the probe: its result says nothing about the source.
        if !self.closed.is_set() {
            let (now, now_unix_ms) = (self.clock.monotonic(), self.clock.unix_ms());
            self.change(|breaker| breaker.end_probe(READS, result, now, now_unix_ms));
        }
        true
    }

    fn change(&self, change: impl FnOnce(&mut Breaker) -> CircuitChange) {
        let mut breaker = self.breaker.lock().unwrap_or_else(PoisonError::into_inner);
        // Under the lock of the breaker, so that an opening never overtakes a later closing.
        match change(&mut breaker) {
            CircuitChange::None => {}
            CircuitChange::Opened => self.is_open.store(true, Ordering::Release),
            CircuitChange::Closed => self.is_open.store(false, Ordering::Release),
        }
    }

    pub(crate) fn count(&self, add: impl FnOnce(&mut FetchCounts)) {
        add(&mut self.counts.lock().unwrap_or_else(PoisonError::into_inner));
    }

    pub(crate) fn stats(&self) -> SourceStats {
        let calls = [&self.locates, &self.fetches, &self.other_calls];
        let ours: u64 = calls.iter().map(|calls| calls.stuck_calls()).sum();
        let stuck = ours + catch(|| self.source.stuck_calls()).unwrap_or(0);
        let health: StageHealth =
            self.breaker.lock().unwrap_or_else(PoisonError::into_inner).health(stuck);
        let counts = *self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        SourceStats {
            located_blocks: counts.located,
            fetched_blocks: counts.fetched,
            fetched_bytes: counts.fetched_bytes,
            stale_blocks: counts.stale,
            damaged_blocks: counts.damaged,
            failed_blocks: counts.failed,
            health,
        }
    }

    /// Ends all waits for this source, for good.
    pub(crate) fn end_all_waits(&self) {
        self.closed.set();
    }

    /// See [`Source::close`].
    pub(crate) fn close(&self, deadline: Deadline) {
        let source = Arc::clone(&self.source);
        // A late close keeps running on its thread; the store does not wait for it.
        drop(call(&self.other_calls, limit(deadline, None, false), move || source.close(), drop));
    }
}

impl SourceCall {
    /// Whether it was refused before it began, because late calls occupy all threads.
    pub(crate) fn is_refused(&self) -> bool {
        self.started.is_refused()
    }
}

impl Drop for SourceCall {
    fn drop(&mut self) {
        self.cancel.set();
    }
}

impl fmt::Debug for SourceCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SourceCall").field("cancel", &self.cancel).finish_non_exhaustive()
    }
}
