//! The checksum on every byte that leaves DRAM: CRC-32C.

use crc_fast::CrcAlgorithm::Crc32Iscsi;

/// A CRC-32C (Castagnoli) of some bytes.
pub type Checksum = u32;

/// CRC-32C of the bytes, at memory speed.
#[expect(clippy::missing_panics_doc, reason = "a 32-bit CRC fits 32 bits")]
pub fn checksum(bytes: &[u8]) -> Checksum {
    let crc = crc_fast::checksum(Crc32Iscsi, bytes);
    Checksum::try_from(crc).expect("the library returns 32 bits for a CRC of that width")
}
