//! Every metric has a sample, and a value other than zero where this test can provoke one.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::time::{Duration, Instant};

use cascade_block::BlockKey;
use cascade_node::config::{ClusterSettings, SecurityConfig, TenantConfig};
use cascade_node::telemetry::Spans;
use cascade_node::traffic::{CompletedRequest, Operation};
use cascade_node::{Node, NodeConfig};
use cascade_store::{CallOptions, KeepPool, Put, StoreConfig};

use super::prometheus::{metrics_of, panel_queries};
use super::served::{BLOCK_BYTES, Served, get, key};

/// Metrics that stay zero in this test, with the reason or the test that covers them.
const ZERO_HERE: [(&str, &str); 27] = [
    ("cascade_peer_fetched_blocks", "needs another node: the tests of the command"),
    ("cascade_peer_fetched_bytes", "needs another node: the tests of the command"),
    ("cascade_tier_circuit_open", "needs a tier that fails; the store's tests have one"),
    ("cascade_tier_damaged_structures", "needs a damaged file; the store's tests damage them"),
    ("cascade_clients", "needs a client over the node's socket"),
    ("cascade_stopped_clients", "needs a client over the node's socket"),
    ("cascade_silent_clients", "needs a client that is idle for a minute"),
    ("cascade_reaped_clients", "needs a client that dies"),
    ("cascade_leases", "needs a client over the node's socket"),
    ("cascade_leased_bytes", "needs a client over the node's socket"),
    ("cascade_filling_bytes", "needs a client over the node's socket"),
    ("cascade_oldest_lease_seconds", "needs a client over the node's socket"),
    ("cascade_http_handshake_failures", "needs certificates: security.rs"),
    ("cascade_exported_spans", "needs a collector: traces.rs"),
    ("cascade_lost_spans", "needs requests under a subscriber: traces.rs"),
    ("cascade_shed_gets", "needs a stage that fails: crates/store/tests/store/health.rs"),
    (
        "cascade_tier_breaker_openings",
        "needs a stage that fails: crates/store/tests/store/health.rs",
    ),
    ("cascade_tier_stuck_calls", "needs a stage that hangs: crates/store/tests/store/health.rs"),
    ("cascade_pending_bytes", "is zero again as soon as the mover has written"),
    ("cascade_demote_failures", "needs a disk that fails: crates/store/tests/store/sick_disk.rs"),
    ("cascade_demote_declines", "needs a stage that declines blocks"),
    ("cascade_name_failures", "needs a stage that fails to take names"),
    ("cascade_protection_refused", "needs a smaller quota: crates/store/tests/store/protection.rs"),
    ("cascade_shadow_hit_ratio", "a sample of all blocks, which may have no hit"),
    ("cascade_pool_huge_page_bytes", "the machine may have no huge pages"),
    (
        "cascade_warm_restart_rejected_records",
        "needs damage: crates/store/tests/store/pool_files.rs",
    ),
    ("cascade_warm_restart_seconds", "a small pool is taken over in less than a millisecond"),
];

/// A cluster whose other node does not run.
fn away_from_others(directory: &Path) -> ClusterSettings {
    let hosts_file = directory.join("hosts");
    fs::write(&hosts_file, "this 127.0.0.1:1\nother 127.0.0.1:2\n").unwrap();
    ClusterSettings {
        hosts_file,
        node_name: Some("this".to_owned()),
        listen: Some("127.0.0.1:0".parse().unwrap()),
        token_file: None,
        certificate: None,
        private_key: None,
        authority: None,
    }
}

/// A node with every part that has metrics of its own: a cluster, blocks recovered from its pool
/// file, an exporter of spans, and a second tenant without a file tier.
pub(crate) fn start_with_every_part(security: SecurityConfig) -> Served {
    let served = Served::start_node(
        security,
        |_| {},
        |config| {
            let directory = config.socket.parent().unwrap();
            config.pool_directory = Some(directory.to_owned());
            config.keep_pool = KeepPool::Always;
            config.cluster = Some(away_from_others(directory));
            let files = config.store.files.as_mut().unwrap();
            files.capacity_bytes = 32 << 20;
            files.segment_bytes = 4 << 20;
            let memory_only =
                StoreConfig { dram_bytes: 4 << 20, huge_pages: false, ..StoreConfig::default() };
            config.tenants = vec![TenantConfig {
                name: "memory-only".to_owned(),
                users: vec![4711],
                token_file: None,
                store: memory_only,
                encryption_key_file: None,
            }];
            run_before(config);
        },
    );
    // No collector listens there; the spans are counted all the same.
    served.node.set_spans(Spans::open("http://127.0.0.1:9").unwrap());
    served
}

/// An earlier run, whose blocks the node recovers.
fn run_before(config: &NodeConfig) {
    let node = Node::open(config.clone()).unwrap();
    let bytes = vec![5; BLOCK_BYTES];
    let keys: Vec<BlockKey> = (9000..9010).map(key).collect();
    let puts: Vec<Put<'_>> = keys.iter().map(|key| Put::new(*key, &bytes)).collect();
    node.store().put(&puts, CallOptions::default());
    node.close().unwrap();
}

/// Waits until a condition is true. Panics after a minute.
fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let clock = Instant::now();
    while !condition() {
        assert!(clock.elapsed() < Duration::from_secs(60), "waited in vain for {what}");
        cascade_runtime::sleep(Duration::from_millis(20));
    }
}

/// Provokes hits, misses, evictions, failures, prefetches and damage.
fn provoke(served: &Served) {
    let store = served.node.store();
    let options = CallOptions::default();
    // 48 MiB, through 8 MiB of DRAM and 32 MiB of files.
    for from in (0..768).step_by(32) {
        served.put(from..from + 32);
        served.settle();
    }
    served.read(700..900);
    let present = |range: std::ops::Range<u64>| -> Vec<BlockKey> {
        let keys: Vec<BlockKey> = range.map(key).collect();
        let is_present = store.contains(&keys);
        keys.into_iter().zip(is_present).filter_map(|(key, is)| is.then_some(key)).collect()
    };
    let below = present(500..560);
    store.prefetch(&below[..16]);
    let counters = || store.stats().counters;
    wait_until("a prefetch", || counters().prefetched_blocks > 0);
    drop(store.view(&below[..16], options));
    // Views of more blocks than fit the pool fail.
    drop(store.view(&present(400..768), CallOptions { timeout: Some(Duration::ZERO), ..options }));
    let protected: Vec<BlockKey> = (5000..5100).map(key).collect();
    let bytes = vec![6; BLOCK_BYTES];
    for key in &protected {
        let put = Put { is_prefix: true, ..Put::new(*key, &bytes) };
        store.put(&[put], options);
    }
    let other = served.node.tenants().by_name("memory-only").unwrap().store();
    for number in 0..128 {
        other.put(&[Put::new(key(number), &bytes)], options);
    }
    let failed = CompletedRequest {
        operation: Operation::View,
        duration: Duration::from_millis(1),
        blocks: 1,
        hit_blocks: 0,
        bytes: 0,
        failed: true,
    };
    served.node.traffic().record(&failed);
    damage(&served.node.config().store.files.as_ref().unwrap().directory);
    for key in present(0..768) {
        drop(store.view(&[key], options));
    }
    assert!(counters().damaged_blocks > 0);
    // So that a part of the pool is free.
    store.delete(&present(0..768));
    get(served.address(), "/metrics", &["Authorization: Bearer a-token-of-nobody"]);
}

/// Overwrites the middle of each file.
fn damage(directory: &Path) {
    for file in fs::read_dir(directory).unwrap() {
        let path = file.unwrap().path();
        let file = match fs::File::options().write(true).open(&path) {
            Ok(file) => file,
            // A directory, or a file that the store has removed meanwhile.
            Err(error) if matches!(error.kind(), ErrorKind::IsADirectory | ErrorKind::NotFound) => {
                continue;
            }
            Err(error) => panic!("{}: {error}", path.display()),
        };
        let length = file.metadata().unwrap().len();
        if length > 1 << 20 {
            let noise = vec![0xa5; (length / 4) as usize];
            std::os::unix::fs::FileExt::write_all_at(&file, &noise, length / 2).unwrap();
        }
    }
}

/// The largest sample of each family in a scrape; histograms by their count.
fn samples(scrape: &str) -> BTreeMap<String, f64> {
    let mut found = BTreeMap::new();
    for line in scrape.lines().filter(|line| !line.starts_with('#')) {
        let (name, value) = line.rsplit_once(' ').unwrap();
        let name = name.split('{').next().unwrap();
        let value: f64 = value.parse().unwrap();
        let most = found.entry(name.to_owned()).or_insert(value);
        *most = most.max(value);
    }
    found
}

#[test]
fn every_metric_of_the_golden_file_and_of_the_panels_has_a_sample() {
    let served = start_with_every_part(SecurityConfig::default());
    provoke(&served);
    let mut found = samples(&served.get("/metrics").body);
    let full = Served::start_with(SecurityConfig::default(), |config| config.connections_max = 0);
    assert_eq!(full.get_over_tcp("/healthz").code, 200);
    let turned_away = full.node.traffic().status().http.turned_away;
    *found.get_mut("cascade_http_turned_away_total").unwrap() +=
        f64::from(u32::try_from(turned_away).unwrap());

    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/metrics.txt");
    let golden = fs::read_to_string(golden).unwrap();
    let mut families = BTreeSet::new();
    for line in golden.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
        let (name, kind) = line.split_once(' ').unwrap();
        families.insert(name);
        let end = match kind {
            "counter" => "_total",
            "histogram" => "_count",
            _ => "",
        };
        let most = found.get(&format!("{name}{end}"));
        let most = *most.unwrap_or_else(|| panic!("{name} has no sample"));
        let reason = ZERO_HERE.iter().find(|(zero, _)| *zero == name);
        assert!(most > 0.0 || reason.is_some(), "{name} stays zero, and no reason is given");
    }
    assert!(families.len() > 60, "{}", families.len());
    for (name, _) in ZERO_HERE {
        assert!(families.contains(name), "{name} is no metric");
    }
    for (title, query) in panel_queries() {
        for metric in metrics_of(&query) {
            assert!(found.contains_key(metric), "panel {title:?}: {metric} has no sample");
        }
    }
}
