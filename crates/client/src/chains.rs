//! Lookups of chains and views of what they match. Chains longer than a message are split.

use cascade_block::BlockKey;
use cascade_tier::{CallOptions, PrefixMatch, Request, TierName, ViewOutcome};
use cascade_wire::{Answer, BLOCKS_MAX, Call, ChainRequest, KEYS_MAX, KeyQuestion, LeasePurpose};

use crate::batches::Batch;
use crate::client::ClientInner;
use crate::session::Link;

impl Link {
    /// The tiers of a block, from the bits of a node's answer.
    pub(crate) fn tiers_of(&self, bits: u8) -> Vec<TierName> {
        let has = |at: &usize| bits & (1 << at) != 0;
        (0..self.tiers.len().min(8)).filter(has).map(|at| self.tiers[at]).collect()
    }
}

impl ClientInner {
    pub(crate) fn lookup(&self, request: &Request<'_>, options: CallOptions) -> PrefixMatch {
        let Ok(on) = self.begin(options) else { return PrefixMatch::default() };
        PrefixMatch { tiers: self.lookup_on(&on, request) }
    }

    /// One request to the eviction policy, with the keys that fit one message. Later keys are only
    /// located.
    fn lookup_on(&self, on: &Batch, request: &Request<'_>) -> Vec<TierName> {
        let mut first = ChainRequest::of(request);
        let rest = request.keys.get(KEYS_MAX..).unwrap_or_default();
        first.keys.truncate(KEYS_MAX);
        let count = first.keys.len();
        let answer =
            self.call_on(&on.link, "look up a chain", &Call::Lookup(first), on.deadline, on.time);
        let Ok(Answer::Matched(matched)) = answer else { return Vec::new() };
        // An index beyond the list ends the match, as a missing block does.
        let named = |tier: u8| on.link.tiers.get(usize::from(tier)).copied();
        let mut tiers: Vec<TierName> = matched.into_iter().map_while(named).collect();
        // The node has no reason to send more; the caller relies on the bound.
        tiers.truncate(count);
        for keys in rest.chunks(KEYS_MAX) {
            // A match is a prefix: behind the first missing block nothing counts.
            if tiers.len() < count || !self.extend(on, keys, &mut tiers) {
                break;
            }
        }
        tiers
    }

    /// Appends the fastest tier of each key, up to the first key without one. True if every key has
    /// a tier.
    fn extend(&self, on: &Batch, keys: &[BlockKey], tiers: &mut Vec<TierName>) -> bool {
        let call = Call::Ask { question: KeyQuestion::Locate, keys: keys.to_vec() };
        let answer = self.call_on(&on.link, "locate blocks", &call, on.deadline, on.time);
        let Ok(Answer::Places(places)) = answer else { return false };
        let before = tiers.len();
        let fastest = |bits| on.link.tiers_of(bits).first().copied();
        tiers.extend(places.into_iter().take(keys.len()).map_while(fastest));
        tiers.len() - before == keys.len()
    }

    /// Views of the leading blocks of a chain. A chain that fits one message takes one call. A
    /// longer chain is looked up first, so that the policy counts one request, and then leased in
    /// steps.
    pub(crate) fn acquire(&self, request: &Request<'_>, options: CallOptions) -> Vec<ViewOutcome> {
        let Ok(on) = self.begin(options) else { return Vec::new() };
        if request.keys.len() <= BLOCKS_MAX {
            return self.acquire_at_once(&on, request);
        }
        let found = self.lookup_on(&on, request).len();
        let steps = request.keys[..found].chunks(BLOCKS_MAX);
        steps.flat_map(|step| self.lease(&on, LeasePurpose::Use, step)).collect()
    }

    fn acquire_at_once(&self, on: &Batch, request: &Request<'_>) -> Vec<ViewOutcome> {
        let request = ChainRequest::of(request);
        let count = request.keys.len();
        let first_hold = on.link.session.allocate_holds(count);
        let call = Call::Acquire { timeout_ms: on.node_timeout_ms(), first_hold, request };
        let answer = self.call_on(&on.link, "look up a chain", &call, on.deadline, on.time);
        match answer {
            Ok(Answer::Leases(leases)) if leases.len() <= count => {
                self.views(&on.link, first_hold, leases)
            }
            Ok(_) | Err(_) => {
                // The node may have granted leases, or may still grant them.
                on.link.session.release_range(first_hold, count);
                Vec::new()
            }
        }
    }
}
