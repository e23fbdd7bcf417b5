//! Basic types of Cascade: keys, digests, manifests, model geometry, sizes and durations.
//! No I/O.

mod causes;
mod chain;
mod checksum;
mod digest;
mod geometry;
mod key;
pub mod manifest;
mod namespace;
mod seed;
mod size;
mod time_span;

pub use causes::with_causes;
pub use chain::{ChainTail, chain_keys, extend_chain_keys};
pub use checksum::{Checksum, checksum};
pub use digest::{Digest, DigestAlgorithm, DigestMode};
pub use geometry::{Geometry, KvShape, UnknownModel};
pub use key::{BlockKey, KeyParseError};
pub use manifest::{Manifest, ManifestDifference, WeightsFingerprint};
pub use namespace::{Namespace, NamespaceId, TenantSecret, key_of_id, text_key};
pub use seed::FingerprintSeed;
pub use size::{ByteSize, ByteSizeError};
pub use time_span::{TimeSpan, TimeSpanError};
