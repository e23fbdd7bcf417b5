//! CRC-32C, the checksum of every byte that leaves DRAM.

use crc_fast::CrcAlgorithm::Crc32Iscsi;

/// A CRC-32C (Castagnoli).
pub type Checksum = u32;

/// The CRC-32C of the bytes.
#[expect(clippy::missing_panics_doc, reason = "a 32-bit CRC fits 32 bits")]
pub fn checksum(bytes: &[u8]) -> Checksum {
    let crc = crc_fast::checksum(Crc32Iscsi, bytes);
    Checksum::try_from(crc).expect("the library returns 32 bits for a CRC of that width")
}
