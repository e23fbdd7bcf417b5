//! `cascade serve` and `cascade doctor` before a node serves: configuration and checks.

use std::process::Output;

use serde_json::Value;

use crate::{cascade, run, stderr};

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn the_effective_configuration_is_printed_with_its_sources() {
    let directory = tempfile::TempDir::new().unwrap();
    let file = directory.path().join("cascade.toml");
    std::fs::write(&file, "dram = \"1GiB\"\npolicy = \"arc\"\n").unwrap();
    let output = cascade()
        .args(["serve", "--print-config", "--dram", "2GiB", "--files", "cache"])
        .arg("--config")
        .arg(&file)
        .env("CASCADE_WRITE", "through")
        .current_dir(&directory)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let shown = stdout(&output);
    let below = format!("{}/cache", directory.path().canonicalize().unwrap().display());
    for (setting, source) in [
        ("dram = \"2GiB\"", "--dram"),
        ("policy = \"arc\"", "cascade.toml:2"),
        ("write = \"through\"", "CASCADE_WRITE"),
        ("pipeline = \"Dram|Files\"", "default"),
        (&format!("files = \"{below}\""), "--files"),
    ] {
        let found = |line: &str| line.starts_with(setting) && line.ends_with(source);
        assert!(shown.lines().any(found), "{setting} by {source}: {shown}");
    }
}

/// It scraped port 9470, which no example opens.
#[test]
fn the_scrape_configuration_has_the_port_of_the_examples() {
    let read = |file: &str| {
        std::fs::read_to_string(format!("{}/../../{file}", env!("CARGO_MANIFEST_DIR"))).unwrap()
    };
    let scrape = read("packaging/prometheus/scrape.yml");
    let target = scrape.split("targets: [\"").nth(1).unwrap().split('"').next().unwrap();
    let help = stdout(&run(&["serve", "--help"]));
    for (text, name) in [
        (read("docs/serving.md"), "docs/serving.md"),
        (read("README.md"), "README.md"),
        (help, "cascade serve --help"),
    ] {
        assert!(text.contains(&format!("--listen {target}")), "{name} has no --listen {target}");
    }
}

/// The line with `ready` was text, and a program that read the log failed at it.
#[test]
fn every_line_of_a_node_with_a_log_in_json_is_json() {
    let directory = tempfile::TempDir::new().unwrap();
    let socket = directory.path().join("socket");
    let serve = || {
        let mut command = cascade();
        command.args(["serve", "--dram", "4MiB", "--keep-pool", "never", "--socket"]);
        command.arg(&socket).env("CASCADE_LOG_FORMAT", "json");
        command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
        command
    };
    let mut node = serve().spawn().unwrap();
    let mut ready = String::new();
    let mut output = std::io::BufReader::new(node.stdout.take().unwrap());
    std::io::BufRead::read_line(&mut output, &mut ready).unwrap();
    let ready: Value = serde_json::from_str(&ready).unwrap();
    assert!(ready["message"].as_str().unwrap().contains(" ready: socket "), "{ready}");
    assert!(ready["timestamp"].as_str().unwrap().ends_with('Z'), "{ready}");
    // The socket is taken, so this one fails.
    let second = serve().output().unwrap();
    assert_eq!(second.status.code(), Some(1));
    let process = rustix::process::Pid::from_child(&node);
    rustix::process::kill_process(process, rustix::process::Signal::TERM).unwrap();
    let first = node.wait_with_output().unwrap();
    assert!(first.status.success());
    let printed = [first.stderr, second.stdout, second.stderr.clone()].concat();
    for line in String::from_utf8(printed).unwrap().lines() {
        let line: Value = serde_json::from_str(line).unwrap_or_else(|_| panic!("{line:?}"));
        assert!(line["level"].is_string() && line["message"].is_string(), "{line}");
    }
    let failure = String::from_utf8(second.stderr).unwrap();
    assert!(failure.contains("the node stopped"), "{failure}");
}

#[test]
fn an_invalid_configuration_is_refused_with_a_hint() {
    let directory = tempfile::TempDir::new().unwrap();
    let file = directory.path().join("cascade.toml");
    std::fs::write(&file, "\n\ndarm = \"1GiB\"\n").unwrap();
    let file = file.display().to_string();
    for (options, hints) in [
        (&["--dram", "lots"][..], &["--dram", "512MiB"][..]),
        (&["--dram", "1MiB"], &["the minimum is 4MiB"]),
        (&["--policy", "clock"], &["prefix-cost"]),
        (&["--listen", "localhost"], &["127.0.0.1:9000"]),
        (&["--listen", "0.0.0.0:9000"], &["listen", "token_file"]),
        (&["--pipeline", "Dram|Files"], &["pipeline (--pipeline)", "--files"]),
        (&["--config", &file], &["cascade.toml:3", "dram"]),
        (&["--config", "/no/such.toml"], &["/no/such.toml", "No such file"]),
    ] {
        let output = run(&[&["serve"], options].concat());
        let message = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{options:?}: {message}");
        for hint in hints {
            assert!(message.contains(hint), "{options:?} should name {hint:?}: {message}");
        }
    }
}

#[test]
fn the_configuration_reference_and_example_equal_the_stored_files() {
    for (flag, file) in [
        ("--print-reference", "docs/configuration.md"),
        ("--print-example", "packaging/cascade.toml"),
    ] {
        let output = run(&["serve", flag]);
        let stored = format!("{}/../../{file}", env!("CARGO_MANIFEST_DIR"));
        let stored = std::fs::read_to_string(stored).unwrap();
        assert_eq!(stdout(&output).trim_end(), stored.trim_end(), "{file}");
    }
}

/// The limit is lowered in the child process only.
#[test]
fn the_doctor_fails_with_too_few_file_descriptors() {
    let directory = tempfile::TempDir::new().unwrap();
    let socket = directory.path().join("cascade.sock");
    let output = std::process::Command::new("sh")
        .args(["-c", "ulimit -n 64; exec \"$0\" doctor --json --socket \"$1\""])
        .arg(env!("CARGO_BIN_EXE_cascade"))
        .arg(&socket)
        .output()
        .unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let checks = report["checks"].as_array().unwrap();
    let check = checks.iter().find(|check| check["id"] == "open_files").unwrap();
    assert_eq!(check["state"], "failed", "{check}");
    assert!(check["found"].as_str().unwrap().contains("64"), "{check}");
    assert!(check["remedy"].as_str().unwrap().contains("ulimit -n"), "{check}");
    assert_eq!((output.status.code(), &report["is_ready"]), (Some(1), &Value::Bool(false)));
}

#[test]
fn the_doctor_prints_the_reason_and_the_remedy_of_a_failure() {
    let directory = tempfile::TempDir::new().unwrap();
    let socket = directory.path().join("cascade.sock");
    std::fs::write(&socket, "").unwrap();
    let output = run(&["doctor", "--socket", &socket.display().to_string()]);
    let report = stdout(&output);
    assert_eq!(output.status.code(), Some(1), "{report}");
    for part in ["socket", "no socket", "why: ", "do:  move", "NOT READY"] {
        assert!(report.contains(part), "{part}: {report}");
    }
}

#[test]
fn the_doctor_fails_with_an_invalid_configuration() {
    let output = run(&["doctor", "--json", "--listen", "0.0.0.0:9000"]);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(report["checks"][0]["id"], "configuration");
    assert_eq!(report["checks"][0]["state"], "failed");
    assert_eq!(report["checks"].as_array().unwrap().len(), 1);
}

/// A failed start left its pool or the pool's ledger behind in shared memory.
#[test]
fn a_start_with_more_memory_than_the_machine_has_leaves_nothing_behind() {
    let directory = tempfile::TempDir::new().unwrap();
    let socket = directory.path().join("cascade.sock");
    let mut child = cascade()
        .args(["serve", "--dram", "1000TiB", "--socket"])
        .arg(&socket)
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let process = child.id().to_string();
    let status = child.wait().unwrap();
    let output = child.wait_with_output().unwrap();
    let said = stderr(&output);
    assert_eq!(status.code(), Some(1), "{said}");
    assert!(said.contains("TiB does not fit") && said.contains("make the pool smaller"), "{said}");
    let left: Vec<_> = std::fs::read_dir("/dev/shm")
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .filter(|name| name.contains("cascade") && name.contains(&process))
        .collect();
    assert_eq!(left, [""; 0]);
    let beside = std::fs::read_dir(directory.path()).unwrap().count();
    assert_eq!(beside, 0, "neither a socket nor its lock is left");
}
