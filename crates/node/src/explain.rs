//! `cascade explain`: where blocks are or why they are missing, in JSON, with times as ages.

use std::collections::BTreeMap;

use cascade_block::{BlockKey, Manifest, Namespace, with_causes};
use cascade_runtime::{Clock, SystemClock};
use cascade_store::{BlockExplanation, BlockState, CallOptions, Explanation, Store};
use serde::{Deserialize, Serialize};

/// The request of `cascade explain`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExplainRequest {
    /// The keys of the chain in hexadecimal digits, root first: all 64 digits, or the first ones
    /// as pages show them.
    pub keys: Vec<String>,
    /// The client's manifest, to compare namespaces if no block of the chain is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub manifest: Option<BTreeMap<String, String>>,
}

/// The explanation of a chain.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChainReport {
    /// Leading blocks that are present: what a lookup would match.
    pub leading: usize,
    /// Blocks that are present after the first missing one.
    pub behind_gap: usize,
    /// Why the first missing block is missing.
    pub first_missing: Option<String>,
    /// All blocks.
    pub blocks: Vec<BlockReport>,
    /// How the known namespaces differ from the client's, if no block of the chain is known.
    pub namespaces: Vec<NamespaceReport>,
}

/// The explanation of a block: `here` or `missing`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockReport {
    /// The key in hexadecimal digits.
    pub key: String,
    /// Its location and use, if it is present.
    pub here: Option<ResidentBlock>,
    /// The reason, if it is missing.
    pub missing: Option<String>,
    /// Seconds since it was removed, if known.
    pub gone_s: Option<u64>,
}

/// A block that is present.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResidentBlock {
    /// The tiers that have it, fast to slow.
    pub tiers: Vec<String>,
    /// Tiers to which it is waiting to be written.
    pub queued_for: Vec<String>,
    /// Length.
    pub bytes: u32,
    /// Seconds since it was put. `None` for a block from before the last start.
    pub age_s: Option<u64>,
    /// Seconds since it was last read.
    pub idle_s: Option<u64>,
    /// Number of reads.
    pub uses: u16,
    /// ID of the process that put it, if it was a client.
    pub writer: Option<u32>,
    /// Pins.
    pub pins: u16,
    /// Leases and views.
    pub holders: usize,
    /// Keys that share its bytes.
    pub names: u32,
    /// Whether it belongs to a protected prefix.
    pub is_prefix: bool,
    /// The block before it, if known.
    pub parent: Option<String>,
    /// Seconds until it expires, if it does.
    pub expires_in_s: Option<u64>,
}

/// A known namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamespaceReport {
    /// Its public name.
    pub id: String,
    /// The fields in which it differs from the client's.
    pub difference: String,
}

/// Minimum digits of a shortened key: two blocks rarely share their first eight by chance.
const DIGITS_MIN: usize = 8;
/// Limit of shortened keys in one request, because each needs a search of the store.
const SHORTENED_MAX: usize = 64;

/// The keys of blocks that are given by their keys, or by the first digits of them.
pub(crate) fn resolve_keys(
    store: &Store,
    texts: &[String],
    options: CallOptions,
) -> Result<Vec<BlockKey>, String> {
    let is_complete = |text: &&String| text.parse::<BlockKey>().is_ok();
    let shortened = texts.iter().filter(|text| !is_complete(text)).count();
    if shortened > SHORTENED_MAX {
        return Err(format!(
            "{shortened} shortened keys; the limit is {SHORTENED_MAX} per request: use all 64 \
             digits"
        ));
    }
    texts.iter().map(|text| text.parse().or_else(|_| resolve(store, text, options))).collect()
}

/// The only key that begins with these digits.
fn resolve(store: &Store, text: &str, options: CallOptions) -> Result<BlockKey, String> {
    match find_by_prefix(store, text, 2, options)?.as_slice() {
        [key] => Ok(*key),
        [] => Err(format!(
            "no block has a key that begins with {text}; use all 64 digits to explain a block \
             that was removed"
        )),
        several => {
            let several: Vec<_> = several.iter().map(ToString::to_string).collect();
            let several = several.join(" and ");
            Err(format!("several keys begin with {text}, such as {several}; use more digits"))
        }
    }
}

/// At most `limit` keys of blocks that begin with these hexadecimal digits.
pub(crate) fn find_by_prefix(
    store: &Store,
    digits: &str,
    limit: usize,
    options: CallOptions,
) -> Result<Vec<BlockKey>, String> {
    let is_match = key_prefix(digits).filter(|_| digits.len() >= DIGITS_MIN).ok_or_else(|| {
        format!(
            "{:?} is not a key: use 64 hexadecimal digits, or the first {DIGITS_MIN} or more",
            digits.chars().take(80).collect::<String>()
        )
    })?;
    store.find_keys(is_match, limit, options).map_err(|error| with_causes(&error))
}

/// Whether a key begins with these hexadecimal digits. `None` if they begin no key.
pub(crate) fn key_prefix(digits: &str) -> Option<impl Fn(&BlockKey) -> bool + use<>> {
    if digits.len() > 64 || !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    // Bytes, not text, because the store calls this for every key.
    let digit = |at: usize| u8::from_str_radix(&digits[at..=at], 16).expect("checked above");
    let whole: Vec<u8> =
        (0..digits.len() / 2).map(|at| digit(2 * at) << 4 | digit(2 * at + 1)).collect();
    let half = (digits.len() % 2 == 1).then(|| digit(digits.len() - 1));
    Some(move |key: &BlockKey| {
        let rest = key.as_bytes().strip_prefix(whole.as_slice());
        rest.is_some_and(|rest| half.is_none_or(|half| rest[0] >> 4 == half))
    })
}

impl ChainReport {
    /// Queries a store.
    pub fn query(
        store: &Store,
        request: &ExplainRequest,
        options: CallOptions,
    ) -> Result<Self, String> {
        let keys = resolve_keys(store, &request.keys, options)?;
        let namespace = request.manifest.as_ref().map(|fields| {
            let with =
                |manifest: Manifest, (name, value): (&String, &String)| manifest.with(name, value);
            let manifest = fields.iter().fold(Manifest::new(), with);
            // The root does not matter: only the fields of the manifest are compared.
            Namespace::from_root(BlockKey::from_bytes([0; 32]), manifest)
        });
        let explanation = store.explain(&keys, namespace.as_ref(), options);
        let explanation = explanation.map_err(|error| with_causes(&error))?;
        Ok(Self::from_explanation(&explanation, SystemClock.unix_ms()))
    }

    fn from_explanation(explanation: &Explanation, now_unix_ms: u64) -> Self {
        let blocks = explanation.blocks.iter();
        let blocks: Vec<_> =
            blocks.map(|block| BlockReport::from_explanation(block, now_unix_ms)).collect();
        let namespaces = explanation.namespaces.iter().map(|other| NamespaceReport {
            id: other.id.to_string(),
            difference: match other.fields.as_slice() {
                [] => "only the tenant's secret".to_owned(),
                fields => fields.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "),
            },
        });
        Self {
            leading: explanation.leading,
            behind_gap: explanation.behind_gap,
            first_missing: blocks.get(explanation.leading).and_then(|block| block.missing.clone()),
            namespaces: namespaces.collect(),
            blocks,
        }
    }
}

impl BlockReport {
    fn from_explanation(block: &BlockExplanation, now_unix_ms: u64) -> Self {
        let seconds = |since: u64| now_unix_ms.saturating_sub(since) / 1000;
        let key = block.key.to_string();
        match &block.state {
            BlockState::Present(here) if here.tiers.is_empty() => Self {
                key,
                missing: Some("unavailable: it is only in a tier whose circuit is open".to_owned()),
                ..Self::default()
            },
            BlockState::Present(here) => Self {
                key,
                here: Some(ResidentBlock {
                    tiers: here.tiers.iter().map(ToString::to_string).collect(),
                    queued_for: here.queued_for.iter().map(ToString::to_string).collect(),
                    bytes: here.bytes,
                    age_s: here.put_unix_ms.map(seconds),
                    idle_s: here.used_unix_ms.map(seconds),
                    uses: here.uses,
                    writer: here.writer.map(|writer| writer.0.get()),
                    pins: here.pins,
                    holders: here.holders,
                    names: here.names,
                    is_prefix: here.is_prefix,
                    parent: here.parent.map(|parent| parent.to_string()),
                    expires_in_s: here
                        .expires_unix_ms
                        .map(|at| at.saturating_sub(now_unix_ms).div_ceil(1000)),
                }),
                ..Self::default()
            },
            BlockState::Absent { why, since_unix_ms } => Self {
                key,
                missing: Some(why.to_string()),
                gone_s: Some(seconds(*since_unix_ms)),
                ..Self::default()
            },
            BlockState::Unknown => Self {
                key,
                missing: Some("never put, or removed too long ago to be known".to_owned()),
                ..Self::default()
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use cascade_store::{Put, StoreConfig};

    use super::*;

    /// The search stopped after 32 keys with the same whole bytes, and so missed the right one.
    #[test]
    fn an_odd_number_of_digits_finds_a_key_among_many_with_the_same_bytes() {
        let config =
            StoreConfig { dram_bytes: 4 << 20, huge_pages: false, ..StoreConfig::default() };
        let store = Store::open(config).unwrap();
        let key = |fifth: u8| {
            let mut bytes = [0xAB; 32];
            bytes[4] = fifth;
            BlockKey::from_bytes(bytes)
        };
        let keys: Vec<_> = (0..=0x30).map(key).collect();
        let batch: Vec<_> = keys.iter().map(|key| Put::new(*key, b"bytes")).collect();
        store.put(&batch, CallOptions::default());
        let find =
            |digits: &str| find_by_prefix(&store, digits, 20, CallOptions::default()).unwrap();
        assert_eq!(find("abababab3"), [key(0x30)]);
        assert_eq!(find("ABABABAB1"), keys[0x10..0x20]);
        assert_eq!(find(&key(7).to_string()), [key(7)]);
        assert!(find("abababac").is_empty() && find(&"ab".repeat(31)[..61]).is_empty());
    }
}
