//! Answers the questions of other nodes about the blocks of this one.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use cascade_block::{BlockKey, checksum};
use cascade_memory::Slab;
use cascade_runtime::{Deadline, SystemClock};
use cascade_transport::{Answers, BlockBytes, EndpointId, Reply};

use crate::message::{Contents, Question, Stated, write_stated};

/// Most time for a question that states no less.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);
/// Bytes of the largest block that is offered: those of one answer.
const BLOCK_BYTES_MAX: usize = 8 << 20;
/// Blocks whose memory is held at once.
const VIEWS_MAX: usize = 64;

/// The blocks of this node.
pub trait LocalBlocks: Send + Sync {
    /// Views of the blocks that are in DRAM, without an effect on what is evicted; one for each
    /// key.
    fn view(&self, keys: &[BlockKey], timeout: Duration) -> Vec<Option<Slab>>;

    /// What the node keeps.
    fn contents(&self) -> Contents;
}

/// Answers the questions of other nodes. Until its blocks are set it has none.
#[derive(Default)]
pub struct Owner(OnceLock<Arc<dyn LocalBlocks>>);

impl fmt::Debug for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Owner({})", if self.0.get().is_some() { "with blocks" } else { "no blocks yet" })
    }
}

impl Owner {
    /// Sets the blocks. Only the first call has an effect.
    pub fn set(&self, blocks: Arc<dyn LocalBlocks>) {
        self.0.get_or_init(|| blocks);
    }

    fn answer(&self, question: &Question, targets: &[u32]) -> Reply {
        let Some(blocks) = self.0.get() else { return Reply::default() };
        match question {
            Question::Contents => Reply { text: blocks.contents().to_bytes(), blocks: vec![] },
            Question::Locate { keys, within } => {
                let within = (*within).min(ANSWER_TIMEOUT);
                Reply { text: write_stated(&stated(&**blocks, keys, within)), blocks: vec![] }
            }
            Question::Fetch { blocks: wanted } => {
                Reply { text: vec![], blocks: fetched(&**blocks, wanted, targets) }
            }
        }
    }
}

impl Answers for Owner {
    fn answer(&self, _: EndpointId, question: &[u8], targets: &[u32]) -> Reply {
        // A question that is not understood, such as one of a later version, gets an empty text.
        Question::parse(question).map_or_else(Reply::default, |it| self.answer(&it, targets))
    }
}

/// Length and checksum of the blocks that are there. A block whose checksum nobody has computed so
/// far is read once. What is not done by a quarter of the time is left out: the answer has to
/// arrive, and other questions wait behind it.
fn stated(blocks: &dyn LocalBlocks, keys: &[BlockKey], within: Duration) -> Vec<Option<Stated>> {
    let until = Deadline::after(&SystemClock, within / 4);
    let mut all = Vec::with_capacity(keys.len());
    for keys in keys.chunks(VIEWS_MAX) {
        let left = until.remaining(&SystemClock);
        if left.is_zero() {
            break;
        }
        for view in blocks.view(keys, left) {
            let is_late = until.has_passed(&SystemClock);
            all.push(view.and_then(|block| state(&block, is_late)));
        }
    }
    all.resize(keys.len(), None);
    all
}

fn state(block: &Slab, is_late: bool) -> Option<Stated> {
    let bytes = block.host().filter(|bytes| bytes.len() <= BLOCK_BYTES_MAX)?;
    let sum = match block.checksum() {
        Some(sum) => sum,
        None if is_late => return None,
        None => {
            let sum = checksum(bytes);
            // Records it, for the next question.
            block.verify_checksum(sum);
            sum
        }
    };
    Some(Stated { bytes: u32::try_from(bytes.len()).ok()?, checksum: sum })
}

/// The blocks that are as they were stated, as many as one answer may have.
fn fetched(
    blocks: &dyn LocalBlocks,
    wanted: &[(BlockKey, u32)],
    targets: &[u32],
) -> Vec<(u32, Box<dyn BlockBytes>)> {
    let wanted = &wanted[..wanted.len().min(targets.len()).min(VIEWS_MAX)];
    let keys: Vec<BlockKey> = wanted.iter().map(|(key, _)| *key).collect();
    let views = blocks.view(&keys, ANSWER_TIMEOUT).into_iter();
    let mut found: Vec<(u32, Box<dyn BlockBytes>)> = Vec::new();
    for (((_, sum), target), (view, number)) in wanted.iter().zip(targets).zip(views.zip(0..)) {
        let Some(block) = view else { continue };
        let is_it = block.len() == *target as usize && block.checksum() == Some(*sum);
        if is_it && block.host().is_some() {
            found.push((number, Box::new(SentBlock(block))));
        }
    }
    found
}

/// A block in host memory, which nobody evicts while it is sent.
struct SentBlock(Slab);

impl BlockBytes for SentBlock {
    fn bytes(&self) -> &[u8] {
        // Checked before it was made.
        self.0.host().unwrap_or_default()
    }
}
