//! The keeper: a client's one thread. It sends back what nobody carried along, and connects again
//! to a node that was away, with back-off. It sleeps while there is nothing to do.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use cascade_block::{Deadline, SystemClock};
use cascade_wire::Call;

use crate::client::{Inner, PATIENCE};
use crate::living;
use crate::session::NoAnswer;

/// How long returned slabs wait for a call that carries them along.
const RETURN_DELAY: Duration = Duration::from_millis(1);
/// Between the first two attempts to connect again; doubles from one to the next.
const BACK_OFF_MIN: Duration = Duration::from_millis(20);
/// Between later ones.
const BACK_OFF_MAX: Duration = Duration::from_secs(2);
/// How long one attempt may take.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(1);

/// What waits for the keeper. Sessions and the client put it there from any thread.
#[derive(Debug, Default)]
pub(crate) struct Chores {
    list: Mutex<List>,
    changed: Condvar,
}

/// What is known of the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Standing {
    /// It answers.
    #[default]
    There,
    /// A call that had little time was not answered.
    Suspect,
    /// It has to be found again.
    Away,
}

#[derive(Debug, Default)]
struct List {
    has_returns: bool,
    node: Standing,
    is_over: bool,
    /// Runs of the node whose slabs have all come back.
    past_epochs: Vec<u64>,
}

impl List {
    fn has_work(&self) -> bool {
        let has_messages = self.has_returns || !self.past_epochs.is_empty();
        has_messages || self.node != Standing::There || self.is_over
    }
}

impl Chores {
    fn lock(&self) -> MutexGuard<'_, List> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note(&self, change: impl FnOnce(&mut List)) {
        change(&mut self.lock());
        self.changed.notify_one();
    }

    /// Slabs wait to go back.
    pub(crate) fn returns_wait(&self) {
        let mut list = self.lock();
        let is_known = std::mem::replace(&mut list.has_returns, true);
        drop(list);
        // Waking it for every call would cost each of them as much as the call itself.
        if !is_known {
            self.changed.notify_one();
        }
    }

    /// All that a run of the node lent has come back.
    pub(crate) fn session_over(&self, epoch: u64) {
        self.note(|list| list.past_epochs.push(epoch));
    }

    /// The node has to be found again.
    pub(crate) fn node_is_away(&self) {
        self.note(|list| list.node = Standing::Away);
    }

    /// A call that had little time was not answered.
    pub(crate) fn node_may_be_away(&self) {
        self.note(|list| {
            if list.node == Standing::There {
                list.node = Standing::Suspect;
            }
        });
    }

    /// The client is closed.
    pub(crate) fn end(&self) {
        self.note(|list| list.is_over = true);
    }
}

/// Starts the keeper of a client. It ends with the client.
pub(crate) fn start(client: &Arc<Inner>) -> std::io::Result<()> {
    let (weak, chores) = (Arc::downgrade(client), Arc::clone(client.chores()));
    std::thread::Builder::new()
        .name("cascade-client".to_owned())
        .stack_size(128 << 10)
        .spawn(move || run(&weak, &chores))
        .map(drop)
}

fn run(client: &Weak<Inner>, chores: &Chores) {
    let mut back_off = BACK_OFF_MIN;
    loop {
        let mut list = chores.lock();
        while !list.has_work() {
            list = chores.changed.wait(list).unwrap_or_else(PoisonError::into_inner);
        }
        if list.is_over {
            return;
        }
        let pause = if list.node == Standing::Away { back_off } else { RETURN_DELAY };
        // A call may carry the returns along meanwhile; a node that just went away needs a moment.
        let waited = chores.changed.wait_timeout_while(list, pause, |list| !list.is_over);
        let mut list = waited.unwrap_or_else(PoisonError::into_inner).0;
        if list.is_over {
            return;
        }
        list.has_returns = false;
        // Before looking for it: whoever finds it away from here on says so anew, and is heard.
        let node = std::mem::take(&mut list.node);
        drop(list);
        let Some(client) = client.upgrade() else { return };
        if node == Standing::Away {
            if client.find_again(Deadline::after(&SystemClock, ATTEMPT_TIMEOUT)) {
                // What came back meanwhile goes to the node now, call or no call.
                chores.returns_wait();
                back_off = BACK_OFF_MIN;
            } else {
                chores.node_is_away();
                back_off = (back_off * 2).min(BACK_OFF_MAX);
            }
            continue;
        }
        if node == Standing::Suspect {
            client.look_for_node(Deadline::after(&SystemClock, PATIENCE));
        }
        send(&client, chores);
    }
}

/// Sends what goes back to the node of now.
fn send(client: &Inner, chores: &Chores) {
    let Some(link) = client.link() else { return };
    let past = std::mem::take(&mut chores.lock().past_epochs);
    let deadline = Deadline::after(&SystemClock, ATTEMPT_TIMEOUT);
    let session = &link.session;
    let is_only = living::is_only(&link.welcome.tenant, session.epoch);
    let forget = past.into_iter().filter(|epoch| is_only && *epoch != session.epoch);
    let forget: Vec<Call> = forget.map(|epoch| Call::Forget { epoch }).collect();
    let mut sent = session.send_returns(deadline);
    if sent.is_ok() && !forget.is_empty() {
        sent = session.tell(forget, deadline);
    }
    match sent {
        Ok(()) => {}
        // Whoever has a line carries the returns along with the next call, or the next chore does.
        Err(NoAnswer::Crowded) => chores.returns_wait(),
        Err(NoAnswer::Late) => client.note_away("it takes no messages", &link, false),
        Err(NoAnswer::TooLong(reason) | NoAnswer::Broken(reason)) => {
            client.note_away(&reason, &link, true);
        }
    }
}
