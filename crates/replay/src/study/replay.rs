//! Replays a trace through the store's eviction code, with keys only.

use cascade_store::eviction::{
    Eviction, EvictionChoice, EvictionLimits, Hints, Incoming, Policy, RemovalReason,
    RequestedBlock, Slot,
};

use super::events::{ReplayEvent, ReplayEvents};
use super::{StudyOptions, StudyResult};
use crate::random::mix;
use crate::trace::{Trace, TraceRequest};

/// A tier that stores keys only.
struct MetadataTier {
    eviction: Eviction,
    capacity: usize,
    /// The slot of each resident block of the trace.
    slots: Vec<Option<Slot>>,
    /// The chain of the current request; reused to save allocations.
    chain: Vec<RequestedBlock>,
    requests_declined: u64,
}

/// Replays a trace on a tier of `capacity_blocks` blocks.
///
/// # Panics
/// If the trace has more than `u32::MAX` different blocks.
pub fn replay_metadata(
    trace: &Trace,
    policy: Box<dyn Policy>,
    capacity_blocks: u64,
    options: &StudyOptions,
) -> StudyResult {
    replay_with_callback(trace, policy, capacity_blocks, options, &mut |_, _| ())
}

/// Like [`replay_metadata`], and calls `on_request` with index and leading hits of each request.
///
/// # Panics
/// If the trace has more than `u32::MAX` different blocks.
pub fn replay_with_callback(
    trace: &Trace,
    policy: Box<dyn Policy>,
    capacity_blocks: u64,
    options: &StudyOptions,
    on_request: &mut dyn FnMut(usize, usize),
) -> StudyResult {
    let limits = EvictionLimits {
        capacity_bytes: capacity_blocks,
        protected_percent: 0,
        admit_partial: options.admit_partial,
    };
    let unique = usize::try_from(trace.unique_blocks).expect("a trace that fits in memory");
    let mut tier = MetadataTier {
        eviction: Eviction::new(policy, limits),
        capacity: usize::try_from(capacity_blocks).unwrap_or(usize::MAX),
        slots: vec![None; unique],
        chain: Vec::new(),
        requests_declined: 0,
    };
    let mut hits_of_requests = Vec::with_capacity(trace.requests.len());
    for event in ReplayEvents::of(trace, &options.hints).events() {
        match event {
            ReplayEvent::Hint { at, request, hints } => {
                tier.look_up(&trace.requests[request]);
                tier.eviction.hint(at, &tier.chain, &hints);
            }
            ReplayEvent::Request { request, hints } => {
                let hits = tier.request(&trace.requests[request], &hints);
                hits_of_requests.push(u32::try_from(hits).expect("a request has fewer blocks"));
                on_request(request, hits);
            }
        }
    }
    let stats = tier.eviction.stats();
    StudyResult {
        policy: tier.eviction.policy().name().to_owned(),
        capacity_blocks,
        requests: trace.requests.len() as u64,
        blocks_requested: trace.block_count(),
        blocks_hit: hits_of_requests.iter().map(|hits| u64::from(*hits)).sum(),
        hits_of_requests,
        blocks_inserted: stats.inserted,
        blocks_evicted: stats.evicted,
        requests_declined: tier.requests_declined,
        memory_bytes: tier.eviction.memory_bytes() as u64,
    }
}

impl MetadataTier {
    fn look_up(&mut self, request: &TraceRequest) {
        self.chain.clear();
        self.chain.extend(request.blocks.iter().map(|block| RequestedBlock {
            fingerprint: fingerprint(*block),
            resident: self.slots[index(*block)],
        }));
    }

    fn request(&mut self, request: &TraceRequest, hints: &Hints) -> usize {
        self.look_up(request);
        let leading = self.eviction.request(request.at, &self.chain, request.partial_tail, hints);
        let mut parent = leading.checked_sub(1).and_then(|last| self.chain[last].resident);
        for (at, block) in request.blocks.iter().enumerate().skip(leading) {
            let is_partial = request.partial_tail && at + 1 == request.blocks.len();
            if !self.eviction.admits(is_partial) {
                break;
            }
            if let Some(slot) = self.slots[index(*block)] {
                parent = Some(slot);
                continue;
            }
            // Without its parent a block could never be a leading hit, so the rest is skipped.
            let Some(slot) = self.insert(request, *block, parent) else {
                self.requests_declined += 1;
                break;
            };
            parent = Some(slot);
        }
        leading
    }

    /// Inserts a block and evicts another one if the tier is full. None if the policy declines.
    fn insert(&mut self, request: &TraceRequest, block: u64, parent: Option<Slot>) -> Option<Slot> {
        let owner = u32::try_from(block).expect("a trace has fewer than 2^32 different blocks");
        let fingerprint = fingerprint(block);
        let incoming = Incoming { owner, fingerprint, parent, bytes: 1, is_protected: false };
        if self.eviction.blocks().len() >= self.capacity {
            match self.eviction.victim_for(request.at, &incoming, &mut |_| true) {
                EvictionChoice::Decline => return None,
                EvictionChoice::Evict(victim) => {
                    let evicted = self.eviction.blocks().owner(victim);
                    self.eviction.remove(victim, RemovalReason::Evicted);
                    self.slots[evicted as usize] = None;
                }
            }
        }
        let slot = self.eviction.insert(request.at, &incoming);
        self.slots[index(block)] = Some(slot);
        Some(slot)
    }
}

fn index(block: u64) -> usize {
    usize::try_from(block).expect("block numbers are dense")
}

/// A fingerprint of 64 uniform bits, unique for each block number.
fn fingerprint(block: u64) -> u64 {
    mix(block)
}
