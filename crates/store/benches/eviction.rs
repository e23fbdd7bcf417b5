//! The cost of eviction at a million resident blocks: one victim, and one request with its puts.

use std::hint::black_box;
use std::time::Duration;

use cascade_store::PolicyKind;
use cascade_store::eviction::{
    Eviction, EvictionChoice, EvictionLimits, Hints, Incoming, RemovalReason, RequestedBlock, Slot,
    policy,
};
use criterion::{BatchSize, Criterion, criterion_group, criterion_main};

const RESIDENT: usize = 1_000_000;
const CHAIN: u32 = 20;
/// Range of the owners' numbers. Far more than fit, so that a number is free when it is reused.
const OWNERS: u32 = 16_000_000;

/// A full tier under a load of conversations. A third of them have another turn.
struct Load {
    eviction: Eviction,
    /// By block, wrapping round: owners are reused long after their block has gone.
    slots: Vec<Option<Slot>>,
    next_block: u32,
    requests: u64,
    chain: Vec<RequestedBlock>,
}

impl Load {
    fn new(kind: PolicyKind) -> Self {
        let limits = EvictionLimits {
            capacity_bytes: RESIDENT as u64,
            protected_percent: 0,
            admit_partial: false,
        };
        let mut load = Self {
            eviction: Eviction::new(policy(kind), limits),
            slots: vec![None; OWNERS as usize],
            next_block: 0,
            requests: 0,
            chain: Vec::new(),
        };
        while load.eviction.blocks().len() < RESIDENT || load.requests < 150_000 {
            load.request();
        }
        load
    }

    fn now(&self) -> Duration {
        Duration::from_millis(20 * self.requests)
    }

    /// Asks for the chain of an earlier request and a few blocks more, or for a new one.
    fn request(&mut self) {
        self.requests += 1;
        let random = (self.requests.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u32;
        let begin = match random % 3 {
            0 => {
                let back = (random / 3 % 40_000 + 1) * CHAIN;
                self.next_block.saturating_sub(back)
            }
            _ => self.next_block,
        };
        let shared = self.next_block.min(begin + CHAIN / 2) - begin;
        let known = begin..begin + shared;
        let new = self.next_block..self.next_block + CHAIN - shared;
        self.next_block += CHAIN;
        let slots = &self.slots;
        self.chain.clear();
        self.chain.extend(known.chain(new).map(|block| RequestedBlock {
            fingerprint: u64::from(block).wrapping_mul(0x9e37_79b9_7f4a_7c15),
            resident: slots[(block % OWNERS) as usize],
        }));
        let now = self.now();
        let hits = self.eviction.request(now, &self.chain, false, &Hints::default());
        let mut parent = hits.checked_sub(1).and_then(|at| self.chain[at].resident);
        for at in hits..self.chain.len() {
            if self.chain[at].resident.is_some() {
                continue;
            }
            let position = u32::try_from(at).expect("a chain of 20 blocks");
            let block = match position.checked_sub(shared) {
                None => begin + position,
                Some(added) => self.next_block - CHAIN + added,
            };
            let fingerprint = self.chain[at].fingerprint;
            let owner = block % OWNERS;
            let incoming = Incoming { owner, fingerprint, parent, bytes: 1, is_protected: false };
            if self.eviction.blocks().len() >= RESIDENT {
                match self.eviction.victim_for(now, &incoming, &mut |_| true) {
                    EvictionChoice::Evict(victim) => self.evict(victim),
                    EvictionChoice::Decline => break,
                }
            }
            let slot = self.eviction.insert(now, &incoming);
            self.slots[owner as usize] = Some(slot);
            parent = Some(slot);
        }
    }

    fn evict(&mut self, victim: Slot) {
        let owner = self.eviction.blocks().owner(victim);
        self.slots[owner as usize] = None;
        self.eviction.remove(victim, RemovalReason::Evicted);
    }
}

fn eviction(criterion: &mut Criterion) {
    let kinds = [PolicyKind::Lru, PolicyKind::S3Fifo, PolicyKind::Arc, PolicyKind::PrefixCost];
    for kind in kinds {
        let mut load = Load::new(kind);
        let name = load.eviction.policy().name();
        let each = load.eviction.memory_bytes() / RESIDENT;
        let mut group = criterion.benchmark_group(format!("{name}, {each} B a block"));
        group.bench_function("request of 20 blocks, with inserts and victims", |bench| {
            bench.iter(|| load.request());
        });
        group.bench_function("first victim of a request", |bench| {
            bench.iter_batched(
                || (),
                |()| {
                    load.requests += 1;
                    let now = load.now();
                    load.eviction.request(now, &[], false, &Hints::default());
                    black_box(load.eviction.victim(now, &mut |_| true))
                },
                BatchSize::SmallInput,
            );
        });
        group.finish();
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(2));
    targets = eviction
}
criterion_main!(benches);
