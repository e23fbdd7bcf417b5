//! The vocabulary of Cascade: keys, digests, manifests, geometry, sizes and clocks. No I/O.

mod chain;
mod checksum;
mod clock;
mod digest;
mod key;
mod namespace;

pub use chain::{ChainTail, chain_keys};
pub use checksum::{Checksum, checksum};
pub use clock::{Clock, Deadline, ManualClock, SystemClock};
pub use digest::{Digest, DigestAlgorithm, DigestMode};
pub use key::{BlockKey, KeyParseError};
pub use namespace::{Manifest, Namespace, NamespaceId, TenantSecret};
