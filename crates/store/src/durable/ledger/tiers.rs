//! Which tier of the ledger each stage of the pipeline is.
//!
//! An address belongs to a tier by the tier's name, which the header has as a hash: a pipeline that
//! was changed between two runs must not give the addresses of one stage to another.

use std::sync::atomic::{AtomicU64, Ordering};

use cascade_block::{Digest, DigestAlgorithm};

use super::LedgerTable;
use super::place::set;
use super::recovery::Recovered;
use super::residence::{INLINE_TIERS, clear_inline, clear_outside};
use crate::core::catalog::LOWER_STAGES_MAX;

/// First word of the hashes of the names in the header; zero for no tier.
const NAMES_WORD: usize = 16;

/// The tier of the ledger of each stage, by stage.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct LedgerTiers([u8; LOWER_STAGES_MAX]);

impl LedgerTiers {
    /// Finds the tiers of the stages, adds new ones, and drops those that the pipeline no longer
    /// has, with the addresses of the recovered blocks there. The addresses go first: a kill leaves
    /// none in a tier of another name.
    pub(super) fn settle(table: &LedgerTable, stages: &[String], blocks: &mut [Recovered]) -> Self {
        let hashes: Vec<u64> = stages.iter().map(|name| hash_of(name)).collect();
        let words = names(table);
        let mut names: [u64; LOWER_STAGES_MAX] =
            std::array::from_fn(|tier| words[tier].load(Ordering::Relaxed));
        for tier in 0..LOWER_STAGES_MAX {
            let is_first = !names[..tier].contains(&names[tier]);
            if !is_first || !hashes.contains(&names[tier]) {
                for block in &mut *blocks {
                    forget_address(table, block, tier);
                }
                names[tier] = 0;
                set(&words[tier], 0, Ordering::Release);
            }
        }
        let mut tiers = Self::default();
        for (of_stage, hash) in tiers.0.iter_mut().zip(&hashes) {
            let known = names.iter().position(|name| name == hash);
            let tier = known
                .or_else(|| names.iter().position(|name| *name == 0))
                .expect("the ledger has as many tiers as a pipeline");
            names[tier] = *hash;
            *of_stage = u8::try_from(tier).expect("a few tiers");
        }
        for (word, name) in words.iter().zip(names) {
            set(word, name, Ordering::Release);
        }
        for block in blocks {
            let stored = block.record.stored;
            let of = |stage| if stage < stages.len() { stored[tiers.of(stage)] } else { 0 };
            block.stored = std::array::from_fn(of);
        }
        tiers
    }

    /// The tier of a stage.
    pub(super) fn of(self, stage: usize) -> usize {
        usize::from(self.0[stage])
    }
}

fn names(table: &LedgerTable) -> &[AtomicU64] {
    &table.files.words().words()[NAMES_WORD..NAMES_WORD + LOWER_STAGES_MAX]
}

/// Removes the address of a recovered block in a tier.
fn forget_address(table: &LedgerTable, block: &mut Recovered, tier: usize) {
    if std::mem::take(&mut block.record.stored[tier]) == 0 {
        return;
    }
    match block.continuation {
        _ if tier < INLINE_TIERS => clear_inline(table.block(block.place), tier),
        Some(place) => clear_outside(table.block(place), tier),
        None => {}
    }
}

/// Identifies a tier by its name. Never zero.
fn hash_of(name: &str) -> u64 {
    let digest = Digest::of(DigestAlgorithm::Blake3, name.as_bytes());
    let first = digest.as_bytes().first_chunk().expect("a digest has 32 bytes");
    u64::from_le_bytes(*first).max(1)
}
