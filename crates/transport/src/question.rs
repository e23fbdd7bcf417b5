//! Questions to a peer: a text there, a text back, and blocks that go straight into memory.

use std::fmt;

use cascade_runtime::{Cancel, Deadline};

use crate::peer::EndpointId;

/// Bytes of a question, and of the text of an answer.
pub const QUESTION_BYTES_MAX: usize = 128 << 10;
/// Blocks of one answer.
pub const ANSWER_BLOCKS_MAX: usize = 4096;

/// Answers the questions of peers.
///
/// It is called on the thread of the connection, whose next frame waits meanwhile: an answer that
/// takes long delays the other batches of that connection, and no other peer.
pub trait Answers: Send + Sync {
    /// Answers a question of an endpoint that was admitted. `targets` is the length of the memory
    /// that the peer offers for each block.
    fn answer(&self, peer: EndpointId, question: &[u8], targets: &[u32]) -> Reply;
}

/// Memory of a block that is sent. It does not change while this lives.
pub trait BlockBytes: Send + Sync {
    /// The bytes.
    fn bytes(&self) -> &[u8];
}

impl BlockBytes for Vec<u8> {
    fn bytes(&self) -> &[u8] {
        self
    }
}

/// What is sent back.
#[derive(Default)]
pub struct Reply {
    /// A text in the words of the program; at most [`QUESTION_BYTES_MAX`].
    pub text: Vec<u8>,
    /// Blocks with the number of the target of each, in ascending order. Each has the length of its
    /// target. All blocks together have at most 8 MiB; what is beyond that is not sent.
    pub blocks: Vec<(u32, Box<dyn BlockBytes>)>,
}

impl fmt::Debug for Reply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (text, blocks) = (self.text.len(), self.blocks.len());
        write!(f, "Reply({text} bytes of text, {blocks} blocks)")
    }
}

/// How long a caller waits for an answer.
#[derive(Debug, Clone, Copy)]
pub struct AskLimit<'a> {
    /// Until this time.
    pub deadline: Deadline,
    /// Until this is set, which is looked at every 50 ms.
    pub cancel: Option<&'a Cancel>,
}

impl AskLimit<'_> {
    /// Until this time.
    pub const fn until(deadline: Deadline) -> Self {
        Self { deadline, cancel: None }
    }
}

/// The answer to a question.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// The text of the peer.
    pub text: Vec<u8>,
    /// The targets that were filled, whose checksums match, in ascending order. The bytes of the
    /// others are undefined.
    pub filled: Vec<u32>,
}
