//! The hello: the first call of a connection, with the client's identity, versions and access.

use crate::WireError;
use crate::fields::{FieldReader, FieldWriter};

/// Identifies a client on all its connections. Any client that knows it may join the session, so it
/// is random and sent only to its client.
pub type SessionId = [u8; 16];

/// A client's access to the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Maps the pool read-only; cannot put.
    Read,
    /// Maps the pool for reading and writing.
    Write,
    /// Gets no pool: only administrative requests.
    Administer,
}

impl Access {
    /// The place of an access in this list is its code in the message, as in `write`.
    const ALL: [Self; 3] = [Self::Read, Self::Write, Self::Administer];
}

/// The first call on every connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// The oldest protocol version that the client supports.
    pub version_min: u16,
    /// The newest protocol version that the client supports.
    pub version_max: u16,
    /// Access to the pool.
    pub access: Access,
    /// The session to join with a further connection.
    pub session: Option<SessionId>,
    /// Authenticates the tenant.
    pub token: Option<Vec<u8>>,
    /// The client's name in the node's status, such as a program's name.
    pub name: String,
}

impl Hello {
    pub(crate) fn write(&self, into: &mut FieldWriter<'_>) {
        into.u16(self.version_min);
        into.u16(self.version_max);
        into.u8(self.access as u8);
        into.u8(u8::from(self.session.is_some()));
        if let Some(session) = &self.session {
            into.bytes(session);
        }
        into.u8(u8::from(self.token.is_some()));
        if let Some(token) = &self.token {
            into.blob(token);
        }
        into.text(&self.name);
    }

    pub(crate) fn read(from: &mut FieldReader<'_>) -> Result<Self, WireError> {
        let (version_min, version_max) = (from.u16("version")?, from.u16("version")?);
        let access = Access::ALL.get(usize::from(from.u8("access")?));
        let access = *access.ok_or(WireError::Field("access"))?;
        let session = if from.flag("session")? { Some(from.array("session")?) } else { None };
        let token = if from.flag("token")? { Some(from.blob("token")?.to_vec()) } else { None };
        let name = from.text("name")?.to_owned();
        Ok(Self { version_min, version_max, access, session, token, name })
    }
}
