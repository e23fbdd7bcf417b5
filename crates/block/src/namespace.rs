//! Namespaces: sets of reusable blocks, derived from a manifest and a tenant's secret.

use std::fmt;

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest as _, Sha256};

use crate::{BlockKey, Manifest};

/// A secret that separates one tenant's keys from another's. Never printed; stored only as a hash.
#[derive(Clone)]
pub struct TenantSecret([u8; 32]);

impl TenantSecret {
    /// Hashes a secret; empty for a store with one tenant.
    pub fn new(bytes: impl AsRef<[u8]>) -> Self {
        // HMAC pads short keys with zeros and hashes long ones, so different secrets could be
        // equivalent. Hashing them first prevents that.
        let hash = Sha256::new().chain_update(b"cascade secret 1\0").chain_update(bytes);
        Self(hash.finalize().into())
    }
}

impl fmt::Debug for TenantSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TenantSecret(..)")
    }
}

/// A 16-byte identifier of a namespace in records and file names. Reveals no secret.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct NamespaceId([u8; 16]);

impl NamespaceId {
    /// Wraps the bytes of a stored id.
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// The 16 bytes.
    pub const fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

impl fmt::Display for NamespaceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for NamespaceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NamespaceId({self})")
    }
}

/// A set of blocks that may be reused for each other, and the root of its chains.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Namespace {
    root: BlockKey,
    id: NamespaceId,
    manifest: Manifest,
}

impl Namespace {
    /// Derives the root: HMAC-SHA-256 of the manifest's canonical bytes under the tenant's secret.
    #[expect(clippy::missing_panics_doc, reason = "HMAC takes a key of any length")]
    pub fn new(manifest: Manifest, secret: &TenantSecret) -> Self {
        let mut mac = Hmac::<Sha256>::new_from_slice(&secret.0).expect("HMAC takes any key");
        mac.update(b"cascade namespace 1\0");
        mac.update(&manifest.canonical_bytes());
        Self::from_root(BlockKey::from_bytes(mac.finalize().into_bytes().into()), manifest)
    }

    /// A namespace with a root that [`Namespace::new`] derived in another process.
    pub fn from_root(root: BlockKey, manifest: Manifest) -> Self {
        let hash: [u8; 32] = Sha256::new()
            .chain_update(b"cascade namespace id 1\0")
            .chain_update(root.as_bytes())
            .finalize()
            .into();
        let mut id = [0; 16];
        id.copy_from_slice(&hash[..16]);
        Self { root, id: NamespaceId(id), manifest }
    }

    /// The namespace of text keys: ids that callers choose, of contents without a model. All
    /// tenants have the same one; their stores are separate.
    pub fn of_text() -> Self {
        Self::new(Manifest::new().with("ids", "text"), &TenantSecret::new(""))
    }

    /// The key that every chain of this namespace starts from.
    pub fn root(&self) -> BlockKey {
        self.root
    }

    /// The public identifier of this namespace.
    pub fn id(&self) -> NamespaceId {
        self.id
    }

    /// The manifest from which it was derived.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The key for a caller's own id, such as `"sys_prompt_v1"`, in this namespace.
    pub fn key_of_id(&self, id: &[u8]) -> BlockKey {
        key_of_id(self.root, id)
    }
}

/// The key of a text that a caller chooses as the id of a block. No chain has it, and no other id.
pub fn text_key(text: &str) -> BlockKey {
    Namespace::of_text().key_of_id(text.as_bytes())
}

/// The key for a caller's own id below a namespace's root.
///
/// The length precedes the id to prevent length extension: one key does not reveal that of a longer
/// id.
pub fn key_of_id(root: BlockKey, id: &[u8]) -> BlockKey {
    let hash = Sha256::new()
        .chain_update(b"cascade id 1\0")
        .chain_update((id.len() as u64).to_le_bytes())
        .chain_update(root.as_bytes())
        .chain_update(id)
        .finalize();
    BlockKey::from_bytes(hash.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_that_hmac_pads_to_equal_keys_differ() {
        let roots = [b"".as_slice(), b"a", b"a\0", &[7; 64], &[7; 65], &Sha256::digest([7; 65])]
            .map(|secret| Namespace::new(Manifest::new(), &TenantSecret::new(secret)).root());
        for (at, root) in roots.iter().enumerate() {
            assert!(!roots[..at].contains(root), "secret {at} is equivalent to an earlier one");
        }
    }

    #[test]
    fn a_secret_is_not_printed() {
        assert_eq!(format!("{:?}", TenantSecret::new("hunter2")), "TenantSecret(..)");
    }
}
