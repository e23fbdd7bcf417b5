//! Corrections of parents: a block may have been put before its parent was resident.
//!
//! Parents must not form a cycle, but the chains of callers may contradict each other. A long chain
//! is walked in several holds of the store's lock. Other requests may correct parents in between;
//! then the walk no longer knows the ancestors of its blocks, and corrects only blocks without
//! children, which are ancestors of no other block. A later request corrects the others.

use super::{ADOPTION_VISITS, ANCESTORS_ABOVE_MAX, BlockTable, NONE, RequestedBlock, Slot, Visits};

/// A request's corrections of parents.
#[derive(Debug, Default)]
pub(in crate::core::eviction) struct ChainWalk {
    /// How many blocks of the chain are marked as visited.
    visited: usize,
    /// The ancestors of the first block that are marked as visited.
    above: Vec<Slot>,
    /// Whether blocks may be marked.
    has_marks: bool,
    /// Whether the ancestors of the blocks are no longer known.
    is_stale: bool,
    /// Parents corrected in the table when the last hold ended.
    adoptions: Option<u64>,
}

/// Result of correcting a parent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(in crate::core::eviction) struct Adoption {
    /// The parent is a descendant of the child: the caller's chains contradict each other. The
    /// parent is not corrected.
    pub(in crate::core::eviction) is_contradiction: bool,
    /// The visits are used up; the next call goes on.
    pub(in crate::core::eviction) is_unfinished: bool,
    /// Whether a block has another parent now, or none.
    pub(in crate::core::eviction) is_change: bool,
    /// Former parents that became leaves.
    pub(in crate::core::eviction) leaves: [Option<Slot>; 2],
}

impl BlockTable {
    /// Call when a hold begins that goes on with a walk.
    pub(in crate::core::eviction) fn resume_walk(&self, walk: &mut ChainWalk) {
        walk.is_stale |= walk.adoptions.is_some_and(|before| before != self.adoptions);
    }

    /// Call when a hold ends in which a walk was not finished.
    pub(in crate::core::eviction) fn suspend_walk(&self, walk: &mut ChainWalk) {
        walk.adoptions = Some(self.adoptions);
    }

    /// Corrects the parent of a block that was put while its parent was not resident. `earlier` are
    /// the blocks of the request before the child, root first; the last one is the new parent.
    pub(in crate::core::eviction) fn adopt(
        &mut self,
        child: Slot,
        earlier: &[RequestedBlock],
        walk: &mut ChainWalk,
        visits: &mut Visits,
    ) -> Adoption {
        let mut adoption = Adoption::default();
        let RequestedBlock { fingerprint, resident } = earlier[earlier.len() - 1];
        let parent = resident.expect("the blocks before were resident");
        if self.table[child.index()].parent == parent.0 {
            return adoption;
        }
        // It was resident when the walk met it, perhaps in an earlier hold.
        if !self.holds(parent, fingerprint) {
            return adoption;
        }
        // A block without children is no ancestor of another block.
        if parent == child || !self.is_leaf(child) {
            if !self.may_mark(walk) {
                return adoption;
            }
            // The ancestors of the new parent are the blocks before it in this request and the
            // ancestors of the first one. Each is visited once in a request.
            if walk.visited == 0 && walk.above.is_empty() {
                let first = earlier[0].resident.expect("the blocks before were resident");
                adoption.leaves[0] = self.visit_above(first, walk, visits);
                adoption.is_change = adoption.leaves[0].is_some();
            }
            while walk.visited < earlier.len() {
                if !visits.take(1) {
                    adoption.is_unfinished = true;
                    return adoption;
                }
                self.visit_requested(&earlier[walk.visited]);
                walk.visited += 1;
            }
            if self.table[child.index()].is_visited {
                return Adoption { is_contradiction: true, is_change: true, ..adoption };
            }
        }
        visits.spend(ADOPTION_VISITS);
        self.adoptions += 1;
        // The new parent counts the child before the former one loses it. If the former parent is a
        // deleted descendant of the new one, removal goes up the chain and would otherwise report
        // the new parent as a leaf.
        let before = Slot::some(self.table[child.index()].parent);
        self.add_child(parent);
        self.table[child.index()].parent = parent.0;
        let orphaned = before.and_then(|before| self.remove_child(before));
        Adoption { is_change: true, leaves: [adoption.leaves[0], orphaned], ..adoption }
    }

    /// Whether a walk may mark blocks: only one at a time, and only while it knows all ancestors of
    /// its blocks.
    fn may_mark(&mut self, walk: &mut ChainWalk) -> bool {
        if walk.is_stale || (self.has_marks && !walk.has_marks) {
            return false;
        }
        self.has_marks = true;
        walk.has_marks = true;
        true
    }

    /// Visits the ancestors of a request's first block. If there are too many, the block loses its
    /// parent instead; returns the parent if it became a leaf.
    fn visit_above(
        &mut self,
        first: Slot,
        walk: &mut ChainWalk,
        visits: &mut Visits,
    ) -> Option<Slot> {
        let mut at = self.next_ancestor(first);
        // Ends, because no adoption makes a cycle.
        while let Some(slot) = at {
            if walk.above.len() == ANCESTORS_ABOVE_MAX {
                // A lookup names a chain from its root on, so the block should have no parent.
                let above = Slot::some(self.table[first.index()].parent);
                self.table[first.index()].parent = NONE;
                self.adoptions += 1;
                visits.spend(walk.above.len());
                for slot in walk.above.drain(..) {
                    self.table[slot.index()].is_visited = false;
                }
                return above.and_then(|above| self.remove_child(above));
            }
            self.visit(slot);
            walk.above.push(slot);
            at = self.next_ancestor(slot);
        }
        visits.spend(walk.above.len());
        None
    }

    fn visit_requested(&mut self, requested: &RequestedBlock) {
        let slot = requested.resident.expect("the blocks before were resident");
        // The slot of a removed block belongs to it as long as it has descendants.
        if self.fingerprint(slot) == requested.fingerprint {
            self.visit(slot);
        }
    }

    fn visit(&mut self, slot: Slot) {
        self.table[slot.index()].is_visited = true;
        #[cfg(test)]
        {
            self.visits += 1;
        }
    }

    /// Ends a request's corrections of parents; returns whether all marks are removed. Without
    /// visits left, the next call goes on.
    pub(in crate::core::eviction) fn end_walk(
        &mut self,
        chain: &[RequestedBlock],
        walk: &mut ChainWalk,
        visits: &mut Visits,
    ) -> bool {
        if !walk.has_marks {
            return true;
        }
        while walk.visited > 0 {
            if !visits.take(1) {
                return false;
            }
            walk.visited -= 1;
            let slot = chain[walk.visited].resident.expect("it was resident when it was visited");
            self.table[slot.index()].is_visited = false;
        }
        visits.spend(walk.above.len());
        for slot in walk.above.drain(..) {
            self.table[slot.index()].is_visited = false;
        }
        walk.has_marks = false;
        self.has_marks = false;
        true
    }
}
