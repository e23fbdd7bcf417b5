//! A session with one run of a node: its lines, the numbers of its holds, and what goes back.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cascade_block::{Clock, Deadline, SystemClock};
use cascade_memory::{Attachment, Lender};
use cascade_store::{StoreError, TierName, intern};
use cascade_wire::{
    Access, Answer, BLOCKS_MAX, Call, Hello, HoldRange, KEYS_MAX, SessionId, VERSION, VERSION_MIN,
    Welcome,
};

use crate::client::SILENT;
use crate::keeper::Chores;
use crate::line::{Line, LineError};
use crate::living::Living;

/// Lines of one session: calls that are under way at a time. Further ones wait for a line.
const LINES_MAX: usize = 32;

/// After so long without a call it is asked whether the node has closed the connection meanwhile.
const RESTED_MS: u64 = 10;

/// Who a client is.
#[derive(Debug, Clone)]
pub(crate) struct Identity {
    pub(crate) socket: PathBuf,
    pub(crate) access: Access,
    pub(crate) token: Option<Vec<u8>>,
    pub(crate) name: String,
}

/// The lines of a session. Slabs that the node lent hold it, so it lasts as long as they do: the
/// node takes back what a client holds once its last line is closed.
#[derive(Debug)]
pub(crate) struct Session {
    id: SessionId,
    pub(crate) epoch: u64,
    identity: Identity,
    lines: Mutex<Lines>,
    line_came_back: Condvar,
    next_hold: AtomicU64,
    /// When a call was begun last, in milliseconds of the monotonic clock.
    last_used_ms: AtomicU64,
    returns: Mutex<Vec<HoldRange>>,
    chores: Arc<Chores>,
    /// The process that it belongs to; a child that was forked since has copies of it all.
    process: u32,
    /// Taken out on drop, before the keeper is told.
    living: Option<Living>,
}

#[derive(Debug, Default)]
struct Lines {
    idle: Vec<Line>,
    open: usize,
    /// Lines that are out of step. They stay open until another one is, so that the session does
    /// not end while slabs are held.
    retired: Vec<Line>,
}

impl Lines {
    /// Another line is open: those out of step are closed.
    fn shut_retired(&mut self) {
        self.retired.drain(..).for_each(Line::shut);
    }
}

/// A session and the pool that it mapped.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) session: Arc<Session>,
    pub(crate) attachment: Arc<Attachment>,
    pub(crate) tiers: Vec<TierName>,
    pub(crate) welcome: Welcome,
}

/// Why a call has no answer.
#[derive(Debug)]
pub(crate) enum NoAnswer {
    /// The deadline passed.
    Late,
    /// The deadline passed before one of the session's lines was free.
    Crowded,
    /// The call fits no message.
    TooLong(String),
    /// The session is of no use any more.
    Broken(String),
}

impl Link {
    /// Opens a session.
    pub(crate) fn open(
        identity: &Identity,
        chores: &Arc<Chores>,
        deadline: Deadline,
    ) -> Result<Self, StoreError> {
        let socket = || identity.socket.display().to_string();
        let away = |reason: String| StoreError::Away { socket: socket(), reason };
        let failed = |error: LineError| match error {
            LineError::Late | LineError::NoTime | LineError::Stuck => away(SILENT.to_owned()),
            LineError::TooLong(reason) | LineError::Broken(reason) => away(reason),
        };
        let mut line = Line::connect(&identity.socket, deadline).map_err(failed)?;
        let (answer, pool) = line.greet(&hello(identity, None), deadline).map_err(failed)?;
        let welcome = match answer {
            Answer::Welcome(welcome) => welcome,
            Answer::Refused { reason } => {
                return Err(StoreError::Refused { socket: socket(), reason });
            }
            other => return Err(away(format!("it answers {other:?} to a hello"))),
        };
        let pool = pool.ok_or_else(|| away("it did not pass its pool on".to_owned()))?;
        let session = Arc::new(Session {
            id: welcome.session,
            epoch: welcome.epoch,
            identity: identity.clone(),
            lines: Mutex::new(Lines { idle: vec![line], open: 1, retired: Vec::new() }),
            line_came_back: Condvar::new(),
            next_hold: AtomicU64::new(1),
            last_used_ms: AtomicU64::new(0),
            returns: Mutex::default(),
            chores: Arc::clone(chores),
            process: std::process::id(),
            living: Some(Living::begin(&welcome.tenant, welcome.epoch)),
        });
        let bytes = usize::try_from(welcome.pool_bytes)
            .map_err(|_| away("its pool does not fit this process's addresses".to_owned()))?;
        let lender = Arc::clone(&session) as Arc<dyn Lender>;
        let is_writable = identity.access == Access::Write;
        let attachment = Attachment::map(pool, bytes, is_writable, lender)
            .map_err(|error| StoreError::Memory(Arc::new(error)))?;
        let tiers = welcome.tiers.iter().map(|tier| intern(tier)).collect();
        Ok(Self { session, attachment, tiers, welcome })
    }
}

fn hello(identity: &Identity, session: Option<SessionId>) -> Call {
    Call::Hello(Hello {
        version_min: VERSION_MIN,
        version_max: VERSION,
        access: identity.access,
        session,
        token: identity.token.clone(),
        name: identity.name.clone(),
    })
}

impl Session {
    fn lines(&self) -> MutexGuard<'_, Lines> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn returns(&self) -> MutexGuard<'_, Vec<HoldRange>> {
        self.returns.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Numbers for holds that were never used before.
    pub(crate) fn draw_holds(&self, count: usize) -> u64 {
        // Relaxed: the numbers only have to differ.
        self.next_hold.fetch_add(count as u64, Ordering::Relaxed)
    }

    /// Whether this is a child that was forked since. It shares the sockets with its parent: were
    /// both to use them, each could read the other's answers. The holds are the parent's too.
    pub(crate) fn is_inherited(&self) -> bool {
        std::process::id() != self.process
    }

    /// One call and its answer.
    pub(crate) fn ask(&self, call: &Call, deadline: Deadline) -> Result<Answer, NoAnswer> {
        let mut line = self.take_line(deadline)?;
        let ahead = self.take_returns();
        let asked = line.ask(ahead.as_slice(), call, deadline);
        self.keep_unsent(ahead, asked.is_err());
        self.settle(line, asked)
    }

    /// Sends what goes back, if nothing has carried it along meanwhile.
    pub(crate) fn send_returns(&self, deadline: Deadline) -> Result<(), NoAnswer> {
        if self.returns().is_empty() { Ok(()) } else { self.tell(Vec::new(), deadline) }
    }

    /// Calls that have no answer, and what goes back.
    pub(crate) fn tell(&self, calls: Vec<Call>, deadline: Deadline) -> Result<(), NoAnswer> {
        let mut line = self.take_line(deadline)?;
        let ahead = self.take_returns();
        let all: Vec<Call> = ahead.iter().cloned().chain(calls).collect();
        let told = line.tell(&all, deadline);
        self.keep_unsent(ahead, told.is_err());
        self.settle(line, told)
    }

    /// What went back along with a call that failed may not have arrived: it goes back again.
    /// Numbers are never used twice, so once more does no harm.
    fn keep_unsent(&self, ahead: Option<Call>, has_failed: bool) {
        if let (Some(Call::Release { holds }), true) = (ahead, has_failed) {
            for range in holds {
                self.add_return(range);
            }
        }
    }

    /// Whether the node has closed a connection of this session that had rested for a while. A busy
    /// session is not looked at: a call costs a system call less, and finds out by itself.
    pub(crate) fn is_found_closed(&self) -> bool {
        let now = SystemClock.monotonic();
        let now = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
        // Relaxed: whether to look at all.
        let has_rested = now.saturating_sub(self.last_used_ms.load(Ordering::Relaxed)) >= RESTED_MS;
        if has_rested && self.lines().idle.last().is_some_and(Line::is_closed) {
            // Calls of other threads look too.
            return true;
        }
        self.last_used_ms.store(now, Ordering::Relaxed);
        false
    }

    /// Whether the node still knows this session: tried on an idle line, then on a new one.
    pub(crate) fn revive(&self, deadline: Deadline) -> Result<(), NoAnswer> {
        let idle = self.lines().idle.pop();
        if let Some(mut line) = idle {
            let asked = line.ask(&[], &Call::Ping, deadline);
            if self.settle(line, asked).is_ok() {
                return Ok(());
            }
        }
        let line = self.join(deadline)?;
        let mut lines = self.lines();
        lines.shut_retired();
        lines.open += 1;
        lines.idle.push(line);
        Ok(())
    }

    fn settle<T>(&self, line: Line, asked: Result<T, LineError>) -> Result<T, NoAnswer> {
        let mut lines = self.lines();
        let result = match asked {
            Ok(answer) => {
                lines.idle.push(line);
                Ok(answer)
            }
            // Nothing was sent, so the line is in step. Closed now, it would look to the node as if
            // the answer before had not come: it would take back what that granted.
            Err(LineError::NoTime) => {
                lines.idle.push(line);
                Err(NoAnswer::Crowded)
            }
            Err(LineError::Stuck) => {
                lines.idle.push(line);
                Err(NoAnswer::Late)
            }
            Err(LineError::TooLong(reason)) => {
                lines.idle.push(line);
                Err(NoAnswer::TooLong(reason))
            }
            Err(LineError::Late) => {
                lines.open -= 1;
                if lines.open > 0 {
                    line.shut();
                } else {
                    lines.retired.push(line);
                }
                Err(NoAnswer::Late)
            }
            Err(LineError::Broken(reason)) => {
                lines.open -= 1;
                Err(NoAnswer::Broken(reason))
            }
        };
        let is_last = lines.open == 0;
        drop(lines);
        if is_last {
            self.line_came_back.notify_all();
        } else {
            self.line_came_back.notify_one();
        }
        result
    }

    /// A line, opened if all are busy. A node that refuses one more still serves the others, so
    /// then a call waits for one of them.
    fn take_line(&self, deadline: Deadline) -> Result<Line, NoAnswer> {
        let mut refusal = None;
        let mut lines = self.lines();
        loop {
            if let Some(line) = lines.idle.pop() {
                return Ok(line);
            }
            if refusal.is_none() && lines.open < LINES_MAX {
                lines.open += 1;
                drop(lines);
                let joined = self.join(deadline);
                lines = self.lines();
                match joined {
                    Ok(line) => {
                        lines.shut_retired();
                        return Ok(line);
                    }
                    Err(error) => refusal = Some(error),
                }
                lines.open -= 1;
                self.line_came_back.notify_all();
                continue;
            }
            let left = deadline.remaining(&SystemClock);
            match refusal {
                Some(error) if lines.open == 0 || matches!(error, NoAnswer::Late) => {
                    return Err(error);
                }
                _ if left.is_zero() => return Err(NoAnswer::Crowded),
                _ => {}
            }
            let waited = self.line_came_back.wait_timeout(lines, left);
            lines = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn join(&self, deadline: Deadline) -> Result<Line, NoAnswer> {
        let failed = |error| match error {
            LineError::Late | LineError::NoTime | LineError::Stuck => NoAnswer::Late,
            LineError::TooLong(reason) => NoAnswer::TooLong(reason),
            LineError::Broken(reason) => NoAnswer::Broken(reason),
        };
        let mut line = Line::connect(&self.identity.socket, deadline).map_err(failed)?;
        let hello = hello(&self.identity, Some(self.id));
        match line.greet(&hello, deadline).map_err(failed)?.0 {
            Answer::Welcome(welcome) if welcome.epoch == self.epoch => Ok(line),
            Answer::Welcome(_) => Err(NoAnswer::Broken("the node was started anew".to_owned())),
            Answer::Refused { reason } => Err(NoAnswer::Broken(reason)),
            other => Err(NoAnswer::Broken(format!("it answers {other:?} to a hello"))),
        }
    }

    fn take_returns(&self) -> Option<Call> {
        let mut returns = self.returns();
        let kept = returns.len().saturating_sub(BLOCKS_MAX);
        let holds = returns.split_off(kept);
        drop(returns);
        if kept > 0 {
            // Those that came before were the keeper's already; nobody else wakes it for the rest.
            self.chores.returns_wait();
        }
        (!holds.is_empty()).then_some(Call::Release { holds })
    }

    /// Gives holds back that a call was to bring and that nobody will use.
    pub(crate) fn give_back_range(&self, first: u64, count: usize) {
        let count = u32::try_from(count).expect("batches are small");
        self.add_return(HoldRange { first, count });
    }

    fn add_return(&self, range: HoldRange) {
        let mut returns = self.returns();
        match returns.last_mut() {
            // Views are dropped in their order, most often: one range for all of them.
            Some(last) if follows(*last, range) => last.count += range.count,
            Some(_) => returns.push(range),
            None => {
                returns.push(range);
                drop(returns);
                self.chores.returns_wait();
            }
        }
    }
}

/// Whether two ranges can be one in a message.
fn follows(last: HoldRange, next: HoldRange) -> bool {
    let is_next = last.first + u64::from(last.count) == next.first;
    is_next && (last.count as usize).saturating_add(next.count as usize) <= KEYS_MAX
}

impl Lender for Session {
    fn give_back(&self, hold: u64) {
        if self.is_inherited() {
            return;
        }
        self.add_return(HoldRange { first: hold, count: 1 });
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if self.is_inherited() {
            // Another thread may have held any lock when the process was forked.
            let _never_dropped = std::mem::ManuallyDrop::new(self.living.take());
            return;
        }
        // A session with holds outlives its connections, so the node is told of the last ones. If
        // that fails, it learns it from the process's end.
        let deadline = Deadline::after(&SystemClock, GOODBYE_TIMEOUT);
        while !self.returns().is_empty() {
            if self.tell(Vec::new(), deadline).is_err() {
                break;
            }
        }
        // Everything that this run of the node lent has come back.
        drop(self.living.take());
        self.chores.session_over(self.epoch);
    }
}

/// How long the end of a session may wait for the node to take what goes back.
const GOODBYE_TIMEOUT: Duration = Duration::from_millis(200);

/// The shortest time that a call is given.
pub(crate) const CALL_MIN: Duration = Duration::from_millis(1);
