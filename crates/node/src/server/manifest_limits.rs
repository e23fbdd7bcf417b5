//! The limits of the manifests that clients register.

use cascade_block::Manifest;
use cascade_store::StoreError;

/// Maximum length of the name or value of a manifest's field, in bytes.
const FIELD_BYTES_MAX: usize = 4 << 10;
/// Maximum bytes of a manifest's names and values together.
const MANIFEST_BYTES_MAX: usize = 64 << 10;

/// Checks a manifest against the limits. Every persistent tier stores manifests with its blocks, so
/// they have to be short.
pub(super) fn check(manifest: &Manifest) -> Result<(), StoreError> {
    if !exceeds(manifest) {
        return Ok(());
    }
    Err(StoreError::Config {
        setting: "manifest",
        reason: format!(
            "a name or value has more than {FIELD_BYTES_MAX} bytes, or all together more than \
             {MANIFEST_BYTES_MAX}; use a hash in place of a long value"
        ),
    })
}

fn exceeds(manifest: &Manifest) -> bool {
    let lengths = || manifest.fields().flat_map(|(name, value)| [name.len(), value.len()]);
    lengths().any(|length| length > FIELD_BYTES_MAX)
        || lengths().sum::<usize>() > MANIFEST_BYTES_MAX
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn manifests_have_limits_by_field_and_in_all() {
        assert!(!exceeds(&Manifest::new().with("weights", "w".repeat(FIELD_BYTES_MAX).as_str())));
        let long = "w".repeat(FIELD_BYTES_MAX + 1);
        assert!(exceeds(&Manifest::new().with("weights", long.as_str())));
        let many = (0..17).fold(Manifest::new(), |manifest, number| {
            manifest.with(format!("field {number}"), "w".repeat(FIELD_BYTES_MAX).as_str())
        });
        assert!(exceeds(&many));
    }
}
