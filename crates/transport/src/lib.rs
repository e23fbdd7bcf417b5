//! Moves bytes between the memory of processes: batches of pieces between registered regions.
//!
//! An [`Endpoint`] registers the [`Region`]s of its process, listens, and connects to peers. A
//! [`Connection`] posts a [`Batch`] of pieces, each from a place in a local region to a place in a
//! region of the peer or back, and returns a [`Ticket`] that waits for its end. `tcp` moves bytes
//! between hosts; `shm` maps the peer's memory and copies. Every wait has a deadline.
#![warn(clippy::disallowed_types)]

mod address;
mod config;
mod connection;
mod endpoint;
mod error;
mod generations;
mod limits;
mod notice;
mod peer;
mod piece;
mod places;
mod proof;
mod question;
mod region;
mod regions;
mod shm;
mod small_reads;
mod state;
mod stream;
mod striped;
mod tls;
mod turns;
mod user_token;

pub mod conformance;
#[cfg(feature = "simulated")]
pub mod simulated {
    //! A network in memory, for simulated worlds.

    pub use crate::stream::{Conditions, Dialled, Network};
}
pub mod verbs;
pub mod wire;

pub use config::{EndpointConfig, GeometryCheck};
pub use connection::{Batch, Completion, Connection, Ticket, TransportKind};
pub use endpoint::{Endpoint, Listener};
pub use error::{Refusal, TransportError};
pub use limits::{Heartbeat, Limits};
pub use notice::Notice;
pub use peer::{EndpointId, Peer, RecordLayer};
pub use piece::{Direction, Piece, Place, RegionId, plan};
pub use question::{
    ANSWER_BLOCKS_MAX, Answer, Answers, AskLimit, BlockBytes, QUESTION_BYTES_MAX, Reply,
};
pub use region::{Access, Region};
pub use tls::{TlsConfig, TlsIdentity};
pub use user_token::user_token;
