//! The hello: who calls, what it speaks, and what it will do.

use crate::WireError;
use crate::fields::{Reader, Writer};

/// Names one client in all its connections. Whoever knows it may join the session, so it is drawn
/// at random and told to the client alone.
pub type SessionId = [u8; 16];

/// What a client does with the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Maps it for reading only; cannot put.
    Read,
    /// Maps it for writing too.
    Write,
    /// Gets no pool: it only asks and orders as an administrator.
    Administer,
}

impl Access {
    const ALL: [Self; 3] = [Self::Read, Self::Write, Self::Administer];
}

/// The first call on every connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// The oldest protocol that the client speaks.
    pub version_min: u16,
    /// The newest.
    pub version_max: u16,
    /// What it will do with the pool.
    pub access: Access,
    /// The session to join with a further connection.
    pub session: Option<SessionId>,
    /// Proves which tenant it is.
    pub token: Option<Vec<u8>>,
    /// What it calls itself in the node's status, such as a program's name.
    pub name: String,
}

impl Hello {
    pub(crate) fn write(&self, into: &mut Writer<'_>) {
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

    pub(crate) fn read(from: &mut Reader<'_>) -> Result<Self, WireError> {
        let (version_min, version_max) = (from.u16("version")?, from.u16("version")?);
        let access = Access::ALL.get(usize::from(from.u8("access")?));
        let access = *access.ok_or(WireError::Field("access"))?;
        let session = if from.flag("session")? { Some(from.array("session")?) } else { None };
        let token = if from.flag("token")? { Some(from.blob("token")?.to_vec()) } else { None };
        let name = from.text("name")?.to_owned();
        Ok(Self { version_min, version_max, access, session, token, name })
    }
}
