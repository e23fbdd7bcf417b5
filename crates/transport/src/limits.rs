//! The limits of the protocol and of an endpoint.

use std::time::Duration;

/// The longest piece that a frame carries. The checksum of a piece is computed while its bytes are
/// in the cache of the core that copied them.
pub(crate) const PIECE_BYTES_MAX: u64 = 256 << 10;
/// Bytes of payload at which a frame ends.
pub(crate) const FRAME_BYTES_MAX: u64 = 8 << 20;
/// Payload of one system call. It stays in a core's cache between its copy and its checksum.
pub(crate) const CHUNK_BYTES: usize = 256 << 10;
/// Pieces of one frame.
pub(crate) const FRAME_PIECES_MAX: usize = 8192;
/// Bytes of a notice.
pub(crate) const NOTICE_BYTES_MAX: usize = 4096;
/// Bytes of the geometry in a hello.
pub(crate) const GEOMETRY_BYTES_MAX: usize = 64 << 10;
/// Bytes of a name in a hello.
pub(crate) const NAME_BYTES_MAX: usize = 256;
/// GPUs whose memory one endpoint may have.
pub(crate) const GPUS_MAX: usize = 16;
/// Regions of one endpoint at a time.
pub(crate) const REGIONS_MAX: usize = 65_536;
/// Frames of one connection that wait for an answer.
pub(crate) const FRAMES_IN_FLIGHT_MAX: usize = 64;
/// Connections that one endpoint has made and still uses.
pub(crate) const CONNECTIONS_MAX: usize = 4096;
/// Streams of one connection.
pub(crate) const STREAMS_MAX: usize = 16;
/// Bytes of payload from which on a frame waits for its turn.
pub(crate) const LARGE_FRAME_BYTES: u64 = 256 << 10;
/// Large frames of one peer that are served at once beside those of others.
pub(crate) const LARGE_FRAMES_MAX: usize = 4;
/// The least bytes of a part of a batch that is divided among streams.
pub(crate) const STRIPE_BYTES_MIN: u64 = 2 << 20;

/// Limits of an endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Connections of peers that may be served at a time. A peer gets one while it and its host
    /// have fewer than are free: one peer alone gets half of them. Default: 1024. Up to 64 more may
    /// be in their handshake; another one ends the handshake that has taken longest.
    pub peers_max: usize,
    /// Time for the handshake of a new connection. Default: 5 s.
    pub handshake_timeout: Duration,
    /// A connection ends when a started frame makes no progress for this time. Default: 10 s.
    pub stall_timeout: Duration,
    /// Notices that wait for [`crate::Endpoint::next_notice`]. A peer may have as many of these
    /// places as are free: one peer alone gets half of them. Beyond that, batches with a notice are
    /// refused with [`crate::Refusal::Busy`]. Default: 65,536.
    pub notices_max: usize,
    /// Heartbeats of the connections that this endpoint makes. Default: none.
    pub heartbeat: Option<Heartbeat>,
}

/// Heartbeats: how soon a peer is noticed that is frozen, or whose host is gone, while no batch
/// waits for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heartbeat {
    /// Pause between an answer and the next question. Default: 2 s.
    pub interval: Duration,
    /// A peer that answers nothing for this time is disconnected. It is longer than a link takes
    /// for the bytes in the buffers of its sockets. Default: 10 s.
    pub limit: Duration,
}

impl Default for Heartbeat {
    fn default() -> Self {
        Self { interval: Duration::from_secs(2), limit: Duration::from_secs(10) }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            peers_max: 1024,
            handshake_timeout: Duration::from_secs(5),
            stall_timeout: Duration::from_secs(10),
            notices_max: 65_536,
            heartbeat: None,
        }
    }
}
