//! A chain of work requests: what the device takes at one doorbell. Filled without allocation.

use super::abi::{Element, OPERATION_READ, OPERATION_WRITE, SEND_SIGNALED, SendRequest};
use super::error::VerbsError;
use super::memory::{RegisteredMemory, RemoteMemory};
use crate::Direction;

/// One run of bytes that a work request moves. Its places were checked.
#[derive(Debug, Clone, Copy)]
pub struct Move {
    pub(super) local: u64,
    pub(super) remote: u64,
    pub(super) bytes: u32,
    pub(super) local_key: u32,
    pub(super) remote_key: u32,
    /// The peer allows a flush read there.
    pub(super) is_readable: bool,
    /// The number of the peer's GPU that has the memory; none for memory of the host.
    pub(super) gpu: Option<u8>,
}

impl Move {
    /// A move of `bytes` bytes between two places. At most [`Device::message_bytes_max`] bytes.
    ///
    /// # Errors
    /// If a place reaches beyond the end of its memory, or the peer's memory was not registered for
    /// the direction.
    ///
    /// [`Device::message_bytes_max`]: super::Device::message_bytes_max
    #[inline]
    pub fn new(
        direction: Direction,
        local: (&RegisteredMemory, u64),
        remote: (&RemoteMemory, u64),
        bytes: u32,
    ) -> Result<Self, VerbsError> {
        let here = local.0.at(local.1, bytes.into())?;
        let there = remote.0.at(remote.1, bytes.into(), direction)?;
        Ok(Self::between((local.0, here), (remote.0, there), bytes))
    }

    /// A move between two addresses that were checked.
    #[inline]
    pub(super) fn between(
        (local, here): (&RegisteredMemory, u64),
        (remote, there): (&RemoteMemory, u64),
        bytes: u32,
    ) -> Self {
        Self {
            local: here,
            remote: there,
            bytes,
            local_key: local.local_key,
            remote_key: remote.key,
            is_readable: remote.is_readable(),
            gpu: remote.gpu,
        }
    }
}

/// Requests and their places in memory. Each is linked to the next one when the chain is made.
#[derive(Debug)]
pub(super) struct Chain {
    requests: Box<[SendRequest]>,
    elements: Box<[Element]>,
    count: usize,
}

impl Chain {
    pub(super) fn new(capacity: usize) -> Self {
        let mut requests = vec![SendRequest::default(); capacity].into_boxed_slice();
        let mut elements = vec![Element::default(); capacity].into_boxed_slice();
        let first_element = elements.as_mut_ptr().expose_provenance();
        let first = requests.as_mut_ptr().expose_provenance();
        for (at, request) in requests.iter_mut().enumerate() {
            request.element_count = 1;
            request.elements = first_element + at * size_of::<Element>();
            request.next = first + (at + 1) * size_of::<SendRequest>();
        }
        Self { requests, elements, count: 0 }
    }

    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// Removes all requests.
    pub(super) fn clear(&mut self) {
        let first = self.requests.as_mut_ptr().expose_provenance();
        if let Some(last) = self.requests[..self.count].last_mut() {
            last.next = first + self.count * size_of::<SendRequest>();
        }
        self.count = 0;
    }

    /// Adds a request.
    ///
    /// # Panics
    /// If the chain is full.
    #[inline]
    pub(super) fn push(&mut self, id: u64, direction: Direction, item: &Move) {
        let at = self.count;
        let (address, bytes, local_key) = (item.local, item.bytes, item.local_key);
        self.elements[at] = Element { address, bytes, local_key };
        let request = &mut self.requests[at];
        request.id = id;
        request.operation = match direction {
            Direction::Write => OPERATION_WRITE,
            Direction::Read => OPERATION_READ,
        };
        request.flags = 0;
        request.remote_address = item.remote;
        request.remote_key = item.remote_key;
        self.count = at + 1;
    }

    /// Ends the list after the last request, asks for a completion of that one if `is_signalled`,
    /// and returns the first. The list is valid until the chain is changed.
    ///
    /// # Panics
    /// If the chain is empty.
    pub(super) fn seal(&mut self, is_signalled: bool) -> *mut SendRequest {
        let last = self.requests[..self.count].last_mut();
        let last = last.expect("a chain is posted with at least one request");
        last.next = 0;
        if is_signalled {
            last.flags = SEND_SIGNALED;
        }
        self.elements.as_mut_ptr().expose_provenance();
        let first = self.requests.as_mut_ptr();
        first.expose_provenance();
        first
    }
}
