//! Requests and hints for chains, each in one or more holds of the store's lock.
//!
//! A chain that is longer than one hold allows is reported in parts. Between them, other calls may
//! insert, remove and request its blocks, so that each part looks again at the blocks of its slots.
//! Without such calls, the parts have the effect of one call for the whole chain: `tests.rs`.

#[cfg(test)]
mod tests;

use std::time::Duration;

use super::blocks::ChainWalk;
use super::prefix_cost::{ChainReuse, HintProgress};
use super::{BlockTable, Eviction, Hints, RequestedBlock, Slot, Visits};

/// A chain that is reported to a policy.
#[derive(Debug)]
pub struct ChainPart<'a> {
    /// Its blocks, root first.
    pub blocks: &'a mut [RequestedBlock],
    /// How many of its first blocks were resident when the report began.
    pub leading: usize,
    /// The caller's hints.
    pub hints: &'a Hints,
}

impl ChainPart<'_> {
    /// The slot of a block, if the block is still there. Forgets the slot otherwise.
    pub fn resident(&mut self, blocks: &BlockTable, at: usize) -> Option<Slot> {
        still_resident(blocks, &mut self.blocks[at])
    }
}

fn still_resident(blocks: &BlockTable, requested: &mut RequestedBlock) -> Option<Slot> {
    let RequestedBlock { fingerprint, resident } = *requested;
    requested.resident = resident.filter(|slot| blocks.holds(*slot, fingerprint));
    requested.resident
}

/// How far a policy is with a chain. Kept by the caller from one hold of the lock to the next.
#[derive(Debug, Default)]
pub struct ChainProgress {
    has_begun: bool,
    /// Blocks that were touched.
    touched: usize,
    pub(super) reuse: ChainReuse,
    pub(super) hint: HintProgress,
}

impl ChainProgress {
    /// Whether this is the first part.
    pub fn begin(&mut self) -> bool {
        !std::mem::replace(&mut self.has_begun, true)
    }

    /// Touches the leading blocks from the last one on, so that the root is the newest. Returns
    /// whether all were touched.
    pub fn touch_from_leaf(
        &mut self,
        blocks: &mut BlockTable,
        chain: &mut ChainPart<'_>,
        visits: &mut Visits,
        mut touch: impl FnMut(&mut BlockTable, Slot),
    ) -> bool {
        while self.touched < chain.leading {
            if !visits.take(1) {
                return false;
            }
            self.touched += 1;
            if let Some(slot) = chain.resident(blocks, chain.leading - self.touched) {
                touch(blocks, slot);
            }
        }
        true
    }
}

/// A request for a chain. Kept by the caller from one hold of the lock to the next; it must be
/// continued until it is done.
#[derive(Debug)]
pub(crate) struct ChainRequest {
    /// The state that it is for.
    generation: u64,
    /// Whether the last block is a partial tail that is not admitted.
    is_tail_cut: bool,
    step: Step,
    walk: ChainWalk,
    /// Blocks before a contradiction to the known parents.
    length: usize,
    /// Leading resident blocks.
    leading: usize,
    /// Leading blocks whose use is still to be noted, if they are protected.
    left: usize,
    progress: ChainProgress,
}

impl ChainRequest {
    /// Number of leading resident blocks, once the request is done.
    pub(crate) fn leading(&self) -> usize {
        self.leading
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Leading,
    EndWalk,
    Protected,
    Policy,
}

/// Hints for a chain, as [`ChainRequest`].
#[derive(Debug)]
pub(crate) struct ChainHint {
    generation: u64,
    progress: ChainProgress,
}

impl Eviction {
    /// A chain is requested, root first. Called once per lookup, before the missing blocks are
    /// inserted. `partial_tail` says that the last block is not full. Returns the number of leading
    /// resident blocks. A time that goes backwards counts as the latest one seen.
    pub fn request(
        &mut self,
        now: Duration,
        chain: &[RequestedBlock],
        partial_tail: bool,
        hints: &Hints,
    ) -> usize {
        let mut copy = std::mem::take(&mut self.chain);
        copy.extend_from_slice(chain);
        let mut request = self.begin_request(now, &copy, partial_tail);
        let all = &mut Visits::unlimited();
        let is_done = self.continue_request(&mut request, &mut copy, hints, all);
        debug_assert!(is_done, "the visits suffice for every chain");
        copy.clear();
        self.chain = copy;
        request.leading
    }

    /// Does work that is due before the next request. Returns whether none is left.
    pub(crate) fn prepare_request(&mut self, now: Duration, visits: &mut Visits) -> bool {
        self.advance(now);
        self.policy.prepare(self.now, visits)
    }

    /// Begins a request for a chain.
    pub(crate) fn begin_request(
        &mut self,
        now: Duration,
        chain: &[RequestedBlock],
        partial_tail: bool,
    ) -> ChainRequest {
        self.advance(now);
        self.stats.requests += 1;
        ChainRequest {
            generation: self.generation,
            is_tail_cut: partial_tail && !self.limits.admit_partial,
            step: Step::Leading,
            walk: ChainWalk::default(),
            length: chain.len(),
            leading: 0,
            left: 0,
            progress: ChainProgress::default(),
        }
    }

    /// One hold's part of a request. Returns whether the request is done.
    pub(crate) fn continue_request(
        &mut self,
        request: &mut ChainRequest,
        chain: &mut [RequestedBlock],
        hints: &Hints,
        visits: &mut Visits,
    ) -> bool {
        if request.generation != self.generation {
            return true;
        }
        loop {
            match request.step {
                Step::Leading => {
                    if !self.find_leading(request, chain, visits) {
                        self.blocks.suspend_walk(&mut request.walk);
                        return false;
                    }
                    request.left = request.leading;
                    request.step = Step::EndWalk;
                }
                Step::EndWalk => {
                    if !self.blocks.end_walk(chain, &mut request.walk, visits) {
                        return false;
                    }
                    request.step = Step::Protected;
                }
                Step::Protected => {
                    if !self.use_protected_chain(request, chain, visits) {
                        return false;
                    }
                    request.step = Step::Policy;
                }
                Step::Policy => return self.report_request(request, chain, hints, visits),
            }
        }
    }

    /// Finds the leading resident blocks. Corrects parents on the way, because a parent may have
    /// been deleted and put again. Cuts the chain where it contradicts the known parents, so no
    /// block occurs twice among the leading ones. Returns whether all are found.
    fn find_leading(
        &mut self,
        request: &mut ChainRequest,
        chain: &mut [RequestedBlock],
        visits: &mut Visits,
    ) -> bool {
        self.blocks.resume_walk(&mut request.walk);
        while request.leading < chain.len() {
            if !visits.take(1) {
                return false;
            }
            let at = request.leading;
            // A slot that is not resident any more counts as a miss.
            let Some(slot) = still_resident(&self.blocks, &mut chain[at]) else { break };
            if at > 0 {
                let adoption = self.blocks.adopt(slot, &chain[..at], &mut request.walk, visits);
                self.changes += u64::from(adoption.is_change);
                for leaf in adoption.leaves.into_iter().flatten() {
                    self.policy.became_leaf(&mut self.blocks, leaf);
                }
                if adoption.is_unfinished {
                    return false;
                }
                if adoption.is_contradiction {
                    request.length = at;
                    break;
                }
            }
            request.leading += 1;
        }
        true
    }

    /// Notes the use of the leading blocks that are protected: from the leaf to the root, so that
    /// the root is the newest and is evicted last. Returns whether all are noted.
    fn use_protected_chain(
        &mut self,
        request: &mut ChainRequest,
        chain: &mut [RequestedBlock],
        visits: &mut Visits,
    ) -> bool {
        if self.stats.protected_blocks == 0 {
            return true;
        }
        while request.left > 0 {
            if !visits.take(1) {
                return false;
            }
            request.left -= 1;
            if let Some(slot) = still_resident(&self.blocks, &mut chain[request.left]) {
                self.use_protected(slot);
            }
        }
        true
    }

    fn report_request(
        &mut self,
        request: &mut ChainRequest,
        chain: &mut [RequestedBlock],
        hints: &Hints,
        visits: &mut Visits,
    ) -> bool {
        // The partial tail is left out, because it is not inserted. A contradiction may have cut
        // the chain before it.
        let full = chain.len() - usize::from(request.is_tail_cut && !chain.is_empty());
        let full = full.min(request.length);
        // The policy must not count a tail that was cut off as a hit.
        let leading = request.leading.min(full);
        let mut part = ChainPart { blocks: &mut chain[..full], leading, hints };
        let progress = &mut request.progress;
        self.policy.request(&mut self.blocks, self.now, &mut part, progress, visits)
    }

    /// Hints for a chain, after its request or before the next one.
    pub fn hint(&mut self, now: Duration, chain: &[RequestedBlock], hints: &Hints) {
        let mut copy = std::mem::take(&mut self.chain);
        copy.extend_from_slice(chain);
        let mut hint = self.begin_hint(now);
        let is_done = self.continue_hint(&mut hint, &mut copy, hints, &mut Visits::unlimited());
        debug_assert!(is_done, "the visits suffice for every chain");
        copy.clear();
        self.chain = copy;
    }

    /// Begins the hints for a chain.
    pub(crate) fn begin_hint(&mut self, now: Duration) -> ChainHint {
        self.advance(now);
        ChainHint { generation: self.generation, progress: ChainProgress::default() }
    }

    /// One hold's part of the hints for a chain. Returns whether they are done.
    pub(crate) fn continue_hint(
        &mut self,
        hint: &mut ChainHint,
        chain: &mut [RequestedBlock],
        hints: &Hints,
        visits: &mut Visits,
    ) -> bool {
        if hint.generation != self.generation {
            return true;
        }
        let mut part = ChainPart { blocks: chain, leading: 0, hints };
        self.policy.hint(&mut self.blocks, self.now, &mut part, &mut hint.progress, visits)
    }

    /// Makes this state the successor of another, whose unfinished requests it ignores.
    pub(crate) fn succeed(&mut self, before: &Self) {
        self.generation = before.generation + 1;
    }
}
