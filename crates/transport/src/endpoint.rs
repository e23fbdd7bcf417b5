//! An endpoint: the regions, notices and connections of one process.

use std::fmt;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use cascade_block::with_causes;
use cascade_runtime::{Deadline, SystemClock, fill_random};

use crate::TransportError;
use crate::address::PeerAddress;
use crate::config::EndpointConfig;
use crate::connection::Connection;
use crate::limits::{GEOMETRY_BYTES_MAX, NAME_BYTES_MAX, STREAMS_MAX};
use crate::notice::{Notice, Notices};
use crate::peer::EndpointId;
use crate::piece::RegionId;
use crate::places::Places;
use crate::region::Region;
use crate::regions::Regions;
use crate::shm::ShmConnection;
use crate::small_reads::{Sizes, SmallReads};
use crate::state::EndpointState;
use crate::stream::{
    Accepting, ClientTls, Open, Socket, SocketFile, StreamConnection, listen_tcp, listen_unix,
};
#[cfg(feature = "simulated")]
use crate::stream::{Dialled, Network};
use crate::striped::{Division, StripedConnection};
use crate::tls::Tls;
use crate::user_token::TOKEN_BYTES_MIN;
use crate::verbs::{Device, NotOpened, Rdma, RdmaConnection};

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
            ("the number of streams of a connection", config.streams, STREAMS_MAX),
        ];
        for (what, value, limit) in limits {
            if value > limit {
                return Err(TransportError::TooLarge { what, value, limit });
            }
        }
        if config.streams == 0 {
            let text = "a connection has at least one stream".to_owned();
            return Err(TransportError::Unavailable(text));
        }
        if config.token.as_ref().is_some_and(|token| token.len() < TOKEN_BYTES_MIN) {
            let text = format!("a token has at least {TOKEN_BYTES_MIN} bytes");
            return Err(TransportError::Unavailable(text));
        }
        let mut id = [0; 16];
        fill_random(&mut id)
            .map_err(|error| TransportError::Unavailable(format!("no random bytes: {error}")))?;
        let tls = config.tls.clone().map(Tls::new).transpose()?.map(Arc::new);
        let notices = Notices::new(config.limits.notices_max);
        let regions = Regions::default();
        let places = Places::new(config.limits.peers_max);
        let (id, rdma) = (EndpointId(id), OnceLock::new());
        let (made, served, turns) = Default::default();
        let state =
            EndpointState { id, config, tls, regions, notices, made, served, places, turns, rdma };
        Ok(Self(Arc::new(state)))
    }

    /// Its ID.
    pub fn id(&self) -> EndpointId {
        self.0.id
    }

    /// Makes a region known to batches of this process, and to peers as far as its access says.
    /// Peers that are connected already see it too.
    ///
    /// # Errors
    /// If there are too many regions. Of memory of a GPU, if no RDMA device is used, or it cannot
    /// register that memory.
    pub fn register(&self, region: Region) -> Result<RegionId, TransportError> {
        if region.dmabuf().is_none() {
            return self.0.regions.register(region);
        }
        let no_device = "the region is memory of a GPU, which only RDMA reaches: let the endpoint \
                         use an RDMA device first";
        let rdma = self.0.rdma.get();
        let rdma = rdma.ok_or_else(|| TransportError::Unavailable(no_device.to_owned()))?;
        let id = self.0.regions.register(region)?;
        let region = self.0.regions.snapshot().shared(id);
        let registered = region.map(|region| rdma.register(id, region));
        if let Ok(Err(error)) = registered {
            // No peer knows the region yet, so no batch uses it.
            drop(self.unregister(id, Deadline::at(cascade_runtime::now())));
            let text = format!("memory of a GPU cannot be registered: {}", with_causes(&error));
            return Err(TransportError::Unavailable(text));
        }
        Ok(id)
    }

    /// Removes a region, waits until all batches in flight have ended, and frees its memory. The
    /// calling thread has to wait for its own batches first.
    ///
    /// # Errors
    /// [`TransportError::InUse`] if a batch still uses it at the deadline. New batches cannot, and
    /// its memory is freed when the last one ends.
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
    /// If the address is taken, or if other hosts can reach it and neither a token nor a client
    /// certificate is required of them. On loopback without both, if there is no token of this
    /// user and none can be made.
    pub fn listen_tcp(&self, address: SocketAddr) -> Result<Listener, TransportError> {
        let refused = |reason: &str| {
            let (address, reason) = (address.to_string(), reason.to_owned());
            Err(TransportError::Listen { address, reason })
        };
        let tls = self.0.config.tls.as_ref();
        if tls.is_some_and(|tls| tls.identity.is_none()) {
            return refused("TLS needs a certificate and its key to listen");
        }
        let is_loopback = address.ip().to_canonical().is_loopback();
        let token = match self.0.token_of_server(is_loopback.then_some(address.port())) {
            Ok(token) => token,
            Err(reason) => return refused(&reason),
        };
        if token.is_none() && !self.0.asks_for_certificates() {
            return refused(
                "other hosts can reach this address: configure a token or client certificates, \
                 or listen on 127.0.0.1",
            );
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
        let (accepting, file) = listen_unix(&self.0, path)?;
        Ok(Listener { accepting, tcp: None, unix: Some(file) })
    }

    /// Connects to the TCP port of a peer: `HOST:PORT`.
    ///
    /// # Errors
    /// [`TransportError::Connect`] if no address of the host can be reached, and
    /// [`TransportError::Deadline`] if its name is not found or the handshake does not end in time.
    pub fn connect_tcp(
        &self,
        address: impl fmt::Display,
        deadline: Deadline,
    ) -> Result<Arc<dyn Connection>, TransportError> {
        let address = PeerAddress::look_up(address.to_string(), deadline)?;
        let first = self.open_tcp(&address, deadline)?;
        self.with_more_streams(first, &address, deadline)
    }

    fn open_tcp(
        &self,
        address: &PeerAddress,
        deadline: Deadline,
    ) -> Result<StreamConnection, TransportError> {
        let tls = self.tls_to(&address.text)?;
        let mut last = None;
        let count = u32::try_from(address.sockets.len()).unwrap_or(u32::MAX);
        for (socket, untried) in address.sockets.iter().zip((1..=count).rev()) {
            // An address that does not answer leaves time for those after it.
            let share = deadline.remaining(&SystemClock) / untried;
            let share = Deadline::after(&SystemClock, share);
            match Socket::connect_tcp(*socket, tls.clone(), share) {
                Ok(socket) => return StreamConnection::open(socket, &self.0, deadline),
                Err(error) => last = Some(error),
            }
        }
        Err(last.expect("a name has an address"))
    }

    /// The connection, with as many streams to the same address as are configured, and one for
    /// small reads when it is needed.
    fn with_more_streams(
        &self,
        first: StreamConnection,
        address: &PeerAddress,
        deadline: Deadline,
    ) -> Result<Arc<dyn Connection>, TransportError> {
        let (endpoint, address) = (self.clone(), address.clone());
        let open = Arc::new(move |deadline| endpoint.open_tcp(&address, deadline));
        let connection = self.divided(first, Division::default(), open.clone(), deadline)?;
        Ok(Arc::new(SmallReads::beside(connection, Sizes::default(), open)))
    }

    /// As `connect_tcp`, without the stream of small reads.
    #[cfg(test)]
    pub(crate) fn connect_divided(
        &self,
        address: SocketAddr,
        division: Division,
        deadline: Deadline,
    ) -> Result<StripedConnection, TransportError> {
        let address = PeerAddress::look_up(address.to_string(), deadline)?;
        let endpoint = self.clone();
        let open = Arc::new(move |deadline| endpoint.open_tcp(&address, deadline));
        let streams =
            (0..self.0.config.streams).map(|_| open(deadline)).collect::<Result<_, _>>()?;
        StripedConnection::new(streams, division, open)
    }

    /// The connection, with as many streams as are configured.
    fn divided(
        &self,
        first: StreamConnection,
        division: Division,
        open: Arc<Open>,
        deadline: Deadline,
    ) -> Result<Arc<dyn Connection>, TransportError> {
        if self.0.config.streams == 1 {
            return Ok(Arc::new(first));
        }
        let mut streams = vec![first];
        while streams.len() < self.0.config.streams {
            streams.push(open(deadline)?);
        }
        Ok(Arc::new(StripedConnection::new(streams, division, open)?))
    }

    /// TLS for a connection to `HOST:PORT`.
    fn tls_to(&self, address: &str) -> Result<Option<ClientTls>, TransportError> {
        let Some(tls) = &self.0.tls else {
            return Ok(None);
        };
        let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
        Ok(Some((Arc::clone(tls), tls.server_name(host)?)))
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
    /// Regions that the peer registers later are reached over TCP. TLS protects the handshake and
    /// what goes over TCP, not the bytes that the device moves.
    ///
    /// # Errors
    /// [`TransportError::Unavailable`] if one of both cannot use RDMA; it says which and why.
    pub fn connect_rdma(
        &self,
        address: impl fmt::Display,
        deadline: Deadline,
    ) -> Result<Arc<dyn Connection>, TransportError> {
        let address = PeerAddress::look_up(address.to_string(), deadline)?;
        match self.open_rdma(&address, deadline)? {
            Ok(connection) => Ok(connection),
            Err(not_opened) => Err(not_opened.error),
        }
    }

    /// As [`Self::connect_rdma`]; where RDMA cannot be used, as [`Self::connect_tcp`], with the
    /// reason.
    pub fn connect_rdma_or_tcp(
        &self,
        address: impl fmt::Display,
        deadline: Deadline,
    ) -> Result<(Arc<dyn Connection>, Option<String>), TransportError> {
        let address = PeerAddress::look_up(address.to_string(), deadline)?;
        match self.open_rdma(&address, deadline)? {
            Ok(connection) => Ok((connection, None)),
            Err(not_opened) => match *not_opened {
                NotOpened { error: TransportError::Unavailable(reason), stream } => {
                    let connection = self.with_more_streams(stream, &address, deadline)?;
                    Ok((connection, Some(reason)))
                }
                NotOpened { error, .. } => Err(error),
            },
        }
    }

    fn open_rdma(
        &self,
        address: &PeerAddress,
        deadline: Deadline,
    ) -> Result<Result<Arc<dyn Connection>, Box<NotOpened>>, TransportError> {
        let stream = self.open_tcp(address, deadline)?;
        let Some(rdma) = self.0.rdma.get() else {
            let error = TransportError::Unavailable("this endpoint uses no RDMA device".to_owned());
            return Ok(Err(Box::new(NotOpened { error, stream })));
        };
        let opened = RdmaConnection::open(stream, rdma, deadline);
        Ok(opened.map(|connection| Arc::new(connection) as Arc<dyn Connection>))
    }

    /// Connects to the Unix socket of a peer on this host. Regions that the peer allocated as
    /// shared memory are mapped, others are copied through the socket. Without a token, the peer
    /// must be a process of this user or of root.
    pub fn connect_unix(
        &self,
        path: &Path,
        deadline: Deadline,
    ) -> Result<Arc<dyn Connection>, TransportError> {
        // A peer that proves that it knows the token may run as any user.
        let is_any_user = self.0.config.token.is_some();
        let socket = Socket::connect_unix(path, is_any_user, deadline)?;
        let stream = StreamConnection::open(socket, &self.0, deadline)?;
        Ok(Arc::new(ShmConnection::new(stream)))
    }

    /// Listens as a host of a simulated network.
    ///
    /// # Errors
    /// If the host has a listener, or no thread can be started.
    #[cfg(feature = "simulated")]
    pub fn listen_simulated(
        &self,
        network: &Network,
        host: &str,
    ) -> Result<Listener, TransportError> {
        let accepting = network.listen(&self.0, host)?;
        Ok(Listener { accepting, tcp: None, unix: None })
    }

    /// Makes the handshake over a connection of a simulated network. `dial` makes another one: for
    /// more streams, among which batches of 2 KiB or more are divided, and for small reads, which
    /// have at most 512 bytes there.
    #[cfg(feature = "simulated")]
    pub fn connect_simulated(
        &self,
        dialled: Dialled,
        dial: impl Fn(Deadline) -> Result<Dialled, TransportError> + Send + Sync + 'static,
        deadline: Deadline,
    ) -> Result<Arc<dyn Connection>, TransportError> {
        let first = StreamConnection::open(dialled.into_socket(), &self.0, deadline)?;
        let state = Arc::clone(&self.0);
        let open = Arc::new(move |deadline| {
            StreamConnection::open(dial(deadline)?.into_socket(), &state, deadline)
        });
        let division = Division { part_bytes_min: 1024, ..Division::default() };
        let connection = self.divided(first, division, open.clone(), deadline)?;
        let sizes = Sizes { small_max: 512, under_way_min: 2048, ..Sizes::default() };
        Ok(Arc::new(SmallReads::beside(connection, sizes, open)))
    }
}

/// Accepts peers until it is dropped, which ends their connections too.
#[derive(Debug)]
pub struct Listener {
    accepting: Accepting,
    tcp: Option<SocketAddr>,
    unix: Option<SocketFile>,
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
        if let Some(file) = &self.unix {
            file.remove();
        }
    }
}
