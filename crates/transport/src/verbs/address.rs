//! The address of a link: what two processes exchange before their queue pairs are connected.

use cascade_block::checksum;

use super::error::VerbsError;
use super::settings::LANES_MAX;

const MAGIC: [u8; 4] = *b"CVLA";
const VERSION: u16 = 1;
/// Magic, version, length, GID, local ID, MTU, reads, lane count.
const HEADER_BYTES: usize = 4 + 2 + 2 + 16 + 2 + 1 + 1 + 4;
const LANE_BYTES: usize = 8;
const CHECKSUM_BYTES: usize = 4;

/// One queue pair of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LaneAddress {
    /// Its number, 24 bits.
    pub(super) number: u32,
    /// The number of its first packet, 24 bits.
    pub(super) psn: u32,
}

/// The address of a link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkAddress {
    pub(super) gid: [u8; 16],
    /// InfiniBand's local ID; 0 on Ethernet.
    pub(super) local_id: u16,
    /// The largest packet, as libibverbs counts them: 1 is 256 bytes, 5 is 4096.
    pub(super) mtu: u8,
    /// Reads of the peer that each queue pair serves at a time.
    pub(super) reads: u8,
    pub(super) lanes: Vec<LaneAddress>,
}

impl LinkAddress {
    /// The address as bytes: little endian, with a version and a checksum.
    pub fn to_bytes(&self) -> Vec<u8> {
        let total = HEADER_BYTES + self.lanes.len() * LANE_BYTES + CHECKSUM_BYTES;
        let mut bytes = Vec::with_capacity(total);
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        // At most 8 lanes.
        bytes.extend(u16::try_from(total).unwrap_or(u16::MAX).to_le_bytes());
        bytes.extend(self.gid);
        bytes.extend(self.local_id.to_le_bytes());
        bytes.extend([self.mtu, self.reads]);
        bytes.extend(u32::try_from(self.lanes.len()).unwrap_or(u32::MAX).to_le_bytes());
        for lane in &self.lanes {
            bytes.extend(lane.number.to_le_bytes());
            bytes.extend(lane.psn.to_le_bytes());
        }
        bytes.extend(checksum(&bytes).to_le_bytes());
        bytes
    }

    /// The address that bytes of a peer stand for.
    ///
    /// # Errors
    /// If they are no address of this version.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, VerbsError> {
        let invalid = |reason| VerbsError::Invalid { what: "link address", reason };
        let (body, sum) =
            bytes.split_last_chunk::<CHECKSUM_BYTES>().ok_or_else(|| invalid("it is too short"))?;
        let (header, lanes) =
            body.split_first_chunk::<HEADER_BYTES>().ok_or_else(|| invalid("it is too short"))?;
        let [m0, m1, m2, m3, v0, v1, l0, l1, rest @ ..] = *header;
        if [m0, m1, m2, m3] != MAGIC {
            return Err(invalid("it does not begin like one"));
        }
        if u16::from_le_bytes([v0, v1]) != VERSION {
            return Err(invalid("this version is unknown"));
        }
        if usize::from(u16::from_le_bytes([l0, l1])) != bytes.len() {
            return Err(invalid("its length differs from what it says"));
        }
        if *sum != checksum(body).to_le_bytes() {
            return Err(invalid("its checksum does not match"));
        }
        let [gid @ .., i0, i1, mtu, reads, c0, c1, c2, c3] = rest;
        let count = u32::from_le_bytes([c0, c1, c2, c3]) as usize;
        let (lanes, odd) = lanes.as_chunks::<LANE_BYTES>();
        if !(1..=LANES_MAX).contains(&count) || lanes.len() != count || !odd.is_empty() {
            return Err(invalid("its number of queue pairs is wrong"));
        }
        if !(1..=5).contains(&mtu) {
            return Err(invalid("its MTU is unknown"));
        }
        let lanes = lanes.iter().map(|&[n0, n1, n2, n3, p0, p1, p2, p3]| LaneAddress {
            number: u32::from_le_bytes([n0, n1, n2, n3]),
            psn: u32::from_le_bytes([p0, p1, p2, p3]),
        });
        let lanes: Vec<_> = lanes.collect();
        if lanes.iter().any(|lane| lane.number >> 24 != 0 || lane.psn >> 24 != 0) {
            return Err(invalid("a number has more than 24 bits"));
        }
        Ok(Self { gid, local_id: u16::from_le_bytes([i0, i1]), mtu, reads, lanes })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn address() -> LinkAddress {
        LinkAddress {
            gid: [7; 16],
            local_id: 0x1234,
            mtu: 3,
            reads: 16,
            lanes: vec![LaneAddress { number: 17, psn: 0x00ab_cdef }; 2],
        }
    }

    #[test]
    fn version_one_is_these_bytes() {
        let mut expected = b"CVLA\x01\0\x34\0".to_vec();
        expected.extend([7; 16]);
        expected.extend([0x34, 0x12, 3, 16, 2, 0, 0, 0]);
        expected.extend([17, 0, 0, 0, 0xef, 0xcd, 0xab, 0, 17, 0, 0, 0, 0xef, 0xcd, 0xab, 0]);
        let sum = checksum(&expected).to_le_bytes();
        expected.extend(sum);
        assert_eq!(address().to_bytes(), expected);
        assert_eq!(LinkAddress::from_bytes(&expected), Ok(address()));
    }

    #[test]
    fn a_wrong_number_with_a_right_checksum_is_refused() {
        let wrong = [
            LinkAddress { mtu: 0, ..address() },
            LinkAddress { mtu: 6, ..address() },
            LinkAddress { lanes: Vec::new(), ..address() },
            LinkAddress { lanes: vec![address().lanes[0]; 9], ..address() },
            LinkAddress { lanes: vec![LaneAddress { number: 1 << 24, psn: 0 }], ..address() },
        ];
        for wrong in wrong {
            LinkAddress::from_bytes(&wrong.to_bytes()).unwrap_err();
        }
    }

    proptest! {
        #[test]
        fn damaged_bytes_are_refused(at in 0_usize..52, bit in 0_u8..8, cut in 0_usize..52) {
            let mut bytes = address().to_bytes();
            prop_assert!(LinkAddress::from_bytes(&bytes[..cut]).is_err());
            bytes[at] ^= 1 << bit;
            prop_assert!(LinkAddress::from_bytes(&bytes).is_err());
        }
    }
}
