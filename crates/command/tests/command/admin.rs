//! Commands for a running node: real nodes, real sockets, other users.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use cascade_runtime::{Deadline, SystemClock};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

use crate::{cascade, stderr};

/// Long enough for a busy machine; usually a node is ready within a second.
pub(crate) const READY_TIMEOUT: Duration = Duration::from_secs(120);
const KEY: &str = "4bf5122f344554c53bde2ebb8cd2b7e3d1600ad631c385a5d7cce23c7785459a";
const OTHER: &str = "4bf5122f344554c5ffffffff8cd2b7e3d1600ad631c385a5d7cce23c7785459a";
const ABSENT: &str = "dddddddd344554c5ffffffff8cd2b7e3d1600ad631c385a5d7cce23c7785459a";

/// Ids of users and a group that do not exist.
const USER: u32 = 4_000_011;
const GROUP: u32 = 4_000_012;
const MEMBER: u32 = 4_000_013;
const OTHER_USER: u32 = 4_000_014;

/// A node process that serves in a temporary directory.
pub(crate) struct ServedNode {
    directory: TempDir,
    pub(crate) child: Child,
}

impl Drop for ServedNode {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Waits for the line with `ready`. A thread keeps reading, so that the node never blocks on a full
/// pipe.
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
    is_ready.recv_timeout(READY_TIMEOUT).expect("the node is ready in time");
}

impl ServedNode {
    pub(crate) fn start(toml: &str) -> Self {
        Self::start_as(toml, &mut cascade(), |_| ())
    }

    pub(crate) fn start_as(
        toml: &str,
        command: &mut Command,
        prepare: impl FnOnce(&TempDir),
    ) -> Self {
        let directory = TempDir::new().unwrap();
        let here = directory.path().display().to_string();
        let base = "dram = \"16MiB\"\nkeep_pool = \"never\"\n";
        fs::write(
            directory.path().join("cascade.toml"),
            base.to_owned() + &toml.replace("HERE", &here),
        )
        .unwrap();
        prepare(&directory);
        let child = Self::serve(command, &directory);
        Self { directory, child }
    }

    fn serve(command: &mut Command, directory: &TempDir) -> Child {
        let log = fs::File::create(directory.path().join("log")).unwrap();
        command.arg("serve").arg("--config").arg(directory.path().join("cascade.toml"));
        command.arg("--socket").arg(directory.path().join("run/cascade.sock"));
        command.stdout(Stdio::piped()).stderr(log);
        let mut child = command.spawn().unwrap();
        await_ready(&mut child);
        child
    }

    /// Stops the node cleanly, and starts it again with its configuration file.
    pub(crate) fn restart(&mut self) {
        kill_process(self.process(), Signal::TERM).unwrap();
        assert!(self.child.wait().unwrap().success());
        self.child = Self::serve(&mut cascade(), &self.directory);
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

    /// The output of a command that succeeds.
    pub(crate) fn output(&self, args: &[&str]) -> String {
        let output = self.run(args);
        assert_eq!(output.status.code(), Some(0), "{args:?}: {}", stderr(&output));
        String::from_utf8(output.stdout).unwrap()
    }

    pub(crate) fn json(&self, args: &[&str]) -> Value {
        serde_json::from_str(&self.output(&[args, &["--json"]].concat())).unwrap()
    }

    /// The error message of a command that fails with this exit code.
    pub(crate) fn refused(&self, code: i32, args: &[&str]) -> String {
        let output = self.run(args);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {}", stderr(&output));
        stderr(&output)
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.path("log")).unwrap()
    }

    /// Stops all threads of the node: one that has not received the signal yet would still answer.
    fn suspend(&self) {
        kill_process(self.process(), Signal::STOP).unwrap();
        let is_stopped = |thread: fs::DirEntry| {
            let stat = fs::read_to_string(thread.path().join("stat"));
            // A thread that has ended meanwhile counts as stopped.
            stat.map_or(true, |stat| stat.rsplit(") ").next().unwrap().starts_with('T'))
        };
        let threads = format!("/proc/{}/task", self.process().as_raw_nonzero());
        let limit = Deadline::after(&SystemClock, READY_TIMEOUT);
        while !fs::read_dir(&threads).unwrap().all(|thread| is_stopped(thread.unwrap())) {
            assert!(!limit.has_passed(&SystemClock), "waited in vain for all threads to stop");
            std::thread::yield_now();
        }
    }

    pub(crate) fn process(&self) -> Pid {
        Pid::from_child(&self.child)
    }
}

#[test]
fn ping_and_version_report_the_node() {
    let node = ServedNode::start("");
    let socket = node.path("run/cascade.sock").display().to_string();
    assert!(node.output(&["ping"]).contains(&socket));
    assert_eq!(node.output(&["ping", "--count", "3"]).lines().count(), 3);
    assert_eq!(node.json(&["ping", "--count", "2"])["times_us"].as_array().unwrap().len(), 2);
    let version = node.json(&["version"]);
    assert_eq!(version["version"], version["node"]["version"]);
    assert_eq!(version["node"]["pid"], node.child.id());
    assert_eq!(version["node"]["is_administrator"], true);
    assert!(node.output(&["version"]).contains("serving"));
}

#[test]
fn a_block_is_put_shown_and_deleted() {
    let node = ServedNode::start("");
    let bytes: Vec<u8> = KEY.bytes().cycle().take(70_000).collect();
    let (file, back) = (node.path("block.bin"), node.path("back.bin"));
    fs::write(&file, &bytes).unwrap();
    let (file, back) = (file.display().to_string(), back.display().to_string());
    assert!(node.output(&["put", KEY, &file]).contains("stored"));
    assert_eq!(node.json(&["put", KEY, &file])["outcome"], "present");
    fs::write(node.path("other.bin"), b"other bytes").unwrap();
    let other = node.path("other.bin").display().to_string();
    let conflict = node.run(&["put", KEY, &other, "--json"]);
    let answer: Value = serde_json::from_slice(&conflict.stdout).unwrap();
    assert_eq!((conflict.status.code(), &answer["outcome"]), (Some(1), &"conflict".into()));

    let shown = node.json(&["get", KEY]);
    assert_eq!((&shown["bytes"], &shown["tier"]), (&70_000.into(), &"dram".into()));
    let text = node.output(&["get", &KEY[..16], "--output", &back]);
    assert!(text.contains("70000 bytes") && text.contains(shown["sha256"].as_str().unwrap()));
    assert_eq!(fs::read(&back).unwrap(), bytes);
    assert_eq!(node.run(&["get", KEY, "--output", "-"]).stdout, bytes);
    assert_eq!(node.run(&["get", ABSENT]).status.code(), Some(1));

    let deleted = node.output(&["delete", KEY, ABSENT]);
    assert!(deleted.contains(&format!("{KEY} deleted")), "{deleted}");
    assert!(deleted.contains(&format!("{ABSENT} was not stored")), "{deleted}");
    assert_eq!(node.run(&["get", KEY]).status.code(), Some(1));
}

/// Status pages show 16 digits of a key, but `explain` accepted only all 64.
#[test]
fn the_first_digits_of_a_key_select_its_block() {
    let node = ServedNode::start("");
    fs::write(node.path("block"), b"some bytes").unwrap();
    let file = node.path("block").display().to_string();
    node.output(&["put", KEY, &file]);
    let explained = node.json(&["explain", &KEY[..16]]);
    assert_eq!((&explained["leading"], &explained["blocks"][0]["key"]), (&1.into(), &KEY.into()));
    assert_eq!(node.json(&["explain", &KEY[..9].to_uppercase()])["leading"], 1);
    node.output(&["put", OTHER, &file]);
    let message = node.refused(1, &["explain", &KEY[..16]]);
    assert!(message.contains(KEY) && message.contains(OTHER), "{message}");
    assert!(node.refused(1, &["explain", &ABSENT[..16]]).contains("all 64 digits"));
    assert!(node.refused(2, &["explain", "4bf5"]).contains("first 8"));
    assert!(node.refused(2, &["explain", "no key at all"]).contains("64 hexadecimal"));
    assert!(node.refused(2, &["get", &KEY[..16]]).contains(OTHER));
}

#[test]
fn clear_shows_what_it_removes_and_requires_confirmation() {
    let node = ServedNode::start("[[tenant]]\nname = \"alice\"\nusers = [4000000001]\n");
    fs::write(node.path("block"), b"some bytes").unwrap();
    node.output(&["put", KEY, &node.path("block").display().to_string()]);
    let message = node.refused(2, &["clear"]);
    assert!(message.contains("\"default\"") && message.contains("in dram"), "{message}");
    assert!(message.contains("--yes"), "{message}");
    assert_eq!(node.json(&["clear", "--yes", "--tenant", "alice"])["blocks"], 0);
    node.output(&["get", KEY]);
    assert!(node.output(&["clear", "--yes"]).contains("removed 1 blocks"));
    assert_eq!(node.run(&["get", KEY]).status.code(), Some(1));
}

/// `--json` had no effect: the receipt was always JSON.
#[test]
fn the_receipt_of_a_forgotten_tenant_is_text_unless_json_is_requested() {
    let node = ServedNode::start("files = \"HERE/files\"\nfiles_capacity = \"64MiB\"\n");
    fs::write(node.path("block"), b"some bytes").unwrap();
    let file = node.path("block").display().to_string();
    node.output(&["put", KEY, &file]);
    node.output(&["flush"]);
    let text = node.output(&["tenant", "forget", "default", "--yes"]);
    for part in ["dram     1 blocks (10 B)", "files    1 blocks (10 B)", "default: nothing remains"]
    {
        assert!(text.contains(part), "{part:?} is not in: {text}");
    }
    let receipt = node.json(&["tenant", "forget", "default", "--yes"]);
    assert_eq!((&receipt["is_complete"], &receipt["tenant"]), (&true.into(), &"default".into()));
}

/// The example of the help named a section that does not exist.
#[test]
fn config_get_prints_a_setting_and_a_section() {
    let node = ServedNode::start("");
    let text = node.output(&["config", "get", "log_filter", "advanced"]);
    assert!(text.contains("log_filter = ") && text.contains("huge_pages = "), "{text}");
    assert!(!text.contains("connections_max"), "{text}");
}

#[test]
fn an_unknown_tenant_is_refused_with_the_known_names() {
    let node = ServedNode::start("[[tenant]]\nname = \"alice\"\nusers = [4000000001]\n");
    for args in [
        &["tenant", "forget", "bob", "--yes"][..],
        &["clear", "--tenant", "bob", "--yes"],
        &["clear", "--tenant", "bob"],
        &["flush", "--tenant", "bob"],
        &["delete", "--tenant", "bob", KEY],
    ] {
        let message = node.refused(1, args);
        assert!(message.contains("no tenant \"bob\""), "{args:?}: {message}");
        assert!(message.contains("default, alice"), "{args:?}: {message}");
        assert!(
            !message.contains("cannot read") && !message.contains("--timeout"),
            "{args:?}: {message}"
        );
    }
}

#[test]
fn a_drained_node_refuses_puts_and_can_be_stopped() {
    let mut node = ServedNode::start("files = \"HERE/files\"\nfiles_capacity = \"64MiB\"\n");
    fs::write(node.path("block"), b"some bytes").unwrap();
    let file = node.path("block").display().to_string();
    node.output(&["put", KEY, &file]);
    assert!(node.output(&["flush"]).contains("all blocks are written"));
    let drained = node.json(&["drain"]);
    assert_eq!((&drained["state"], &drained["is_written"]), (&"draining".into(), &true.into()));
    assert_eq!(drained["tenants"][0]["pending_bytes"], 0);
    let message = node.refused(1, &["put", OTHER, &file]);
    assert!(message.contains("draining"), "{message}");
    assert_eq!(node.json(&["status"])["node"]["state"], "draining");
    node.output(&["drain", "--cancel"]);
    node.output(&["put", OTHER, &file]);
    let message = node.output(&["drain", "--exit", "--timeout", "60"]);
    assert!(message.contains("has ended"), "{message}");
    assert_eq!(node.child.wait().unwrap().code(), Some(0), "{}", node.log());
}

/// What happened: a node without a file tier said that it could be stopped without data loss.
#[test]
fn blocks_that_no_tier_keeps_are_named_before_a_stop() {
    let node = ServedNode::start("");
    fs::write(node.path("block"), b"some bytes").unwrap();
    node.output(&["put", KEY, &node.path("block").display().to_string()]);
    let message = node.output(&["flush"]);
    assert!(message.contains("1 blocks are only in memory"), "{message}");
    assert_eq!(node.json(&["drain"])["tenants"][0]["unkept_blocks"], 1);
    let message = node.output(&["drain"]);
    assert!(message.contains("1 blocks are lost when it is stopped"), "{message}");
    assert!(!message.contains("without data loss"), "{message}");
}

#[test]
fn settings_are_printed_and_changed_without_a_restart() {
    let node = ServedNode::start("connections_max = 100\n");
    let message = node.output(&["config", "get", "connections_max"]);
    assert!(
        message.contains("connections_max = 100") && message.contains("cascade.toml:3"),
        "{message}"
    );
    let all = node.json(&["config", "get"]);
    assert!(all.as_array().unwrap().len() > 20, "{all}");

    node.output(&["ping"]);
    assert!(!node.log().contains("DEBUG"), "{}", node.log());
    let message = node.output(&["config", "set", "log_filter", "cascade_node=trace"]);
    assert!(message.contains("was info"), "{message}");
    node.output(&["config", "set", "log_filter", "warn"]);
    let lines = node.log().lines().count();
    // Each clear is logged at info.
    node.output(&["clear", "--yes"]);
    assert_eq!(node.log().lines().count(), lines, "{}", node.log());
    node.output(&["config", "set", "log_filter", "info"]);
    node.output(&["clear", "--yes"]);
    assert!(node.log().contains("cleared on request"), "{}", node.log());

    for (args, hints) in [
        (&["log_filter", "=="][..], &["log_filter"][..]),
        (&["connections_max", "many"], &["connections_max", "whole number"]),
        (&["policy", "lru"], &["needs a restart", "log_filter"]),
        (&["dram", "1GiB"], &["at most 16MiB", "restart the node"]),
        (&["conectoins_max", "5"], &["no setting", "connections_max"]),
    ] {
        let message = node.refused(1, &[&["config", "set"], args].concat());
        for hint in hints {
            assert!(message.contains(hint), "{args:?} should name {hint:?}: {message}");
        }
    }
    let message = node.refused(1, &["config", "get", "drma"]);
    assert!(message.contains("dram"), "{message}");
}

#[test]
fn a_reload_reports_changed_settings_and_those_that_need_a_restart() {
    let node = ServedNode::start("connections_max = 100\n");
    assert_eq!(node.output(&["reload"]).trim(), "nothing changed");
    let file = node.path("cascade.toml");
    let text = fs::read_to_string(&file).unwrap();
    fs::write(&file, text.replace("100", "200").replace("16MiB", "32MiB")).unwrap();
    let reloaded = node.json(&["reload"]);
    assert_eq!(reloaded["changed"], serde_json::json!(["connections_max"]));
    assert_eq!(reloaded["needs_restart"], serde_json::json!(["dram"]));
    let again = node.json(&["reload"]);
    assert_eq!(again["changed"], serde_json::json!([]), "the change is already in effect");
    assert_eq!(again["needs_restart"], serde_json::json!(["dram"]), "the restart is still due");
    fs::write(&file, text.replace("connections", "conectoins")).unwrap();
    let message = node.refused(1, &["reload"]);
    assert!(message.contains("connections_max"), "{message}");
    assert!(node.output(&["config", "get", "connections_max"]).contains("= 200"));
}

/// A copy of the command that any user can run.
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
    // The node's group is `admin_group`, so it is allowed to give the socket to this group.
    command.uid(USER).gid(GROUP);
    let node =
        ServedNode::start_as(&format!("admin_group = \"{GROUP}\"\n"), &mut command, |directory| {
            let user = Some(USER);
            std::os::unix::fs::chown(directory.path(), user, Some(GROUP)).unwrap();
            fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
        });
    assert!(node.output(&["status"]).contains("serving"));
    assert_eq!(node.json(&["version"])["node"]["is_administrator"], true);
    node.output(&["config", "set", "log_filter", "debug"]);
    // Root may administer the node, but it belongs to no tenant and cannot access blocks.
    fs::write(node.path("block"), b"some bytes").unwrap();
    let message = node.refused(1, &["put", KEY, &node.path("block").display().to_string()]);
    assert!(message.contains("no tenant") && message.contains("--token-file"), "{message}");
    let as_user = |user: u32, group: u32, args: &[&str]| {
        node.with(Command::new(&program).uid(user).gid(group), args)
    };
    let output = as_user(MEMBER, GROUP, &["status"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let output = as_user(OTHER_USER, OTHER_USER, &["status"]);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    // The node refuses a user that the file permissions admit.
    for path in ["run", "run/cascade.sock"] {
        fs::set_permissions(node.path(path), fs::Permissions::from_mode(0o777)).unwrap();
    }
    let output = as_user(OTHER_USER, OTHER_USER, &["status"]);
    let message = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(message.contains("admin_group") && message.contains("sudo"), "{message}");
}

/// All commands that send requests to a node, with valid arguments.
const NODE_COMMANDS: &[&[&str]] = &[
    &["ping"],
    &["status"],
    &["top", "--once"],
    &["explain", KEY],
    &["keys"],
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
fn every_command_fails_if_no_node_answers() {
    let directory = TempDir::new().unwrap();
    let [missing, file, dead] = ["missing", "file", "dead"].map(|name| directory.path().join(name));
    fs::write(&file, "no socket").unwrap();
    drop(UnixListener::bind(&dead).unwrap());
    for socket in [missing, file, dead] {
        for args in NODE_COMMANDS {
            let output = cascade().args(*args).arg("--socket").arg(&socket).output().unwrap();
            let message = stderr(&output);
            assert_eq!(output.status.code(), Some(1), "{args:?}: {message}");
            assert!(message.contains(&socket.display().to_string()), "{args:?}: {message}");
            assert!(message.contains("cascade serve"), "{args:?}: {message}");
            assert!(!message.contains("cannot read"), "{args:?}: {message}");
        }
        let output = cascade().arg("version").arg("--socket").arg(&socket).output().unwrap();
        assert_eq!(output.status.code(), Some(0));
        assert!(String::from_utf8(output.stdout).unwrap().contains("none: "));
    }
}

#[test]
fn every_command_fails_if_the_node_is_stopped() {
    let node = ServedNode::start("");
    node.suspend();
    for args in NODE_COMMANDS {
        let output = node.run(&[*args, &["--timeout", "0.3"]].concat());
        let message = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{args:?}: {message}");
        assert!(message.contains("check whether it is stopped"), "{args:?}: {message}");
    }
    kill_process(node.process(), Signal::CONT).unwrap();
    node.output(&["ping", "--timeout", "60"]);
}

/// The command of the README had a file tier of 4 GiB, and no message reported it.
#[test]
fn the_default_capacity_of_the_file_tier_is_reported_at_start_and_by_the_doctor() {
    let node = ServedNode::start("files = \"HERE/files\"\n");
    // The default is 80 % of a disk, and at most 4 GiB on a tmpfs or a container layer.
    let is_reason = |text: &str| text.contains("80 % of") || text.contains("not on a disk");
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

/// The kernel sends SIGXFSZ for a file beyond the limit, which ends a process without a handler.
#[test]
fn a_limit_of_file_sizes_does_not_end_a_node() {
    // Less than a segment, in units of 512 or of 1,024 bytes.
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -f 65000; exec \"$0\" \"$@\""]).arg(env!("CARGO_BIN_EXE_cascade"));
    // Segments of 64 MiB.
    let settings = "files = \"HERE/files\"\nfiles_capacity = \"1GiB\"\n";
    let node = ServedNode::start_as(settings, &mut limited, |_| ());
    fs::write(node.path("block"), [7; 4096]).unwrap();
    let file = node.path("block").display().to_string();
    node.output(&["put", KEY, &file]);
    assert_eq!(node.run(&["flush"]).status.code(), Some(1), "no segment can be created");
    assert!(node.output(&["explain", KEY]).contains("dram"), "the node serves on");
}
