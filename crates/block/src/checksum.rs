//! CRC-32C, the checksum of every byte that leaves DRAM.

/// A CRC-32C (Castagnoli).
pub type Checksum = u32;

/// The CRC-32C of the bytes.
pub fn checksum(bytes: &[u8]) -> Checksum {
    // `crc_fast::checksum` would link the code and the tables of every CRC.
    crc_fast::crc32_iscsi(bytes)
}
