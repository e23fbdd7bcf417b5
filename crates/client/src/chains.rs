//! Chains: how much of one is there, and views on that. A chain has any length, a message has not.

use cascade_block::BlockKey;
use cascade_store::{CallOptions, PrefixMatch, Request, TierName, ViewOutcome};
use cascade_wire::{Answer, BLOCKS_MAX, Call, ChainRequest, KEYS_MAX, KeyQuestion, LeasePurpose};

use crate::batches::Batch;
use crate::client::Inner;
use crate::session::Link;

impl Link {
    /// The tiers of a block, from the bits that a node answers.
    pub(crate) fn tiers_of(&self, bits: u8) -> Vec<TierName> {
        let has = |at: &usize| bits & (1 << at) != 0;
        (0..self.tiers.len().min(8)).filter(has).map(|at| self.tiers[at]).collect()
    }
}

impl Inner {
    pub(crate) fn lookup(&self, request: &Request<'_>, options: CallOptions) -> PrefixMatch {
        let Ok(on) = self.begin(options) else { return PrefixMatch::default() };
        PrefixMatch { tiers: self.lookup_on(&on, request) }
    }

    /// One request to the policy, of the keys that a message has room for. Those after them are
    /// only located.
    fn lookup_on(&self, on: &Batch, request: &Request<'_>) -> Vec<TierName> {
        let mut first = ChainRequest::of(request);
        let rest = request.keys.get(KEYS_MAX..).unwrap_or_default();
        first.keys.truncate(KEYS_MAX);
        let count = first.keys.len();
        let answer =
            self.ask_on(&on.link, "look a chain up", &Call::Lookup(first), on.deadline, on.time);
        let Ok(Answer::Matched(matched)) = answer else { return Vec::new() };
        let named = |tier: u8| on.link.tiers.get(usize::from(tier)).copied();
        let mut tiers: Vec<TierName> = matched.into_iter().map_while(named).collect();
        tiers.truncate(count);
        for keys in rest.chunks(KEYS_MAX) {
            if tiers.len() < count || !self.extend(on, keys, &mut tiers) {
                break;
            }
        }
        tiers
    }

    /// Adds the fastest tier of each of these keys, up to the first that is nowhere. True if all
    /// of them are somewhere.
    fn extend(&self, on: &Batch, keys: &[BlockKey], tiers: &mut Vec<TierName>) -> bool {
        let call = Call::Ask { question: KeyQuestion::Locate, keys: keys.to_vec() };
        let answer = self.ask_on(&on.link, "locate blocks", &call, on.deadline, on.time);
        let Ok(Answer::Places(places)) = answer else { return false };
        let before = tiers.len();
        let fastest = |bits| on.link.tiers_of(bits).first().copied();
        tiers.extend(places.into_iter().take(keys.len()).map_while(fastest));
        tiers.len() - before == keys.len()
    }

    /// Views on what is there of a chain. What one message has room for takes one; a longer chain
    /// is looked up as a whole, so that it is one request to the policy, and then read in steps.
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
        let first_hold = on.link.session.draw_holds(count);
        let call = Call::Acquire { timeout_ms: on.node_time(), first_hold, request };
        let answer = self.ask_on(&on.link, "look a chain up", &call, on.deadline, on.time);
        match answer {
            Ok(Answer::Leases(leases)) if leases.len() <= count => {
                self.views(&on.link, first_hold, leases)
            }
            Ok(_) | Err(_) => {
                on.link.session.give_back_range(first_hold, count);
                Vec::new()
            }
        }
    }
}
