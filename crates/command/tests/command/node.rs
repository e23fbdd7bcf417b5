//! `cascade bench node --short`: real processes, real sockets, and consistent figures.

use crate::{json, run, stderr};

#[test]
fn selected_figures_of_a_served_node_are_measured() {
    let directory = tempfile::TempDir::new().unwrap();
    let path = directory.path().join("node.json");
    let path_text = path.display().to_string();
    for (only, names) in [
        ("control/lookup/p50", &["control/lookup/p50"][..]),
        ("batch-256/lease/4KiB", &["batch-256/lease/4KiB"]),
        ("/128KiB/2-workers", &["put/128KiB/2-workers", "get/128KiB/2-workers"]),
        ("hot/64x", &["hot/64x128KiB/8-readers"]),
        ("memory-kernel", &["idle/200-clients/memory-kernel"]),
    ] {
        let output = run(&[
            "bench",
            "node",
            "--unoptimised",
            "--short",
            "--only",
            only,
            "--json",
            &path_text,
        ]);
        assert_eq!(output.status.code(), Some(0), "{only}: {}", stderr(&output));
        let figures = json(&path);
        let figures = figures.as_array().unwrap();
        let found: Vec<_> = figures.iter().map(|figure| figure["name"].as_str().unwrap()).collect();
        assert_eq!(found, names);
        for figure in figures {
            assert!(figure["value"].as_f64().is_some_and(f64::is_finite), "{figure}");
            assert!(!figure["samples"].as_array().unwrap().is_empty(), "{figure}");
            assert!(!figure["limit_is"].as_str().unwrap().is_empty(), "{figure}");
        }
    }
}

#[test]
fn a_short_soak_with_killed_workers_leaks_nothing() {
    let directory = tempfile::TempDir::new().unwrap();
    let path = directory.path().join("soak.json");
    let path_text = path.display().to_string();
    let only = ["--only", "soak/", "--soak", "2", "--json", path_text.as_str()];
    let output = run(&[&["bench", "node", "--unoptimised", "--short"], &only[..]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let figures = json(&path);
    let value = |name: &str| {
        let all = figures.as_array().unwrap();
        all.iter().find(|figure| figure["name"] == name).unwrap()["value"].as_f64().unwrap()
    };
    assert!(value("soak/2s/lost-room") <= 20.48, "{figures}");
    assert!(value("soak/2s/descriptors").abs() < 0.5, "{figures}");
}

#[test]
fn an_unoptimised_build_reports_figures_only_for_tests_and_says_so() {
    const WARNING: &str = "unoptimised build: the figures mean nothing";
    if !cfg!(debug_assertions) {
        return;
    }
    let output = run(&["bench", "node", "--short"]);
    assert_eq!(output.status.code(), Some(2));
    let message = stderr(&output);
    for part in [WARNING, "make build", "--unoptimised"] {
        assert!(message.contains(part), "{message}");
    }
    assert!(output.stdout.is_empty());
    let directory = tempfile::TempDir::new().unwrap();
    let path = directory.path().join("node.json").display().to_string();
    let only = ["--short", "--only", "control/lookup/p50", "--json"];
    let run_for = |json: &str| {
        let output = run(&[&["bench", "--unoptimised", "node"], &only[..], &[json]].concat());
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        output
    };
    let text = String::from_utf8(run_for(&path).stdout).unwrap();
    assert!(text.contains(WARNING), "{text}");
    let environment = json(&directory.path().join("node.environment.json"));
    assert_eq!(environment["warning"], WARNING);
    assert!(environment["commit"].is_string(), "{environment}");
    assert!(stderr(&run_for("-")).contains(WARNING));
}

#[test]
fn an_unknown_figure_is_refused() {
    let output = run(&["bench", "node", "--unoptimised", "--short", "--only", "nothing like that"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("matches no figure"));
    assert_eq!(run(&["bench", "node", "--soak", "0"]).status.code(), Some(2));
}

#[test]
fn a_worker_exits_with_an_error_after_an_unknown_command() {
    use std::io::Write as _;
    use std::process::Stdio;
    let mut command = crate::cascade();
    command.args(["bench", "node-worker"]).stdin(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"{\"Dance\": 1}\n").unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("Dance"), "{}", stderr(&output));
}
