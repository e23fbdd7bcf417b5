//! Small reads beside large ones of the same connection.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use cascade_transport::{Batch, Connection, Direction, Endpoint, Piece, Place, RegionId};

use super::limit::Limit;
use super::{REGION_BYTES, TransportOptions, failed};
use crate::MeasureError;
use crate::backend::soon;
use crate::node::machine_ns;
use crate::pattern::fill;

/// Bytes of a small read.
const SMALL_BYTES: u64 = 4 << 10;
/// Bytes of a large one, in pieces as long as blocks are.
const LARGE_BYTES: u64 = 64 << 20;
const LARGE_PIECE_BYTES: u64 = 1 << 20;
/// Turns: first idle, then beside large reads.
const TURNS: u64 = 11;
/// Small reads of a turn.
const READS: u64 = 1000;
/// Turns and reads of a short run.
const SHORT: (u64, u64) = (1, 100);

pub(super) const LIMIT_IS: &str = "the same reads while nothing else moves";

/// The connection, and the regions of reads.
#[derive(Debug)]
pub(super) struct Reads {
    pub(super) connection: Arc<dyn Connection>,
    pub(super) local: RegionId,
    pub(super) remote: RegionId,
}

impl Reads {
    /// The 99th percentile in microseconds of small reads beside large ones, by turn, and that of
    /// small reads alone.
    pub(super) fn measure(
        &self,
        options: TransportOptions,
    ) -> Result<(Vec<f64>, Limit), MeasureError> {
        let (turns, reads) = if options.is_short { SHORT } else { (TURNS, READS) };
        let (mut beside, mut alone) = (vec![], vec![]);
        for turn in 0..turns {
            alone.push(self.us_p99(turn, reads)?);
            beside.push(self.us_p99_beside(turn, reads)?);
        }
        Ok((beside, (alone, LIMIT_IS.to_owned())))
    }

    fn us_p99_beside(&self, turn: u64, reads: u64) -> Result<f64, MeasureError> {
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            let large = scope.spawn(|| {
                let mut at = 0;
                while !is_over.load(Ordering::Relaxed) {
                    self.read(at, LARGE_BYTES, LARGE_PIECE_BYTES)?;
                    // The last bytes of the regions are those of small reads.
                    at = (at + LARGE_BYTES) % (REGION_BYTES / 2);
                }
                Ok(())
            });
            // The first ones are beside nothing yet, and open what they need.
            let measured = self.us_p99(turn, reads / 10).and_then(|_| self.us_p99(turn, reads));
            is_over.store(true, Ordering::Relaxed);
            let large = large.join().map_err(|_| failed("a thread panicked"))?;
            large.and(measured)
        })
    }

    fn us_p99(&self, turn: u64, reads: u64) -> Result<f64, MeasureError> {
        let mut all = vec![];
        for number in 0..reads {
            let at = REGION_BYTES / 2 + (turn * reads + number) % 1000 * SMALL_BYTES;
            let began = machine_ns();
            self.read(at, SMALL_BYTES, SMALL_BYTES)?;
            all.push(machine_ns().saturating_sub(began));
        }
        all.sort_unstable();
        let at = (all.len() * 99 / 100).min(all.len().saturating_sub(1));
        Ok(all.get(at).map_or(0.0, |ns| *ns as f64 / 1e3))
    }

    /// Compares what the first small reads and the first large one have read.
    pub(super) fn verify(&self, client: &Endpoint) -> Result<(), MeasureError> {
        for (at, bytes) in [(0, LARGE_BYTES), (REGION_BYTES / 2, SHORT.1 * SMALL_BYTES)] {
            let length = usize::try_from(bytes).map_err(failed)?;
            let (mut actual, mut expected) = (vec![0; length], vec![0; length]);
            client.fetch(self.local, at, &mut actual).map_err(failed)?;
            fill(at, &mut expected);
            if actual != expected {
                return Err(failed("small reads beside large ones: wrong bytes"));
            }
        }
        Ok(())
    }

    fn read(&self, at: u64, bytes: u64, piece_bytes: u64) -> Result<(), MeasureError> {
        let piece = |offset| Piece {
            local: Place { region: self.local, offset },
            remote: Place { region: self.remote, offset },
            bytes: piece_bytes,
        };
        let step = usize::try_from(piece_bytes).map_err(failed)?;
        let pieces: Vec<_> = (at..at + bytes).step_by(step).map(piece).collect();
        let batch = Batch { direction: Direction::Read, pieces: &pieces, notice: None };
        let moved = self.connection.post(&batch, soon()).and_then(|mut it| it.wait(soon()));
        moved.map_err(failed)
    }
}
