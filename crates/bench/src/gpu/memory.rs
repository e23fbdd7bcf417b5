//! The memory of the copies: pinned host memory, memory of the device, and known bytes in both.

use std::sync::Arc;
use std::time::Duration;

use cascade_block::BlockKey;
use cascade_device::{Context, Copier, Copy, DeviceAllocation, Pending, RegisteredPool};
use cascade_memory::{HostSlab, HostSlabMut, HugePages, Pool, PoolConfig};
use cascade_replay::payload;
use cascade_runtime::{Clock as _, SystemClock, yield_now};

use super::{failed, soon};
use crate::{MeasureError, keys};

/// What a slab has before bytes of the device arrive in it.
const ABSENT: u8 = 0xEE;

/// Where copies go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    ToDevice,
    ToHost,
}

/// Pinned host memory, registered as one piece, so that no copy is divided.
pub(super) struct Pinned {
    pub(super) pool: Pool,
    pub(super) registered: Arc<RegisteredPool>,
}

impl Pinned {
    pub(super) fn new(context: &Arc<Context>, bytes: usize) -> Result<Self, MeasureError> {
        let huge_pages = HugePages::Auto;
        let pool = Pool::new(&PoolConfig { capacity_bytes: bytes, huge_pages, populate: true });
        let pool = pool.map_err(|error| MeasureError::measure("pinned memory", error))?;
        let registered = RegisteredPool::new(context, Arc::new(pool.clone()), usize::MAX);
        let registered = registered.map_err(failed)?;
        match registered.report().refusal.clone() {
            Some(refusal) => Err(MeasureError::measure("pinned memory", refusal)),
            None => Ok(Self { pool, registered }),
        }
    }

    pub(super) fn copier(&self, context: &Arc<Context>) -> Result<Copier, MeasureError> {
        Copier::new(context, Arc::clone(&self.registered)).map_err(failed)
    }

    fn slab(&self, bytes: usize) -> Result<HostSlabMut, MeasureError> {
        let slab = self.pool.allocate(bytes).and_then(|slab| slab.into_host().ok());
        slab.ok_or_else(|| MeasureError::measure("pinned memory", "the pool is too small"))
    }

    fn full_slab(&self, bytes: usize, key: &BlockKey) -> Result<HostSlab, MeasureError> {
        let mut slab = self.slab(bytes)?;
        payload::fill(key, &mut slab);
        Ok(slab.seal())
    }
}

/// Plain copies: one long one each way. They are the limit of all others, they put known bytes into
/// the device's memory before a copy, and they read all of it after.
pub(super) struct Plain {
    pub(super) bytes: usize,
    pub(super) memory: Arc<DeviceAllocation>,
    /// The bytes that a copy to the device puts there.
    known: HostSlab,
    copier: Copier,
    to_device: Vec<Copy>,
    to_host: Vec<Copy>,
}

impl Plain {
    pub(super) fn new(context: &Arc<Context>, bytes: usize) -> Result<Self, MeasureError> {
        let memory = DeviceAllocation::new(context, bytes).map_err(failed)?;
        // Two slabs and what the pool rounds up.
        let pinned = Pinned::new(context, 2 * bytes + (4 << 20))?;
        let known = pinned.full_slab(bytes, &keys("gpu known", 1)[0])?;
        let whole = || memory.piece(0, bytes).map_err(failed);
        let to_device = vec![Copy::ToDevice { source: known.clone(), target: whole()? }];
        let to_host = vec![Copy::ToHost { source: whole()?, target: pinned.slab(bytes)? }];
        let copier = pinned.copier(context)?;
        Ok(Self { bytes, memory, known, copier, to_device, to_host })
    }

    /// Fills the device's memory with the known bytes.
    pub(super) fn fill_device(&mut self) -> Result<Duration, MeasureError> {
        timed_copies(vec![(&self.copier, &mut self.to_device)])
    }

    /// Reads the device's memory.
    pub(super) fn read_device(&mut self) -> Result<Duration, MeasureError> {
        timed_copies(vec![(&self.copier, &mut self.to_host)])
    }

    /// What the last read of the device's memory returned.
    fn found(&self) -> &[u8] {
        match &self.to_host[..] {
            [Copy::ToHost { target, .. }] => target,
            _ => &[],
        }
    }

    /// Whether a read of the whole device after a fill returned the same bytes.
    pub(super) fn check(&self) -> Result<(), MeasureError> {
        check("plain copies", 0, self.found(), &self.known)
    }
}

/// Copies of one direction and length, to submit again and again.
pub(super) struct Fragments {
    direction: Direction,
    bytes: usize,
    /// Where each is in the device's memory.
    places: Vec<usize>,
    pub(super) copies: Vec<Copy>,
}

impl Fragments {
    /// Fragments whose host sides are neighbours and whose places on the device are scattered, as
    /// those of pages of KV, in the device's memory from `first` on.
    pub(super) fn new(
        pinned: &Pinned,
        plain: &Plain,
        direction: Direction,
        (bytes, count): (usize, usize),
        first: usize,
    ) -> Result<Self, MeasureError> {
        let places: Vec<usize> = scattered(count).map(|at| first + at * bytes).collect();
        let contents = keys("gpu fragments", count);
        let copies = places.iter().zip(&contents).map(|(place, key)| {
            let piece = plain.memory.piece(*place, bytes).map_err(failed)?;
            Ok(match direction {
                Direction::ToDevice => {
                    Copy::ToDevice { source: pinned.full_slab(bytes, key)?, target: piece }
                }
                Direction::ToHost => Copy::ToHost { source: piece, target: pinned.slab(bytes)? },
            })
        });
        let copies: Result<Vec<Copy>, MeasureError> = copies.collect();
        Ok(Self { direction, bytes, copies: copies?, places })
    }

    /// All bytes of one submission.
    pub(super) fn total_bytes(&self) -> usize {
        self.bytes * self.copies.len()
    }

    /// Removes from the host what an earlier round copied.
    pub(super) fn forget(&mut self) {
        for copy in &mut self.copies {
            if let Copy::ToHost { target, .. } = copy {
                target.fill(ABSENT);
            }
        }
    }

    /// Compares every byte: what arrived on the device, by the last read of it, and in host memory.
    pub(super) fn check(&self, name: &str, plain: &Plain) -> Result<(), MeasureError> {
        assert_eq!(self.copies.len(), self.places.len(), "every copy came back");
        for (at, (copy, place)) in self.copies.iter().zip(&self.places).enumerate() {
            let on_device = *place..place + self.bytes;
            match copy {
                Copy::ToDevice { source, .. } => {
                    check(name, at, &plain.found()[on_device], source)?;
                }
                Copy::ToHost { target, .. } => check(name, at, target, &plain.known[on_device])?,
                Copy::Within { .. } => {}
            }
        }
        Ok(())
    }

    pub(super) fn direction(&self) -> Direction {
        self.direction
    }
}

/// `0..count` in an order in which no two neighbours follow each other, for counts over 2.
fn scattered(count: usize) -> impl Iterator<Item = usize> {
    // The factor has no common divisor with any count here, so each place occurs once.
    (0..count).map(move |at| (at * 40_503 + count / 2) % count)
}

fn check(name: &str, at: usize, found: &[u8], expected: &[u8]) -> Result<(), MeasureError> {
    if found == expected {
        return Ok(());
    }
    Err(MeasureError::measure(name, format!("WRONG BYTES in fragment {at}")))
}

/// The time from the first submission until the last copy is over.
pub(super) fn timed_copies(
    submissions: Vec<(&Copier, &mut Vec<Copy>)>,
) -> Result<Duration, MeasureError> {
    let mut pending: Vec<(Pending, &mut Vec<Copy>)> = Vec::with_capacity(submissions.len());
    let began = SystemClock.monotonic();
    for (copier, copies) in submissions {
        let started = copier.submit(std::mem::take(copies), None).map_err(failed)?;
        pending.push((started, copies));
    }
    let deadline = soon();
    for (started, _) in &pending {
        // `Pending::wait` sleeps between two questions, which would be a part of the time.
        while !started.is_over().map_err(failed)? && !deadline.has_passed(&SystemClock) {
            yield_now();
        }
    }
    let took = SystemClock.monotonic().saturating_sub(began);
    for (mut started, copies) in pending {
        *copies = started.wait(deadline).map_err(failed)?.unwrap_or_default();
    }
    Ok(took)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scattered_places_are_each_used_once_and_have_other_neighbours() {
        for count in [2, 4, 16, 128, 1024, 8192, 65_536] {
            let places: Vec<usize> = scattered(count).collect();
            let mut sorted = places.clone();
            sorted.sort_unstable();
            assert!(sorted.into_iter().eq(0..count), "{count}");
            let follow = places.windows(2).filter(|pair| pair[0] + 1 == pair[1]).count();
            assert!(count < 3 || follow == 0, "{count}: {follow} neighbours");
        }
    }

    #[test]
    fn a_wrong_byte_is_found() {
        assert!(check("a", 0, &[1, 2, 3], &[1, 2, 3]).is_ok());
        let error = check("a", 7, &[1, 2, 3], &[1, 2, 4]).expect_err("it differs");
        assert!(cascade_block::with_causes(&error).contains("WRONG BYTES in fragment 7"));
    }
}
