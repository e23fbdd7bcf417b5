//! How much memory can be allocated: what the machine has, and what the control groups of the
//! process (of a container, a systemd service, a batch job) still allow.

use std::fs;
use std::io;
use std::path::Path;

/// What [`available_bytes`] says of this machine.
pub(crate) fn available_here() -> Option<usize> {
    let bytes = available_bytes(&|path| fs::read_to_string(path))?;
    Some(usize::try_from(bytes).unwrap_or(usize::MAX))
}

/// Reads a text file of the system.
type Read<'a> = dyn Fn(&str) -> io::Result<String> + 'a;

/// The names of a control group's files.
struct Files {
    limits: &'static [&'static str],
    usage: &'static str,
    /// Fields of `memory.stat`: the pages of files, which the kernel frees when it needs memory.
    reclaimable: [&'static str; 2],
}

/// Version 2. Beyond `memory.high` a process is slowed down until it hardly runs.
const SECOND: Files = Files {
    limits: &["memory.max", "memory.high"],
    usage: "memory.current",
    reclaimable: ["inactive_file ", "active_file "],
};
const FIRST: Files = Files {
    limits: &["memory.limit_in_bytes"],
    usage: "memory.usage_in_bytes",
    reclaimable: ["total_inactive_file ", "total_active_file "],
};

/// Bytes that this process can allocate without running out of memory: the machine's available
/// memory, or less if a control group allows less. `None` if the machine's is unknown.
pub fn available_bytes(read: &Read<'_>) -> Option<u64> {
    let text = read("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib = line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?;
    let groups = groups(read).into_iter().filter_map(|(group, files)| left(&group, files, read));
    Some(groups.fold(kib.saturating_mul(1024), u64::min))
}

/// The directories of the control groups whose limits count: that of the process, and those above.
fn groups(read: &Read<'_>) -> Vec<(String, &'static Files)> {
    let mounts = read("/proc/self/mountinfo").unwrap_or_default();
    let of_process = read("/proc/self/cgroup").unwrap_or_else(|_| "0::/\n".to_owned());
    let mut found = vec![];
    for line in of_process.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else {
            continue;
        };
        let (files, default) = match controllers {
            "" => (&SECOND, "/sys/fs/cgroup"),
            _ if controllers.split(',').any(|it| it == "memory") => {
                (&FIRST, "/sys/fs/cgroup/memory")
            }
            _ => continue,
        };
        let mount = mounts.lines().find_map(|line| mount_of(line, controllers.is_empty()));
        let (root, point) = mount.unwrap_or(("/", default));
        // A container may see the path on its host, and only its own group at the mount.
        let below = Path::new(path).strip_prefix(root).unwrap_or(Path::new(""));
        for group in below.ancestors() {
            let separator = if group.as_os_str().is_empty() { "" } else { "/" };
            found.push((format!("{point}{separator}{}", group.display()), files));
        }
    }
    found
}

/// Root and mount point of a line of `mountinfo` that mounts the control groups with memory.
fn mount_of(line: &str, is_second: bool) -> Option<(&str, &str)> {
    let (mount, system) = line.split_once(" - ")?;
    let mut system = system.split(' ');
    let (kind, options) = (system.next()?, system.nth(1).unwrap_or(""));
    let is_ours = match kind {
        "cgroup2" => is_second,
        "cgroup" => !is_second && options.split(',').any(|option| option == "memory"),
        _ => false,
    };
    let mut fields = mount.split(' ').skip(3);
    let fields = (fields.next()?, fields.next()?);
    is_ours.then_some(fields)
}

/// Bytes that a group still allows; `None` without a limit.
fn left(group: &str, files: &Files, read: &Read<'_>) -> Option<u64> {
    let number = |name: &str| read(&format!("{group}/{name}")).ok()?.trim().parse::<u64>().ok();
    // The word "max" in it means no limit.
    let limit = files.limits.iter().filter_map(|name| number(name)).min()?;
    let stat = read(&format!("{group}/memory.stat")).unwrap_or_default();
    let of_line = |line: &str| {
        files.reclaimable.iter().find_map(|name| line.strip_prefix(name)?.trim().parse().ok())
    };
    let reclaimable: u64 = stat.lines().filter_map(of_line).fold(0, u64::saturating_add);
    let used = number(files.usage).unwrap_or(0).saturating_sub(reclaimable);
    Some(limit.saturating_sub(used))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    const GIB: u64 = 1 << 30;
    const MEMINFO: (&str, &str) = ("/proc/meminfo", "MemTotal: 9 kB\nMemAvailable: 16777216 kB\n");

    fn available(files: &[(&str, &str)]) -> Option<u64> {
        let files: BTreeMap<&str, &str> = files.iter().copied().collect();
        available_bytes(&|path| {
            let text = files.get(path).map(|text| (*text).to_owned());
            text.ok_or_else(|| io::ErrorKind::NotFound.into())
        })
    }

    #[test]
    fn the_machine_counts_where_there_is_no_limit() {
        assert_eq!(available(&[]), None);
        assert_eq!(available(&[MEMINFO]), Some(16 * GIB));
        let unlimited = ("/sys/fs/cgroup/memory.max", "max\n");
        assert_eq!(available(&[MEMINFO, unlimited]), Some(16 * GIB));
    }

    #[test]
    fn the_least_limit_above_the_process_counts_less_what_is_used() {
        let files = [
            MEMINFO,
            ("/proc/self/cgroup", "0::/system.slice/cascade.service\n"),
            ("/proc/self/mountinfo", "30 23 0:26 / /cg rw - cgroup2 cgroup2 rw\n"),
            ("/cg/system.slice/cascade.service/memory.max", "8589934592\n"),
            ("/cg/system.slice/cascade.service/memory.current", "1073741824\n"),
            ("/cg/system.slice/memory.max", "6442450944\n"),
            ("/cg/system.slice/memory.high", "max\n"),
            ("/cg/system.slice/memory.current", "3221225472\n"),
            (
                "/cg/system.slice/memory.stat",
                "anon 5\ninactive_file 536870912\nactive_file 536870912\n",
            ),
        ];
        // The slice may use 6 GiB. It uses 3 GiB; 1 GiB of these are pages of files.
        assert_eq!(available(&files), Some(4 * GIB));
        let high = ("/cg/system.slice/cascade.service/memory.high", "3221225472\n");
        assert_eq!(available(&[&files[..], &[high]].concat()), Some(2 * GIB));
    }

    #[test]
    fn version_1_is_read() {
        let files = [
            MEMINFO,
            ("/proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/jobs/7\n0::/\n"),
            (
                "/proc/self/mountinfo",
                "31 23 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
                 32 23 0:28 / /groups rw,nosuid - cgroup cgroup rw,memory,cpu\n",
            ),
            ("/groups/jobs/7/memory.limit_in_bytes", "4294967296\n"),
            ("/groups/jobs/7/memory.usage_in_bytes", "2147483648\n"),
            ("/groups/jobs/7/memory.stat", "cache 9\ntotal_inactive_file 1073741824\n"),
            ("/groups/memory.limit_in_bytes", "9223372036854771712\n"),
        ];
        assert_eq!(available(&files), Some(3 * GIB));
    }

    /// The container sees the path of its group on the host, and its group at the mount.
    #[test]
    fn the_group_of_a_container_is_found() {
        let files = [
            MEMINFO,
            ("/proc/self/cgroup", "4:memory:/docker/abc\n"),
            (
                "/proc/self/mountinfo",
                "32 23 0:28 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n",
            ),
            ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "2147483648\n"),
        ];
        assert_eq!(available(&files), Some(2 * GIB));
        let other = [files[0], ("/proc/self/cgroup", "4:memory:/elsewhere\n"), files[2], files[3]];
        assert_eq!(available(&other), Some(2 * GIB));
    }
}
