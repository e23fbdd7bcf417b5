//! What an endpoint says of itself, and whom it admits.

use std::fmt;
use std::sync::Arc;

use crate::limits::Limits;

/// Checks the geometry of a peer; an error is the reason of the refusal.
pub type GeometryCheck = dyn Fn(&[u8]) -> Result<(), String> + Send + Sync;

/// What an endpoint says of itself, and whom it admits.
#[derive(Clone)]
pub struct EndpointConfig {
    /// Its name in the errors of its peers.
    pub name: String,
    /// What its regions hold, in the words of the program; at most 64 KiB. Peers check it.
    pub geometry: Vec<u8>,
    /// Checks the geometry of each peer.
    pub accepts: Arc<GeometryCheck>,
    /// Both sides must know it, if one has it. At least 16 bytes. It is not sent, and it does not
    /// protect the bytes that are moved from somebody who can read or change the network.
    pub token: Option<Vec<u8>>,
    /// Limits.
    pub limits: Limits,
}

impl Default for EndpointConfig {
    fn default() -> Self {
        Self {
            name: "cascade".to_owned(),
            geometry: vec![],
            accepts: Arc::new(|_| Ok(())),
            token: None,
            limits: Limits::default(),
        }
    }
}

impl fmt::Debug for EndpointConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EndpointConfig")
            .field("name", &self.name)
            .field("has_token", &self.token.is_some())
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}
