//! The doctor reports each fault of a machine with its remedy.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]
#![expect(clippy::print_stderr, reason = "prints why a test was skipped")]

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use cascade_memory::{MemoryError, PageReport, PageSource};
use cascade_node::NodeConfig;
use cascade_node::config::{self, ConfigSources, Environment};
use cascade_node::doctor::{
    CheckState, DiskSpace, FileSystem, Machine, ProbeFile, Report, ThisMachine, check_ids, examine,
};
use cascade_node::socket_place::{SocketPathState, SocketPlaceError};
use cascade_store::{FilesConfig, IoEngine, LeftoverPool, Store, StoreConfig};
use tempfile::TempDir;

const GIB: u64 = 1 << 30;
const LIMIT: Duration = Duration::from_secs(30);

/// Two concurrent checks used the same file name: 4 of 32 starts reported `direct_io` with "File
/// exists" on a healthy machine.
#[test]
fn concurrent_checks_can_probe_one_directory() {
    let directory = TempDir::new().unwrap();
    std::thread::scope(|scope| {
        for _ in 0..16 {
            scope.spawn(|| {
                for _ in 0..50 {
                    ThisMachine.try_file(directory.path()).unwrap();
                }
            });
        }
    });
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0, "probe files are removed");
}

/// A simulated machine: healthy, except for what a test changes.
#[derive(Debug)]
struct FakeMachine {
    texts: BTreeMap<String, String>,
    lists: BTreeMap<String, Vec<String>>,
    pool: DiskSpace,
    files: DiskSpace,
    direct_refusal: Option<io::ErrorKind>,
    huge_bytes: usize,
    ring: Result<bool, io::ErrorKind>,
    unix_seconds: u64,
    left_pools: Vec<LeftoverPool>,
    /// `try_ring` blocks until the sender is dropped.
    hangs_until: Option<Mutex<mpsc::Receiver<()>>>,
}

impl FakeMachine {
    fn healthy() -> Self {
        let texts = [
            ("/proc/sys/kernel/osrelease", "6.12.5-generic\n"),
            ("/proc/meminfo", "MemTotal: 67108864 kB\nMemAvailable:   33554432 kB\n"),
            ("/proc/self/status", "Name:\tcascade\nCapEff:\t0000000000000000\n"),
            (
                "/proc/self/limits",
                "Limit                     Soft Limit           Hard Limit           Units\n\
                 Max open files            65536                65536                files\n\
                 Max locked memory         unlimited            unlimited            bytes\n",
            ),
            ("/sys/devices/system/clocksource/clocksource0/current_clocksource", "tsc\n"),
            ("/proc/driver/nvidia/version", "NVRM version: 570.1\nGCC version: 12\n"),
            ("/sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE\n"),
        ];
        let lists = [
            ("/sys/class/infiniband", "mlx5_0"),
            ("/sys/class/infiniband/mlx5_0/ports", "1"),
            ("/dev/infiniband", "uverbs0"),
            ("/usr/lib64", "libcuda.so.1"),
        ];
        let space =
            |file_system| DiskSpace { file_system, free_bytes: 20 * GIB, total_bytes: 32 * GIB };
        Self {
            texts: texts.map(|(path, text)| (path.to_owned(), text.to_owned())).into(),
            lists: lists.map(|(path, name)| (path.to_owned(), vec![name.to_owned()])).into(),
            pool: space(FileSystem::TMPFS),
            files: space(FileSystem(0xef53)),
            direct_refusal: None,
            huge_bytes: 4 << 20,
            ring: Ok(true),
            unix_seconds: 1_800_000_000,
            left_pools: Vec::new(),
            hangs_until: None,
        }
    }

    fn text(&mut self, path: &str, text: &str) {
        self.texts.insert(path.to_owned(), text.to_owned());
    }
}

impl Machine for FakeMachine {
    fn read(&self, path: &str) -> io::Result<String> {
        self.texts.get(path).cloned().ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn list(&self, path: &str) -> io::Result<Vec<String>> {
        self.lists.get(path).cloned().ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn space(&self, directory: &Path) -> io::Result<DiskSpace> {
        Ok(if directory == Path::new("/dev/shm") { self.pool } else { self.files })
    }

    fn used_bytes(&self, _: &Path, _: &str) -> io::Result<u64> {
        Ok(0)
    }

    fn try_file(&self, _: &Path) -> io::Result<ProbeFile> {
        Ok(ProbeFile { direct_refusal: self.direct_refusal.map(Into::into) })
    }

    fn may_write(&self, _: &Path) -> io::Result<()> {
        Ok(())
    }

    fn socket(&self, path: &Path) -> Result<SocketPathState, SocketPlaceError> {
        ThisMachine.socket(path)
    }

    fn try_listen(&self, address: SocketAddr) -> io::Result<()> {
        ThisMachine.try_listen(address)
    }

    fn try_huge_pages(&self) -> Result<PageReport, MemoryError> {
        let source = PageSource::Collapsed;
        let refusal = (self.huge_bytes == 0).then(|| io::ErrorKind::InvalidInput.into());
        Ok(PageReport { source, huge_bytes: self.huge_bytes, refusal })
    }

    fn try_ring(&self) -> io::Result<bool> {
        if let Some(end) = &self.hangs_until {
            assert!(end.lock().unwrap().recv().is_err(), "nothing is sent");
        }
        self.ring.map_err(Into::into)
    }

    fn left_pools(&self, _: &Path) -> io::Result<Vec<LeftoverPool>> {
        Ok(self.left_pools.clone())
    }

    fn unix_seconds(&self) -> u64 {
        self.unix_seconds
    }
}

/// A node with 8 GiB of DRAM and 16 GiB of files, with all its files in one directory.
fn node(directory: &Path) -> NodeConfig {
    let mut config = NodeConfig::new(directory.join("cascade.sock"));
    config.listen = Some("127.0.0.1:0".parse().unwrap());
    config.pool_directory = Some("/dev/shm".into());
    config.store.dram_bytes = 8 * GIB;
    "Dram|Files".clone_into(&mut config.store.pipeline);
    let mut files = FilesConfig::new(directory.join("files"));
    files.capacity_bytes = 16 * GIB;
    config.store.files = Some(files);
    config
}

fn diagnose(config: NodeConfig, machine: impl Machine + 'static) -> Report {
    let machine: Arc<dyn Machine> = Arc::new(machine);
    examine(Ok(config), &machine, LIMIT)
}

/// Asserts that the report has exactly this warning or failure.
#[track_caller]
fn assert_reported(report: &Report, id: &str, state: CheckState, found: &str, remedy: &str) {
    let is_problem = |state| matches!(state, CheckState::Warning | CheckState::Failed);
    let problems: Vec<_> = report.checks.iter().filter(|check| is_problem(check.state)).collect();
    let [check] = &problems[..] else { panic!("expected one problem, {id}: {problems:#?}") };
    assert_eq!((check.id.as_str(), check.state), (id, state), "{check:?}");
    assert!(check.found.contains(found), "{found}: {check:?}");
    assert!(check.remedy.as_ref().unwrap().contains(remedy), "{remedy}: {check:?}");
    assert_eq!(report.is_ready, state != CheckState::Failed);
}

#[test]
fn a_healthy_machine_has_no_problem() {
    let directory = TempDir::new().unwrap();
    let report = diagnose(node(directory.path()), FakeMachine::healthy());
    let states: Vec<_> = report.checks.iter().map(|check| (&*check.id, check.state)).collect();
    for (id, state) in states {
        let expected = if id == "valkey" { CheckState::Absent } else { CheckState::Ok };
        assert_eq!(state, expected, "{id}: {:#?}", report.checks);
    }
    assert!(report.is_ready);
}

#[test]
fn checks_of_unconfigured_features_are_absent() {
    let directory = TempDir::new().unwrap();
    let mut config = NodeConfig::new(directory.path().join("cascade.sock"));
    config.store.huge_pages = false;
    let mut machine = FakeMachine::healthy();
    machine.lists.clear();
    machine.texts.remove("/proc/driver/nvidia/version");
    machine.direct_refusal = Some(io::ErrorKind::InvalidInput);
    machine.ring = Err(io::ErrorKind::PermissionDenied);
    machine.huge_bytes = 0;
    let report = diagnose(config, machine);
    let absent = report.checks.iter().filter(|check| check.state == CheckState::Absent).count();
    assert!(report.is_ready && absent == 13, "{absent}: {:#?}", report.checks);
}

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
        "remount,size=40896M",
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
        |machine| drop(machine.lists.remove("/usr/lib64")),
        "cuda",
        CheckState::Warning,
        "libcuda.so.1",
        "--gpus all",
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
fn a_configuration_that_does_not_fit_the_machine_is_reported() {
    let directory = TempDir::new().unwrap();
    let mut config = node(directory.path());
    config.store.files.as_mut().unwrap().engine = IoEngine::Uring;
    let mut machine = FakeMachine::healthy();
    machine.ring = Err(io::ErrorKind::PermissionDenied);
    let report = diagnose(config, machine);
    assert_reported(&report, "io_uring", CheckState::Failed, "io_engine is uring", "auto");
    let mut config = node(directory.path());
    config.listen = Some("0.0.0.0:0".parse().unwrap());
    let report = diagnose(config, FakeMachine::healthy());
    assert_reported(&report, "exposure", CheckState::Warning, "without TLS", "tls_certificate");
}

#[test]
fn a_refused_configuration_is_the_only_finding() {
    let file = TempDir::new().unwrap();
    let path = file.path().join("cascade.toml");
    fs::write(&path, "drma = \"1GiB\"\n").unwrap();
    let sources = ConfigSources { file: Some(path), flags: Vec::new() };
    let config = config::load(&sources, &Environment::new([("A", "")], 0));
    let machine: Arc<dyn Machine> = Arc::new(FakeMachine::healthy());
    let report = examine(config, &machine, LIMIT);
    assert_reported(&report, "configuration", CheckState::Failed, "dram", "correct");
    assert_eq!(report.checks.len(), 1);
}

#[test]
fn a_port_in_use_is_reported() {
    let directory = TempDir::new().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut config = node(directory.path());
    config.listen = Some(listener.local_addr().unwrap());
    let report = diagnose(config, FakeMachine::healthy());
    assert_reported(&report, "port", CheckState::Failed, "in use", "ss -ltnp");
}

#[test]
fn an_address_of_another_host_is_reported() {
    let directory = TempDir::new().unwrap();
    let mut config = node(directory.path());
    // An address of TEST-NET-1, which is reserved for documentation.
    config.listen = Some("192.0.2.1:9000".parse().unwrap());
    config.security.certificate = Some("/certificate".into());
    let report = diagnose(config, FakeMachine::healthy());
    assert_reported(&report, "port", CheckState::Failed, "192.0.2.1", "ip -brief address");
}

#[test]
fn served_sockets_stale_sockets_and_unsafe_directories_are_distinguished() {
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("cascade.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let report = diagnose(node(directory.path()), FakeMachine::healthy());
    assert_reported(&report, "socket", CheckState::Failed, "another process listens", "ss -xlp");
    drop(listener);
    let report = diagnose(node(directory.path()), FakeMachine::healthy());
    let socket = report.checks.iter().find(|check| check.id == "socket").unwrap();
    assert!(socket.state == CheckState::Ok && socket.found.contains("stale"), "{socket:?}");
    fs::remove_file(&path).unwrap();
    fs::write(&path, "").unwrap();
    let report = diagnose(node(directory.path()), FakeMachine::healthy());
    assert_reported(&report, "socket", CheckState::Failed, "no socket", "move");
    fs::remove_file(&path).unwrap();
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let report = diagnose(node(directory.path()), FakeMachine::healthy());
    assert_reported(&report, "socket", CheckState::Failed, "0777", "chmod go-w");
}

#[test]
fn a_file_in_place_of_the_directory_is_reported() {
    let directory = TempDir::new().unwrap();
    fs::write(directory.path().join("files"), "").unwrap();
    let report = diagnose(node(directory.path()), FakeMachine::healthy());
    assert_reported(&report, "files_directory", CheckState::Failed, "is not a directory", "files");
}

/// The result of one check on the machine that runs the test. Other checks differ by host.
fn result_of(report: &Report, id: &str) -> (CheckState, String, String) {
    let check = report.checks.iter().find(|check| check.id == id).unwrap();
    (check.state, check.found.clone(), check.remedy.clone().unwrap_or_default())
}

/// A tmpfs of 8 MiB, unmounted on drop. None if mounting is not permitted.
struct TinyFileSystem(TempDir);

impl TinyFileSystem {
    fn mount(options: &str) -> Option<Self> {
        let directory = TempDir::new().unwrap();
        let options = format!("size=8M,{options}");
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &options, "tmpfs"]).arg(directory.path());
        mount.output().is_ok_and(|out| out.status.success()).then_some(Self(directory))
    }

    fn path(&self) -> PathBuf {
        self.0.path().to_owned()
    }
}

impl Drop for TinyFileSystem {
    fn drop(&mut self) {
        let unmounted = Command::new("umount").arg("-l").arg(self.0.path()).status();
        assert!(unmounted.is_ok_and(|status| status.success()), "cannot unmount the test's tmpfs");
    }
}

#[test]
fn a_file_system_that_is_too_small_is_reported() {
    let Some(tiny) = TinyFileSystem::mount("mode=0700") else {
        eprintln!("skipped: this user may not mount a tmpfs");
        return;
    };
    let mut config = node(&tiny.path());
    config.pool_directory = Some(tiny.path());
    let report = diagnose(config, ThisMachine);
    let (state, found, remedy) = result_of(&report, "files_space");
    assert_eq!(state, CheckState::Failed);
    assert!(found.contains("8.0 MiB free") && remedy.contains("8MiB"), "{found}: {remedy}");
    let (state, found, remedy) = result_of(&report, "shared_memory");
    assert_eq!(state, CheckState::Failed);
    assert!(found.contains("8.0 MiB free") && remedy.contains("size=8192M"), "{found}: {remedy}");
    assert_eq!(result_of(&report, "file_system").0, CheckState::Warning);
    assert_eq!(result_of(&report, "files_directory").0, CheckState::Ok);
    assert_eq!(fs::read_dir(tiny.path()).unwrap().count(), 0, "probes are removed");
}

#[test]
fn a_read_only_file_system_is_reported() {
    let Some(tiny) = TinyFileSystem::mount("ro") else {
        eprintln!("skipped: this user may not mount a tmpfs");
        return;
    };
    let mut config = node(&tiny.path());
    config.pool_directory = Some(tiny.path());
    config.socket = tiny.path().join("run/cascade.sock");
    let report = diagnose(config, ThisMachine);
    for id in ["files_directory", "shared_memory", "socket"] {
        let (state, found, remedy) = result_of(&report, id);
        assert_eq!(state, CheckState::Failed, "{id}: {found}");
        assert!(found.contains("Read-only file system"), "{id}: {found}");
        assert!(!remedy.is_empty(), "{id}");
    }
}

#[test]
fn a_missing_pool_directory_is_reported() {
    let directory = TempDir::new().unwrap();
    let mut config = node(directory.path());
    config.pool_directory = Some(directory.path().join("shm"));
    let (state, _, remedy) = result_of(&diagnose(config, ThisMachine), "shared_memory");
    assert!(state == CheckState::Failed && remedy.contains("mount -t tmpfs"), "{remedy}");
}

#[test]
fn unused_pool_files_are_reported() {
    let directory = TempDir::new().unwrap();
    let path = Path::new("/dev/shm/cascade-7-ab-default.pool");
    for (has_blocks, found) in [(true, "with blocks"), (false, "of an interrupted start")] {
        let mut machine = FakeMachine::healthy();
        machine.left_pools =
            vec![LeftoverPool { path: path.to_owned(), bytes: 2 * GIB, has_blocks }];
        let report = diagnose(node(directory.path()), machine);
        assert_reported(&report, "left_pools", CheckState::Warning, found, "rm /dev/shm/");
    }
}

#[test]
fn the_pool_file_of_a_closed_store_is_reported() {
    let directory = TempDir::new().unwrap();
    let mut config = node(directory.path());
    config.pool_directory = Some(directory.path().to_owned());
    let user = fs::metadata(directory.path()).unwrap().uid();
    let path = directory.path().join(format!("cascade-{user}-abc-default.pool"));
    let (pool_file, keep_pool) = (Some(path), cascade_store::KeepPool::Always);
    let store = StoreConfig { dram_bytes: 4 << 20, pool_file, keep_pool, ..StoreConfig::default() };
    let store = Store::open(store).unwrap();
    let key = cascade_block::BlockKey::from_bytes([7; 32]);
    store.put(&[cascade_store::Put::new(key, &[7; 100])], cascade_store::CallOptions::default());
    let report = diagnose(config.clone(), ThisMachine);
    assert_eq!(result_of(&report, "left_pools").0, CheckState::Ok, "it is in use");
    store.close().unwrap();
    drop(store);
    let report = diagnose(config, ThisMachine);
    let (after, found, _) = result_of(&report, "left_pools");
    assert_eq!(after, CheckState::Warning);
    assert!(found.contains("abc-default.pool (6.2 MiB, with blocks)"), "{found}");
}

/// The existing files of a tier are part of its capacity, so their space counts as available.
#[test]
fn the_existing_files_of_a_tier_count_as_room() {
    let directory = TempDir::new().unwrap();
    fs::create_dir_all(directory.path().join("files/sub")).unwrap();
    fs::write(directory.path().join("files/sub/segment"), vec![7; 1 << 20]).unwrap();
    let used = ThisMachine.used_bytes(&directory.path().join("files"), "").unwrap();
    assert!((1 << 20..2 << 20).contains(&used), "{used}");
    assert_eq!(ThisMachine.used_bytes(directory.path(), "other").unwrap(), 0);
}

#[test]
fn a_check_that_hangs_fails_and_the_others_still_answer() {
    let directory = TempDir::new().unwrap();
    let (end, until) = mpsc::channel();
    let machine: Arc<dyn Machine> =
        Arc::new(FakeMachine { hangs_until: Some(Mutex::new(until)), ..FakeMachine::healthy() });
    let limit = Duration::from_secs(5);
    let report = examine(Ok(node(directory.path())), &machine, limit);
    assert_reported(&report, "io_uring", CheckState::Failed, "no answer within 5 s", "hangs");
    drop(end);
}

#[test]
fn every_check_is_documented() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/doctor.md");
    let page = fs::read_to_string(page).unwrap();
    for id in check_ids() {
        assert!(page.contains(&format!("| `{id}` |")), "docs/doctor.md lacks {id}");
    }
}
