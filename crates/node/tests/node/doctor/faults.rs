//! Each fault of a machine is reported with its remedy.

use std::io;

use cascade_node::doctor::{CheckState, FileSystem};
use tempfile::TempDir;

use super::fake_machine::FakeMachine;
use super::{GIB, assert_reported, diagnose, node, result_of};

/// A change of a healthy machine, and the problem that it causes: id, state, text, remedy.
type Fault = (fn(&mut FakeMachine), &'static str, CheckState, &'static str, &'static str);

const FAULTS: &[Fault] = &[
    (
        |machine| machine.text("/proc/sys/kernel/osrelease", "5.10.0-8-amd64\n"),
        "kernel",
        CheckState::Failed,
        "5.10.0",
        "6.1",
    ),
    (
        |machine| machine.text("/proc/sys/kernel/osrelease", "5.15.0\n"),
        "kernel",
        CheckState::Warning,
        "5.15.0",
        "6.1",
    ),
    (
        |machine| machine.text("/proc/meminfo", "MemAvailable:    1048576 kB\n"),
        "memory",
        CheckState::Failed,
        "1.0 GiB available",
        "--dram",
    ),
    (
        |machine| {
            machine.text("/sys/fs/cgroup/memory.max", "4294967296\n");
            machine.text("/sys/fs/cgroup/memory.current", "1073741824\n");
        },
        "memory",
        CheckState::Failed,
        "3.0 GiB available",
        "--dram",
    ),
    (
        |machine| {
            let limits = machine.texts["/proc/self/limits"].replace("unlimited", "8388608  ");
            machine.text("/proc/self/limits", &limits);
        },
        "memlock",
        CheckState::Warning,
        "8.0 MiB",
        "ulimit -l unlimited",
    ),
    (|machine| machine.huge_bytes = 0, "huge_pages", CheckState::Warning, "none", "nr_hugepages"),
    (
        |machine| machine.pool.free_bytes = 64 << 20,
        "shared_memory",
        CheckState::Failed,
        "64.0 MiB free",
        "remount,size=41073M",
    ),
    (
        |machine| machine.pool.file_system = FileSystem(0xef53),
        "shared_memory",
        CheckState::Warning,
        "ext4",
        "/dev/shm",
    ),
    (
        |machine| machine.files.free_bytes = GIB,
        "files_space",
        CheckState::Failed,
        "1.0 GiB free",
        "1024MiB",
    ),
    (
        |machine| machine.files.file_system = FileSystem::TMPFS,
        "file_system",
        CheckState::Warning,
        "tmpfs",
        "files",
    ),
    (
        |machine| machine.files.file_system = FileSystem::OVERLAY,
        "file_system",
        CheckState::Warning,
        "container",
        "docker run -v",
    ),
    (
        |machine| machine.files.file_system = FileSystem::NFS,
        "file_system",
        CheckState::Warning,
        "nfs",
        "local disk",
    ),
    (
        |machine| machine.direct_refusal = Some(io::ErrorKind::InvalidInput),
        "direct_io",
        CheckState::Warning,
        "refuses O_DIRECT",
        "ext4",
    ),
    (
        |machine| machine.ring = Err(io::ErrorKind::PermissionDenied),
        "io_uring",
        CheckState::Warning,
        "psync is used",
        "kernel.io_uring_disabled=0",
    ),
    (
        |machine| machine.ring = Err(io::ErrorKind::OutOfMemory),
        "io_uring",
        CheckState::Warning,
        "the limit of locked memory is too low for io_uring",
        "LimitMEMLOCK=infinity",
    ),
    (|machine| machine.ring = Ok(false), "io_uring", CheckState::Warning, "registered", "memlock"),
    (
        |machine| {
            let limits = machine.texts["/proc/self/limits"].replace("65536", "1024 ");
            machine.text("/proc/self/limits", &limits);
        },
        "open_files",
        CheckState::Failed,
        "1024",
        "ulimit -n",
    ),
    (|machine| machine.unix_seconds = 86_400, "clock", CheckState::Failed, "86400", "timedatectl"),
    (
        |machine| {
            let path = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
            machine.text(path, "hpet\n");
        },
        "clock",
        CheckState::Warning,
        "hpet",
        "available_clocksource",
    ),
    (
        |machine| machine.text("/sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN\n"),
        "rdma",
        CheckState::Warning,
        "no port is active",
        "rdma link",
    ),
    (
        |machine| drop(machine.lists.remove("/dev/infiniband")),
        "rdma",
        CheckState::Warning,
        "uverbs",
        "modprobe ib_uverbs",
    ),
    (
        |machine| {
            let text = "cannot load libibverbs.so.1: not found; install rdma-core";
            machine.verbs = Err(text.to_owned());
        },
        "rdma",
        CheckState::Warning,
        "mlx5_0: cannot load libibverbs.so.1",
        "install rdma-core",
    ),
];

#[test]
fn each_fault_is_reported_with_its_remedy() {
    let directory = TempDir::new().unwrap();
    for (inject, id, state, found, remedy) in FAULTS {
        let mut machine = FakeMachine::healthy();
        inject(&mut machine);
        let report = diagnose(node(directory.path()), machine);
        assert_reported(&report, id, *state, found, remedy);
    }
}

#[test]
fn the_check_of_rdma_names_all_devices_and_the_limit_of_locked_memory() {
    let directory = TempDir::new().unwrap();
    let mut machine = FakeMachine::healthy();
    machine.lists.get_mut("/sys/class/infiniband").unwrap().push("mlx5_1".to_owned());
    let limits = machine.texts["/proc/self/limits"].replace("unlimited", "8388608  ");
    machine.text("/proc/self/limits", &limits);
    let report = diagnose(node(directory.path()), machine);
    let (state, found, _) = result_of(&report, "rdma");
    assert_eq!(state, CheckState::Ok);
    let expected = "mlx5_0; without an active port: mlx5_1; at most 8.0 MiB can be registered";
    assert_eq!(found, expected);
}
