//! The order of victims on random traces, against hashes of the order that an unbounded search
//! chose.
//!
//! A search for a victim ends its hold of the store's lock after a fixed number of candidates and
//! goes on in a later hold. As long as every candidate may be evicted, that must not change which
//! block is evicted. A policy that is changed on purpose gets new hashes.

use std::collections::HashMap;
use std::time::Duration;

use cascade_store::PolicyKind;
use cascade_store::eviction::{
    Eviction, EvictionChoice, EvictionLimits, Hints, Incoming, Priority, RemovalReason,
    RequestedBlock, Slot, StopReason, policy,
};

/// More than one hold visits, so that searches go on over several holds.
const CAPACITY: usize = 3000;
const STEPS: usize = 4000;
const DEPTH_MAX: u64 = 1200;

struct Trace {
    eviction: Eviction,
    slots: HashMap<u64, Slot>,
    random: u64,
    /// Hash of all victims in their order (FNV-1a).
    hash: u64,
    victims: u64,
}

impl Trace {
    fn new(kind: PolicyKind, seed: u64) -> Self {
        let capacity_bytes = CAPACITY as u64;
        let limits = EvictionLimits { capacity_bytes, protected_percent: 5, admit_partial: false };
        Self {
            eviction: Eviction::new(policy(kind), limits),
            slots: HashMap::new(),
            random: seed.wrapping_mul(2).wrapping_add(1),
            hash: 0xcbf2_9ce4_8422_2325,
            victims: 0,
        }
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.random >> 33) % limit
    }

    /// A path of a forest: two blocks of a tree are equal up to the point where their paths part.
    fn chain(&mut self) -> Vec<u64> {
        let tree = self.below(60);
        // Most chains are short. Long ones have more blocks than one hold visits.
        let depth = if self.below(20) == 0 { DEPTH_MAX } else { 40 };
        let blocks = 1 + self.below(depth);
        let (branch, parts_at) = (self.below(3), self.below(30));
        let block = |at: u64| {
            let path = if at < parts_at { 0 } else { branch + 1 };
            (tree << 32 | path << 24 | at).wrapping_mul(0x9e37_79b9_7f4a_7c15)
        };
        (0..blocks).map(block).collect()
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
            expected_within: None,
        }
    }

    /// Puts a block. Some callers name no parent, so that the next lookup of the chain corrects it.
    fn put(&mut self, now: Duration, block: u64, parent: Option<u64>, is_protected: bool) -> bool {
        if self.slots.contains_key(&block) {
            return true;
        }
        let parent = parent.and_then(|parent| self.slots.get(&parent).copied());
        let incoming = Incoming { owner: 0, fingerprint: block, parent, bytes: 1, is_protected };
        if self.slots.len() == CAPACITY {
            let EvictionChoice::Evict(victim) =
                self.eviction.victim_for(now, &incoming, &mut |_| true)
            else {
                return false;
            };
            self.remove(victim, RemovalReason::Evicted);
        }
        self.slots.insert(block, self.eviction.insert(now, &incoming));
        true
    }

    fn remove(&mut self, slot: Slot, why: RemovalReason) {
        let block = self.eviction.blocks().fingerprint(slot);
        assert_eq!(self.slots.remove(&block), Some(slot), "a resident block leaves once");
        if why == RemovalReason::Evicted {
            self.hash = (self.hash ^ block).wrapping_mul(0x0100_0000_01b3);
            self.victims += 1;
        }
        self.eviction.remove(slot, why);
    }

    fn step(&mut self, now: Duration) {
        let chain = self.chain();
        let (hints, partial_tail) = (self.hints(), self.below(3) == 0);
        let requested = self.requested(&chain);
        let leading = self.eviction.request(now, &requested, partial_tail, &hints);
        let full = chain.len() - usize::from(partial_tail);
        let (names_parents, is_protected) = (self.below(5) > 0, self.below(40) == 0);
        for at in leading..full {
            let parent = at.checked_sub(1).map(|before| chain[before]);
            if !self.put(now, chain[at], parent.filter(|_| names_parents), is_protected) {
                break;
            }
        }
        match self.below(10) {
            0 => {
                let requested = self.requested(&chain);
                let over = Hints { ends_session: true, ..Hints::default() };
                self.eviction.hint(now, &requested, &over);
            }
            1 | 2 => {
                let at = self.below(chain.len() as u64);
                if let Some(slot) =
                    self.slots.get(&chain[usize::try_from(at).expect("a short chain")])
                {
                    self.eviction.touch(now, *slot);
                }
            }
            3 => {
                // Few enough that a deleted chain is freed in one operation.
                for block in chain.iter().take(8) {
                    if let Some(slot) = self.slots.get(block).copied() {
                        self.remove(slot, RemovalReason::Deleted);
                    }
                }
            }
            _ => {}
        }
    }
}

/// The hash of all victims of a trace, and their number.
fn order_of_victims(kind: PolicyKind, seed: u64) -> (u64, u64) {
    let mut trace = Trace::new(kind, seed);
    let mut now = Duration::ZERO;
    for _ in 0..STEPS {
        now += Duration::from_millis(trace.below(4000));
        trace.step(now);
    }
    while let Some(victim) = trace.eviction.victim(now, &mut |_| true) {
        trace.remove(victim, RemovalReason::Evicted);
    }
    assert!(trace.eviction.blocks().is_empty(), "every block can be evicted");
    (trace.hash, trace.victims)
}

#[test]
fn bounded_searches_choose_the_victims_of_an_unbounded_one() {
    let kinds = [
        PolicyKind::Lru,
        PolicyKind::S3Fifo,
        PolicyKind::Arc,
        PolicyKind::Waterfall,
        PolicyKind::PrefixCost,
    ];
    let orders = kinds.map(|kind| [1, 2].map(|seed| order_of_victims(kind, seed)));
    assert_eq!(orders, ORDERS, "another order of eviction");
}

/// By policy and seed: the hash of all victims, and their number.
const ORDERS: [[(u64, u64); 2]; 5] = [
    [(9_866_161_284_619_369_176, 172_062), (15_177_590_147_514_837_209, 164_499)],
    [(9_351_948_562_416_355_072, 157_314), (11_017_628_564_960_816_959, 150_249)],
    [(17_967_629_788_750_068_371, 160_736), (15_754_934_545_114_665_785, 152_495)],
    [(9_866_161_284_619_369_176, 172_062), (15_177_590_147_514_837_209, 164_499)],
    [(11_816_127_603_160_001_816, 153_874), (16_139_671_739_443_853_307, 149_789)],
];
