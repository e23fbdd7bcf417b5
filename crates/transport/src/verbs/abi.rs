//! Structures and constants of libibverbs.
//!
//! Names and layouts are those of rdma-core's `infiniband/verbs.h`, whose ABI has been stable since
//! version 1.1 of the library's symbols. The offsets below were printed by a C program that was
//! compiled with version 44 of that header on x86-64.

use std::ffi::{c_int, c_uint, c_void};
use std::mem::offset_of;

/// `struct ibv_device`, `ibv_pd` and `ibv_srq`: only the library looks inside.
pub(super) type Opaque = c_void;

/// `struct ibv_context_ops`: calls that `verbs.h` makes without a function of the library.
#[repr(C)]
pub(super) struct Operations {
    pub(super) before_poll: [usize; 11],
    pub(super) poll_cq:
        Option<unsafe extern "C" fn(*mut CompletionQueue, c_int, *mut Work) -> c_int>,
    pub(super) req_notify_cq: Option<unsafe extern "C" fn(*mut CompletionQueue, c_int) -> c_int>,
    pub(super) before_send: [usize; 12],
    pub(super) post_send: Option<
        unsafe extern "C" fn(*mut QueuePair, *mut SendRequest, *mut *mut SendRequest) -> c_int,
    >,
    pub(super) after_send: [usize; 6],
}

/// `struct ibv_context`, up to what is used here. The library allocates it.
#[repr(C)]
pub(super) struct Context {
    pub(super) device: *mut Opaque,
    pub(super) operations: Operations,
}

/// `struct ibv_comp_channel`.
#[repr(C)]
pub(super) struct Channel {
    pub(super) context: *mut Context,
    pub(super) descriptor: c_int,
    pub(super) references: c_int,
}

/// `struct ibv_cq`, up to what is used here. The library allocates it.
#[repr(C)]
pub(super) struct CompletionQueue {
    pub(super) context: *mut Context,
}

/// `struct ibv_qp`, up to what is used here. The library allocates it.
#[repr(C)]
pub(super) struct QueuePair {
    pub(super) context: *mut Context,
    pub(super) user: *mut c_void,
    pub(super) domain: *mut Opaque,
    pub(super) send_queue: *mut CompletionQueue,
    pub(super) receive_queue: *mut CompletionQueue,
    pub(super) shared_receive: *mut Opaque,
    pub(super) handle: u32,
    pub(super) number: u32,
}

/// `struct ibv_mr`.
#[repr(C)]
pub(super) struct MemoryRegion {
    pub(super) context: *mut Context,
    pub(super) domain: *mut Opaque,
    pub(super) address: *mut c_void,
    pub(super) bytes: usize,
    pub(super) handle: u32,
    pub(super) local_key: u32,
    pub(super) remote_key: u32,
}

/// `struct ibv_sge`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Element {
    pub(super) address: u64,
    pub(super) bytes: u32,
    pub(super) local_key: u32,
}

/// `struct ibv_send_wr` with its union in the form for RDMA reads and writes. Addresses are
/// numbers, so that a list can be kept in safe code.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct SendRequest {
    pub(super) id: u64,
    pub(super) next: usize,
    pub(super) elements: usize,
    pub(super) element_count: c_int,
    pub(super) operation: c_int,
    pub(super) flags: c_uint,
    pub(super) immediate: u32,
    pub(super) remote_address: u64,
    pub(super) remote_key: u32,
    pub(super) rest: [u64; 9],
}

/// `struct ibv_wc`: a completion.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Work {
    pub(super) id: u64,
    pub(super) status: c_int,
    pub(super) operation: c_int,
    pub(super) vendor_error: u32,
    pub(super) bytes: u32,
    pub(super) immediate: u32,
    pub(super) number: u32,
    pub(super) source: u32,
    pub(super) flags: c_uint,
    pub(super) partition: u16,
    pub(super) local_id: u16,
    pub(super) service_level: u8,
    pub(super) path_bits: u8,
}

/// `struct ibv_qp_cap`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Capacity {
    pub(super) send_requests: u32,
    pub(super) receive_requests: u32,
    pub(super) send_elements: u32,
    pub(super) receive_elements: u32,
    pub(super) inline_bytes: u32,
}

/// `struct ibv_qp_init_attr`.
#[repr(C)]
pub(super) struct QueuePairInit {
    pub(super) user: *mut c_void,
    pub(super) send_queue: *mut CompletionQueue,
    pub(super) receive_queue: *mut CompletionQueue,
    pub(super) shared_receive: *mut Opaque,
    pub(super) capacity: Capacity,
    pub(super) kind: c_int,
    pub(super) signal_all: c_int,
}

/// `struct ibv_ah_attr` with its `struct ibv_global_route`.
#[repr(C, align(8))]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Path {
    pub(super) gid: [u8; 16],
    pub(super) flow_label: u32,
    pub(super) gid_index: u8,
    pub(super) hop_limit: u8,
    pub(super) traffic_class: u8,
    pub(super) padding: u8,
    pub(super) local_id: u16,
    pub(super) service_level: u8,
    pub(super) source_bits: u8,
    pub(super) static_rate: u8,
    pub(super) is_global: u8,
    pub(super) port: u8,
}

/// `struct ibv_qp_attr`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct QueuePairState {
    pub(super) state: c_int,
    pub(super) current_state: c_int,
    pub(super) mtu: c_int,
    pub(super) migration: c_int,
    pub(super) queue_key: u32,
    pub(super) receive_psn: u32,
    pub(super) send_psn: u32,
    pub(super) peer_number: u32,
    pub(super) access: c_uint,
    pub(super) capacity: Capacity,
    pub(super) path: Path,
    pub(super) other_path: Path,
    pub(super) partition: u16,
    pub(super) other_partition: u16,
    pub(super) notify_drained: u8,
    pub(super) draining: u8,
    pub(super) reads: u8,
    pub(super) peer_reads: u8,
    pub(super) not_ready_timer: u8,
    pub(super) port: u8,
    pub(super) timeout: u8,
    pub(super) retries: u8,
    pub(super) not_ready_retries: u8,
    pub(super) other_port: u8,
    pub(super) other_timeout: u8,
    pub(super) rate_limit: u32,
}

/// `struct ibv_port_attr`. The library's function fills all but the last field.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct PortState {
    pub(super) state: c_int,
    pub(super) mtu_max: c_int,
    pub(super) mtu: c_int,
    pub(super) gid_count: c_int,
    pub(super) capabilities: u32,
    pub(super) message_bytes_max: u32,
    pub(super) counters: [u32; 2],
    pub(super) partition_count: u16,
    pub(super) local_id: u16,
    pub(super) subnet_manager: u16,
    pub(super) small: [u8; 8],
    pub(super) link_layer: u8,
    pub(super) flags: u8,
    pub(super) more_capabilities: u16,
    pub(super) padding: u16,
}

/// `struct ibv_device_attr`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct DeviceState {
    pub(super) firmware: [u8; 64],
    pub(super) guids: [u64; 2],
    pub(super) region_bytes_max: u64,
    pub(super) page_sizes: u64,
    pub(super) vendor: [u32; 3],
    pub(super) queue_pairs_max: c_int,
    pub(super) requests_max: c_int,
    pub(super) capabilities: c_uint,
    pub(super) elements_max: c_int,
    pub(super) read_elements_max: c_int,
    pub(super) completion_queues_max: c_int,
    pub(super) completions_max: c_int,
    pub(super) regions_max: c_int,
    pub(super) domains_max: c_int,
    pub(super) reads_max: c_int,
    pub(super) other_reads: [c_int; 2],
    pub(super) initiated_reads_max: c_int,
    pub(super) rest: [c_int; 18],
}

pub(super) const SUCCESS: c_int = 0;
pub(super) const KIND_RELIABLE: c_int = 2;
pub(super) const STATE_INIT: c_int = 1;
pub(super) const STATE_READY_TO_RECEIVE: c_int = 2;
pub(super) const STATE_READY_TO_SEND: c_int = 3;
pub(super) const STATE_ERROR: c_int = 6;
pub(super) const PORT_ACTIVE: c_int = 4;
pub(super) const OPERATION_WRITE: c_int = 0;
pub(super) const OPERATION_READ: c_int = 4;
pub(super) const SEND_SIGNALED: c_uint = 1 << 1;
pub(super) const ACCESS_LOCAL_WRITE: c_int = 1;
pub(super) const ACCESS_REMOTE_WRITE: c_int = 1 << 1;
pub(super) const ACCESS_REMOTE_READ: c_int = 1 << 2;
pub(super) const ACCESS_RELAXED_ORDERING: c_int = 1 << 20;
pub(super) const SET_STATE: c_int = 1;
pub(super) const SET_ACCESS: c_int = 1 << 3;
pub(super) const SET_PARTITION: c_int = 1 << 4;
pub(super) const SET_PORT: c_int = 1 << 5;
pub(super) const SET_PATH: c_int = 1 << 7;
pub(super) const SET_MTU: c_int = 1 << 8;
pub(super) const SET_TIMEOUT: c_int = 1 << 9;
pub(super) const SET_RETRIES: c_int = 1 << 10;
pub(super) const SET_NOT_READY_RETRIES: c_int = 1 << 11;
pub(super) const SET_RECEIVE_PSN: c_int = 1 << 12;
pub(super) const SET_READS: c_int = 1 << 13;
pub(super) const SET_NOT_READY_TIMER: c_int = 1 << 15;
pub(super) const SET_SEND_PSN: c_int = 1 << 16;
pub(super) const SET_PEER_READS: c_int = 1 << 17;
pub(super) const SET_PEER_NUMBER: c_int = 1 << 20;

const _: () = {
    assert!(offset_of!(Context, operations.poll_cq) == 96);
    assert!(offset_of!(Context, operations.req_notify_cq) == 104);
    assert!(offset_of!(Context, operations.post_send) == 208);
    assert!(size_of::<Operations>() == 256);
    assert!(offset_of!(Channel, descriptor) == 8);
    assert!(offset_of!(QueuePair, number) == 52);
    assert!(offset_of!(MemoryRegion, local_key) == 36);
    assert!(size_of::<MemoryRegion>() == 48);
    assert!(size_of::<Element>() == 16);
    assert!(offset_of!(SendRequest, operation) == 28);
    assert!(offset_of!(SendRequest, remote_address) == 40);
    assert!(offset_of!(SendRequest, remote_key) == 48);
    assert!(size_of::<SendRequest>() == 128);
    assert!(offset_of!(Work, vendor_error) == 16);
    assert!(size_of::<Work>() == 48);
    assert!(offset_of!(QueuePairInit, capacity) == 32);
    assert!(offset_of!(QueuePairInit, kind) == 52);
    assert!(size_of::<QueuePairInit>() == 64);
    assert!(offset_of!(Path, local_id) == 24);
    assert!(offset_of!(Path, is_global) == 29);
    assert!(size_of::<Path>() == 32);
    assert!(offset_of!(QueuePairState, capacity) == 36);
    assert!(offset_of!(QueuePairState, path) == 56);
    assert!(offset_of!(QueuePairState, partition) == 120);
    assert!(offset_of!(QueuePairState, reads) == 126);
    assert!(offset_of!(QueuePairState, timeout) == 130);
    assert!(size_of::<QueuePairState>() == 144);
    assert!(offset_of!(PortState, local_id) == 34);
    assert!(offset_of!(PortState, link_layer) == 46);
    assert!(size_of::<PortState>() == 52);
    assert!(offset_of!(DeviceState, requests_max) == 112);
    assert!(offset_of!(DeviceState, completions_max) == 132);
    assert!(offset_of!(DeviceState, reads_max) == 144);
    assert!(offset_of!(DeviceState, initiated_reads_max) == 156);
    assert!(size_of::<DeviceState>() == 232);
};
