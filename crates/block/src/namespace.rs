//! Namespaces: which blocks may be reused for each other, from a manifest and a tenant's secret.

use std::collections::BTreeMap;
use std::fmt;

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest as _, Sha256};

use crate::BlockKey;

/// All that must match for one engine's KV to be right in another: the compatibility manifest.
///
/// Fields are names and values in a fixed order of names, so that two writers with the same facts
/// produce the same bytes. A path is never a fact: name weights by their fingerprint.
#[derive(Debug, Clone, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
pub struct Manifest {
    fields: BTreeMap<String, String>,
}

impl Manifest {
    /// An empty manifest.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds or replaces a field.
    #[must_use]
    pub fn with(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.fields.insert(name.into(), value.into());
        self
    }

    /// The fields in the order in which they are hashed.
    pub fn fields(&self) -> impl Iterator<Item = (&str, &str)> {
        self.fields.iter().map(|(name, value)| (name.as_str(), value.as_str()))
    }

    /// The bytes that are hashed: per field, length and bytes of name, length and bytes of value.
    pub fn canonical_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for text in self.fields().flat_map(|(name, value)| [name, value]) {
            bytes.extend_from_slice(&(text.len() as u64).to_le_bytes());
            bytes.extend_from_slice(text.as_bytes());
        }
        bytes
    }
}

/// What separates one tenant's keys from another's. Never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct TenantSecret(Vec<u8>);

impl TenantSecret {
    /// A secret of the caller's; empty for a store with one tenant.
    pub fn new(bytes: impl Into<Vec<u8>>) -> Self {
        Self(bytes.into())
    }
}

impl fmt::Debug for TenantSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TenantSecret(..)")
    }
}

/// Sixteen bytes that name a namespace in records and file names. They reveal no secret.
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

/// One set of blocks that may be reused for each other; the root of every chain in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Namespace {
    root: BlockKey,
    id: NamespaceId,
    manifest: Manifest,
}

impl Namespace {
    /// Derives the root: HMAC-SHA-256 of the manifest's canonical bytes under the tenant's secret.
    pub fn new(manifest: Manifest, secret: &TenantSecret) -> Self {
        let root = BlockKey::from_bytes(keyed(&secret.0, b"cascade namespace 1", &manifest));
        let id_bytes = Sha256::new()
            .chain_update(b"cascade namespace id 1")
            .chain_update(root.as_bytes())
            .finalize();
        let mut id = [0; 16];
        id.copy_from_slice(&id_bytes[..16]);
        Self { root, id: NamespaceId(id), manifest }
    }

    /// The key that every chain of this namespace starts from.
    pub fn root(&self) -> BlockKey {
        self.root
    }

    /// The public name of this namespace.
    pub fn id(&self) -> NamespaceId {
        self.id
    }

    /// The manifest that it was made from.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The key for a caller's own id, such as `"sys_prompt_v1"`.
    pub fn key_of_id(&self, id: &[u8]) -> BlockKey {
        let hash = Sha256::new()
            .chain_update(b"cascade id 1\0")
            .chain_update(self.root.as_bytes())
            .chain_update(id)
            .finalize();
        BlockKey::from_bytes(hash.into())
    }
}

fn keyed(secret: &[u8], domain: &[u8], manifest: &Manifest) -> [u8; 32] {
    let mut mac = Hmac::<Sha256>::new_from_slice(secret).expect("HMAC takes a key of any length");
    mac.update(domain);
    mac.update(&manifest.canonical_bytes());
    mac.finalize().into_bytes().into()
}
