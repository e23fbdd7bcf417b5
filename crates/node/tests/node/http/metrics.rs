//! Metrics: stable names, consistent values, both text formats.

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use cascade_node::metrics::families;
use cascade_node::status::NodeState;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use super::served::{Served, get};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

const OPEN_METRICS: &str = "Accept: application/openmetrics-text; version=1.0.0";

/// A renamed metric breaks dashboards and alerts of users. After a deliberate change run this with
/// `CASCADE_GOLDEN=write`.
#[test]
fn names_types_and_help_match_the_golden_file() {
    let served = Served::start();
    let scrape = get(served.address(), "/metrics", &[OPEN_METRICS]);
    assert!(scrape.header("content-type").unwrap().starts_with("application/openmetrics-text"));
    assert!(scrape.body.ends_with("# EOF\n"));
    let described = scrape.body.lines().filter(|line| line.starts_with("# "));
    let mut described: String = described
        .filter(|line| *line != "# EOF")
        .fold(String::new(), |all, line| all + line + "\n");
    for family in families() {
        writeln!(described, "# LABELS {} {}", family.name, family.labels.join(" ")).unwrap();
    }
    assert_current("testdata/metrics.txt", &described);
}

/// The table in the documentation is generated from the same source.
#[test]
fn the_documentation_lists_every_metric() {
    let mut table = "| metric | type | labels | meaning |\n|---|---|---|---|\n".to_owned();
    for family in families() {
        let end = if family.kind.name() == "counter" { "_total" } else { "" };
        let labels = family.labels.join(", ");
        let kind = family.kind.name();
        writeln!(table, "| `{}{end}` | {kind} | {labels} | {} |", family.name, family.help)
            .unwrap();
    }
    let path = root().join("docs/observability.md");
    let text = fs::read_to_string(&path).unwrap();
    let (begin, end) = ("<!-- metrics: made by crates/node/tests/node/http -->\n", "<!-- end -->");
    let (before, rest) = text.split_once(begin).unwrap();
    let (_, after) = rest.split_once(end).unwrap();
    assert_current("docs/observability.md", &format!("{before}{begin}{table}{end}{after}"));
}

fn assert_current(path: &str, text: &str) {
    let file = root().join(path);
    if std::env::var_os("CASCADE_GOLDEN").is_some() {
        fs::write(&file, text).unwrap();
    }
    let golden = fs::read_to_string(&file).unwrap_or_default();
    assert!(golden == text, "{path} is not up to date: run this test with CASCADE_GOLDEN=write");
}

#[test]
fn names_follow_the_conventions_of_prometheus() {
    let mut seen = std::collections::HashSet::new();
    for family in families() {
        let name = family.name;
        assert!(seen.insert(name), "{name} is a duplicate");
        // `process_` is the standard prefix for metrics of the exporter's process.
        assert!(name.starts_with("cascade_") || name.starts_with("process_"), "{name}");
        assert!(!name.ends_with("_total"), "{name}: the text format adds it");
        assert!(!family.help.ends_with('.') && !family.help.contains('\n'), "{name}");
        for unit in ["_ms", "_us", "_kib", "_mib", "_percent"] {
            assert!(!name.ends_with(unit), "{name}: base units only");
        }
    }
}

#[test]
fn the_older_text_format_has_the_same_values() {
    let served = Served::start();
    served.put(0..10);
    served.settle();
    let open = get(served.address(), "/metrics", &[OPEN_METRICS]);
    let text = served.get("/metrics");
    assert!(text.header("content-type").unwrap().starts_with("text/plain; version=0.0.4"));
    assert!(text.body.contains("# TYPE cascade_puts_total counter\n"), "{}", text.body);
    assert!(!text.body.contains("# EOF"));
    let stored = |answer: &super::served::Answer| {
        answer.metric("cascade_puts_total", "outcome=\"stored\"").to_bits()
    };
    assert_eq!(stored(&open), 10f64.to_bits());
    assert_eq!(stored(&text), 10f64.to_bits());
}

/// One operation on the store.
#[derive(Debug, Clone)]
enum StoreOperation {
    Put(u64, u64),
    Read(u64, u64),
    Delete(u64),
}

fn operation() -> impl Strategy<Value = StoreOperation> {
    // 200 blocks of 64 KiB exceed the 8 MiB of DRAM.
    prop_oneof![
        (0u64..200, 1u64..30).prop_map(|(at, count)| StoreOperation::Put(at, at + count)),
        (0u64..220, 1u64..30).prop_map(|(at, count)| StoreOperation::Read(at, at + count)),
        (0u64..200).prop_map(StoreOperation::Delete),
    ]
}

/// The metrics add up to the counters of the store after any sequence of operations.
#[test]
fn hits_by_tier_misses_and_failures_add_up_to_gets_in_every_scrape() {
    let mut runner =
        TestRunner::new(Config { cases: 12, failure_persistence: None, ..Config::default() });
    let sequences = proptest::collection::vec(operation(), 1..25);
    runner
        .run(&sequences, |operations| {
            run_and_scrape(&operations);
            Ok(())
        })
        .unwrap();
}

fn run_and_scrape(operations: &[StoreOperation]) {
    let served = Served::start();
    let (mut requested, mut put) = (0, 0);
    for operation in operations {
        match *operation {
            StoreOperation::Put(from, to) => {
                served.put(from..to);
                put += to - from;
            }
            StoreOperation::Read(from, to) => {
                served.read(from..to);
                requested += to - from;
            }
            StoreOperation::Delete(at) => {
                drop(served.node.store().delete(&[super::served::key(at)]));
            }
        }
        let scrape = served.get("/metrics");
        let sum = |name| scrape.metric(name, "tenant=\"default\"") as u64;
        assert_eq!(sum("cascade_gets_total"), requested);
        let accounted = sum("cascade_hits_total")
            + sum("cascade_misses_total")
            + sum("cascade_get_failures_total");
        assert_eq!(accounted, requested, "{}", scrape.body);
        assert_eq!(sum("cascade_hit_bytes_total"), sum("cascade_get_bytes_total"));
        assert_eq!(sum("cascade_puts_total"), put);
        let viewed = scrape.metric("cascade_request_blocks_sum", "operation=\"view\"");
        assert_eq!(viewed as u64, requested, "histograms count the same requests");
    }
    let status = served.status();
    let tenant = &status.tenants[0];
    let hits: u64 = tenant.tiers.iter().map(|tier| tier.hits).sum();
    assert_eq!(hits, tenant.gets.hits);
}

#[test]
fn readiness_follows_the_state_of_the_node_and_health_does_not() {
    let served = Served::start();
    assert_eq!((served.get("/healthz").code, served.get("/readyz").code), (200, 200));
    for (state, reason) in [(NodeState::Starting, "starting"), (NodeState::Draining, "draining")] {
        served.node.set_state(state);
        let ready = served.get("/readyz");
        assert_eq!(ready.code, 503);
        let body: serde_json::Value = serde_json::from_str(&ready.body).unwrap();
        assert_eq!(body["ready"], false);
        assert_eq!(body["reason"], reason);
        assert_eq!(served.get("/healthz").code, 200, "the process runs");
        assert_eq!(
            served.get("/metrics").metric("cascade_node_state", reason).to_bits(),
            1f64.to_bits()
        );
    }
}
