//! What the kernel tells of a process: processor time, memory, wake-ups and descriptors.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::cli::Failure;

/// A process at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ProcessFacts {
    /// Processor time of all its threads so far.
    pub(super) processor: Duration,
    /// Resident memory that is its own: without shared memory.
    pub(super) own_bytes: u64,
    /// How often its threads were put on or off a processor.
    pub(super) switches: u64,
    /// Open files and sockets.
    pub(super) descriptors: u64,
}

impl ProcessFacts {
    /// Asks the kernel.
    pub(super) fn of(process: u32) -> Result<Self, Failure> {
        let home = PathBuf::from(format!("/proc/{process}"));
        let text = |name: &str| read(&home.join(name));
        let status = text("status")?;
        let strange = |what: &str| Failure::measure(what, "the kernel tells it in another way");
        let kib = |field| field_of(&status, field).ok_or_else(|| strange(field));
        let descriptors = entries(&home.join("fd"))?.len() as u64;
        let mut switches = 0;
        for task in entries(&home.join("task"))? {
            // A thread may end meanwhile.
            let status = fs::read_to_string(task.join("status")).unwrap_or_default();
            let counts = ["voluntary_ctxt_switches:", "nonvoluntary_ctxt_switches:"];
            switches += counts.iter().filter_map(|field| field_of(&status, field)).sum::<u64>();
        }
        Ok(Self {
            processor: processor_time(&text("stat")?).ok_or_else(|| strange("stat"))?,
            own_bytes: kib("VmRSS:")?.saturating_sub(kib("RssShmem:")?) * 1024,
            switches,
            descriptors,
        })
    }
}

/// Memory that the kernel itself takes and cannot give back, in bytes.
pub(super) fn kernel_bytes() -> Result<u64, Failure> {
    let text = read(Path::new("/proc/meminfo"))?;
    let field = |name| field_of(&text, name).unwrap_or(0) * 1024;
    Ok(field("SUnreclaim:") + field("KernelStack:") + field("PageTables:"))
}

/// This very command, for a child process. The program may be Python: then the command's script
/// stands before its arguments, and the name it was called by has to stay, because that is how an
/// interpreter knows its environment (its file is a link to one that does not).
pub(super) fn this_command() -> Result<Command, Failure> {
    let mut before = std::env::args_os().take_while(|argument| argument != "bench");
    let program = before.next().ok_or_else(|| {
        Failure::usage("this program has no name", "run it as `cascade bench node`")
    })?;
    let mut command = Command::new(program);
    command.args(before);
    Ok(command)
}

/// A thousand clients are thousands of descriptors; children inherit the limit.
pub(super) fn raise_descriptors() -> Result<(), Failure> {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current == maximum {
        return Ok(());
    }
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })
        .map_err(|error| Failure::measure("thousands of clients", error))
}

/// Keeps both sides of a socket on a processor each while this lives, the same for every pair of
/// processes that is compared: waking a neighbour costs several times what waking on the same
/// processor costs, and the scheduler decides anew in every run.
#[derive(Debug)]
pub(super) struct Placement {
    whole: CpuSet,
    here: CpuSet,
    there: CpuSet,
}

impl Placement {
    /// Nothing on a machine with one processor.
    pub(super) fn apart() -> Result<Self, Failure> {
        let whole = sched_getaffinity(None).map_err(misplaced)?;
        let mut allowed = (0..CpuSet::MAX_CPU).filter(|at| whole.is_set(*at));
        let first = allowed.next().unwrap_or(0);
        let second = allowed.next().unwrap_or(first);
        let only = |processor| {
            let mut set = CpuSet::new();
            set.set(processor);
            set
        };
        let placement = Self { whole, here: only(first), there: only(second) };
        go_to(&placement.here)?;
        Ok(placement)
    }

    /// Starts something on the other processor: children stay where they were started.
    pub(super) fn elsewhere<T>(
        &self,
        start: impl FnOnce() -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        go_to(&self.there)?;
        let started = start();
        go_to(&self.here)?;
        started
    }
}

impl Drop for Placement {
    fn drop(&mut self) {
        // It was allowed before.
        drop(go_to(&self.whole));
    }
}

fn go_to(processors: &CpuSet) -> Result<(), Failure> {
    sched_setaffinity(None, processors).map_err(misplaced)
}

fn misplaced(error: rustix::io::Errno) -> Failure {
    Failure::measure("processes on processors of their own", error)
}

fn read(path: &Path) -> Result<String, Failure> {
    fs::read_to_string(path).map_err(|e| Failure::measure(path.display().to_string(), e))
}

fn entries(path: &Path) -> Result<Vec<PathBuf>, Failure> {
    let listed = fs::read_dir(path).map_err(|e| Failure::measure(path.display().to_string(), e))?;
    Ok(listed.flatten().map(|entry| entry.path()).collect())
}

fn field_of(text: &str, field: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(field))?;
    line.split_whitespace().next()?.parse().ok()
}

/// User and system time of `/proc/PID/stat`. The name in it may hold anything.
fn processor_time(stat: &str) -> Option<Duration> {
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
    fn processor_time_is_read_behind_any_name() {
        let tail = "S 1 1 1 0 -1 4194560 1 2 3 4 70 30 0 0 20 0 5 0 100 1 1";
        let hundred =
            Duration::from_nanos(100 * 1_000_000_000 / rustix::param::clock_ticks_per_second());
        assert_eq!(processor_time(&format!("7 (cascade) {tail}")), Some(hundred));
        assert_eq!(processor_time(&format!("7 (a) b) (c) {tail}")), Some(hundred));
        assert_eq!(processor_time("7 (cascade) S 1"), None);
    }

    #[test]
    fn this_process_is_described() {
        let facts = ProcessFacts::of(std::process::id()).unwrap();
        assert!(facts.own_bytes > 0 && facts.descriptors > 2, "{facts:?}");
        assert!(kernel_bytes().unwrap() > 0);
    }

    #[test]
    fn a_placement_ends_where_it_began() {
        let before = sched_getaffinity(None).unwrap();
        let placement = Placement::apart().unwrap();
        let there = placement.elsewhere(|| Ok(sched_getaffinity(None).unwrap())).unwrap();
        assert_eq!((there.count(), sched_getaffinity(None).unwrap().count()), (1, 1));
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
