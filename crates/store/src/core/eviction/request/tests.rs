//! Requests in parts: alone they have the effect of a whole one, and among other calls they keep
//! blocks and counts consistent.

use std::collections::{HashMap, HashSet};

use foldhash::fast::FixedState;

use super::*;
use crate::PolicyKind;
use crate::core::eviction::{
    EvictionChoice, EvictionLimits, Incoming, Priority, RemovalReason, StopReason, policy,
};

const KINDS: [PolicyKind; 5] = [
    PolicyKind::Lru,
    PolicyKind::S3Fifo,
    PolicyKind::Arc,
    PolicyKind::Waterfall,
    PolicyKind::PrefixCost,
];
/// Fewer blocks than the longest chains have.
const CAPACITY: usize = 3000;

/// A request or hint in progress.
struct Report {
    chain: Vec<RequestedBlock>,
    hints: Hints,
    of: Of,
}

enum Of {
    Request(ChainRequest),
    Hint(ChainHint),
}

struct Trace {
    eviction: Eviction,
    slots: HashMap<u64, Slot, FixedState>,
    random: u64,
    victims: Vec<u64>,
    /// Blocks that a part may visit; `None` for whole requests.
    visits: Option<usize>,
    /// Whether other calls come between the parts.
    is_mixed: bool,
    reports: Vec<Report>,
    now: Duration,
}

impl Trace {
    fn new(kind: PolicyKind, seed: u64, visits: Option<usize>, is_mixed: bool) -> Self {
        let capacity_bytes = CAPACITY as u64;
        let limits = EvictionLimits { capacity_bytes, protected_percent: 5, admit_partial: false };
        Self {
            eviction: Eviction::new(policy(kind), limits),
            slots: HashMap::default(),
            random: seed.wrapping_mul(2).wrapping_add(1),
            victims: Vec::new(),
            visits,
            is_mixed,
            reports: Vec::new(),
            now: Duration::ZERO,
        }
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.random >> 33) % limit
    }

    /// A path of a forest: two blocks of a tree are equal up to the point where their paths part.
    fn chain(&mut self) -> Vec<u64> {
        let tree = self.below(40);
        let depth = [60, 60, 60, 1500, 5000][usize::try_from(self.below(5)).expect("small")];
        let blocks = 1 + self.below(depth);
        let (branch, parts_at) = (self.below(3), self.below(300));
        let block = |at: u64| {
            let path = if at < parts_at { 0 } else { branch + 1 };
            (tree << 32 | path << 24 | at).wrapping_mul(0x9e37_79b9_7f4a_7c15)
        };
        let mut chain: Vec<u64> = (0..blocks).map(block).collect();
        if self.below(8) == 0 {
            // Contradicts the parents of the other chains.
            let at = usize::try_from(self.below(blocks)).expect("small");
            chain.rotate_left(at);
        }
        chain
    }

    fn requested(&self, chain: &[u64]) -> Vec<RequestedBlock> {
        let resident = |block: &u64| self.slots.get(block).copied();
        let requested =
            |block: &u64| RequestedBlock { fingerprint: *block, resident: resident(block) };
        chain.iter().map(requested).collect()
    }

    fn hints(&mut self) -> Hints {
        Hints {
            ends_session: self.below(12) == 0,
            stop: (self.below(3) == 0).then_some(StopReason::ToolUse),
            priority: if self.below(9) == 0 { Priority::High } else { Priority::Normal },
            workload: (self.below(4) == 0).then_some(3),
            expected_within: (self.below(6) == 0).then_some(Duration::from_secs(30)),
        }
    }

    /// Runs a report to its end, or keeps it for later steps.
    fn report(&mut self, mut report: Report) {
        loop {
            if self.is_mixed && self.below(3) > 0 {
                return self.reports.push(report);
            }
            if self.continue_report(&mut report) {
                return;
            }
        }
    }

    fn continue_report(&mut self, report: &mut Report) -> bool {
        let mut visits = self.visits.map_or(Visits::unlimited(), Visits::limited);
        let Report { chain, hints, of } = report;
        match of {
            Of::Request(it) => self.eviction.continue_request(it, chain, hints, &mut visits),
            Of::Hint(it) => self.eviction.continue_hint(it, chain, hints, &mut visits),
        }
    }

    fn request(&mut self, chain: &[u64], partial_tail: bool, hints: Hints) {
        let chain = self.requested(chain);
        if self.visits.is_none() {
            self.eviction.request(self.now, &chain, partial_tail, &hints);
            return;
        }
        let mut visits = self.visits.map_or(Visits::unlimited(), Visits::limited);
        while !self.eviction.prepare_request(self.now, &mut visits) {
            visits = self.visits.map_or(Visits::unlimited(), Visits::limited);
        }
        let of = Of::Request(self.eviction.begin_request(self.now, &chain, partial_tail));
        self.report(Report { chain, hints, of });
    }

    fn hint(&mut self, chain: &[u64], hints: Hints) {
        let chain = self.requested(chain);
        if self.visits.is_none() {
            return self.eviction.hint(self.now, &chain, &hints);
        }
        let of = Of::Hint(self.eviction.begin_hint(self.now));
        self.report(Report { chain, hints, of });
    }

    /// Puts a block. Some callers name no parent, so that the next lookup of the chain corrects it.
    fn put(&mut self, block: u64, parent: Option<u64>, is_protected: bool) -> bool {
        if self.slots.contains_key(&block) {
            return true;
        }
        let parent = parent.and_then(|parent| self.slots.get(&parent).copied());
        let incoming = Incoming { owner: 0, fingerprint: block, parent, bytes: 1, is_protected };
        if self.slots.len() == CAPACITY {
            let choice = self.eviction.victim_for(self.now, &incoming, &mut |_| true);
            let EvictionChoice::Evict(victim) = choice else { return false };
            self.remove(victim, RemovalReason::Evicted);
        }
        self.slots.insert(block, self.eviction.insert(self.now, &incoming));
        true
    }

    fn remove(&mut self, slot: Slot, why: RemovalReason) {
        let block = self.eviction.blocks().fingerprint(slot);
        assert_eq!(self.slots.remove(&block), Some(slot), "a resident block leaves once");
        if why == RemovalReason::Evicted {
            self.victims.push(block);
        }
        self.eviction.remove(slot, why);
    }

    fn step(&mut self) {
        let later = Duration::from_millis(self.below(4000));
        self.now += later;
        let chain = self.chain();
        let (hints, partial_tail) = (self.hints(), self.below(3) == 0);
        self.request(&chain, partial_tail, hints);
        let full = chain.len() - usize::from(partial_tail);
        let (names_parents, is_protected) = (self.below(5) > 0, self.below(40) == 0);
        for at in 0..full {
            let parent = at.checked_sub(1).map(|before| chain[before]);
            if !self.put(chain[at], parent.filter(|_| names_parents), is_protected) {
                break;
            }
        }
        match self.below(10) {
            0 => self.hint(&chain, Hints { ends_session: true, ..Hints::default() }),
            1 | 2 => {
                let at = usize::try_from(self.below(chain.len() as u64)).expect("small");
                if let Some(slot) = self.slots.get(&chain[at]) {
                    self.eviction.touch(self.now, *slot);
                }
            }
            3 => {
                for block in chain.iter().take(8) {
                    if let Some(slot) = self.slots.get(block).copied() {
                        self.remove(slot, RemovalReason::Deleted);
                    }
                }
            }
            _ => {}
        }
        // Parts of earlier reports, in any order.
        for _ in 0..self.below(12) {
            if self.reports.is_empty() {
                break;
            }
            let at = usize::try_from(self.below(self.reports.len() as u64)).expect("small");
            let mut report = self.reports.swap_remove(at);
            if !self.continue_report(&mut report) {
                self.reports.push(report);
            }
        }
    }

    fn run(&mut self, steps: usize) {
        for _ in 0..steps {
            self.step();
        }
        for mut report in std::mem::take(&mut self.reports) {
            while !self.continue_report(&mut report) {}
        }
        self.eviction.policy.check(&self.eviction.blocks);
    }

    /// Evicts all blocks, each after all that follow it.
    fn evict_all(&mut self) {
        while let Some(victim) = self.eviction.victim(self.now, &mut |_| true) {
            assert!(self.eviction.blocks.is_leaf(victim));
            self.remove(victim, RemovalReason::Evicted);
        }
        assert!(self.eviction.blocks().is_empty(), "every block can be evicted");
        self.eviction.policy.check(&self.eviction.blocks);
    }
}

#[test]
fn parts_of_a_request_choose_the_victims_of_a_whole_one() {
    for kind in KINDS {
        let victims = |visits| {
            let mut trace = Trace::new(kind, 5, visits, false);
            trace.run(500);
            trace.evict_all();
            trace.victims
        };
        let whole = victims(None);
        assert!(whole.len() > 50_000, "{}", whole.len());
        for visits in [256, 7] {
            let parts = victims(Some(visits));
            let same = whole.iter().zip(&parts).take_while(|(one, other)| one == other).count();
            assert!(whole == parts, "{kind:?}: {same} of {} victims are the same", whole.len());
        }
    }
}

/// Other calls insert, evict, delete and request the blocks of a request between its parts.
#[test]
fn parts_of_requests_among_other_calls_keep_blocks_and_counts() {
    for kind in KINDS {
        for (seed, visits) in [(1, 256), (2, 40), (3, 7)] {
            let mut trace = Trace::new(kind, seed, Some(visits), true);
            trace.run(200);
            let blocks = trace.eviction.blocks();
            let mut without_cycle = HashSet::new();
            for slot in trace.slots.values() {
                let ancestors = std::iter::successors(Some(*slot), |at| blocks.next_ancestor(*at));
                let mut seen = HashSet::new();
                for at in ancestors.take_while(|at| !without_cycle.contains(at)) {
                    assert!(seen.insert(at), "a cycle");
                }
                without_cycle.extend(seen);
            }
            trace.evict_all();
        }
    }
}

/// An erase replaces the whole state; a request that began before must not touch the new one.
#[test]
fn a_request_for_a_replaced_state_ends() {
    for kind in KINDS {
        let mut trace = Trace::new(kind, 1, Some(256), false);
        let chain: Vec<u64> = (1..=1000).collect();
        assert!(chain.iter().all(|block| trace.put(*block, None, false)));
        let mut requested = trace.requested(&chain);
        let mut request = trace.eviction.begin_request(trace.now, &requested, false);
        let (hints, mut visits) = (Hints::default(), Visits::limited(256));
        let eviction = &mut trace.eviction;
        assert!(!eviction.continue_request(&mut request, &mut requested, &hints, &mut visits));
        let limits = eviction.limits;
        let mut next = Eviction::new(policy(kind), limits);
        next.succeed(eviction);
        assert!(next.continue_request(&mut request, &mut requested, &hints, &mut visits));
        assert!(next.blocks().is_empty());
    }
}
