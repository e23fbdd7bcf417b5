//! The name of an entry, its file and its bytes: a function of the seed and of what it stands for.

use cascade_block::BlockKey;
use cascade_replay::payload;

use crate::block_names::BlockNames;

/// Bytes that are moved between a file and memory at once. It bounds the memory of a thread.
pub const PIECE_BYTES: usize = 4 << 20;

/// What the KV of an entry stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EntryName {
    /// A turn of a conversation.
    Turn {
        /// The user.
        user: u32,
        /// The conversation, counted by user.
        conversation: u32,
        /// The turn.
        turn: u32,
    },
    /// A context that is stored before the window, for decode alone.
    Context(u32),
    /// What preconditioning writes.
    Precondition(u32),
    /// A chunk of a document.
    Chunk {
        /// The document.
        document: u32,
        /// The chunk, from 0.
        chunk: u32,
    },
    /// The context of questions about a document.
    Question(u32),
}

impl EntryName {
    /// The name in a log of operations.
    pub fn text(self) -> String {
        match self {
            Self::Turn { user, conversation, turn } => {
                format!("user-{user}-conversation-{conversation}-turn-{turn}")
            }
            Self::Context(number) => format!("context-{number}"),
            Self::Precondition(number) => format!("precondition-{number}"),
            Self::Chunk { document, chunk } => format!("document-{document}-chunk-{chunk}"),
            Self::Question(document) => format!("document-{document}-question"),
        }
    }

    /// The name of its file.
    pub fn file_name(self) -> String {
        self.text() + ".kv"
    }

    /// The key of a piece. It determines the bytes of the piece.
    pub fn key(self, names: BlockNames, piece: u64) -> BlockKey {
        let (user, conversation, turn) = match self {
            Self::Turn { user, conversation, turn } => (user, conversation, turn),
            // No user has a conversation 0.
            Self::Context(number) => (number, 0, 0),
            Self::Precondition(number) => (number, 0, 1),
            Self::Question(document) => (document, 0, 2),
            Self::Chunk { document, chunk } => (document, 0, chunk.saturating_add(3)),
        };
        names.of_object(user, [conversation, turn], piece)
    }

    /// Fills a piece with its bytes.
    pub fn fill(self, names: BlockNames, piece: u64, bytes: &mut [u8]) {
        payload::fill(&self.key(names, piece), bytes);
    }

    /// The offset in the entry of the first byte of a piece that is wrong.
    pub fn first_wrong(self, names: BlockNames, piece: u64, bytes: &[u8]) -> Option<u64> {
        let wrong = payload::check(&self.key(names, piece), bytes, bytes.len()).err()?;
        Some(piece * PIECE_BYTES as u64 + wrong.offset as u64)
    }
}

/// The pieces of an entry: each number with its length.
pub fn pieces(bytes: u64) -> impl Iterator<Item = (u64, usize)> {
    let piece = PIECE_BYTES as u64;
    (0..bytes.div_ceil(piece)).map(move |number| {
        let length = (bytes - number * piece).min(piece);
        (number, usize::try_from(length).unwrap_or(PIECE_BYTES))
    })
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn no_page_of_4_kib_occurs_twice_in_or_between_entries() {
        let names = BlockNames::new(42);
        let turn = |turn| EntryName::Turn { user: 0, conversation: 1, turn };
        let mut pages = HashSet::new();
        let mut bytes = vec![0; 64 << 10];
        for name in [turn(1), turn(2), EntryName::Context(0), EntryName::Precondition(0)] {
            for piece in 0..4 {
                name.fill(names, piece, &mut bytes);
                assert!(bytes.chunks(4096).all(|page| pages.insert(page.to_vec())), "{name:?}");
            }
        }
    }

    #[test]
    fn a_wrong_byte_is_found_at_its_offset_in_the_entry() {
        let (names, name) = (BlockNames::new(1), EntryName::Context(7));
        let mut bytes = vec![0; 1000];
        name.fill(names, 2, &mut bytes);
        assert_eq!(name.first_wrong(names, 2, &bytes), None);
        bytes[900] ^= 1;
        assert_eq!(name.first_wrong(names, 2, &bytes), Some(2 * PIECE_BYTES as u64 + 900));
    }

    #[test]
    fn pieces_cover_an_entry() {
        for bytes in [0, 1, PIECE_BYTES as u64, PIECE_BYTES as u64 * 3 + 5] {
            let all: Vec<_> = pieces(bytes).collect();
            assert_eq!(all.iter().map(|(_, length)| *length as u64).sum::<u64>(), bytes);
            assert!(all.iter().all(|(_, length)| (1..=PIECE_BYTES).contains(length)));
        }
    }
}
