//! A reliable connected queue pair with a completion queue of its own.
#![expect(unsafe_code, reason = "calls libibverbs, and its operations on queues")]

use std::ffi::c_int;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use super::abi::{
    self, ACCESS_LOCAL_WRITE, ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE, Capacity, Channel,
    CompletionQueue, KIND_RELIABLE, Path, QueuePairInit, QueuePairState, Work,
};
use super::address::{LaneAddress, LinkAddress};
use super::chain::Chain;
use super::device::{Device, HOP_LIMIT, checked, failed};
use super::error::VerbsError;

/// Completions that are taken at a time.
pub(super) const POLL_MAX: usize = 16;
/// Code of the time that a peer waits before it repeats a request to which this side was not
/// ready: 0.64 ms. RDMA reads and writes never meet it.
const NOT_READY_TIMER: u8 = 12;
/// Reads in flight in each direction, where the device allows them.
const READS_MAX: u8 = 16;

/// A queue pair. Its methods are called by one thread at a time.
#[derive(Debug)]
pub(super) struct QueuePair {
    device: Arc<Device>,
    channel: NonNull<Channel>,
    completions: NonNull<CompletionQueue>,
    /// None once it was destroyed: its requests no longer access memory.
    pair: Option<NonNull<abi::QueuePair>>,
    /// Events that were taken and not acknowledged.
    events: u32,
}

// SAFETY: the pointers have no thread affinity, and each is destroyed once, by `drop`.
unsafe impl Send for QueuePair {}

impl QueuePair {
    /// A queue pair that holds `depth` requests.
    pub(super) fn create(device: &Arc<Device>, depth: usize) -> Result<Self, VerbsError> {
        let functions = &device.verbs.functions;
        let context = device.context.as_ptr();
        let requests = u32::try_from(depth).unwrap_or(u32::MAX);
        // Each request can have a completion once the queue pair fails.
        let entries = c_int::try_from(depth).unwrap_or(c_int::MAX);
        // SAFETY: the context is open.
        let channel = unsafe { (functions.create_comp_channel)(context) };
        let channel = NonNull::new(channel).ok_or_else(|| failed("ibv_create_comp_channel"))?;
        // SAFETY: the context is open, and the channel belongs to it.
        let completions = unsafe {
            (functions.create_cq)(context, entries, ptr::null_mut(), channel.as_ptr(), 0)
        };
        let Some(completions) = NonNull::new(completions) else {
            let error = failed("ibv_create_cq");
            // SAFETY: nothing was made of the channel.
            let _is_destroyed = unsafe { (functions.destroy_comp_channel)(channel.as_ptr()) };
            return Err(error);
        };
        // From here on `drop` destroys both.
        let device = Arc::clone(device);
        let mut queue = Self { device, channel, completions, pair: None, events: 0 };
        let mut init = QueuePairInit {
            user: ptr::null_mut(),
            send_queue: completions.as_ptr(),
            receive_queue: completions.as_ptr(),
            shared_receive: ptr::null_mut(),
            capacity: Capacity {
                send_requests: requests,
                // Nothing is received; some devices need one.
                receive_requests: 1,
                send_elements: 1,
                receive_elements: 1,
                inline_bytes: 0,
            },
            kind: KIND_RELIABLE,
            signal_all: 0,
        };
        let domain = queue.device.domain.as_ptr();
        // SAFETY: the domain and the completion queue are of one context.
        let pair = unsafe { (queue.device.verbs.functions.create_qp)(domain, &raw mut init) };
        queue.pair = Some(NonNull::new(pair).ok_or_else(|| failed("ibv_create_qp"))?);
        queue.initialise()?;
        Ok(queue)
    }

    /// Its number, which its peer needs.
    pub(super) fn number(&self) -> u32 {
        // SAFETY: a queue pair that was not destroyed.
        self.pair.map_or(0, |pair| unsafe { pair.as_ref() }.number)
    }

    fn initialise(&self) -> Result<(), VerbsError> {
        let access = ACCESS_LOCAL_WRITE | ACCESS_REMOTE_READ | ACCESS_REMOTE_WRITE;
        let mut state = QueuePairState {
            state: abi::STATE_INIT,
            port: self.device.port.number,
            access: access.cast_unsigned(),
            ..QueuePairState::default()
        };
        let fields = abi::SET_STATE | abi::SET_PARTITION | abi::SET_PORT | abi::SET_ACCESS;
        self.modify(&mut state, fields)
    }

    /// Connects it to a queue pair of the peer. Its own first packet has the number `psn`.
    pub(super) fn connect(
        &self,
        psn: u32,
        peer: &LinkAddress,
        lane: LaneAddress,
    ) -> Result<(), VerbsError> {
        let device = &self.device;
        let path = Path {
            gid: peer.gid,
            gid_index: device.gid.index,
            hop_limit: HOP_LIMIT,
            traffic_class: device.settings.traffic_class,
            local_id: peer.local_id,
            is_global: device.has_global_path().into(),
            port: device.port.number,
            ..Path::default()
        };
        let mut state = QueuePairState {
            state: abi::STATE_READY_TO_RECEIVE,
            mtu: device.mtu.min(peer.mtu).into(),
            peer_number: lane.number,
            receive_psn: lane.psn,
            peer_reads: device.reads_max.min(READS_MAX),
            not_ready_timer: NOT_READY_TIMER,
            path,
            ..QueuePairState::default()
        };
        let fields = abi::SET_STATE
            | abi::SET_PATH
            | abi::SET_MTU
            | abi::SET_PEER_NUMBER
            | abi::SET_RECEIVE_PSN
            | abi::SET_PEER_READS
            | abi::SET_NOT_READY_TIMER;
        self.modify(&mut state, fields)?;
        let mut state = QueuePairState {
            state: abi::STATE_READY_TO_SEND,
            send_psn: psn,
            timeout: device.settings.timeout,
            retries: device.settings.retries,
            not_ready_retries: 7,
            reads: device.initiated_reads_max.min(peer.reads).clamp(1, READS_MAX),
            ..QueuePairState::default()
        };
        let fields = abi::SET_STATE
            | abi::SET_SEND_PSN
            | abi::SET_TIMEOUT
            | abi::SET_RETRIES
            | abi::SET_NOT_READY_RETRIES
            | abi::SET_READS;
        self.modify(&mut state, fields)
    }

    fn modify(&self, state: &mut QueuePairState, fields: c_int) -> Result<(), VerbsError> {
        let pair = self.pair.ok_or(VerbsError::Closed)?;
        let modify = self.device.verbs.functions.modify_qp;
        // SAFETY: the queue pair was not destroyed, and the structure has the library's layout.
        checked("ibv_modify_qp", unsafe { modify(pair.as_ptr(), ptr::from_mut(state), fields) })
    }

    /// Gives a chain to the device: one doorbell.
    #[inline]
    pub(super) fn post(&mut self, chain: &mut Chain, is_signalled: bool) -> Result<(), VerbsError> {
        let pair = self.pair.ok_or(VerbsError::Closed)?;
        // SAFETY: the context is open.
        let post = unsafe { self.device.context.as_ref() }.operations.post_send;
        let post = post.expect("each provider can post");
        let mut refused = ptr::null_mut();
        let first = chain.seal(is_signalled);
        // SAFETY: the queue pair was not destroyed. The list lives in the chain during the call,
        // which copies it. The memory that it names is registered: the device checks the keys.
        checked("ibv_post_send", unsafe { post(pair.as_ptr(), first, &raw mut refused) })
    }

    /// Takes completions; returns how many.
    #[inline]
    pub(super) fn poll(&mut self, works: &mut [Work; POLL_MAX]) -> Result<usize, VerbsError> {
        // SAFETY: the context is open.
        let poll = unsafe { self.device.context.as_ref() }.operations.poll_cq;
        let poll = poll.expect("each provider can poll");
        let most = c_int::try_from(POLL_MAX).unwrap_or(1);
        // SAFETY: the completion queue lives, and the array has room for `most` entries.
        let count = unsafe { poll(self.completions.as_ptr(), most, works.as_mut_ptr()) };
        usize::try_from(count)
            .map_err(|_negative| VerbsError::Call { call: "ibv_poll_cq", code: libc::EIO })
    }

    /// Asks for an event at the next completion.
    pub(super) fn arm(&mut self) -> Result<(), VerbsError> {
        // SAFETY: the context is open.
        let arm = unsafe { self.device.context.as_ref() }.operations.req_notify_cq;
        let arm = arm.expect("each provider has events");
        // SAFETY: the completion queue lives.
        checked("ibv_req_notify_cq", unsafe { arm(self.completions.as_ptr(), 0) })
    }

    /// Takes all events of the channel, which does not block.
    pub(super) fn take_events(&mut self) {
        let take = self.device.verbs.functions.get_cq_event;
        let mut completions = ptr::null_mut();
        let mut user = ptr::null_mut();
        // SAFETY: the channel lives; both pointers are written.
        while unsafe { take(self.channel.as_ptr(), &raw mut completions, &raw mut user) } == 0 {
            self.events += 1;
        }
    }

    /// A descriptor that is readable when an event waits.
    pub(super) fn descriptor(&self) -> Result<OwnedFd, VerbsError> {
        let call = "ibv_create_comp_channel";
        let failed =
            |error: rustix::io::Errno| VerbsError::Call { call, code: error.raw_os_error() };
        // SAFETY: the library allocated the structure, which lives as long as `self`.
        let number = unsafe { self.channel.as_ref() }.descriptor;
        // SAFETY: the descriptor is open as long as the channel.
        let descriptor = unsafe { BorrowedFd::borrow_raw(number) };
        let flags = fcntl_getfl(descriptor).map_err(failed)?;
        fcntl_setfl(descriptor, flags | OFlags::NONBLOCK).map_err(failed)?;
        rustix::io::fcntl_dupfd_cloexec(descriptor, 0).map_err(failed)
    }

    /// Ends all requests: when this returns, the device does not access their memory.
    pub(super) fn destroy(&mut self) {
        let Some(pair) = self.pair.take() else {
            return;
        };
        let mut state = QueuePairState { state: abi::STATE_ERROR, ..QueuePairState::default() };
        let modify = self.device.verbs.functions.modify_qp;
        // Not needed for the end of the requests, so its result does not matter.
        // SAFETY: the queue pair was not destroyed.
        let _is_stopped = unsafe { modify(pair.as_ptr(), &raw mut state, abi::SET_STATE) };
        let destroy = self.device.verbs.functions.destroy_qp;
        // SAFETY: `pair` was taken, so it is destroyed once. The kernel ends its requests.
        let code = unsafe { destroy(pair.as_ptr()) };
        // With a queue pair left, the device could write into memory that is used for other things.
        assert_eq!(code, 0, "the kernel destroys a queue pair");
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        self.destroy();
        self.take_events();
        let functions = &self.device.verbs.functions;
        if self.events > 0 {
            // SAFETY: so many events of this queue were taken; its destruction waits for this.
            unsafe { (functions.ack_cq_events)(self.completions.as_ptr(), self.events) };
        }
        // SAFETY: destroyed once, after its queue pair.
        let _is_destroyed = unsafe { (functions.destroy_cq)(self.completions.as_ptr()) };
        // SAFETY: destroyed once, after its completion queue.
        let _is_destroyed = unsafe { (functions.destroy_comp_channel)(self.channel.as_ptr()) };
    }
}
