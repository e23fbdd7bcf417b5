//! The requests of a trace or a data set, in the order in which the original queues them.
//!
//! A trace has arrivals. The turns of a data set are all there at once, conversation by
//! conversation, in another order in each cycle. The original never reads earlier turns of one.

use std::sync::Arc;
use std::time::Duration;

use crate::compatible::mersenne_twister::MersenneTwister;
use crate::recorded::{Lengths, Recorded};

/// Names that the requests of a trace have in turn.
const TRACE_USERS: u64 = 1000;

/// A recorded request, before what is drawn for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RecordedRequest {
    /// Whose entry it is. An entry of a data set is the same in each cycle.
    pub(super) user: u32,
    /// Its entry among those of the user, from 1.
    pub(super) entry: u32,
    pub(super) arrival: Duration,
    pub(super) lengths: Lengths,
}

/// All recorded requests, cycle after cycle. It never ends.
#[derive(Debug, Clone)]
pub(super) struct RecordedPlan {
    recorded: Arc<Recorded>,
    requests: u64,
    /// The conversations of this cycle that are left, the next one last.
    left: Vec<u32>,
    /// The turn of the next one.
    turn: u32,
}

impl RecordedPlan {
    pub(super) fn new(recorded: &Arc<Recorded>) -> Self {
        Self { recorded: Arc::clone(recorded), requests: 0, left: Vec::new(), turn: 0 }
    }

    /// The next request. `None` if nothing is recorded.
    pub(super) fn next(&mut self, random: &mut MersenneTwister) -> Option<RecordedRequest> {
        let number = self.requests;
        self.requests += 1;
        if let Some((arrival, lengths)) = self.recorded.arrival(number) {
            let user = u32::try_from(number % TRACE_USERS).unwrap_or(0);
            let entry = u32::try_from(number / TRACE_USERS).unwrap_or(u32::MAX).saturating_add(1);
            return Some(RecordedRequest { user, entry, arrival, lengths });
        }
        let conversations = self.recorded.conversations();
        if self.left.is_empty() {
            self.left = shuffled(u32::try_from(conversations.len()).ok()?, random);
            self.left.reverse();
        }
        let user = *self.left.last()?;
        let turns = conversations.get(user as usize)?;
        let lengths = *turns.get(self.turn as usize)?;
        self.turn += 1;
        let entry = self.turn;
        if self.turn as usize == turns.len() {
            self.turn = 0;
            self.left.pop();
        }
        Some(RecordedRequest { user, entry, arrival: Duration::ZERO, lengths })
    }
}

/// `random.shuffle` of the numbers below `count`.
fn shuffled(count: u32, random: &mut MersenneTwister) -> Vec<u32> {
    let mut all: Vec<u32> = (0..count).collect();
    for last in (1..count).rev() {
        let other = random.below(last + 1);
        all.swap(last as usize, other as usize);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `random.seed(42)`, then `random.shuffle(list(range(10)))`.
    #[test]
    fn a_shuffle_is_that_of_python() {
        let mut random = MersenneTwister::new(42);
        assert_eq!(shuffled(10, &mut random), [7, 3, 2, 8, 5, 6, 9, 4, 0, 1]);
    }
}
