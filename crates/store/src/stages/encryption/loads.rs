//! Loads of an encrypted stage: records are read into buffers and decrypted as they come.

use cascade_block::BlockKey;
use cascade_memory::SlabMut;
use cascade_runtime::Deadline;
use cascade_tier::tier::{Load, LoadOutcome, LoadQueue, TierError};

use super::EncryptedStage;
use super::record::OVERHEAD;

/// A block whose record is being read.
pub(super) struct Target {
    key: BlockKey,
    slab: SlabMut,
}

/// The loads of one call, as loads of records.
pub(super) struct RecordLoads<'a> {
    pub(super) stage: &'a EncryptedStage,
    pub(super) queue: &'a mut dyn LoadQueue,
    pub(super) deadline: Deadline,
    /// A block that waits for a buffer.
    pub(super) next: Option<(usize, Load)>,
    /// By the number of the block.
    pub(super) targets: Vec<Option<Target>>,
    pub(super) held_bytes: usize,
}

impl LoadQueue for RecordLoads<'_> {
    fn next_load(&mut self) -> Option<(usize, Load)> {
        loop {
            // So that readers and the mover do not wait for each other.
            if self.stage.is_full(self.held_bytes) {
                return None;
            }
            let (number, load) = self.next.take().or_else(|| self.queue.next_load())?;
            let bytes = load.slab.len() + OVERHEAD;
            // Only a call without buffers waits: two that hold some could wait for each other.
            let may_wait = self.held_bytes == 0;
            match self.stage.buffer(bytes, may_wait, self.deadline) {
                Ok(Some(slab)) => {
                    let Load { key, address, slab: target } = load;
                    if number >= self.targets.len() {
                        self.targets.resize_with(number + 1, || None);
                    }
                    self.targets[number] = Some(Target { key, slab: target });
                    self.held_bytes += bytes;
                    return Some((number, Load { key, address, slab: slab.into_slab() }));
                }
                Ok(None) if !may_wait => {
                    self.next = Some((number, load));
                    return None;
                }
                // Not even the first block got a buffer: its separate pool is exhausted.
                Ok(None) => self.queue.ended(number, LoadOutcome::Failed(TierError::Timeout)),
                Err(error) => self.queue.ended(number, LoadOutcome::Failed(error)),
            }
        }
    }

    fn ended(&mut self, number: usize, outcome: LoadOutcome) {
        let target = self.targets.get_mut(number).and_then(Option::take);
        let Some(Target { key, slab }) = target else { return };
        self.held_bytes -= slab.len() + OVERHEAD;
        let outcome = match outcome {
            LoadOutcome::Hit(buffer) => self.stage.unseal(&key, buffer, slab),
            outcome => outcome,
        };
        self.stage.returned.notify_all();
        self.queue.ended(number, outcome);
    }

    fn idle(&mut self) -> bool {
        self.queue.idle()
    }
}
