//! The texts of questions between nodes, and of their answers. Numbers are little endian.

use std::time::Duration;

use cascade_block::BlockKey;

/// The version of these texts. A node answers another one with nothing.
const VERSION: u8 = 1;
const HEAD_BYTES: usize = 8;
const KEY_BYTES: usize = 32;
/// The length of a block that is not there.
const ABSENT: u32 = u32::MAX;

/// Keys of one question.
pub(crate) const KEYS_MAX: usize = 2048;

/// A question of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Question {
    /// What it keeps, as a whole.
    Contents,
    /// Which of these blocks it has in DRAM. An answer later than this is of no use.
    Locate { keys: Vec<BlockKey>, within: Duration },
    /// The bytes of blocks, each with the checksum that was stated.
    Fetch { blocks: Vec<(BlockKey, u32)> },
}

/// What a node keeps, as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Contents {
    /// Identifies this run of the node.
    pub epoch: u64,
    /// Blocks in DRAM.
    pub blocks: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// A block that a node has: its length and the CRC-32C of its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stated {
    pub(crate) bytes: u32,
    pub(crate) checksum: u32,
}

impl Question {
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let (kind, within) = match self {
            Self::Contents => (1, Duration::ZERO),
            Self::Locate { within, .. } => (2, *within),
            Self::Fetch { .. } => (3, Duration::ZERO),
        };
        let mut text = vec![VERSION, kind, 0, 0];
        let within = u32::try_from(within.as_millis()).unwrap_or(u32::MAX);
        text.extend(within.to_le_bytes());
        match self {
            Self::Contents => {}
            Self::Locate { keys, .. } => keys.iter().for_each(|key| text.extend(key.as_bytes())),
            Self::Fetch { blocks } => {
                for (key, checksum) in blocks {
                    text.extend(key.as_bytes());
                    text.extend(checksum.to_le_bytes());
                }
            }
        }
        text
    }

    /// Reads a question; `None` if it is of another version or is none.
    pub(crate) fn parse(text: &[u8]) -> Option<Self> {
        let (head, rest) = text.split_at_checked(HEAD_BYTES)?;
        let keys = |bytes: usize| {
            let is_whole = rest.len().is_multiple_of(bytes) && rest.len() / bytes <= KEYS_MAX;
            is_whole.then(|| rest.chunks_exact(bytes))
        };
        match head {
            [VERSION, 1, ..] if rest.is_empty() => Some(Self::Contents),
            [VERSION, 2, ..] => Some(Self::Locate {
                keys: keys(KEY_BYTES)?.map(key_of).collect::<Option<_>>()?,
                within: Duration::from_millis(u32_at(head, 4)?.into()),
            }),
            [VERSION, 3, ..] => {
                let block = |entry| Some((key_of(entry)?, u32_at(entry, KEY_BYTES)?));
                Some(Self::Fetch {
                    blocks: keys(KEY_BYTES + 4)?.map(block).collect::<Option<_>>()?,
                })
            }
            _ => None,
        }
    }
}

impl Contents {
    pub(crate) fn to_bytes(self) -> Vec<u8> {
        let mut text = vec![VERSION];
        for number in [self.epoch, self.blocks, self.bytes] {
            text.extend(number.to_le_bytes());
        }
        text
    }

    pub(crate) fn parse(text: &[u8]) -> Option<Self> {
        let (version, rest) = text.split_first()?;
        let (numbers, _) = rest.as_chunks::<8>();
        let [epoch, blocks, bytes, ..] = *numbers else { return None };
        let [epoch, blocks, bytes] = [epoch, blocks, bytes].map(u64::from_le_bytes);
        (*version == VERSION).then_some(Self { epoch, blocks, bytes })
    }
}

/// The answer which blocks there are: one for each key.
pub(crate) fn write_stated(blocks: &[Option<Stated>]) -> Vec<u8> {
    let mut text = vec![VERSION];
    for block in blocks {
        let block = block.unwrap_or(Stated { bytes: ABSENT, checksum: 0 });
        text.extend(block.bytes.to_le_bytes());
        text.extend(block.checksum.to_le_bytes());
    }
    text
}

/// Reads such an answer for this many keys.
pub(crate) fn read_stated(text: &[u8], count: usize) -> Option<Vec<Option<Stated>>> {
    let (version, rest) = text.split_first()?;
    let (entries, tail) = rest.as_chunks::<8>();
    if *version != VERSION || entries.len() != count || !tail.is_empty() {
        return None;
    }
    let block = |entry: &[u8; 8]| {
        let stated = Stated { bytes: u32_at(entry, 0)?, checksum: u32_at(entry, 4)? };
        (stated.bytes != ABSENT).then_some(stated)
    };
    Some(entries.iter().map(block).collect())
}

fn key_of(bytes: &[u8]) -> Option<BlockKey> {
    Some(BlockKey::from_bytes(*bytes.first_chunk()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn key() -> impl Strategy<Value = BlockKey> {
        any::<[u8; 32]>().prop_map(BlockKey::from_bytes)
    }

    fn question() -> impl Strategy<Value = Question> {
        let locate = (prop::collection::vec(key(), 0..9), any::<u32>()).prop_map(|(keys, ms)| {
            Question::Locate { keys, within: Duration::from_millis(ms.into()) }
        });
        let blocks = prop::collection::vec((key(), any::<u32>()), 0..9);
        let fetch = blocks.prop_map(|blocks| Question::Fetch { blocks });
        prop_oneof![Just(Question::Contents), locate, fetch]
    }

    proptest! {
        #[test]
        fn questions_come_back(question in question()) {
            prop_assert_eq!(Question::parse(&question.to_bytes()), Some(question));
        }

        #[test]
        fn a_question_that_is_cut_or_longer_is_none(question in question(), by in 1_usize..4) {
            let mut text = question.to_bytes();
            let whole = text.len();
            text.resize(whole + by, 0);
            prop_assert_eq!(Question::parse(&text), None);
            text.truncate(whole - by);
            prop_assert_eq!(Question::parse(&text), None);
        }

        #[test]
        fn answers_come_back(
            blocks in prop::collection::vec(prop::option::of((0..ABSENT, any::<u32>())), 0..9),
            epoch: u64, count: u64, bytes: u64,
        ) {
            let stated = |(bytes, checksum)| Stated { bytes, checksum };
            let blocks: Vec<_> = blocks.into_iter().map(|block| block.map(stated)).collect();
            let text = write_stated(&blocks);
            prop_assert_eq!(read_stated(&text, blocks.len() + 1), None);
            prop_assert_eq!(read_stated(&text, blocks.len()), Some(blocks));
            let contents = Contents { epoch, blocks: count, bytes };
            prop_assert_eq!(Contents::parse(&contents.to_bytes()), Some(contents));
        }

        #[test]
        fn noise_is_refused_or_read_without_a_panic(
            text in prop::collection::vec(any::<u8>(), 0..99),
        ) {
            drop((Question::parse(&text), Contents::parse(&text), read_stated(&text, 3)));
        }
    }

    #[test]
    fn another_version_and_too_many_keys_are_refused() {
        let keys = vec![BlockKey::from_bytes([7; 32]); KEYS_MAX + 1];
        let question = Question::Locate { keys, within: Duration::ZERO };
        assert_eq!(Question::parse(&question.to_bytes()), None);
        let mut text = Question::Contents.to_bytes();
        text[0] += 1;
        assert_eq!(Question::parse(&text), None);
        assert_eq!(read_stated(&[2], 0), None);
        assert_eq!(Contents::parse(&[2; 25]), None);
    }
}
