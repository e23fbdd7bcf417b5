//! What sources have said about blocks: hints for the reads that follow a lookup.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use cascade_block::BlockKey;
use cascade_tier::source::LocatedBlock;

/// Maximum number of hints; beyond it the oldest are dropped.
const HINTS_MAX: usize = 32 << 10;
/// How long a hint is used. A read without a hint asks the sources again.
const HINT_TIME: Duration = Duration::from_secs(5);

/// A block that a source has.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FoundBlock {
    pub(crate) source: usize,
    pub(crate) block: LocatedBlock,
    /// Whether a lookup has counted it as requested and matched.
    pub(crate) is_matched: bool,
}

/// The latest hints by key.
#[derive(Debug, Default)]
pub(crate) struct LocatedBlocks {
    by_key: BTreeMap<BlockKey, (FoundBlock, Duration)>,
    /// Keys with the ends of their hints, oldest first.
    order: VecDeque<(Duration, BlockKey)>,
}

impl LocatedBlocks {
    pub(crate) fn add(&mut self, found: FoundBlock, now: Duration) {
        while let Some((until, key)) = self.order.front().copied()
            && (until <= now || self.order.len() >= HINTS_MAX)
        {
            self.order.pop_front();
            if self.by_key.get(&key).is_some_and(|(_, of_key)| *of_key == until) {
                self.by_key.remove(&key);
            }
        }
        let (key, until) = (found.block.facts.key, now.saturating_add(HINT_TIME));
        self.by_key.insert(key, (found, until));
        self.order.push_back((until, key));
    }

    pub(crate) fn get(&self, key: &BlockKey, now: Duration) -> Option<FoundBlock> {
        let (found, until) = self.by_key.get(key)?;
        (now < *until).then_some(*found)
    }

    /// The source does not have the block any more, or the store has it.
    pub(crate) fn remove(&mut self, key: &BlockKey) {
        self.by_key.remove(key);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.by_key.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use cascade_block::NamespaceId;
    use cascade_tier::tier::{Address, BlockFacts};

    use super::*;

    fn found(n: u64) -> FoundBlock {
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&n.to_le_bytes());
        let facts = BlockFacts {
            key: BlockKey::from_bytes(bytes),
            digest: None,
            parent: None,
            namespace: NamespaceId::default(),
            bytes: 1,
            is_prefix: false,
            written_unix_ms: 0,
            expires_unix_ms: None,
        };
        let block = LocatedBlock { facts, checksum: 0, address: Address(n) };
        FoundBlock { source: 0, block, is_matched: true }
    }

    #[test]
    fn hints_end_by_time_and_by_number() {
        let mut hints = LocatedBlocks::default();
        let key = |n| found(n).block.facts.key;
        hints.add(found(0), Duration::ZERO);
        let almost = HINT_TIME.saturating_sub(Duration::from_nanos(1));
        assert!(hints.get(&key(0), almost).is_some());
        assert!(hints.get(&key(0), HINT_TIME).is_none());
        hints.add(found(1), HINT_TIME);
        assert_eq!((hints.by_key.len(), hints.order.len()), (1, 1));
        for n in 2..=HINTS_MAX as u64 + 1 {
            hints.add(found(n), HINT_TIME);
        }
        assert_eq!((hints.by_key.len(), hints.order.len()), (HINTS_MAX, HINTS_MAX));
        assert!(hints.get(&key(1), HINT_TIME).is_none());
        assert!(hints.get(&key(2), HINT_TIME).is_some());
    }

    /// The end of the first hint is not the end of the second.
    #[test]
    fn a_hint_that_is_given_again_lasts_as_long_as_a_new_one() {
        let mut hints = LocatedBlocks::default();
        let half = HINT_TIME / 2;
        hints.add(found(0), Duration::ZERO);
        hints.add(found(0), half);
        hints.add(found(1), HINT_TIME);
        assert!(hints.get(&found(0).block.facts.key, HINT_TIME).is_some());
    }
}
