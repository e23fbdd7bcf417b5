//! Other transports in the same run: starts the Python program that measures them, and compares.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use serde::Deserialize;

use super::row::TransportRow;
use super::{TransportOptions, failed};
use crate::{Figure, MeasureError, Target, size_name};

/// Our transport, that of others, and how many times faster ours should be: for blocks of a length
/// and longer.
type Comparison = (&'static str, &'static str, &'static [(u64, f64)]);

const COMPARED: [Comparison; 3] = [
    ("tcp", "mooncake/tcp", &[(1 << 10, 50.0), (4 << 10, 20.0), (16 << 10, 5.0), (64 << 10, 1.5)]),
    ("tcp", "nixl/tcp", &[(1 << 10, 25.0), (4 << 10, 9.0), (16 << 10, 2.5), (64 << 10, 1.5)]),
    ("shm", "nixl/same-host", &[(1 << 10, 25.0), (64 << 10, 3.5)]),
];

/// What the program prints for a sample.
#[derive(Debug, Deserialize)]
struct Sample {
    peer: String,
    transport: String,
    block_bytes: u64,
    batch: u64,
    threads: u64,
    seconds: Option<f64>,
    bytes: Option<f64>,
    blocks: Option<f64>,
    source_cpu_s: Option<f64>,
    target_cpu_s: Option<f64>,
    verified: bool,
    error: Option<String>,
    /// Of a sample that is not timed.
    system_calls: Option<f64>,
    #[serde(default)]
    counts_system_calls: bool,
}

/// Rows of others, and what could not be measured.
#[derive(Debug, Default)]
pub(super) struct Measured {
    pub(super) figures: Vec<Figure>,
    pub(super) failures: Vec<String>,
}

/// Runs the program. `block_bytes` are those that were measured of ours.
pub(super) fn measure(
    python: &Path,
    block_bytes: &[u64],
    options: TransportOptions,
) -> Result<Measured, MeasureError> {
    let names: Vec<_> = COMPARED.iter().map(|(_, peer, _)| peer).collect();
    let given = serde_json::json!({
        "peers": names, "block_bytes": block_bytes, "is_short": options.is_short,
        "count_system_calls": true,
    });
    let mut command = Command::new(python);
    command.args(["-m", "cascadekv.bench.transport_peers", &given.to_string()]);
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().map_err(failed)?;
    let output = BufReader::new(child.stdout.take().expect("stdout is piped"));
    let mut cells: BTreeMap<(String, u64, u64), Vec<Sample>> = BTreeMap::new();
    for line in output.lines() {
        let line = line.map_err(failed)?;
        let sample: Sample = serde_json::from_str(&line).map_err(failed)?;
        let name = format!("{}/{}", sample.peer, sample.transport);
        cells.entry((name, sample.threads, sample.block_bytes)).or_default().push(sample);
    }
    // 1: a cell failed, which its samples say.
    let status = child.wait().map_err(failed)?;
    if !matches!(status.code(), Some(0 | 1)) {
        return Err(failed(format!("{} ended with {status}", python.display())));
    }
    let mut measured = Measured::default();
    for ((name, threads, block_bytes), samples) in &cells {
        let block = size_name(usize::try_from(*block_bytes).unwrap_or(usize::MAX));
        let row = format!("{}/write/{block}/{threads}-thread", name.replace('/', "-"));
        match figure_of(row.clone(), samples) {
            Ok(figure) => measured.figures.push(figure),
            Err(reason) => measured.failures.push(format!("{row}: {reason}")),
        }
    }
    Ok(measured)
}

/// The row of a cell, or why there is none.
fn figure_of(name: String, samples: &[Sample]) -> Result<Figure, String> {
    // Where system calls cannot be counted, the rates are right nevertheless.
    let is_no_count = |sample: &&Sample| sample.counts_system_calls && sample.error.is_some();
    let samples: Vec<_> = samples.iter().filter(|sample| !is_no_count(sample)).collect();
    if let Some(error) = samples.iter().find_map(|sample| sample.error.clone()) {
        return Err(error);
    }
    if !samples.iter().all(|sample| sample.verified) {
        return Err("wrong bytes".to_owned());
    }
    let calls = samples.iter().find_map(|sample| sample.system_calls);
    let rates = samples.iter().filter_map(|it| Some(it.bytes? / it.seconds? / 1e9));
    let rates: Vec<f64> = rates.collect();
    let first = samples.first().filter(|_| !rates.is_empty()).ok_or("no sample has a time")?;
    let cpu = |it: &Sample| Some((it.source_cpu_s? + it.target_cpu_s?) / it.blocks? * 1e9);
    let cpu: Vec<f64> = samples.iter().copied().filter_map(cpu).collect();
    let row = TransportRow {
        record_layer: None,
        backend: first.transport.clone(),
        block_bytes: first.block_bytes,
        batch: first.batch,
        threads: first.threads,
        gbps: crate::figure::median(&rates),
        limit_gbps: None,
        peer: first.peer.clone(),
        verified: true,
        cpu_ns_per_block: (!cpu.is_empty()).then(|| crate::figure::median(&cpu)),
        system_calls_per_batch: calls.map(|calls| calls / first.threads as f64),
        copies_per_byte: None,
    };
    Ok(Figure::rate(name, "GB/s", rates, (vec![], ""), Target::None).of_transport(row))
}

/// How many times faster ours are, by one thread, for blocks of the same length.
pub(super) fn compare(ours: &[Figure], others: &[Figure], is_short: bool) -> Vec<Figure> {
    let mut ratios = vec![];
    for (backend, peer, least) in COMPARED {
        for other in others {
            let Some(row) = &other.transport else { continue };
            if row.threads != 1 || format!("{}/{}", row.peer, row.backend) != peer {
                continue;
            }
            let block = size_name(usize::try_from(row.block_bytes).unwrap_or(usize::MAX));
            let name = format!("{backend}/write/{block}/1-thread");
            let Some(own) = ours.iter().find(|figure| figure.name == name) else { continue };
            let target = least.iter().rev().find(|(from, _)| row.block_bytes >= *from);
            let target = match target {
                // Between the lengths of the targets, and in short runs, there is none.
                Some((from, times)) if !is_short && (*from == row.block_bytes || *times < 2.0) => {
                    Target::AtLeast(*times)
                }
                _ => Target::None,
            };
            let times = vec![own.value / other.value];
            let name = format!("times/{}/{block}", peer.replace('/', "-"));
            ratios.push(Figure::rate(name, "x", times, (vec![], ""), target));
        }
    }
    ratios
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(seconds: Option<f64>, verified: bool, error: Option<&str>) -> Sample {
        Sample {
            peer: "nixl".to_owned(),
            transport: "tcp".to_owned(),
            block_bytes: 1024,
            batch: 1538,
            threads: 1,
            seconds,
            bytes: Some(2e9),
            blocks: Some(2e6),
            source_cpu_s: Some(1.0),
            target_cpu_s: Some(2.0),
            verified,
            error: error.map(str::to_owned),
            system_calls: None,
            counts_system_calls: false,
        }
    }

    fn ours(gbps: f64) -> Figure {
        let name = "tcp/write/1KiB/1-thread".to_owned();
        Figure::rate(name, "GB/s", vec![gbps], (vec![], ""), Target::None)
    }

    #[test]
    fn a_cell_has_the_median_and_is_compared() {
        let samples = [1.0, 2.0, 4.0].map(|seconds| sample(Some(seconds), true, None));
        let figure = figure_of("row".to_owned(), &samples).unwrap();
        let row = figure.transport.clone().unwrap();
        assert_eq!((figure.value, row.gbps, row.peer), (1.0, 1.0, "nixl".to_owned()));
        assert_eq!((row.cpu_ns_per_block, row.system_calls_per_batch), (Some(1500.0), None));
        let [ratio] = &*compare(&[ours(20.0)], &[figure], false) else { panic!("one is compared") };
        assert_eq!((&*ratio.name, ratio.value), ("times/nixl-tcp/1KiB", 20.0));
        assert_eq!(ratio.is_reached, Some(false), "25 times is the target");
    }

    #[test]
    fn system_calls_come_from_a_sample_without_a_time() {
        let counting = |error, system_calls| Sample {
            counts_system_calls: true,
            system_calls,
            ..sample(None, true, error)
        };
        let timed = || sample(Some(1.0), true, None);
        let calls = |samples: &[Sample]| {
            let row = figure_of(String::new(), samples).unwrap().transport.unwrap();
            row.system_calls_per_batch
        };
        assert_eq!(calls(&[timed(), counting(None, Some(3076.0))]), Some(3076.0));
        assert_eq!(calls(&[timed(), counting(Some("no strace"), None)]), None);
    }

    #[test]
    fn a_cell_that_failed_or_had_wrong_bytes_has_no_figure() {
        let good = || sample(Some(1.0), true, None);
        let failed = [good(), sample(None, true, Some("it hung"))];
        assert_eq!(figure_of(String::new(), &failed).unwrap_err(), "it hung");
        let wrong = [good(), sample(Some(1.0), false, None)];
        assert_eq!(figure_of(String::new(), &wrong).unwrap_err(), "wrong bytes");
    }
}
