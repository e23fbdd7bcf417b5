//! The optimum over all policies: Belady's algorithm with bypass.

use std::collections::BinaryHeap;

use super::StudyResult;
use crate::trace::Trace;

const NEVER: u32 = u32::MAX;

/// Replays a trace with knowledge of its future.
///
/// It evicts the block with the latest next use. A new block bypasses the cache if its own next use
/// is the latest. A request that uses a block also uses its parents, so the next use of a parent is
/// never later. Of blocks with the same next use, the deeper one is evicted, so leaves go first.
///
/// # Panics
/// If the trace has `u32::MAX` requests or more.
pub fn optimum(trace: &Trace, capacity_blocks: u64) -> StudyResult {
    let next_uses = next_uses(trace);
    let blocks = usize::try_from(trace.unique_blocks).expect("a trace that fits in memory");
    // For each resident block, the request of its next use.
    let mut resident: Vec<Option<u32>> = vec![None; blocks];
    // Next use, depth and block, latest first. Entries with an outdated next use are skipped.
    let mut order: BinaryHeap<(u32, usize, u64)> = BinaryHeap::new();
    let (mut count, mut at) = (0_u64, 0);
    let mut result = StudyResult {
        policy: "optimum".to_owned(),
        capacity_blocks,
        requests: trace.requests.len() as u64,
        blocks_requested: trace.block_count(),
        blocks_hit: 0,
        hits_of_requests: Vec::with_capacity(trace.requests.len()),
        blocks_inserted: 0,
        blocks_evicted: 0,
        requests_declined: 0,
        memory_bytes: 0,
    };
    for request in &trace.requests {
        let is_resident = |block: &&u64| resident[index(**block)].is_some();
        let hits = request.blocks.iter().take_while(is_resident).count();
        result.blocks_hit += hits as u64;
        result.hits_of_requests.push(u32::try_from(hits).expect("a request has fewer blocks"));
        for (depth, block) in request.blocks.iter().enumerate() {
            let next = next_uses[at];
            at += 1;
            let was_resident = resident[index(*block)].take().is_some();
            count -= u64::from(was_resident);
            if next == NEVER {
                continue;
            }
            if count == capacity_blocks {
                let Some(last) = pop_last(&mut order, &resident, (next, depth)) else { continue };
                resident[index(last)] = None;
                count -= 1;
                result.blocks_evicted += 1;
            }
            resident[index(*block)] = Some(next);
            order.push((next, depth, *block));
            count += 1;
            result.blocks_inserted += u64::from(!was_resident);
        }
    }
    result
}

/// Removes the resident block with the latest next use, if that is later than that of `incoming`.
fn pop_last(
    order: &mut BinaryHeap<(u32, usize, u64)>,
    resident: &[Option<u32>],
    incoming: (u32, usize),
) -> Option<u64> {
    while let Some((next, depth, block)) = order.peek().copied() {
        if resident[index(block)] != Some(next) {
            order.pop();
        } else if (next, depth) > incoming {
            order.pop();
            return Some(block);
        } else {
            return None;
        }
    }
    None
}

/// For each block of each request, in order: the index of the next request that uses it.
fn next_uses(trace: &Trace) -> Vec<u32> {
    let blocks = usize::try_from(trace.unique_blocks).expect("a trace that fits in memory");
    let mut next = vec![NEVER; blocks];
    let mut uses = Vec::new();
    for (number, request) in trace.requests.iter().enumerate().rev() {
        let number = u32::try_from(number).expect("fewer than 2^32 requests");
        uses.extend(request.blocks.iter().rev().map(|block| next[index(*block)]));
        request.blocks.iter().for_each(|block| next[index(*block)] = number);
    }
    uses.reverse();
    uses
}

fn index(block: u64) -> usize {
    usize::try_from(block).expect("block numbers are dense")
}
