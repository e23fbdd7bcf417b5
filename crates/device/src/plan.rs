//! What to submit for the copies of one direction. Pure: no driver, no clock.
//!
//! Fragments that are neighbours on both sides become one copy, copies are split at the borders of
//! registrations, and each group of copies gets the way that takes the least time by a table of
//! [`Costs`]. A group is a *run*: copies whose host sides follow each other without a gap. With
//! `F(curve, bytes)` = cost of a fragment + bytes / rate for fragments of this length:
//!
//! - [`Way::Direct`]: calls × cost of a call + sum of `F(direct, copy)`
//! - [`Way::Mapped`]: launches × cost of a launch + sum of `F(mapped, copy)`
//! - [`Way::Staged`]: for each slice of the staging buffer a call and a launch; for each run
//!   `F(direct, run)`, and for each of its copies `F(within, copy)`
//!
//! The runs of a plan may have several ways. A plan is never slower, by its table, than all of it
//! by one way. The three ways, and that the best one depends on the length and the number of
//! fragments, are known from other projects; their figures are not used here.

use std::ops::Range;
use std::time::Duration;

use crate::costs::{Costs, Curve, WayCosts};
use crate::error::CudaError;

#[cfg(test)]
mod tests;

/// Alignment of runs in a slice. A multiple of 16, so that aligned pages are copied by vectors.
const SLICE_ALIGNMENT: usize = 256;

/// Where the bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the pool, which mostly is in host memory, to the device.
    ToDevice,
    /// From the device to the pool.
    ToHost,
}

/// Bytes to copy between a pool in host memory and a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlannedCopy {
    /// Where they are in the pool.
    pub offset: usize,
    /// Where they are on the device.
    pub address: u64,
    /// Which memory of the device has them. A driver may refuse a copy that ends in another memory
    /// than it begins in, so copies of two are never merged.
    pub memory: usize,
    /// How many.
    pub bytes: usize,
}

/// What of a pool is registered: its first bytes, in pieces of one length.
#[derive(Debug, Clone, Copy)]
pub struct Borders {
    /// Length of a piece. No copy crosses a border between two.
    pub piece_bytes: usize,
    /// Bytes that are registered, from the start of the pool.
    pub registered_bytes: usize,
}

/// What one call can carry.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Copies of a call of the driver: 1 without batched copies.
    pub copies_per_call: usize,
    /// Fragments of a launch of the kernel.
    pub fragments_per_launch: usize,
    /// Bytes that are staged at once.
    pub slice_bytes: usize,
}

/// How bytes get from one side to the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// The driver copies between the pool and the device.
    Direct,
    /// A kernel reads or writes the pool through its device address.
    Mapped,
    /// The driver copies between the pool and a buffer on the device, and a kernel between that
    /// buffer and the addresses.
    Staged,
}

/// All ways, in the order of preference when two take the same time.
const WAYS: [Way; 3] = [Way::Direct, Way::Mapped, Way::Staged];

/// One thing to submit. Calls of a plan may run in any order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Call {
    /// Copies by the driver.
    Direct(Vec<PlannedCopy>),
    /// Copies by a kernel.
    Mapped(Vec<PlannedCopy>),
    /// Copies through a buffer on the device.
    Staged(Slice),
    /// Copies of host memory that is not registered, to make by other means.
    Unregistered(Vec<PlannedCopy>),
}

/// What one use of a staging buffer carries.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Slice {
    /// Copies between the pool and the buffer: `address` counts from the start of the buffer.
    pub runs: Vec<PlannedCopy>,
    /// Copies between the buffer and the device: `offset` counts from the start of the buffer.
    pub fragments: Vec<PlannedCopy>,
}

/// What to submit.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CopyPlan {
    /// The calls.
    pub calls: Vec<Call>,
    /// The time of the calls by the table, one after the other. Copies of unregistered memory are
    /// not counted. None without a table.
    pub estimate: Option<Duration>,
}

/// Plans copies of one direction, in at most n log n steps for n fragments and the copies that they
/// become. Without `costs`, all of them are direct. Sources may overlap.
///
/// # Errors
/// [`CudaError::Overlap`] if two targets overlap: copies have no order, so that either may win.
/// [`CudaError::Outside`] for bytes over the end of all addresses.
pub fn plan(
    direction: Direction,
    fragments: &[PlannedCopy],
    borders: &Borders,
    limits: &Limits,
    costs: Option<&Costs>,
) -> Result<CopyPlan, CudaError> {
    plan_by(direction, fragments, borders, limits, costs, None)
}

/// As [`plan`]. With `only`, each run takes this way if the table has it and the limits allow it,
/// and is direct otherwise, whatever that costs.
pub(crate) fn plan_by(
    direction: Direction,
    fragments: &[PlannedCopy],
    borders: &Borders,
    limits: &Limits,
    costs: Option<&Costs>,
    only: Option<Way>,
) -> Result<CopyPlan, CudaError> {
    let copies = merge(direction, fragments)?;
    let (mut registered, unregistered) = split(&copies, borders);
    let mut plan = CopyPlan::default();
    match costs {
        Some(costs) => {
            let costs = match direction {
                Direction::ToDevice => &costs.to_device,
                Direction::ToHost => &costs.to_host,
            };
            // Targets of a save are in this order already.
            if direction == Direction::ToDevice {
                sort(&mut registered, |copy| copy.offset as u64);
            }
            Choice { limits, costs, only, copies: &registered }.add_calls(borders, &mut plan);
        }
        None => add_chunks(&mut plan, &registered, limits.copies_per_call, Call::Direct),
    }
    add_chunks(&mut plan, &unregistered, limits.copies_per_call, Call::Unregistered);
    Ok(plan)
}

fn add_chunks(
    plan: &mut CopyPlan,
    copies: &[PlannedCopy],
    most: usize,
    call: fn(Vec<PlannedCopy>) -> Call,
) {
    plan.calls.extend(copies.chunks(most.max(1)).map(|chunk| call(chunk.to_vec())));
}

/// The order is one that no caller can make slow.
fn sort(fragments: &mut [PlannedCopy], key: impl Fn(&PlannedCopy) -> u64) {
    fragments.sort_unstable_by_key(|fragment| {
        #[cfg(test)]
        tests::count_step();
        key(fragment)
    });
}

/// Joins neighbours. In the order of targets, which do not overlap, neighbours on both sides follow
/// each other.
fn merge(direction: Direction, fragments: &[PlannedCopy]) -> Result<Vec<PlannedCopy>, CudaError> {
    let target = |fragment: &PlannedCopy| match direction {
        Direction::ToDevice => fragment.address,
        Direction::ToHost => fragment.offset as u64,
    };
    let mut ordered: Vec<PlannedCopy> = Vec::with_capacity(fragments.len());
    for fragment in fragments.iter().filter(|fragment| fragment.bytes > 0) {
        let PlannedCopy { offset, address, bytes, .. } = *fragment;
        if offset.checked_add(bytes).is_none() || address.checked_add(bytes as u64).is_none() {
            return Err(CudaError::Outside { offset, bytes, length: usize::MAX });
        }
        ordered.push(*fragment);
    }
    sort(&mut ordered, target);
    let mut merged: Vec<PlannedCopy> = Vec::new();
    for fragment in ordered {
        let Some(last) = merged.last_mut() else {
            merged.push(fragment);
            continue;
        };
        if target(&fragment) < target(last) + last.bytes as u64 {
            return Err(CudaError::Overlap { target: target(&fragment) });
        }
        let is_next =
            last.memory == fragment.memory && last.address + last.bytes as u64 == fragment.address;
        if is_next && follows(last, &fragment) {
            last.bytes += fragment.bytes;
        } else {
            merged.push(fragment);
        }
    }
    Ok(merged)
}

/// Whether the host side of a copy begins where another one's ends.
fn follows(before: &PlannedCopy, after: &PlannedCopy) -> bool {
    before.offset + before.bytes == after.offset
}

/// Divides copies at borders: those of registered memory, and those of the rest.
fn split(copies: &[PlannedCopy], borders: &Borders) -> (Vec<PlannedCopy>, Vec<PlannedCopy>) {
    let (mut registered, mut unregistered) = (Vec::with_capacity(copies.len()), Vec::new());
    for copy in copies {
        let end = copy.offset + copy.bytes;
        let mut at = copy.offset;
        while at < end {
            let border = borders.next(at).min(end);
            let address = copy.address + (at - copy.offset) as u64;
            let part = PlannedCopy { offset: at, address, bytes: border - at, ..*copy };
            if at < borders.registered_bytes {
                registered.push(part);
            } else {
                unregistered.push(part);
            }
            at = border;
        }
    }
    (registered, unregistered)
}

impl Borders {
    /// The first border after a place. Unregistered memory has no borders.
    fn next(&self, at: usize) -> usize {
        if at >= self.registered_bytes {
            return usize::MAX;
        }
        let piece_bytes = self.piece_bytes.max(1);
        (at / piece_bytes + 1).saturating_mul(piece_bytes).min(self.registered_bytes)
    }
}

/// Copies without a gap between their host sides, in one registration.
#[derive(Debug)]
struct Run {
    copies: Range<usize>,
    bytes: usize,
    /// Time of each way without its calls; none where it is impossible.
    times_ps: [Option<u64>; 3],
}

/// The choice of a way for each run.
struct Choice<'a> {
    limits: &'a Limits,
    costs: &'a WayCosts,
    /// The way of all runs that can take it.
    only: Option<Way>,
    /// In the order of their places in the pool.
    copies: &'a [PlannedCopy],
}

impl Choice<'_> {
    fn add_calls(&self, borders: &Borders, plan: &mut CopyPlan) {
        let runs = self.runs(borders);
        // Each subset of the ways: using one more may save time in some runs and costs a call.
        let subsets = match self.only {
            Some(way) => 1_usize << way as usize..(1 << way as usize) + 1,
            None => 1..1 << WAYS.len(),
        };
        let subsets = subsets.map(|subset| {
            let allowed = |way: Way| subset & (1 << way as usize) != 0;
            let ways: Vec<Way> = runs.iter().map(|run| run.fastest(allowed)).collect();
            (self.time_ps(&runs, &ways), ways)
        });
        let Some((time_ps, ways)) = subsets.min_by_key(|(time_ps, _)| *time_ps) else { return };
        plan.estimate = Some(Duration::from_nanos(time_ps / 1000));
        let of = |way: Way| {
            let runs = runs.iter().zip(&ways).filter(move |(_, of_it)| **of_it == way);
            runs.map(|(run, _)| run).collect::<Vec<&Run>>()
        };
        let copies = |way: Way| {
            let runs = of(way).into_iter().map(|run| &self.copies[run.copies.clone()]);
            runs.flatten().copied().collect::<Vec<PlannedCopy>>()
        };
        add_chunks(plan, &copies(Way::Direct), self.limits.copies_per_call, Call::Direct);
        add_chunks(plan, &copies(Way::Mapped), self.limits.fragments_per_launch, Call::Mapped);
        let slices = self.slices(&of(Way::Staged));
        plan.calls.extend(slices.into_iter().map(Call::Staged));
    }

    fn runs(&self, borders: &Borders) -> Vec<Run> {
        let mut runs = Vec::new();
        let (mut first, mut bytes) = (0, 0);
        for (at, copy) in self.copies.iter().enumerate() {
            bytes += copy.bytes;
            let goes_on = self.copies.get(at + 1).is_some_and(|next| {
                follows(copy, next)
                    && borders.next(copy.offset) > next.offset
                    && bytes.saturating_add(next.bytes) <= self.limits.slice_bytes
                    && at + 1 - first < self.limits.fragments_per_launch
            });
            if !goes_on {
                runs.push(self.run(first..at + 1, bytes));
                (first, bytes) = (at + 1, 0);
            }
        }
        runs
    }

    fn run(&self, copies: Range<usize>, bytes: usize) -> Run {
        let time_ps = |curve: &Curve| {
            let times =
                self.copies[copies.clone()].iter().map(|copy| curve.fragment_ps(copy.bytes));
            times.fold(0, u64::saturating_add)
        };
        let direct = &self.costs.direct;
        let within = self.costs.within.as_ref().filter(|_| bytes <= self.limits.slice_bytes);
        let staged = within.map(|within| time_ps(within).saturating_add(direct.fragment_ps(bytes)));
        let times_ps = [Some(time_ps(direct)), self.costs.mapped.as_ref().map(time_ps), staged];
        Run { copies, bytes, times_ps }
    }

    /// The time of runs by these ways, with their calls.
    fn time_ps(&self, runs: &[Run], ways: &[Way]) -> u64 {
        let mut time_ps = 0_u64;
        let mut counts = [0; 2];
        let mut packing = Packing::new(self.limits);
        for (run, way) in runs.iter().zip(ways) {
            time_ps = time_ps.saturating_add(run.times_ps[*way as usize].unwrap_or(u64::MAX));
            match way {
                Way::Direct => counts[0] += run.copies.len(),
                Way::Mapped => counts[1] += run.copies.len(),
                Way::Staged => drop(packing.place(run)),
            }
        }
        let launches = counts[1].div_ceil(self.limits.fragments_per_launch.max(1));
        let calls = counts[0].div_ceil(self.limits.copies_per_call.max(1)) + packing.calls();
        let launches_ps = |curve: &Option<Curve>, launches| {
            curve.as_ref().map_or(0, |curve| curve.calls_ps(launches))
        };
        time_ps
            .saturating_add(self.costs.direct.calls_ps(calls))
            .saturating_add(launches_ps(&self.costs.mapped, launches))
            .saturating_add(launches_ps(&self.costs.within, packing.slices))
    }

    /// Places runs in slices.
    fn slices(&self, runs: &[&Run]) -> Vec<Slice> {
        let mut slices: Vec<Slice> = Vec::new();
        let mut packing = Packing::new(self.limits);
        for run in runs {
            let place = packing.place(run);
            if slices.len() < packing.slices {
                slices.push(Slice::default());
            }
            let Some(slice) = slices.last_mut() else { continue };
            let copies = &self.copies[run.copies.clone()];
            let Some(first) = copies.first() else { continue };
            let (offset, bytes) = (first.offset, run.bytes);
            slice.runs.push(PlannedCopy { offset, address: place as u64, memory: 0, bytes });
            slice.fragments.extend(copies.iter().map(|copy| {
                let offset = place + (copy.offset - first.offset);
                PlannedCopy { offset, ..*copy }
            }));
        }
        slices
    }
}

impl Run {
    /// The fastest of some ways. Direct if none of them is possible.
    fn fastest(&self, allowed: impl Fn(Way) -> bool) -> Way {
        let possible = WAYS.into_iter().filter(|way| allowed(*way));
        let timed = possible.filter_map(|way| Some((self.times_ps[way as usize]?, way)));
        timed.min_by_key(|(time_ps, _)| *time_ps).map_or(Way::Direct, |(_, way)| way)
    }
}

/// Where runs are in slices.
struct Packing<'a> {
    limits: &'a Limits,
    slices: usize,
    /// Calls of the slices before the last one.
    calls_before: usize,
    /// Of the last slice.
    used_bytes: usize,
    runs: usize,
    fragments: usize,
}

impl<'a> Packing<'a> {
    fn new(limits: &'a Limits) -> Self {
        Self { limits, slices: 0, calls_before: 0, used_bytes: 0, runs: 0, fragments: 0 }
    }

    /// Where a run starts in the last slice, which is a new one if it does not fit the one before.
    fn place(&mut self, run: &Run) -> usize {
        let place = self.used_bytes.next_multiple_of(SLICE_ALIGNMENT);
        let end = place.saturating_add(run.bytes);
        let fragments = self.fragments + run.copies.len();
        let fits = end <= self.limits.slice_bytes && fragments <= self.limits.fragments_per_launch;
        if self.slices > 0 && fits {
            (self.used_bytes, self.runs, self.fragments) = (end, self.runs + 1, fragments);
            return place;
        }
        self.calls_before = self.calls();
        self.slices += 1;
        (self.used_bytes, self.runs, self.fragments) = (run.bytes, 1, run.copies.len());
        0
    }

    /// Calls of the driver for all runs.
    fn calls(&self) -> usize {
        self.calls_before + self.runs.div_ceil(self.limits.copies_per_call.max(1))
    }
}
