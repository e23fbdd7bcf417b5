//! The ways between two processes of a host that are measured. Another one is another arm here.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use cascade_runtime::{Deadline, SystemClock};
use cascade_transport::{Connection, Endpoint, Listener, TransportError};
use serde::{Deserialize, Serialize};

use crate::MeasureError;

/// A way between two processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Backend {
    /// TCP on loopback.
    Tcp,
    /// The same with TLS.
    Tls,
    /// A Unix socket; regions are mapped and copied.
    Shm,
}

/// Where a process listens.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Addresses {
    pub(crate) tcp: String,
    pub(crate) unix: PathBuf,
}

impl Backend {
    pub(crate) const ALL: [Self; 3] = [Self::Tcp, Self::Shm, Self::Tls];
    /// Those without TLS, which one pair of endpoints has together.
    pub(crate) const PLAIN: [Self; 2] = [Self::Tcp, Self::Shm];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Tls => "tls",
            Self::Shm => "shm",
        }
    }

    /// How often each byte is copied on its way, by construction: TCP's bytes go into the kernel
    /// and out of it, those of TLS in the process are also encrypted into a buffer and decrypted
    /// in one; mapped memory is copied once, by the caller.
    pub(crate) fn copies(self) -> u64 {
        match self {
            Self::Tls => 4,
            Self::Tcp => 2,
            Self::Shm => 1,
        }
    }

    /// Connects to the other process.
    pub(crate) fn connect(
        self,
        endpoint: &Endpoint,
        to: &Addresses,
    ) -> Result<Arc<dyn Connection>, TransportError> {
        match self {
            Self::Tcp | Self::Tls => endpoint.connect_tcp(&*to.tcp, soon()),
            Self::Shm => endpoint.connect_unix(&to.unix, soon()),
        }
    }
}

/// Listens for all backends that an endpoint has.
pub(crate) fn listen(
    endpoint: &Endpoint,
    unix: PathBuf,
) -> Result<(Vec<Listener>, Addresses), MeasureError> {
    let failed = |error| MeasureError::other("listen for a connection", error);
    let tcp = endpoint.listen_tcp(([127, 0, 0, 1], 0).into()).map_err(failed)?;
    let address = tcp.tcp_address().expect("it listens on TCP").to_string();
    let listeners = vec![tcp, endpoint.listen_unix(&unix).map_err(failed)?];
    Ok((listeners, Addresses { tcp: address, unix }))
}

/// A deadline for what is expected to succeed.
pub(crate) fn soon() -> Deadline {
    Deadline::after(&SystemClock, Duration::from_secs(120))
}
