//! A session: one client with all its connections, holds and pins.

use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cascade_block::{BlockKey, Namespace};
use cascade_memory::SlabMut;
use cascade_runtime::{Clock, SystemClock};
use cascade_store::holds::HoldGuard as _;
use cascade_store::{CallOptions, FlushMark, Process, StoreError};
use cascade_wire::{Access, HoldRange, SealedBlock, SessionId};

use super::accounts::{Account, bytes_limit_error};
use super::holds::{ClientHold, HeldMemory, Holds, LedgerGuard, counted_bytes, hold_numbers};
use super::mapped;
use super::peer::Peer;
use crate::tenants::Tenant;

/// One client.
pub(crate) struct ClientSession {
    pub(crate) id: SessionId,
    pub(crate) tenant: Arc<Tenant>,
    pub(crate) peer: Peer,
    pub(crate) name: String,
    pub(crate) access: Access,
    /// Maximum bytes that its process may hold in all its sessions.
    pub(crate) hold_bytes_max: u64,
    /// The resources that its process uses in all its sessions.
    account: Arc<Account>,
    /// The pidfd of its process: readable once the process has exited, even if children inherited
    /// its sockets.
    pub(super) process: Option<OwnedFd>,
    /// The process as identified in the ledger; none for another process namespace.
    holder: Option<Process>,
    started: Duration,
    /// The time of its last call, in milliseconds since `started`.
    last_call_ms: AtomicU64,
    pub(super) connections: AtomicUsize,
    /// The number of connections that have joined it so far.
    pub(super) joined: AtomicU64,
    /// The pidfd is watched, so the session can outlive its connections.
    is_watched: AtomicBool,
    holds: Mutex<Holds>,
    /// The pins of this client. They end with the session, as no other client would remove them.
    pins: Mutex<HashMap<BlockKey, PinnedBlock>>,
    /// The failures that its flushes have reported.
    flush_mark: Mutex<FlushMark>,
}

/// A block that a client pinned.
#[derive(Debug, Clone, Copy)]
struct PinnedBlock {
    /// The number of its pins.
    count: u16,
    /// The length of the block.
    bytes: u32,
}

impl fmt::Debug for ClientSession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ClientSession({:?} of {:?})", self.name, self.tenant.name())
    }
}

/// The state of one client at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientSnapshot {
    /// The name in its hello.
    pub name: String,
    /// The name of its tenant.
    pub tenant: String,
    /// Its process id; 0 for a process of another process namespace.
    pub process: i32,
    /// Its user id.
    pub user: u32,
    /// Number of open connections.
    pub connections: usize,
    /// Number of leases.
    pub leases: usize,
    /// Number of slabs that it has reserved and not sealed.
    pub reservations: usize,
    /// Bytes of the leased blocks.
    pub leased_bytes: u64,
    /// Bytes of the reserved slabs.
    pub reserved_bytes: u64,
    /// Age of the oldest lease.
    pub oldest_lease: Option<Duration>,
    /// Time since the session was opened.
    pub age: Duration,
    /// Time since the last call.
    pub idle: Duration,
}

impl ClientSession {
    /// Whether its client has the pool of a tenant mapped.
    pub(super) fn maps_pool_of(&self, tenant: &Tenant) -> bool {
        self.access != Access::Administer && self.tenant.name() == tenant.name()
    }

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
        let flush_mark = tenant.store().flush_mark();
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
            joined: AtomicU64::new(0),
            is_watched: AtomicBool::new(false),
            holds: Mutex::default(),
            pins: Mutex::default(),
            flush_mark: Mutex::new(flush_mark),
        }
    }

    fn holds(&self) -> MutexGuard<'_, Holds> {
        // Holds change in steps that do not panic.
        self.holds.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Flushes the tenant's store. Reports every block that could not be written since this
    /// client's previous flush, even if a flush of another client reported it already.
    pub(super) fn flush(&self, options: CallOptions) -> Result<(), StoreError> {
        let lock_mark = || self.flush_mark.lock().unwrap_or_else(PoisonError::into_inner);
        // The lock is not held while the flush waits. A concurrent flush of this client may move
        // the mark further, so the later of the two stays.
        let mut mark = *lock_mark();
        let flushed = self.tenant.store().flush_since(&mut mark, options);
        let mut current = lock_mark();
        *current = current.max(mark);
        flushed
    }

    fn age(&self) -> Duration {
        SystemClock.monotonic().saturating_sub(self.started)
    }

    pub(super) fn record_call(&self, now: Duration) {
        let since = now.saturating_sub(self.started);
        let now = u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
        // Relaxed: only the status reads it.
        self.last_call_ms.store(now, Ordering::Relaxed);
    }

    /// The bytes that its process may still hold.
    pub(super) fn available_bytes(&self) -> u64 {
        self.account.available_bytes(self.hold_bytes_max)
    }

    /// The error when its process has reached the limit of held bytes.
    pub(super) fn bytes_limit_error(&self) -> StoreError {
        bytes_limit_error(self.hold_bytes_max)
    }

    /// The account of its process.
    pub(super) fn account(&self) -> &Arc<Account> {
        &self.account
    }

    /// Begins a call that may grant holds; it lasts until the returned value is dropped.
    ///
    /// # Errors
    /// A number is in use, the process reached its limit of holds, or the session is closed.
    pub(super) fn begin_grants(
        &self,
        first: u64,
        count: usize,
    ) -> Result<PendingGrants<'_>, StoreError> {
        let hold_count = count as u64;
        let count = u32::try_from(count).expect("messages keep to their limits");
        // Reserved before the call: concurrent calls of the process cannot exceed the limit
        // together.
        self.account.reserve_holds(hold_count)?;
        let begun = self.holds().begin_grants(first, count);
        let numbers = begun.inspect_err(|_| self.account.release_holds(hold_count))?;
        Ok(PendingGrants { session: self, numbers, granted: Cell::new(0) })
    }

    pub(super) fn release(&self, ranges: &[HoldRange]) {
        // The lock ends with this line: returning memory takes the locks of the ledger and the
        // pool.
        let numbers = ranges.iter().copied().map(hold_numbers).collect();
        let released = self.holds().release(numbers);
        self.uncharge(&released);
        ClientHold::release_all(released);
    }

    /// Removes released holds from the account.
    fn uncharge(&self, holds: &[ClientHold]) {
        if !holds.is_empty() {
            self.account.release_bytes(holds.iter().map(ClientHold::bytes).sum());
            self.account.release_holds(holds.len() as u64);
        }
    }

    /// Takes the slabs that the client has written; none for a number that is not a slab of it.
    pub(super) fn take_slabs(&self, blocks: &[SealedBlock]) -> Vec<Option<SlabMut>> {
        let mut guards = Vec::with_capacity(blocks.len());
        let mut slabs = Vec::with_capacity(blocks.len());
        self.holds().take_slabs(blocks.iter().map(|block| block.hold), |taken| {
            slabs.push(taken.map(|(slab, guard)| {
                guards.extend(guard);
                slab
            }));
        });
        // Here, before the store gets the slabs: a block that is refused returns its memory to the
        // pool at once, and a record must not outlive that. A client no longer writes to a slab
        // that it has sealed, so the memory needs no record until the block is in the catalog.
        LedgerGuard::release_all(guards);
        let taken = || slabs.iter().flatten().map(|slab: &SlabMut| counted_bytes(slab.len()));
        self.account.release_bytes(taken().sum());
        self.account.release_holds(taken().count() as u64);
        slabs
    }

    /// Reserves a namespace for registration. One that the tenant already has costs nothing.
    pub(super) fn reserve_namespace(&self, namespace: &Namespace) -> Result<(), StoreError> {
        if self.tenant.store().is_namespace_registered(&namespace.id()) {
            return Ok(());
        }
        // The bytes of names and values, as in the limit of a single manifest.
        let bytes = namespace.manifest().fields().map(|(name, value)| name.len() + value.len());
        self.account.reserve_namespace(bytes.sum::<usize>() as u64)
    }

    /// Releases the memory that all earlier runs of the node granted to the process. The client
    /// sends the epoch of one of them, after it has unmapped the pools of all.
    pub(super) fn release_earlier_holds(&self, epoch: u64) {
        if let Some(Process { pid, .. }) = self.holder {
            let holds = self.tenant.store().release_process(pid);
            tracing::debug!(pid, epoch, holds, "a client released holds of an earlier run");
        }
    }

    /// Records holds in the ledger before they are granted. Without a pool file there is no ledger.
    ///
    /// # Errors
    /// The process exceeds its share of the ledger.
    fn record_in_ledger(
        &self,
        all: &[(usize, HeldMemory)],
    ) -> Result<Vec<LedgerGuard>, StoreError> {
        let store = self.tenant.store();
        let Some(holder) = self.holder.filter(|_| store.config().pool_file.is_some()) else {
            return Ok(Vec::new());
        };
        let pieces: Vec<_> = all.iter().map(|(_, memory)| memory.piece()).collect();
        let mut ids = Vec::with_capacity(pieces.len());
        store.record_held(&pieces, holder, &mut ids)?;
        Ok(ids.into_iter().map(|id| LedgerGuard::new(Arc::clone(&self.tenant), id)).collect())
    }

    /// Pins blocks for this client. True for each block that is present and fits the client's
    /// share: a pinned block occupies DRAM like a leased one.
    pub(super) fn pin(&self, keys: &[BlockKey]) -> Vec<bool> {
        // The pins are locked before `is_closed` is read: `close` first closes the holds and then
        // takes the pins, so no pin is added after it.
        let mut pins = self.pins();
        let is_closed = self.holds().is_closed();
        let mut pin_one = |key: &BlockKey| {
            if is_closed {
                return false;
            }
            if let Some(pinned) = pins.get_mut(key) {
                let Some(count) = pinned.count.checked_add(1) else { return false };
                let is_pinned = self.tenant.store().pin(&[*key])[0];
                pinned.count = if is_pinned { count } else { pinned.count };
                return is_pinned;
            }
            if !self.account.try_reserve_pin() {
                return false;
            }
            // The length is known only after pinning, so the bytes are reserved afterwards. Another
            // session of the process may have used them meanwhile: then the pin is undone.
            if let Some(bytes) = self.tenant.store().pin_within(key, self.available_bytes()) {
                if self.account.try_reserve_bytes(u64::from(bytes), self.hold_bytes_max) {
                    pins.insert(*key, PinnedBlock { count: 1, bytes });
                    return true;
                }
                self.tenant.store().unpin(&[*key]);
            }
            self.account.release_pins(1, 0);
            false
        };
        keys.iter().map(&mut pin_one).collect()
    }

    /// Removes one of this client's pins of each block. True for each block that had one.
    pub(super) fn unpin(&self, keys: &[BlockKey]) -> Vec<bool> {
        let mut pins = self.pins();
        let mut unpin_one = |key: &BlockKey| {
            // Only own pins are removed: the pin of another client stays.
            let Some(pinned) = pins.get_mut(key) else { return false };
            pinned.count -= 1;
            if pinned.count == 0 {
                let bytes = u64::from(pinned.bytes);
                pins.remove(key);
                self.account.release_pins(1, bytes);
            }
            self.tenant.store().unpin(&[*key])[0]
        };
        keys.iter().map(&mut unpin_one).collect()
    }

    pub(super) fn has_pins(&self) -> bool {
        !self.pins().is_empty()
    }

    /// Removes the records of pins of these blocks (of all blocks without a list). Called before
    /// the blocks are deleted, which ends their pins in the store: a block that is put again with
    /// the same key is not pinned.
    pub(super) fn drop_pins(&self, keys: Option<&HashSet<BlockKey>>) {
        let mut pins = self.pins();
        let dropped: Vec<PinnedBlock> = match keys {
            Some(keys) if keys.len() < pins.len() => {
                keys.iter().filter_map(|key| pins.remove(key)).collect()
            }
            Some(keys) => pins.extract_if(|key, _| keys.contains(key)).map(|(_, it)| it).collect(),
            None => pins.drain().map(|(_, pinned)| pinned).collect(),
        };
        let bytes = dropped.iter().map(|pinned| u64::from(pinned.bytes)).sum();
        self.account.release_pins(dropped.len() as u64, bytes);
    }

    fn pins(&self) -> MutexGuard<'_, HashMap<BlockKey, PinnedBlock>> {
        // A pin and its count change together, in steps that do not panic.
        self.pins.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Closes the session of a client that is gone: returns its holds to the pool and removes its
    /// pins. True if it held anything.
    pub(super) fn close(&self) -> bool {
        let held = self.holds().close();
        let had_holds = !held.is_empty();
        self.uncharge(&held);
        ClientHold::release_all(held);
        for (key, pinned) in std::mem::take(&mut *self.pins()) {
            // The store counts each pin, the account each block once.
            for _ in 0..pinned.count {
                self.tenant.store().unpin(&[key]);
            }
            self.account.release_pins(1, u64::from(pinned.bytes));
        }
        had_holds
    }

    /// The node watches the pidfd, so it will notice the exit of the process.
    pub(super) fn set_watched(&self) {
        self.is_watched.store(true, Ordering::Release);
    }

    /// Whether the session stays open without a connection: its process runs, holds memory and may
    /// access it through its mapping of the pool. The memory must not be reused then.
    pub(super) fn outlives_connections(&self) -> bool {
        let host = || self.tenant.store().region().host();
        // Whether a process maps memory of a device cannot be seen, so it may until it ends.
        let may_access =
            || host().is_none_or(|host| mapped::may_access(self.peer.process, host.file()));
        // The list of mappings is read last: it is the only check that reads a file.
        self.is_watched.load(Ordering::Acquire) && self.holds().bytes() > 0 && may_access()
    }

    /// Whether the client connected to administer the node.
    pub(crate) fn is_administrator(&self) -> bool {
        self.access == Access::Administer
    }

    /// Keeps the client's holds when the node stops, so that the client can read on.
    pub(super) fn retain_holds(&self) {
        self.holds().retain();
    }

    pub(crate) fn snapshot(&self) -> ClientSnapshot {
        let holds = self.holds();
        let totals = holds.totals();
        let now = SystemClock.monotonic();
        let age = self.age();
        let last = Duration::from_millis(self.last_call_ms.load(Ordering::Relaxed));
        ClientSnapshot {
            name: self.name.clone(),
            tenant: self.tenant.name().to_owned(),
            process: self.peer.process,
            user: self.peer.user,
            connections: self.connections.load(Ordering::Relaxed),
            leases: totals.leases,
            reservations: totals.reservations,
            leased_bytes: totals.leased_bytes,
            reserved_bytes: totals.reserved_bytes,
            oldest_lease: totals.oldest_lease.map(|granted| now.saturating_sub(granted)),
            age,
            idle: age.saturating_sub(last),
        }
    }
}

/// A call in flight that may grant holds.
pub(super) struct PendingGrants<'a> {
    session: &'a ClientSession,
    numbers: Range<u64>,
    /// The number of holds granted so far.
    granted: Cell<u64>,
}

impl PendingGrants<'_> {
    /// Grants holds by their index in the call. Releases those that the client released early.
    ///
    /// Returns the refused ones with their errors: all, if the process exceeds its share of the
    /// ledger; otherwise those beyond its share of the pool, which a concurrent call of the process
    /// may have used up.
    pub(super) fn grant(&self, all: Vec<(usize, HeldMemory)>) -> Vec<(usize, StoreError)> {
        if all.is_empty() {
            return Vec::new();
        }
        let session = self.session;
        // The ledger first: memory that a client can access is always recorded.
        let guards = match session.record_in_ledger(&all) {
            Ok(guards) => guards,
            Err(error) => return all.iter().map(|(at, _)| (*at, error.clone())).collect(),
        };
        let mut guards = guards.into_iter();
        let (mut unpaid, mut refused) = (Vec::new(), Vec::new());
        let now = SystemClock.monotonic();
        // At once for all; for each by itself only where all exceed the share.
        let all_bytes = all.iter().map(|(_, memory)| memory.bytes()).sum();
        let has_all = session.account.try_reserve_bytes(all_bytes, session.hold_bytes_max);
        let reserve =
            |bytes| has_all || session.account.try_reserve_bytes(bytes, session.hold_bytes_max);
        let mut paid_count = 0;
        let paid = all.into_iter().filter_map(|(index, memory)| {
            let is_paid = reserve(memory.bytes());
            let hold = ClientHold::new(memory, guards.next(), now);
            if is_paid {
                paid_count += 1;
                return Some((self.numbers.start + index as u64, hold));
            }
            refused.push((index, session.bytes_limit_error()));
            unpaid.push(hold);
            None
        });
        let unused = session.holds().grant(&self.numbers, paid);
        let mut unused: Vec<ClientHold> = unused.into_iter().map(|(_, hold)| hold).collect();
        session.account.release_bytes(unused.iter().map(ClientHold::bytes).sum());
        let granted_count = paid_count - unused.len() as u64;
        unused.append(&mut unpaid);
        // Returning memory takes the locks of the ledger and the pool: not under the lock of holds.
        self.granted.set(self.granted.get() + granted_count);
        ClientHold::release_all(unused);
        refused
    }
}

impl Drop for PendingGrants<'_> {
    fn drop(&mut self) {
        self.session.holds().finish_grants(&self.numbers);
        // A granted hold leaves the account when it is released; the others leave it now.
        // `granted` never exceeds the range: each index of the call is granted once.
        let not_granted = self.numbers.end - self.numbers.start - self.granted.get();
        self.session.account.release_holds(not_granted);
    }
}
