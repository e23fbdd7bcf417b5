//! A process of a world of the transport: an endpoint with its regions, its listener and clients.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use cascade_runtime::simulated::Random;
use cascade_runtime::{Deadline, LeafMutex, now, sleep};
use cascade_transport::{
    Access, Connection, Endpoint, EndpointConfig, Listener, Notice, Region, RegionId,
};

use super::passing::Passing;
use super::shared::{Phase, PostedNotice, Shared, host};
use super::slot::Slot;

/// Bytes between two slots. They are never written.
const GAP_BYTES: usize = 32;
/// Length of the region that peers read and that is never written.
pub(super) const SOURCE_BYTES: usize = 32 << 10;
/// Pause before a listener is opened again.
const LISTEN_PAUSE: Duration = Duration::from_millis(20);
/// Time in which a listener has to stop.
const STOP_TIME: Duration = Duration::from_millis(500);
/// Time in which closed connections have to end at their peers.
const END_TIME: Duration = Duration::from_secs(40);
/// The token of all endpoints, if they have one.
pub(super) const TOKEN: &[u8] = b"the token of this world";

/// The regions of a process.
#[derive(Debug, Clone, Copy)]
pub(super) struct Regions {
    /// Peers may read and write it.
    pub(super) shared: RegionId,
    /// Peers may write it.
    pub(super) sink: RegionId,
    /// Peers may read it.
    pub(super) source: RegionId,
    /// Peers may not access it.
    pub(super) local: RegionId,
}

/// A process, as far as other threads of the world know it.
pub(super) struct Process {
    pub(super) number: usize,
    pub(super) endpoint: Endpoint,
    pub(super) regions: Regions,
    pub(super) source_bytes: Vec<u8>,
    pub(super) passing: Passing,
    /// What peers write: the slots of the shared region, then those of the sink.
    slots: LeafMutex<Vec<Slot>>,
    slot_bytes: usize,
    /// Its connections to others, which its clients share.
    links: LeafMutex<Vec<Option<Arc<Linked>>>>,
    listener: LeafMutex<Option<Listener>>,
    /// Clients that make operations.
    pub(super) busy: AtomicUsize,
    pub(super) is_done: AtomicBool,
}

/// A connection to another process.
#[derive(Debug)]
pub(super) struct Linked {
    pub(super) connection: Arc<dyn Connection>,
    /// The number of its first stream in the network.
    pub(super) number: u64,
    pub(super) target: Arc<Process>,
}

impl fmt::Debug for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Process").field("number", &self.number).finish_non_exhaustive()
    }
}

impl Process {
    pub(super) fn new(shared: &Shared, number: usize, random: &mut Random) -> Self {
        let profile = &shared.profile;
        let config = EndpointConfig {
            name: host(number),
            token: profile.has_token.then(|| TOKEN.to_vec()),
            limits: profile.limits,
            streams: profile.streams,
            ..EndpointConfig::default()
        };
        let endpoint = Endpoint::new(config).expect("the configuration is valid");
        let register = |bytes, access| {
            endpoint.register(Region::private(bytes, access)).expect("there is room for regions")
        };
        let stride = profile.slot_bytes + GAP_BYTES;
        let slots = profile.clients_of_all() * profile.slots;
        let regions = Regions {
            shared: register(slots * stride, Access::BOTH),
            sink: register(slots * stride, Access::WRITE),
            source: register(SOURCE_BYTES, Access::READ),
            local: register(profile.clients * profile.slots * stride, Access::LOCAL),
        };
        let mut source_bytes = vec![0; SOURCE_BYTES];
        random.fill(&mut source_bytes);
        endpoint.fill(regions.source, 0, &source_bytes).expect("it fits");
        let passing = Passing::default();
        passing.register(&endpoint);
        let slots = vec![Slot::new(vec![0; profile.slot_bytes]); 2 * slots];
        Self {
            number,
            endpoint,
            regions,
            source_bytes,
            passing,
            slots: LeafMutex::new(slots),
            slot_bytes: profile.slot_bytes,
            links: LeafMutex::new(vec![None; profile.processes]),
            listener: LeafMutex::new(None),
            busy: AtomicUsize::new(profile.clients),
            is_done: AtomicBool::new(false),
        }
    }

    pub(super) fn is_done(&self) -> bool {
        self.is_done.load(Ordering::Relaxed)
    }

    /// The slots that peers write. Never held over a scheduling point.
    pub(super) fn slots(&self) -> MutexGuard<'_, Vec<Slot>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The offset of a slot in its region.
    pub(super) fn offset_of(&self, slot: usize) -> usize {
        slot * (self.slot_bytes + GAP_BYTES)
    }

    /// The region of a slot that peers write, and its offset in it.
    pub(super) fn place_of(&self, slot: usize) -> (RegionId, usize) {
        let half = self.slots().len() / 2;
        if slot < half {
            (self.regions.shared, self.offset_of(slot))
        } else {
            (self.regions.sink, self.offset_of(slot - half))
        }
    }

    /// What a slot that peers write holds now.
    pub(super) fn fetch(&self, slot: usize) -> Vec<u8> {
        let (region, offset) = self.place_of(slot);
        let mut bytes = vec![0; self.slot_bytes];
        self.endpoint.fetch(region, offset as u64, &mut bytes).expect("the slot is in its region");
        bytes
    }

    /// Compares a slot that peers write with the model.
    pub(super) fn check_slot(&self, shared: &Shared, slot: usize, when: &str) {
        let connections = {
            let slots = self.slots();
            slots[slot].connections()
        };
        let over: Vec<u64> = connections.into_iter().filter(|it| shared.has_ended(*it)).collect();
        let actual = self.fetch(slot);
        let wrong = self.slots()[slot].compare(&actual, |connection| over.contains(&connection));
        if let Some(wrong) = wrong {
            let number = self.number;
            let mut state = shared.state();
            state.findings.add_wrong_bytes(format_args!(
                "{when}, slot {slot} of process {number}: {wrong:?}"
            ));
        }
    }

    fn links(&self) -> MutexGuard<'_, Vec<Option<Arc<Linked>>>> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The connection to another process, if there was one.
    pub(super) fn link(&self, to: usize) -> Option<Arc<Linked>> {
        self.links()[to].clone()
    }

    /// Shares a connection with the other clients of this process.
    pub(super) fn set_link(&self, to: usize, linked: Option<Arc<Linked>>) {
        let earlier = std::mem::replace(&mut self.links()[to], linked);
        // Its drop closes it, which locks.
        drop(earlier);
    }

    pub(super) fn close_links(&self) {
        let links = std::mem::take(&mut *self.links());
        let count = links.len();
        drop(links);
        *self.links() = vec![None; count];
    }

    /// Opens the listener. Now and then no thread can be started.
    pub(super) fn listen(&self, shared: &Shared) {
        loop {
            match self.endpoint.listen_simulated(&shared.network, &host(self.number)) {
                Ok(listener) => {
                    *self.listener.lock().unwrap_or_else(PoisonError::into_inner) = Some(listener);
                    return;
                }
                Err(error) if !shared.profile.fails_threads => {
                    shared.add(format_args!("process {}: {error}", self.number));
                }
                Err(_) => {}
            }
            sleep(LISTEN_PAUSE);
        }
    }

    fn take_listener(&self) -> Option<Listener> {
        self.listener.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Stops the listener. False if another thread does.
    pub(super) fn stop_listening(&self, shared: &Shared) -> bool {
        let Some(listener) = self.take_listener() else {
            return false;
        };
        let frozen = || shared.network.frozen(&host(self.number));
        let (began, before) = (now(), frozen());
        listener.stop();
        drop(listener);
        let took = now().saturating_sub(began).saturating_sub(frozen().saturating_sub(before));
        if took > STOP_TIME {
            shared.add(format_args!("process {}: a listener stopped in {took:?}", self.number));
        }
        true
    }

    /// Reads notices until the world closes, and compares each with what was posted.
    pub(super) fn read_notices(&self, shared: &Shared) {
        loop {
            let is_closing = shared.phase() >= Phase::Closing;
            let wait = if is_closing { Duration::ZERO } else { Duration::from_millis(50) };
            match self.endpoint.next_notice(Deadline::at(now() + wait)) {
                Some(notice) => self.take_notice(shared, &notice),
                None if shared.phase() == Phase::Over => return,
                None if is_closing => sleep(Duration::from_millis(10)),
                None => {}
            }
            if !is_closing {
                sleep(shared.profile.notice_pause);
            }
        }
    }

    fn take_notice(&self, shared: &Shared, notice: &Notice) {
        let posted = batch_of(&notice.bytes).and_then(|batch| {
            let state = shared.state();
            state.notices.get(&batch).cloned().map(|posted| (batch, posted))
        });
        let Some((batch, posted)) = posted else {
            return shared.add(format_args!("process {}: an unknown notice", self.number));
        };
        let is_last = |slot: usize| self.slots()[slot].last() == Some(batch);
        // Before any other thread runs: after the next batch in the slot there is nothing to see.
        let slot = posted.slot.filter(|slot| is_last(*slot));
        if let Some(slot) = slot {
            let actual = self.fetch(slot);
            let slots = self.slots();
            if slots[slot].last() == Some(batch)
                && let Some(wrong) = slots[slot].missing(batch, &actual)
            {
                shared.state().findings.add_wrong_bytes(format_args!(
                    "the notice of batch {batch} came before its bytes: {wrong:?}"
                ));
            }
        }
        let PostedNotice { from, to, bytes, is_refused, is_seen, .. } = posted;
        let mut state = shared.state();
        let mut check = |is_right: bool, what: &str| {
            if !is_right {
                state.findings.add(format_args!("the notice of batch {batch} {what}"));
            }
        };
        check(notice.from == from, "has another sender");
        check(to == self.endpoint.id(), "was sent to another process");
        check(*notice.bytes == *bytes, "has other bytes");
        check(!is_seen, "came twice");
        check(!is_refused, "came although the batch was refused");
        state.notices.entry(batch).and_modify(|posted| posted.is_seen = true);
    }

    /// The last checks, when no connection is used any more.
    pub(super) fn close(&self, shared: &Shared) {
        let until = now() + END_TIME;
        while self.peer_count() > 0 && now() < until {
            sleep(Duration::from_millis(10));
        }
        let peers = self.peer_count();
        if peers > 0 {
            shared.add(format_args!(
                "process {}: {peers} peers {END_TIME:?} after all connections were closed",
                self.number
            ));
        }
        self.stop_listening(shared);
        let count = self.slots().len();
        for slot in 0..count {
            self.check_slot(shared, slot, "at the end");
        }
        self.check_gaps(shared);
    }

    fn peer_count(&self) -> usize {
        // Taken out: the listener locks.
        let Some(listener) = self.take_listener() else {
            return 0;
        };
        let count = listener.peer_count();
        *self.listener.lock().unwrap_or_else(PoisonError::into_inner) = Some(listener);
        count
    }

    /// Checks that the bytes between slots, and the region that peers may only read, are unchanged.
    fn check_gaps(&self, shared: &Shared) {
        let slots = self.slots().len() / 2;
        for region in [self.regions.shared, self.regions.sink] {
            for slot in 0..slots {
                let mut gap = [0; GAP_BYTES];
                let offset = self.offset_of(slot) + self.slot_bytes;
                self.endpoint.fetch(region, offset as u64, &mut gap).expect("it is there");
                if gap != [0; GAP_BYTES] {
                    let what = format_args!("bytes were written after slot {slot} of {region:?}");
                    shared.state().findings.add_wrong_bytes(what);
                }
            }
        }
        let mut source = vec![0; SOURCE_BYTES];
        self.endpoint.fetch(self.regions.source, 0, &mut source).expect("it is there");
        if source != self.source_bytes {
            let what = "bytes were written to a region that peers may only read";
            shared.state().findings.add_wrong_bytes(what);
        }
    }
}

/// The bytes of the notice of a batch.
pub(super) fn notice_of(batch: u64, random: &mut Random) -> Vec<u8> {
    let mut bytes = batch.to_le_bytes().to_vec();
    let most = [1, 20, 4089][random.index_below(3)];
    let mut rest = vec![0; random.index_below(most)];
    random.fill(&mut rest);
    bytes.extend(rest);
    bytes
}

fn batch_of(notice: &[u8]) -> Option<u64> {
    Some(u64::from_le_bytes(notice.get(..8)?.try_into().ok()?))
}
