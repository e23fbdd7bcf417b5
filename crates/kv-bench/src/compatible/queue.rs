//! Requests that have arrived, by class of service. Users do not wait for answers.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet, VecDeque};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cascade_runtime::Clock;

use crate::compatible::plan::{ObjectRequest, Schedule};

/// Longest wait before the end of the run is looked at again.
const POLL: Duration = Duration::from_millis(100);

/// How requests arrive and are served.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pace {
    /// Real time for each second of thinking; 0: all requests of a limited run are there at once.
    pub think_scale: f64,
}

/// The queue of a run.
pub(crate) struct ObjectQueue {
    start: Duration,
    pace: Pace,
    /// With a limited number of requests, a user's requests are served one after another: what a
    /// turn finds then depends on no thread.
    keeps_order: bool,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    schedule: Box<dyn Iterator<Item = ObjectRequest> + Send>,
    next: Option<ObjectRequest>,
    ready: BinaryHeap<Reverse<Ready>>,
    in_service: usize,
    /// Users with a request in service, and their requests that wait for it.
    busy: HashSet<u32>,
    waiting: HashMap<u32, VecDeque<ObjectRequest>>,
}

/// The order of service: the class, then the arrival.
struct Ready(ObjectRequest);

impl ObjectQueue {
    /// The queue before the first request.
    ///
    /// # Panics
    /// If an endless number of requests would be there at once.
    pub(crate) fn new(
        schedule: Schedule,
        requests_max: Option<u64>,
        pace: Pace,
        start: Duration,
    ) -> Self {
        assert!(
            pace.think_scale > 0.0 || requests_max.is_some(),
            "users that do not think ask without end"
        );
        let limit = requests_max.map_or(usize::MAX, |it| usize::try_from(it).unwrap_or(usize::MAX));
        let mut schedule = schedule.take(limit);
        let next = schedule.next();
        let state = State {
            schedule: Box::new(schedule),
            next,
            ready: BinaryHeap::new(),
            in_service: 0,
            busy: HashSet::new(),
            waiting: HashMap::new(),
        };
        let keeps_order = requests_max.is_some();
        Self { start, pace, keeps_order, state: Mutex::new(state), changed: Condvar::new() }
    }

    /// When a request is due.
    pub(crate) fn due(&self, request: &ObjectRequest) -> Duration {
        self.start + request.arrival.mul_f64(self.pace.think_scale)
    }

    /// The next request to serve. Waits for it; `None` once there are no more, or the run is over.
    pub(crate) fn take(
        &self,
        clock: &dyn Clock,
        is_over: &dyn Fn() -> bool,
    ) -> Option<ObjectRequest> {
        let mut state = self.lock();
        loop {
            if is_over() {
                return None;
            }
            let now = clock.monotonic();
            self.admit(&mut state, now);
            if let Some(request) = state.pop(self.keeps_order) {
                if !state.ready.is_empty() {
                    self.changed.notify_one();
                }
                return Some(request);
            }
            let next = state.next.as_ref().map(|request| self.due(request));
            if next.is_none() && state.in_service == 0 {
                self.changed.notify_all();
                return None;
            }
            let wait = next.map_or(POLL, |due| due.saturating_sub(now).min(POLL));
            let woken = self.changed.wait_timeout(state, wait);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// A request was served.
    pub(crate) fn finish(&self, user: u32) {
        let mut state = self.lock();
        state.in_service -= 1;
        state.busy.remove(&user);
        let next = state.waiting.get_mut(&user).and_then(VecDeque::pop_front);
        if let Some(request) = next {
            state.ready.push(Reverse(Ready(request)));
        }
        drop(state);
        self.changed.notify_one();
    }

    fn admit(&self, state: &mut State, now: Duration) {
        while state.next.as_ref().is_some_and(|request| self.due(request) <= now) {
            let next = state.schedule.next();
            let Some(request) = std::mem::replace(&mut state.next, next) else { break };
            state.ready.push(Reverse(Ready(request)));
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn pop(&mut self, keeps_order: bool) -> Option<ObjectRequest> {
        while let Some(Reverse(Ready(request))) = self.ready.pop() {
            if keeps_order && !self.busy.insert(request.user) {
                self.waiting.entry(request.user).or_default().push_back(request);
                continue;
            }
            self.in_service += 1;
            return Some(request);
        }
        None
    }
}

impl Ready {
    fn rank(&self) -> (usize, u64) {
        (self.0.class.index(), self.0.number)
    }
}

impl PartialEq for Ready {
    fn eq(&self, other: &Self) -> bool {
        self.rank() == other.rank()
    }
}

impl Eq for Ready {}

impl PartialOrd for Ready {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Ready {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.rank().cmp(&other.rank())
    }
}

#[cfg(test)]
mod tests {
    use cascade_runtime::ManualClock;

    use super::*;
    use crate::model::KvModel;
    use crate::plan::{Phases, Workload};
    use crate::retrieval::Documents;

    fn queue(requests_max: Option<u64>) -> ObjectQueue {
        let workload = Workload {
            model: KvModel::new("tiny-1b", 1).unwrap(),
            users: 20,
            seed: 3,
            has_multi_turn: true,
            has_shared_prompts: true,
            requests_max,
            documents: Documents::default(),
            phases: Phases::Both,
            recorded: None,
        };
        let pace = Pace { think_scale: 1.0 };
        ObjectQueue::new(Schedule::new(&workload), requests_max, pace, Duration::ZERO)
    }

    /// A user asks on, whether its last request was answered or not.
    #[test]
    fn requests_arrive_without_answers_and_are_served_by_class() {
        let (queue, clock) = (queue(None), ManualClock::default());
        clock.advance(Duration::from_secs(10));
        let taken: Vec<_> = (0..100).map(|_| queue.take(&clock, &|| false).unwrap()).collect();
        let rank = |request: &ObjectRequest| (request.class.index(), request.number);
        assert!(taken.is_sorted_by_key(rank));
        let of_first = taken.iter().filter(|it| it.user == taken[0].user).count();
        assert!(of_first > 1, "none was answered, and only one came");
        assert!(taken.iter().all(|request| request.arrival <= Duration::from_secs(10)));
    }

    #[test]
    fn a_limited_run_serves_its_requests_and_each_user_in_order() {
        let (queue, clock) = (queue(Some(200)), ManualClock::default());
        clock.advance(Duration::from_secs(1000));
        let mut numbers = Vec::new();
        let mut in_service: Vec<ObjectRequest> = Vec::new();
        let mut last_of_user = HashMap::new();
        while numbers.len() < 200 {
            while in_service.len() < 7 && numbers.len() < 200 {
                let mut state = queue.lock();
                queue.admit(&mut state, clock.monotonic());
                let Some(request) = state.pop(true) else { break };
                drop(state);
                assert!(in_service.iter().all(|it| it.user != request.user));
                let last = last_of_user.insert(request.user, request.number);
                assert!(last.is_none_or(|last| last < request.number));
                numbers.push(request.number);
                in_service.push(request);
            }
            queue.finish(in_service.remove(0).user);
        }
        for request in in_service {
            queue.finish(request.user);
        }
        assert_eq!(queue.take(&clock, &|| false), None);
        numbers.sort_unstable();
        assert_eq!(numbers, (0..200).collect::<Vec<_>>());
    }
}
