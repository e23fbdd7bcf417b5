//! The checksum on every byte that leaves DRAM: CRC-32C.

use crc_fast::CrcAlgorithm::Crc32Iscsi;

/// A CRC-32C (Castagnoli) of some bytes.
pub type Checksum = u32;

/// CRC-32C of the bytes, at memory speed.
pub fn checksum(bytes: &[u8]) -> Checksum {
    // A 32-bit CRC always fits: the library returns every width as u64.
    (crc_fast::checksum(Crc32Iscsi, bytes) & u64::from(u32::MAX)) as Checksum
}
