//! Throughput of copies by length, number and way, beside one long plain copy.

use std::collections::BTreeMap;
use std::time::Duration;

use cascade_device::{Copier, Costs, Direction, Way as DeviceWay};

use super::memory::{Fragments, Pinned, Plain};
use super::rows::{Shape, Way, name_of_call, shapes};
use super::work::{Form, timed_work};
use super::{Gpu, Notes, failed};
use crate::figure::{Planned, median};
use crate::{Bench, Figure, MeasureError, Target, gib_per_second, size_name};

const MIB: usize = 1 << 20;

const PLAIN_LIMIT: &str = "one plain copy of pinned memory in this direction, in each round";
const BOTH_LIMIT: &str = "the sum of one plain copy each way, one after the other, in each round";

/// Two copiers, one for each direction, since a stream copies one way at a time.
struct Copiers([Copier; 2]);

impl Copiers {
    /// Copiers of a way, or why there are none.
    fn new(
        gpu: &Gpu,
        pinned: &Pinned,
        way: Way,
        costs: Option<&Costs>,
    ) -> Result<Result<Self, String>, MeasureError> {
        let one = || match way {
            Way::Batch => pinned.copier(&gpu.context).map(Ok),
            Way::Single => pinned.copier(&gpu.unbatched).map(Ok),
            Way::Direct => by(gpu, pinned, DeviceWay::Direct, costs),
            Way::Staged => by(gpu, pinned, DeviceWay::Staged, costs),
            Way::Mapped => by(gpu, pinned, DeviceWay::Mapped, costs),
            Way::Chosen => chosen(gpu, pinned, costs),
        };
        Ok(match (one()?, one()?) {
            (Ok(first), Ok(second)) if way == Way::Batch && first.batch_form().is_none() => {
                drop((first, second));
                Err("the driver has no batched copy".to_owned())
            }
            (Ok(first), Ok(second)) => Ok(Self([first, second])),
            (Err(reason), _) | (_, Err(reason)) => Err(reason),
        })
    }

    fn of(&self, direction: Direction) -> &Copier {
        &self.0[usize::from(direction == Direction::ToHost)]
    }

    fn is_batched(&self) -> bool {
        self.0.iter().all(|copier| copier.batch_form().is_some())
    }
}

/// A copier of one way, or why there is none.
fn by(
    gpu: &Gpu,
    pinned: &Pinned,
    way: DeviceWay,
    costs: Option<&Costs>,
) -> Result<Result<Copier, String>, MeasureError> {
    let copier = pinned.copier_by(&gpu.context, way, costs.cloned());
    copier.map(Ok).or_else(|error| gpu.reason(error).map(Err))
}

/// A copier that chooses by the table, or why there is none.
fn chosen(
    gpu: &Gpu,
    pinned: &Pinned,
    costs: Option<&Costs>,
) -> Result<Result<Copier, String>, MeasureError> {
    let Some(costs) = costs else { return Ok(Err("there is no table of costs".to_owned())) };
    let copier = pinned.copier_with(&gpu.context, costs.clone())?;
    Ok(match copier.kernel_refusal() {
        Some(refusal) => Err(cascade_block::with_causes(refusal)),
        None => Ok(copier),
    })
}

/// What all rows use.
struct Setup {
    pinned: Pinned,
    plain: Plain,
    /// The copiers of each way, or why there are none.
    copiers: BTreeMap<Way, Result<Copiers, String>>,
}

pub(super) fn run(gpu: &Gpu, bench: &mut Bench<'_>, notes: &mut Notes) -> Result<(), MeasureError> {
    let plain_bytes = if gpu.is_fake() { 8 * MIB } else { 1024 * MIB };
    let total_max = total_max(gpu);
    let plain_names = ["to-device", "to-host"]
        .map(|direction| format!("plain/{direction}/{}", size_name(plain_bytes)));
    let wanted = |shape: &Shape| {
        let wanted = Way::ALL.into_iter().filter(|way| bench.wants(&shape.name(*way)));
        wanted.collect::<Vec<Way>>()
    };
    let rows: Vec<(Shape, Vec<Way>)> =
        shapes(total_max).map(|shape| (shape, wanted(&shape))).collect();
    let rows: Vec<_> = rows.into_iter().filter(|(_, ways)| !ways.is_empty()).collect();
    if rows.is_empty() && !plain_names.iter().any(|name| bench.wants(name)) {
        return Ok(());
    }
    let mut plain = Plain::new(&gpu.context, plain_bytes)?;
    measure_plain(gpu, bench, &mut plain, plain_names)?;
    // Both directions, and what the pool rounds up.
    let pinned = Pinned::new(&gpu.context, 2 * total_max + (4 << 20))?;
    let copiers = copiers(gpu, &pinned, &rows, notes)?;
    let mut setup = Setup { pinned, plain, copiers };
    for (shape, ways) in rows {
        for figure in measure_shape(gpu, bench.rounds(), shape, &ways, &mut setup, notes)? {
            gpu.deliver(bench, figure)?;
        }
    }
    Ok(())
}

/// Whether some row of a way with a kernel is wanted.
pub(super) fn wants_kernel(gpu: &Gpu, bench: &Bench<'_>) -> bool {
    let ways = || Way::ALL.into_iter().filter(|way| way.has_kernel());
    shapes(total_max(gpu)).any(|shape| ways().any(|way| bench.wants(&shape.name(way))))
}

/// Most bytes of one submission in one direction.
fn total_max(gpu: &Gpu) -> usize {
    if gpu.is_fake() { 4 * MIB } else { 256 * MIB }
}

/// The copiers of all ways that some row wants.
fn copiers(
    gpu: &Gpu,
    pinned: &Pinned,
    rows: &[(Shape, Vec<Way>)],
    notes: &mut Notes,
) -> Result<BTreeMap<Way, Result<Copiers, String>>, MeasureError> {
    let is_wanted = |way: &Way| rows.iter().any(|(_, ways)| ways.contains(way));
    let ways: Vec<Way> = Way::ALL.into_iter().filter(is_wanted).collect();
    // The measurement starts the kernel, too. Also on a fake GPU, whose table means nothing: the
    // rows say that they are fake.
    let costs = if notes.no_kernel.is_none() && ways.iter().any(|way| way.is_planned()) {
        match Costs::measure_any(&gpu.context) {
            Ok(costs) => Some(costs),
            Err(error) => {
                notes.leave_out("the table of costs", &gpu.reason(error)?);
                None
            }
        }
    } else {
        None
    };
    let mut copiers = BTreeMap::new();
    for way in ways {
        let made = match notes.no_kernel.filter(|_| way.has_kernel()) {
            Some(reason) => Err(reason.to_owned()),
            None => Copiers::new(gpu, pinned, way, costs.as_ref())?,
        };
        copiers.insert(way, made);
    }
    Ok(copiers)
}

/// The limit of all other rows.
fn measure_plain(
    gpu: &Gpu,
    bench: &mut Bench<'_>,
    plain: &mut Plain,
    [to_device, to_host]: [String; 2],
) -> Result<(), MeasureError> {
    let mut samples = (Vec::new(), Vec::new());
    // Round 0 touches the device's memory for the first time. It is not counted.
    for round in 0..=bench.rounds() {
        plain.forget(plain.bytes);
        let times = (plain.fill_device(plain.bytes)?, plain.read_device(plain.bytes)?);
        plain.check()?;
        if round > 0 {
            samples.0.push(gib_per_second(plain.bytes, times.0));
            samples.1.push(gib_per_second(plain.bytes, times.1));
        }
    }
    for (name, samples) in [(to_device, samples.0), (to_host, samples.1)] {
        let limit = (Vec::new(), "it is the limit of the other rows");
        gpu.deliver(bench, Figure::rate(name, "GiB/s", samples, limit, Target::None))?;
    }
    Ok(())
}

/// Measures a shape by all these ways in turn, in each round. So they have one limit, and what
/// disturbs the machine disturbs all of them.
fn measure_shape(
    gpu: &Gpu,
    rounds: usize,
    shape: Shape,
    ways: &[Way],
    setup: &mut Setup,
    notes: &mut Notes,
) -> Result<Vec<Figure>, MeasureError> {
    let Setup { pinned, plain, copiers } = setup;
    let mut usable = Vec::new();
    for way in ways {
        match &copiers[way] {
            Ok(copiers) => usable.push((*way, copiers)),
            Err(reason) => notes.leave_out(&shape.name(*way), reason),
        }
    }
    let mut fragments = Vec::new();
    for (at, direction) in shape.directions().into_iter().enumerate() {
        let first = at * shape.bytes * shape.count;
        fragments.push(Fragments::new(pinned, direction, (shape.bytes, shape.count), first)?);
    }
    let total: usize = fragments.iter().map(Fragments::total_bytes).sum();
    let (mut samples, mut limits) = (vec![Vec::new(); usable.len()], Vec::new());
    // Round 0 is not counted: the driver prepares what it needs.
    for round in 0..=rounds {
        let to_device = gib_per_second(plain.bytes, plain.fill_device(plain.bytes)?);
        let to_host = gib_per_second(plain.bytes, plain.read_device(plain.bytes)?);
        for ((way, copiers), samples) in usable.iter().zip(&mut samples) {
            let took = copy_once(&shape.name(*way), way.form(), copiers, &mut fragments, plain)?;
            if round > 0 {
                samples.push(gib_per_second(total, took));
            }
        }
        if round > 0 {
            limits.push(shape.limit(to_device, to_host));
        }
    }
    let best = samples.iter().map(|samples| median(samples)).fold(0.0, f64::max);
    let are_all = ways.len() == Way::ALL.len();
    let mut figures = Vec::new();
    for ((way, copiers), samples) in usable.iter().zip(samples) {
        // Also a driver that has the function may refuse it.
        if *way == Way::Batch && !copiers.is_batched() {
            notes.leave_out(&shape.name(*way), "the driver has no batched copy");
            continue;
        }
        let is_best = are_all && median(&samples) >= best;
        let target = gpu.target(shape.target(*way, is_best));
        let limit_is = if shape.is_both() { BOTH_LIMIT } else { PLAIN_LIMIT };
        let limit = (limits.clone(), limit_is);
        let figure = Figure::rate(shape.name(*way), "GiB/s", samples, limit, target);
        let planned = planned(*way, copiers, &mut fragments, plain, figure.value)?;
        figures.push(Figure { planned, ..figure });
    }
    Ok(figures)
}

/// Copies all fragments once, and compares them. Before that, both sides of each get other bytes.
fn copy_once(
    name: &str,
    form: Form,
    copiers: &Copiers,
    fragments: &mut [Fragments],
    plain: &mut Plain,
) -> Result<Duration, MeasureError> {
    let total = fragments.iter().map(Fragments::total_bytes).sum();
    plain.fill_device(total)?;
    plain.forget(total);
    let mut works = Vec::new();
    for lane in &mut *fragments {
        lane.forget();
        works.push((copiers.of(lane.direction()), lane.work(form, plain)?));
    }
    let (took, slabs) = timed_work(works)?;
    for (lane, slabs) in fragments.iter_mut().zip(slabs) {
        lane.put_back(slabs);
    }
    plain.read_device(total)?;
    fragments.iter().try_for_each(|lane| lane.check(name, plain))?;
    Ok(took)
}

/// What the plan of a row says. Copies both ways have two plans, which know nothing of each other:
/// they predict no time.
fn planned(
    way: Way,
    copiers: &Copiers,
    fragments: &mut [Fragments],
    plain: &Plain,
    measured: f64,
) -> Result<Option<Planned>, MeasureError> {
    if !way.is_planned() {
        return Ok(None);
    }
    let (mut ways, mut predicted) = (Vec::new(), None);
    let is_alone = fragments.len() == 1;
    for lane in fragments {
        let copier = copiers.of(lane.direction());
        let (plan, slabs) = lane.work(Form::Transfer, plain)?.planned(copier).map_err(failed)?;
        lane.put_back(slabs);
        ways.extend(plan.calls.iter().filter_map(name_of_call));
        let rate = |time| gib_per_second(lane.total_bytes(), time);
        predicted =
            plan.estimate.filter(|_| is_alone && copier.kernel_refusal().is_none()).map(rate);
    }
    ways.sort_unstable();
    ways.dedup();
    // Times are the inverse of rates.
    let time_error = predicted.map(|predicted| measured / predicted - 1.0);
    Ok(Some(Planned { ways, predicted, time_error }))
}
