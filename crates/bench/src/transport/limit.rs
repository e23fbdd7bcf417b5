//! The limit of shared memory: copies of the same blocks inside one process.

use std::ops::Range;

use cascade_memory::{HostSlabMut, copy_in, prefetch_block};

use super::blocks::Sequence;
use super::in_step::in_step;
use super::{REGION_BYTES, failed};
use crate::MeasureError;
use crate::figure::median;
use crate::plain_stream::populated;

/// How far ahead of the copies blocks are prefetched.
const BLOCKS_AHEAD: usize = 4;

/// Samples, and what they are.
pub(super) type Limit = (Vec<f64>, String);

/// How blocks are copied. Which way is the fastest depends on their length.
#[derive(Debug, Clone, Copy)]
enum Way {
    Memcpy,
    /// The begin of blocks is prefetched while the ones before them are copied.
    Ahead,
    /// The same with streaming stores, for blocks for which `copy_in` has them.
    Streamed,
}

impl Way {
    const ALL: [Self; 3] = [Self::Memcpy, Self::Ahead, Self::Streamed];

    fn name(self) -> &'static str {
        match self {
            Self::Memcpy => "memcpy",
            Self::Ahead => "memcpy that prefetches the next blocks",
            Self::Streamed => "streaming stores that prefetch the next blocks",
        }
    }
}

/// Samples of all ways, in the order of `Way::ALL`.
#[derive(Debug, Default)]
pub(super) struct CopyRates([Vec<f64>; Way::ALL.len()]);

impl CopyRates {
    /// The fastest way.
    pub(super) fn into_limit(self, threads: u64) -> Limit {
        let ways = Way::ALL.into_iter().zip(self.0);
        let fastest = ways.max_by(|(_, a), (_, b)| median(a).total_cmp(&median(b)));
        let (way, rates) = fastest.expect("there are three");
        let kind = way.name();
        let text = format!(
            "copies of blocks of this length in random order inside one process, by {threads} \
             threads and {kind}, the fastest of three ways; median of samples taken between the \
             batches"
        );
        (rates, text)
    }
}

/// Memory of this process, as long as the regions are and mapped as they are.
#[derive(Debug)]
pub(super) struct LocalCopies {
    source: HostSlabMut,
    target: HostSlabMut,
}

impl LocalCopies {
    pub(super) fn allocate() -> Result<Self, MeasureError> {
        let [source, target] = populated(usize::try_from(REGION_BYTES).map_err(failed)?)?;
        Ok(Self { source, target })
    }

    /// Takes a sample of each way of copying a row's blocks: as many batches as one of ours, by as
    /// many threads. Each copies other blocks, so that few are in a cache.
    pub(super) fn sample(
        &mut self,
        (sequence, batches): (&Sequence, u64),
        run: u64,
        rates: &mut CopyRates,
    ) -> Result<(), MeasureError> {
        let mut first = run * batches * Way::ALL.len() as u64;
        for (way, rates) in Way::ALL.into_iter().zip(&mut rates.0) {
            rates.push(self.copy(sequence, first..first + batches, way)?);
            first += batches;
        }
        Ok(())
    }

    fn copy(
        &mut self,
        sequence: &Sequence,
        iterations: Range<u64>,
        way: Way,
    ) -> Result<f64, MeasureError> {
        let bytes = usize::try_from(sequence.block_bytes).map_err(failed)?;
        let threads = usize::try_from(sequence.threads).map_err(failed)?;
        let part = self.target.len() / threads;
        let worker = |(target, thread): (_, u64)| {
            let source = &self.source;
            let target: &mut [u8] = target;
            let first = thread * part as u64 / sequence.block_bytes;
            let index = |block| usize::try_from(block).expect("an index");
            let place = |(from, to)| (index(from) * bytes, index(to - first) * bytes);
            let blocks = iterations.clone().flat_map(|it| sequence.blocks(thread, it));
            let list: Vec<_> = blocks.map(place).collect();
            move |_| {
                let mut ahead = list.iter().skip(BLOCKS_AHEAD);
                for (from, to) in &list {
                    if let (Way::Ahead | Way::Streamed, Some((from, to))) = (way, ahead.next()) {
                        prefetch_block(&source[*from..*from + bytes]);
                        prefetch_block(&target[*to..*to + bytes]);
                    }
                    let (from, to) = (&source[*from..*from + bytes], &mut target[*to..*to + bytes]);
                    match way {
                        Way::Memcpy | Way::Ahead => to.copy_from_slice(from),
                        Way::Streamed => copy_in(to, from),
                    }
                }
                Ok(())
            }
        };
        let workers = self.target.chunks_exact_mut(part).zip(0..).map(worker).collect();
        let batches = (iterations.end - iterations.start) * sequence.threads;
        let copied = (batches * sequence.batch * sequence.block_bytes) as f64;
        let took = in_step(workers, 1, |_| Ok(()))?;
        Ok(copied / took[0].as_secs_f64().max(1e-9) / 1e9)
    }
}
