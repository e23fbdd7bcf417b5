//! Keys of blocks: a function of the seed and of what the block stands for.
//!
//! The bytes of a block are a function of its key (`cascade_replay::payload`), so a seed determines
//! every byte, and no page of 4 KiB occurs twice.

use cascade_block::BlockKey;
use cascade_replay::random::mix;

/// The owners of shared blocks, which no user is.
const PROMPTS: u64 = u64::MAX;
const DOCUMENTS: u64 = u64::MAX - 1;
const PRECONDITION: u64 = u64::MAX - 2;
const OBJECTS: u64 = u64::MAX - 3;

/// Derives the keys of one seed.
#[derive(Debug, Clone, Copy)]
pub struct BlockNames {
    seed: u64,
}

impl BlockNames {
    /// The names of a seed.
    pub fn new(seed: u64) -> Self {
        Self { seed }
    }

    /// A block of a conversation, from its first own block.
    pub fn of_conversation(self, user: u32, conversation: u32, index: u64) -> BlockKey {
        self.key(&[u64::from(user), u64::from(conversation), index])
    }

    /// A block of a shared system prompt.
    pub fn of_prompt(self, prompt: u8, index: u64) -> BlockKey {
        self.key(&[PROMPTS, u64::from(prompt), index])
    }

    /// A block of a document for retrieval.
    pub fn of_document(self, document: u32, index: u64) -> BlockKey {
        self.key(&[DOCUMENTS, u64::from(document), index])
    }

    /// A block that is written before the window and removed again.
    pub fn of_precondition(self, index: u64) -> BlockKey {
        self.key(&[PRECONDITION, 0, index])
    }

    /// A piece of an entry of the original's workload: of a user's conversation and turn.
    pub fn of_object(self, user: u32, turn: [u32; 2], piece: u64) -> BlockKey {
        let [conversation, turn] = turn.map(u64::from);
        self.key(&[OBJECTS, u64::from(user), conversation, turn, piece])
    }

    fn key(self, numbers: &[u64]) -> BlockKey {
        // Each step is one to one in what it adds, so that a key depends on all of it.
        let mut state = mix(self.seed ^ 0x6b76_5f62_656e_6368);
        for number in numbers {
            state = mix(state.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ mix(number.wrapping_add(1)));
        }
        let mut bytes = [0; 32];
        for (at, word) in bytes.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            *word = mix(state.wrapping_add(at as u64)).to_le_bytes();
        }
        BlockKey::from_bytes(bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use cascade_replay::payload;

    use super::*;

    #[test]
    fn keys_differ_by_seed_owner_conversation_and_index() {
        let mut seen = HashSet::new();
        for seed in 0..3 {
            let names = BlockNames::new(seed);
            for user in 0..5 {
                for conversation in 0..5 {
                    for index in 0..20 {
                        assert!(seen.insert(names.of_conversation(user, conversation, index)));
                    }
                }
            }
            for prompt in 0..3 {
                assert!((0..20).all(|index| seen.insert(names.of_prompt(prompt, index))));
                let document = u32::from(prompt);
                assert!((0..20).all(|index| seen.insert(names.of_document(document, index))));
            }
        }
        let again = BlockNames::new(1).of_conversation(2, 3, 4);
        assert!(seen.contains(&again), "a key is a function of what it names");
    }

    /// The original's data were 96.7 % duplicates once, so that a store that deduplicates had
    /// nothing to do.
    #[test]
    fn no_page_of_4_kib_occurs_twice() {
        let names = BlockNames::new(42);
        let mut pages = HashSet::new();
        let mut block = vec![0; 64 << 10];
        for index in 0..64 {
            payload::fill(&names.of_conversation(0, 1, index), &mut block);
            for page in block.chunks(4096) {
                assert!(pages.insert(page.to_vec()), "block {index}");
            }
        }
    }
}
