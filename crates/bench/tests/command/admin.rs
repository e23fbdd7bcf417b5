//! What an operator does with a node that runs: real nodes, real sockets, other users.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

use crate::{cascade, stderr};

/// Long enough for a busy machine; a node is ready within a second.
const PATIENCE: Duration = Duration::from_secs(120);
const KEY: &str = "4bf5122f344554c53bde2ebb8cd2b7e3d1600ad631c385a5d7cce23c7785459a";
const OTHER: &str = "4bf5122f344554c5ffffffff8cd2b7e3d1600ad631c385a5d7cce23c7785459a";
const ABSENT: &str = "dddddddd344554c5ffffffff8cd2b7e3d1600ad631c385a5d7cce23c7785459a";

/// Users and a group that no machine has.
const USER: u32 = 4_000_011;
const GROUP: u32 = 4_000_012;
const MEMBER: u32 = 4_000_013;
const STRANGER: u32 = 4_000_014;

/// A node that serves below a directory of its own.
pub(crate) struct Served {
    directory: TempDir,
    pub(crate) child: Child,
}

impl Drop for Served {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Waits for the line with `ready`, then goes on reading, so that the node never waits for a pipe.
fn await_ready(child: &mut Child) {
    let (ready, is_ready) = mpsc::channel();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    std::thread::spawn(move || {
        for line in lines.map_while(Result::ok) {
            if line.contains(" ready: ") {
                // The receiver is dropped once it has received one.
                let _is_received = ready.send(()).is_ok();
            }
        }
    });
    is_ready.recv_timeout(PATIENCE).expect("the node is ready in time");
}

impl Served {
    pub(crate) fn start(toml: &str) -> Self {
        Self::start_as(toml, &mut cascade(), |_| ())
    }

    fn start_as(toml: &str, command: &mut Command, prepare: impl FnOnce(&TempDir)) -> Self {
        let directory = TempDir::new().unwrap();
        let here = directory.path().display().to_string();
        let base = "dram = \"16MiB\"\nkeep_pool = \"never\"\n";
        fs::write(
            directory.path().join("cascade.toml"),
            base.to_owned() + &toml.replace("HERE", &here),
        )
        .unwrap();
        prepare(&directory);
        let log = fs::File::create(directory.path().join("log")).unwrap();
        command.arg("serve").arg("--config").arg(directory.path().join("cascade.toml"));
        command.arg("--socket").arg(directory.path().join("run/cascade.sock"));
        command.stdout(Stdio::piped()).stderr(log);
        let mut child = command.spawn().unwrap();
        await_ready(&mut child);
        Self { directory, child }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn with(&self, command: &mut Command, args: &[&str]) -> Output {
        command.args(args).arg("--socket").arg(self.path("run/cascade.sock"));
        command.stdin(Stdio::null()).output().unwrap()
    }

    pub(crate) fn run(&self, args: &[&str]) -> Output {
        self.with(&mut cascade(), args)
    }

    /// Runs a command that succeeds; what it prints.
    pub(crate) fn said(&self, args: &[&str]) -> String {
        let output = self.run(args);
        assert_eq!(output.status.code(), Some(0), "{args:?}: {}", stderr(&output));
        String::from_utf8(output.stdout).unwrap()
    }

    fn json(&self, args: &[&str]) -> Value {
        serde_json::from_str(&self.said(&[args, &["--json"]].concat())).unwrap()
    }

    /// Runs a command that is refused; its message.
    fn refused(&self, code: i32, args: &[&str]) -> String {
        let output = self.run(args);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {}", stderr(&output));
        stderr(&output)
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.path("log")).unwrap()
    }

    pub(crate) fn process(&self) -> Pid {
        Pid::from_child(&self.child)
    }
}

#[test]
fn a_node_that_answers_says_which_it_is() {
    let node = Served::start("");
    let socket = node.path("run/cascade.sock").display().to_string();
    assert!(node.said(&["ping"]).contains(&socket));
    assert_eq!(node.said(&["ping", "--count", "3"]).lines().count(), 3);
    assert_eq!(node.json(&["ping", "--count", "2"])["times_us"].as_array().unwrap().len(), 2);
    let version = node.json(&["version"]);
    assert_eq!(version["version"], version["node"]["version"]);
    assert_eq!(version["node"]["pid"], node.child.id());
    assert_eq!(version["node"]["is_administrator"], true);
    assert!(node.said(&["version"]).contains("serving"));
}

#[test]
fn a_block_is_put_looked_at_and_deleted() {
    let node = Served::start("");
    let bytes: Vec<u8> = KEY.bytes().cycle().take(70_000).collect();
    let (file, back) = (node.path("block.bin"), node.path("back.bin"));
    fs::write(&file, &bytes).unwrap();
    let (file, back) = (file.display().to_string(), back.display().to_string());
    assert!(node.said(&["put", KEY, &file]).contains("stored"));
    assert_eq!(node.json(&["put", KEY, &file])["outcome"], "present");
    fs::write(node.path("other.bin"), b"other bytes").unwrap();
    let other = node.path("other.bin").display().to_string();
    let conflict = node.run(&["put", KEY, &other, "--json"]);
    let answer: Value = serde_json::from_slice(&conflict.stdout).unwrap();
    assert_eq!((conflict.status.code(), &answer["outcome"]), (Some(1), &"conflict".into()));

    let seen = node.json(&["get", KEY]);
    assert_eq!((&seen["bytes"], &seen["tier"]), (&70_000.into(), &"dram".into()));
    let said = node.said(&["get", &KEY[..16], "--output", &back]);
    assert!(said.contains("70000 bytes") && said.contains(seen["sha256"].as_str().unwrap()));
    assert_eq!(fs::read(&back).unwrap(), bytes);
    assert_eq!(node.run(&["get", KEY, "--output", "-"]).stdout, bytes);
    assert_eq!(node.run(&["get", ABSENT]).status.code(), Some(1));

    let deleted = node.said(&["delete", KEY, ABSENT]);
    assert!(deleted.contains(&format!("{KEY} deleted")), "{deleted}");
    assert!(deleted.contains(&format!("{ABSENT} was not here")), "{deleted}");
    assert_eq!(node.run(&["get", KEY]).status.code(), Some(1));
}

/// Pages show 16 digits of a key, and `explain` took 64 only.
#[test]
fn the_digits_that_pages_show_stand_for_the_block() {
    let node = Served::start("");
    fs::write(node.path("block"), b"some bytes").unwrap();
    let file = node.path("block").display().to_string();
    node.said(&["put", KEY, &file]);
    let story = node.json(&["explain", &KEY[..16]]);
    assert_eq!((&story["leading"], &story["blocks"][0]["key"]), (&1.into(), &KEY.into()));
    assert_eq!(node.json(&["explain", &KEY[..9].to_uppercase()])["leading"], 1);
    node.said(&["put", OTHER, &file]);
    let said = node.refused(1, &["explain", &KEY[..16]]);
    assert!(said.contains(KEY) && said.contains(OTHER), "{said}");
    assert!(node.refused(1, &["explain", &ABSENT[..16]]).contains("all 64 digits"));
    assert!(node.refused(2, &["explain", "4bf5"]).contains("first 8"));
    assert!(node.refused(2, &["explain", "no key at all"]).contains("64 hexadecimal"));
    assert!(node.refused(2, &["get", &KEY[..16]]).contains(OTHER));
}

#[test]
fn clearing_names_what_goes_and_asks_first() {
    let node = Served::start("[[tenant]]\nname = \"alice\"\nusers = [4000000001]\n");
    fs::write(node.path("block"), b"some bytes").unwrap();
    node.said(&["put", KEY, &node.path("block").display().to_string()]);
    let said = node.refused(2, &["clear"]);
    assert!(said.contains("\"default\"") && said.contains("in dram"), "{said}");
    assert!(said.contains("--yes"), "{said}");
    assert_eq!(node.json(&["clear", "--yes", "--tenant", "alice"])["blocks"], 0);
    node.said(&["get", KEY]);
    assert!(node.said(&["clear", "--yes"]).contains("removed 1 blocks"));
    assert_eq!(node.run(&["get", KEY]).status.code(), Some(1));
}

#[test]
fn an_unknown_tenant_is_called_unknown() {
    let node = Served::start("[[tenant]]\nname = \"alice\"\nusers = [4000000001]\n");
    for args in [
        &["tenant", "forget", "bob", "--yes"][..],
        &["clear", "--tenant", "bob", "--yes"],
        &["clear", "--tenant", "bob"],
        &["flush", "--tenant", "bob"],
        &["delete", "--tenant", "bob", KEY],
    ] {
        let said = node.refused(1, args);
        assert!(said.contains("no tenant \"bob\""), "{args:?}: {said}");
        assert!(said.contains("default, alice"), "{args:?}: {said}");
        assert!(!said.contains("cannot read") && !said.contains("--timeout"), "{args:?}: {said}");
    }
}

#[test]
fn a_drained_node_takes_nothing_new_and_may_be_stopped() {
    let mut node = Served::start("files = \"HERE/files\"\nfiles_capacity = \"64MiB\"\n");
    fs::write(node.path("block"), b"some bytes").unwrap();
    let file = node.path("block").display().to_string();
    node.said(&["put", KEY, &file]);
    assert!(node.said(&["flush"]).contains("everything is written"));
    let drained = node.json(&["drain"]);
    assert_eq!((&drained["state"], &drained["is_written"]), (&"draining".into(), &true.into()));
    assert_eq!(drained["tenants"][0]["pending_bytes"], 0);
    let said = node.refused(1, &["put", OTHER, &file]);
    assert!(said.contains("draining"), "{said}");
    assert_eq!(node.json(&["status"])["node"]["state"], "draining");
    node.said(&["drain", "--cancel"]);
    node.said(&["put", OTHER, &file]);
    let said = node.said(&["drain", "--exit", "--timeout", "60"]);
    assert!(said.contains("has ended"), "{said}");
    assert_eq!(node.child.wait().unwrap().code(), Some(0), "{}", node.log());
}

#[test]
fn settings_are_shown_and_changed_without_a_restart() {
    let node = Served::start("connections_max = 100\n");
    let said = node.said(&["config", "get", "connections_max"]);
    assert!(said.contains("connections_max = 100") && said.contains("cascade.toml:3"), "{said}");
    let all = node.json(&["config", "get"]);
    assert!(all.as_array().unwrap().len() > 20, "{all}");

    node.said(&["ping"]);
    assert!(!node.log().contains("DEBUG"), "{}", node.log());
    let said = node.said(&["config", "set", "log_filter", "cascade_node=trace"]);
    assert!(said.contains("was info"), "{said}");
    node.said(&["config", "set", "log_filter", "warn"]);
    let lines = node.log().lines().count();
    // Each of these orders is logged at info.
    node.said(&["clear", "--yes"]);
    assert_eq!(node.log().lines().count(), lines, "{}", node.log());
    node.said(&["config", "set", "log_filter", "info"]);
    node.said(&["clear", "--yes"]);
    assert!(node.log().contains("cleared by order"), "{}", node.log());

    for (args, hints) in [
        (&["log_filter", "=="][..], &["log_filter"][..]),
        (&["connections_max", "many"], &["connections_max", "whole number"]),
        (&["dram", "1GiB"], &["needs a restart", "log_filter"]),
        (&["conectoins_max", "5"], &["no setting", "connections_max"]),
    ] {
        let said = node.refused(1, &[&["config", "set"], args].concat());
        for hint in hints {
            assert!(said.contains(hint), "{args:?} should name {hint:?}: {said}");
        }
    }
    let said = node.refused(1, &["config", "get", "drma"]);
    assert!(said.contains("dram"), "{said}");
}

#[test]
fn a_reload_tells_what_changed_and_what_needs_a_restart() {
    let node = Served::start("connections_max = 100\n");
    assert_eq!(node.said(&["reload"]).trim(), "nothing changed");
    let file = node.path("cascade.toml");
    let text = fs::read_to_string(&file).unwrap();
    fs::write(&file, text.replace("100", "200").replace("16MiB", "32MiB")).unwrap();
    let reloaded = node.json(&["reload"]);
    assert_eq!(reloaded["changed"], serde_json::json!(["connections_max"]));
    assert_eq!(reloaded["needs_restart"], serde_json::json!(["dram"]));
    let again = node.json(&["reload"]);
    assert_eq!(again["changed"], serde_json::json!([]), "it is in force already");
    assert_eq!(again["needs_restart"], serde_json::json!(["dram"]), "it still waits");
    fs::write(&file, text.replace("connections", "conectoins")).unwrap();
    let said = node.refused(1, &["reload"]);
    assert!(said.contains("connections_max"), "{said}");
    assert!(node.said(&["config", "get", "connections_max"]).contains("= 200"));
}

/// The command, where a user without rights here can run it.
fn copy_for_others(directory: &TempDir) -> PathBuf {
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let copy = directory.path().join("cascade");
    fs::copy(env!("CARGO_BIN_EXE_cascade"), &copy).unwrap();
    copy
}

/// `sudo cascade status` was refused by a node that runs as another user.
#[test]
fn root_and_a_group_administer_a_node_of_another_user() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let programs = TempDir::new().unwrap();
    let program = copy_for_others(&programs);
    let mut command = Command::new(&program);
    // Its group is the one that administers, so it may give the socket to it.
    command.uid(USER).gid(GROUP);
    let node =
        Served::start_as(&format!("admin_group = \"{GROUP}\"\n"), &mut command, |directory| {
            let user = Some(USER);
            std::os::unix::fs::chown(directory.path(), user, Some(GROUP)).unwrap();
            fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
        });
    assert!(node.said(&["status"]).contains("serving"));
    assert_eq!(node.json(&["version"])["node"]["is_administrator"], true);
    node.said(&["config", "set", "log_filter", "debug"]);
    // Its blocks stay its users': root may look after the node, and is no tenant of it.
    fs::write(node.path("block"), b"some bytes").unwrap();
    let said = node.refused(1, &["put", KEY, &node.path("block").display().to_string()]);
    assert!(said.contains("no tenant") && said.contains("--token-file"), "{said}");
    let as_user = |user: u32, group: u32, args: &[&str]| {
        node.with(Command::new(&program).uid(user).gid(group), args)
    };
    let output = as_user(MEMBER, GROUP, &["status"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let output = as_user(STRANGER, STRANGER, &["status"]);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    // The node refuses a user that the file permissions admit.
    for path in ["run", "run/cascade.sock"] {
        fs::set_permissions(node.path(path), fs::Permissions::from_mode(0o777)).unwrap();
    }
    let output = as_user(STRANGER, STRANGER, &["status"]);
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("admin_group") && said.contains("sudo"), "{said}");
}

/// Commands that ask a node, with arguments that are right.
const ASKING: &[&[&str]] = &[
    &["ping"],
    &["status"],
    &["top", "--once"],
    &["explain", KEY],
    &["get", KEY],
    &["put", KEY, "/etc/hostname"],
    &["delete", KEY],
    &["flush"],
    &["clear", "--yes"],
    &["drain"],
    &["reload"],
    &["config", "get"],
    &["config", "set", "log_filter", "info"],
    &["tenant", "forget", "default", "--yes"],
];

#[test]
fn every_command_ends_with_an_error_where_no_node_answers() {
    let directory = TempDir::new().unwrap();
    let [missing, file, dead] = ["missing", "file", "dead"].map(|name| directory.path().join(name));
    fs::write(&file, "no socket").unwrap();
    drop(UnixListener::bind(&dead).unwrap());
    for socket in [missing, file, dead] {
        for args in ASKING {
            let output = cascade().args(*args).arg("--socket").arg(&socket).output().unwrap();
            let said = stderr(&output);
            assert_eq!(output.status.code(), Some(1), "{args:?}: {said}");
            assert!(said.contains(&socket.display().to_string()), "{args:?}: {said}");
            assert!(said.contains("cascade serve"), "{args:?}: {said}");
            assert!(!said.contains("cannot read"), "{args:?}: {said}");
        }
        let output = cascade().arg("version").arg("--socket").arg(&socket).output().unwrap();
        assert_eq!(output.status.code(), Some(0));
        assert!(String::from_utf8(output.stdout).unwrap().contains("none: "));
    }
}

#[test]
fn every_command_ends_with_an_error_where_the_node_is_stopped() {
    let node = Served::start("");
    kill_process(node.process(), Signal::STOP).unwrap();
    for args in ASKING {
        let output = node.run(&[*args, &["--timeout", "0.3"]].concat());
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{args:?}: {said}");
        assert!(said.contains("is it stopped?"), "{args:?}: {said}");
    }
    kill_process(node.process(), Signal::CONT).unwrap();
    node.said(&["ping", "--timeout", "60"]);
}

/// The README's own command had a file tier of 4 GiB, and nothing said so.
#[test]
fn a_size_that_nobody_chose_is_said_at_start_and_by_the_doctor() {
    let node = Served::start("files = \"HERE/files\"\n");
    // On a disk it is a share, in memory or in a container's layer at most 4 GiB.
    let is_reason = |text: &str| text.contains("80 % of") || text.contains("no disk's file system");
    let log = node.log();
    assert!(log.contains("files_capacity is not set") && is_reason(&log), "{log}");
    let shown = node.json(&["config", "get", "files_capacity"]);
    assert!(is_reason(shown[0]["source"].as_str().unwrap()), "{shown}");
    let status = node.json(&["status"]);
    let tiers = status["tenants"][0]["tiers"].as_array().unwrap();
    let files = tiers.iter().find(|tier| tier["name"] == "files").unwrap();
    assert!(files["capacity_bytes"].as_u64().unwrap() >= 64 << 20, "{files}");
    let elsewhere = node.path("elsewhere").display().to_string();
    let output = cascade().args(["doctor", "--json", "--files", &elsewhere]).output().unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let checks = report["checks"].as_array().unwrap();
    let check = checks.iter().find(|check| check["id"] == "files_space").unwrap();
    let found = check["found"].as_str().unwrap();
    assert!(found.contains("by default") && is_reason(found), "{found}");
}
