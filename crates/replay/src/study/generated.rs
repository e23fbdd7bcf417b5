//! A generated trace: sessions with several questions about documents, some of them popular.
//!
//! It does not model a real service. It shows whether a policy also works on traffic other than the
//! bundled recordings. Equal seeds give equal traces.

use std::time::Duration;

use crate::random::SplitMix64;
use crate::trace::{Import, Trace, TraceRequest};

const BLOCK_TOKENS: u32 = 512;
const DOCUMENTS: u64 = 400;
const SESSIONS: u64 = 1500;
const SECONDS: f64 = 3600.0;

/// The generated trace of a seed.
pub fn generated(seed: u64) -> Trace {
    let mut random = SplitMix64(seed);
    let mut requests = Vec::new();
    let mut next_block = 0;
    let mut documents: Vec<Vec<u64>> = Vec::new();
    for _ in 0..DOCUMENTS {
        let blocks = 10 + random.below(90);
        documents.push((next_block..next_block + blocks).collect());
        next_block += blocks;
    }
    for session in 0..SESSIONS {
        // The product of two uniform numbers is small more often, so the first documents are
        // popular.
        let popular = random.below(DOCUMENTS + 1) * random.below(DOCUMENTS) / DOCUMENTS;
        let mut chain = documents[index(popular.min(DOCUMENTS - 1))].clone();
        let mut at = random.unit() * SECONDS;
        // Half of the sessions have one request. After the second one, each continues with 3/4.
        let mut continue_probability = 0.5;
        loop {
            let added = 1 + random.below(6);
            chain.extend(next_block..next_block + added);
            next_block += added;
            requests.push(request(at, &chain, session, &mut random));
            // The last block was not full: with more tokens it becomes another block.
            chain.pop();
            if random.unit() > continue_probability || at > SECONDS {
                break;
            }
            continue_probability = 0.75;
            // An exponential distribution with a mean of one minute.
            at += -60.0 * random.unit().max(1e-9).ln();
        }
    }
    requests.sort_by_key(|request| request.at);
    let unique_blocks = renumber(&mut requests, next_block);
    Trace {
        name: "generated".to_owned(),
        block_tokens: BLOCK_TOKENS,
        requests,
        unique_blocks,
        import: Import::default(),
    }
}

/// Numbers blocks densely by their first use, because no session requests some documents.
fn renumber(requests: &mut [TraceRequest], blocks: u64) -> u64 {
    let mut numbers = vec![None; index(blocks)];
    let mut next = 0;
    for block in requests.iter_mut().flat_map(|request| &mut request.blocks) {
        *block = *numbers[index(*block)].get_or_insert_with(|| {
            next += 1;
            next - 1
        });
    }
    next
}

fn index(block: u64) -> usize {
    usize::try_from(block).expect("block numbers are dense")
}

fn request(at: f64, chain: &[u64], session: u64, random: &mut SplitMix64) -> TraceRequest {
    let full = u32::try_from(chain.len() - 1).expect("a few blocks");
    TraceRequest {
        at: Duration::from_secs_f64(at),
        blocks: chain.to_vec(),
        input_tokens: full * BLOCK_TOKENS + 1,
        output_tokens: 1 + u32::try_from(random.below(1000)).expect("below a thousand"),
        partial_tail: true,
        session: u32::try_from(session).ok(),
        stop: None,
    }
}
