//! Explain: what is known of each block of a chain, and why a request hit no more than it did.

use cascade_block::{BlockKey, Difference, Namespace, NamespaceId};

use crate::catalog::KeyIndex;
use crate::history::Loss;
use crate::node::Node;
use crate::state::State;
use crate::{CallOptions, Store, StoreError, TierName, Writer};

/// What is known of the blocks of a chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Explanation {
    /// One entry for each key, in order.
    pub blocks: Vec<BlockExplanation>,
    /// Leading blocks that are here: what a lookup would match.
    pub leading: usize,
    /// Blocks that are here but behind the first that is missing: nobody can use them.
    pub behind_gap: usize,
    /// If nothing at all is known of the chain and the caller's namespace was given: how the
    /// namespaces that are known here differ from it.
    pub namespaces: Vec<NamespaceDifference>,
}

impl Explanation {
    /// The block at which a lookup stops, and what is known of it.
    pub fn first_missing(&self) -> Option<&BlockExplanation> {
        self.blocks.get(self.leading)
    }
}

/// What is known of one block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockExplanation {
    /// Its name.
    pub key: BlockKey,
    /// Where it is, or what became of it.
    pub state: BlockState,
}

/// Where a block is, or what became of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BlockState {
    /// It is here.
    Here(BlockHere),
    /// It is not, and this is why.
    Gone {
        /// Why.
        why: Loss,
        /// Since when, in milliseconds since 1970, to the second.
        since_unix_ms: u64,
    },
    /// It was never here, or so long ago that it is forgotten.
    Unknown,
}

/// What is known of a block that is here. Moments are milliseconds since 1970, to the second.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockHere {
    /// The tiers that have it and are used, fast to slow; none while it is out of reach because
    /// all that has it is shed.
    pub tiers: Vec<TierName>,
    /// Tiers that it waits to be written to.
    pub queued_for: Vec<TierName>,
    /// Its length.
    pub bytes: u32,
    /// When its bytes were put; nothing for one that was recovered from an earlier run.
    pub put_unix_ms: Option<u64>,
    /// When its bytes were read last, if they were.
    pub used_unix_ms: Option<u64>,
    /// How often they were read since, 65,535 for more.
    pub uses: u16,
    /// Who put them, if that was said.
    pub writer: Option<Writer>,
    /// Pins on it.
    pub pins: u16,
    /// Views and writers that hold its slab now.
    pub holders: usize,
    /// Keys that share its bytes, itself included.
    pub names: u32,
    /// Whether it was put as part of a protected prefix.
    pub is_prefix: bool,
    /// The block before it in its chain, if that is here and was named.
    pub parent: Option<BlockKey>,
    /// When it expires, in milliseconds since 1970.
    pub expires_unix_ms: Option<u64>,
}

/// How a namespace that is known here differs from the caller's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamespaceDifference {
    /// The namespace.
    pub id: NamespaceId,
    /// The fields that differ, `ours` being the caller's. None at all: the manifests are the same,
    /// and the tenants' secrets differ.
    pub fields: Vec<Difference>,
}

impl Store {
    /// What is known of each block of a chain, root first. Counts as nobody's access and changes
    /// nothing. With the caller's namespace it can also tell why nothing of a chain is known.
    ///
    /// # Errors
    /// As [`Store::manifests`], which is asked only in that case.
    pub fn explain(
        &self,
        keys: &[BlockKey],
        namespace: Option<&Namespace>,
        options: CallOptions,
    ) -> Result<Explanation, StoreError> {
        let node = self.node();
        let now_unix_ms = node.clock.unix_ms();
        let state = node.lock();
        let blocks: Vec<_> = keys
            .iter()
            .map(|key| BlockExplanation {
                key: *key,
                state: node.explain_block(&state, key, now_unix_ms),
            })
            .collect();
        drop(state);
        let is_here = |block: &&BlockExplanation| match &block.state {
            BlockState::Here(here) => !here.tiers.is_empty(),
            BlockState::Gone { .. } | BlockState::Unknown => false,
        };
        let leading = blocks.iter().take_while(is_here).count();
        let behind_gap = blocks[leading..].iter().filter(is_here).count();
        let is_unknown = |block: &BlockExplanation| block.state == BlockState::Unknown;
        let namespaces = match namespace {
            Some(ours) if blocks.iter().all(is_unknown) => self.differences(ours, options)?,
            _ => Vec::new(),
        };
        Ok(Explanation { blocks, leading, behind_gap, namespaces })
    }

    /// Every other namespace that is known here; nearest first, as far as fields tell.
    fn differences(
        &self,
        ours: &Namespace,
        options: CallOptions,
    ) -> Result<Vec<NamespaceDifference>, StoreError> {
        let others = self.manifests(options)?.into_iter().filter(|(id, _)| *id != ours.id());
        let mut differences: Vec<_> = others
            .map(|(id, theirs)| NamespaceDifference {
                id,
                fields: ours.manifest().difference(&theirs),
            })
            .collect();
        differences.sort_by_key(|other| (other.fields.len(), other.id));
        Ok(differences)
    }
}

impl Node {
    fn explain_block(&self, state: &State, key: &BlockKey, now_unix_ms: u64) -> BlockState {
        match state.catalog.find(key) {
            Some(found) if state.catalog.entry(found).has_expired(now_unix_ms) => {
                let since_unix_ms = state.catalog.entry(found).expires_unix_ms;
                BlockState::Gone { why: Loss::Expired, since_unix_ms }
            }
            Some(found) => BlockState::Here(self.explain_here(state, found)),
            None => {
                state.history.end_of(key).map_or(BlockState::Unknown, |(why, since_unix_ms)| {
                    BlockState::Gone { why, since_unix_ms }
                })
            }
        }
    }

    fn explain_here(&self, state: &State, key: KeyIndex) -> BlockHere {
        let entry = state.catalog.entry(key);
        let content = state.catalog.content(entry.content);
        let name = |tier: usize| self.tier_name(tier);
        let queued = (0..self.stages.len()).filter(|stage| content.dirty & (1 << stage) != 0);
        let parent = state.catalog.parent_of(key);
        // The store holds the slab itself.
        let holders = content.slab.as_ref().map_or(0, |slab| slab.holders() - 1);
        BlockHere {
            tiers: self.tiers_with(state, key).into_iter().map(name).collect(),
            queued_for: queued.map(|stage| name(1 + stage)).collect(),
            bytes: content.bytes,
            put_unix_ms: state.history.unix_ms_of(content.put_stamp),
            used_unix_ms: state.history.unix_ms_of(content.used_stamp),
            uses: content.uses,
            writer: std::num::NonZeroU32::new(content.writer).map(Writer),
            pins: entry.pins,
            holders,
            names: content.key_count,
            is_prefix: entry.is_prefix(),
            parent: parent.map(|parent| state.catalog.entry(parent).key),
            expires_unix_ms: (entry.expires_unix_ms != 0).then_some(entry.expires_unix_ms),
        }
    }
}
