//! A link: several queue pairs to one peer, which share its batches.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use cascade_runtime::{Deadline, random_u64};

use super::address::{LaneAddress, LinkAddress};
use super::chain::Move;
use super::device::Device;
use super::error::VerbsError;
use super::flush::{FLUSHES_MAX, FlushPlace};
use super::lane::Lane;
use super::memory::{RegisteredMemory, SCRATCH_BYTES};
use super::settings::LANES_MAX;
use crate::{Access, Direction};

/// A link whose queue pairs exist and are not connected yet.
#[derive(Debug)]
pub struct OpenLink {
    link: Link,
    psns: Vec<u32>,
}

impl OpenLink {
    /// Makes the queue pairs.
    ///
    /// # Errors
    /// If the device refuses.
    pub fn open(device: &Arc<Device>) -> Result<Self, VerbsError> {
        Self::with_lanes(device, device.settings.queue_pairs)
    }

    /// Makes so many queue pairs.
    pub(super) fn with_lanes(device: &Arc<Device>, count: usize) -> Result<Self, VerbsError> {
        let lanes: Result<Vec<_>, _> = (0..count).map(|_| Lane::create(device)).collect();
        let psns: Result<Vec<_>, _> = (0..count).map(|_| random_psn()).collect();
        let link = Link {
            scratch: RegisteredMemory::scratch(device, Access::LOCAL)?,
            chain: device.settings.chain,
            device: Arc::clone(device),
            lanes: lanes?,
            next: AtomicUsize::new(0),
            failure: OnceLock::new(),
        };
        Ok(Self { link, psns: psns? })
    }

    /// What the peer needs to connect.
    pub fn address(&self) -> LinkAddress {
        let device = &self.link.device;
        let numbers = self.link.lanes.iter().map(|lane| lane.lock().queue.number());
        let lanes = numbers.zip(&self.psns).map(|(number, &psn)| LaneAddress { number, psn });
        LinkAddress {
            gid: device.gid.address.octets(),
            local_id: device.local_id,
            mtu: device.mtu,
            reads: device.reads_max,
            lanes: lanes.collect(),
        }
    }

    /// Connects to a peer that connects to [`Self::address`]. Both sides must have done so before
    /// either posts.
    ///
    /// # Errors
    /// If the peer has another number of queue pairs, or the device refuses.
    pub fn connect(self, peer: &LinkAddress) -> Result<Link, VerbsError> {
        if peer.lanes.len() != self.link.lanes.len() {
            let reason = "it has another number of queue pairs: set queue_pairs alike";
            return Err(VerbsError::Invalid { what: "link address", reason });
        }
        for ((lane, &psn), &other) in self.link.lanes.iter().zip(&self.psns).zip(&peer.lanes) {
            lane.lock().queue.connect(psn, peer, other)?;
        }
        Ok(self.link)
    }
}

/// A random number of 24 bits, so that packets of an earlier connection are not taken for ours.
fn random_psn() -> Result<u32, VerbsError> {
    let random = random_u64().map_err(|error| VerbsError::Call {
        call: "getrandom",
        code: error.raw_os_error().unwrap_or(0),
    })?;
    Ok(u32::from_le_bytes([
        random.to_le_bytes()[0],
        random.to_le_bytes()[1],
        random.to_le_bytes()[2],
        0,
    ]))
}

/// Queue pairs that are connected to one peer. Many threads may use it at once.
#[derive(Debug)]
pub struct Link {
    // Before the memory: a queue pair may still read into it.
    lanes: Vec<Lane>,
    scratch: RegisteredMemory,
    device: Arc<Device>,
    chain: usize,
    /// The lane that takes the next chain.
    next: AtomicUsize,
    /// The first error, after which nothing is posted.
    failure: OnceLock<VerbsError>,
}

/// A batch that was posted: for each lane, the last of its requests.
#[derive(Debug, Clone, Copy, Default)]
pub struct Posted([u64; LANES_MAX]);

impl Link {
    /// Posts a batch. Returns when all of it was given to the device, which needs room in the
    /// queues: they are emptied meanwhile.
    ///
    /// A write ends with a read of each of the places `flushes` on each queue pair. The memory of
    /// the peer then has the bytes of the writes before it.
    ///
    /// The local memory must stay registered until [`Self::wait`] has ended with another result
    /// than [`VerbsError::Deadline`], or [`Self::close`] has returned.
    ///
    /// # Errors
    /// If the link has failed or fails, or the deadline passes before all is posted. The link is
    /// closed then, and no request accesses memory any more.
    ///
    /// # Panics
    /// If there are more than 17 flushes.
    pub fn post(
        &self,
        direction: Direction,
        mut moves: impl ExactSizeIterator<Item = Move>,
        flushes: &[FlushPlace],
        deadline: Deadline,
    ) -> Result<Posted, VerbsError> {
        assert!(flushes.len() <= FLUSHES_MAX, "a peer has fewer GPUs");
        let mut posted = Posted::default();
        let chains = moves.len().div_ceil(self.chain);
        let first = self.next.fetch_add(chains, Ordering::Relaxed);
        for at in 0..chains {
            let number = first.wrapping_add(at) % self.lanes.len();
            let is_last = at + self.lanes.len() >= chains;
            let flushes =
                if is_last && direction == Direction::Write { flushes } else { &flushes[..0] };
            let count = self.chain.min(moves.len());
            let result = self.lanes[number]
                .wait(deadline, |state| state.has_room(count + flushes.len()))
                .and_then(|mut lane| {
                    let reads = flushes.iter().map(|place| self.flush_read(number, place));
                    lane.post(direction, moves.by_ref().take(count), reads, is_last)
                });
            posted.0[number] = result.map_err(|error| self.fail(error))?;
        }
        Ok(posted)
    }

    /// A read of a place, on one of the queue pairs.
    fn flush_read(&self, number: usize, place: &FlushPlace) -> Move {
        Move {
            local: self.scratch.start() + number as u64 * SCRATCH_BYTES,
            local_key: self.scratch.local_key,
            remote: place.address,
            remote_key: place.key,
            bytes: place.bytes,
            is_readable: true,
            gpu: None,
        }
    }

    /// Waits until a batch has ended. Of a write, all bytes are then at the peer's device; of a
    /// read, in the local memory.
    ///
    /// # Errors
    /// If the link has failed: it is closed then, and no request accesses memory any more. After
    /// [`VerbsError::Deadline`] the batch goes on, and `wait` may be called again.
    pub fn wait(&self, posted: &Posted, deadline: Deadline) -> Result<(), VerbsError> {
        for (lane, &id) in self.lanes.iter().zip(&posted.0) {
            match lane.wait(deadline, |state| state.has_completed(id)) {
                Ok(_state) => {}
                Err(error @ VerbsError::Deadline { .. }) => return Err(error),
                Err(error) => return Err(self.fail(error)),
            }
        }
        Ok(())
    }

    /// Whether batches can be posted.
    pub fn is_open(&self) -> bool {
        self.failure.get().is_none()
    }

    /// Closes the link: when this returns, no request accesses memory any more.
    pub fn close(&self) {
        self.fail(VerbsError::Closed);
    }

    /// The longest piece that one work request moves.
    pub fn message_bytes_max(&self) -> u32 {
        self.device.message_bytes_max()
    }

    /// Ends all requests; returns the first error of the link.
    fn fail(&self, error: VerbsError) -> VerbsError {
        let first = self.failure.get_or_init(|| error);
        for lane in &self.lanes {
            lane.close(first);
        }
        first.clone()
    }
}

#[cfg(test)]
mod tests;
