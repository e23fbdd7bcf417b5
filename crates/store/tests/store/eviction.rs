//! Every policy passes the conformance checks; LRU and the ghost list match naive models.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::collections::VecDeque;
use std::time::Duration;

use cascade_store::PolicyKind;
use cascade_store::eviction::{
    Eviction, EvictionChoice, EvictionLimits, Ghosts, Hints, Incoming, Lru, PrefixCost,
    RemovalReason, RequestedBlock, S3Fifo, Slot, StopReason, conformance, policy,
};
use proptest::prelude::*;

const LIMITS: EvictionLimits =
    EvictionLimits { capacity_bytes: 100, protected_percent: 0, admit_partial: false };

#[test]
fn lru_conforms() {
    conformance::check(|| policy(PolicyKind::Lru));
}

#[test]
fn s3_fifo_conforms() {
    conformance::check(|| policy(PolicyKind::S3Fifo));
    conformance::check(|| Box::new(S3Fifo::promoting_at(1)));
}

#[test]
fn arc_conforms() {
    conformance::check(|| policy(PolicyKind::Arc));
}

#[test]
fn waterfall_conforms_and_promotes_nothing() {
    conformance::check(|| policy(PolicyKind::Waterfall));
    assert!(!policy(PolicyKind::Waterfall).promotes_hits());
    assert!(policy(PolicyKind::Lru).promotes_hits());
}

#[test]
fn prefix_cost_conforms() {
    conformance::check(|| policy(PolicyKind::PrefixCost));
}

#[test]
fn partial_blocks_are_declined_unless_admitted() {
    let admitting = EvictionLimits { admit_partial: true, ..LIMITS };
    assert!(!Eviction::new(policy(PolicyKind::Lru), LIMITS).admits(true));
    assert!(Eviction::new(policy(PolicyKind::Lru), LIMITS).admits(false));
    assert!(Eviction::new(policy(PolicyKind::Lru), admitting).admits(true));
}

/// The chain was cut at the contradiction, and again for the tail: a full block did not count as
/// used.
#[test]
fn a_contradiction_before_a_partial_tail_cuts_off_no_full_block() {
    let mut tier = Tier::new(PolicyKind::Lru, 10);
    tier.request(0, &[1, 2, 3], &Hints::default());
    tier.request(1, &[4], &Hints::default());
    let asked = [2, 3, 1, 9].map(|block: usize| RequestedBlock {
        fingerprint: block as u64,
        resident: tier.slots[block],
    });
    let now = Duration::from_secs(2);
    assert_eq!(tier.eviction.request(now, &asked, true, &Hints::default()), 2);
    let victim = tier.eviction.victim(now, &mut |_| true);
    assert_eq!(victim, tier.slots[4], "block 3 was used after it");
}

/// A simulated tier of a few blocks around the eviction mechanism.
struct Tier {
    eviction: Eviction,
    slots: Vec<Option<Slot>>,
    capacity: usize,
}

impl Tier {
    fn new(kind: PolicyKind, capacity: usize) -> Self {
        Self { eviction: Eviction::new(policy(kind), LIMITS), slots: vec![None; 4096], capacity }
    }

    /// Requests a chain and puts the missing blocks. Returns the hits.
    fn request(&mut self, seconds: u64, chain: &[usize], hints: &Hints) -> usize {
        let now = Duration::from_secs(seconds);
        let asked: Vec<_> = chain
            .iter()
            .map(|block| RequestedBlock {
                fingerprint: *block as u64,
                resident: self.slots[*block],
            })
            .collect();
        let leading = self.eviction.request(now, &asked, false, hints);
        let mut parent = leading.checked_sub(1).and_then(|at| asked[at].resident);
        for block in &chain[leading..] {
            let owner = u32::try_from(*block).unwrap();
            let fingerprint = *block as u64;
            let incoming = Incoming { owner, fingerprint, parent, bytes: 1, is_protected: false };
            if self.eviction.blocks().len() == self.capacity {
                let verdict = self.eviction.victim_for(now, &incoming, &mut |_| true);
                let EvictionChoice::Evict(victim) = verdict else { break };
                self.slots[self.eviction.blocks().owner(victim) as usize] = None;
                self.eviction.remove(victim, RemovalReason::Evicted);
            }
            parent = Some(self.eviction.insert(now, &incoming));
            self.slots[*block] = parent;
        }
        leading
    }

    fn holds(&self, block: usize) -> bool {
        self.slots[block].is_some()
    }
}

#[test]
fn blocks_of_an_ended_session_are_evicted_first() {
    let mut tier = Tier::new(PolicyKind::PrefixCost, 4);
    let over = Hints { ends_session: true, ..Hints::default() };
    tier.request(0, &[1, 2], &Hints::default());
    tier.request(1, &[3, 4], &over);
    tier.request(2, &[5, 6], &Hints::default());
    assert!(tier.holds(1) && tier.holds(2) && !tier.holds(3) && !tier.holds(4));
}

#[test]
fn blocks_expected_by_a_waiting_request_are_kept() {
    for first in [[1, 2], [3, 4]] {
        let mut tier = Tier::new(PolicyKind::PrefixCost, 4);
        tier.request(0, &[1, 2], &Hints::default());
        tier.request(0, &[3, 4], &Hints::default());
        let asked = first.map(|block: usize| RequestedBlock {
            fingerprint: block as u64,
            resident: tier.slots[block],
        });
        let expected = Hints { expected_within: Some(Duration::from_secs(60)), ..Hints::default() };
        tier.eviction.hint(Duration::from_secs(1), &asked, &expected);
        tier.request(2, &[5, 6], &Hints::default());
        assert!(first.iter().all(|block| tier.holds(*block)), "{first:?} was evicted");
    }
}

#[test]
fn stop_reasons_change_the_order_once_they_predict_reuse() {
    let mut tier = Tier::new(PolicyKind::PrefixCost, 60);
    let stopped = |stop| Hints { stop: Some(stop), ..Hints::default() };
    // Chains that stop for a tool are reused after ten seconds, the others never.
    for round in 0..400_usize {
        let block = 10 + 4 * round;
        let seconds = 10 * round as u64;
        tier.request(seconds, &[block, block + 1], &stopped(StopReason::EndTurn));
        tier.request(seconds, &[block + 2], &stopped(StopReason::ToolUse));
        if round > 0 {
            tier.request(seconds, &[block - 2, block + 3], &stopped(StopReason::EndTurn));
        }
    }
    tier.request(4000, &[3001], &stopped(StopReason::ToolUse));
    tier.request(4000, &[3002], &stopped(StopReason::EndTurn));
    let now = Duration::from_secs(4001);
    let mut order = Vec::new();
    tier.eviction.victims(now, 60, &mut |_| true, &mut order);
    // A block that was not admitted sorts before all others.
    let place = |owner| order.iter().position(|other| *other == owner);
    assert!(place(3001).is_some() && place(3002) < place(3001), "{order:?}");
}

#[test]
fn memory_per_block_is_bounded() {
    let mut eviction = Eviction::new(Box::new(PrefixCost::default()), LIMITS);
    let blocks = 100_000_u32;
    for chain in 0..blocks / 20 {
        let now = Duration::from_millis(u64::from(chain));
        let fingerprints = chain * 20..chain * 20 + 20;
        let asked: Vec<_> = fingerprints
            .clone()
            .map(|block| RequestedBlock { fingerprint: block.into(), resident: None })
            .collect();
        eviction.request(now, &asked, false, &Hints::default());
        let mut parent = None;
        for owner in fingerprints {
            let fingerprint = owner.into();
            let incoming = Incoming { owner, fingerprint, parent, bytes: 1, is_protected: false };
            parent = Some(eviction.insert(now, &incoming));
        }
    }
    let each = eviction.memory_bytes() / blocks as usize;
    assert!(each <= 80, "{each} bytes per resident block");
}

proptest! {
    /// LRU evicts the same blocks as a list with linear search.
    #[test]
    fn lru_matches_a_naive_list(
        uses in prop::collection::vec((0_usize..30, 0_usize..3), 1..200),
    ) {
        let mut tier = Tier::new(PolicyKind::Lru, 8);
        let mut list: Vec<usize> = Vec::new();
        for (step, (block, extra)) in uses.into_iter().enumerate() {
            // A root, or a root with one child. The child is the older one of the two.
            let chain = if extra == 0 { vec![block, block + 100] } else { vec![block] };
            tier.request(step as u64, &chain, &Hints::default());
            let hits = chain.iter().take_while(|block| list.contains(block)).count();
            for block in chain[..hits].iter().rev() {
                list.retain(|other| other != block);
                list.push(*block);
            }
            for (at, block) in chain.iter().enumerate().skip(hits) {
                if list.len() == 8 {
                    let leaf = |at: &usize| *at >= 100 || !list.contains(&(at + 100));
                    let parent = at.checked_sub(1).map(|at| chain[at]);
                    let oldest = list.iter().position(|at| leaf(at) && Some(*at) != parent);
                    list.remove(oldest.unwrap());
                }
                let parent = list.iter().position(|other| at > 0 && *other == chain[at - 1]);
                list.insert(parent.unwrap_or(list.len()), *block);
            }
            let resident = (0..200).filter(|block| tier.holds(*block)).collect::<Vec<_>>();
            let mut expected = list.clone();
            expected.sort_unstable();
            prop_assert_eq!(resident, expected);
        }
    }

    /// The ghost list is a bounded queue with a lookup.
    #[test]
    fn ghosts_match_a_queue(steps in prop::collection::vec((0_u64..40, 0_u8..4), 1..300)) {
        let mut ghosts = Ghosts::default();
        // A removed entry occupies its place until the ring wraps, so the model keeps it as `None`.
        let mut queue: VecDeque<Option<(u64, u32)>> = VecDeque::new();
        for (number, (fingerprint, action)) in (0_u32..).zip(steps) {
            let fits = |(key, _): (u64, u32)| key == fingerprint;
            let at = queue.iter().position(|ghost| ghost.is_some_and(fits));
            let known = at.and_then(|at| queue[at]);
            prop_assert_eq!(ghosts.get(fingerprint), known.map(|(_, value)| value));
            match (action, at) {
                (0, Some(at)) => {
                    let value = queue[at].take().map(|ghost| ghost.1);
                    prop_assert_eq!(ghosts.take(fingerprint), value);
                }
                (1, _) => {
                    let oldest = queue.iter_mut().find(|ghost| ghost.is_some());
                    prop_assert_eq!(ghosts.pop(), oldest.and_then(Option::take));
                }
                (_, None) => {
                    while queue.front().is_some_and(Option::is_none) {
                        queue.pop_front();
                    }
                    let is_full = queue.len() == 16;
                    let forgotten = if is_full { queue.pop_front().flatten() } else { None };
                    queue.push_back(Some((fingerprint, number)));
                    prop_assert_eq!(ghosts.push(fingerprint, number, 16), forgotten);
                }
                _ => {}
            }
            prop_assert_eq!(ghosts.len(), queue.iter().flatten().count());
        }
    }
}

#[test]
fn the_default_policy_is_prefix_cost() {
    let eviction = Eviction::new(Box::new(Lru::default()), LIMITS);
    assert_eq!(eviction.policy().name(), "lru");
    assert_eq!(policy(PolicyKind::default()).name(), "prefix-cost");
}
