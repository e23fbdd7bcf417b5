//! Dashboard and alerts against a real Prometheus that scrapes a real node, when there is one.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use cascade_node::metrics::families;
use serde_json::Value;

use crate::served::{Served, get};

/// Stands in for the dashboard's variables.
const VARIABLES: [(&str, &str); 3] =
    [("$__rate_interval", "5s"), ("$instance", ".*"), ("$tenant", ".*")];

fn packaging(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging").join(path)
}

/// A panel's title and one of its queries.
fn panel_queries() -> Vec<(String, String)> {
    let text = fs::read_to_string(packaging("grafana/cascade.json")).unwrap();
    let dashboard: Value = serde_json::from_str(&text).unwrap();
    let mut queries = Vec::new();
    for panel in dashboard["panels"].as_array().unwrap() {
        for target in panel["targets"].as_array().into_iter().flatten() {
            let mut query = target["expr"].as_str().unwrap().to_owned();
            for (name, value) in VARIABLES {
                query = query.replace(name, value);
            }
            queries.push((panel["title"].as_str().unwrap().to_owned(), query));
        }
    }
    queries
}

/// The metrics that a query names.
fn metrics_of(query: &str) -> BTreeSet<&str> {
    let words = query.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_');
    words.filter(|word| word.starts_with("cascade_")).collect()
}

/// Runs without Prometheus: no query names what no node says.
#[test]
fn dashboard_and_alerts_name_only_metrics_that_a_node_has() {
    let mut known = BTreeSet::new();
    for family in families() {
        let ends: &[&str] = match family.kind.name() {
            "counter" => &["_total"],
            "histogram" => &["_bucket", "_sum", "_count"],
            _ => &[""],
        };
        known.extend(ends.iter().map(|end| format!("{}{end}", family.name)));
    }
    let queries = panel_queries();
    assert!(queries.len() > 40, "{}", queries.len());
    let alerts = fs::read_to_string(packaging("prometheus/alerts.yml")).unwrap();
    for (title, query) in &queries {
        for metric in metrics_of(query) {
            assert!(known.contains(metric), "panel {title:?} names {metric}");
        }
    }
    for metric in metrics_of(&alerts) {
        assert!(known.contains(metric), "an alert names {metric}");
    }
}

/// Ends the program with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended by itself; then there is nothing to end.
        if self.0.kill().is_ok() {
            drop(self.0.wait());
        }
    }
}

fn is_installed() -> bool {
    let exists = |name: &str| Command::new(name).arg("--version").output().is_ok();
    let found = exists("prometheus") && exists("promtool");
    if !found {
        println!("skipped: no prometheus and promtool (Debian: apt-get install prometheus)");
    }
    found
}

fn promtool(arguments: &[&str], input: &str) {
    let mut child = Command::new("promtool")
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&said));
}

/// Prometheus with our scrape configuration and alerts, pointed at a node.
fn start_prometheus(directory: &Path, node: SocketAddr) -> (Running, SocketAddr) {
    let scrape = fs::read_to_string(packaging("prometheus/scrape.yml")).unwrap();
    assert!(scrape.contains("127.0.0.1:9470") && scrape.contains("scrape_interval: 15s"));
    let scrape = scrape.replace("127.0.0.1:9470", &node.to_string());
    let often = "scrape_interval: 1s\n  evaluation_interval: 1s";
    fs::write(directory.join("scrape.yml"), scrape.replace("scrape_interval: 15s", often)).unwrap();
    let alerts = packaging("prometheus/alerts.yml");
    fs::copy(&alerts, directory.join("alerts.yml")).unwrap();
    let config = directory.join("scrape.yml");
    promtool(&["check", "config", config.to_str().unwrap()], "");
    promtool(&["check", "rules", alerts.to_str().unwrap()], "");
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let log = fs::File::create(directory.join("log")).unwrap();
    let child = Command::new("prometheus")
        .arg(format!("--config.file={}", config.display()))
        .arg(format!("--storage.tsdb.path={}", directory.join("data").display()))
        .arg(format!("--web.listen-address={address}"))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .unwrap();
    (Running(child), address)
}

fn query(prometheus: SocketAddr, query: &str) -> Vec<Value> {
    let encoded = query.bytes().fold(String::new(), |mut encoded, byte| {
        write!(encoded, "%{byte:02X}").unwrap();
        encoded
    });
    let answer = get(prometheus, &format!("/api/v1/query?query={encoded}"), &[]);
    let body: Value = serde_json::from_str(&answer.body).unwrap();
    assert_eq!(body["status"], "success", "{query}: {}", answer.body);
    body["data"]["result"].as_array().unwrap().clone()
}

/// Does a little work until something is so, or a minute is over.
fn work_until(served: &Served, what: &str, mut is_so: impl FnMut() -> bool) {
    let clock = Instant::now();
    let mut round = 0;
    while !is_so() {
        assert!(clock.elapsed() < Duration::from_secs(60), "{what} did not come about");
        served.put(round * 5..round * 5 + 20);
        served.read(round * 5..round * 5 + 30);
        round += 1;
        std::thread::park_timeout(Duration::from_millis(200));
    }
}

#[test]
fn every_panel_and_every_alert_resolves_against_a_real_scrape() {
    if !is_installed() {
        return;
    }
    let served = Served::start();
    let directory = tempfile::tempdir().unwrap();
    let (_running, prometheus) = start_prometheus(directory.path(), served.address());
    work_until(&served, "a Prometheus that is ready", || {
        TcpStream::connect(prometheus).is_ok() && get(prometheus, "/-/ready", &[]).code == 200
    });
    let rate = "rate(cascade_request_duration_seconds_count{operation=\"view\"}[5s]) > 0";
    work_until(&served, "a rate over two scrapes", || !query(prometheus, rate).is_empty());

    let scrape = served.get("/metrics");
    promtool(&["check", "metrics"], &scrape.body);
    let has_samples = |metric: &str| {
        let mut lines = scrape.body.lines().filter_map(|line| line.strip_prefix(metric));
        lines.any(|rest| rest.starts_with(['{', ' ']))
    };
    let mut resolved = 0;
    for (title, expression) in panel_queries() {
        let result = query(prometheus, &expression);
        // What this node does not have, such as traces, has no samples and no curve.
        if metrics_of(&expression).into_iter().all(has_samples) {
            assert!(!result.is_empty(), "panel {title:?} is empty: {expression}");
            resolved += 1;
        }
    }
    assert!(resolved > 40, "{resolved}");

    let hits = query(
        prometheus,
        "sum(cascade_hits_total) + sum(cascade_misses_total) + \
                                  sum(cascade_get_failures_total) - sum(cascade_gets_total)",
    );
    assert_eq!(hits[0]["value"][1], "0", "what is scraped adds up");

    let is_evaluated = || {
        let rules: Value =
            serde_json::from_str(&get(prometheus, "/api/v1/rules", &[]).body).unwrap();
        let rules = rules["data"]["groups"][0]["rules"].as_array().unwrap().clone();
        assert!(rules.iter().all(|rule| rule["health"] != "err"), "{rules:?}");
        assert!(rules.iter().all(|rule| rule["state"] == "inactive"), "an alert on a well node");
        rules.iter().all(|rule| rule["health"] == "ok")
    };
    work_until(&served, "an evaluation of the alerts", is_evaluated);

    served.node.set_state(cascade_node::status::NodeState::Draining);
    work_until(&served, "the alert of a node that is not ready", || {
        let rules = get(prometheus, "/api/v1/rules", &[]).body;
        let rules: Value = serde_json::from_str(&rules).unwrap();
        let rules = rules["data"]["groups"][0]["rules"].as_array().unwrap().clone();
        rules.iter().any(|rule| rule["name"] == "CascadeNotReady" && rule["state"] == "pending")
    });
}
