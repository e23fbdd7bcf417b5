//! The messages of the handshake.

use super::WireError;
use super::fields::{Fields, write_blob};
use crate::limits::{CONNECTIONS_MAX, GEOMETRY_BYTES_MAX, NAME_BYTES_MAX, REGIONS_MAX};
use crate::piece::RegionId;
use crate::region::Access;

/// The bit of the capabilities of an endpoint that answers questions.
pub const ANSWERS_QUESTIONS: u64 = 1;

/// A client introduces itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// The oldest protocol version that it supports.
    pub version_min: u16,
    /// The newest protocol version that it supports.
    pub version_max: u16,
    /// What it can do beyond the version; unknown bits are ignored.
    pub capabilities: u64,
    /// Its endpoint.
    pub id: [u8; 16],
    /// Random bytes that the server's proof covers.
    pub nonce: [u8; 32],
    /// Its name, for logs and errors.
    pub name: String,
    /// What its regions hold, in the words of the program that uses the transport.
    pub geometry: Vec<u8>,
    /// Number of the connection among those that the client's endpoint made, from 1 on.
    pub number: u64,
    /// Numbers of the earlier ones that it still uses; the server ends the others.
    pub live: Vec<u64>,
}

impl Hello {
    /// The body of the message.
    ///
    /// # Panics
    /// If it names more connections than an endpoint may use.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut into = Vec::new();
        into.extend_from_slice(&self.version_min.to_le_bytes());
        into.extend_from_slice(&self.version_max.to_le_bytes());
        into.extend_from_slice(&self.capabilities.to_le_bytes());
        into.extend_from_slice(&self.id);
        into.extend_from_slice(&self.nonce);
        write_blob(self.name.as_bytes(), &mut into);
        write_blob(&self.geometry, &mut into);
        into.extend_from_slice(&self.number.to_le_bytes());
        let count = u32::try_from(self.live.len()).expect("at most CONNECTIONS_MAX");
        into.extend_from_slice(&count.to_le_bytes());
        for number in &self.live {
            into.extend_from_slice(&number.to_le_bytes());
        }
        into
    }

    /// Reads the body. Fields after the known ones are those of a later version.
    pub fn parse(body: &[u8]) -> Result<Self, WireError> {
        let mut from = Fields(body);
        let mut hello = Self {
            version_min: from.u16("version_min")?,
            version_max: from.u16("version_max")?,
            capabilities: from.u64("capabilities")?,
            id: from.array("id")?,
            nonce: from.array("nonce")?,
            name: text(from.blob(NAME_BYTES_MAX, "name")?, "name")?,
            geometry: from.blob(GEOMETRY_BYTES_MAX, "geometry")?.to_vec(),
            number: from.u64("number")?,
            live: vec![],
        };
        let count = from.u32("live")? as usize;
        if count > CONNECTIONS_MAX {
            return Err(WireError::Field("live"));
        }
        for _ in 0..count {
            hello.live.push(from.u64("live")?);
        }
        Ok(hello)
    }
}

/// A server's answer to a hello.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Challenge {
    /// The version of this connection.
    pub version: u16,
    /// What both sides can do.
    pub capabilities: u64,
    /// The server's endpoint.
    pub id: [u8; 16],
    /// Random bytes that the client's proof covers.
    pub nonce: [u8; 32],
    /// Whether the client must know the token.
    pub needs_token: bool,
}

impl Challenge {
    /// The body of the message.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut into = Vec::new();
        into.extend_from_slice(&self.version.to_le_bytes());
        into.extend_from_slice(&self.capabilities.to_le_bytes());
        into.extend_from_slice(&self.id);
        into.extend_from_slice(&self.nonce);
        into.push(u8::from(self.needs_token));
        into
    }

    /// Reads the body.
    pub fn parse(body: &[u8]) -> Result<Self, WireError> {
        let mut from = Fields(body);
        let challenge = Self {
            version: from.u16("version")?,
            capabilities: from.u64("capabilities")?,
            id: from.array("id")?,
            nonce: from.array("nonce")?,
            needs_token: from.flag("needs_token")?,
        };
        from.end()?;
        Ok(challenge)
    }
}

/// A region that peers may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OfferedRegion {
    /// Its ID at its endpoint.
    pub id: RegionId,
    /// What the peer may do with it.
    pub access: Access,
    /// Whether a process of the same host can map it.
    pub is_mappable: bool,
    /// Its length.
    pub bytes: u64,
}

/// Bytes of one offered region.
const OFFER_BYTES: usize = 16;
const READ: u32 = 1;
const WRITE: u32 = 2;
const MAPPABLE: u32 = 4;

/// The last message of the handshake.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Welcome {
    /// Shows that the server knows the token; zeroes without one.
    pub proof: [u8; 32],
    /// The server's name.
    pub name: String,
    /// What its regions hold.
    pub geometry: Vec<u8>,
    /// Its regions at this moment.
    pub regions: Vec<OfferedRegion>,
}

impl Welcome {
    /// The body of the message.
    ///
    /// # Panics
    /// If there are more regions than an endpoint may have.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut into = Vec::new();
        into.extend_from_slice(&self.proof);
        write_blob(self.name.as_bytes(), &mut into);
        write_blob(&self.geometry, &mut into);
        let count = u32::try_from(self.regions.len()).expect("at most REGIONS_MAX");
        into.extend_from_slice(&count.to_le_bytes());
        for region in &self.regions {
            let mut flags = 0_u32;
            let access = region.access;
            for (flag, is_set) in
                [(READ, access.read), (WRITE, access.write), (MAPPABLE, region.is_mappable)]
            {
                flags |= if is_set { flag } else { 0 };
            }
            into.extend_from_slice(&region.id.0.to_le_bytes());
            into.extend_from_slice(&flags.to_le_bytes());
            into.extend_from_slice(&region.bytes.to_le_bytes());
        }
        into
    }

    /// Reads the body.
    pub fn parse(body: &[u8]) -> Result<Self, WireError> {
        let mut from = Fields(body);
        let proof = from.array("proof")?;
        let name = text(from.blob(NAME_BYTES_MAX, "name")?, "name")?;
        let geometry = from.blob(GEOMETRY_BYTES_MAX, "geometry")?.to_vec();
        let count = from.u32("regions")? as usize;
        // A forged count allocates no memory.
        if count > REGIONS_MAX || from.0.len() != count * OFFER_BYTES {
            return Err(WireError::Field("regions"));
        }
        let mut regions = Vec::with_capacity(count);
        for _ in 0..count {
            let id = RegionId(from.u32("region")?);
            let flags = from.u32("region")?;
            let has = |flag: u32| flags & flag != 0;
            let access = Access { read: has(READ), write: has(WRITE) };
            let bytes = from.u64("region")?;
            regions.push(OfferedRegion { id, access, is_mappable: has(MAPPABLE), bytes });
        }
        Ok(Self { proof, name, geometry, regions })
    }
}

/// A text of the peer. Control characters would garble a terminal that shows it.
pub(super) fn text(bytes: &[u8], field: &'static str) -> Result<String, WireError> {
    let text = std::str::from_utf8(bytes).map_err(|_| WireError::Field(field))?;
    let is_plain = !text.chars().any(char::is_control);
    if is_plain { Ok(text.to_owned()) } else { Err(WireError::Field(field)) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn hello() -> Hello {
        Hello {
            version_min: 1,
            version_max: 3,
            capabilities: 5,
            id: [1; 16],
            nonce: [2; 32],
            name: "prefill".to_owned(),
            geometry: b"layers".to_vec(),
            number: 3,
            live: vec![1, 2],
        }
    }

    fn welcome() -> Welcome {
        let region = OfferedRegion {
            id: RegionId(3),
            access: Access::READ,
            is_mappable: true,
            bytes: 1 << 40,
        };
        let other = OfferedRegion { access: Access::WRITE, is_mappable: false, ..region };
        Welcome {
            proof: [9; 32],
            name: "decode".to_owned(),
            geometry: vec![],
            regions: vec![region, other],
        }
    }

    #[test]
    fn messages_come_back() {
        assert_eq!(Hello::parse(&hello().to_bytes()), Ok(hello()));
        assert_eq!(Welcome::parse(&welcome().to_bytes()), Ok(welcome()));
        let challenge = Challenge {
            version: 1,
            capabilities: 0,
            id: [3; 16],
            nonce: [4; 32],
            needs_token: true,
        };
        assert_eq!(Challenge::parse(&challenge.to_bytes()), Ok(challenge));
    }

    #[test]
    fn each_truncated_message_is_refused() {
        for end in 0..hello().to_bytes().len() {
            assert!(Hello::parse(&hello().to_bytes()[..end]).is_err(), "{end}");
        }
        for end in 0..welcome().to_bytes().len() {
            assert!(Welcome::parse(&welcome().to_bytes()[..end]).is_err(), "{end}");
        }
    }

    #[test]
    fn a_name_with_control_characters_is_refused() {
        let hello = Hello { name: "\u{1b}[2J".to_owned(), ..hello() };
        assert_eq!(Hello::parse(&hello.to_bytes()), Err(WireError::Field("name")));
    }

    proptest! {
        #[test]
        fn noise_does_not_panic(noise in prop::collection::vec(any::<u8>(), 0..300)) {
            drop((Hello::parse(&noise), Challenge::parse(&noise), Welcome::parse(&noise)));
        }
    }
}
