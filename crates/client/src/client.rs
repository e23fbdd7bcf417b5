//! The client: implements a store's calls over a connection to a node.

mod answers;
mod background;

use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cascade_block::{BlockKey, Manifest, Namespace, NamespaceId};
use cascade_memory::{DeviceImporter, SlabMut, process_mark};
use cascade_runtime::{Deadline, SystemClock};
use cascade_tier::{
    BlockStore, CallOptions, ChangeCursor, Changes, GetOutcome, PrefixMatch, PrepareOutcome, Put,
    PutOutcome, PutSlab, Request, StoreError, StoreStats, TierName, ViewOutcome,
};
use cascade_wire::{
    Access, Answer, Call, ChainRequest, KEYS_MAX, KeyQuestion, MANIFEST_FIELDS_MAX, TEXT_BYTES_MAX,
    Welcome,
};

use crate::session::{CALL_TIMEOUT_MIN, CallError, Identity, Link, UNRESPONSIVE};
use crate::tasks::BackgroundTasks;

/// How to connect to a node.
#[derive(Debug, Clone)]
pub struct ConnectOptions {
    /// The node's Unix socket.
    pub socket: PathBuf,
    /// What the client does with the pool. Default: write.
    pub access: Access,
    /// Authenticates the tenant. Default: the process's user decides.
    pub token: Option<Vec<u8>>,
    /// Name in the node's status. Default: the process number.
    pub name: String,
    /// Timeout of calls that have none of their own. Default: 5 s.
    pub timeout: Duration,
    /// Maps the pool of a node whose blocks are in the memory of a device. Default: none, and such
    /// a node is refused.
    pub devices: Option<Arc<dyn DeviceImporter>>,
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
            devices: None,
        }
    }
}

/// A client of a served store. Clones share one client; dropping the last one closes it.
#[derive(Debug, Clone)]
pub struct Client(Arc<Handle>);

/// Closes the client when its last clone is dropped.
#[derive(Debug)]
struct Handle(Arc<ClientInner>);

impl Drop for Handle {
    fn drop(&mut self) {
        self.0.close();
    }
}

#[derive(Debug)]
pub(crate) struct ClientInner {
    identity: Identity,
    timeout: Duration,
    state: Mutex<LinkState>,
    /// Whether a call is reconnecting now. Other calls wait for its result.
    is_reconnecting: Mutex<bool>,
    reconnect_ended: Condvar,
    tasks: Arc<BackgroundTasks>,
    /// The process that connected.
    process: u64,
}

/// Reason after the node closed its connections.
const CONNECTION_CLOSED: &str = "the node closed the connection; check whether it was stopped";
/// How long one call may try to reconnect to a restarted node.
const RECONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// Reason in a forked child of the process that connected.
const FORKED: &str =
    "this process was forked after the client connected; connect again in this process";
/// Timeout of a probe. A call with less time that is not answered starts a probe; one with more
/// marks the node as unavailable.
pub(crate) const PROBE_TIMEOUT: Duration = Duration::from_millis(200);

#[derive(Debug)]
enum LinkState {
    Linked(Arc<Link>),
    /// The node does not answer. The link is kept for when it answers again; none once the session
    /// of a pool in device memory has ended, because the node may have given that memory back.
    Unavailable {
        reason: String,
        link: Option<Arc<Link>>,
        /// Whether its process seems to have ended. Then each call tries to connect, which costs
        /// one failed `connect`. With a stopped process each try would take the call's whole
        /// timeout.
        is_gone: bool,
    },
    Closed,
}

impl Client {
    /// Connects to a running node.
    pub fn connect(options: ConnectOptions) -> Result<Self, StoreError> {
        let ConnectOptions { socket, access, token, name, timeout, devices } = options;
        if timeout.is_zero() {
            let reason = "must be at least 1 ms".to_owned();
            return Err(StoreError::Config { setting: "timeout", reason });
        }
        let identity = Identity { socket, access, token, name, devices };
        let tasks = Arc::new(BackgroundTasks::default());
        let link = Link::open(&identity, &tasks, Deadline::after(&SystemClock, timeout))?;
        let state = Mutex::new(LinkState::Linked(Arc::new(link)));
        let process = process_mark();
        let inner = Arc::new(ClientInner {
            identity,
            timeout,
            state,
            is_reconnecting: Mutex::default(),
            reconnect_ended: Condvar::new(),
            tasks,
            process,
        });
        // After the first session: without a node no thread is started.
        background::start(&inner).map_err(|e| StoreError::Threads { source: Arc::new(e) })?;
        Ok(Self(Arc::new(Handle(inner))))
    }

    pub(crate) fn inner(&self) -> &ClientInner {
        &self.0.0
    }

    /// The node's answer to the handshake; `None` while the node is unavailable.
    pub fn welcome(&self) -> Option<Welcome> {
        self.inner().link().map(|link| link.welcome.clone())
    }

    /// Sends an administrator's request with a topic and JSON arguments. Returns the answer's JSON.
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
        match self.inner().call_with_timeout("send an administrator's request", options, call)? {
            Answer::Text(text) => Ok(text),
            other => Err(self.inner().unexpected_answer(&other)),
        }
    }

    fn query_flags(&self, question: KeyQuestion, keys: &[BlockKey]) -> Vec<bool> {
        let flags = |keys: &[BlockKey]| {
            let call = Call::Ask { question, keys: keys.to_vec() };
            match self.inner().call("query blocks", &call, CallOptions::default()) {
                Ok(Answer::Flags(flags)) if flags.len() == keys.len() => flags,
                _ => vec![false; keys.len()],
            }
        };
        keys.chunks(KEYS_MAX).flat_map(flags).collect()
    }
}

impl ClientInner {
    fn state(&self) -> MutexGuard<'_, LinkState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn tasks(&self) -> &Arc<BackgroundTasks> {
        &self.tasks
    }

    /// The link, unless the node is unavailable.
    pub(crate) fn link(&self) -> Option<Arc<Link>> {
        self.linked().ok()
    }

    /// The link, or why there is none.
    pub(crate) fn linked(&self) -> Result<Arc<Link>, StoreError> {
        // Before the lock: another thread may have held it when the process was forked.
        if self.is_forked() {
            return Err(StoreError::Unavailable {
                socket: self.socket(),
                reason: FORKED.to_owned(),
            });
        }
        match &*self.state() {
            LinkState::Linked(link) => Ok(Arc::clone(link)),
            LinkState::Unavailable { reason, .. } => {
                Err(StoreError::Unavailable { socket: self.socket(), reason: reason.clone() })
            }
            LinkState::Closed => Err(StoreError::Closed),
        }
    }

    /// The link for a new call. If the node was restarted while the client was idle, this call
    /// reconnects.
    pub(crate) fn link_or_reconnect(&self, deadline: Deadline) -> Result<Arc<Link>, StoreError> {
        let linked = self.linked();
        if let Ok(link) = &linked {
            if !link.session.is_closed_by_node() {
                return linked;
            }
            self.mark_unavailable(CONNECTION_CLOSED, link, true);
        }
        // A node that is stopped but not gone is left to the background thread.
        if !matches!(&*self.state(), LinkState::Unavailable { is_gone: true, .. }) {
            return self.linked();
        }
        self.reconnect_once(deadline);
        self.linked()
    }

    /// Reconnects, or waits for the call that already does.
    fn reconnect_once(&self, deadline: Deadline) {
        // The wait ends at this call's deadline, also if another call reconnects.
        let left = deadline.remaining(&SystemClock).min(RECONNECT_TIMEOUT);
        let reconnecting = || self.is_reconnecting.lock().unwrap_or_else(PoisonError::into_inner);
        let mut is_reconnecting = reconnecting();
        if *is_reconnecting {
            // Whether it succeeded or not, the caller reads the state afterwards.
            drop(self.reconnect_ended.wait_timeout_while(is_reconnecting, left, |busy| *busy));
            return;
        }
        *is_reconnecting = true;
        drop(is_reconnecting);
        self.reconnect(Deadline::after(&SystemClock, left));
        *reconnecting() = false;
        self.reconnect_ended.notify_all();
    }

    /// Notices that the node has closed the connections of a session without calls.
    pub(crate) fn look_for_hang_up(&self) {
        if let Ok(link) = self.linked()
            && link.session.is_closed_by_node()
        {
            self.mark_unavailable(CONNECTION_CLOSED, &link, true);
        }
    }

    pub(crate) fn deadline(&self, options: CallOptions) -> (Deadline, Duration) {
        let time = options.timeout.unwrap_or(self.timeout).max(CALL_TIMEOUT_MIN);
        (Deadline::after(&SystemClock, time), time)
    }

    /// Makes calls fail at once until the client has reconnected.
    pub(crate) fn mark_unavailable(&self, reason: &str, link: &Arc<Link>, is_gone: bool) {
        let mut state = self.state();
        // A failure of an earlier link says nothing about the current one. Of several calls that
        // fail at once, only the first changes the state.
        if matches!(&*state, LinkState::Linked(current) if Arc::ptr_eq(current, link)) {
            *state = LinkState::Unavailable {
                reason: reason.to_owned(),
                link: Some(Arc::clone(link)),
                is_gone,
            };
            drop(state);
            self.tasks.mark_node_unavailable();
        }
    }

    /// Tries to reach an unavailable node: first the known session, then a new one.
    pub(crate) fn reconnect(&self, deadline: Deadline) -> bool {
        let link = match &*self.state() {
            LinkState::Unavailable { link, .. } => link.clone(),
            LinkState::Linked(_) | LinkState::Closed => return true,
        };
        // The lock of the state is not held, so other calls can read it meanwhile.
        let open = || Link::open(&self.identity, &self.tasks, deadline).map(Arc::new);
        let Some(link) = link else { return self.take_link(open()) };
        let found = match link.session.reconnect(deadline) {
            Ok(()) => Ok(link),
            // The node does not answer, so it would not answer a new session either.
            Err(CallError::Timeout | CallError::NoFreeConnection | CallError::TooLong(_)) => {
                // Connecting to a node that accepts but does not answer takes the whole timeout:
                // calls must not try it.
                self.set_gone(false);
                return false;
            }
            Err(CallError::Broken(_)) => {
                // The session is lost: the node ended it, was restarted or is gone.
                self.forget_device_pool(&link);
                drop(link);
                open()
            }
        };
        self.take_link(found)
    }

    /// Unmaps a pool in device memory, as soon as no slab of it is in use.
    fn forget_device_pool(&self, lost: &Link) {
        if lost.attachment.device().is_none() {
            return;
        }
        let before = match &mut *self.state() {
            LinkState::Unavailable { link, .. } => link.take(),
            LinkState::Linked(_) | LinkState::Closed => None,
        };
        // Outside the lock: ending a session sends its releases and unmaps the pool.
        drop(before);
    }

    /// Ends an attempt to reconnect. Whether the client is no longer unavailable.
    fn take_link(&self, found: Result<Arc<Link>, StoreError>) -> bool {
        let mut state = self.state();
        // The state may have changed meanwhile. Only an unavailable client takes the result.
        let LinkState::Unavailable { reason, is_gone, .. } = &mut *state else {
            // Outside the lock: ending a session sends its releases and unmaps the pool.
            drop(state);
            drop(found);
            return true;
        };
        match found {
            Ok(link) => {
                let before = std::mem::replace(&mut *state, LinkState::Linked(link));
                // Outside the lock, as above.
                drop(state);
                drop(before);
                true
            }
            Err(error) => {
                // Trying to connect is cheap only while no process listens at the socket.
                *is_gone = matches!(
                    &error,
                    StoreError::Unavailable { reason, .. } if reason != UNRESPONSIVE
                );
                *reason = match error {
                    StoreError::Unavailable { reason, .. } | StoreError::Refused { reason, .. } => {
                        reason
                    }
                    other => other.to_string(),
                };
                false
            }
        }
    }

    fn set_gone(&self, seems_gone: bool) {
        if let LinkState::Unavailable { is_gone, .. } = &mut *self.state() {
            *is_gone = seems_gone;
        }
    }

    /// Sends a call and returns its answer; a failure of the whole call is an error.
    pub(crate) fn call(
        &self,
        operation: &'static str,
        call: &Call,
        options: CallOptions,
    ) -> Result<Answer, StoreError> {
        let (deadline, time) = self.deadline(options);
        let link = self.link_or_reconnect(deadline)?;
        self.call_on(&link, operation, call, deadline, time)
    }

    /// As `call`, for calls that carry their timeout to the node.
    fn call_with_timeout(
        &self,
        operation: &'static str,
        options: CallOptions,
        call: impl FnOnce(u32) -> Call,
    ) -> Result<Answer, StoreError> {
        let (deadline, time) = self.deadline(options);
        let link = self.link_or_reconnect(deadline)?;
        self.call_on(&link, operation, &call(node_timeout_ms(time)), deadline, time)
    }

    /// Checks the answer to a call without a result.
    fn check_done(&self, answer: &Answer) -> Result<(), StoreError> {
        if matches!(answer, Answer::Done) { Ok(()) } else { Err(self.unexpected_answer(answer)) }
    }

    pub(crate) fn socket(&self) -> String {
        self.identity.socket.display().to_string()
    }

    fn is_forked(&self) -> bool {
        process_mark() != self.process
    }

    /// Probes the node after a call with a short timeout was not answered.
    pub(crate) fn probe_node(&self, deadline: Deadline) {
        let Some(link) = self.link() else { return };
        match link.session.call(&Call::Ping, deadline) {
            Ok(_) | Err(CallError::NoFreeConnection | CallError::TooLong(_)) => {}
            Err(CallError::Timeout) => self.mark_unavailable(UNRESPONSIVE, &link, false),
            Err(CallError::Broken(reason)) => self.mark_unavailable(&reason, &link, true),
        }
    }

    fn close(&self) {
        if self.is_forked() {
            // The parent process still uses the client.
            return;
        }
        // The state first: a reconnect in progress then finds the client closed and drops its new
        // link.
        let before = std::mem::replace(&mut *self.state(), LinkState::Closed);
        self.tasks.stop();
        // Outside the lock: ending a session sends its releases.
        drop(before);
    }
}

/// The timeout that the node gets: a tenth less, at most 100 ms, so that its answer arrives in
/// time.
pub(crate) fn node_timeout_ms(time: Duration) -> u32 {
    let most = time.saturating_sub((time / 10).min(Duration::from_millis(100)));
    u32::try_from(most.as_millis()).unwrap_or(u32::MAX)
}

/// Whether a manifest fits a message.
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

    fn prepare(
        &self,
        batch: &[Put<'_>],
        lengths: &[usize],
        options: CallOptions,
    ) -> Vec<PrepareOutcome> {
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
        // A lost hint has no effect on results.
        drop(self.inner().call("send a hint", &Call::Hint(request), CallOptions::default()));
    }

    fn contains(&self, keys: &[BlockKey]) -> Vec<bool> {
        self.query_flags(KeyQuestion::Contains, keys)
    }

    fn locate(&self, keys: &[BlockKey]) -> Vec<Vec<TierName>> {
        let places = |keys: &[BlockKey]| {
            let call = Call::Ask { question: KeyQuestion::Locate, keys: keys.to_vec() };
            let (deadline, time) = self.inner().deadline(CallOptions::default());
            // The link is taken once: the bits of the answer refer to its list of tiers.
            let Ok(link) = self.inner().link_or_reconnect(deadline) else {
                return vec![Vec::new(); keys.len()];
            };
            match self.inner().call_on(&link, "locate blocks", &call, deadline, time) {
                Ok(Answer::Places(places)) if places.len() == keys.len() => {
                    places.into_iter().map(|bits| link.tiers_of(bits)).collect()
                }
                _ => vec![Vec::new(); keys.len()],
            }
        };
        keys.chunks(KEYS_MAX).flat_map(places).collect()
    }

    fn pin(&self, keys: &[BlockKey]) -> Vec<bool> {
        self.query_flags(KeyQuestion::Pin, keys)
    }

    fn unpin(&self, keys: &[BlockKey]) -> Vec<bool> {
        self.query_flags(KeyQuestion::Unpin, keys)
    }

    fn delete(&self, keys: &[BlockKey]) -> Vec<bool> {
        self.query_flags(KeyQuestion::Delete, keys)
    }

    fn clear(&self) {
        // As with a closed embedded store, nothing happens while the node is unavailable.
        drop(self.inner().call("clear", &Call::Clear, CallOptions::default()));
    }

    fn prefetch(&self, keys: &[BlockKey]) -> usize {
        let accepted = |keys: &[BlockKey]| {
            let call = Call::Ask { question: KeyQuestion::Prefetch, keys: keys.to_vec() };
            match self.inner().call("prefetch", &call, CallOptions::default()) {
                Ok(Answer::Count(count)) => usize::try_from(count).unwrap_or(0),
                _ => 0,
            }
        };
        keys.chunks(KEYS_MAX).map(accepted).sum()
    }

    fn register(&self, namespace: &Namespace, options: CallOptions) -> Result<(), StoreError> {
        if !manifest_fits(namespace.manifest()) {
            let most = format!("{MANIFEST_FIELDS_MAX} fields of {TEXT_BYTES_MAX} bytes");
            let reason = format!("a node accepts at most {most}; use fewer or shorter fields");
            return Err(StoreError::Config { setting: "manifest", reason });
        }
        let call = |timeout_ms| Call::Register {
            timeout_ms,
            root: namespace.root(),
            manifest: namespace.manifest().clone(),
        };
        let answer = self.inner().call_with_timeout("register a manifest", options, call)?;
        self.inner().check_done(&answer)
    }

    fn manifests(&self, options: CallOptions) -> Result<Vec<(NamespaceId, Manifest)>, StoreError> {
        let call = |timeout_ms| Call::Manifests { timeout_ms };
        match self.inner().call_with_timeout("list manifests", options, call)? {
            Answer::Manifests(all) => Ok(all),
            other => Err(self.inner().unexpected_answer(&other)),
        }
    }

    fn flush(&self, options: CallOptions) -> Result<(), StoreError> {
        let call = |timeout_ms| Call::Flush { timeout_ms };
        let answer = self.inner().call_with_timeout("flush", options, call)?;
        self.inner().check_done(&answer)
    }

    fn changes(&self, since: Option<ChangeCursor>, max: usize) -> Result<Changes, StoreError> {
        let most = u32::try_from(max.min(KEYS_MAX)).expect("it fits a message");
        let call = Call::Changes { since, most };
        match self.inner().call("read changes", &call, CallOptions::default())? {
            Answer::Changes(changes) => Ok(changes),
            other => Err(self.inner().unexpected_answer(&other)),
        }
    }

    fn stats(&self) -> StoreStats {
        let text = self.administer("stats", "{}", CallOptions::default());
        let text = text.map_err(|error| error.to_string());
        let read = text.and_then(|text| {
            serde_json::from_str(&text).map_err(|error| format!("invalid JSON: {error}"))
        });
        // The trait has no error here: empty statistics carry the reason in their notes.
        read.unwrap_or_else(|reason| StoreStats {
            notes: vec![format!("the node sent no statistics: {reason}")],
            ..StoreStats::default()
        })
    }

    fn close(&self) -> Result<(), StoreError> {
        self.inner().close();
        Ok(())
    }
}
