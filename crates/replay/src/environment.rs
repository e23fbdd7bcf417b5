//! The environment of a measurement: processor, memory, kernel, disk, build and command line.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use cascade_block::ByteSize;
use cascade_runtime::{Clock, SystemClock};
use serde::Serialize;

/// The machine and the build, as far as they affect figures.
#[derive(Debug, Clone, Serialize)]
pub struct Environment {
    /// Model of the processor.
    pub cpu: String,
    /// Processors that this process may use.
    pub cpu_count: usize,
    /// Number of NUMA nodes.
    pub numa_nodes: usize,
    /// Frequency governor, if the kernel reports it.
    pub governor: Option<String>,
    /// Memory of the machine.
    pub memory_bytes: u64,
    /// Load averages over 1, 5 and 15 minutes at the start. A busy machine gives low figures.
    pub load_average: Option<String>,
    /// Settings of transparent huge pages by name.
    pub huge_pages: BTreeMap<String, String>,
    /// Operating system, kernel release and architecture.
    pub kernel: String,
    /// File system of the file tier.
    pub disk: Option<Mount>,
    /// Version of this program.
    pub version: String,
    /// How this program was built.
    #[serde(flatten)]
    pub build: Build,
    /// Says that the figures mean nothing, if the build was not optimised.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warning: Option<&'static str>,
    /// Start of the run, in milliseconds since 1970 UTC.
    pub started_unix_ms: u64,
    /// The command line, with the program's name instead of its path.
    pub argv: Vec<String>,
}

/// How a program was built.
#[derive(Debug, Clone, Serialize)]
pub struct Build {
    /// The commit, perhaps with ` with local changes`; `unknown` outside of `make`.
    pub commit: String,
    /// Cargo's profile, by its directory: `release`, `dist` or `debug`.
    pub profile: String,
    /// Cargo's optimisation level.
    pub opt_level: String,
    /// Debug assertions are on.
    pub has_debug_assertions: bool,
}

impl Build {
    /// Says that figures mean nothing, if the build was not optimised.
    pub fn warning(&self) -> Option<&'static str> {
        let is_slow = self.has_debug_assertions || matches!(&*self.opt_level, "0" | "1");
        is_slow.then_some("unoptimised build: the figures mean nothing")
    }
}

/// The file system of a directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Mount {
    /// Its mount point.
    pub mount_point: PathBuf,
    /// Its type, such as `ext4`.
    pub file_system: String,
    /// The device or export.
    pub source: String,
    /// Mount options.
    pub options: String,
}

impl Environment {
    /// Reads the environment. What the system does not report is `unknown` or left out.
    ///
    /// `build` is that of the program that measures.
    pub fn capture(build: Build, directory: Option<&Path>) -> Self {
        let uname = rustix::system::uname();
        let text = |part: &std::ffi::CStr| part.to_string_lossy().into_owned();
        Self {
            cpu: cpu_model(),
            cpu_count: std::thread::available_parallelism().map_or(1, usize::from),
            numa_nodes: numa_nodes(),
            governor: read_line("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
            memory_bytes: memory_bytes(),
            load_average: load_average(),
            huge_pages: huge_pages(),
            kernel: format!(
                "{} {} {}",
                text(uname.sysname()),
                text(uname.release()),
                text(uname.machine())
            ),
            disk: directory.and_then(mount_of),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            warning: build.warning(),
            build,
            started_unix_ms: SystemClock.unix_ms(),
            argv: argv(std::env::args_os()),
        }
    }

    /// The environment in one line, for a table header.
    pub fn headline(&self) -> String {
        let disk = self
            .disk
            .as_ref()
            .map_or(String::new(), |disk| format!(", {} on {}", disk.file_system, disk.source));
        format!(
            "{} x {}, load {}, {} memory, {}{disk}; cascade {} ({}, {}, opt-level {})",
            self.cpu_count,
            self.cpu,
            self.load_average.as_deref().and_then(|load| load.split(' ').next()).unwrap_or("?"),
            ByteSize(self.memory_bytes).rounded(),
            self.kernel,
            self.version,
            self.build.commit.get(..12).unwrap_or(&self.build.commit),
            self.build.profile,
            self.build.opt_level,
        )
    }
}

/// Resident memory of this process in bytes, shared mappings included.
pub fn resident_bytes() -> Option<u64> {
    status_kib("/proc/self/status", "VmRSS:")
}

/// The arguments with the program's name instead of its path, which depends on the machine.
fn argv(arguments: impl Iterator<Item = OsString>) -> Vec<String> {
    let mut shown: Vec<_> =
        arguments.map(|argument| argument.to_string_lossy().into_owned()).collect();
    if let Some(program) = shown.first_mut()
        && let Some(name) = Path::new(program).file_name()
    {
        *program = name.to_string_lossy().into_owned();
    }
    shown
}

/// The file system of a directory that exists or will be created.
fn mount_of(directory: &Path) -> Option<Mount> {
    let existing = directory.ancestors().find(|path| path.exists()).filter(|path| *path != "")?;
    let full = existing.canonicalize().ok()?;
    let table = fs::read_to_string("/proc/self/mountinfo").ok()?;
    let mounts = table.lines().filter_map(parse_mount);
    mounts
        .filter(|mount| full.starts_with(&mount.mount_point))
        .max_by_key(|mount| mount.mount_point.as_os_str().len())
}

/// A line of `mountinfo`: `36 35 98:0 /root /point rw,noatime master:1 - ext4 /dev/x rw`.
fn parse_mount(line: &str) -> Option<Mount> {
    let (mount, file_system) = line.split_once(" - ")?;
    let mut mount = mount.split(' ').skip(4);
    let mut file_system = file_system.split(' ');
    Some(Mount {
        mount_point: PathBuf::from(mount.next()?),
        options: mount.next()?.to_owned(),
        file_system: file_system.next()?.to_owned(),
        source: file_system.next()?.to_owned(),
    })
}

fn cpu_model() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info.lines().find_map(|line| line.strip_prefix("model name"));
    model.map_or("unknown", |line| line.trim_start_matches([' ', '\t', ':']).trim()).to_owned()
}

fn numa_nodes() -> usize {
    let nodes = fs::read_dir("/sys/devices/system/node").into_iter().flatten().flatten();
    let is_node =
        |name: &str| name.strip_prefix("node").is_some_and(|tail| tail.parse::<u32>().is_ok());
    nodes.filter(|entry| entry.file_name().to_str().is_some_and(is_node)).count().max(1)
}

fn memory_bytes() -> u64 {
    status_kib("/proc/meminfo", "MemTotal:").unwrap_or(0)
}

fn load_average() -> Option<String> {
    let line = read_line("/proc/loadavg")?;
    Some(line.split(' ').take(3).collect::<Vec<_>>().join(" "))
}

fn status_kib(path: &str, field: &str) -> Option<u64> {
    let text = fs::read_to_string(path).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(field))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
}

fn huge_pages() -> BTreeMap<String, String> {
    let settings = ["enabled", "shmem_enabled", "defrag"];
    let chosen = settings.iter().filter_map(|name| {
        let line = read_line(&format!("/sys/kernel/mm/transparent_hugepage/{name}"))?;
        let (_, rest) = line.split_once('[')?;
        Some(((*name).to_owned(), rest.split(']').next()?.to_owned()))
    });
    chosen.collect()
}

fn read_line(path: &str) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mountinfo_line_is_parsed() {
        let line = "36 35 98:0 /m /mnt/x rw,noatime master:1 - ext4 /dev/vda rw,discard";
        let mount = parse_mount(line).unwrap();
        assert_eq!(mount.mount_point, Path::new("/mnt/x"));
        assert_eq!(
            (mount.file_system.as_str(), mount.source.as_str(), mount.options.as_str()),
            ("ext4", "/dev/vda", "rw,noatime")
        );
        assert_eq!(parse_mount("nonsense"), None);
    }

    #[test]
    fn the_command_line_has_the_programs_name_without_its_path() {
        let given = ["/home/me/.venv/bin/python", ".venv/bin/cascade", "--json", "/tmp/a.json"];
        let shown = argv(given.map(OsString::from).into_iter());
        assert_eq!(shown, ["python", ".venv/bin/cascade", "--json", "/tmp/a.json"]);
    }

    #[test]
    fn the_environment_of_this_machine_is_captured() {
        let build = Build {
            commit: "0123456789abcdef".to_owned(),
            profile: "dist".to_owned(),
            opt_level: "1".to_owned(),
            has_debug_assertions: false,
        };
        let here = Environment::capture(build, Some(Path::new("no/such/directory")));
        assert!(here.headline().contains("(0123456789ab, dist, opt-level 1)"), "{here:?}");
        let json = serde_json::to_value(&here).unwrap();
        assert_eq!(json["profile"], "dist");
        assert_eq!(json["warning"], "unoptimised build: the figures mean nothing");
        let optimised = Build { opt_level: "3".to_owned(), ..here.build.clone() };
        assert_eq!(optimised.warning(), None);
        assert!(Build { has_debug_assertions: true, ..optimised }.warning().is_some());
        assert!(here.memory_bytes > 0 && here.cpu_count > 0);
        assert!(resident_bytes().is_some_and(|bytes| bytes > 1 << 20));
    }
}
