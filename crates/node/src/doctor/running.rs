//! The node that serves a socket now. Operators check a new configuration beside it, and stop it
//! before the new one starts.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use rustix::net::sockopt::socket_peercred;

use crate::socket_place;

/// The name of the program, as the kernel has it.
const PROGRAM: &str = "cascade";
/// State of a TCP socket that listens, in `/proc/net/tcp`.
const LISTENING: &str = "0A";

/// A node that runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunningNode {
    /// Its process.
    pub pid: u32,
    /// Memory that is free once it has ended.
    pub memory_bytes: u64,
    /// The TCP ports at which it listens.
    pub ports: BTreeSet<u16>,
}

/// The node that serves a socket; none if no process does, or another program.
pub(super) fn at(socket: &Path) -> Option<RunningNode> {
    let connected = socket_place::connected(socket).ok()?;
    let pid = u32::try_from(socket_peercred(&connected).ok()?.pid.as_raw_pid()).ok()?;
    let read = |name: &str| fs::read_to_string(format!("/proc/{pid}/{name}")).ok();
    if read("comm")?.trim() != PROGRAM {
        return None;
    }
    let status = read("status")?;
    let memory = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = memory.and_then(|text| text.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    let tables = ["net/tcp", "net/tcp6"].map(|name| read(name).unwrap_or_default());
    let sockets = sockets_of(pid);
    let ports = tables
        .iter()
        .flat_map(|table| listening(table))
        .filter(|(_, inode)| sockets.contains(inode));
    Some(RunningNode {
        pid,
        memory_bytes: kib.unwrap_or(0).saturating_mul(1024),
        ports: ports.map(|(port, _)| port).collect(),
    })
}

/// The inodes of a process's sockets.
fn sockets_of(pid: u32) -> BTreeSet<u64> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let links = entries.filter_map(|entry| fs::read_link(entry.path()).ok());
    let inode =
        |link: &Path| link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok();
    links.filter_map(|link| inode(&link)).collect()
}

/// Port and inode of each socket that listens.
fn listening(table: &str) -> impl Iterator<Item = (u16, u64)> {
    table.lines().skip(1).filter_map(|line| {
        let mut fields = line.split_whitespace().skip(1);
        let port = fields.next()?.rsplit(':').next()?;
        let state = fields.nth(1)?;
        let inode = fields.nth(5)?.parse().ok()?;
        (state == LISTENING).then_some((u16::from_str_radix(port, 16).ok()?, inode))
    })
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn the_ports_of_a_process_are_found() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let own = std::process::id();
        let table = fs::read_to_string(format!("/proc/{own}/net/tcp")).unwrap();
        let sockets = sockets_of(own);
        let found: Vec<_> =
            listening(&table).filter(|(_, inode)| sockets.contains(inode)).collect();
        assert!(found.iter().any(|(each, _)| *each == port), "{found:?}");
    }

    #[test]
    fn another_program_is_no_node() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        assert_eq!(at(&path), None);
        let _listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        assert_eq!(at(&path), None, "these tests are no node");
    }
}
