//! Which reads follow the writes of a batch, so that the memory of a GPU has the bytes. Pure.
//!
//! An RDMA device confirms a write once it has sent the bytes on to the bus, where they may still
//! wait. A read of that memory by the same device comes after them. Memory of the host needs none:
//! what tells of a write comes after it, over the same bus.

use super::chain::Move;
use super::error::VerbsError;
use super::memory::RemoteMemory;
use super::settings::Flush;
use crate::limits::GPUS_MAX;

/// Reads after one batch: one for each GPU of the peer, and one for its host.
pub(super) const FLUSHES_MAX: usize = GPUS_MAX + 1;
/// Bytes that a flush read moves.
const FLUSH_BYTES: u32 = 8;

/// A place that is read after the writes of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlushPlace {
    pub(super) address: u64,
    pub(super) key: u32,
    pub(super) bytes: u32,
}

impl FlushPlace {
    fn of(item: &Move) -> Self {
        let bytes = item.bytes.min(FLUSH_BYTES);
        Self { address: item.remote, key: item.remote_key, bytes }
    }

    /// The first bytes of a peer's memory.
    ///
    /// # Errors
    /// If peers may not read it.
    pub fn start_of(memory: &RemoteMemory) -> Result<Self, VerbsError> {
        let bytes = memory.bytes().min(FLUSH_BYTES.into());
        let address = memory.at(0, bytes, crate::Direction::Read)?;
        let bytes = u32::try_from(bytes).unwrap_or(FLUSH_BYTES);
        Ok(Self { address, key: memory.key, bytes })
    }
}

/// The places that are read after writes: one in each GPU whose memory is written.
///
/// With [`Flush::Always`], also one in memory of the host, if the peer lets it be read.
pub(super) fn flush_places(flush: Flush, writes: &[Move]) -> Vec<FlushPlace> {
    let mut seen: Vec<Option<u8>> = Vec::new();
    let mut places = Vec::new();
    if flush == Flush::Never {
        return places;
    }
    for item in writes.iter().rev() {
        let is_flushed = item.is_readable && (item.gpu.is_some() || flush == Flush::Always);
        if is_flushed && !seen.contains(&item.gpu) {
            seen.push(item.gpu);
            places.push(FlushPlace::of(item));
        }
    }
    places
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(remote: u64, gpu: Option<u8>) -> Move {
        let (local, local_key, remote_key) = (0, 1, 7);
        Move { local, remote, bytes: 100, local_key, remote_key, is_readable: true, gpu }
    }

    fn addresses(flush: Flush, writes: &[Move]) -> Vec<u64> {
        flush_places(flush, writes).iter().map(|place| place.address).collect()
    }

    #[test]
    fn each_gpu_that_is_written_is_read_once() {
        let writes = [
            write(1, Some(0)),
            write(2, None),
            write(3, Some(1)),
            write(4, Some(0)),
            write(5, None),
        ];
        assert_eq!(addresses(Flush::GpuMemory, &writes), [4, 3]);
        assert_eq!(addresses(Flush::Always, &writes), [5, 4, 3]);
        assert_eq!(addresses(Flush::Never, &writes), [0_u64; 0]);
        assert_eq!(addresses(Flush::GpuMemory, &[writes[1]]), [0_u64; 0]);
        assert_eq!(flush_places(Flush::Always, &writes)[0].bytes, 8);
        let hidden = Move { is_readable: false, ..writes[1] };
        assert_eq!(addresses(Flush::Always, &[hidden]), [0_u64; 0]);
    }
}
