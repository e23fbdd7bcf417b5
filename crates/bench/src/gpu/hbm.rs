//! The memory tier of a GPU: copies between pages and a pool that is mapped as that of a node,
//! in the memory of the same GPU or of another one.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use cascade_device::{
    Copier, Copy, CudaError, CudaMemory, CudaMemoryConfig, DeviceAllocation, ForeignMemory,
    Fragment, ImportedMemory, Slabs, Transfer,
};
use cascade_memory::{DeviceMemory as _, HostSlab, HostSlabMut, Pool, Slab, SlabMut};
use cascade_runtime::SystemClock;

use super::hbm_rows::{HbmShape, HbmWay, Move, Owner, hbm_shapes};
use super::memory::{ABSENT, Pinned, check, scattered};
use super::work::{Work, timed_work};
use super::{Gpu, Notes, failed};
use crate::figure::median;
use crate::{Bench, Figure, MeasureError, Target, gib_per_second, keys, size_name};

const MIB: usize = 1 << 20;
/// How often one block is copied for a sample of its time.
const REPEATS: usize = 20;

const LIMIT: &str = "one plain copy between both memories, in each round";

/// A pool that was exported and is mapped again, and pages as those of an engine.
struct Tier {
    /// Frees the memory with the last mapping.
    _owner: Arc<CudaMemory>,
    pool: Pool,
    pool_memory: Arc<DeviceAllocation>,
    pool_as_pages: Arc<ForeignMemory>,
    page_memory: Arc<DeviceAllocation>,
    pages: Arc<ForeignMemory>,
    /// Each way's copier, or why there is none.
    copiers: Vec<(HbmWay, Result<Copier, String>)>,
    host: Host,
}

/// Known bytes in host memory, and copies of them.
struct Host {
    copier: Copier,
    known: HostSlab,
    /// What targets have before a copy.
    absent: HostSlab,
    /// What the last read returned; none after an error.
    found: Option<HostSlabMut>,
}

pub(super) fn run(gpu: &Gpu, bench: &mut Bench<'_>, notes: &mut Notes) -> Result<(), MeasureError> {
    for owner in Owner::ALL {
        let plain = owner.plain(&size_name(plain_bytes(gpu)));
        let names: Vec<&str> = plain.iter().map(|(_, name)| &**name).collect();
        let rows = wanted(gpu, bench, owner);
        if gpu.without_hbm || rows.is_empty() && !bench.wants_any(&names) {
            continue;
        }
        let device = match owner {
            Owner::SameGpu => Some(gpu.device),
            Owner::Peer => (0..gpu.report.devices.len()).find(|at| *at != gpu.device),
        };
        let Some(device) = device else {
            notes.leave_out(owner.prefix(), "there is no second GPU");
            continue;
        };
        match Tier::new(gpu, device, notes)? {
            Ok(mut tier) => {
                tier.measure_plain(gpu, bench, &plain)?;
                for (shape, ways) in rows {
                    for figure in tier.measure(gpu, bench.rounds(), shape, &ways, notes)? {
                        gpu.deliver(bench, figure)?;
                    }
                }
            }
            Err(reason) => notes.leave_out(owner.prefix(), &reason),
        }
    }
    Ok(())
}

/// Whether some row that uses the kernel is wanted.
pub(super) fn wants_kernel(gpu: &Gpu, bench: &Bench<'_>) -> bool {
    let rows = Owner::ALL.into_iter().flat_map(|owner| wanted(gpu, bench, owner));
    !gpu.without_hbm && rows.into_iter().any(|(_, ways)| ways.contains(&HbmWay::Mapped))
}

fn wanted(gpu: &Gpu, bench: &Bench<'_>, owner: Owner) -> Vec<(HbmShape, Vec<HbmWay>)> {
    let ways = |shape: &HbmShape| {
        HbmWay::ALL.into_iter().filter(|way| bench.wants(&shape.name(*way))).collect::<Vec<_>>()
    };
    let rows = hbm_shapes(owner, total_max(gpu)).map(|shape| (shape, ways(&shape)));
    rows.filter(|(_, ways)| !ways.is_empty()).collect()
}

/// The length of the pool, of all pages and of a plain copy.
fn plain_bytes(gpu: &Gpu) -> usize {
    if gpu.is_fake() { 8 * MIB } else { 1024 * MIB }
}

/// Most bytes of one submission.
fn total_max(gpu: &Gpu) -> usize {
    if gpu.is_fake() { 4 * MIB } else { 256 * MIB }
}

impl Tier {
    /// Takes the memory, or says why this GPU cannot use that of `device`.
    fn new(gpu: &Gpu, device: usize, notes: &Notes) -> Result<Result<Self, String>, MeasureError> {
        let (context, bytes) = (&gpu.context, plain_bytes(gpu));
        let memory = || {
            let config =
                CudaMemoryConfig { device, shareable: true, ..CudaMemoryConfig::new(bytes) };
            let owner = CudaMemory::new(context.driver(), &config, Arc::new(SystemClock))?;
            let none = || CudaError::NotShareable { missing: "an exported allocation" };
            let shared = owner.shareable().ok_or_else(none)?;
            let (descriptor, device) = (shared.export()?, shared.device());
            let imported = ImportedMemory::open(context, descriptor, owner.bytes(), device)?;
            Ok((owner, imported))
        };
        let (owner, imported) = match memory() {
            Ok(memory) => memory,
            Err(error) => return gpu.reason(error).map(Err),
        };
        let client = CudaMemory::of_imported(context, &imported).map_err(failed)?;
        let copiers = HbmWay::ALL.into_iter().map(|way| {
            let copier = match (way, notes.no_kernel) {
                (HbmWay::Direct, _) => Copier::for_device_pool(context, &client),
                (HbmWay::Single, _) => Copier::for_device_pool(&gpu.unbatched, &client),
                (HbmWay::Mapped, Some(reason)) => return Ok((way, Err(reason.to_owned()))),
                (HbmWay::Mapped, None) => Copier::for_device_pool_by_kernel(context, &client),
            };
            let copier = copier.map(Ok).or_else(|error| gpu.reason(error).map(Err))?;
            Ok((way, copier))
        });
        let copiers = copiers.collect::<Result<_, MeasureError>>()?;
        let pool = Pool::of_device(client);
        let pool = pool.map_err(|error| MeasureError::measure("a pool on the GPU", error))?;
        let pool_memory = Arc::clone(imported.memory());
        let page_memory = DeviceAllocation::new(context, bytes).map_err(failed)?;
        Ok(Ok(Self {
            _owner: owner,
            pool,
            pool_as_pages: ForeignMemory::of_allocation(context, &pool_memory),
            pool_memory,
            pages: ForeignMemory::of_allocation(context, &page_memory),
            page_memory,
            copiers,
            host: Host::new(gpu)?,
        }))
    }

    /// One plain copy of all of the memory.
    fn plain_copy(&self, direction: Move) -> Result<Duration, MeasureError> {
        let (pages, pool) = (&self.page_memory, &self.pool_memory);
        let (source, target) = match direction {
            Move::Put => (pages, pool),
            Move::Get => (pool, pages),
        };
        let piece = |memory: &Arc<DeviceAllocation>| memory.piece(0, pages.bytes());
        let (source, target) = (piece(source).map_err(failed)?, piece(target).map_err(failed)?);
        let copy = Work::Copies(vec![Copy::Within { source, target }]);
        timed_work(vec![(&self.host.copier, copy)]).map(|(took, _)| took)
    }

    /// The memory that a copy reads, and the one that it writes.
    fn sides(&self, direction: Move) -> [&Arc<ForeignMemory>; 2] {
        match direction {
            Move::Put => [&self.pages, &self.pool_as_pages],
            Move::Get => [&self.pool_as_pages, &self.pages],
        }
    }

    /// Measures the limits of the other rows. All bytes are compared.
    fn measure_plain(
        &mut self,
        gpu: &Gpu,
        bench: &mut Bench<'_>,
        rows: &[(Move, String)],
    ) -> Result<(), MeasureError> {
        for (direction, name) in rows {
            let mut samples = Vec::new();
            // Round 0 touches the memory for the first time. It is not counted.
            for round in 0..=bench.rounds() {
                let [source, target] = self.sides(*direction).map(Arc::clone);
                let parts = parts(self.page_memory.bytes(), self.host.known.len());
                for part in parts.clone() {
                    self.host.write(&source, &self.host.known, part.clone())?;
                    self.host.write(&target, &self.host.absent, part)?;
                }
                let took = self.plain_copy(*direction)?;
                for part in parts {
                    let length = part.len();
                    self.host.read(&target, part)?;
                    check(name, 0, self.host.found(length), &self.host.known[..length])?;
                }
                if round > 0 {
                    samples.push(gib_per_second(self.page_memory.bytes(), took));
                }
            }
            let limit = (Vec::new(), "it is the limit of the other rows");
            let figure = Figure::rate(name.clone(), "GiB/s", samples, limit, Target::None);
            // Also if only rows with this limit were selected.
            (bench.deliver)(figure.on_device(gpu.name(), gpu.is_fake()))?;
        }
        Ok(())
    }

    /// Measures a shape by all these ways in turn, in each round.
    fn measure(
        &mut self,
        gpu: &Gpu,
        rounds: usize,
        shape: HbmShape,
        ways: &[HbmWay],
        notes: &mut Notes,
    ) -> Result<Vec<Figure>, MeasureError> {
        let mut blocks = Blocks::new(&self.pool, shape)?;
        let mut usable: Vec<(HbmWay, Vec<f64>)> = Vec::new();
        for (way, copier) in self.copiers.iter().filter(|(way, _)| ways.contains(way)) {
            match copier {
                Ok(_) => usable.push((*way, Vec::new())),
                Err(reason) => notes.leave_out(&shape.name(*way), reason),
            }
        }
        let mut limits = Vec::new();
        // Round 0 is not counted: the driver prepares what it needs.
        for round in 0..=rounds {
            let limit = gib_per_second(self.page_memory.bytes(), self.plain_copy(shape.direction)?);
            for (way, samples) in &mut usable {
                let repeats = if shape.is_latency() { REPEATS } else { 1 };
                let name = shape.name(*way);
                let mut times = Vec::new();
                for _ in 0..repeats {
                    times.push(self.copy_once(&name, *way, &mut blocks)?.as_secs_f64());
                }
                if round > 0 {
                    samples.push(shape.value(median(&times)));
                }
            }
            if round > 0 {
                limits.push(limit);
            }
        }
        let medians: Vec<f64> = usable.iter().map(|(_, samples)| median(samples)).collect();
        let are_all = usable.len() == HbmWay::ALL.len();
        let figures = usable.into_iter().map(|(way, samples)| {
            let is_best = are_all && shape.is_best(median(&samples), &medians);
            let target = gpu.target(shape.target(is_best));
            if shape.is_latency() {
                return Figure::cost(shape.name(way), "us", samples, (Vec::new(), ""), target);
            }
            Figure::rate(shape.name(way), "GiB/s", samples, (limits.clone(), LIMIT), target)
        });
        Ok(figures.collect())
    }

    /// Copies all blocks once, and compares them. Before that, both sides get other bytes.
    fn copy_once(
        &mut self,
        name: &str,
        way: HbmWay,
        blocks: &mut Blocks,
    ) -> Result<Duration, MeasureError> {
        let direction = blocks.shape.direction;
        let [source, target] = self.sides(direction).map(Arc::clone);
        let (from, to) = match direction {
            Move::Put => (0..blocks.page_bytes(), blocks.span.clone()),
            Move::Get => (blocks.span.clone(), 0..blocks.page_bytes()),
        };
        self.host.write(&source, &self.host.known, from)?;
        self.host.write(&target, &self.host.absent, to.clone())?;
        let copier = self.copiers.iter().find(|(it, _)| *it == way);
        let Some((_, Ok(copier))) = copier else {
            return Err(MeasureError::measure(name, "its copier is missing"));
        };
        let (took, slabs) = timed_work(vec![(copier, blocks.work(&self.pages))])?;
        blocks.slabs = slabs.into_iter().next();
        let length = to.len();
        self.host.read(&target, to)?;
        let (found, known) = (self.host.found(length), &self.host.known);
        for (at, (page, slab)) in blocks.places.iter().enumerate() {
            let (read, written) = match direction {
                Move::Put => (page, slab),
                Move::Get => (slab, page),
            };
            let piece = |start: &usize| *start..start + blocks.shape.bytes;
            check(name, at, &found[piece(written)], &known[piece(read)])?;
        }
        Ok(took)
    }
}

/// Blocks of one length in the pool, and their pages.
struct Blocks {
    shape: HbmShape,
    /// None after an error.
    slabs: Option<Slabs>,
    /// What of the pool the slabs are in.
    span: Range<usize>,
    /// The place of each block in the pages, and in the span.
    places: Vec<(usize, usize)>,
}

impl Blocks {
    fn new(pool: &Pool, shape: HbmShape) -> Result<Self, MeasureError> {
        let no_room = || MeasureError::measure("a pool on the GPU", "it is too small");
        let slabs = (0..shape.count).map(|_| pool.allocate(shape.bytes).ok_or_else(no_room));
        let slabs: Vec<SlabMut> = slabs.collect::<Result<_, MeasureError>>()?;
        let offsets: Vec<usize> = slabs.iter().map(SlabMut::offset).collect();
        let start = offsets.iter().copied().min().unwrap_or_default();
        let end = offsets.iter().copied().max().unwrap_or_default() + shape.bytes;
        let pages = scattered(shape.count).map(|page| page * shape.bytes);
        let places = pages.zip(offsets.into_iter().map(|offset| offset - start)).collect();
        let slabs = match shape.direction {
            Move::Put => Slabs::ToDevicePool(slabs),
            Move::Get => {
                let slabs: Vec<Slab> = slabs.into_iter().map(SlabMut::seal).collect();
                Slabs::FromDevicePool(slabs)
            }
        };
        Ok(Self { shape, slabs: Some(slabs), span: start..end, places })
    }

    fn page_bytes(&self) -> usize {
        self.shape.bytes * self.shape.count
    }

    /// The copies. The slabs come back with their end.
    fn work(&mut self, pages: &Arc<ForeignMemory>) -> Work {
        let fragment = |(slab, (page, _)): (usize, &(usize, usize))| {
            let (memory_offset, bytes) = (*page, self.shape.bytes);
            Fragment { slab, slab_offset: 0, memory: 0, memory_offset, bytes }
        };
        let fragments = self.places.iter().enumerate().map(fragment).collect();
        let slabs = self.slabs.take().unwrap_or(Slabs::ToDevicePool(Vec::new()));
        Work::Transfer(Transfer { slabs, memory: vec![Arc::clone(pages)], fragments })
    }
}

impl Host {
    fn new(gpu: &Gpu) -> Result<Self, MeasureError> {
        // Room for what the pool leaves between slabs.
        let bytes = plain_bytes(gpu).min(2 * total_max(gpu));
        let pinned = Pinned::new(&gpu.context, 3 * bytes + 4 * MIB)?;
        let mut absent = pinned.slab(bytes)?;
        absent.fill(ABSENT);
        Ok(Self {
            copier: pinned.copier(&gpu.unbatched)?,
            known: pinned.full_slab(bytes, &keys("gpu hbm", 1)[0])?,
            absent: absent.seal(),
            found: Some(pinned.slab(bytes)?),
        })
    }

    /// One copy between the start of a slab and a part of the device's memory.
    fn copy(
        &self,
        slabs: Slabs,
        memory: &Arc<ForeignMemory>,
        part: Range<usize>,
    ) -> Result<Slabs, MeasureError> {
        let (memory_offset, bytes) = (part.start, part.len());
        let fragment = Fragment { slab: 0, slab_offset: 0, memory: 0, memory_offset, bytes };
        let (memory, fragments) = (vec![Arc::clone(memory)], vec![fragment]);
        let work = Work::Transfer(Transfer { slabs, memory, fragments });
        timed_work(vec![(&self.copier, work)]).map(|(_, mut slabs)| slabs.remove(0))
    }

    fn write(
        &self,
        memory: &Arc<ForeignMemory>,
        bytes: &HostSlab,
        part: Range<usize>,
    ) -> Result<(), MeasureError> {
        self.copy(Slabs::ToDevice(vec![bytes.clone()]), memory, part).map(drop)
    }

    /// Reads a part of the device's memory.
    fn read(
        &mut self,
        memory: &Arc<ForeignMemory>,
        part: Range<usize>,
    ) -> Result<(), MeasureError> {
        let length = part.len();
        let mut found: Vec<HostSlabMut> = self.found.take().into_iter().collect();
        for slab in &mut found {
            slab[..length].fill(ABSENT);
        }
        if let Slabs::ToHost(mut slabs) = self.copy(Slabs::ToHost(found), memory, part)? {
            self.found = slabs.pop();
        }
        Ok(())
    }

    /// The first bytes of what the last read returned.
    fn found(&self, length: usize) -> &[u8] {
        self.found.as_deref().map_or(&[], |found| &found[..length])
    }
}

/// `0..total` in parts of at most this length.
fn parts(total: usize, most: usize) -> impl Iterator<Item = Range<usize>> + Clone {
    (0..total).step_by(most).map(move |start| start..total.min(start + most))
}
