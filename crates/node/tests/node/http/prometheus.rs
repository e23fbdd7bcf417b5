//! Dashboard and alerts against a real Prometheus that scrapes a node, if one is installed.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use cascade_node::config::SecurityConfig;
use cascade_node::metrics::families;
use serde_json::Value;

use super::hit_rate;
use super::provoked::start_with_every_part;
use super::served::{Served, get};

/// Values for the dashboard's variables.
const VARIABLES: [(&str, &str); 3] =
    [("$__rate_interval", "5s"), ("$instance", ".*"), ("$tenant", ".*")];

/// Metrics of vLLM's connector begin with this. vLLM serves them, not the node.
const ENGINE: &str = "vllm:";

fn packaging(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging").join(path)
}

/// The queries of the node's metrics, each with its panel's title.
pub(crate) fn panel_queries() -> Vec<(String, String)> {
    all_queries().into_iter().filter(|(_, query)| !query.contains(ENGINE)).collect()
}

/// The queries of all panels, each with its panel's title.
fn all_queries() -> Vec<(String, String)> {
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

/// The metrics in a query.
pub(crate) fn metrics_of(query: &str) -> BTreeSet<&str> {
    let words = query.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_');
    let is_metric = |word: &&str| word.starts_with("cascade_") || word.starts_with("process_");
    words.filter(is_metric).collect()
}

/// Runs without Prometheus.
#[test]
fn dashboard_and_alerts_use_only_existing_metrics() {
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
            assert!(known.contains(metric), "panel {title:?} uses {metric}");
        }
    }
    for metric in metrics_of(&alerts) {
        assert!(known.contains(metric), "an alert uses {metric}");
    }
}

/// Runs without Prometheus. vLLM's own tests compare the list with what the connector exports.
#[test]
fn panels_of_engines_use_only_released_metrics_of_the_connector() {
    let released = fs::read_to_string(packaging("../testdata/vllm-metrics.txt")).unwrap();
    let released: BTreeSet<&str> =
        released.lines().filter_map(|line| line.split_once(' ')).map(|(name, _)| name).collect();
    let mut used = BTreeSet::new();
    for (title, query) in all_queries() {
        let is_end = |letter: char| !letter.is_ascii_alphanumeric() && !"_:".contains(letter);
        for metric in query.split(is_end).filter(|word| word.starts_with(ENGINE)) {
            assert!(released.contains(metric), "panel {title:?} uses {metric}");
            used.insert(metric.to_owned());
        }
    }
    let is_shown = |name: &str| used.iter().any(|metric| metric.contains(name));
    for name in ["loaded_bytes", "saved_bytes", "unregistered_bytes", "failed", "losses"] {
        assert!(is_shown(&format!("gpu_{name}")), "no panel shows {name}");
    }
}

/// Kills the program at the end of the test.
struct KillOnDrop(Child);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        // An error means that the program has already exited.
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
    let printed = [output.stdout, output.stderr].concat();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&printed));
}

/// Prometheus with the packaged scrape configuration and alerts, for a node with a token.
fn start_prometheus(directory: &Path, node: SocketAddr, token: &Path) -> (KillOnDrop, SocketAddr) {
    let scrape = fs::read_to_string(packaging("prometheus/scrape.yml")).unwrap();
    let authorization = "    # authorization:\n    #   credentials_file: \
                         /etc/prometheus/cascade.token\n";
    assert!(scrape.contains(authorization), "{scrape}");
    let enabled = format!("    authorization:\n      credentials_file: {}\n", token.display());
    let scrape = scrape.replace(authorization, &enabled);
    assert!(scrape.contains("127.0.0.1:9000") && scrape.contains("scrape_interval: 15s"));
    let scrape = scrape.replace("127.0.0.1:9000", &node.to_string());
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
    (KillOnDrop(child), address)
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

/// Puts and reads blocks until a condition is true. Panics after a minute.
fn work_until(served: &Served, what: &str, mut condition: impl FnMut() -> bool) {
    let clock = Instant::now();
    let mut round = 0;
    while !condition() {
        assert!(clock.elapsed() < Duration::from_secs(60), "waited in vain for {what}");
        served.put(round * 5..round * 5 + 20);
        served.read(round * 5..round * 5 + 30);
        round += 1;
        cascade_runtime::sleep(Duration::from_millis(200));
    }
}

#[test]
fn every_panel_and_every_alert_has_data_from_a_real_scrape() {
    if !is_installed() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let token = directory.path().join("token");
    fs::write(&token, "a-token-of-at-least-16-characters").unwrap();
    fs::set_permissions(&token, fs::Permissions::from_mode(0o600)).unwrap();
    let security = SecurityConfig { token_file: Some(token.clone()), ..SecurityConfig::default() };
    let served = start_with_every_part(security);
    let (_running, prometheus) = start_prometheus(directory.path(), served.address(), &token);
    work_until(&served, "a Prometheus that is ready", || {
        TcpStream::connect(prometheus).is_ok() && get(prometheus, "/-/ready", &[]).code == 200
    });
    let rate = "rate(cascade_request_duration_seconds_count{operation=\"view\"}[5s]) > 0";
    work_until(&served, "a rate over two scrapes", || !query(prometheus, rate).is_empty());

    let scrape = served.get("/metrics");
    promtool(&["check", "metrics"], &scrape.body);
    for (title, expression) in panel_queries() {
        let result = query(prometheus, &expression);
        assert!(!result.is_empty(), "panel {title:?} is empty: {expression}");
    }

    let hits = query(
        prometheus,
        "sum(cascade_hits_total) + sum(cascade_misses_total) + \
                                  sum(cascade_get_failures_total) - sum(cascade_gets_total)",
    );
    assert_eq!(hits[0]["value"][1], "0", "hits, misses and failures add up to gets");

    let is_evaluated = || {
        let rules: Value =
            serde_json::from_str(&get(prometheus, "/api/v1/rules", &[]).body).unwrap();
        let rules = rules["data"]["groups"][0]["rules"].as_array().unwrap().clone();
        assert!(rules.iter().all(|rule| rule["health"] != "err"), "{rules:?}");
        assert!(
            rules.iter().all(|rule| rule["state"] == "inactive"),
            "an alert for a healthy node"
        );
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

/// The panel, the alert and `cascade status` show one value. The panel showed 100 % for a hit rate
/// of 5 %, because it divided hits by gets.
#[test]
fn the_hit_rate_panel_shows_matched_over_requested_blocks() {
    if !is_installed() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let token = directory.path().join("token");
    fs::write(&token, "a-token-of-at-least-16-characters").unwrap();
    fs::set_permissions(&token, fs::Permissions::from_mode(0o600)).unwrap();
    let security = SecurityConfig { token_file: Some(token.clone()), ..SecurityConfig::default() };
    let served = Served::start_of(32 << 20, security, |_| {});
    let (_running, prometheus) = start_prometheus(directory.path(), served.address(), &token);
    let queries = panel_queries();
    let (_, panel) = queries.iter().find(|(title, _)| title == "Hit rate").unwrap();
    let clock = Instant::now();
    let mut requests = 0;
    let shown = loop {
        assert!(clock.elapsed() < Duration::from_secs(60), "the panel stays empty");
        hit_rate::serve(&served, requests..requests + 10);
        requests += 10;
        cascade_runtime::sleep(Duration::from_millis(200));
        let is_up = TcpStream::connect(prometheus).is_ok();
        if !is_up || get(prometheus, "/-/ready", &[]).code != 200 {
            continue;
        }
        let result = query(prometheus, panel);
        let value = result.first().and_then(|one| one["value"][1].as_str()?.parse::<f64>().ok());
        if let Some(value) = value.filter(|value| !value.is_nan()) {
            break value;
        }
    };
    assert!((shown - 0.05).abs() < 1e-6, "the panel shows {shown}");
    assert!(
        served.status().tenants[0].hit_rate.ratio.is_some_and(|rate| (rate - 0.05).abs() < 1e-9)
    );
}

/// Clients that look up before they load always have 100 % hits over gets: with that ratio the
/// alert could not fire.
#[test]
fn the_alert_of_a_collapsed_hit_rate_fires_for_clients_that_look_up_first() {
    if !is_installed() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let rules = packaging("prometheus/alerts.yml").canonicalize().unwrap();
    // A day of 50 %, then an hour of 5 %. All matched blocks are loaded.
    let day = |rate: u64, later: u64| format!("'0+{rate}x1440 {}+{later}x60'", rate * 1440);
    let series = |metric: &str, labels: &str, values: String| {
        let labels = format!("instance=\"a\", tenant=\"default\"{labels}");
        format!("      - series: '{metric}{{{labels}}}'\n        values: {values}\n")
    };
    let tier = ", tier=\"dram\"";
    let input = [
        series("cascade_requested_blocks_total", "", day(6000, 6000)),
        series("cascade_matched_blocks_total", tier, day(3000, 300)),
        series("cascade_gets_total", "", day(3000, 300)),
        series("cascade_hits_total", tier, day(3000, 300)),
    ];
    let expected = |fires: bool| {
        if fires {
            "[{exp_labels: {severity: warning, instance: a, tenant: default}, \
             exp_annotations: ANNOTATIONS}]"
        } else {
            "[]"
        }
    };
    let annotations = "{runbook_url: \"http://a/runbooks/CascadeHitRateCollapsed\", \
        summary: \"The hit rate of default on a halved\", description: \"Compare a request with \
        `cascade explain`: a changed model, layout or prompt makes every block a miss.\"}";
    let case = |at: &str, fires: bool| {
        let expected = expected(fires).replace("ANNOTATIONS", annotations);
        format!(
            "      - eval_time: {at}\n        alertname: CascadeHitRateCollapsed\n        \
             exp_alerts: {expected}\n"
        )
    };
    let text = format!(
        "rule_files:\n  - {}\ntests:\n  - interval: 1m\n    input_series:\n{}    \
         alert_rule_test:\n{}{}",
        rules.display(),
        input.concat(),
        case("23h", false),
        case("24h40m", true),
    );
    let path = directory.path().join("test.yml");
    fs::write(&path, text).unwrap();
    promtool(&["test", "rules", path.to_str().unwrap()], "");
}

/// The node serves the runbook of each alert.
#[test]
fn every_alert_links_to_its_runbook() {
    let served = Served::start();
    let alerts = fs::read_to_string(packaging("prometheus/alerts.yml")).unwrap();
    let names: Vec<&str> =
        alerts.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
    assert!(names.len() >= 7, "{names:?}");
    for name in names {
        let url = format!("runbook_url: \"http://{{{{ $labels.instance }}}}/runbooks/{name}\"");
        assert!(alerts.contains(&url), "{name} has no runbook_url");
        let page = served.get_over_tcp(&format!("/runbooks/{name}"));
        assert_eq!(page.code, 200, "{name}");
        assert!(page.body.starts_with(&format!("# {name}\n")), "{}", page.body);
    }
    assert_eq!(served.get_over_tcp("/runbooks/NoSuchAlert").code, 404);
}
