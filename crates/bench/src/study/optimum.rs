//! The best that any policy could do: Belady's rule with bypass.

use std::collections::BinaryHeap;

use super::StudyResult;
use crate::trace::Trace;

const NEVER: u32 = u32::MAX;

/// Replays a trace knowing its future: what is asked for last goes first, and what would go first
/// does not come in. A block is asked for whenever one behind it is, so leaves go first by
/// themselves; of blocks asked for next by the same request, the deeper one goes.
///
/// # Panics
/// If the trace has `u32::MAX` requests or more.
pub fn optimum(trace: &Trace, capacity_blocks: u64) -> StudyResult {
    let next_uses = next_uses(trace);
    let blocks = usize::try_from(trace.unique_blocks).expect("a trace that fits in memory");
    // Of each block: the number of its next use if it is resident.
    let mut resident: Vec<Option<u32>> = vec![None; blocks];
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

/// Takes out the resident block that is asked for last, if that is later than `incoming`.
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

/// For each block of each request, in order: the number of the next request that asks for it.
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
