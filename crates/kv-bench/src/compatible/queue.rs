//! Requests that have arrived, by class of service. Users do not wait for answers.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet, VecDeque};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cascade_runtime::Clock;

use crate::compatible::plan::{ObjectRequest, Schedule};
use crate::qos::QosClass;

/// Longest wait before the end of the run is looked at again.
const POLL: Duration = Duration::from_millis(100);

/// How requests arrive and are served.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pace {
    /// Real time for each second of thinking; 0: all requests of a limited run are there at once.
    pub think_scale: f64,
    /// How long each worker is waited for after the window, one after another.
    pub thread_wait: Duration,
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

/// What [`ObjectQueue::take_at`] found.
#[derive(Debug)]
pub(crate) enum Taken {
    /// The next request.
    Request(ObjectRequest),
    /// None is due before this time.
    NotBefore(Duration),
    /// There are no more.
    None,
}

struct State {
    /// What has arrived is not kept: each class draws the whole schedule again, and takes its own
    /// requests out of it. So memory depends on the users, and not on how many requests wait.
    classes: Vec<ClassRequests>,
    /// Requests that waited for another one of their user, which ended.
    ready: BinaryHeap<Reverse<Ready>>,
    in_service: usize,
    /// Users with a request in service, and their requests that wait for it.
    busy: HashSet<u32>,
    waiting: HashMap<u32, VecDeque<ObjectRequest>>,
    /// Documents whose first question was served, and later questions that wait for it.
    answered: HashSet<u32>,
    questions: HashMap<u32, Vec<ObjectRequest>>,
}

/// The requests of a class in the order of arrival, drawn when they are served.
struct ClassRequests {
    class: QosClass,
    schedule: Box<dyn Iterator<Item = ObjectRequest> + Send>,
    next: Option<ObjectRequest>,
}

/// The order of service: the class, then the arrival.
struct Ready(ObjectRequest);

impl ObjectQueue {
    /// The queue before the first request.
    ///
    /// # Panics
    /// If an endless number of requests would be there at once.
    pub(crate) fn new(
        schedule: &Schedule,
        requests_max: Option<u64>,
        pace: Pace,
        start: Duration,
    ) -> Self {
        assert!(
            pace.think_scale > 0.0 || requests_max.is_some(),
            "users that do not think ask without end"
        );
        let limit = requests_max.map_or(usize::MAX, |it| usize::try_from(it).unwrap_or(usize::MAX));
        // A class without users would be looked for without end.
        let has_users = |class: &QosClass| schedule.has_class(*class);
        let classes = QosClass::ALL.into_iter().filter(has_users).map(|class| {
            let requests = schedule.clone().take(limit);
            let mut schedule = requests.filter(move |request| request.class == class);
            let next = schedule.next();
            ClassRequests { class, schedule: Box::new(schedule), next }
        });
        let state = State {
            classes: classes.collect(),
            ready: BinaryHeap::new(),
            in_service: 0,
            busy: HashSet::new(),
            waiting: HashMap::new(),
            answered: HashSet::new(),
            questions: HashMap::new(),
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
            let is_due = |request: &ObjectRequest| self.due(request) <= now;
            if let Some(request) = state.pop(self.keeps_order, &is_due) {
                if state.has_more(&is_due) {
                    self.changed.notify_one();
                }
                return Some(request);
            }
            let next = state.heads().map(|request| self.due(request)).min();
            if next.is_none() && state.in_service == 0 {
                self.changed.notify_all();
                return None;
            }
            let wait = next.map_or(POLL, |due| due.saturating_sub(now).min(POLL));
            let woken = self.changed.wait_timeout(state, wait);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The next request to serve at a time that the caller chooses. It does not wait.
    pub(crate) fn take_at(&self, now: Duration) -> Taken {
        let mut state = self.lock();
        let is_due = |request: &ObjectRequest| self.due(request) <= now;
        if let Some(request) = state.pop(self.keeps_order, &is_due) {
            return Taken::Request(request);
        }
        state.heads().map(|request| self.due(request)).min().map_or(Taken::None, Taken::NotBefore)
    }

    /// A request was served.
    pub(crate) fn finish(&self, request: &ObjectRequest) {
        let mut state = self.lock();
        state.in_service -= 1;
        state.busy.remove(&request.user);
        let next = state.waiting.get_mut(&request.user).and_then(VecDeque::pop_front);
        state.ready.extend(next.map(|request| Reverse(Ready(request))));
        if let Some(first) = request.question.filter(|question| question.is_first) {
            state.answered.insert(first.document);
            let questions = state.questions.remove(&first.document).unwrap_or_default();
            state.ready.extend(questions.into_iter().map(|request| Reverse(Ready(request))));
        }
        drop(state);
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// The next request of each class.
    fn heads(&self) -> impl Iterator<Item = &ObjectRequest> {
        self.classes.iter().filter_map(|class| class.next.as_ref())
    }

    fn has_more(&self, is_due: &dyn Fn(&ObjectRequest) -> bool) -> bool {
        !self.ready.is_empty() || self.heads().any(is_due)
    }

    /// The first request that may be served now.
    fn pop(
        &mut self,
        keeps_order: bool,
        is_due: &dyn Fn(&ObjectRequest) -> bool,
    ) -> Option<ObjectRequest> {
        while let Some(request) = self.pop_first(is_due) {
            let question = request.question.filter(|question| !question.is_first);
            let first = question.filter(|question| !self.answered.contains(&question.document));
            if let Some(first) = first.filter(|_| keeps_order) {
                self.questions.entry(first.document).or_default().push(request);
                continue;
            }
            if keeps_order && !self.busy.insert(request.user) {
                self.waiting.entry(request.user).or_default().push_back(request);
                continue;
            }
            self.in_service += 1;
            return Some(request);
        }
        None
    }

    /// The first of those that are due, by class, then by arrival.
    fn pop_first(&mut self, is_due: &dyn Fn(&ObjectRequest) -> bool) -> Option<ObjectRequest> {
        let mut heads = self.classes.iter_mut();
        let due = heads.find(|class| class.next.as_ref().is_some_and(is_due));
        let ready = self.ready.peek().map(|Reverse(ready)| ready.rank());
        let arrived = due.as_ref().and_then(|class| {
            class.next.as_ref().map(|request| (class.class.index(), request.number))
        });
        match (ready, arrived) {
            (Some(ready), arrived) if arrived.is_none_or(|arrived| ready < arrived) => {
                self.ready.pop().map(|Reverse(Ready(request))| request)
            }
            _ => due?.take(),
        }
    }
}

impl ClassRequests {
    fn take(&mut self) -> Option<ObjectRequest> {
        let next = self.schedule.next();
        std::mem::replace(&mut self.next, next)
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

    fn workload(requests_max: Option<u64>) -> Workload {
        Workload {
            model: KvModel::new("tiny-1b", 1).unwrap(),
            users: 20,
            seed: 3,
            has_multi_turn: true,
            has_shared_prompts: true,
            requests_max,
            documents: Documents::default(),
            phases: Phases::Both,
            recorded: None,
            settings: crate::workload_settings::WorkloadSettings::default(),
        }
    }

    fn queue_schedule() -> Schedule {
        Schedule::new(&workload(None))
    }

    fn queue(requests_max: Option<u64>) -> ObjectQueue {
        let pace = Pace { think_scale: 1.0, thread_wait: Duration::ZERO };
        ObjectQueue::new(
            &Schedule::new(&workload(requests_max)),
            requests_max,
            pace,
            Duration::ZERO,
        )
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

    /// Requests of a day wait, and none of them is kept.
    #[test]
    fn requests_that_wait_take_no_memory() {
        let (queue, clock) = (queue(None), ManualClock::default());
        clock.advance(Duration::from_secs(86_400));
        let mut first = queue.take(&clock, &|| false).unwrap();
        for _ in 0..2000 {
            let next = queue.take(&clock, &|| false).unwrap();
            // The class that is served first waits longest: no other one has its turn.
            assert_eq!(next.class, first.class);
            assert!(next.number > first.number);
            first = next;
        }
        let state = queue.lock();
        assert_eq!((state.ready.len(), state.waiting.len(), state.busy.len()), (0, 0, 0));
        assert!(state.classes.len() > 1 && state.classes.len() <= 3);
        assert_eq!(state.heads().count(), state.classes.len());
        // What docs/benchmark.md says of those that wait in a limited run.
        assert_eq!(size_of::<ObjectRequest>(), 96);
    }

    /// The order is that of one queue of all requests that have arrived.
    #[test]
    fn drawing_late_changes_no_request_and_no_order() {
        let (queue, clock) = (queue(None), ManualClock::default());
        let mut schedule = queue_schedule();
        let (mut next, mut arrived) = (schedule.next().unwrap(), Vec::new());
        for _ in 0..300 {
            clock.advance(Duration::from_millis(700));
            while next.arrival <= clock.monotonic() {
                arrived.push(std::mem::replace(&mut next, schedule.next().unwrap()));
            }
            let rank = |request: &ObjectRequest| (request.class.index(), request.number);
            arrived.sort_by_key(rank);
            if arrived.is_empty() {
                continue;
            }
            assert_eq!(queue.take(&clock, &|| false), Some(arrived.remove(0)));
        }
        assert!(arrived.len() > 100, "users ask faster than they are served");
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
                let Some(request) = queue.lock().pop(true, &|_| true) else { break };
                assert!(in_service.iter().all(|it| it.user != request.user));
                let last = last_of_user.insert(request.user, request.number);
                assert!(last.is_none_or(|last| last < request.number));
                numbers.push(request.number);
                in_service.push(request);
            }
            queue.finish(&in_service.remove(0));
        }
        for request in in_service {
            queue.finish(&request);
        }
        assert_eq!(queue.take(&clock, &|| false), None);
        numbers.sort_unstable();
        assert_eq!(numbers, (0..200).collect::<Vec<_>>());
    }
}
