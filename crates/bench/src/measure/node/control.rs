//! The control path: one call of a client against a bare round trip over such a socket.

use std::time::Duration;

use cascade_client::Client;
use cascade_store::{BlockStore as _, Request, ViewOutcome};

use super::echo::{Echo, LIMIT_IS};
use super::process::Placement;
use super::served::Served;
use super::{MIB, NodeBench, PATIENT, all_stored, puts};
use crate::cli::Failure;
use crate::latency::Latencies;
use crate::measure::{Figure, Target, keys, timed};

/// Round trips of each kind in one sample.
const CALLS: usize = 4000;
/// Round trips of one kind before it is the next one's turn.
const TURN: usize = 50;
/// At most 1.3 times a bare round trip.
const SHARE_MIN: f64 = 1.0 / 1.3;

/// Percentiles that are told, by the names that figures give them.
pub(super) const PERCENTILES: [(&str, f64); 3] = [("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999)];

const KINDS: [&str; 3] = ["lookup", "contains", "lease"];

pub(super) fn run(bench: &mut NodeBench<'_, '_>) -> Result<(), Failure> {
    let name = |kind: &str, percentile: &str| format!("control/{kind}/{percentile}");
    let names = KINDS.iter().flat_map(|kind| PERCENTILES.map(|(p, _)| name(kind, p)));
    if !bench.wants_any(&names.collect::<Vec<_>>()) {
        return Ok(());
    }
    let placement = Placement::apart()?;
    let served = placement.elsewhere(|| Served::start(64 * MIB))?;
    let mut echo = placement.elsewhere(Echo::start)?;
    let client = served.connect()?;
    let keys = keys("control", 64);
    let bytes = vec![5; 4096 * keys.len()];
    all_stored(&client.put(&puts(&keys, &bytes, 4096), PATIENT))
        .map_err(|why| Failure::measure("control path", why))?;
    let calls = bench.scaled(CALLS);
    // By kind, then by percentile; the bare round trip is the last kind.
    let mut samples = vec![vec![Vec::new(); PERCENTILES.len()]; KINDS.len() + 1];
    for round in 0..=bench.rounds() {
        let mut seen = vec![Latencies::new(); KINDS.len() + 1];
        for turn in 0..calls.div_ceil(TURN) {
            for at in 0..TURN {
                let key = &keys[(turn * TURN + at) % keys.len()..][..1];
                seen[0].record(lookup(&client, key)?);
            }
            for at in 0..TURN {
                let key = &keys[(turn * TURN + at) % keys.len()..][..1];
                seen[1].record(contains(&client, key)?);
            }
            for at in 0..TURN {
                let key = &keys[(turn * TURN + at) % keys.len()..][..1];
                seen[2].record(lease(&client, key)?);
            }
            for _ in 0..TURN {
                seen[3].record(echo.round_trip()?);
            }
        }
        if round > 0 {
            for (samples, seen) in samples.iter_mut().zip(&seen) {
                for (samples, (_, quantile)) in samples.iter_mut().zip(PERCENTILES) {
                    samples.push(seen.us_at(quantile));
                }
            }
        }
    }
    let bare = samples.pop().expect("the last kind");
    for (kind, samples) in KINDS.iter().zip(samples) {
        let told = samples.into_iter().zip(&bare).zip(PERCENTILES);
        for ((samples, bare), (percentile, _)) in told {
            let has_target = *kind == "lookup" && percentile == "p50";
            let target = if has_target { Target::ShareAtLeast(SHARE_MIN) } else { Target::None };
            let text = format!("{LIMIT_IS}, same percentile");
            let limit = (bare.clone(), text.as_str());
            bench.deliver(Figure::cost(name(kind, percentile), "us", samples, limit, target))?;
        }
    }
    Ok(())
}

fn lookup(client: &Client, key: &[cascade_block::BlockKey]) -> Result<Duration, Failure> {
    let mut found = 0;
    let took = timed(|| found = client.lookup_prefix(&Request::new(key)).tiers.len());
    if found == 1 { Ok(took) } else { Err(lost()) }
}

fn contains(client: &Client, key: &[cascade_block::BlockKey]) -> Result<Duration, Failure> {
    let mut found = Vec::new();
    let took = timed(|| found = client.contains(key));
    if found == [true] { Ok(took) } else { Err(lost()) }
}

/// What one call gives back goes with the next: in a row, each takes and gives back.
fn lease(client: &Client, key: &[cascade_block::BlockKey]) -> Result<Duration, Failure> {
    let mut is_hit = false;
    let took = timed(|| {
        let views = client.view(key, PATIENT);
        is_hit = matches!(views.as_slice(), [ViewOutcome::Hit { .. }]);
    });
    if is_hit { Ok(took) } else { Err(lost()) }
}

fn lost() -> Failure {
    Failure::measure("control path", "a block that was put is not there")
}
