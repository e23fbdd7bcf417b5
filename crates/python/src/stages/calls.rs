//! The queue of calls to a stage in Python, between the store's threads and Python's threads.
//!
//! The store's threads never attach to the interpreter. Threads that Python started take the calls
//! from this queue and execute them. So the store keeps its deadlines however long a stage takes or
//! the interpreter is busy, and threads that the interpreter ends at its exit run no store code.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cascade_memory::{HostSlab, HostSlabMut};
use cascade_runtime::{Deadline, SystemClock};
use cascade_store::stages::{RecordAnswer, RecordCall, Records};
use cascade_tier::tier::TierError;

/// Time-out of the stage's `close` method.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(3);

type Answer = Result<RecordAnswer, TierError>;

/// The queue of calls to one stage.
#[derive(Debug)]
pub(crate) struct CallQueue {
    queue: Mutex<QueueState>,
    /// Notified about new jobs and the end.
    work: Condvar,
    methods: OptionalMethods,
}

/// The optional methods that the stage has.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OptionalMethods {
    pub(crate) flush: bool,
    pub(crate) probe: bool,
    pub(crate) close: bool,
}

#[derive(Debug, Default)]
struct QueueState {
    jobs: VecDeque<Job>,
    /// Calls that a thread still executes after their caller's deadline.
    stuck: u64,
    is_closed: bool,
}

#[derive(Debug)]
struct Job {
    /// The call; none for the stage's `close` method.
    call: Option<RecordCall>,
    batch: Arc<Batch>,
    /// Position of the call in its batch.
    at: usize,
}

/// The calls of one caller, which waits for all of them.
#[derive(Debug)]
struct Batch {
    answers: Mutex<Answers>,
    ready: Condvar,
}

#[derive(Debug)]
struct Answers {
    received: Vec<Option<Answer>>,
    missing: usize,
    /// Whether the caller has stopped waiting.
    is_abandoned: bool,
}

/// A call that a Python thread executes. On drop without an answer, it fails.
pub(crate) struct CallInProgress {
    calls: Arc<CallQueue>,
    batch: Option<Arc<Batch>>,
    at: usize,
    /// The name of a put record, which is deleted again if the answer is late.
    put_name: Option<String>,
}

/// The method to call and its arguments.
pub(crate) enum Invocation {
    Put(String, HostSlab),
    Get(String, HostSlabMut),
    Delete(Vec<String>),
    WithoutArguments(&'static str),
}

impl CallQueue {
    pub(crate) fn new(methods: OptionalMethods) -> Self {
        Self { queue: Mutex::default(), work: Condvar::new(), methods }
    }

    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.lock().is_closed
    }

    /// Waits for the next call and takes its memory. None after [`CallQueue::end`]. Call it only
    /// while detached from the interpreter, because it blocks.
    pub(crate) fn next(self: &Arc<Self>) -> Option<(CallInProgress, Invocation)> {
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
            let in_progress =
                CallInProgress { calls: Arc::clone(self), batch: Some(batch), at, put_name };
            match invocation(call) {
                Ok(invocation) => return Some((in_progress, invocation)),
                Err(error) => in_progress.complete(Err(error)),
            }
        }
    }

    /// Closes the queue: queued calls fail, and `next` returns None in every thread.
    pub(crate) fn end(&self) {
        let jobs = {
            let mut queue = self.lock();
            queue.is_closed = true;
            std::mem::take(&mut queue.jobs)
        };
        self.work.notify_all();
        for job in jobs {
            drop(job.batch.set_answer(job.at, Err(TierError::Closed)));
        }
    }

    /// Queues calls as one batch. None if the queue is closed.
    fn enqueue(
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

    /// Waits for the answers of a batch until the deadline. Calls that have not begun by then are
    /// removed from the queue.
    fn wait(&self, batch: &Arc<Batch>, deadline: Deadline) -> Vec<Answer> {
        let mut answers = batch.lock();
        while answers.missing > 0 {
            let time = deadline.remaining(&SystemClock);
            if time.is_zero() {
                break;
            }
            let waited = batch.ready.wait_timeout(answers, time);
            answers = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(answers);
        // Lock order: the queue before a batch. With both locked, a call without an answer is
        // either queued or in progress.
        let mut queue = self.lock();
        let before = queue.jobs.len();
        let (own, others) = std::mem::take(&mut queue.jobs)
            .into_iter()
            .partition(|job| Arc::ptr_eq(&job.batch, batch));
        queue.jobs = others;
        let queued = before - queue.jobs.len();
        let mut answers = batch.lock();
        answers.is_abandoned = true;
        queue.stuck += (answers.missing - queued) as u64;
        let received = std::mem::take(&mut answers.received);
        drop((answers, queue));
        // Dropped only now, after the locks are released: a call may own a slab of the pool.
        let _removed: VecDeque<Job> = own;
        received.into_iter().map(|answer| answer.unwrap_or(Err(TierError::Timeout))).collect()
    }

    /// The answer to a call of an optional method that the stage does not have.
    fn default_answer(&self, call: &RecordCall) -> Option<RecordAnswer> {
        match call {
            RecordCall::Flush if !self.methods.flush => Some(RecordAnswer::Done),
            RecordCall::Probe if !self.methods.probe => Some(RecordAnswer::Missing),
            _ => None,
        }
    }
}

impl Records for CallQueue {
    fn perform(&self, calls: Vec<RecordCall>, deadline: Deadline) -> Vec<Answer> {
        if let [call] = &calls[..]
            && let Some(answer) = self.default_answer(call)
        {
            return vec![Ok(answer)];
        }
        let count = calls.len();
        match self.enqueue(calls.into_iter().map(Some), count) {
            Some(batch) => self.wait(&batch, deadline),
            None => (0..count).map(|_| Err(TierError::Closed)).collect(),
        }
    }

    fn stuck_calls(&self) -> u64 {
        self.lock().stuck
    }

    fn close(&self) {
        if self.methods.close
            && let Some(batch) = self.enqueue(std::iter::once(None), 1)
        {
            drop(self.wait(&batch, Deadline::after(&SystemClock, CLOSE_TIMEOUT)));
        }
        self.end();
    }
}

/// The invocation of a call, with the memory that it needs.
fn invocation(call: Option<RecordCall>) -> Result<Invocation, TierError> {
    Ok(match call {
        Some(RecordCall::Put { name, record }) => Invocation::Put(name, record.seal()?),
        Some(RecordCall::Get { name, into }) => Invocation::Get(name, into.take()?),
        Some(RecordCall::Delete { names }) => Invocation::Delete(names),
        Some(RecordCall::Names) => Invocation::WithoutArguments("names"),
        Some(RecordCall::Flush) => Invocation::WithoutArguments("flush"),
        Some(RecordCall::Probe) => Invocation::WithoutArguments("probe"),
        None => Invocation::WithoutArguments("close"),
    })
}

impl Batch {
    fn new(count: usize) -> Self {
        let received = (0..count).map(|_| None).collect();
        let answers = Answers { received, missing: count, is_abandoned: false };
        Self { answers: Mutex::new(answers), ready: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Answers> {
        self.answers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores an answer. Returns it if the caller has stopped waiting.
    fn set_answer(&self, at: usize, answer: Answer) -> Option<Answer> {
        let mut answers = self.lock();
        if answers.is_abandoned {
            return Some(answer);
        }
        answers.received[at] = Some(answer);
        answers.missing -= 1;
        if answers.missing == 0 {
            self.ready.notify_one();
        }
        None
    }
}

impl CallInProgress {
    /// Reports the answer of the stage.
    pub(crate) fn complete(mut self, answer: Answer) {
        self.complete_once(answer);
    }

    fn complete_once(&mut self, answer: Answer) {
        let Some(batch) = self.batch.take() else { return };
        let Some(late) = batch.set_answer(self.at, answer) else { return };
        let name = self.put_name.take().filter(|_| late.is_ok());
        let mut queue = self.calls.lock();
        queue.stuck -= 1;
        if let Some(name) = name.filter(|_| !queue.is_closed) {
            // The store got a time-out for this put, so it has no reference to the record and would
            // never delete it. No caller waits for this delete.
            let call = Some(RecordCall::Delete { names: vec![name] });
            queue.jobs.push_back(Job { call, batch: Arc::new(Batch::new(1)), at: 0 });
        }
        drop(queue);
        self.calls.work.notify_one();
    }
}

impl Drop for CallInProgress {
    fn drop(&mut self) {
        // Without an effect after `complete`. A thread that ended during the call gave no answer.
        self.complete_once(Err(TierError::NoResult));
    }
}

impl fmt::Debug for CallInProgress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CallInProgress").field("at", &self.at).finish_non_exhaustive()
    }
}
