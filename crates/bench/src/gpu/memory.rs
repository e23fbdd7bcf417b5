//! The memory of the copies: pinned host memory, memory of the device, and known bytes in both.

use std::sync::Arc;
use std::time::Duration;

use cascade_block::BlockKey;
use cascade_device::{
    Context, Copier, Copy, Costs, CudaError, DeviceAllocation, Direction, ForeignMemory, Fragment,
    RegisteredPool, Slabs, Transfer, Way,
};
use cascade_memory::{HostSlab, HostSlabMut, HugePages, Pool, PoolConfig};
use cascade_replay::payload;

use super::failed;
use super::work::{Form, Work, timed_work};
use crate::{MeasureError, keys};

/// What host memory has before bytes of the device arrive in it.
pub(super) const ABSENT: u8 = 0xEE;

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

    /// A copier that takes one way, with a table for its estimates.
    pub(super) fn copier_by(
        &self,
        context: &Arc<Context>,
        way: Way,
        costs: Option<Costs>,
    ) -> Result<Copier, CudaError> {
        Copier::with_way(context, Arc::clone(&self.registered), way, costs)
    }

    /// A copier that chooses by a table.
    pub(super) fn copier_with(
        &self,
        context: &Arc<Context>,
        costs: Costs,
    ) -> Result<Copier, MeasureError> {
        Copier::with_costs(context, Arc::clone(&self.registered), costs).map_err(failed)
    }

    pub(super) fn slab(&self, bytes: usize) -> Result<HostSlabMut, MeasureError> {
        let slab = self.pool.allocate(bytes).and_then(|slab| slab.into_host().ok());
        slab.ok_or_else(|| MeasureError::measure("pinned memory", "the pool is too small"))
    }

    pub(super) fn full_slab(&self, bytes: usize, key: &BlockKey) -> Result<HostSlab, MeasureError> {
        let mut slab = self.slab(bytes)?;
        payload::fill(key, &mut slab);
        Ok(slab.seal())
    }
}

/// Plain copies: one long one each way. They are the limit of all others, they put known bytes into
/// the device's memory before a copy, and they read it after.
pub(super) struct Plain {
    pub(super) bytes: usize,
    pub(super) memory: Arc<DeviceAllocation>,
    /// The same memory, for transfers.
    pub(super) foreign: Arc<ForeignMemory>,
    /// The bytes that a copy to the device puts there.
    known: HostSlab,
    copier: Copier,
    /// What the last read returned; none after an error.
    found: Option<HostSlabMut>,
}

impl Plain {
    pub(super) fn new(context: &Arc<Context>, bytes: usize) -> Result<Self, MeasureError> {
        let memory = DeviceAllocation::new(context, bytes).map_err(failed)?;
        let foreign = ForeignMemory::of_allocation(context, &memory);
        // Two slabs and what the pool rounds up.
        let pinned = Pinned::new(context, 2 * bytes + (4 << 20))?;
        let known = pinned.full_slab(bytes, &keys("gpu known", 1)[0])?;
        let found = Some(pinned.slab(bytes)?);
        let copier = pinned.copier(context)?;
        Ok(Self { bytes, memory, foreign, known, copier, found })
    }

    /// One copy between the start of a slab and that of the device's memory.
    fn copy(&self, slabs: Slabs, bytes: usize) -> Result<(Duration, Slabs), MeasureError> {
        let fragment = Fragment { slab: 0, slab_offset: 0, memory: 0, memory_offset: 0, bytes };
        let (memory, fragments) = (vec![Arc::clone(&self.foreign)], vec![fragment]);
        let work = Work::Transfer(Transfer { slabs, memory, fragments });
        let (took, mut slabs) = timed_work(vec![(&self.copier, work)])?;
        Ok((took, slabs.remove(0)))
    }

    /// Fills the first bytes of the device's memory with the known ones.
    pub(super) fn fill_device(&mut self, bytes: usize) -> Result<Duration, MeasureError> {
        self.copy(Slabs::ToDevice(vec![self.known.clone()]), bytes).map(|(took, _)| took)
    }

    /// Reads the first bytes of the device's memory.
    pub(super) fn read_device(&mut self, bytes: usize) -> Result<Duration, MeasureError> {
        let slabs = self.found.take().into_iter().collect();
        let (took, slabs) = self.copy(Slabs::ToHost(slabs), bytes)?;
        if let Slabs::ToHost(mut slabs) = slabs {
            self.found = slabs.pop();
        }
        Ok(took)
    }

    /// Removes what earlier reads returned.
    pub(super) fn forget(&mut self, bytes: usize) {
        if let Some(found) = &mut self.found {
            found[..bytes].fill(ABSENT);
        }
    }

    /// What the last read of the device's memory returned.
    pub(super) fn found(&self) -> &[u8] {
        self.found.as_deref().unwrap_or_default()
    }

    /// The bytes that a fill puts there.
    pub(super) fn known(&self) -> &[u8] {
        &self.known
    }

    /// Whether a read of the whole device after a fill returned the same bytes.
    pub(super) fn check(&self) -> Result<(), MeasureError> {
        check("plain copies", 0, self.found(), &self.known)
    }
}

/// Fragments of one direction and length, to copy again and again.
pub(super) struct Fragments {
    direction: Direction,
    bytes: usize,
    /// Where each is in the device's memory.
    places: Vec<usize>,
    /// A slab for each; empty after an error.
    slabs: Slabs,
}

impl Fragments {
    /// Fragments whose host sides are neighbours and whose places on the device are scattered, as
    /// those of pages of KV, in the device's memory from `first` on.
    pub(super) fn new(
        pinned: &Pinned,
        direction: Direction,
        (bytes, count): (usize, usize),
        first: usize,
    ) -> Result<Self, MeasureError> {
        let places: Vec<usize> = scattered(count).map(|at| first + at * bytes).collect();
        let slabs = match direction {
            Direction::ToDevice => {
                let contents = keys("gpu fragments", count);
                let slabs = contents.iter().map(|key| pinned.full_slab(bytes, key));
                Slabs::ToDevice(slabs.collect::<Result<_, MeasureError>>()?)
            }
            Direction::ToHost => {
                let slabs = (0..count).map(|_| pinned.slab(bytes));
                Slabs::ToHost(slabs.collect::<Result<_, MeasureError>>()?)
            }
        };
        Ok(Self { direction, bytes, places, slabs })
    }

    /// All bytes of one submission.
    pub(super) fn total_bytes(&self) -> usize {
        self.bytes * self.places.len()
    }

    /// The slabs in a form that can be submitted. The caller gives them back by `put_back`.
    pub(super) fn work(&mut self, form: Form, plain: &Plain) -> Result<Work, MeasureError> {
        let slabs = std::mem::replace(&mut self.slabs, Slabs::ToDevice(Vec::new()));
        if form == Form::Transfer {
            let places = self.places.iter().enumerate();
            let fragment = |(slab, place): (usize, &usize)| {
                let (memory_offset, bytes) = (*place, self.bytes);
                Fragment { slab, slab_offset: 0, memory: 0, memory_offset, bytes }
            };
            let fragments = places.map(fragment).collect();
            let memory = vec![Arc::clone(&plain.foreign)];
            return Ok(Work::Transfer(Transfer { slabs, memory, fragments }));
        }
        let pieces = self.places.iter().map(|place| plain.memory.piece(*place, self.bytes));
        let pieces = pieces.map(|piece| piece.map_err(failed));
        let copies: Result<Vec<Copy>, MeasureError> = match slabs {
            Slabs::ToDevice(slabs) => slabs
                .into_iter()
                .zip(pieces)
                .map(|(source, piece)| Ok(Copy::ToDevice { source, target: piece? }))
                .collect(),
            Slabs::ToHost(slabs) => slabs
                .into_iter()
                .zip(pieces)
                .map(|(target, piece)| Ok(Copy::ToHost { source: piece?, target }))
                .collect(),
            // All slabs of the benchmark are in host memory.
            Slabs::FromDevicePool(_) | Slabs::ToDevicePool(_) => Ok(Vec::new()),
        };
        copies.map(Work::Copies)
    }

    /// Takes the slabs back after their copies.
    pub(super) fn put_back(&mut self, slabs: Slabs) {
        self.slabs = slabs;
    }

    /// Removes from the host what an earlier round copied.
    pub(super) fn forget(&mut self) {
        if let Slabs::ToHost(slabs) = &mut self.slabs {
            for slab in slabs {
                slab.fill(ABSENT);
            }
        }
    }

    /// Compares every byte: what arrived on the device, by the last read of it, and in host memory.
    pub(super) fn check(&self, name: &str, plain: &Plain) -> Result<(), MeasureError> {
        let slabs: Vec<&[u8]> = match &self.slabs {
            Slabs::ToDevice(slabs) => slabs.iter().map(|slab| &**slab).collect(),
            Slabs::ToHost(slabs) => slabs.iter().map(|slab| &**slab).collect(),
            Slabs::FromDevicePool(_) | Slabs::ToDevicePool(_) => Vec::new(),
        };
        assert_eq!(slabs.len(), self.places.len(), "every slab came back");
        for (at, (slab, place)) in slabs.into_iter().zip(&self.places).enumerate() {
            let on_device = *place..place + self.bytes;
            match self.direction {
                Direction::ToDevice => check(name, at, &plain.found()[on_device], slab)?,
                Direction::ToHost => check(name, at, slab, &plain.known[on_device])?,
            }
        }
        Ok(())
    }

    pub(super) fn direction(&self) -> Direction {
        self.direction
    }
}

/// `0..count` in an order in which no two neighbours follow each other, for counts over 2.
pub(super) fn scattered(count: usize) -> impl Iterator<Item = usize> {
    // The factor has no common divisor with any count here, so each place occurs once.
    (0..count).map(move |at| (at * 40_503 + count / 2) % count)
}

pub(super) fn check(
    name: &str,
    at: usize,
    found: &[u8],
    expected: &[u8],
) -> Result<(), MeasureError> {
    if found == expected {
        return Ok(());
    }
    Err(MeasureError::measure(name, format!("WRONG BYTES in fragment {at}")))
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

    /// Otherwise the rows of staged copies would measure something else: runs of one fragment.
    #[test]
    fn slabs_of_one_length_are_neighbours() {
        for (bytes, count) in [(4 << 10, 4096), (16 << 10, 512), (2 << 20, 4)] {
            let capacity_bytes = bytes * count + (4 << 20);
            let config =
                PoolConfig { capacity_bytes, huge_pages: HugePages::Never, populate: false };
            let pool = Pool::new(&config).expect("a small pool");
            let slab = |_| match pool.allocate(bytes).map(cascade_memory::SlabMut::into_host) {
                Some(Ok(slab)) => slab,
                _ => panic!("it fits into host memory"),
            };
            let slabs: Vec<HostSlabMut> = (0..count).map(slab).collect();
            let mut starts: Vec<usize> = slabs.iter().map(|slab| slab.as_ptr().addr()).collect();
            starts.sort_unstable();
            let gaps = starts.windows(2).filter(|pair| pair[0] + bytes != pair[1]).count();
            // Few gaps, each the end of a run.
            assert!(gaps * 1024 <= count, "{bytes}: {gaps} gaps");
        }
    }

    #[test]
    fn a_wrong_byte_is_found() {
        assert!(check("a", 0, &[1, 2, 3], &[1, 2, 3]).is_ok());
        let error = check("a", 7, &[1, 2, 3], &[1, 2, 4]).expect_err("it differs");
        assert!(cascade_block::with_causes(&error).contains("WRONG BYTES in fragment 7"));
    }
}
