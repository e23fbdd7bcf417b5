//! What an endpoint says of itself, and whom it admits.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use crate::limits::Limits;
use crate::question::Answers;
use crate::tls::TlsConfig;
use crate::user_token::default_path;

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
    /// The file of this user's token, which both sides of a TCP connection over loopback must know
    /// if neither `token` nor a certificate says who they are: other users of the host can connect
    /// to such a port too. It is made when it is first needed. Default: `cascade-transfer-token`
    /// beside the default socket of a node.
    pub user_token: PathBuf,
    /// Streams of each TCP connection that this endpoint makes, 1 to 16. More than one help where
    /// the network is faster than one processor; each is a peer of the other side's limit.
    pub streams: usize,
    /// Answers the questions of peers. `None`: they are refused.
    pub answers: Option<Arc<dyn Answers>>,
    /// TLS of all TCP connections. Both sides have it, or none. Unix sockets do without.
    pub tls: Option<TlsConfig>,
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
            user_token: default_path(),
            streams: 1,
            answers: None,
            tls: None,
            limits: Limits::default(),
        }
    }
}

impl fmt::Debug for EndpointConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EndpointConfig")
            .field("name", &self.name)
            .field("has_token", &self.token.is_some())
            .field("user_token", &self.user_token)
            .field("streams", &self.streams)
            .field("has_answers", &self.answers.is_some())
            .field("tls", &self.tls)
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}
