//! Statistics of a process from `/proc`, child processes of this command, and CPU affinity.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::MeasureError;

/// Statistics of a process at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ProcessStats {
    /// CPU time of all its threads so far.
    pub(super) cpu_time: Duration,
    /// Resident memory without shared memory.
    pub(super) own_bytes: u64,
    /// Context switches of all its threads so far.
    pub(super) switches: u64,
    /// Open file descriptors.
    pub(super) descriptors: u64,
}

impl ProcessStats {
    /// Reads `/proc`.
    pub(super) fn of(process: u32) -> Result<Self, MeasureError> {
        let home = PathBuf::from(format!("/proc/{process}"));
        let text = |name: &str| read(&home.join(name));
        let status = text("status")?;
        let unexpected = |what: &str| {
            MeasureError::measure(what, format!("/proc/{process} has it in an unexpected format"))
        };
        let kib = |field| field_of(&status, field).ok_or_else(|| unexpected(field));
        let descriptors = entries(&home.join("fd"))?.len() as u64;
        let mut switches = 0;
        for task in entries(&home.join("task"))? {
            // The thread may have ended since the directory was listed.
            let status = fs::read_to_string(task.join("status")).unwrap_or_default();
            let counts = ["voluntary_ctxt_switches:", "nonvoluntary_ctxt_switches:"];
            switches += counts.iter().filter_map(|field| field_of(&status, field)).sum::<u64>();
        }
        Ok(Self {
            cpu_time: cpu_time(&text("stat")?).ok_or_else(|| unexpected("stat"))?,
            own_bytes: kib("VmRSS:")?.saturating_sub(kib("RssShmem:")?) * 1024,
            switches,
            descriptors,
        })
    }
}

/// Memory of the kernel that it cannot reclaim, in bytes.
pub(super) fn kernel_bytes() -> Result<u64, MeasureError> {
    let text = read(Path::new("/proc/meminfo"))?;
    let field = |name| field_of(&text, name).unwrap_or(0) * 1024;
    Ok(field("SUnreclaim:") + field("KernelStack:") + field("PageTables:"))
}

/// This program, for a child process.
pub(super) fn this_command() -> Result<Command, MeasureError> {
    let program = std::env::current_exe();
    program.map(Command::new).map_err(|error| MeasureError::other("find this program", error))
}

/// Raises the limit of file descriptors, which child processes inherit: each client needs some.
pub(super) fn raise_descriptor_limit() -> Result<(), MeasureError> {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current == maximum {
        return Ok(());
    }
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })
        .map_err(|error| MeasureError::other("raise the limit of file descriptors", error))
}

/// Keeps the two sides of a socket on two fixed processors until it is dropped.
///
/// A wake-up on another processor costs several times one on the same processor, and otherwise the
/// scheduler would choose anew in every run. All compared pairs of processes use the same pair.
#[derive(Debug)]
pub(super) struct Placement {
    before: CpuSet,
    here: CpuSet,
    other: CpuSet,
}

impl Placement {
    /// Moves this thread to the first allowed processor. On a machine with one processor, both
    /// sides use it.
    pub(super) fn on_two_processors() -> Result<Self, MeasureError> {
        let before = sched_getaffinity(None).map_err(affinity_failure)?;
        let mut allowed = (0..CpuSet::MAX_CPU).filter(|at| before.is_set(*at));
        let first = allowed.next().unwrap_or(0);
        let second = allowed.next().unwrap_or(first);
        let only = |processor| {
            let mut set = CpuSet::new();
            set.set(processor);
            set
        };
        let placement = Self { before, here: only(first), other: only(second) };
        set_affinity(&placement.here)?;
        Ok(placement)
    }

    /// Starts a process on the other processor. It stays there, because it inherits the affinity.
    pub(super) fn on_the_other<T>(
        &self,
        start: impl FnOnce() -> Result<T, MeasureError>,
    ) -> Result<T, MeasureError> {
        set_affinity(&self.other)?;
        let started = start();
        set_affinity(&self.here)?;
        started
    }
}

impl Drop for Placement {
    fn drop(&mut self) {
        // This affinity was valid before, so it is valid now.
        drop(set_affinity(&self.before));
    }
}

fn set_affinity(processors: &CpuSet) -> Result<(), MeasureError> {
    sched_setaffinity(None, processors).map_err(affinity_failure)
}

fn affinity_failure(error: rustix::io::Errno) -> MeasureError {
    MeasureError::other("bind processes to processors", error)
}

fn read(path: &Path) -> Result<String, MeasureError> {
    fs::read_to_string(path).map_err(|e| MeasureError::measure(path.display().to_string(), e))
}

fn entries(path: &Path) -> Result<Vec<PathBuf>, MeasureError> {
    let listed =
        fs::read_dir(path).map_err(|e| MeasureError::measure(path.display().to_string(), e))?;
    Ok(listed.flatten().map(|entry| entry.path()).collect())
}

fn field_of(text: &str, field: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(field))?;
    line.split_whitespace().next()?.parse().ok()
}

/// User and system time of `/proc/PID/stat`. The process name in it may contain any characters, so
/// the fields are counted from its closing parenthesis, the last one of the line.
fn cpu_time(stat: &str) -> Option<Duration> {
    let (_, fields) = stat.rsplit_once(") ")?;
    let mut fields = fields.split(' ').skip(11);
    let ticks: u64 = fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?;
    let tick_ns = 1_000_000_000 / rustix::param::clock_ticks_per_second().max(1);
    Some(Duration::from_nanos(ticks * tick_ns))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_is_read_after_any_process_name() {
        let tail = "S 1 1 1 0 -1 4194560 1 2 3 4 70 30 0 0 20 0 5 0 100 1 1";
        let hundred_ticks =
            Duration::from_nanos(100 * 1_000_000_000 / rustix::param::clock_ticks_per_second());
        assert_eq!(cpu_time(&format!("7 (cascade) {tail}")), Some(hundred_ticks));
        assert_eq!(cpu_time(&format!("7 (a) b) (c) {tail}")), Some(hundred_ticks));
        assert_eq!(cpu_time("7 (cascade) S 1"), None);
    }

    #[test]
    fn the_statistics_of_this_process_are_read() {
        let stats = ProcessStats::of(std::process::id()).unwrap();
        assert!(stats.own_bytes > 0 && stats.descriptors > 2, "{stats:?}");
        assert!(kernel_bytes().unwrap() > 0);
    }

    #[test]
    fn a_dropped_placement_restores_the_affinity() {
        let before = sched_getaffinity(None).unwrap();
        let placement = Placement::on_two_processors().unwrap();
        let other = placement.on_the_other(|| Ok(sched_getaffinity(None).unwrap())).unwrap();
        assert_eq!((other.count(), sched_getaffinity(None).unwrap().count()), (1, 1));
        drop(placement);
        assert_eq!(sched_getaffinity(None).unwrap(), before);
    }

    #[test]
    fn fields_are_found_by_their_whole_name() {
        let text = "nonvoluntary_ctxt_switches:\t9\nvoluntary_ctxt_switches:\t3\n";
        assert_eq!(field_of(text, "voluntary_ctxt_switches:"), Some(3));
        assert_eq!(field_of(text, "VmRSS:"), None);
    }
}
