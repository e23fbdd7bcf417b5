//! A generated trace: people who ask several questions about documents, some of them popular.
//!
//! It is no recording and stands for no real service; it is there because a policy that only works
//! on two recordings has learnt these recordings. Everything follows from the seed.

use std::time::Duration;

use crate::trace::{Trace, TraceRequest};

const BLOCK_TOKENS: u32 = 512;
const DOCUMENTS: u64 = 400;
const SESSIONS: u64 = 1500;
const SECONDS: f64 = 3600.0;

/// The generated trace of a seed.
pub fn generated(seed: u64) -> Trace {
    let mut random = Random(seed);
    let mut requests = Vec::new();
    let mut next_block = 0;
    let mut documents: Vec<Vec<u64>> = Vec::new();
    for _ in 0..DOCUMENTS {
        let blocks = 10 + random.below(90);
        documents.push((next_block..next_block + blocks).collect());
        next_block += blocks;
    }
    for session in 0..SESSIONS {
        // The product of two makes the first documents popular.
        let popular = random.below(DOCUMENTS + 1) * random.below(DOCUMENTS) / DOCUMENTS;
        let mut chain = documents[index(popular.min(DOCUMENTS - 1))].clone();
        let mut at = random.unit() * SECONDS;
        // Half of the people ask once; the others go on with three chances in four.
        let mut goes_on = 0.5;
        loop {
            let added = 1 + random.below(6);
            chain.extend(next_block..next_block + added);
            next_block += added;
            requests.push(request(at, &chain, session, &mut random));
            // The block that was not full is another one next time.
            chain.pop();
            if random.unit() > goes_on || at > SECONDS {
                break;
            }
            goes_on = 0.75;
            at += -60.0 * random.unit().max(1e-9).ln();
        }
    }
    requests.sort_by_key(|request| request.at);
    let unique_blocks = renumber(&mut requests, next_block);
    Trace { name: "generated".to_owned(), block_tokens: BLOCK_TOKENS, requests, unique_blocks }
}

/// Numbers blocks by their first request, because some documents are asked for by nobody.
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

fn request(at: f64, chain: &[u64], session: u64, random: &mut Random) -> TraceRequest {
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

/// `SplitMix64`.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Below `limit`.
    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    /// From zero to below one.
    fn unit(&mut self) -> f64 {
        let high = u32::try_from(self.next() >> 32).expect("32 bits are left");
        f64::from(high) / (f64::from(u32::MAX) + 1.0)
    }
}
