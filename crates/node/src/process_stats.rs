//! Statistics of this process from `/proc`: threads, CPU time, memory, file descriptors.

use std::fs;

use rustix::param::{clock_ticks_per_second, page_size};
use rustix::process::{Resource, getrlimit};

/// Statistics of this process; all zero without `/proc`.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct ProcessStats {
    pub(crate) threads: u64,
    pub(crate) cpu_s: f64,
    pub(crate) memory_bytes: u64,
    pub(crate) virtual_memory_bytes: u64,
    pub(crate) open_files: u64,
    pub(crate) open_files_max: u64,
    pub(crate) started_unix_s: f64,
}

impl ProcessStats {
    pub(crate) fn now() -> Self {
        let Ok(stat) = fs::read_to_string("/proc/self/stat") else { return Self::default() };
        let mut process = parse_stat(&stat);
        process.open_files = fs::read_dir("/proc/self/fd").map_or(0, |open| open.count() as u64);
        process.open_files_max = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        process.started_unix_s += boot_unix_s();
        process
    }
}

/// The boot time in seconds since 1970.
fn boot_unix_s() -> f64 {
    let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
    let boot = stat.lines().find_map(|line| line.strip_prefix("btime "));
    boot.and_then(|seconds| seconds.trim().parse().ok()).unwrap_or(0.0)
}

/// Parses `/proc/<pid>/stat`. The process name in it may contain spaces and parentheses, so the
/// fields are counted from the last closing parenthesis.
#[expect(clippy::cast_precision_loss, reason = "seconds for people")]
fn parse_stat(stat: &str) -> ProcessStats {
    let fields = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let fields: Vec<u64> =
        fields.split_whitespace().map(|field| field.parse().unwrap_or(0)).collect();
    // `proc_pid_stat(5)` numbers from 1, and the first field after the name is 3, the state. 14 and
    // 15 are user and system time, 20 the threads, 22 the start in ticks since boot, 23 the virtual
    // memory in bytes, 24 the resident pages.
    let field = |number: usize| fields.get(number - 3).copied().unwrap_or(0);
    ProcessStats {
        threads: field(20),
        cpu_s: (field(14) + field(15)) as f64 / clock_ticks_per_second() as f64,
        memory_bytes: field(24) * page_size() as u64,
        virtual_memory_bytes: field(23),
        started_unix_s: field(22) as f64 / clock_ticks_per_second() as f64,
        ..ProcessStats::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_name_with_parentheses_does_not_shift_the_fields() {
        let stat = "7 (a) b) S 1 7 7 0 -1 4194560 9 0 0 0 300 100 0 0 20 0 5 0 1 4096 3 0";
        let process = parse_stat(stat);
        assert_eq!(process.threads, 5);
        assert_eq!(process.memory_bytes, 3 * page_size() as u64);
        assert!(process.cpu_s > 0.0);
    }

    #[test]
    fn the_statistics_of_this_process_are_plausible() {
        let process = ProcessStats::now();
        assert!(process.threads >= 1 && process.memory_bytes > 0, "{process:?}");
        assert!(process.virtual_memory_bytes >= process.memory_bytes, "{process:?}");
        assert!((3..process.open_files_max).contains(&process.open_files), "{process:?}");
        // After 2020.
        assert!(process.started_unix_s > 1.577e9, "{process:?}");
    }
}
