//! The table of resident blocks, which the mechanism shares with every policy.

mod adoption;
mod parking;
#[cfg(test)]
mod tests;

use super::chunks::Chunks;
use super::{RequestedBlock, Visits};
pub(super) use adoption::ChainWalk;
pub use parking::ParkReason;

/// The place of a resident block in the table; reused once the block is removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(u32);

/// Result of a policy's search for a victim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Search {
    /// The first candidate. It stays until it is removed.
    Found(Slot),
    /// The visits are used up; the next call goes on.
    Unfinished,
    /// There is no candidate.
    None,
}

/// No slot: the end of a list, or a block without parent.
const NONE: u32 = u32::MAX;

/// Most slots of deleted blocks that one operation frees. The rest is freed by later operations.
const FREED_MAX: usize = 16;

/// Most ancestors of a chain's first block that a request visits. With more, the block loses its
/// parent.
const ANCESTORS_ABOVE_MAX: usize = 256;

/// What a correction of a parent costs beyond the visit of the block.
const ADOPTION_VISITS: usize = 2;

/// Most blocks that a table holds.
pub const BLOCKS_MAX: usize = (NONE - 1) as usize;

impl Slot {
    /// Its number. Numbers are dense, so that a policy may index by them.
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    pub(crate) fn some(raw: u32) -> Option<Self> {
        (raw != NONE).then_some(Self(raw))
    }

    pub(crate) fn raw(slot: Option<Self>) -> u32 {
        slot.map_or(NONE, |slot| slot.0)
    }
}

/// One entry: 40 bytes, so that a million blocks take 40 MB.
#[derive(Debug, Clone)]
struct Block {
    fingerprint: u64,
    owner: u32,
    parent: u32,
    children: u32,
    bytes: u32,
    older: u32,
    newer: u32,
    state: u32,
    status: SlotStatus,
    /// Whether the current request visited the block, or an ancestor of its first block.
    is_visited: bool,
    /// Why the block is no candidate for eviction now, apart from children.
    parked: Option<ParkReason>,
    /// Whether `BlockTable::parked` has the slot. Belongs to the slot, not to its block.
    is_in_parked: bool,
}

const _: () = assert!(size_of::<Block>() == 40, "a million blocks take 40 MB");

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SlotStatus {
    Free,
    Ordinary,
    Protected,
    /// Deleted while children were resident: the slot stays in use until they are removed, so that
    /// their parent slot never holds another block.
    Orphaning,
}

/// Describes a block to insert.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Incoming {
    /// The caller's number for it, returned when it is chosen as a victim.
    pub owner: u32,
    /// Eight bytes of its key.
    pub fingerprint: u64,
    /// The previous block of its chain, if that is resident.
    pub parent: Option<Slot>,
    /// Its size.
    pub bytes: u32,
    /// Whether it belongs to a protected prefix.
    pub is_protected: bool,
}

/// All resident blocks. Policies read the table, keep a number per block in it, and link blocks
/// into their [`BlockList`]s through it.
#[derive(Debug, Default)]
pub struct BlockTable {
    table: Chunks<Block>,
    free: Chunks<u32>,
    resident: usize,
    bytes: u64,
    /// Blocks that still count a child that was freed: its parents above them are freed later.
    unfinished: Chunks<u32>,
    /// Ordinary and protected leaves that are not parked: all candidates for eviction.
    candidates: [usize; 2],
    /// Slots of parked blocks, and some whose block is not parked any more.
    parked: Chunks<u32>,
    /// Number of parked blocks by reason.
    parked_counts: [usize; 2],
    /// Parents corrected since the start.
    adoptions: u64,
    /// Whether blocks are marked as visited, by one request.
    has_marks: bool,
    /// Ancestors visited in corrections of parents, for tests of their cost.
    #[cfg(test)]
    pub(super) visits: usize,
}

impl BlockTable {
    /// Number of resident blocks.
    pub fn len(&self) -> usize {
        self.resident
    }

    /// Whether no block is resident.
    pub fn is_empty(&self) -> bool {
        self.resident == 0
    }

    /// Bytes of all resident blocks.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Number of slots ever used: every [`Slot::index`] is below it.
    pub fn slots(&self) -> usize {
        self.table.len()
    }

    /// The caller's number for a block.
    pub fn owner(&self, slot: Slot) -> u32 {
        self.table[slot.index()].owner
    }

    /// Eight bytes of a block's key.
    pub fn fingerprint(&self, slot: Slot) -> u64 {
        self.table[slot.index()].fingerprint
    }

    /// Size of a block.
    pub fn bytes_of(&self, slot: Slot) -> u32 {
        self.table[slot.index()].bytes
    }

    /// The previous block of its chain, if that is resident.
    pub fn parent(&self, slot: Slot) -> Option<Slot> {
        Slot::some(self.table[slot.index()].parent).filter(|parent| self.is_resident(*parent))
    }

    /// The previous slot of its chain, which may be one of a block that was removed meanwhile.
    pub(super) fn next_ancestor(&self, slot: Slot) -> Option<Slot> {
        Slot::some(self.table[slot.index()].parent)
    }

    /// Whether a slot holds a block.
    pub fn is_resident(&self, slot: Slot) -> bool {
        let status = self.table.get(slot.index()).map(|block| block.status);
        matches!(status, Some(SlotStatus::Ordinary | SlotStatus::Protected))
    }

    /// Whether a slot holds a block with this fingerprint.
    pub fn holds(&self, slot: Slot, fingerprint: u64) -> bool {
        self.is_resident(slot) && self.fingerprint(slot) == fingerprint
    }

    /// Whether no resident block follows it in a chain: only leaves may be evicted.
    pub fn is_leaf(&self, slot: Slot) -> bool {
        self.table[slot.index()].children == 0
    }

    /// Whether the block is protected: evicted last, and in no policy's list.
    pub fn is_protected(&self, slot: Slot) -> bool {
        self.table[slot.index()].status == SlotStatus::Protected
    }

    /// The policy's number for a block; initially zero.
    pub fn state(&self, slot: Slot) -> u32 {
        self.table[slot.index()].state
    }

    /// Changes the policy's number for a block.
    pub fn set_state(&mut self, slot: Slot, state: u32) {
        self.table[slot.index()].state = state;
    }

    /// Memory of the table, including spare capacity.
    pub fn memory_bytes(&self) -> usize {
        let lists = [&self.free, &self.unfinished, &self.parked];
        self.table.memory_bytes() + lists.map(Chunks::memory_bytes).iter().sum::<usize>()
    }

    pub(super) fn insert(&mut self, incoming: &Incoming, is_protected: bool) -> Slot {
        // A slot that was freed may be reused, so a child must not name it.
        let parent = incoming.parent.filter(|parent| self.is_resident(*parent));
        let block = Block {
            fingerprint: incoming.fingerprint,
            owner: incoming.owner,
            parent: Slot::raw(parent),
            children: 0,
            bytes: incoming.bytes,
            older: NONE,
            newer: NONE,
            state: 0,
            status: if is_protected { SlotStatus::Protected } else { SlotStatus::Ordinary },
            is_visited: false,
            parked: None,
            is_in_parked: false,
        };
        if let Some(parent) = parent {
            self.add_child(parent);
        }
        self.resident += 1;
        self.bytes += u64::from(incoming.bytes);
        self.candidates[usize::from(is_protected)] += 1;
        if let Some(index) = self.free.pop() {
            let is_in_parked = self.table[index as usize].is_in_parked;
            self.table[index as usize] = Block { is_in_parked, ..block };
            return Slot(index);
        }
        assert!(self.table.len() < BLOCKS_MAX, "more than {BLOCKS_MAX} blocks in one tier");
        self.table.push(block);
        Slot(u32::try_from(self.table.len() - 1).expect("BLOCKS_MAX is below u32::MAX"))
    }

    /// Removes a block, which must be in no list. Returns the resident parent that became a leaf by
    /// this, if any.
    pub(super) fn remove(&mut self, slot: Slot) -> Option<Slot> {
        self.unpark(slot);
        if self.is_leaf(slot) {
            self.candidates[usize::from(self.is_protected(slot))] -= 1;
        }
        self.resident -= 1;
        self.bytes -= u64::from(self.bytes_of(slot));
        if self.is_leaf(slot) {
            return self.release(slot);
        }
        self.table[slot.index()].status = SlotStatus::Orphaning;
        None
    }

    fn add_child(&mut self, parent: Slot) {
        if self.is_candidate(parent) {
            self.candidates[usize::from(self.is_protected(parent))] -= 1;
        }
        self.table[parent.index()].children += 1;
    }

    fn release(&mut self, slot: Slot) -> Option<Slot> {
        let parent = Slot::some(self.table[slot.index()].parent);
        self.table[slot.index()].status = SlotStatus::Free;
        self.free.push(slot.0);
        parent.and_then(|parent| self.remove_child(parent))
    }

    /// Frees further slots of deleted blocks, if an operation left some. Returns the resident
    /// parent that became a leaf by this, if any.
    pub(super) fn free_unfinished(&mut self) -> Option<Slot> {
        let parent = self.unfinished.pop()?;
        self.remove_child(Slot(parent))
    }

    /// Counts one child less. Frees deleted parents that waited for their last child, up the chain.
    /// Returns the first resident parent that became a leaf.
    fn remove_child(&mut self, mut parent: Slot) -> Option<Slot> {
        for _ in 0..FREED_MAX {
            let block = &mut self.table[parent.index()];
            block.children -= 1;
            if block.children > 0 {
                return None;
            }
            // A resident parent is a leaf now. A deleted one has waited for this child.
            if block.status != SlotStatus::Orphaning {
                if self.is_candidate(parent) {
                    self.candidates[usize::from(self.is_protected(parent))] += 1;
                }
                return Some(parent);
            }
            block.status = SlotStatus::Free;
            self.free.push(parent.0);
            parent = Slot::some(block.parent)?;
        }
        // A chain that was deleted from its root on is freed at once by its last block. It may be
        // long, so the rest is freed by later operations. Until then the parent counts the freed
        // child, so that its slot stays in use.
        self.unfinished.push(parent.0);
        None
    }
}

/// An ordered list of blocks, linked through the table. A block is in at most one list.
#[derive(Debug, Clone, Copy)]
pub struct BlockList {
    oldest: u32,
    newest: u32,
    len: usize,
}

impl Default for BlockList {
    fn default() -> Self {
        Self { oldest: NONE, newest: NONE, len: 0 }
    }
}

impl BlockList {
    /// Number of blocks.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The oldest block, the first candidate.
    pub fn oldest(&self) -> Option<Slot> {
        Slot::some(self.oldest)
    }

    /// The newest block, the last candidate.
    pub fn newest(&self) -> Option<Slot> {
        Slot::some(self.newest)
    }

    /// The next one toward the newest.
    pub fn newer(blocks: &BlockTable, slot: Slot) -> Option<Slot> {
        Slot::some(blocks.table[slot.index()].newer)
    }

    /// Adds a block at the newest end.
    pub fn push_newest(&mut self, blocks: &mut BlockTable, slot: Slot) {
        self.link(blocks, slot, self.newest, NONE);
    }

    /// Adds a block at the oldest end.
    pub fn push_oldest(&mut self, blocks: &mut BlockTable, slot: Slot) {
        self.link(blocks, slot, NONE, self.oldest);
    }

    /// Adds a block right before `anchor`, which is in this list.
    pub fn push_before(&mut self, blocks: &mut BlockTable, slot: Slot, anchor: Slot) {
        let older = blocks.table[anchor.index()].older;
        self.link(blocks, slot, older, anchor.0);
    }

    /// Removes a block, which is in this list.
    pub fn remove(&mut self, blocks: &mut BlockTable, slot: Slot) {
        let block = &mut blocks.table[slot.index()];
        let (older, newer) = (block.older, block.newer);
        block.older = NONE;
        block.newer = NONE;
        match Slot::some(older) {
            Some(older) => blocks.table[older.index()].newer = newer,
            None => self.oldest = newer,
        }
        match Slot::some(newer) {
            Some(newer) => blocks.table[newer.index()].older = older,
            None => self.newest = older,
        }
        self.len -= 1;
    }

    /// Moves a block of this list to its newest end.
    pub fn move_to_newest(&mut self, blocks: &mut BlockTable, slot: Slot) {
        if self.newest != slot.0 {
            self.remove(blocks, slot);
            self.push_newest(blocks, slot);
        }
    }

    /// The oldest candidate for eviction except `spared`, among the `among` oldest blocks. Blocks
    /// before it move to the newest end, so that no search visits them twice. Counts `among` down.
    pub fn oldest_candidate(
        &mut self,
        blocks: &mut BlockTable,
        spared: Option<Slot>,
        among: &mut usize,
        visits: &mut Visits,
    ) -> Search {
        while *among > 0 {
            let Some(slot) = self.oldest() else { break };
            if !visits.take(1) {
                return Search::Unfinished;
            }
            *among -= 1;
            if Some(slot) != spared && blocks.is_candidate(slot) {
                return Search::Found(slot);
            }
            self.move_to_newest(blocks, slot);
        }
        Search::None
    }

    fn link(&mut self, blocks: &mut BlockTable, slot: Slot, older: u32, newer: u32) {
        let block = &mut blocks.table[slot.index()];
        block.older = older;
        block.newer = newer;
        match Slot::some(older) {
            Some(older) => blocks.table[older.index()].newer = slot.0,
            None => self.oldest = slot.0,
        }
        match Slot::some(newer) {
            Some(newer) => blocks.table[newer.index()].older = slot.0,
            None => self.newest = slot.0,
        }
        self.len += 1;
    }
}
