//! The client: what a worker holds instead of a store.

use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cascade_block::{BlockKey, Deadline, Manifest, Namespace, NamespaceId, SystemClock};
use cascade_memory::SlabMut;
use cascade_store::{
    BlockStore, CallOptions, ChangeCursor, Changes, GetOutcome, PrefixMatch, Prepared, Put,
    PutOutcome, PutSlab, Request, Stats, StoreError, TierName, ViewOutcome,
};
use cascade_wire::{
    Access, Answer, Call, ChainRequest, KEYS_MAX, KeyQuestion, MANIFEST_FIELDS_MAX, TEXT_BYTES_MAX,
    Welcome,
};

use crate::keeper::{self, Chores};
use crate::session::{CALL_MIN, Identity, Link, NoAnswer};

/// How to reach a node, and as whom.
#[derive(Debug, Clone)]
pub struct ConnectOptions {
    /// The node's Unix socket.
    pub socket: PathBuf,
    /// What the client does with the pool. Default: write.
    pub access: Access,
    /// Proves which tenant it is. Default: the user says it.
    pub token: Option<Vec<u8>>,
    /// What it calls itself in the node's status. Default: the process number.
    pub name: String,
    /// How long a call may take unless it says otherwise. Default: 5 s.
    pub timeout: Duration,
}

impl ConnectOptions {
    /// The defaults, for a socket.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self {
            socket: socket.into(),
            access: Access::Write,
            token: None,
            name: format!("process {}", std::process::id()),
            timeout: Duration::from_secs(5),
        }
    }
}

/// A client of a served store. Clones are handles on the same one; the last one to go closes it.
#[derive(Debug, Clone)]
pub struct Client(Arc<Handle>);

/// Ends the keeper.
#[derive(Debug)]
struct Handle(Arc<Inner>);

impl Drop for Handle {
    fn drop(&mut self) {
        self.0.close();
    }
}

#[derive(Debug)]
pub(crate) struct Inner {
    identity: Identity,
    timeout: Duration,
    state: Mutex<State>,
    /// Whether a call looks for the node now. The others wait for what it finds.
    is_searching: Mutex<bool>,
    search_ended: Condvar,
    chores: Arc<Chores>,
    /// The process that connected.
    process: u32,
}

/// What is said of a node that takes its time.
pub(crate) const SILENT: &str = "it does not answer; is it stopped?";
/// What is said of a node that closed its connections.
const CLOSED: &str = "it closed the connection; was it stopped?";
/// How long one call may look for a node that was started anew.
const SEARCH_TIMEOUT: Duration = Duration::from_secs(1);
/// What is said to a child of the process that connected.
const INHERITED: &str = "this process was forked after the client had connected; connect in it";
/// A call that had less time than this and no answer says little about the node.
pub(crate) const PATIENCE: Duration = Duration::from_millis(200);

#[derive(Debug)]
enum State {
    Linked(Arc<Link>),
    /// The node does not answer; the link it had stays for when it does again.
    Away {
        reason: String,
        link: Arc<Link>,
        /// Whether its process seems to be gone. Then a new one is looked for by each call: that
        /// costs one failed `connect`. One that is stopped would cost each call its time.
        is_gone: bool,
    },
    Closed,
}

impl Client {
    /// Connects to a node that is there.
    pub fn connect(options: ConnectOptions) -> Result<Self, StoreError> {
        let ConnectOptions { socket, access, token, name, timeout } = options;
        if timeout.is_zero() {
            let reason = "0; every call would fail: give at least 1 ms".to_owned();
            return Err(StoreError::Config { setting: "timeout", reason });
        }
        let identity = Identity { socket, access, token, name };
        let chores = Arc::new(Chores::default());
        let link = Link::open(&identity, &chores, Deadline::after(&SystemClock, timeout))?;
        let state = Mutex::new(State::Linked(Arc::new(link)));
        let process = std::process::id();
        let inner = Arc::new(Inner {
            identity,
            timeout,
            state,
            is_searching: Mutex::default(),
            search_ended: Condvar::new(),
            chores,
            process,
        });
        keeper::start(&inner).map_err(|e| StoreError::Threads { source: Arc::new(e) })?;
        Ok(Self(Arc::new(Handle(inner))))
    }

    pub(crate) fn inner(&self) -> &Inner {
        &self.0.0
    }

    /// What the node said of itself and its pool; `None` while it is away.
    pub fn welcome(&self) -> Option<Welcome> {
        self.inner().link().map(|link| link.welcome.clone())
    }

    /// An administrator's question or order: a topic and arguments in JSON. The answer is JSON.
    pub fn administer(
        &self,
        topic: &str,
        arguments: &str,
        options: CallOptions,
    ) -> Result<String, StoreError> {
        let call = |timeout_ms| Call::Admin {
            timeout_ms,
            topic: topic.to_owned(),
            arguments: arguments.to_owned(),
        };
        match self.inner().ask_with_time("ask the node", options, call)? {
            Answer::Text(text) => Ok(text),
            other => Err(self.inner().odd(&other)),
        }
    }

    fn ask_flags(&self, question: KeyQuestion, keys: &[BlockKey]) -> Vec<bool> {
        let flags = |keys: &[BlockKey]| {
            let call = Call::Ask { question, keys: keys.to_vec() };
            match self.inner().ask("ask about blocks", &call, CallOptions::default()) {
                Ok(Answer::Flags(flags)) if flags.len() == keys.len() => flags,
                _ => vec![false; keys.len()],
            }
        };
        keys.chunks(KEYS_MAX).flat_map(flags).collect()
    }
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn chores(&self) -> &Arc<Chores> {
        &self.chores
    }

    /// The link, unless the node is away.
    pub(crate) fn link(&self) -> Option<Arc<Link>> {
        self.linked().ok()
    }

    /// The link, or why there is none.
    pub(crate) fn linked(&self) -> Result<Arc<Link>, StoreError> {
        // Before the lock: another thread may have held it when the process was forked.
        if self.is_inherited() {
            return Err(StoreError::Away { socket: self.socket(), reason: INHERITED.to_owned() });
        }
        match &*self.state() {
            State::Linked(link) => Ok(Arc::clone(link)),
            State::Away { reason, .. } => {
                Err(StoreError::Away { socket: self.socket(), reason: reason.clone() })
            }
            State::Closed => Err(StoreError::Closed),
        }
    }

    /// The link for a call that begins. A node that was started anew is found within this call:
    /// the client may have rested while it was away.
    pub(crate) fn linked_anew(&self, deadline: Deadline) -> Result<Arc<Link>, StoreError> {
        let linked = self.linked();
        if let Ok(link) = &linked {
            if !link.session.is_found_closed() {
                return linked;
            }
            self.note_away(CLOSED, link, true);
        }
        if !matches!(&*self.state(), State::Away { is_gone: true, .. }) {
            return self.linked();
        }
        self.search(deadline);
        self.linked()
    }

    /// Looks for the node, or waits for the call that does.
    fn search(&self, deadline: Deadline) {
        let left = deadline.remaining(&SystemClock).min(SEARCH_TIMEOUT);
        let searching = || self.is_searching.lock().unwrap_or_else(PoisonError::into_inner);
        let mut is_searching = searching();
        if *is_searching {
            // Found or late, the state says what to do next.
            drop(self.search_ended.wait_timeout_while(is_searching, left, |busy| *busy));
            return;
        }
        *is_searching = true;
        drop(is_searching);
        self.find_again(Deadline::after(&SystemClock, left));
        *searching() = false;
        self.search_ended.notify_all();
    }

    pub(crate) fn deadline(&self, options: CallOptions) -> (Deadline, Duration) {
        let time = options.timeout.unwrap_or(self.timeout).max(CALL_MIN);
        (Deadline::after(&SystemClock, time), time)
    }

    /// From now on calls are answered at once, until the node is found again.
    pub(crate) fn note_away(&self, reason: &str, link: &Arc<Link>, is_gone: bool) {
        let mut state = self.state();
        if matches!(&*state, State::Linked(current) if Arc::ptr_eq(current, link)) {
            *state = State::Away { reason: reason.to_owned(), link: Arc::clone(link), is_gone };
            drop(state);
            self.chores.node_is_away();
        }
    }

    /// Tries to reach the node that was away: the run that it knows, or else a new one.
    pub(crate) fn find_again(&self, deadline: Deadline) -> bool {
        let link = match &*self.state() {
            State::Away { link, .. } => Arc::clone(link),
            State::Linked(_) | State::Closed => return true,
        };
        let found = match link.session.revive(deadline) {
            Ok(()) => Ok(link),
            // It does not answer: a new session would not be answered either.
            Err(NoAnswer::Late | NoAnswer::Crowded | NoAnswer::TooLong(_)) => {
                self.note_gone(false);
                return false;
            }
            Err(NoAnswer::Broken(_)) => {
                Link::open(&self.identity, &self.chores, deadline).map(Arc::new)
            }
        };
        let mut state = self.state();
        match (&mut *state, found) {
            (State::Away { .. }, Ok(link)) => {
                let before = std::mem::replace(&mut *state, State::Linked(link));
                // Outside the lock: the end of a session says goodbye.
                drop(state);
                drop(before);
                true
            }
            (State::Away { reason, is_gone, .. }, Err(error)) => {
                // Only one that is not there at all costs nothing to look for.
                *is_gone = matches!(&error, StoreError::Away { reason, .. } if reason != SILENT);
                *reason = match error {
                    StoreError::Away { reason, .. } | StoreError::Refused { reason, .. } => reason,
                    other => other.to_string(),
                };
                false
            }
            (State::Linked(_) | State::Closed, _) => true,
        }
    }

    fn note_gone(&self, seems_gone: bool) {
        if let State::Away { is_gone, .. } = &mut *self.state() {
            *is_gone = seems_gone;
        }
    }

    /// One call and its answer; failures of the node as a whole are errors here.
    pub(crate) fn ask(
        &self,
        operation: &'static str,
        call: &Call,
        options: CallOptions,
    ) -> Result<Answer, StoreError> {
        let (deadline, time) = self.deadline(options);
        let link = self.linked_anew(deadline)?;
        self.ask_on(&link, operation, call, deadline, time)
    }

    /// As `ask`, for calls that tell the node how long they may take.
    fn ask_with_time(
        &self,
        operation: &'static str,
        options: CallOptions,
        call: impl FnOnce(u32) -> Call,
    ) -> Result<Answer, StoreError> {
        let (deadline, time) = self.deadline(options);
        let link = self.linked_anew(deadline)?;
        self.ask_on(&link, operation, &call(node_time(time)), deadline, time)
    }

    pub(crate) fn ask_on(
        &self,
        link: &Arc<Link>,
        operation: &'static str,
        call: &Call,
        deadline: Deadline,
        time: Duration,
    ) -> Result<Answer, StoreError> {
        let timeout_ms = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        match link.session.ask(call, deadline) {
            Ok(Answer::Failed(error)) => Err(error),
            Ok(Answer::Refused { reason }) => {
                let socket = self.socket();
                Err(StoreError::Refused { socket, reason })
            }
            Ok(answer) => Ok(answer),
            // A living node answers in time whatever its tiers do, if it has the time to.
            Err(NoAnswer::Late) => {
                if time < PATIENCE {
                    self.chores.node_may_be_away();
                } else {
                    self.note_away(SILENT, link, false);
                }
                Err(StoreError::Timeout { operation, timeout_ms })
            }
            Err(NoAnswer::Crowded) => Err(StoreError::Timeout { operation, timeout_ms }),
            Err(NoAnswer::TooLong(reason)) => {
                Err(StoreError::Config { setting: "request", reason })
            }
            Err(NoAnswer::Broken(reason)) => {
                self.note_away(&reason, link, true);
                let socket = self.socket();
                Err(StoreError::Away { socket, reason })
            }
        }
    }

    /// An answer that does not fit the call.
    pub(crate) fn odd(&self, answer: &Answer) -> StoreError {
        let reason = format!("it answers something else than was asked: {answer:?}");
        StoreError::Away { socket: self.socket(), reason }
    }

    pub(crate) fn socket(&self) -> String {
        self.identity.socket.display().to_string()
    }

    fn is_inherited(&self) -> bool {
        std::process::id() != self.process
    }

    /// Makes sure that the node is there after a call that had little time was not answered.
    pub(crate) fn look_for_node(&self, deadline: Deadline) {
        let Some(link) = self.link() else { return };
        match link.session.ask(&Call::Ping, deadline) {
            Ok(_) | Err(NoAnswer::Crowded | NoAnswer::TooLong(_)) => {}
            Err(NoAnswer::Late) => self.note_away(SILENT, &link, false),
            Err(NoAnswer::Broken(reason)) => self.note_away(&reason, &link, true),
        }
    }

    fn close(&self) {
        if self.is_inherited() {
            // The client is the parent's; it goes on there.
            return;
        }
        let before = std::mem::replace(&mut *self.state(), State::Closed);
        self.chores.end();
        // Outside the lock: the end of a session says goodbye.
        drop(before);
    }
}

/// What the node is told a call may take: a little less, so that its answer comes in time.
pub(crate) fn node_time(time: Duration) -> u32 {
    let most = time.saturating_sub((time / 10).min(Duration::from_millis(100)));
    u32::try_from(most.as_millis()).unwrap_or(u32::MAX)
}

/// Whether a message has room for a manifest.
fn manifest_fits(manifest: &Manifest) -> bool {
    let is_short = |(name, value): (&str, &str)| name.len().max(value.len()) <= TEXT_BYTES_MAX;
    manifest.fields().count() <= MANIFEST_FIELDS_MAX && manifest.fields().all(is_short)
}

impl BlockStore for Client {
    fn put(&self, batch: &[Put<'_>], options: CallOptions) -> Vec<PutOutcome> {
        self.inner().put(batch, options)
    }

    fn reserve(&self, bytes: usize, options: CallOptions) -> Result<SlabMut, StoreError> {
        self.inner().reserve(bytes, options)
    }

    fn prepare(&self, batch: &[Put<'_>], lengths: &[usize], options: CallOptions) -> Vec<Prepared> {
        self.inner().prepare(batch, lengths, options)
    }

    fn put_slabs(&self, batch: Vec<PutSlab>, options: CallOptions) -> Vec<PutOutcome> {
        self.inner().put_slabs(batch, options)
    }

    fn get(
        &self,
        keys: &[BlockKey],
        buffers: &mut [&mut [u8]],
        options: CallOptions,
    ) -> Vec<GetOutcome> {
        self.inner().get(keys, buffers, options)
    }

    fn view(&self, keys: &[BlockKey], options: CallOptions) -> Vec<ViewOutcome> {
        self.inner().view(keys, options)
    }

    fn lookup_prefix(&self, request: &Request<'_>) -> PrefixMatch {
        self.inner().lookup(request, CallOptions::default())
    }

    fn acquire(&self, request: &Request<'_>, options: CallOptions) -> Vec<ViewOutcome> {
        self.inner().acquire(request, options)
    }

    fn hint(&self, request: &Request<'_>) {
        let mut request = ChainRequest::of(request);
        request.keys.truncate(KEYS_MAX);
        // A hint that is lost costs nothing.
        drop(self.inner().ask("give a hint", &Call::Hint(request), CallOptions::default()));
    }

    fn contains(&self, keys: &[BlockKey]) -> Vec<bool> {
        self.ask_flags(KeyQuestion::Contains, keys)
    }

    fn locate(&self, keys: &[BlockKey]) -> Vec<Vec<TierName>> {
        let places = |keys: &[BlockKey]| {
            let call = Call::Ask { question: KeyQuestion::Locate, keys: keys.to_vec() };
            let (deadline, time) = self.inner().deadline(CallOptions::default());
            let Ok(link) = self.inner().linked_anew(deadline) else {
                return vec![Vec::new(); keys.len()];
            };
            match self.inner().ask_on(&link, "locate blocks", &call, deadline, time) {
                Ok(Answer::Places(places)) if places.len() == keys.len() => {
                    places.into_iter().map(|bits| link.tiers_of(bits)).collect()
                }
                _ => vec![Vec::new(); keys.len()],
            }
        };
        keys.chunks(KEYS_MAX).flat_map(places).collect()
    }

    fn pin(&self, keys: &[BlockKey]) -> Vec<bool> {
        self.ask_flags(KeyQuestion::Pin, keys)
    }

    fn unpin(&self, keys: &[BlockKey]) -> Vec<bool> {
        self.ask_flags(KeyQuestion::Unpin, keys)
    }

    fn delete(&self, keys: &[BlockKey]) -> Vec<bool> {
        self.ask_flags(KeyQuestion::Delete, keys)
    }

    fn clear(&self) {
        // As in an embedded store that is closed, nothing happens while the node is away.
        drop(self.inner().ask("clear", &Call::Clear, CallOptions::default()));
    }

    fn prefetch(&self, keys: &[BlockKey]) -> usize {
        let accepted = |keys: &[BlockKey]| {
            let call = Call::Ask { question: KeyQuestion::Prefetch, keys: keys.to_vec() };
            match self.inner().ask("prefetch", &call, CallOptions::default()) {
                Ok(Answer::Count(count)) => usize::try_from(count).unwrap_or(0),
                _ => 0,
            }
        };
        keys.chunks(KEYS_MAX).map(accepted).sum()
    }

    fn register(&self, namespace: &Namespace, options: CallOptions) -> Result<(), StoreError> {
        if !manifest_fits(namespace.manifest()) {
            let most = format!("{MANIFEST_FIELDS_MAX} fields of {TEXT_BYTES_MAX} bytes");
            let reason = format!("a node takes at most {most}; name fewer, or use shorter ones");
            return Err(StoreError::Config { setting: "manifest", reason });
        }
        let call = |timeout_ms| Call::Register {
            timeout_ms,
            root: namespace.root(),
            manifest: namespace.manifest().clone(),
        };
        self.inner().ask_with_time("keep a manifest", options, call).map(drop)
    }

    fn manifests(&self, options: CallOptions) -> Result<Vec<(NamespaceId, Manifest)>, StoreError> {
        let call = |timeout_ms| Call::Manifests { timeout_ms };
        match self.inner().ask_with_time("list manifests", options, call)? {
            Answer::Manifests(all) => Ok(all),
            other => Err(self.inner().odd(&other)),
        }
    }

    fn flush(&self, options: CallOptions) -> Result<(), StoreError> {
        let call = |timeout_ms| Call::Flush { timeout_ms };
        self.inner().ask_with_time("flush", options, call).map(drop)
    }

    fn changes(&self, since: Option<ChangeCursor>, max: usize) -> Result<Changes, StoreError> {
        let most = u32::try_from(max.min(KEYS_MAX)).expect("it fits a message");
        let call = Call::Changes { since, most };
        match self.inner().ask("follow changes", &call, CallOptions::default())? {
            Answer::Changes(changes) => Ok(changes),
            other => Err(self.inner().odd(&other)),
        }
    }

    fn stats(&self) -> Stats {
        let asked = self.administer("stats", "{}", CallOptions::default());
        let asked = asked.map_err(|error| error.to_string());
        let read = asked.and_then(|text| {
            serde_json::from_str(&text).map_err(|error| format!("they make no sense: {error}"))
        });
        // Figures of nothing are the answer of a node that is away; they say so.
        read.unwrap_or_else(|reason| Stats {
            notes: vec![format!("these are no figures of the node: {reason}")],
            ..Stats::default()
        })
    }

    fn close(&self) -> Result<(), StoreError> {
        self.inner().close();
        Ok(())
    }
}
