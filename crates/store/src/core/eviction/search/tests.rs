//! Searches visit a bounded number of blocks in a hold, and find every block that may be evicted.

use std::collections::HashSet;
use std::time::Duration;

use super::*;
use crate::PolicyKind;
use crate::core::eviction::{EvictionLimits, Hints, RequestedBlock, policy};

const KINDS: [PolicyKind; 5] = [
    PolicyKind::Lru,
    PolicyKind::S3Fifo,
    PolicyKind::Arc,
    PolicyKind::Waterfall,
    PolicyKind::PrefixCost,
];

const NOW: Duration = Duration::from_secs(100);

fn eviction(kind: PolicyKind) -> Eviction {
    let limits =
        EvictionLimits { capacity_bytes: 1 << 20, protected_percent: 1, admit_partial: false };
    Eviction::new(policy(kind), limits)
}

fn put(eviction: &mut Eviction, owner: u32, parent: Option<Slot>) -> Slot {
    let fingerprint = u64::from(owner);
    let incoming = Incoming { owner, fingerprint, parent, bytes: 1, is_protected: false };
    eviction.insert(NOW, &incoming)
}

/// Searches until the search ends. Returns its result, the number of holds and of visits.
fn search(
    eviction: &mut Eviction,
    spared: Option<Slot>,
    busy: &dyn Fn(u32) -> bool,
) -> (VictimSearch, usize, u64) {
    let incoming = Incoming {
        owner: u32::MAX,
        fingerprint: u64::MAX,
        parent: spared,
        bytes: 1,
        is_protected: false,
    };
    let (mut holds, before) = (0, eviction.visits.total);
    loop {
        let at = eviction.visits.total;
        eviction.begin_hold();
        let found = eviction.search(NOW, Some(&incoming), &mut |owner| verdict(!busy(owner)));
        holds += 1;
        let visits = eviction.visits.total - at;
        assert!(visits <= VISITS_PER_HOLD as u64, "{visits} visits in one hold");
        if found != VictimSearch::Unfinished {
            return (found, holds, eviction.visits.total - before);
        }
        assert!(holds < 100_000, "the search ends");
    }
}

/// With everything pinned, each put scanned all residents under the lock.
#[test]
fn blocks_in_use_are_visited_once_and_found_when_they_are_released() {
    const BLOCKS: u32 = 20_000;
    for kind in KINDS {
        let mut eviction = eviction(kind);
        let slots: Vec<_> = (0..BLOCKS).map(|owner| put(&mut eviction, owner, None)).collect();
        let (found, holds, visits) = search(&mut eviction, None, &|_| true);
        assert_eq!(found, VictimSearch::None, "{kind:?}");
        assert!(holds > 1 && visits <= 2 * u64::from(BLOCKS), "{kind:?}: {visits} visits");
        for _ in 0..3 {
            let known = search(&mut eviction, None, &|_| true);
            assert_eq!(known, (VictimSearch::None, 1, 0), "{kind:?}: known without a visit");
        }
        for owner in [7, BLOCKS / 2, BLOCKS - 1] {
            let slot = slots[owner as usize];
            eviction.release(slot);
            let (found, holds, visits) = search(&mut eviction, None, &|_| false);
            assert_eq!((found, holds), (VictimSearch::Found(slot), 1), "{kind:?}");
            assert!(visits <= 8, "{kind:?}: {visits} visits for the only candidate");
            eviction.remove(slot, RemovalReason::Evicted);
        }
    }
}

/// The leaf of a chain in use, and all of its ancestors: a search for an ancestor visits a bounded
/// number of them in a hold, and is repeated only after a change.
#[test]
fn a_search_above_leaves_in_use_is_bounded_and_not_repeated() {
    for kind in KINDS {
        let mut eviction = eviction(kind);
        let mut chain: Vec<Slot> = Vec::new();
        for owner in 0..2000 {
            chain.push(put(&mut eviction, owner, chain.last().copied()));
        }
        assert_eq!(search(&mut eviction, None, &|_| true).0, VictimSearch::None);
        let mut progress = AncestorSearch::default();
        let mut above = |eviction: &mut Eviction, usable: u32| {
            let mut holds = 0;
            loop {
                eviction.begin_hold();
                let at = eviction.visits.total;
                let mut usable = |owner| verdict(owner == usable);
                let found = eviction.search_above(None, &mut usable, &mut progress);
                assert!(eviction.visits.total - at <= VISITS_PER_HOLD as u64);
                holds += 1;
                if found != VictimSearch::Unfinished {
                    return (found, holds, eviction.visits.total - at);
                }
            }
        };
        let (found, holds, _) = above(&mut eviction, u32::MAX);
        assert!(found == VictimSearch::None && holds > 5, "{kind:?}: {holds} holds");
        assert_eq!(above(&mut eviction, 3), (VictimSearch::None, 1, 0), "nothing was released");
        eviction.release(chain[3]);
        assert_eq!(above(&mut eviction, 3).0, VictimSearch::Found(chain[3]), "{kind:?}");
        eviction.remove(chain[3], RemovalReason::Evicted);
        eviction.release(chain[1999]);
        assert_eq!(search(&mut eviction, None, &|_| false).0, VictimSearch::Found(chain[1999]));
    }
}

/// A deleted chain is freed in parts. Its resident root is a candidate in the end.
#[test]
fn a_search_frees_the_rest_of_a_deleted_chain() {
    for kind in KINDS {
        let mut eviction = eviction(kind);
        let root = put(&mut eviction, 0, None);
        let mut chain = vec![root];
        for owner in 1..5000 {
            chain.push(put(&mut eviction, owner, chain.last().copied()));
        }
        chain[1..].iter().for_each(|slot| eviction.remove(*slot, RemovalReason::Deleted));
        assert_eq!(search(&mut eviction, None, &|_| false).0, VictimSearch::Found(root));
    }
}

/// Random puts, requests, uses, deletions, blocks in use and releases: a search finds a candidate
/// exactly if there is one, and the counts are those of a count over all blocks.
#[test]
fn a_search_finds_a_candidate_exactly_if_there_is_one() {
    for kind in KINDS {
        for seed in 0..4 {
            random_run(kind, seed);
        }
    }
}

struct Run {
    eviction: Eviction,
    slots: Vec<Option<Slot>>,
    busy: HashSet<u32>,
    random: u64,
}

impl Run {
    fn below(&mut self, limit: u32) -> u32 {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        u32::try_from((self.random >> 33) % u64::from(limit)).expect("below the limit")
    }

    /// A path in trees of 40 blocks: the parent of block `n` is `n / 2`, down to the root.
    fn chain(&mut self) -> Vec<u32> {
        let tree = self.below(8) * 40;
        let last = 1 + self.below(39);
        let path = std::iter::successors(Some(last), |at| Some(at / 2).filter(|at| *at > 0));
        let mut chain: Vec<_> = path.map(|at| tree + at).collect();
        chain.reverse();
        chain
    }

    fn request(&mut self, hints: &Hints) {
        let chain = self.chain();
        let requested: Vec<_> = chain
            .iter()
            .map(|block| RequestedBlock {
                fingerprint: u64::from(*block),
                resident: self.slots[*block as usize],
            })
            .collect();
        self.eviction.request(NOW, &requested, false, hints);
        let mut parent = None;
        for block in chain {
            if self.slots[block as usize].is_none() {
                let named = parent.filter(|_| self.below(4) > 0);
                self.slots[block as usize] = Some(put(&mut self.eviction, block, named));
            }
            parent = self.slots[block as usize];
        }
    }

    fn remove(&mut self, block: u32, why: RemovalReason) {
        if let Some(slot) = self.slots[block as usize].take() {
            self.busy.remove(&block);
            self.eviction.remove(slot, why);
        }
    }

    fn evict(&mut self) {
        let spared = self.below(2) == 0;
        let spared = spared.then(|| self.below(320)).and_then(|block| self.slots[block as usize]);
        let blocks = self.eviction.blocks();
        let (slots, busy) = (&self.slots, &self.busy);
        let may_go = |block: &u32| {
            slots[*block as usize].is_some_and(|slot| {
                blocks.is_leaf(slot) && Some(slot) != spared && !busy.contains(block)
            })
        };
        let usable: Vec<_> = (0..320).filter(may_go).collect();
        let busy = self.busy.clone();
        match search(&mut self.eviction, spared, &|owner| busy.contains(&owner)).0 {
            VictimSearch::Found(slot) => {
                let owner = self.eviction.blocks().owner(slot);
                assert!(usable.contains(&owner), "block {owner} may not go");
                self.remove(owner, RemovalReason::Evicted);
            }
            VictimSearch::None => assert!(usable.is_empty(), "{usable:?} may go"),
            other => assert_eq!(other, VictimSearch::AllWorthMore),
        }
    }

    fn compare(&self) {
        let blocks = self.eviction.blocks();
        let resident = self.slots.iter().flatten();
        let candidates = resident.filter(|slot| blocks.is_candidate(**slot)).count();
        let counted = usize::from(blocks.has_candidate(false, None));
        assert_eq!(candidates.min(1), counted, "{candidates} candidates");
        for (block, slot) in (0..).zip(&self.slots) {
            let is_parked = slot.is_some_and(|slot| blocks.is_parked(slot));
            assert!(!is_parked || self.busy.contains(&block), "block {block} is parked in vain");
        }
    }
}

fn random_run(kind: PolicyKind, seed: u64) {
    let mut run = Run {
        eviction: eviction(kind),
        slots: vec![None; 321],
        busy: HashSet::new(),
        random: seed * 2 + 1,
    };
    for _ in 0..3000 {
        let block = run.below(320);
        match run.below(10) {
            0..=2 => {
                let within = (run.below(5) == 0).then_some(Duration::from_secs(60));
                run.request(&Hints { expected_within: within, ..Hints::default() });
            }
            3 => {
                if let Some(slot) = run.slots[block as usize] {
                    run.eviction.touch(NOW, slot);
                }
            }
            4 if run.slots[block as usize].is_some() => {
                run.busy.insert(block);
            }
            5 | 6 => {
                if run.busy.remove(&block)
                    && let Some(slot) = run.slots[block as usize]
                {
                    run.eviction.release(slot);
                }
            }
            7 if run.below(4) == 0 => run.remove(block, RemovalReason::Deleted),
            _ => run.evict(),
        }
        run.compare();
    }
    for block in 0..320 {
        if run.busy.remove(&block)
            && let Some(slot) = run.slots[block as usize]
        {
            run.eviction.release(slot);
        }
    }
    // Each search finds a candidate if there is one. A bounded number of them evicts all blocks.
    (0..5000).for_each(|_| run.evict());
    assert!(run.eviction.blocks().is_empty(), "every block can be evicted");
}
