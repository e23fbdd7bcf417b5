//! Calls on their way to a stage in Python: a queue between the store's threads and Python's.
//!
//! No thread of the store ever enters the interpreter: those that do are Python's own, started
//! there, and take calls from here. So whatever a stage does, and however long somebody holds the
//! interpreter, the store keeps its deadlines; and a thread that the interpreter ends at its exit
//! has no frame of ours on it.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cascade_block::{Deadline, SystemClock};
use cascade_memory::{Slab, SlabMut};
use cascade_store::stage::{RecordAnswer, RecordCall, Records, StageError};

/// How long a stage's own `close` is waited for.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(3);

type Answer = Result<RecordAnswer, StageError>;

/// The queue.
#[derive(Debug)]
pub(crate) struct Calls {
    queue: Mutex<Queue>,
    work: Condvar,
    methods: Methods,
}

/// Which of the optional methods the stage has.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Methods {
    pub(crate) flush: bool,
    pub(crate) probe: bool,
    pub(crate) close: bool,
}

#[derive(Debug, Default)]
struct Queue {
    jobs: VecDeque<Job>,
    /// Calls that a thread is at and nobody waits for.
    stuck: u64,
    is_closed: bool,
}

#[derive(Debug)]
struct Job {
    /// Nothing asks the stage to close.
    call: Option<RecordCall>,
    batch: Arc<Batch>,
    at: usize,
}

/// The calls of one caller, who waits for them all.
#[derive(Debug)]
struct Batch {
    answers: Mutex<Answers>,
    ready: Condvar,
}

#[derive(Debug)]
struct Answers {
    given: Vec<Option<Answer>>,
    left: usize,
    is_abandoned: bool,
}

/// A call that a thread of Python's makes now.
pub(crate) struct Taken {
    calls: Arc<Calls>,
    batch: Option<Arc<Batch>>,
    at: usize,
    /// Of a put, which is undone when it is late.
    put_name: Option<String>,
}

/// What to call, and with what.
pub(crate) enum Made {
    Put(String, Slab),
    Get(String, SlabMut),
    Delete(Vec<String>),
    /// A method without arguments.
    Bare(&'static str),
}

impl Calls {
    pub(crate) fn new(methods: Methods) -> Self {
        Self { queue: Mutex::default(), work: Condvar::new(), methods }
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.lock().is_closed
    }

    /// Waits for the next call and makes what it needs. Nothing once all is over. To be called
    /// without the interpreter.
    pub(crate) fn next(self: &Arc<Self>) -> Option<(Taken, Made)> {
        loop {
            let mut queue = self.lock();
            let job = loop {
                if queue.is_closed {
                    return None;
                }
                if let Some(job) = queue.jobs.pop_front() {
                    break job;
                }
                queue = self.work.wait(queue).unwrap_or_else(PoisonError::into_inner);
            };
            drop(queue);
            let Job { call, batch, at } = job;
            let put_name = match &call {
                Some(RecordCall::Put { name, .. }) => Some(name.clone()),
                _ => None,
            };
            let taken = Taken { calls: Arc::clone(self), batch: Some(batch), at, put_name };
            match make(call) {
                Ok(made) => return Some((taken, made)),
                Err(error) => taken.give(Err(error)),
            }
        }
    }

    /// Every caller goes on without an answer, and every thread that asks for a call ends.
    pub(crate) fn end(&self) {
        let jobs = {
            let mut queue = self.lock();
            queue.is_closed = true;
            std::mem::take(&mut queue.jobs)
        };
        self.work.notify_all();
        for job in jobs {
            drop(job.batch.give(job.at, Err(StageError::Closed)));
        }
    }

    fn enter(
        &self,
        calls: impl Iterator<Item = Option<RecordCall>>,
        count: usize,
    ) -> Option<Arc<Batch>> {
        let batch = Arc::new(Batch::new(count));
        let mut queue = self.lock();
        if queue.is_closed {
            return None;
        }
        for (at, call) in calls.enumerate() {
            queue.jobs.push_back(Job { call, batch: Arc::clone(&batch), at });
        }
        drop(queue);
        self.work.notify_all();
        Some(batch)
    }

    /// Waits for a batch; what has not begun by the deadline never does.
    fn wait(&self, batch: &Arc<Batch>, deadline: Deadline) -> Vec<Answer> {
        let mut answers = batch.lock();
        while answers.left > 0 {
            let left = deadline.remaining(&SystemClock);
            if left.is_zero() {
                break;
            }
            let waited = batch.ready.wait_timeout(answers, left);
            answers = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(answers);
        // The queue first, as everywhere: a call that is neither queued nor answered is under way.
        let mut queue = self.lock();
        let before = queue.jobs.len();
        let (ours, others) = std::mem::take(&mut queue.jobs)
            .into_iter()
            .partition(|job| Arc::ptr_eq(&job.batch, batch));
        queue.jobs = others;
        let not_begun = before - queue.jobs.len();
        let mut answers = batch.lock();
        answers.is_abandoned = true;
        queue.stuck += (answers.left - not_begun) as u64;
        let given = std::mem::take(&mut answers.given);
        drop((answers, queue));
        let _never_begun: VecDeque<Job> = ours;
        given.into_iter().map(|answer| answer.unwrap_or(Err(StageError::Timeout))).collect()
    }

    /// What does not need the stage.
    fn answer_without(&self, call: &RecordCall) -> Option<RecordAnswer> {
        match call {
            RecordCall::Flush if !self.methods.flush => Some(RecordAnswer::Done),
            RecordCall::Probe if !self.methods.probe => Some(RecordAnswer::Missing),
            _ => None,
        }
    }
}

impl Records for Calls {
    fn perform(&self, calls: Vec<RecordCall>, deadline: Deadline) -> Vec<Answer> {
        if let [call] = &calls[..]
            && let Some(answer) = self.answer_without(call)
        {
            return vec![Ok(answer)];
        }
        let count = calls.len();
        match self.enter(calls.into_iter().map(Some), count) {
            Some(batch) => self.wait(&batch, deadline),
            None => (0..count).map(|_| Err(StageError::Closed)).collect(),
        }
    }

    fn stuck_calls(&self) -> u64 {
        self.lock().stuck
    }

    fn close(&self) {
        if self.methods.close
            && let Some(batch) = self.enter(std::iter::once(None), 1)
        {
            drop(self.wait(&batch, Deadline::after(&SystemClock, CLOSE_TIMEOUT)));
        }
        self.end();
    }
}

/// Takes the memory that a call needs.
fn make(call: Option<RecordCall>) -> Result<Made, StageError> {
    Ok(match call {
        Some(RecordCall::Put { name, record }) => Made::Put(name, record.seal()?),
        Some(RecordCall::Get { name, into }) => Made::Get(name, into.take()?),
        Some(RecordCall::Delete { names }) => Made::Delete(names),
        Some(RecordCall::Names) => Made::Bare("names"),
        Some(RecordCall::Flush) => Made::Bare("flush"),
        Some(RecordCall::Probe) => Made::Bare("probe"),
        None => Made::Bare("close"),
    })
}

impl Batch {
    fn new(count: usize) -> Self {
        let given = (0..count).map(|_| None).collect();
        let answers = Answers { given, left: count, is_abandoned: false };
        Self { answers: Mutex::new(answers), ready: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Answers> {
        self.answers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Leaves an answer. Comes back with it when nobody waits.
    fn give(&self, at: usize, answer: Answer) -> Option<Answer> {
        let mut answers = self.lock();
        if answers.is_abandoned {
            return Some(answer);
        }
        answers.given[at] = Some(answer);
        answers.left -= 1;
        if answers.left == 0 {
            self.ready.notify_one();
        }
        None
    }
}

impl Taken {
    /// Says what became of the call.
    pub(crate) fn give(mut self, answer: Answer) {
        self.give_once(answer);
    }

    fn give_once(&mut self, answer: Answer) {
        let Some(batch) = self.batch.take() else { return };
        let Some(late) = batch.give(self.at, answer) else { return };
        let name = self.put_name.take().filter(|_| late.is_ok());
        let mut queue = self.calls.lock();
        queue.stuck -= 1;
        if let Some(name) = name.filter(|_| !queue.is_closed) {
            // Nobody knows of this record; nobody waits for its end either.
            let call = Some(RecordCall::Delete { names: vec![name] });
            queue.jobs.push_back(Job { call, batch: Arc::new(Batch::new(1)), at: 0 });
        }
        drop(queue);
        self.calls.work.notify_one();
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        // A thread that died with its call has given no answer.
        self.give_once(Err(StageError::NoAnswer));
    }
}

impl fmt::Debug for Taken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Taken").field("at", &self.at).finish_non_exhaustive()
    }
}
