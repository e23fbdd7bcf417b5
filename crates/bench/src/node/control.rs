//! The control path: one call of a client, compared with a bare round trip over a Unix socket.

use std::time::Duration;

use cascade_client::Client;
use cascade_replay::latency::Latencies;
use cascade_store::{BlockStore as _, Request, ViewOutcome};

use super::echo_process::{EchoProcess, LIMIT_IS};
use super::process::Placement;
use super::served::ServedNode;
use super::{CALL_OPTIONS, MIB, NodeBench, all_stored, puts};
use crate::{Figure, MeasureError, Target, keys, timed};

/// Calls of each kind in one sample.
const CALLS: usize = 4000;
/// Successive calls of one kind, before the next kind has its turn.
const TURN: usize = 50;
/// The target: at most 1.3 times a bare round trip.
const SHARE_MIN: f64 = 1.0 / 1.3;

/// The percentiles with their names in figures.
pub(super) const PERCENTILES: [(&str, f64); 3] = [("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999)];

const KINDS: [&str; 3] = ["lookup", "contains", "lease"];

pub(super) fn run(bench: &mut NodeBench<'_, '_>) -> Result<(), MeasureError> {
    let name = |kind: &str, percentile: &str| format!("control/{kind}/{percentile}");
    let names = KINDS.iter().flat_map(|kind| PERCENTILES.map(|(p, _)| name(kind, p)));
    if !bench.wants_any(&names.collect::<Vec<_>>()) {
        return Ok(());
    }
    let placement = Placement::on_two_processors()?;
    let served = placement.on_the_other(|| ServedNode::start(64 * MIB))?;
    let mut echo = placement.on_the_other(EchoProcess::start)?;
    let client = served.connect()?;
    let keys = keys("control", 64);
    let bytes = vec![5; 4096 * keys.len()];
    all_stored(&client.put(&puts(&keys, &bytes, 4096), CALL_OPTIONS))
        .map_err(|why| MeasureError::measure("control path", why))?;
    let calls = bench.scaled(CALLS);
    // By kind, then by percentile. The last kind is the bare round trip.
    let mut samples = vec![vec![Vec::new(); PERCENTILES.len()]; KINDS.len() + 1];
    for round in 0..=bench.rounds() {
        let mut latencies = vec![Latencies::new(); KINDS.len() + 1];
        for turn in 0..calls.div_ceil(TURN) {
            for at in 0..TURN {
                let key = &keys[(turn * TURN + at) % keys.len()..][..1];
                latencies[0].record(lookup(&client, key)?);
            }
            for at in 0..TURN {
                let key = &keys[(turn * TURN + at) % keys.len()..][..1];
                latencies[1].record(contains(&client, key)?);
            }
            for at in 0..TURN {
                let key = &keys[(turn * TURN + at) % keys.len()..][..1];
                latencies[2].record(lease(&client, key)?);
            }
            for _ in 0..TURN {
                latencies[3].record(echo.round_trip()?);
            }
        }
        if round > 0 {
            for (samples, latencies) in samples.iter_mut().zip(&latencies) {
                for (samples, (_, quantile)) in samples.iter_mut().zip(PERCENTILES) {
                    samples.push(latencies.us_at(quantile));
                }
            }
        }
    }
    let bare = samples.pop().expect("the last kind");
    for (kind, samples) in KINDS.iter().zip(samples) {
        let by_percentile = samples.into_iter().zip(&bare).zip(PERCENTILES);
        for ((samples, bare), (percentile, _)) in by_percentile {
            let has_target = *kind == "lookup" && percentile == "p50";
            let target = if has_target { Target::ShareAtLeast(SHARE_MIN) } else { Target::None };
            let text = format!("{LIMIT_IS}, same percentile");
            let limit = (bare.clone(), text.as_str());
            bench.deliver(Figure::cost(name(kind, percentile), "us", samples, limit, target))?;
        }
    }
    Ok(())
}

fn lookup(client: &Client, key: &[cascade_block::BlockKey]) -> Result<Duration, MeasureError> {
    let mut found = 0;
    let took = timed(|| found = client.lookup_prefix(&Request::new(key)).tiers.len());
    if found == 1 { Ok(took) } else { Err(missing_block()) }
}

fn contains(client: &Client, key: &[cascade_block::BlockKey]) -> Result<Duration, MeasureError> {
    let mut found = Vec::new();
    let took = timed(|| found = client.contains(key));
    if found == [true] { Ok(took) } else { Err(missing_block()) }
}

/// A client sends the release of a lease with its next call, so each call takes and releases one.
fn lease(client: &Client, key: &[cascade_block::BlockKey]) -> Result<Duration, MeasureError> {
    let mut is_hit = false;
    let took = timed(|| {
        let views = client.view(key, CALL_OPTIONS);
        is_hit = matches!(views.as_slice(), [ViewOutcome::Hit { .. }]);
    });
    if is_hit { Ok(took) } else { Err(missing_block()) }
}

fn missing_block() -> MeasureError {
    MeasureError::measure("control path", "a block that was put is missing")
}
