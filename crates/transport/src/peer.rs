//! A peer, as it introduced itself.

use std::fmt;
use std::sync::Arc;

use crate::wire::OfferedRegion;

/// Identifies an endpoint: random, new for each.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EndpointId(pub [u8; 16]);

impl fmt::Debug for EndpointId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for EndpointId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// What encrypts and decrypts the bytes of a connection with TLS.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecordLayer {
    /// The kernel.
    Kernel,
    /// This process.
    Userspace,
}

/// A peer, as it introduced itself.
#[derive(Debug, Clone)]
pub struct Peer {
    /// Its endpoint.
    pub id: EndpointId,
    /// Its name.
    pub name: String,
    /// Its address.
    pub address: String,
    /// What its regions hold.
    pub geometry: Arc<[u8]>,
    /// Whether it answers questions.
    pub answers_questions: bool,
    /// What encrypts the bytes of its connection; `None` without TLS.
    pub tls: Option<RecordLayer>,
    /// Its regions when the connection was made.
    pub regions: Arc<Vec<OfferedRegion>>,
}
