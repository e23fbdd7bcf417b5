//! The keys of an encrypted tier, derived from the keys in a file.
//!
//! HKDF-SHA-256 derives from each key of the file, over the tenant's and the tier's name: an
//! identifier that may be shown, a key that authenticates contents, and session keys. Each opening
//! of a tier draws a random session and counts its nonces up from zero, so no nonce is used twice
//! with one key; `docs/decisions/0016-encryption.md` has the bounds.

use std::collections::HashMap;
use std::fmt;
use std::path::Path;
use std::sync::{Arc, PoisonError};

use cascade_block::Digest;
use cascade_runtime::{Mutex, RwLock, fill_random};
use cascade_tier::StoreError;
use ring::aead::{AES_256_GCM, LessSafeKey, NONCE_LEN, UnboundKey};
use ring::{hkdf, hmac};

use crate::secret::{SecretError, SecretReaders, read_secret};
use crate::{EncryptionConfig, StoreConfig};

/// Bytes of a key.
const KEY_BYTES: usize = 32;
/// Most keys in a file: one that writes, and earlier ones.
const KEYS_MAX: usize = 64;
/// Longest file with keys.
const FILE_BYTES_MAX: u64 = 16 << 10;
/// Most bytes encrypted with one session key: 2^36 cipher blocks, far below the birthday bound.
const SESSION_BYTES_MAX: u64 = 1 << 40;
/// Most cached keys of earlier sessions.
const SESSIONS_KEPT_MAX: usize = 256;

/// Identifies a key and reveals nothing about it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct KeyId(pub(super) [u8; 8]);

/// Identifies a session; drawn at random.
pub(super) type SessionId = [u8; 16];

/// All keys of a tier, the one that writes first.
pub(super) struct KeyRing {
    keys: Vec<TierKey>,
    writer: Mutex<WriteSession>,
    sessions: RwLock<HashMap<(KeyId, SessionId), Arc<LessSafeKey>>>,
}

struct TierKey {
    id: KeyId,
    secret: hkdf::Prk,
    contents: hmac::Key,
    scope: String,
}

/// The session that new records are written in.
struct WriteSession {
    session: SessionId,
    key: Arc<LessSafeKey>,
    next: u64,
    bytes: u64,
}

/// Key and nonce of one record. Each is used once.
pub(super) struct RecordSeal {
    pub(super) key_id: KeyId,
    pub(super) session: SessionId,
    pub(super) nonce: [u8; NONCE_LEN],
    pub(super) key: Arc<LessSafeKey>,
}

/// The kernel's random number generator failed.
#[derive(Debug, thiserror::Error)]
#[error("the kernel's random number generator failed")]
pub(super) struct NoRandomness;

impl KeyRing {
    /// Reads the file and derives the keys of one tier.
    pub(super) fn open(config: &EncryptionConfig, tier: &str) -> Result<Self, StoreError> {
        let bad = |reason: String| StoreError::Config { setting: "encryption", reason };
        let scope = format!("{}\0{tier}", config.scope);
        let text = read_secret(&config.key_file, FILE_BYTES_MAX, SecretReaders::Owner)
            .map_err(|e| bad(explain(&e)))?;
        let keys = parse(&text)
            .map_err(|reason| bad(format!("{}: {reason}", config.key_file.display())))?;
        let keys: Vec<_> = keys.iter().map(|key| TierKey::derive(key, &scope)).collect();
        let writer = WriteSession::begin(&keys[0]).map_err(|error| bad(error.to_string()))?;
        Ok(Self { keys, writer: Mutex::new(writer), sessions: RwLock::default() })
    }

    /// The key that writes.
    pub(super) fn writing_id(&self) -> KeyId {
        self.keys[0].id
    }

    pub(super) fn knows(&self, id: KeyId) -> bool {
        self.find(id).is_some()
    }

    /// As [`Self::knows`], for an identifier in hexadecimal digits.
    pub(super) fn knows_named(&self, id: &str) -> bool {
        let mut bytes = [0; 8];
        let digits = (0..8).map(|at| id.get(2 * at..2 * at + 2));
        for (byte, pair) in bytes.iter_mut().zip(digits) {
            let Some(value) = pair.and_then(|pair| u8::from_str_radix(pair, 16).ok()) else {
                return false;
            };
            *byte = value;
        }
        self.knows(KeyId(bytes))
    }

    fn find(&self, id: KeyId) -> Option<&TierKey> {
        self.keys.iter().find(|key| key.id == id)
    }

    /// An unused nonce of the writing session, with the session's key.
    pub(super) fn next_seal(&self, bytes: u64) -> Result<RecordSeal, NoRandomness> {
        // Session and counter change under one lock: no nonce is used twice with one key.
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        if writer.bytes.saturating_add(bytes) > SESSION_BYTES_MAX {
            *writer = WriteSession::begin(&self.keys[0])?;
        }
        let mut nonce = [0; NONCE_LEN];
        nonce[..8].copy_from_slice(&writer.next.to_le_bytes());
        writer.next += 1;
        writer.bytes += bytes;
        let (session, key) = (writer.session, Arc::clone(&writer.key));
        Ok(RecordSeal { key_id: self.keys[0].id, session, nonce, key })
    }

    /// The key of a session, from the cache or derived.
    pub(super) fn session(&self, id: KeyId, session: SessionId) -> Option<Arc<LessSafeKey>> {
        let key = self.find(id)?;
        let kept = self.sessions.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(kept) = kept.get(&(id, session)) {
            return Some(Arc::clone(kept));
        }
        drop(kept);
        // Without the lock. Two threads may derive the same key: the results are equal.
        let derived = Arc::new(key.session(session));
        let mut kept = self.sessions.write().unwrap_or_else(PoisonError::into_inner);
        if kept.len() >= SESSIONS_KEPT_MAX {
            // Cleared keys are derived again when they are needed.
            kept.clear();
        }
        kept.insert((id, session), Arc::clone(&derived));
        Some(derived)
    }

    /// The keyed tag of a content's digest, which only holders of the key can verify.
    pub(super) fn content_tag(&self, id: KeyId, digest: &Digest) -> Option<[u8; 32]> {
        let tag = hmac::sign(&self.find(id)?.contents, digest.as_bytes());
        tag.as_ref().try_into().ok()
    }
}

impl TierKey {
    fn derive(key: &[u8; KEY_BYTES], scope: &str) -> Self {
        let secret = hkdf::Salt::new(hkdf::HKDF_SHA256, b"cascade encryption 1").extract(key);
        let mut id = [0; 8];
        let scoped = [b"id\0".as_slice(), scope.as_bytes()];
        secret
            .expand(&scoped, OutputBytes(id.len()))
            .and_then(|okm| okm.fill(&mut id))
            .expect("eight bytes are fewer than HKDF gives");
        let contents = secret
            .expand(&[b"contents\0", scope.as_bytes()], hmac::HMAC_SHA256)
            .expect("a key is shorter than what HKDF gives")
            .into();
        Self { id: KeyId(id), secret, contents, scope: scope.to_owned() }
    }

    fn session(&self, session: SessionId) -> LessSafeKey {
        // The session has a fixed length, so that no two pairs of session and scope give the same
        // input.
        let parts = [b"session\0".as_slice(), &session, self.scope.as_bytes()];
        let key: UnboundKey = self
            .secret
            .expand(&parts, &AES_256_GCM)
            .expect("a key is shorter than what HKDF gives")
            .into();
        LessSafeKey::new(key)
    }
}

impl WriteSession {
    fn begin(key: &TierKey) -> Result<Self, NoRandomness> {
        let mut session = [0; 16];
        fill_random(&mut session).map_err(|_| NoRandomness)?;
        Ok(Self { session, key: Arc::new(key.session(session)), next: 0, bytes: 0 })
    }
}

struct OutputBytes(usize);

impl hkdf::KeyType for OutputBytes {
    fn len(&self) -> usize {
        self.0
    }
}

/// Parses a key file: 32 raw bytes, or lines of 64 hexadecimal digits. Errors never quote it.
fn parse(text: &[u8]) -> Result<Vec<[u8; KEY_BYTES]>, String> {
    if let Ok(raw) = text.try_into() {
        return Ok(vec![raw]);
    }
    let wanted = "a key is 32 raw bytes, or a line of 64 hexadecimal digits; the first line \
                  writes, further lines read older blocks";
    let text = str::from_utf8(text).map_err(|_| wanted.to_owned())?;
    let lines = text.lines().map(str::trim).enumerate().filter(|(_, line)| !line.is_empty());
    let keys = lines
        .map(|(at, line)| hex(line).ok_or_else(|| format!("line {}: {wanted}", at + 1)))
        .collect::<Result<Vec<_>, _>>()?;
    match keys.len() {
        0 => Err(format!("the file is empty; {wanted}")),
        1..=KEYS_MAX => Ok(keys),
        count => Err(format!("the file has {count} keys; at most {KEYS_MAX} are allowed")),
    }
}

fn hex(line: &str) -> Option<[u8; KEY_BYTES]> {
    if line.len() != 2 * KEY_BYTES || !line.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    let mut key = [0; KEY_BYTES];
    for (at, byte) in key.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&line[2 * at..2 * at + 2], 16).ok()?;
    }
    Some(key)
}

fn explain(error: &SecretError) -> String {
    match std::error::Error::source(error) {
        Some(cause) => format!("{error}: {cause}"),
        None => error.to_string(),
    }
}

impl fmt::Display for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KeyId({self})")
    }
}

impl fmt::Debug for KeyRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.keys.iter().map(|key| key.id)).finish()
    }
}

/// Checks that the key file is not in the directory that it encrypts: a copy of the directory would
/// contain the key, and removing the directory would remove the key.
pub(super) fn refuse_key_beside_blocks(
    config: &EncryptionConfig,
    store: &StoreConfig,
) -> Result<(), StoreError> {
    let Some(files) = &store.files else { return Ok(()) };
    let real = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    if !real(&config.key_file).starts_with(real(&files.directory)) {
        return Ok(());
    }
    let reason = format!(
        "{} is inside the directory {} of the encrypted tier: a copy of the directory would have \
         the key; move it elsewhere",
        config.key_file.display(),
        files.directory.display()
    );
    Err(StoreError::Config { setting: "encryption", reason })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_raw_bytes_or_lines_of_digits() {
        let digits = "0123456789abcdef".repeat(4);
        assert_eq!(parse(&[7; 32]).unwrap(), [[7; 32]]);
        assert_eq!(parse(format!("{digits}\n").as_bytes()).unwrap().len(), 1);
        let two = format!("\n{digits}\r\n\n{}\n", "ff".repeat(32));
        assert_eq!(parse(two.as_bytes()).unwrap()[1], [0xff; 32]);
        for bad in [&b""[..], b"\n", &[7; 31], &[0xff; 64], b"not a key", &digits.as_bytes()[1..]] {
            let reason = parse(bad).unwrap_err();
            assert!(reason.contains("32 raw bytes") && !reason.contains("not a key"), "{reason}");
        }
    }

    #[test]
    fn each_tenant_and_tier_has_its_own_keys() {
        let id = |scope: &str| TierKey::derive(&[7; 32], scope).id;
        assert_eq!(id("a\0files"), id("a\0files"));
        assert_ne!(id("a\0files"), id("b\0files"));
        assert_ne!(id("a\0files"), id("a\0posix"));
    }
}
