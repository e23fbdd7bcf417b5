//! The fields of a body, little endian.

use super::WireError;

/// Appends a blob with its length before it.
pub(super) fn write_blob(blob: &[u8], into: &mut Vec<u8>) {
    let bytes = u32::try_from(blob.len()).expect("blobs keep to their limits");
    into.extend_from_slice(&bytes.to_le_bytes());
    into.extend_from_slice(blob);
}

/// Reads fields; a missing or invalid one is an error with its name.
pub(super) struct Fields<'a>(pub(super) &'a [u8]);

impl<'a> Fields<'a> {
    pub(super) fn array<const N: usize>(
        &mut self,
        field: &'static str,
    ) -> Result<[u8; N], WireError> {
        let (head, rest) = self.0.split_first_chunk().ok_or(WireError::Field(field))?;
        self.0 = rest;
        Ok(*head)
    }

    pub(super) fn u16(&mut self, field: &'static str) -> Result<u16, WireError> {
        Ok(u16::from_le_bytes(self.array(field)?))
    }

    pub(super) fn u32(&mut self, field: &'static str) -> Result<u32, WireError> {
        Ok(u32::from_le_bytes(self.array(field)?))
    }

    pub(super) fn u64(&mut self, field: &'static str) -> Result<u64, WireError> {
        Ok(u64::from_le_bytes(self.array(field)?))
    }

    pub(super) fn flag(&mut self, field: &'static str) -> Result<bool, WireError> {
        match self.array::<1>(field)? {
            [0] => Ok(false),
            [1] => Ok(true),
            _ => Err(WireError::Field(field)),
        }
    }

    pub(super) fn blob(
        &mut self,
        bytes_max: usize,
        field: &'static str,
    ) -> Result<&'a [u8], WireError> {
        let bytes = self.u32(field)? as usize;
        let fits = bytes <= bytes_max;
        let split = self.0.split_at_checked(bytes).filter(|_| fits);
        let (head, rest) = split.ok_or(WireError::Field(field))?;
        self.0 = rest;
        Ok(head)
    }

    /// Nothing may follow the last field.
    pub(super) fn end(self) -> Result<(), WireError> {
        if self.0.is_empty() { Ok(()) } else { Err(WireError::Field("end")) }
    }
}
