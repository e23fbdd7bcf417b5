//! An endpoint: the regions, notices and connections of one process.

use std::fmt;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use cascade_runtime::{Deadline, fill_random};

use crate::TransportError;
use crate::config::EndpointConfig;
use crate::connection::Connection;
use crate::limits::{GEOMETRY_BYTES_MAX, NAME_BYTES_MAX};
use crate::notice::{Notice, Notices};
use crate::peer::EndpointId;
use crate::piece::RegionId;
use crate::region::Region;
use crate::regions::Regions;
use crate::shm::ShmConnection;
use crate::state::EndpointState;
use crate::stream::{Accepting, Socket, StreamConnection, listen_tcp, listen_unix};
use crate::verbs::{Device, Rdma, RdmaConnection};

/// The shortest token: a shorter one could be guessed.
const TOKEN_BYTES_MIN: usize = 16;

/// One process's side of all its connections.
#[derive(Debug, Clone)]
pub struct Endpoint(Arc<EndpointState>);

impl Endpoint {
    /// Makes an endpoint without regions.
    ///
    /// # Errors
    /// If a value of the configuration is beyond its limit.
    pub fn new(config: EndpointConfig) -> Result<Self, TransportError> {
        let limits = [
            ("the geometry of an endpoint", config.geometry.len(), GEOMETRY_BYTES_MAX),
            ("the name of an endpoint", config.name.len(), NAME_BYTES_MAX),
        ];
        for (what, value, limit) in limits {
            if value > limit {
                return Err(TransportError::TooLarge { what, value, limit });
            }
        }
        if config.token.as_ref().is_some_and(|token| token.len() < TOKEN_BYTES_MIN) {
            let text = format!("a token has at least {TOKEN_BYTES_MIN} bytes");
            return Err(TransportError::Unavailable(text));
        }
        let mut id = [0; 16];
        fill_random(&mut id)
            .map_err(|error| TransportError::Unavailable(format!("no random bytes: {error}")))?;
        let notices = Notices::new(config.limits.notices_max);
        let regions = Regions::default();
        let (id, rdma) = (EndpointId(id), OnceLock::new());
        Ok(Self(Arc::new(EndpointState { id, config, regions, notices, rdma })))
    }

    /// Its ID.
    pub fn id(&self) -> EndpointId {
        self.0.id
    }

    /// Makes a region known to batches of this process, and to peers as far as its access says.
    /// Peers that are connected already see it too.
    pub fn register(&self, region: Region) -> Result<RegionId, TransportError> {
        self.0.regions.register(region)
    }

    /// Removes a region and waits until no batch uses it. Its memory is then given back.
    ///
    /// # Errors
    /// [`TransportError::InUse`] if a batch still uses it at the deadline. New batches cannot, and
    /// its memory is given back when the last one ends.
    pub fn unregister(&self, id: RegionId, deadline: Deadline) -> Result<(), TransportError> {
        // A device that keeps a region registered holds it.
        let release = || self.0.rdma.get().map_or((), |rdma| rdma.forget(id));
        self.0.regions.unregister(id, deadline, release)
    }

    /// Copies bytes into a registered region.
    pub fn fill(&self, id: RegionId, offset: u64, bytes: &[u8]) -> Result<(), TransportError> {
        let snapshot = self.0.regions.snapshot();
        let filled = snapshot.region(id).and_then(|region| region.fill(offset, bytes));
        filled.map_err(|refusal| TransportError::Local { piece: 0, region: id, refusal })
    }

    /// Copies bytes out of a registered region.
    pub fn fetch(&self, id: RegionId, offset: u64, into: &mut [u8]) -> Result<(), TransportError> {
        let snapshot = self.0.regions.snapshot();
        let fetched = snapshot.region(id).and_then(|region| region.fetch(offset, into));
        fetched.map_err(|refusal| TransportError::Local { piece: 0, region: id, refusal })
    }

    /// The oldest notice of a peer, unless none arrives by the deadline.
    pub fn next_notice(&self, deadline: Deadline) -> Option<Notice> {
        self.0.notices.next(deadline)
    }

    /// Listens on a TCP address; port 0 takes a free one.
    ///
    /// # Errors
    /// If the address is taken, or is reachable from other hosts and there is no token.
    pub fn listen_tcp(&self, address: SocketAddr) -> Result<Listener, TransportError> {
        if !address.ip().is_loopback() && self.0.config.token.is_none() {
            return Err(TransportError::Listen {
                address: address.to_string(),
                reason: "other hosts can reach this address: configure a token, or listen on \
                         127.0.0.1"
                    .to_owned(),
            });
        }
        let (accepting, address) = listen_tcp(&self.0, address)?;
        Ok(Listener { accepting, tcp: Some(address), unix: None })
    }

    /// Listens on a Unix socket, which only this user can connect to. Replaces a socket that a
    /// killed process left.
    ///
    /// # Errors
    /// If another process listens there, or the file cannot be made.
    pub fn listen_unix(&self, path: &Path) -> Result<Listener, TransportError> {
        let accepting = listen_unix(&self.0, path)?;
        Ok(Listener { accepting, tcp: None, unix: Some(path.to_owned()) })
    }

    /// Connects to the TCP port of a peer: `HOST:PORT`.
    pub fn connect_tcp(
        &self,
        address: impl ToSocketAddrs + fmt::Display,
        deadline: Deadline,
    ) -> Result<Arc<dyn Connection>, TransportError> {
        let name = address.to_string();
        let refused = |source| TransportError::Connect { peer: name.clone(), source };
        let addresses = address.to_socket_addrs().map_err(|error| refused(Arc::new(error)))?;
        let none = || std::io::Error::other("the name has no address");
        let mut last = refused(Arc::new(none()));
        for address in addresses {
            match Socket::connect_tcp(address, deadline) {
                Ok(socket) => {
                    let connection = StreamConnection::open(socket, &self.0, deadline)?;
                    return Ok(Arc::new(connection));
                }
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// Lets this endpoint use an RDMA device: for [`Self::connect_rdma`], and for peers that call
    /// that. Its regions are registered with the device when they are first used.
    ///
    /// # Errors
    /// If it uses one already.
    pub fn use_device(&self, device: Arc<Device>) -> Result<(), TransportError> {
        let used = || TransportError::Unavailable("this endpoint has an RDMA device".to_owned());
        self.0.rdma.set(Arc::new(Rdma::new(device))).map_err(|_| used())
    }

    /// Connects to the TCP port of a peer, and moves bytes by RDMA. Both endpoints use a device.
    /// Regions that the peer registers later are reached over TCP.
    pub fn connect_rdma(
        &self,
        address: SocketAddr,
        deadline: Deadline,
    ) -> Result<Arc<dyn Connection>, TransportError> {
        let none = || TransportError::Unavailable("this endpoint uses no RDMA device".to_owned());
        let rdma = self.0.rdma.get().ok_or_else(none)?;
        let socket = Socket::connect_tcp(address, deadline)?;
        let stream = StreamConnection::open(socket, &self.0, deadline)?;
        Ok(Arc::new(RdmaConnection::open(stream, rdma, deadline)?))
    }

    /// Connects to the Unix socket of a peer on this host. Regions that the peer allocated as
    /// shared memory are mapped, others are copied through the socket.
    pub fn connect_unix(
        &self,
        path: &Path,
        deadline: Deadline,
    ) -> Result<Arc<dyn Connection>, TransportError> {
        let stream =
            StreamConnection::open(Socket::connect_unix(path, deadline)?, &self.0, deadline)?;
        Ok(Arc::new(ShmConnection::new(stream)))
    }
}

/// Accepts peers until it is dropped, which ends their connections too.
#[derive(Debug)]
pub struct Listener {
    accepting: Accepting,
    tcp: Option<SocketAddr>,
    unix: Option<PathBuf>,
}

impl Listener {
    /// The address of a TCP port.
    pub fn tcp_address(&self) -> Option<SocketAddr> {
        self.tcp
    }

    /// Ends all connections that were accepted, and accepts no more.
    pub fn stop(&self) {
        self.accepting.stop();
    }

    /// Peers that are connected now.
    pub fn peer_count(&self) -> usize {
        self.accepting.peer_count()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.accepting.stop();
        if let Some(path) = &self.unix {
            // A file that somebody removed is gone as it should be.
            drop(std::fs::remove_file(path));
        }
    }
}
