//! Explanations as an administrator reads them: the store's facts in JSON, times as ages.

use std::collections::BTreeMap;

use cascade_block::{BlockKey, Clock, Manifest, Namespace, SystemClock};
use cascade_store::{BlockExplanation, BlockState, CallOptions, Explanation, Store};
use serde::{Deserialize, Serialize};

/// What an administrator asks.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Question {
    /// The chain's keys in hexadecimal digits, root first: all 64, or the first of them as pages
    /// show them.
    pub keys: Vec<String>,
    /// The caller's manifest, to compare namespaces if nothing of the chain is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub manifest: Option<BTreeMap<String, String>>,
}

/// What is known of a chain.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChainStory {
    /// Leading blocks that are here: what a lookup would match.
    pub leading: usize,
    /// Blocks that are here but behind the first that is missing.
    pub behind_gap: usize,
    /// Why the first that is missing is missing.
    pub first_missing: Option<String>,
    /// Every block.
    pub blocks: Vec<BlockStory>,
    /// How the namespaces that are known here differ, if nothing of the chain is.
    pub namespaces: Vec<NamespaceStory>,
}

/// What is known of a block: `here` or `missing`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockStory {
    /// Its key in hexadecimal digits.
    pub key: String,
    /// Where it is.
    pub here: Option<HereStory>,
    /// Why it is not.
    pub missing: Option<String>,
    /// Seconds since it is gone, if that is remembered.
    pub gone_s: Option<u64>,
}

/// A block that is here.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HereStory {
    /// The tiers that have it, fast to slow.
    pub tiers: Vec<String>,
    /// Tiers that it waits to be written to.
    pub queued_for: Vec<String>,
    /// Its length.
    pub bytes: u32,
    /// Seconds since it was put; nothing for one from before the last start.
    pub age_s: Option<u64>,
    /// Seconds since it was read last, if it was.
    pub idle_s: Option<u64>,
    /// How often it was read.
    pub uses: u16,
    /// The process that put it, if it was a client.
    pub writer: Option<u32>,
    /// Pins on it.
    pub pins: u16,
    /// Leases and views on it.
    pub holders: usize,
    /// Keys that share its bytes.
    pub names: u32,
    /// Whether it belongs to a protected prefix.
    pub is_prefix: bool,
    /// The block before it, if that is known.
    pub parent: Option<String>,
    /// Seconds until it expires, if it does.
    pub expires_in_s: Option<u64>,
}

/// A namespace that is known here.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamespaceStory {
    /// Its public name.
    pub id: String,
    /// The fields in which it differs.
    pub difference: String,
}

/// Fewest digits of a key that stand for it: few enough blocks share eight by chance.
const DIGITS_MIN: usize = 8;
/// Most shortened keys in one question: the store is searched for each.
const SHORTENED_MAX: usize = 64;

/// Blocks that are named by their keys, or by the first digits of them.
pub(crate) fn keys(
    store: &Store,
    texts: &[String],
    options: CallOptions,
) -> Result<Vec<BlockKey>, String> {
    let is_whole = |text: &&String| text.parse::<BlockKey>().is_ok();
    let shortened = texts.iter().filter(|text| !is_whole(text)).count();
    if shortened > SHORTENED_MAX {
        return Err(format!(
            "{shortened} shortened keys; at most {SHORTENED_MAX} are looked up at a time: give all \
             64 digits of each"
        ));
    }
    texts.iter().map(|text| text.parse().or_else(|_| resolve(store, text, options))).collect()
}

/// The one block whose key begins so.
fn resolve(store: &Store, text: &str, options: CallOptions) -> Result<BlockKey, String> {
    match find(store, text, 2, options)?.as_slice() {
        [key] => Ok(*key),
        [] => Err(format!(
            "no block here has a key that begins with {text}; give all 64 digits to learn what \
             became of one that is gone"
        )),
        several => {
            let several: Vec<_> = several.iter().map(ToString::to_string).collect();
            let several = several.join(" and ");
            Err(format!("{text} begins the keys of several blocks, such as {several}"))
        }
    }
}

/// Blocks whose keys begin with these hexadecimal digits, `most` at most.
pub(crate) fn find(
    store: &Store,
    digits: &str,
    most: usize,
    options: CallOptions,
) -> Result<Vec<BlockKey>, String> {
    let digits = digits.to_ascii_lowercase();
    let is_key = digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    if !is_key || !(DIGITS_MIN..=64).contains(&digits.len()) {
        return Err(format!(
            "{:?} is no key: give its 64 hexadecimal digits, or the first {DIGITS_MIN} or more",
            digits.chars().take(80).collect::<String>()
        ));
    }
    // Whole bytes are searched for; an odd digit at the end is compared afterwards.
    let bytes: Vec<u8> = (0..digits.len() / 2)
        .filter_map(|at| u8::from_str_radix(&digits[2 * at..2 * at + 2], 16).ok())
        .collect();
    let found = store.find_keys(&bytes, 16 * most, options).map_err(|error| error.to_string())?;
    let begins = |key: &BlockKey| key.to_string().starts_with(&digits);
    Ok(found.into_iter().filter(begins).take(most).collect())
}

impl ChainStory {
    /// Asks a store.
    pub fn of(store: &Store, question: &Question, options: CallOptions) -> Result<Self, String> {
        let keys = keys(store, &question.keys, options)?;
        let namespace = question.manifest.as_ref().map(|fields| {
            let with =
                |manifest: Manifest, (name, value): (&String, &String)| manifest.with(name, value);
            let manifest = fields.iter().fold(Manifest::new(), with);
            // Only its fields are compared.
            Namespace::from_root(BlockKey::from_bytes([0; 32]), manifest)
        });
        let explained = store.explain(&keys, namespace.as_ref(), options);
        let explained = explained.map_err(|error| error.to_string())?;
        Ok(Self::tell(&explained, SystemClock.unix_ms()))
    }

    fn tell(explained: &Explanation, now_unix_ms: u64) -> Self {
        let blocks: Vec<_> =
            explained.blocks.iter().map(|block| BlockStory::tell(block, now_unix_ms)).collect();
        let namespaces = explained.namespaces.iter().map(|other| NamespaceStory {
            id: other.id.to_string(),
            difference: match other.fields.as_slice() {
                [] => "in nothing but the tenant's secret".to_owned(),
                fields => fields.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "),
            },
        });
        Self {
            leading: explained.leading,
            behind_gap: explained.behind_gap,
            first_missing: blocks.get(explained.leading).and_then(|block| block.missing.clone()),
            namespaces: namespaces.collect(),
            blocks,
        }
    }
}

impl BlockStory {
    fn tell(block: &BlockExplanation, now_unix_ms: u64) -> Self {
        let seconds = |since: u64| now_unix_ms.saturating_sub(since) / 1000;
        let key = block.key.to_string();
        match &block.state {
            BlockState::Here(here) if here.tiers.is_empty() => Self {
                key,
                missing: Some("out of reach: all that has it is a tier that failed".to_owned()),
                ..Self::default()
            },
            BlockState::Here(here) => Self {
                key,
                here: Some(HereStory {
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
            BlockState::Gone { why, since_unix_ms } => Self {
                key,
                missing: Some(why.to_string()),
                gone_s: Some(seconds(*since_unix_ms)),
                ..Self::default()
            },
            BlockState::Unknown => Self {
                key,
                missing: Some("never put here, or so long ago that it is forgotten".to_owned()),
                ..Self::default()
            },
        }
    }
}
