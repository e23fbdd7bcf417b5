//! A session: one client, in all its connections, and what it holds.

use std::cell::Cell;
use std::collections::HashMap;
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cascade_block::{BlockKey, Clock, Namespace, SystemClock};
use cascade_memory::SlabMut;
use cascade_store::{CallOptions, FlushMark, Process, StoreError};
use cascade_wire::{Access, HoldRange, SealedBlock, SessionId};
use nix::sys::socket::{getsockopt, sockopt};

use super::accounts::{Account, bytes_limit};
use super::holds::{Granted, Held, Holds, Note, counted};
use super::mapped;
use crate::tenants::Tenant;

/// Who is at the other end of a Unix socket, as the kernel says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Peer {
    /// Its process; 0 when it lives in another process namespace.
    pub(crate) process: i32,
    /// Its user.
    pub(crate) user: u32,
    /// Its primary group.
    pub(crate) group: u32,
}

impl Peer {
    pub(super) fn of(stream: &UnixStream) -> io::Result<Self> {
        // Not rustix's: it cannot tell a process of another namespace, whose number here is 0.
        let credentials = getsockopt(stream, sockopt::PeerCredentials)?;
        let (process, user, group) = (credentials.pid(), credentials.uid(), credentials.gid());
        Ok(Self { process, user, group })
    }
}

/// One client.
pub(crate) struct Session {
    pub(crate) id: SessionId,
    pub(crate) tenant: Arc<Tenant>,
    pub(crate) peer: Peer,
    pub(crate) name: String,
    pub(crate) access: Access,
    /// Most bytes that its process may hold at a time, in all of its sessions.
    pub(crate) hold_bytes_max: u64,
    /// What its process has, in all of its sessions.
    account: Arc<Account>,
    /// Readable once the process is gone, however many children inherited its sockets.
    pub(super) process: Option<OwnedFd>,
    /// The same as a ledger names it; unknown for one of another process namespace.
    holder: Option<Process>,
    started: Duration,
    /// Milliseconds since `started` of its last call.
    last_call_ms: AtomicU64,
    connections: AtomicUsize,
    /// Its process's end is seen: it may have holds without a connection.
    is_watched: AtomicBool,
    holds: Mutex<Holds>,
    /// How often it pinned each block. A pin of a client ends with it: nobody else would know that
    /// it is to be taken back.
    pins: Mutex<HashMap<BlockKey, Pinned>>,
    /// What its flushes told it of.
    told: Mutex<FlushMark>,
}

/// A block that a client pinned.
#[derive(Debug, Clone, Copy)]
struct Pinned {
    /// How often.
    count: u16,
    /// Its length.
    bytes: u32,
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Session({:?} of {:?})", self.name, self.tenant.name())
    }
}

/// What a status says of a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionFacts {
    /// What it calls itself.
    pub name: String,
    /// Which tenant it is.
    pub tenant: String,
    /// Its process.
    pub process: i32,
    /// Its user.
    pub user: u32,
    /// Its connections.
    pub connections: usize,
    /// Blocks that it reads.
    pub leases: usize,
    /// Slabs that it writes.
    pub reservations: usize,
    /// Bytes of the blocks that it reads.
    pub leased_bytes: u64,
    /// Bytes of the slabs that it writes.
    pub reserved_bytes: u64,
    /// Age of the oldest block that it reads.
    pub oldest_lease: Option<Duration>,
    /// How long it has been here.
    pub age: Duration,
    /// How long it has said nothing.
    pub silent: Duration,
}

impl Session {
    pub(super) fn new(
        id: SessionId,
        tenant: Arc<Tenant>,
        peer: Peer,
        process: (Option<OwnedFd>, Option<Process>),
        hello: (String, Access),
        share: (Arc<Account>, u64),
    ) -> Self {
        let ((name, access), (process, holder)) = (hello, process);
        let (account, hold_bytes_max) = share;
        let told = tenant.store().flush_mark();
        Self {
            id,
            tenant,
            peer,
            name,
            access,
            hold_bytes_max,
            account,
            process,
            holder,
            started: SystemClock.monotonic(),
            last_call_ms: AtomicU64::new(0),
            connections: AtomicUsize::new(1),
            is_watched: AtomicBool::new(false),
            holds: Mutex::default(),
            pins: Mutex::default(),
            told: Mutex::new(told),
        }
    }

    fn holds(&self) -> MutexGuard<'_, Holds> {
        // Holds change in steps that do not panic.
        self.holds.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Flushes its tenant's store. It is told of what was not written since its own last flush,
    /// whoever else flushes.
    pub(super) fn flush(&self, options: CallOptions) -> Result<(), StoreError> {
        let known = || self.told.lock().unwrap_or_else(PoisonError::into_inner);
        let mut told = *known();
        let flushed = self.tenant.store().flush_since(&mut told, options);
        let mut known = known();
        *known = known.max(told);
        flushed
    }

    fn age(&self) -> Duration {
        SystemClock.monotonic().saturating_sub(self.started)
    }

    pub(super) fn note_call(&self, now: Duration) {
        let since = now.saturating_sub(self.started);
        let now = u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
        // Relaxed: read for the status alone.
        self.last_call_ms.store(now, Ordering::Relaxed);
    }

    /// Bytes that its process may still take.
    pub(super) fn bytes_left(&self) -> u64 {
        self.account.bytes_left(self.hold_bytes_max)
    }

    /// What it is told when its process has all that it may have.
    pub(super) fn bytes_limit(&self) -> StoreError {
        bytes_limit(self.hold_bytes_max)
    }

    /// Whose calls count together.
    pub(super) fn account(&self) -> &Arc<Account> {
        &self.account
    }

    /// A call that may grant these numbers, unless one is in use, they are too many, or the client
    /// is gone. The call is over when the value is dropped.
    pub(super) fn expect(&self, first: u64, count: usize) -> Result<Granting<'_>, StoreError> {
        let pieces = count as u64;
        let count = u32::try_from(count).expect("messages keep to their limits");
        let range = HoldRange { first, count };
        self.account.take_pieces(pieces)?;
        if let Err(error) = self.holds().expect(range) {
            self.account.give_pieces_back(pieces);
            return Err(error);
        }
        Ok(Granting { session: self, range, granted: Cell::new(0) })
    }

    pub(super) fn release(&self, ranges: &[HoldRange]) {
        for range in ranges {
            let released = self.holds().release(*range);
            self.no_longer_holds(&released);
            Granted::give_back(released);
        }
    }

    fn no_longer_holds(&self, pieces: &[Granted]) {
        if !pieces.is_empty() {
            self.account.give_bytes_back(pieces.iter().map(Granted::bytes).sum());
            self.account.give_pieces_back(pieces.len() as u64);
        }
    }

    /// Takes slabs that the client has written; nothing for a number that is none of its slabs.
    pub(super) fn take_slabs(
        &self,
        blocks: &[SealedBlock],
    ) -> Vec<Option<(SlabMut, Option<Note>)>> {
        let mut holds = self.holds();
        let slabs: Vec<_> = blocks.iter().map(|block| holds.take_slab(block.hold)).collect();
        drop(holds);
        let taken = || slabs.iter().flatten().map(|(slab, _)| counted(slab.len()));
        self.account.give_bytes_back(taken().sum());
        self.account.give_pieces_back(taken().count() as u64);
        slabs
    }

    /// The right to register a namespace: one that its tenant knows is free.
    pub(super) fn may_register(&self, namespace: &Namespace) -> Result<(), StoreError> {
        if self.tenant.store().knows_namespace(&namespace.id()) {
            return Ok(());
        }
        let bytes = namespace.manifest().fields().map(|(name, value)| name.len() + value.len());
        self.account.take_namespace(bytes.sum::<usize>() as u64)
    }

    /// The process holds nothing any more that an earlier run of the node gave it.
    pub(super) fn forget_earlier(&self, epoch: u64) {
        if let Some(Process { pid, .. }) = self.holder {
            let pieces = self.tenant.store().release_process(pid);
            tracing::debug!(pid, epoch, pieces, "a client let go of an earlier run's memory");
        }
    }

    /// Notes in the ledger what is about to be granted; no notes where the pool has no name. An
    /// error if these are more than its process's share of the ledger.
    fn note(&self, all: &[(usize, Held)]) -> Result<Vec<Note>, StoreError> {
        let store = self.tenant.store();
        let Some(holder) = self.holder.filter(|_| store.config().pool_file.is_some()) else {
            return Ok(Vec::new());
        };
        let pieces: Vec<_> = all.iter().map(|(_, held)| held.piece()).collect();
        let mut ids = Vec::with_capacity(pieces.len());
        store.note_held(&pieces, holder, &mut ids)?;
        Ok(ids.into_iter().map(|id| Note::new(Arc::clone(&self.tenant), id)).collect())
    }

    /// Pins blocks for this client. True for those that are here, if its share has room for them:
    /// a pinned block stays in DRAM as one that is read does.
    pub(super) fn pin(&self, keys: &[BlockKey]) -> Vec<bool> {
        let mut pins = self.pins();
        let is_over = self.holds().is_over();
        let mut pin_one = |key: &BlockKey| {
            if is_over {
                return false;
            }
            if let Some(pinned) = pins.get_mut(key) {
                let Some(count) = pinned.count.checked_add(1) else { return false };
                let is_pinned = self.tenant.store().pin(&[*key])[0];
                pinned.count = if is_pinned { count } else { pinned.count };
                return is_pinned;
            }
            if !self.account.take_pin() {
                return false;
            }
            let bytes_max = self.bytes_left();
            let bytes = self.tenant.store().pin_within(key, bytes_max);
            let taken = bytes.unwrap_or(0);
            // Another session of the process may have taken the rest meanwhile.
            if bytes.is_some() && self.account.take_bytes(u64::from(taken), self.hold_bytes_max) {
                pins.insert(*key, Pinned { count: 1, bytes: taken });
                return true;
            }
            if bytes.is_some() {
                self.tenant.store().unpin(&[*key]);
            }
            self.account.give_pins_back(1, 0);
            false
        };
        keys.iter().map(&mut pin_one).collect()
    }

    /// Takes back one of this client's pins of each block. True for those that had one.
    pub(super) fn unpin(&self, keys: &[BlockKey]) -> Vec<bool> {
        let mut pins = self.pins();
        let mut unpin_one = |key: &BlockKey| {
            let Some(pinned) = pins.get_mut(key) else { return false };
            pinned.count -= 1;
            if pinned.count == 0 {
                let bytes = u64::from(pinned.bytes);
                pins.remove(key);
                self.account.give_pins_back(1, bytes);
            }
            self.tenant.store().unpin(&[*key])[0]
        };
        keys.iter().map(&mut unpin_one).collect()
    }

    /// The blocks are about to be deleted, and their pins with them: a block put again under one
    /// of these names has none of this client's. All blocks without a list.
    fn forget_pins(&self, keys: Option<&[BlockKey]>) {
        let mut pins = self.pins();
        let forgotten: Vec<Pinned> = match keys {
            Some(keys) => keys.iter().filter_map(|key| pins.remove(key)).collect(),
            None => pins.drain().map(|(_, pinned)| pinned).collect(),
        };
        let bytes = forgotten.iter().map(|pinned| u64::from(pinned.bytes)).sum();
        self.account.give_pins_back(forgotten.len() as u64, bytes);
    }

    fn pins(&self) -> MutexGuard<'_, HashMap<BlockKey, Pinned>> {
        // Each pin and its count change together, in steps that do not panic.
        self.pins.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The client is gone: what it held goes back to the pool, and its pins are taken back. Whether
    /// it held anything.
    pub(super) fn end(&self) -> bool {
        let held = self.holds().end();
        let had_some = !held.is_empty();
        self.no_longer_holds(&held);
        Granted::give_back(held);
        for (key, pinned) in std::mem::take(&mut *self.pins()) {
            for _ in 0..pinned.count {
                self.tenant.store().unpin(&[key]);
            }
            self.account.give_pins_back(1, u64::from(pinned.bytes));
        }
        had_some
    }

    /// Its process's end will be seen.
    pub(super) fn note_watched(&self) {
        self.is_watched.store(true, Ordering::Release);
    }

    /// Whether it goes on without a connection: its process lives, and may touch what it holds
    /// through its mapping of the pool.
    fn outlives_connections(&self) -> bool {
        let may_touch =
            || mapped::may_touch(self.peer.process, self.tenant.store().region().file());
        self.is_watched.load(Ordering::Acquire) && self.holds().bytes() > 0 && may_touch()
    }

    /// Whether it is no worker but somebody who looks after the node.
    pub(crate) fn is_administrator(&self) -> bool {
        self.access == Access::Administer
    }

    /// The node stops: what the client holds stays where it is, for as long as this process lives.
    pub(super) fn keep_held(&self) {
        self.holds().keep();
    }

    pub(crate) fn facts(&self) -> SessionFacts {
        let holds = self.holds();
        let sums = holds.sums();
        let now = SystemClock.monotonic();
        let age = self.age();
        let last = Duration::from_millis(self.last_call_ms.load(Ordering::Relaxed));
        SessionFacts {
            name: self.name.clone(),
            tenant: self.tenant.name().to_owned(),
            process: self.peer.process,
            user: self.peer.user,
            connections: self.connections.load(Ordering::Relaxed),
            leases: sums.leases,
            reservations: sums.reservations,
            leased_bytes: sums.leased_bytes,
            reserved_bytes: sums.reserved_bytes,
            oldest_lease: sums.oldest_lease.map(|granted| now.saturating_sub(granted)),
            age,
            silent: age.saturating_sub(last),
        }
    }
}

/// A call under way that grants holds.
pub(super) struct Granting<'a> {
    session: &'a Session,
    range: HoldRange,
    /// How many it has granted.
    granted: Cell<u64>,
}

impl Granting<'_> {
    /// Grants holds by their place in the call. Those that nobody waits for any more go back, and
    /// so do those returned with the reason: all if they are more than the process's share of the
    /// ledger, else those beyond its share of the pool, which another of its calls may have used
    /// meanwhile.
    pub(super) fn grant(&self, all: Vec<(usize, Held)>) -> Vec<(usize, StoreError)> {
        let session = self.session;
        let notes = match session.note(&all) {
            Ok(notes) => notes,
            Err(error) => return all.iter().map(|(at, _)| (*at, error.clone())).collect(),
        };
        let mut notes = notes.into_iter();
        let mut unwanted = Vec::new();
        let mut refused = Vec::new();
        let now = SystemClock.monotonic();
        let mut granted_count = 0;
        let mut holds = session.holds();
        for (index, held) in all {
            let bytes = held.bytes();
            let granted = Granted::new(held, notes.next(), now);
            if !session.account.take_bytes(bytes, session.hold_bytes_max) {
                refused.push((index, session.bytes_limit()));
                unwanted.push(granted);
            } else if let Some(back) = holds.grant(self.range.first + index as u64, granted) {
                session.account.give_bytes_back(bytes);
                unwanted.push(back);
            } else {
                granted_count += 1;
            }
        }
        drop(holds);
        self.granted.set(self.granted.get() + granted_count);
        Granted::give_back(unwanted);
        refused
    }
}

impl Drop for Granting<'_> {
    fn drop(&mut self) {
        self.session.holds().expected(self.range);
        let rest = u64::from(self.range.count) - self.granted.get();
        self.session.account.give_pieces_back(rest);
    }
}

/// The sessions of a node.
#[derive(Debug, Default)]
pub(crate) struct Sessions {
    all: Mutex<HashMap<SessionId, Arc<Session>>>,
    /// Those that ended while they held something.
    reaped: AtomicU64,
    /// Those that have no connection and may still touch what they hold.
    unconnected: AtomicUsize,
    /// When it was looked whether these still may, in milliseconds of the monotonic clock.
    looked_ms: AtomicU64,
}

impl Sessions {
    fn lock(&self) -> MutexGuard<'_, HashMap<SessionId, Arc<Session>>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn add(&self, session: &Arc<Session>) {
        self.lock().insert(session.id, Arc::clone(session));
    }

    /// The session that a further connection of the same process may join.
    pub(super) fn find(&self, id: &SessionId, peer: Peer) -> Option<Arc<Session>> {
        let all = self.lock();
        let found = all.get(id).filter(|session| session.peer == peer)?;
        // Under the lock, as the last connection's end.
        found.connections.fetch_add(1, Ordering::AcqRel);
        Some(Arc::clone(found))
    }

    /// A connection closed. The session ends with its last one, unless its process lives on, holds
    /// something, and has the pool mapped: that is not given to others under it. True if it ended.
    pub(super) fn leave(&self, session: &Session) -> bool {
        let all = self.lock();
        let is_last = session.connections.fetch_sub(1, Ordering::AcqRel) == 1;
        if !is_last {
            return false;
        }
        if session.outlives_connections() {
            // Relaxed: whether to look at all.
            self.unconnected.store(1, Ordering::Relaxed);
            return false;
        }
        self.remove_from(all, session);
        true
    }

    /// Ends sessions without a connection whose processes have unmapped the pool since. Looks ten
    /// times a second at most.
    pub(super) fn end_unmapped(&self) {
        if self.unconnected.load(Ordering::Relaxed) == 0 {
            return;
        }
        let now = u64::try_from(SystemClock.monotonic().as_millis()).unwrap_or(u64::MAX);
        let before = self.looked_ms.load(Ordering::Relaxed);
        if now.saturating_sub(before) < 100 {
            return;
        }
        self.looked_ms.store(now, Ordering::Relaxed);
        self.unconnected.store(0, Ordering::Relaxed);
        for session in self.all() {
            let all = self.lock();
            if session.connections.load(Ordering::Acquire) > 0 {
                continue;
            }
            if session.outlives_connections() {
                self.unconnected.store(1, Ordering::Relaxed);
            } else {
                self.remove_from(all, &session);
            }
        }
    }

    pub(super) fn remove(&self, session: &Session) {
        self.remove_from(self.lock(), session);
    }

    fn remove_from(
        &self,
        mut all: MutexGuard<'_, HashMap<SessionId, Arc<Session>>>,
        session: &Session,
    ) {
        all.remove(&session.id);
        drop(all);
        if session.end() {
            self.reaped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The blocks are about to be deleted; the clients' pins of them go with them. A block that
    /// expires keeps them on its clients' lists, which take back a later pin for it then.
    pub(crate) fn forget_pins(&self, tenant: &Tenant, keys: Option<&[BlockKey]>) {
        let of_tenant = |session: &&Arc<Session>| session.tenant.name() == tenant.name();
        for session in self.all().iter().filter(of_tenant) {
            session.forget_pins(keys);
        }
    }

    /// How many sessions ended while they held something.
    pub(crate) fn reaped(&self) -> u64 {
        self.reaped.load(Ordering::Relaxed)
    }

    /// All that are connected or hold something.
    pub(crate) fn all(&self) -> Vec<Arc<Session>> {
        self.lock().values().map(Arc::clone).collect()
    }
}
