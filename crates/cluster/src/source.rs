//! The source: asks all nodes at once which blocks they have, and fetches them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use cascade_block::BlockKey;
use cascade_memory::SlabMut;
use cascade_runtime::{Deadline, SystemClock};
use cascade_tier::TierName;
use cascade_tier::source::{LocatedBlock, Source, SourceLimit};
use cascade_tier::tier::{Address, BlockFacts, Load, LoadOutcome, LoadQueue, TierError, load_list};
use cascade_transport::{AskLimit, TransportError};

use crate::link::Link;
use crate::message::{Question, Stated};
use crate::round::Round;

/// Bytes and blocks of one question for blocks.
const FETCH_MAX: (usize, usize) = (8 << 20, 64);
/// Time that is left for the caller after the last answer.
const MARGIN: Duration = Duration::from_millis(2);

/// The other nodes of a cluster.
#[derive(Debug)]
pub(crate) struct Peers {
    links: Arc<[Arc<Link>]>,
}

/// A block that is being fetched: its number in the queue, its load, and its slab.
struct Fetch {
    number: usize,
    key: BlockKey,
    address: Address,
    slab: SlabMut,
}

impl Peers {
    pub(crate) fn new(links: Arc<[Arc<Link>]>) -> Self {
        Self { links }
    }

    /// Fetches blocks of one node. Returns each with its outcome.
    fn fetch_from(
        &self,
        node: usize,
        mut batch: Vec<Fetch>,
        limit: &SourceLimit<'_>,
    ) -> Vec<(usize, LoadOutcome)> {
        let blocks = batch.iter().map(|it| (it.key, checksum_of(it.address))).collect();
        let question = Question::Fetch { blocks }.to_bytes();
        let mut targets: Vec<&mut [u8]> = Vec::with_capacity(batch.len());
        for fetch in &mut batch {
            // Without memory of the host nothing can be received: a target of no bytes stays empty.
            targets.push(fetch.slab.host_mut().unwrap_or_default());
        }
        let answered = match self.links.get(node) {
            Some(link) => {
                let (deadline, cancel) = (limit.deadline, Some(limit.cancel));
                link.fetch(&question, &mut targets, AskLimit { deadline, cancel })
            }
            // An address of another run, whose list of hosts was longer.
            None => return batch.into_iter().map(|it| (it.number, LoadOutcome::Gone)).collect(),
        };
        drop(targets);
        let outcome = |(fetch, at): (Fetch, u32)| {
            let outcome = match &answered {
                Ok(answer) if answer.filled.binary_search(&at).is_ok() => {
                    LoadOutcome::Hit(fetch.slab)
                }
                Ok(_) => LoadOutcome::Gone,
                Err(error) => LoadOutcome::Failed(tier_error(error)),
            };
            (fetch.number, outcome)
        };
        batch.into_iter().zip(0..).map(outcome).collect()
    }
}

impl Source for Peers {
    fn name(&self) -> TierName {
        "peers"
    }

    fn locate(
        &self,
        keys: &[BlockKey],
        limit: &SourceLimit<'_>,
    ) -> Result<Vec<Option<LocatedBlock>>, TierError> {
        if keys.is_empty() {
            return Ok(Vec::new());
        }
        let time = limit.deadline.time().saturating_sub(MARGIN);
        let round = Arc::new(Round::new(keys, Deadline::at(time)));
        for link in self.links.iter() {
            link.locate(&round);
        }
        let mut answers = round.wait(limit.cancel).ok_or(TierError::Timeout)?;
        // Those with most blocks first, so that few nodes are asked for them.
        answers.sort_by_key(|(_, located)| {
            std::cmp::Reverse(located.iter().filter(|block| block.is_some()).count())
        });
        let block = |(at, key): (usize, &BlockKey)| {
            let mut has = answers.iter().filter_map(|(node, located)| Some((*node, located[at]?)));
            has.next().map(|(node, stated)| located_block(*key, node, stated))
        };
        Ok(keys.iter().enumerate().map(block).collect())
    }

    fn fetch(&self, batch: Vec<Load>, limit: &SourceLimit<'_>) -> Vec<LoadOutcome> {
        load_list(batch, |queue| self.fetch_each(queue, limit))
    }

    fn fetch_each(&self, queue: &mut dyn LoadQueue, limit: &SourceLimit<'_>) {
        while !limit.cancel.is_set() && !limit.deadline.has_passed(&SystemClock) {
            let (mut by_node, mut bytes, mut count) = (BTreeMap::<usize, Vec<Fetch>>::new(), 0, 0);
            while bytes < FETCH_MAX.0
                && count < FETCH_MAX.1
                && let Some((number, Load { key, address, slab })) = queue.next_load()
            {
                (bytes, count) = (bytes + slab.len(), count + 1);
                let fetch = Fetch { number, key, address, slab };
                by_node.entry(node_of(address)).or_default().push(fetch);
            }
            if by_node.is_empty() {
                return;
            }
            for (node, batch) in by_node {
                for (number, outcome) in self.fetch_from(node, batch, limit) {
                    queue.ended(number, outcome);
                }
            }
        }
    }

    /// Nodes that cannot be reached are not asked. The source as a whole is never in the way.
    fn probe(&self, _: Deadline) -> Result<(), TierError> {
        Ok(())
    }
}

fn located_block(key: BlockKey, node: usize, stated: Stated) -> LocatedBlock {
    let facts = BlockFacts {
        key,
        digest: None,
        parent: None,
        namespace: cascade_block::NamespaceId::default(),
        bytes: stated.bytes,
        is_prefix: false,
        written_unix_ms: 0,
        expires_unix_ms: None,
    };
    let checksum = stated.checksum;
    LocatedBlock { facts, checksum, address: Address((node as u64) << 32 | u64::from(checksum)) }
}

fn node_of(address: Address) -> usize {
    usize::try_from(address.0 >> 32).unwrap_or(usize::MAX)
}

fn checksum_of(address: Address) -> u32 {
    u32::try_from(address.0 & u64::from(u32::MAX)).unwrap_or(0)
}

fn tier_error(error: &TransportError) -> TierError {
    match error {
        TransportError::Deadline { .. } => TierError::Timeout,
        error => TierError::Failed(Arc::new(error.clone())),
    }
}
