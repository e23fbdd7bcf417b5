//! The choice of the next thread.

use super::Policy;
use super::entropy::Random;
use super::threads::Thread;

/// By priorities, a thread that was runnable for this many decisions runs next: callers need not
/// survive starvation, which no real scheduler causes.
const STARVED_DECISIONS: u64 = 2_000;
/// How often starvation is looked for, in decisions.
const STARVED_CHECK: u64 = 64;
/// By priorities, points between two decisions at most: to see starvation and the limit.
const PRIORITY_GAP_MAX: u64 = 64;
/// First priorities are above all that threads drop to.
const FIRST_PRIORITY_MIN: u64 = 1 << 63;

pub(super) struct Schedule {
    random: Random,
    policy: Policy,
    /// The lowest priority so far.
    lowest: u64,
    /// Points until the running thread's priority drops.
    until_change: u64,
}

impl Schedule {
    pub(super) fn new(policy: Policy, random: Random) -> Self {
        let mut schedule = Self { random, policy, lowest: FIRST_PRIORITY_MIN, until_change: 0 };
        schedule.draw_change();
        schedule
    }

    /// The next thread to run. `passed` points went by since the last choice.
    pub(super) fn choose(
        &mut self,
        passed: u64,
        decision: u64,
        runnable: &[u32],
        threads: &mut [Thread],
    ) -> u32 {
        let next = match self.policy {
            Policy::Uniform { .. } => runnable[self.random.index_below(runnable.len())],
            Policy::Priorities { .. } => {
                self.until_change = self.until_change.saturating_sub(passed);
                self.choose_by_priority(decision, runnable, threads)
            }
        };
        let thread = &mut threads[next as usize];
        thread.last_run = decision;
        thread.turns += 1;
        next
    }

    fn choose_by_priority(
        &mut self,
        decision: u64,
        runnable: &[u32],
        threads: &mut [Thread],
    ) -> u32 {
        let highest = |threads: &[Thread]| {
            let by_priority = runnable.iter().max_by_key(|at| threads[**at as usize].priority);
            *by_priority.expect("a runnable thread")
        };
        let mut next = highest(threads);
        let is_starved = |at: &&u32| {
            decision.saturating_sub(threads[**at as usize].last_run) > STARVED_DECISIONS
        };
        if decision.is_multiple_of(STARVED_CHECK)
            && let Some(starved) = runnable.iter().find(is_starved).copied()
        {
            // Else the thread that starved it would go on right after.
            self.drop_priority(&mut threads[next as usize]);
            return starved;
        }
        if self.until_change == 0 {
            self.draw_change();
            self.drop_priority(&mut threads[next as usize]);
            next = highest(threads);
        }
        next
    }

    /// Points until the next decision.
    pub(super) fn next_gap(&mut self) -> u64 {
        match self.policy {
            Policy::Uniform { gap_mean } => 1 + self.random.below(spread(gap_mean)),
            Policy::Priorities { .. } => self.until_change.clamp(1, PRIORITY_GAP_MAX),
        }
    }

    /// A thread that yields lets all others run first.
    pub(super) fn yielded(&mut self, thread: &mut Thread) {
        if let Policy::Priorities { .. } = self.policy {
            self.drop_priority(thread);
        }
    }

    pub(super) fn first_priority(&mut self) -> u64 {
        FIRST_PRIORITY_MIN + (self.random.next_u64() >> 2)
    }

    pub(super) fn index_below(&mut self, count: usize) -> usize {
        self.random.index_below(count)
    }

    fn drop_priority(&mut self, thread: &mut Thread) {
        self.lowest -= 1;
        thread.priority = self.lowest;
    }

    /// The paper draws a number of changes for a run of known length. A world has no known length,
    /// so the gaps are drawn.
    fn draw_change(&mut self) {
        if let Policy::Priorities { change_gap_mean } = self.policy {
            self.until_change = 1 + self.random.below(spread(change_gap_mean));
        }
    }
}

/// Numbers below this one, plus 1, have the mean.
fn spread(mean: u32) -> u64 {
    (u64::from(mean) * 2).saturating_sub(1)
}

impl Policy {
    /// Whether a thread that becomes runnable takes over from the running one.
    pub(super) fn prefers(self, runnable: &Thread, running: &Thread) -> bool {
        matches!(self, Self::Priorities { .. }) && runnable.priority > running.priority
    }
}
