//! The systemd unit: its environment variables are settings, its limits fit those of the node.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]
#![expect(clippy::print_stderr, reason = "prints why a test was skipped")]

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use cascade_node::config::{self, ConfigSources, Environment};

fn unit() -> String {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/systemd/cascade.service");
    fs::read_to_string(path).unwrap()
}

/// All values of a key, in order.
fn values<'a>(unit: &'a str, key: &str) -> Vec<&'a str> {
    let lines = unit.lines().filter_map(|line| line.split_once('='));
    lines.filter(|(name, _)| *name == key).map(|(_, value)| value).collect()
}

#[test]
fn the_environment_of_the_unit_is_a_valid_configuration() {
    let unit = unit();
    let variables = values(&unit, "Environment");
    let variables = variables.iter().map(|pair| pair.split_once('=').unwrap());
    let config =
        config::load(&ConfigSources::default(), &Environment::new(variables, 999)).unwrap();
    assert_eq!(config.socket, PathBuf::from("/run/cascade/cascade.sock"));
    assert_eq!(config.socket_mode, 0o660);
    let stop: u64 = values(&unit, "TimeoutStopSec")[0].parse().unwrap();
    assert!(stop > config.shutdown_timeout.as_secs(), "the node stops before systemd kills it");
    let descriptors: usize = values(&unit, "LimitNOFILE")[0].parse().unwrap();
    assert!(descriptors > 2 * config.limits.connections_max);
}

/// The installation page names every path of the unit.
#[test]
fn the_installation_page_has_the_paths_of_the_unit() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/installation.md");
    let page = fs::read_to_string(page).unwrap();
    let unit = unit();
    let command = values(&unit, "ExecStart")[0];
    let (program, arguments) = command.split_once(' ').unwrap();
    let environment = program.strip_suffix("/bin/cascade").unwrap();
    let configuration = arguments.strip_prefix("serve --config ").unwrap();
    assert!(page.contains(&format!("python3 -m venv {environment}\n")), "{program}");
    assert!(page.contains(&format!("{environment}/bin/pip install ")), "{program}");
    assert!(page.contains(&format!(" {configuration}\n")), "{configuration}");
}

#[test]
fn systemd_accepts_the_unit() {
    let directory = tempfile::TempDir::new().unwrap();
    let path = directory.path().join("cascade-under-test.service");
    // The program is not installed where the test runs.
    fs::write(&path, unit().replace("/opt/cascade/bin/cascade", "/bin/true")).unwrap();
    let checked = match Command::new("systemd-analyze").arg("verify").arg(&path).output() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            eprintln!("skipped: systemd-analyze is not installed");
            return;
        }
        checked => checked.unwrap(),
    };
    let errors = String::from_utf8_lossy(&checked.stderr).into_owned();
    assert!(!errors.contains("cascade-under-test"), "{errors}");
}
