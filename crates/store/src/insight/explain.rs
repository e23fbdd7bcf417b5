//! Explain: the state of each block of a chain, and why a request did not match more of it.

use cascade_block::{BlockKey, ManifestDifference, Namespace, NamespaceId};
use cascade_tier::{CallOptions, StoreError, TierName, WriterId};

use crate::Store;
use crate::core::catalog::KeyIndex;
use crate::core::history::Loss;
use crate::core::state::StoreState;
use crate::insight::prefixes::tiers_with;
use crate::shared::StoreCore;

/// What the description of a block costs a hold of the lock, beside its lookup.
const EXPLAIN_COST: u32 = 1;

/// The state of the blocks of a chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Explanation {
    /// One entry for each key, in order.
    pub blocks: Vec<BlockExplanation>,
    /// Leading blocks that the store has: what a lookup would match.
    pub leading: usize,
    /// Blocks that the store has after the first missing one: no lookup matches them.
    pub behind_gap: usize,
    /// If all blocks are unknown and the caller passed its namespace: how the namespaces that the
    /// store knows differ from it.
    pub namespaces: Vec<NamespaceDifference>,
}

impl Explanation {
    /// The first missing block, at which a lookup stops.
    pub fn first_missing(&self) -> Option<&BlockExplanation> {
        self.blocks.get(self.leading)
    }
}

/// The state of one block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockExplanation {
    /// Key of the block.
    pub key: BlockKey,
    /// Whether the store has the block, and if not, why.
    pub state: BlockState,
}

/// Whether the store has a block, and if not, why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BlockState {
    /// The store has the block.
    Present(PresentBlock),
    /// The store does not have the block any more, or declined it.
    Absent {
        /// The reason.
        why: Loss,
        /// When this happened, in milliseconds since 1970, to the second.
        since_unix_ms: u64,
    },
    /// The store never had the block, or its record has been overwritten by later ones.
    Unknown,
}

/// A block that the store has. Times are milliseconds since 1970, to the second.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PresentBlock {
    /// The readable tiers that have the block, fast to slow. Empty if only stages with an open read
    /// circuit have it.
    pub tiers: Vec<TierName>,
    /// Tiers for which the block is queued to be written.
    pub queued_for: Vec<TierName>,
    /// Length of the block.
    pub bytes: u32,
    /// When its bytes were put. `None` if recovered from an earlier run.
    pub put_unix_ms: Option<u64>,
    /// When its bytes were last read, if ever.
    pub used_unix_ms: Option<u64>,
    /// Number of reads since the put, at most 65,535.
    pub uses: u16,
    /// The writer, if the put named one.
    pub writer: Option<WriterId>,
    /// Number of pins.
    pub pins: u16,
    /// Views and writers that hold its slab now.
    pub holders: usize,
    /// Keys with the same bytes, including this one.
    pub names: u32,
    /// Whether it was put as part of a protected prefix.
    pub is_prefix: bool,
    /// The preceding block of its chain, if the put named one and the store has it.
    pub parent: Option<BlockKey>,
    /// When the block expires, in milliseconds since 1970.
    pub expires_unix_ms: Option<u64>,
}

/// How a namespace that the store knows differs from the caller's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamespaceDifference {
    /// The namespace.
    pub id: NamespaceId,
    /// The fields that differ; `ours` is the caller's value. Empty if the manifests are equal: then
    /// the tenant secrets differ.
    pub fields: Vec<ManifestDifference>,
}

impl Store {
    /// Explains the state of each block of a chain, root first. Does not count as an access, and
    /// changes nothing. With the caller's namespace, it also explains why a whole chain is unknown.
    ///
    /// # Errors
    /// [`StoreError::Timeout`] if the deadline passes before all blocks are explained. As
    /// [`Store::manifests`], which is called only for an unknown chain.
    pub fn explain(
        &self,
        keys: &[BlockKey],
        namespace: Option<&Namespace>,
        options: CallOptions,
    ) -> Result<Explanation, StoreError> {
        let core = self.core();
        let now_unix_ms = core.clock.unix_ms();
        let mut blocks = Vec::with_capacity(keys.len());
        let call = core.call(options);
        let done = core.in_holds(Some(call), keys, |state, key| {
            state.charge(EXPLAIN_COST);
            let state = explain_block(core, state, key, now_unix_ms);
            blocks.push(BlockExplanation { key: *key, state });
        });
        if done < keys.len() {
            return Err(call.timeout_error("explain all blocks of a chain"));
        }
        let is_here = |block: &&BlockExplanation| match &block.state {
            BlockState::Present(here) => !here.tiers.is_empty(),
            BlockState::Absent { .. } | BlockState::Unknown => false,
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

    /// Every other known namespace, the one with the fewest different fields first.
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

fn explain_block(
    core: &StoreCore,
    state: &StoreState,
    key: &BlockKey,
    now_unix_ms: u64,
) -> BlockState {
    match state.catalog.find(key) {
        Some(found) if state.catalog.entry(found).has_expired(now_unix_ms) => {
            let since_unix_ms = state.catalog.entry(found).expires_unix_ms;
            BlockState::Absent { why: Loss::Expired, since_unix_ms }
        }
        Some(found) => BlockState::Present(explain_present(core, state, found)),
        None => state.history.loss_of(key).map_or(BlockState::Unknown, |(why, since_unix_ms)| {
            BlockState::Absent { why, since_unix_ms }
        }),
    }
}

fn explain_present(core: &StoreCore, state: &StoreState, key: KeyIndex) -> PresentBlock {
    let entry = state.catalog.entry(key);
    let content = state.catalog.content(entry.content);
    let name = |tier: usize| core.tier_name(tier);
    let queued = (0..core.stages.len()).filter(|stage| content.dirty & (1 << stage) != 0);
    let parent = state.catalog.parent_of(key);
    // The catalog itself is one holder.
    let holders = content.slab.as_ref().map_or(0, |slab| slab.holders() - 1);
    PresentBlock {
        tiers: tiers_with(state, key).into_iter().map(name).collect(),
        queued_for: queued.map(|stage| name(1 + stage)).collect(),
        bytes: content.bytes,
        put_unix_ms: state.history.unix_ms_of(content.put_stamp),
        used_unix_ms: state.history.unix_ms_of(content.used_stamp),
        uses: content.uses,
        writer: std::num::NonZeroU32::new(content.writer).map(WriterId),
        pins: entry.pins,
        holders,
        names: content.key_count,
        is_prefix: entry.is_prefix(),
        parent: parent.map(|parent| state.catalog.entry(parent).key),
        expires_unix_ms: (entry.expires_unix_ms != 0).then_some(entry.expires_unix_ms),
    }
}
