//! Encoding and decoding of the fields of a message.

use cascade_block::{BlockKey, Manifest, NamespaceId};
use cascade_tier::{ChangeCursor, TierName};

use crate::{KEYS_MAX, TEXT_BYTES_MAX, WireError};

const KEY_BYTES: usize = 32;
/// Maximum number of fields of a manifest in a message.
pub const MANIFEST_FIELDS_MAX: usize = 256;

/// The longest prefix of a text that fits `bytes_max`, ending with a whole character.
pub(crate) fn cut(text: &str, bytes_max: usize) -> &str {
    // A character has at most four bytes, so this takes at most four steps.
    let end = (0..=bytes_max.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
    &text[..end.unwrap_or(0)]
}

/// Appends fields to a message.
pub(crate) struct FieldWriter<'a>(pub(crate) &'a mut Vec<u8>);

impl FieldWriter<'_> {
    pub(crate) fn u8(&mut self, value: u8) {
        self.0.push(value);
    }

    pub(crate) fn u16(&mut self, value: u16) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    pub(crate) fn u32(&mut self, value: u32) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    pub(crate) fn u64(&mut self, value: u64) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    pub(crate) fn key(&mut self, key: &BlockKey) {
        self.bytes(key.as_bytes());
    }

    /// An optional key.
    pub(crate) fn maybe_key(&mut self, key: Option<&BlockKey>) {
        self.u8(u8::from(key.is_some()));
        if let Some(key) = key {
            self.key(key);
        }
    }

    pub(crate) fn maybe_u64(&mut self, value: Option<u64>) {
        self.u8(u8::from(value.is_some()));
        if let Some(value) = value {
            self.u64(value);
        }
    }

    pub(crate) fn maybe_cursor(&mut self, cursor: Option<&ChangeCursor>) {
        self.u8(u8::from(cursor.is_some()));
        if let Some(cursor) = cursor {
            self.bytes(&cursor.to_bytes());
        }
    }

    /// The number of the items that follow.
    pub(crate) fn count(&mut self, count: usize) {
        self.u32(u32::try_from(count).expect("messages keep to their limits"));
    }

    pub(crate) fn list<T>(&mut self, all: &[T], write: impl Fn(&T, &mut Self)) {
        self.count(all.len());
        for one in all {
            write(one, self);
        }
    }

    pub(crate) fn keys(&mut self, keys: &[BlockKey]) {
        self.count(keys.len());
        for key in keys {
            self.0.extend_from_slice(key.as_bytes());
        }
    }

    /// A text, truncated at [`TEXT_BYTES_MAX`].
    pub(crate) fn text(&mut self, text: &str) {
        self.blob(cut(text, TEXT_BYTES_MAX).as_bytes());
    }

    pub(crate) fn blob(&mut self, bytes: &[u8]) {
        self.count(bytes.len());
        self.bytes(bytes);
    }

    pub(crate) fn manifest(&mut self, manifest: &Manifest) {
        self.count(manifest.fields().count());
        for (name, value) in manifest.fields() {
            self.text(name);
            self.text(value);
        }
    }
}

/// Reads fields of a message; a missing or invalid field is an error with its name.
pub(crate) struct FieldReader<'a>(&'a [u8]);

impl<'a> FieldReader<'a> {
    pub(crate) fn new(body: &'a [u8]) -> Self {
        Self(body)
    }

    /// Whether all fields are read.
    pub(crate) fn is_at_end(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the message if no bytes remain.
    pub(crate) fn end<T>(self, message: T) -> Result<T, WireError> {
        if self.0.is_empty() { Ok(message) } else { Err(WireError::Field("end")) }
    }

    pub(crate) fn bytes(
        &mut self,
        count: usize,
        field: &'static str,
    ) -> Result<&'a [u8], WireError> {
        let (head, rest) = self.0.split_at_checked(count).ok_or(WireError::Field(field))?;
        self.0 = rest;
        Ok(head)
    }

    pub(crate) fn array<const N: usize>(
        &mut self,
        field: &'static str,
    ) -> Result<[u8; N], WireError> {
        let (head, rest) = self.0.split_first_chunk().ok_or(WireError::Field(field))?;
        self.0 = rest;
        Ok(*head)
    }

    pub(crate) fn u8(&mut self, field: &'static str) -> Result<u8, WireError> {
        Ok(self.array::<1>(field)?[0])
    }

    pub(crate) fn u16(&mut self, field: &'static str) -> Result<u16, WireError> {
        Ok(u16::from_le_bytes(self.array(field)?))
    }

    pub(crate) fn u32(&mut self, field: &'static str) -> Result<u32, WireError> {
        Ok(u32::from_le_bytes(self.array(field)?))
    }

    pub(crate) fn u64(&mut self, field: &'static str) -> Result<u64, WireError> {
        Ok(u64::from_le_bytes(self.array(field)?))
    }

    pub(crate) fn flag(&mut self, field: &'static str) -> Result<bool, WireError> {
        match self.u8(field)? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(WireError::Field(field)),
        }
    }

    pub(crate) fn key(&mut self) -> Result<BlockKey, WireError> {
        Ok(BlockKey::from_bytes(self.array("key")?))
    }

    pub(crate) fn maybe_key(&mut self) -> Result<Option<BlockKey>, WireError> {
        if self.flag("parent")? { Ok(Some(self.key()?)) } else { Ok(None) }
    }

    pub(crate) fn maybe_u64(&mut self, field: &'static str) -> Result<Option<u64>, WireError> {
        if self.flag(field)? { Ok(Some(self.u64(field)?)) } else { Ok(None) }
    }

    /// The number of items of at least `least` bytes each. Refuses more than the rest of the
    /// message can hold, so that a forged count does not allocate memory.
    pub(crate) fn count(&mut self, least: usize, field: &'static str) -> Result<usize, WireError> {
        let count = self.u32(field)? as usize;
        let fits = count <= KEYS_MAX && count.saturating_mul(least) <= self.0.len();
        if fits { Ok(count) } else { Err(WireError::Field(field)) }
    }

    /// Reads `count` items, a number that `count` has checked: allocates once.
    pub(crate) fn all<T>(
        &mut self,
        count: usize,
        read: impl Fn(&mut Self) -> Result<T, WireError>,
    ) -> Result<Vec<T>, WireError> {
        let mut all = Vec::with_capacity(count);
        for _ in 0..count {
            all.push(read(self)?);
        }
        Ok(all)
    }

    pub(crate) fn keys(&mut self) -> Result<Vec<BlockKey>, WireError> {
        let count = self.count(KEY_BYTES, "keys")?;
        // No overflow: `count` has compared the product with the rest of the message.
        let bytes = self.bytes(count * KEY_BYTES, "keys")?;
        let (keys, _) = bytes.as_chunks();
        Ok(keys.iter().map(|key| BlockKey::from_bytes(*key)).collect())
    }

    pub(crate) fn blob(&mut self, field: &'static str) -> Result<&'a [u8], WireError> {
        let count = self.u32(field)? as usize;
        if count > TEXT_BYTES_MAX {
            return Err(WireError::Field(field));
        }
        self.bytes(count, field)
    }

    pub(crate) fn text(&mut self, field: &'static str) -> Result<&'a str, WireError> {
        std::str::from_utf8(self.blob(field)?).map_err(|_| WireError::Field(field))
    }

    pub(crate) fn name(&mut self, field: &'static str) -> Result<TierName, WireError> {
        Ok(cascade_tier::intern(self.text(field)?))
    }

    pub(crate) fn cursor(&mut self) -> Result<ChangeCursor, WireError> {
        Ok(ChangeCursor::from_bytes(self.array("cursor")?))
    }

    pub(crate) fn maybe_cursor(&mut self) -> Result<Option<ChangeCursor>, WireError> {
        if self.flag("cursor")? { Ok(Some(self.cursor()?)) } else { Ok(None) }
    }

    pub(crate) fn namespace(&mut self) -> Result<NamespaceId, WireError> {
        Ok(NamespaceId::from_bytes(self.array("namespace")?))
    }

    pub(crate) fn manifest(&mut self) -> Result<Manifest, WireError> {
        // A field has at least the lengths of its name and its value, of 4 bytes each.
        let count = self.count(8, "manifest")?;
        if count > MANIFEST_FIELDS_MAX {
            return Err(WireError::Field("manifest"));
        }
        let mut manifest = Manifest::new();
        for _ in 0..count {
            let name = self.text("manifest field")?;
            manifest = manifest.with(name, self.text("manifest field")?);
        }
        Ok(manifest)
    }
}
