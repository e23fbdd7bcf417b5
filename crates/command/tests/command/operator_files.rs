//! `cascade files` writes what an operator needs, and nothing over the files of others.

use std::fs;
use std::path::Path;

use crate::{run, stderr};

const SOURCES: [(&str, &str); 6] = [
    ("cascade.sysusers", "systemd/cascade.sysusers"),
    ("cascade.toml", "cascade.toml"),
    ("cascade.service", "systemd/cascade.service"),
    ("scrape.yml", "prometheus/scrape.yml"),
    ("alerts.yml", "prometheus/alerts.yml"),
    ("grafana.json", "grafana/cascade.json"),
];

fn packaged(file: &str) -> String {
    let packaging = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging");
    fs::read_to_string(packaging.join(file)).unwrap()
}

fn written(args: &[&str]) -> String {
    let output = run(args);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn every_file_is_listed_and_written_with_its_next_command() {
    let directory = tempfile::TempDir::new().unwrap();
    let target = directory.path().join("new/operator");
    let list = written(&["files"]);
    assert!(!target.exists());
    let install = written(&["files", "--install", target.to_str().unwrap()]);
    for (name, source) in SOURCES {
        assert!(list.lines().any(|line| line.starts_with(name)), "{name} in {list}");
        assert_eq!(fs::read_to_string(target.join(name)).unwrap(), packaged(source), "{name}");
        let path = target.join(name).display().to_string();
        assert_eq!(install.matches(&path).count(), 2, "{path}, and what to do: {install}");
    }
    assert_eq!(list.lines().count(), SOURCES.len());
    assert_eq!(fs::read_dir(&target).unwrap().count(), SOURCES.len());
    assert!(install.contains("change ExecStartPre and ExecStart"), "{install}");
}

#[test]
fn an_existing_file_is_overwritten_by_force_only() {
    let directory = tempfile::TempDir::new().unwrap();
    let target = directory.path().to_str().unwrap();
    let own = directory.path().join("alerts.yml");
    fs::write(&own, "of the operator").unwrap();
    let other = directory.path().join("other");
    fs::write(&other, "of somebody else").unwrap();
    let link = directory.path().join("cascade.toml");
    std::os::unix::fs::symlink(&other, &link).unwrap();
    let refused = run(&["files", "--install", target]);
    assert_eq!(refused.status.code(), Some(1));
    let message = stderr(&refused);
    for part in ["alerts.yml", "cascade.toml", "nothing was written", "--force"] {
        assert!(message.contains(part), "{message}");
    }
    assert!(!message.contains("scrape.yml"), "{message}");
    assert!(!directory.path().join("scrape.yml").exists());
    assert_eq!(fs::read_to_string(&own).unwrap(), "of the operator");

    written(&["files", "--install", target, "--force"]);
    assert_eq!(fs::read_to_string(&own).unwrap(), packaged("prometheus/alerts.yml"));
    assert_eq!(fs::read_to_string(&link).unwrap(), packaged("cascade.toml"));
    assert_eq!(fs::read_to_string(&other).unwrap(), "of somebody else");
}

/// The commands are those of the guide, and the unit starts the program that it installs.
#[test]
fn the_guide_has_the_same_commands() {
    let guide = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/installation.md");
    let guide = fs::read_to_string(guide).unwrap();
    let directory = tempfile::TempDir::new().unwrap();
    let target = directory.path().to_str().unwrap();
    let install = written(&["files", "--install", target]);
    let commands = install.lines().map(str::trim).filter(|line| line.starts_with("install "));
    let unit_files = commands.filter(|command| !command.contains("/etc/prometheus"));
    for command in unit_files.flat_map(|command| command.split(" && ")) {
        let command = command.replace(target, "operator");
        assert!(guide.lines().any(|line| line == command), "{command}");
    }
    assert!(packaged("systemd/cascade.service").contains("ExecStart=/opt/cascade/bin/cascade "));
    assert!(run(&["files", "--force"]).status.code() == Some(2), "it needs --install");
}
