//! What a node does when a stage fails, is shed, and comes back.
//!
//! While the circuit for reads is open, the stage counts as having no block: readers go on to the
//! next tier at once. While the one for writes is open, nothing is queued for it; what it lacks
//! since is noted, and queued again when the circuit closes. What a stage that takes no writes has
//! is read as before.

use crate::catalog::{Content, LOWER_STAGES_MAX};
use crate::health::{Direction, Turn};
use crate::mover;
use crate::node::Node;
use crate::stage::{Loaded, StageError};
use crate::state::{NameChange, Pending, State};

/// Most blocks that are remembered as lacking in a stage; beyond it the oldest, which eviction
/// takes first, are not queued again.
const LACKING_MAX: usize = 64 << 10;
/// Most names that wait for a stage that is shed; beyond it the older half is given up.
const NAMES_KEPT_MAX: usize = 32 << 10;

/// What one call to a stage says of its health.
#[derive(Debug, Clone)]
pub(crate) enum Verdict {
    /// It works.
    Works,
    /// It does not.
    Failed(StageError),
    /// A call to it has lasted too long.
    Hangs,
    /// It did not answer in a time that was too short to tell.
    Unclear,
    /// Nothing.
    Nothing,
}

impl Verdict {
    /// The verdict on a call that had `is_long_enough` to answer, from what it failed with. One
    /// block that failed makes a failed call.
    pub(crate) fn of<'a>(
        errors: impl Iterator<Item = Option<&'a StageError>>,
        is_long_enough: bool,
    ) -> Self {
        let mut verdict = Self::Nothing;
        for error in errors {
            match error {
                None | Some(StageError::Full | StageError::Declined { .. }) => {
                    if matches!(verdict, Self::Nothing) {
                        verdict = Self::Works;
                    }
                }
                Some(StageError::Closed | StageError::Shed) => {}
                Some(StageError::Timeout) if !is_long_enough => verdict = Self::Unclear,
                Some(error) => return Self::Failed(error.clone()),
            }
        }
        verdict
    }

    /// The verdict on a load.
    pub(crate) fn of_load(loaded: &[Loaded], is_long_enough: bool) -> Self {
        let errors = loaded.iter().map(|loaded| match loaded {
            Loaded::Failed(error) => Some(error),
            Loaded::Hit(_) | Loaded::Gone | Loaded::Damaged => None,
        });
        Self::of(errors, is_long_enough)
    }
}

impl Node {
    /// Enters what a call to a stage said of its health.
    pub(crate) fn judge(
        &self,
        state: &mut State,
        stage: usize,
        direction: Direction,
        verdict: Verdict,
    ) {
        let now = self.clock.monotonic();
        let breaker = &mut state.breakers[stage];
        let turn = match verdict {
            Verdict::Works => {
                breaker.succeed(direction, now);
                Turn::None
            }
            Verdict::Failed(error) => {
                self.announce_look();
                breaker.fail(direction, error, now, self.clock.unix_ms())
            }
            Verdict::Hangs => breaker.hang(direction, now, self.clock.unix_ms()),
            Verdict::Unclear => {
                breaker.suspect(direction, now);
                self.announce_look();
                Turn::None
            }
            Verdict::Nothing => Turn::None,
        };
        self.turn(state, stage, direction, turn);
    }

    /// Enters how a probe ended.
    pub(crate) fn end_probe(
        &self,
        state: &mut State,
        stage: usize,
        direction: Direction,
        result: Result<(), StageError>,
    ) {
        if let Err(error) = &result {
            state.note_error(stage, error.clone());
        }
        let (now, now_unix_ms) = (self.clock.monotonic(), self.clock.unix_ms());
        let is_writable = result.is_ok() && direction == Direction::Writes;
        if is_writable && !state.lacking[stage].is_empty() {
            // Too few writes failed to open the circuit: they are tried again.
            state.retries[stage] = state.lacking[stage].len();
            self.announce_work();
        }
        let turn = state.breakers[stage].end_probe(direction, result, now, now_unix_ms);
        self.turn(state, stage, direction, turn);
    }

    fn turn(&self, state: &mut State, stage: usize, direction: Direction, turn: Turn) {
        let is_open = match turn {
            Turn::None => return,
            Turn::Opened => true,
            Turn::Closed => false,
        };
        self.stages[stage].set_shed(direction, is_open);
        let bits = match direction {
            Direction::Reads => &mut state.shed,
            Direction::Writes => &mut state.write_shed,
        };
        *bits = *bits & !(1 << stage) | u8::from(is_open) << stage;
        match (direction, is_open) {
            // What only this stage has came or went all at once.
            (Direction::Reads, _) => state.lose_changes(),
            (Direction::Writes, true) => mover::give_up_queue(state, stage, &StageError::Shed),
            (Direction::Writes, false) => {
                // Names first: the mover tells them before it writes blocks.
                state.retries[stage] = state.lacking[stage].len();
                self.announce_work();
            }
        }
        self.announce_change();
    }

    /// Whether no tier takes blocks: there is no DRAM, and nothing that keeps bytes is written.
    pub(crate) fn takes_nothing(&self, state: &State) -> bool {
        let mut keepers = (0..self.stages.len()).filter(|at| !self.stages[*at].keeps_names_only());
        !state.has_dram && state.write_shed != 0 && keepers.all(|stage| state.is_write_shed(stage))
    }

    /// The stages that kept this put waiting are probed soon, unless they are known to work.
    pub(crate) fn suspect_those_behind(&self, state: &mut State) {
        let now = self.clock.monotonic();
        for stage in 0..self.stages.len() {
            if state.pending_bytes[stage] > 0 || !state.names[stage].is_empty() {
                state.breakers[stage].suspect(Direction::Writes, now);
            }
        }
    }
}

impl State {
    /// Whether a stage is not read.
    pub(crate) fn is_shed(&self, stage: usize) -> bool {
        self.shed & (1 << stage) != 0
    }

    /// Whether a stage is not written.
    pub(crate) fn is_write_shed(&self, stage: usize) -> bool {
        self.write_shed & (1 << stage) != 0
    }

    /// Whether a content is where only shed stages have its bytes: nobody can read it now.
    pub(crate) fn is_out_of_reach(&self, content: &Content) -> bool {
        if self.shed == 0 || content.slab.is_some() {
            return false;
        }
        let keeps_bytes = |stage: &usize| {
            content.address(*stage).is_some() && self.names_only & (1 << stage) == 0
        };
        let mut holders = (0..LOWER_STAGES_MAX).filter(keeps_bytes).peekable();
        let is_below = holders.peek().is_some();
        is_below && holders.all(|stage| self.is_shed(stage))
    }

    /// Most names that wait for one stage that is not shed.
    pub(crate) fn names_waiting(&self) -> usize {
        let healthy = (0..LOWER_STAGES_MAX).filter(|stage| !self.is_write_shed(*stage));
        healthy.map(|stage| self.names[stage].len()).max().unwrap_or(0)
    }

    /// A stage does not have a block that it should have.
    pub(crate) fn note_lacking(&mut self, stage: usize, pending: Pending) {
        let lacking = &mut self.lacking[stage];
        if lacking.len() == LACKING_MAX {
            lacking.pop_front();
            self.retries[stage] = self.retries[stage].min(LACKING_MAX - 1);
        }
        lacking.push_back(pending);
    }

    /// Names that a stage was told in vain go before those that came since.
    pub(crate) fn keep_names(&mut self, stage: usize, untold: &[NameChange]) {
        self.names[stage].splice(0..0, untold.iter().copied());
        while self.is_write_shed(stage) && self.names[stage].len() >= NAMES_KEPT_MAX {
            self.bound_names(stage);
        }
    }

    /// Names that a shed stage has yet to be told are kept, in a bounded number: what is given up
    /// shows after a restart, as a block that was deleted or a name that is missing.
    pub(crate) fn bound_names(&mut self, stage: usize) {
        if !self.is_write_shed(stage) || self.names[stage].len() < NAMES_KEPT_MAX {
            return;
        }
        let count = (NAMES_KEPT_MAX / 2) as u64;
        self.names[stage].drain(..NAMES_KEPT_MAX / 2);
        self.names_tickets[stage].settled += count;
        self.counters.name_failures += count;
        self.unwritten.count(stage, count);
    }

    /// Queues again what a stage lacks since it failed, as far as it is still in DRAM: a batch at a
    /// time, when its mover has nothing else to do, so that puts do not wait for it.
    pub(crate) fn queue_lacking(&mut self, stage: usize, bytes_max: u64) {
        let mut bytes = 0;
        while self.retries[stage] > 0 && bytes < bytes_max && !self.is_write_shed(stage) {
            self.retries[stage] -= 1;
            let Some(pending) = self.lacking[stage].pop_front() else { continue };
            let place = (pending.content, pending.generation);
            let is_lacking = self.catalog.live_content(place).is_some_and(|content| {
                let is_queued = content.dirty & (1 << stage) != 0;
                content.slab.is_some() && content.address(stage).is_none() && !is_queued
            });
            if is_lacking {
                bytes += u64::from(pending.facts.bytes);
                self.push_again(stage, pending.facts, pending.content, pending.tries);
            }
        }
    }
}
