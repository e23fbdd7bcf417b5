//! Requests that are due, by class of service, and users that think until theirs is.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cascade_runtime::Clock;

use crate::plan::{PlannedRequest, UserPlan, Workload};

/// Longest wait before the end of the run is looked at again.
const POLL: Duration = Duration::from_millis(100);

/// A user's next request.
#[derive(Debug)]
pub(crate) struct Task {
    /// The user.
    pub(crate) plan: UserPlan,
    /// What it asks for.
    pub(crate) request: PlannedRequest,
    /// When it is due: its latency counts from here, whenever it is served.
    pub(crate) due: Duration,
}

/// The order of service: the class, then the time at which it became due.
#[derive(Debug)]
struct Ready(Task);

/// The order of waking.
#[derive(Debug)]
struct Waiting(Task);

/// How requests arrive.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Arrivals {
    /// A user thinks, asks, waits for the answer, and thinks again.
    AfterAnswer,
    /// Requests arrive at a rate a second, whatever the store does.
    AtRate(f64),
    /// Requests arrive at the times of a trace, whatever the store does.
    Recorded,
}

impl Arrivals {
    pub(crate) fn of(workload: &Workload, rate: Option<f64>) -> Self {
        let is_trace = workload.recorded.as_ref().is_some_and(|it| it.has_arrivals());
        if is_trace { Self::Recorded } else { rate.map_or(Self::AfterAnswer, Self::AtRate) }
    }
}

#[derive(Debug, Default)]
struct State {
    waiting: BinaryHeap<Reverse<Waiting>>,
    ready: BinaryHeap<Reverse<Ready>>,
    in_service: usize,
    /// Users that ask: those with a smaller number.
    users: u32,
    /// Users that have asked before: those with a smaller number.
    known_users: u32,
    /// Users that do not ask any more, until they are needed again.
    resting: Vec<UserPlan>,
}

/// The queue of a run.
#[derive(Debug)]
pub(crate) struct RequestQueue<'a> {
    workload: &'a Workload,
    arrivals: Arrivals,
    start: Duration,
    state: Mutex<State>,
    changed: Condvar,
}

impl<'a> RequestQueue<'a> {
    /// The queue with the first request of each user.
    pub(crate) fn new(workload: &'a Workload, arrivals: Arrivals, start: Duration) -> Self {
        let queue =
            Self { workload, arrivals, start, state: Mutex::default(), changed: Condvar::new() };
        queue.set_users(workload.users, start);
        queue
    }

    /// Goes on with this number of users: new ones start now, those beyond rest after their answer.
    pub(crate) fn set_users(&self, users: u32, now: Duration) {
        let mut state = self.lock();
        state.users = users;
        let resting = std::mem::take(&mut state.resting);
        let (mut starting, resting): (Vec<_>, Vec<_>) =
            resting.into_iter().partition(|plan: &UserPlan| plan.user() < users);
        state.resting = resting;
        let new = state.known_users..users.max(state.known_users);
        state.known_users = new.end;
        drop(state);
        starting.extend(new.map(|user| UserPlan::new(self.workload, user)));
        for plan in starting {
            self.schedule(plan, now);
        }
        self.changed.notify_all();
    }

    /// The next request to serve. Waits for it; `None` once there are no more, or the run is over.
    pub(crate) fn take(&self, clock: &dyn Clock, is_over: &dyn Fn() -> bool) -> Option<Task> {
        let mut state = self.lock();
        loop {
            if is_over() {
                return None;
            }
            let now = clock.monotonic();
            while state.waiting.peek().is_some_and(|Reverse(first)| first.0.due <= now) {
                let Some(Reverse(Waiting(task))) = state.waiting.pop() else { break };
                state.ready.push(Reverse(Ready(task)));
            }
            if let Some(Reverse(Ready(task))) = state.ready.pop() {
                state.in_service += 1;
                return Some(task);
            }
            let next = state.waiting.peek().map(|Reverse(first)| first.0.due);
            if next.is_none() && state.in_service == 0 {
                // Others wait for requests that will not come.
                self.changed.notify_all();
                return None;
            }
            let wait = next.map_or(POLL, |due| due.saturating_sub(now).min(POLL));
            let woken = self.changed.wait_timeout(state, wait);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The user got its answer at `answered`, and goes on.
    pub(crate) fn finish(&self, plan: UserPlan, answered: Duration) {
        let mut state = self.lock();
        if plan.user() < state.users {
            drop(state);
            self.schedule(plan, answered);
            state = self.lock();
        } else {
            state.resting.push(plan);
        }
        state.in_service -= 1;
        drop(state);
        self.changed.notify_one();
    }

    fn schedule(&self, mut plan: UserPlan, answered: Duration) {
        let request = plan.next_request(self.workload);
        let limit = self.workload.requests_of(request.user);
        if plan.is_exhausted() || limit.is_some_and(|limit| request.number >= limit) {
            return;
        }
        let number = request.number * u64::from(self.workload.users) + u64::from(request.user);
        let due = match self.arrivals {
            Arrivals::AfterAnswer => answered + request.think,
            Arrivals::Recorded => {
                let due = self.workload.recorded.as_ref().map(|it| it.due(number));
                self.start + due.unwrap_or_default()
            }
            Arrivals::AtRate(rate) => {
                let seconds = number as f64 / rate;
                self.start + Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX / 2)
            }
        };
        self.lock().waiting.push(Reverse(Waiting(Task { plan, request, due })));
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Ready {
    fn rank(&self) -> (usize, Duration, u32) {
        (self.0.request.class.index(), self.0.due, self.0.request.user)
    }
}

impl Waiting {
    fn rank(&self) -> (Duration, u32) {
        (self.0.due, self.0.request.user)
    }
}

macro_rules! ordered_by_rank {
    ($name:ident) => {
        impl PartialEq for $name {
            fn eq(&self, other: &Self) -> bool {
                self.rank() == other.rank()
            }
        }

        impl Eq for $name {}

        impl PartialOrd for $name {
            fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
                Some(self.cmp(other))
            }
        }

        impl Ord for $name {
            fn cmp(&self, other: &Self) -> Ordering {
                self.rank().cmp(&other.rank())
            }
        }
    };
}

ordered_by_rank!(Ready);
ordered_by_rank!(Waiting);

#[cfg(test)]
mod tests {
    use cascade_runtime::ManualClock;

    use super::*;
    use crate::model::KvModel;
    use crate::plan::Phases;
    use crate::retrieval::Documents;

    fn workload(requests_max: u64) -> Workload {
        Workload {
            model: KvModel::new("tiny-1b", 1).unwrap(),
            users: 40,
            seed: 3,
            has_multi_turn: true,
            has_shared_prompts: true,
            requests_max: Some(requests_max),
            documents: Documents::default(),
            phases: Phases::Both,
            recorded: None,
            settings: crate::workload_settings::WorkloadSettings::default(),
        }
    }

    #[test]
    fn due_requests_are_served_by_class_and_then_by_age() {
        let workload = workload(40);
        let clock = ManualClock::default();
        let queue = RequestQueue::new(&workload, Arrivals::AfterAnswer, clock.monotonic());
        clock.advance(Duration::from_secs(60));
        let mut last = (0, Duration::ZERO);
        for _ in 0..40 {
            let task = queue.take(&clock, &|| false).unwrap();
            let rank = (task.request.class.index(), task.due);
            assert!(rank >= last, "{rank:?} after {last:?}");
            last = rank;
        }
    }

    #[test]
    fn a_limited_run_ends_after_its_requests() {
        let workload = workload(100);
        let clock = ManualClock::default();
        let queue = RequestQueue::new(&workload, Arrivals::AfterAnswer, clock.monotonic());
        let mut served = 0;
        loop {
            clock.advance(Duration::from_secs(2));
            let Some(task) = queue.take(&clock, &|| false) else { break };
            served += 1;
            queue.finish(task.plan, clock.monotonic());
        }
        assert_eq!(served, 100);
    }

    #[test]
    fn users_beyond_the_number_rest_and_go_on_where_they_were() {
        let workload = Workload { requests_max: None, ..workload(0) };
        let clock = ManualClock::default();
        let queue = RequestQueue::new(&workload, Arrivals::AfterAnswer, clock.monotonic());
        // One request of each user that asks.
        let round = || {
            clock.advance(Duration::from_secs(60));
            let state = queue.lock();
            let count = state.waiting.len() + state.ready.len();
            drop(state);
            let tasks: Vec<_> =
                (0..count).map(|_| queue.take(&clock, &|| false).unwrap()).collect();
            let numbers: Vec<_> =
                tasks.iter().map(|task| (task.request.user, task.request.number)).collect();
            for task in tasks {
                queue.finish(task.plan, clock.monotonic());
            }
            numbers
        };
        assert_eq!(round().len(), 40);
        queue.set_users(10, clock.monotonic());
        // Those that were thinking ask once more.
        assert_eq!(round().len(), 40);
        let few = round();
        assert_eq!(few.len(), 10);
        assert!(few.iter().all(|(user, number)| *user < 10 && *number == 2));
        queue.set_users(50, clock.monotonic());
        let mut many = round();
        many.sort_unstable();
        assert_eq!(many.len(), 50);
        assert_eq!((many[9], many[10], many[49]), ((9, 3), (10, 2), (49, 0)));
    }

    /// With a rate, a late answer does not delay when the next request is due.
    #[test]
    fn arrivals_at_a_rate_do_not_wait_for_answers() {
        let workload = workload(80);
        let clock = ManualClock::default();
        let queue = RequestQueue::new(&workload, Arrivals::AtRate(10.0), clock.monotonic());
        clock.advance(Duration::from_secs(100));
        let mut due = Vec::new();
        while let Some(task) = queue.take(&clock, &|| false) {
            due.push(task.due);
            queue.finish(task.plan, clock.monotonic());
        }
        due.sort();
        assert_eq!(due.len(), 80);
        assert_eq!(due[79], Duration::from_millis(7900));
    }
}
