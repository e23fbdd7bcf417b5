//! Processes, identified by number and start time.

use std::{fs, io};

/// A process that may hold memory of the pool. Numbers are reused; a start time makes them unique.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Process {
    /// Its number, as this process sees it.
    pub pid: u32,
    /// When it started, in clock ticks since boot (`/proc/<pid>/stat`, field 22).
    pub start_time: u64,
}

impl Process {
    /// The process that has this number now.
    ///
    /// # Errors
    /// There is none, or `/proc` cannot be read.
    pub fn of(pid: u32) -> io::Result<Self> {
        match start_time_of(pid)? {
            Some(start_time) => Ok(Self { pid, start_time }),
            None => Err(io::ErrorKind::NotFound.into()),
        }
    }

    /// Whether it may still access memory; true if the kernel does not say.
    pub fn is_alive(&self) -> bool {
        // Memory that is reused too early could be overwritten by its holder, so doubt means alive.
        start_time_of(self.pid).map_or(true, |found| found == Some(self.start_time))
    }
}

/// When the process of that number started. `None` if it does not exist, or is a zombie: the memory
/// of a zombie is already released.
fn start_time_of(pid: u32) -> io::Result<Option<u64>> {
    let text = match fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        // It ended during the read.
        Err(error) if error.raw_os_error() == Some(ESRCH) => return Ok(None),
        Err(error) => return Err(error),
    };
    let Some((start_time, has_memory)) = parse(&text) else {
        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
    };
    Ok(has_memory.then_some(start_time))
}

const ESRCH: i32 = 3;

/// The start time, and whether the process still has memory.
fn parse(stat: &str) -> Option<(u64, bool)> {
    // The name, field 2, may contain blanks and parentheses; the last parenthesis ends it.
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    let state = fields.next()?;
    // The state is field 3; 18 fields lie between it and field 22.
    let start_time = fields.nth(18)?.parse().ok()?;
    Some((start_time, !matches!(state, "Z" | "X")))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use cascade_runtime::{Deadline, SystemClock};

    use super::*;

    #[test]
    fn a_process_is_alive_until_it_ends_and_only_with_its_start_time() {
        let me = Process::of(std::process::id()).expect("this process is there");
        assert!(me.is_alive());
        assert!(!Process { start_time: me.start_time + 1, ..me }.is_alive());
        let mut child = std::process::Command::new("sleep").arg("60").spawn().expect("sleep");
        let it = Process::of(child.id()).expect("the child is there");
        assert!(it.is_alive());
        child.kill().expect("it is ours");
        // Until it is waited for it is a zombie: it has a number but no memory.
        let limit = Deadline::after(&SystemClock, Duration::from_secs(60));
        while it.is_alive() {
            assert!(!limit.has_passed(&SystemClock), "waited in vain for the end of the child");
            std::thread::yield_now();
        }
        child.wait().expect("it is ours");
        assert!(!it.is_alive());
    }

    #[test]
    fn a_process_name_is_not_parsed_as_other_fields() {
        let tail = "R 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 777 0 0";
        assert_eq!(parse(&format!("42 (a) Z 1) {tail}")), Some((777, true)));
        assert_eq!(parse("42 (cat)"), None);
    }
}
