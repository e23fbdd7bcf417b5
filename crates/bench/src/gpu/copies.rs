//! Throughput of copies by length, number and way, beside one long plain copy.

use cascade_device::Copier;

use super::Gpu;
use super::memory::{Direction, Fragments, Pinned, Plain, timed_copies};
use crate::{Bench, Figure, MeasureError, Target, gib_per_second, size_name};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// Lengths of fragments.
const FRAGMENTS: [usize; 5] = [4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 2 * MIB];
/// Numbers of fragments of one submission. Engines copy between a few and all layers of a prompt.
const COUNTS: [usize; 5] = [16, 128, 1024, 8192, 65_536];

const PLAIN_LIMIT: &str = "one plain copy of pinned memory in this direction, beside each sample";
const BOTH_LIMIT: &str = "the sum of one plain copy each way, alone, before and after each sample";

/// Which calls of the driver make the copies of a submission. A way that uses a kernel needs one
/// more variant, and its copiers in [`Copiers`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// By batched copies.
    Batch,
    /// By one call for each.
    Single,
}

const WAYS: [Way; 2] = [Way::Batch, Way::Single];

impl Way {
    fn name(self) -> &'static str {
        match self {
            Self::Batch => "batch",
            Self::Single => "single",
        }
    }
}

/// Which directions are copied at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Traffic {
    One(Direction),
    Both,
}

const TRAFFIC: [Traffic; 3] =
    [Traffic::One(Direction::ToDevice), Traffic::One(Direction::ToHost), Traffic::Both];

impl Traffic {
    fn name(self) -> &'static str {
        match self {
            Self::One(Direction::ToDevice) => "to-device",
            Self::One(Direction::ToHost) => "to-host",
            Self::Both => "both",
        }
    }

    fn directions(self) -> Vec<Direction> {
        match self {
            Self::One(direction) => vec![direction],
            Self::Both => vec![Direction::ToDevice, Direction::ToHost],
        }
    }
}

/// A row of the table.
#[derive(Debug, Clone, Copy)]
struct Row {
    traffic: Traffic,
    bytes: usize,
    count: usize,
    way: Way,
}

impl Row {
    fn name(self) -> String {
        let (traffic, size, way) = (self.traffic.name(), size_name(self.bytes), self.way.name());
        format!("{traffic}/{size}/x{}/{way}", self.count)
    }

    /// Long fragments in batches should reach the limit nearly; short ones cannot by this way.
    fn target(self) -> Target {
        match (self.traffic, self.way, self.bytes) {
            (Traffic::Both, ..) | (_, Way::Single, _) => Target::None,
            (_, _, bytes) if bytes >= 2 * MIB => Target::ShareAtLeast(0.95),
            (_, _, bytes) if bytes >= 64 * KIB && self.count >= 1024 => Target::ShareAtLeast(0.88),
            _ => Target::None,
        }
    }
}

/// Two copiers, one for each direction, since a stream copies one way at a time.
struct Copiers([Copier; 2]);

impl Copiers {
    fn of(&self, direction: Direction) -> &Copier {
        &self.0[usize::from(direction == Direction::ToHost)]
    }

    fn is_batched(&self) -> bool {
        self.0.iter().all(|copier| copier.batch_form().is_some())
    }
}

pub(super) fn run(
    gpu: &Gpu,
    bench: &mut Bench<'_>,
    not_measured: &mut Vec<String>,
) -> Result<(), MeasureError> {
    let (plain_bytes, total_max) =
        if gpu.is_fake() { (8 * MIB, 4 * MIB) } else { (1024 * MIB, 256 * MIB) };
    let plain_names = ["to-device", "to-host"]
        .map(|direction| format!("plain/{direction}/{}", size_name(plain_bytes)));
    let rows: Vec<Row> = rows(total_max).filter(|row| bench.wants(&row.name())).collect();
    if rows.is_empty() && !plain_names.iter().any(|name| bench.wants(name)) {
        return Ok(());
    }
    let mut plain = Plain::new(&gpu.context, plain_bytes)?;
    measure_plain(gpu, bench, &mut plain, plain_names)?;
    // Both directions, and what the pool rounds up.
    let pinned = Pinned::new(&gpu.context, 2 * total_max + (4 << 20))?;
    let copiers = |context| -> Result<Copiers, MeasureError> {
        Ok(Copiers([pinned.copier(context)?, pinned.copier(context)?]))
    };
    let (batched, single) = (copiers(&gpu.context)?, copiers(&gpu.unbatched)?);
    for row in rows {
        let copiers = if row.way == Way::Batch { &batched } else { &single };
        let figure = measure_row(gpu, bench.rounds(), row, (&pinned, &mut plain), copiers)?;
        // Also a driver that has the function may refuse it.
        if row.way == Way::Batch && !copiers.is_batched() {
            not_measured.push(format!("{}: the driver has no batched copy", row.name()));
        } else {
            gpu.deliver(bench, figure)?;
        }
    }
    Ok(())
}

/// All rows whose fragments fit into `total_max` bytes. If no number of [`COUNTS`] fits, the
/// largest one that does.
fn rows(total_max: usize) -> impl Iterator<Item = Row> {
    let sizes = FRAGMENTS.iter().flat_map(move |&bytes| {
        let fitting = COUNTS.iter().copied().filter(|count| count * bytes <= total_max);
        let fitting: Vec<usize> = fitting.collect();
        let counts = if fitting.is_empty() { vec![total_max / bytes] } else { fitting };
        counts.into_iter().map(move |count| (bytes, count))
    });
    sizes.flat_map(|(bytes, count)| {
        TRAFFIC.iter().flat_map(move |&traffic| {
            WAYS.iter().map(move |&way| Row { traffic, bytes, count, way })
        })
    })
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
        let times = (plain.fill_device()?, plain.read_device()?);
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

fn measure_row(
    gpu: &Gpu,
    rounds: usize,
    row: Row,
    (pinned, plain): (&Pinned, &mut Plain),
    copiers: &Copiers,
) -> Result<Figure, MeasureError> {
    let name = row.name();
    let mut fragments = Vec::new();
    for (at, direction) in row.traffic.directions().into_iter().enumerate() {
        let (shape, first) = ((row.bytes, row.count), at * row.bytes * row.count);
        fragments.push(Fragments::new(pinned, plain, direction, shape, first)?);
    }
    let total: usize = fragments.iter().map(Fragments::total_bytes).sum();
    let (mut samples, mut limits) = (Vec::new(), Vec::new());
    // Round 0 is not counted: the driver prepares what it needs.
    for round in 0..=rounds {
        fragments.iter_mut().for_each(Fragments::forget);
        let to_device = gib_per_second(plain.bytes, plain.fill_device()?);
        let submissions = fragments.iter_mut();
        let submissions = submissions.map(|it| (copiers.of(it.direction()), &mut it.copies));
        let took = timed_copies(submissions.collect())?;
        let to_host = gib_per_second(plain.bytes, plain.read_device()?);
        fragments.iter().try_for_each(|it| it.check(&name, plain))?;
        if round > 0 {
            samples.push(gib_per_second(total, took));
            limits.push(match row.traffic {
                Traffic::One(Direction::ToDevice) => to_device,
                Traffic::One(Direction::ToHost) => to_host,
                Traffic::Both => to_device + to_host,
            });
        }
    }
    let limit_is = if row.traffic == Traffic::Both { BOTH_LIMIT } else { PLAIN_LIMIT };
    let target = gpu.target(row.target());
    Ok(Figure::rate(name, "GiB/s", samples, (limits, limit_is), target))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn rows_are_bounded_have_unique_names_and_cover_every_length_and_way() {
        for total_max in [4 * MIB, 256 * MIB] {
            let all: Vec<Row> = rows(total_max).collect();
            let names: BTreeSet<String> = all.iter().map(|row| row.name()).collect();
            assert_eq!(names.len(), all.len());
            assert!(all.iter().all(|row| row.bytes * row.count <= total_max && row.count > 1));
            for bytes in FRAGMENTS {
                let of_length = all.iter().filter(|row| row.bytes == bytes).count();
                assert!(of_length >= TRAFFIC.len() * WAYS.len(), "{bytes}");
            }
        }
        assert!(rows(256 * MIB).any(|row| row.count == 65_536));
    }
}
