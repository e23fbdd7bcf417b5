//! Conformance checks of eviction policies: one list, which every policy passes.
//!
//! The checks drive [`Eviction`] with chain requests and compare the resident blocks with those of
//! a naive model. A difference is a panic with a message.

use std::collections::HashMap;
use std::time::Duration;

use cascade_tier::{Hints, Priority, StopReason};

use super::{
    Eviction, EvictionChoice, EvictionLimits, Incoming, Policy, RemovalReason, RequestedBlock, Slot,
};

/// Makes a new policy.
pub type MakePolicy = fn() -> Box<dyn Policy>;

/// Runs all checks on a policy.
///
/// # Panics
/// If the policy fails one of them.
pub fn check(make: MakePolicy) {
    for seed in 0..4 {
        requests_keep_the_tables_consistent(make, seed);
        equal_runs_choose_equal_victims(make, seed);
    }
    leaves_are_evicted_first_and_all_blocks_can_be(make);
    unusable_blocks_are_never_victims(make);
    a_used_leaf_does_not_keep_its_chain(make);
    protected_blocks_are_evicted_last_within_their_quota(make);
    contradictory_calls_keep_the_tables_consistent(make);
}

/// A naive model: which blocks of a small forest are resident, and in which slots.
#[derive(Debug)]
struct Model {
    eviction: Eviction,
    capacity: usize,
    slots: HashMap<u64, Slot>,
    parents: HashMap<u64, Option<u64>>,
    victims: Vec<u64>,
    random: u64,
}

impl Model {
    fn new(make: MakePolicy, capacity: usize, seed: u64) -> Self {
        let capacity_bytes = capacity as u64;
        let limits = EvictionLimits { capacity_bytes, protected_percent: 50, admit_partial: false };
        Self {
            eviction: Eviction::new(make(), limits),
            capacity,
            slots: HashMap::new(),
            parents: HashMap::new(),
            victims: Vec::new(),
            random: seed.wrapping_mul(2).wrapping_add(1),
        }
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.random >> 33) % limit
    }

    /// A random path in a forest of four trees with three children a block.
    fn chain(&mut self) -> Vec<u64> {
        let mut block = 1 + self.below(4);
        let mut chain = vec![block];
        for _ in 0..self.below(12) {
            block = block * 4 + self.below(3);
            chain.push(block);
        }
        chain
    }

    fn requested(&self, chain: &[u64]) -> Vec<RequestedBlock> {
        let requested = |block: &u64| RequestedBlock {
            fingerprint: *block,
            resident: self.slots.get(block).copied(),
        };
        chain.iter().map(requested).collect()
    }

    fn request(&mut self, now: Duration, chain: &[u64], partial_tail: bool, hints: &Hints) {
        let requested = self.requested(chain);
        let leading = requested.iter().take_while(|requested| requested.resident.is_some()).count();
        let found = self.eviction.request(now, &requested, partial_tail, hints);
        assert_eq!(found, leading, "hits are the leading residents");
        let full = chain.len() - usize::from(partial_tail);
        let mut parent = leading.checked_sub(1).map(|last| chain[last]);
        for block in chain[..full].iter().skip(leading) {
            if !self.slots.contains_key(block) && !self.put(now, *block, parent, false) {
                break;
            }
            parent = Some(*block);
        }
    }

    fn put(&mut self, now: Duration, block: u64, parent: Option<u64>, is_protected: bool) -> bool {
        let owner = u32::try_from(block % u64::from(u32::MAX)).expect("below u32::MAX");
        let slot = parent.map(|parent| self.slots[&parent]);
        let incoming = Incoming { owner, fingerprint: block, parent: slot, bytes: 1, is_protected };
        if self.slots.len() == self.capacity {
            match self.eviction.victim_for(now, &incoming, &mut |_| true) {
                EvictionChoice::Decline => return false,
                EvictionChoice::Evict(victim) => {
                    assert_ne!(Some(victim), slot, "a block is not evicted for its own child");
                    self.evict(victim);
                }
            }
        }
        self.slots.insert(block, self.eviction.insert(now, &incoming));
        self.parents.insert(block, parent);
        true
    }

    fn evict(&mut self, victim: Slot) {
        let block = self.eviction.blocks().fingerprint(victim);
        let has_children =
            self.slots.keys().any(|child| self.parents[child] == Some(block) && *child != block);
        assert!(!has_children, "block {block} was evicted before its children");
        assert_eq!(self.slots.remove(&block), Some(victim), "block {block} was resident");
        self.victims.push(block);
        self.eviction.remove(victim, RemovalReason::Evicted);
    }

    fn compare(&self) {
        let blocks = self.eviction.blocks();
        assert_eq!(blocks.len(), self.slots.len(), "as many blocks as were put and not evicted");
        assert!(self.slots.len() <= self.capacity, "no more than fit");
        for (block, slot) in &self.slots {
            assert!(blocks.is_resident(*slot), "block {block} is resident");
            assert_eq!(blocks.fingerprint(*slot), *block, "a slot keeps its block");
        }
    }

    /// Evicts until no candidate is left.
    fn drain(&mut self, now: Duration) {
        while let Some(victim) = self.eviction.victim(now, &mut |_| true) {
            self.evict(victim);
        }
        assert!(self.slots.is_empty(), "{} blocks can never be evicted", self.slots.len());
    }
}

fn run(make: MakePolicy, seed: u64) -> Model {
    let mut model = Model::new(make, 40, seed);
    let mut now = Duration::ZERO;
    for step in 0..600 {
        now += Duration::from_millis(model.below(20_000));
        let chain = model.chain();
        let partial_tail = chain.len() > 1 && model.below(2) == 0;
        let hints = Hints {
            ends_session: model.below(10) == 0,
            stop: (model.below(3) == 0).then_some(StopReason::ToolUse),
            priority: if model.below(9) == 0 { Priority::High } else { Priority::Normal },
            workload: (model.below(4) == 0).then_some(3),
            expected_within: (model.below(8) == 0).then_some(Duration::from_secs(30)),
        };
        model.request(now, &chain, partial_tail, &hints);
        if step % 7 == 0 {
            let requested = model.requested(&chain);
            model.eviction.hint(now, &requested, &hints);
        }
        if step % 5 == 0
            && let Some(slot) = model.slots.get(&chain[0]).copied()
        {
            model.eviction.touch(now, slot);
        }
        model.compare();
    }
    model.drain(now);
    model
}

fn requests_keep_the_tables_consistent(make: MakePolicy, seed: u64) {
    let model = run(make, seed);
    let stats = model.eviction.stats();
    assert_eq!(stats.inserted, stats.evicted, "every inserted block was evicted");
    assert_eq!(stats.requests, 600, "each request counts once");
}

fn equal_runs_choose_equal_victims(make: MakePolicy, seed: u64) {
    assert_eq!(run(make, seed).victims, run(make, seed).victims, "runs are repeatable");
}

fn leaves_are_evicted_first_and_all_blocks_can_be(make: MakePolicy) {
    let mut model = Model::new(make, 100, 1);
    // Children that are put and touched before the policy knows their parents.
    for block in 1..=50 {
        let parent = (block > 1).then_some(block / 2);
        assert!(model.put(Duration::from_secs(block), block, parent, false), "there is room");
    }
    for block in [1, 2, 4, 50, 1] {
        model.eviction.touch(Duration::from_secs(100 + block), model.slots[&block]);
    }
    model.drain(Duration::from_secs(1000));
}

fn unusable_blocks_are_never_victims(make: MakePolicy) {
    let mut model = Model::new(make, 10, 1);
    for block in 1..=10 {
        model.put(Duration::ZERO, block, None, false);
    }
    let now = Duration::from_secs(5);
    let none = model.eviction.victim(now, &mut |_| false);
    assert_eq!(none, None, "nothing usable, no victim");
    for _ in 0..3 {
        let only = model.eviction.victim(now, &mut |owner| owner == 7);
        assert_eq!(only, Some(model.slots[&7]), "the one usable block is found");
    }
    let mut owners = Vec::new();
    let bytes = model.eviction.victims(now, 100, &mut |owner| owner != 7, &mut owners);
    assert_eq!((bytes, owners.len()), (9, 9), "a batch evicts every usable block once");
    assert!(!owners.contains(&7), "the unusable block stays");
}

fn a_used_leaf_does_not_keep_its_chain(make: MakePolicy) {
    let mut model = Model::new(make, 10, 1);
    for block in 1..=10 {
        model.put(Duration::ZERO, block, (block > 1).then_some(block - 1), false);
    }
    let now = Duration::from_secs(5);
    for expected in (1..=9).rev() {
        assert_eq!(model.eviction.victim(now, &mut |owner| owner != 10), None, "no leaf is usable");
        let victim = model.eviction.victim_above_used_leaf(None, &mut |owner| owner != 10);
        let victim = victim.expect("an ancestor is usable");
        assert_eq!(victim, model.slots[&expected], "the nearest ancestor comes first");
        model.eviction.remove(victim, RemovalReason::Evicted);
        model.slots.remove(&expected);
    }
    assert_eq!(model.eviction.victim_above_used_leaf(None, &mut |owner| owner != 10), None);
    let last = model.eviction.victim(now, &mut |_| true);
    assert_eq!(last, Some(model.slots[&10]), "the leaf is a victim once it is usable");
}

fn protected_blocks_are_evicted_last_within_their_quota(make: MakePolicy) {
    let mut model = Model::new(make, 20, 1);
    for block in 1..=12 {
        model.put(Duration::ZERO, block, None, true);
    }
    let stats = model.eviction.stats();
    assert_eq!(stats.protected_blocks, 10, "half of the tier may be protected");
    assert_eq!(stats.protection_refused, 2, "blocks beyond the quota are counted");
    for block in 100..400 {
        let now = Duration::from_secs(block);
        model.request(now, &[block], false, &Hints::default());
    }
    let kept = (1..=10).filter(|block| model.slots.contains_key(block)).count();
    assert_eq!(kept, 10, "fillers do not displace protected blocks");
    model.drain(Duration::from_secs(1000));
    let last: Vec<_> = model.victims.iter().rev().take(10).rev().copied().collect();
    assert_eq!(
        last,
        (1..=10).collect::<Vec<_>>(),
        "they are evicted last, the least recently used first"
    );
    assert_eq!(model.eviction.stats().protected_bytes, 0, "their quota is free again");
}

/// Contradictory chains, blocks put twice, and blocks deleted before their children.
fn contradictory_calls_keep_the_tables_consistent(make: MakePolicy) {
    let mut model = Model::new(make, 30, 9);
    let now = Duration::from_secs(1);
    let hints = Hints::default();
    for chain in [&[1, 2, 3][..], &[3, 2, 1], &[9, 9, 9], &[1, 1], &[2, 1, 2, 3]] {
        let requested = model.requested(chain);
        model.eviction.request(now, &requested, false, &hints);
        for block in chain {
            if !model.slots.contains_key(block) {
                model.put(now, *block, None, false);
            }
        }
    }
    assert_eq!(model.eviction.request(now, &[], true, &hints), 0, "nothing requested, nothing hit");
    for block in [1, 9, 3, 2] {
        let slot = model.slots.remove(&block).expect("it was put");
        model.eviction.remove(slot, RemovalReason::Deleted);
        model.compare();
    }
    for (block, parent) in [(4, None), (5, Some(4)), (6, Some(5))] {
        model.put(now, block, parent, false);
    }
    let root = model.slots.remove(&4).expect("it was put");
    model.eviction.remove(root, RemovalReason::Deleted);
    model.put(now, 4, None, false);
    let requested = model.requested(&[4, 5, 6]);
    assert_eq!(
        model.eviction.request(now, &requested, false, &hints),
        3,
        "the parent is found again"
    );
    model.drain(now);
}
