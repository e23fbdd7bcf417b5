//! Why RDMA cannot be used, and why a request failed.

use std::fmt;
use std::io;

use thiserror::Error;

/// Why there is no device to use. An ordinary state of a host, not a fault.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Unavailable {
    /// The library cannot be loaded.
    #[error(
        "cannot load {library}: {reason}; install rdma-core (Debian: libibverbs1 and \
         ibverbs-providers)"
    )]
    NoLibrary {
        /// What was loaded.
        library: String,
        /// The loader's reason.
        reason: String,
    },
    /// The library lacks a function.
    #[error("{library} has no {function}; update rdma-core")]
    MissingFunction {
        /// What was loaded.
        library: String,
        /// The function.
        function: String,
    },
    /// The kernel shows no device.
    #[error(
        "no RDMA device; check `rdma link`, the modules of the kernel, and that the container has \
         /dev/infiniband"
    )]
    NoDevice,
    /// A device that the settings name is absent.
    #[error("there is no RDMA device {name}; there are: {}", list(.present))]
    NoSuchDevice {
        /// Its name.
        name: String,
        /// The devices.
        present: Vec<String>,
    },
    /// No port of the device can be used.
    #[error("no port of {device} is active; check the cable and `rdma link`")]
    NoPort {
        /// The device.
        device: String,
    },
    /// The port has no address that a peer can use.
    #[error(
        "port {port} of {device} has no usable GID; give its network interface an IPv4 address, \
         or set gid_index to one of its GIDs"
    )]
    NoGid {
        /// The device.
        device: String,
        /// The port.
        port: u8,
    },
}

fn list(names: &[String]) -> String {
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

/// Why a call failed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum VerbsError {
    /// RDMA cannot be used on this machine.
    #[error(transparent)]
    Unavailable(#[from] Unavailable),
    /// A call of the library failed.
    #[error("{call} failed: {}{}", io::Error::from_raw_os_error(*.code), hint(call, *.code))]
    Call {
        /// The call.
        call: &'static str,
        /// Its error number.
        code: i32,
    },
    /// A work request failed, and with it the link.
    #[error("an RDMA request failed: {status} (vendor error {vendor})")]
    Request {
        /// What the device says.
        status: Status,
        /// The number of the device's vendor for it.
        vendor: u32,
    },
    /// A place reaches beyond the end of its memory.
    #[error("{bytes} bytes at offset {offset} reach beyond the end of {total} bytes")]
    OutOfBounds {
        /// Start of the place.
        offset: u64,
        /// Its length.
        bytes: u64,
        /// Length of the memory.
        total: u64,
    },
    /// The memory was not registered for this.
    #[error("the memory of the peer was not registered for a {0}")]
    NotAllowed(&'static str),
    /// Bytes of a peer are not a valid address or description.
    #[error("the peer sent an invalid {what}: {reason}")]
    Invalid {
        /// What the bytes should be.
        what: &'static str,
        /// What is wrong.
        reason: &'static str,
    },
    /// A setting is out of range.
    #[error("{setting} is {value}, allowed are {least} to {most}")]
    Setting {
        /// The setting.
        setting: &'static str,
        /// Its value.
        value: usize,
        /// The least value.
        least: usize,
        /// The largest value.
        most: usize,
    },
    /// The deadline passed.
    #[error("{what} took longer than its deadline")]
    Deadline {
        /// What was waited for.
        what: &'static str,
    },
    /// This process closed the link.
    #[error("the link was closed")]
    Closed,
}

/// What to do about a call's error, where it has a usual cause.
fn hint(call: &str, code: i32) -> &'static str {
    let registers = call.starts_with("ibv_reg");
    match code {
        libc::ENOMEM if registers => "; raise the limit of locked memory (ulimit -l)",
        libc::EACCES | libc::EPERM => "; the user needs access to /dev/infiniband",
        _ => "",
    }
}

/// What a device says of a request that failed: `enum ibv_wc_status`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Status(pub i32);

impl Status {
    /// A request that was not tried, because an earlier one of its queue pair failed.
    pub const FLUSHED: Self = Self(5);
    /// The peer's device refused the address or the key.
    pub const REMOTE_ACCESS: Self = Self(10);
    /// The peer did not answer.
    pub const RETRIES_EXHAUSTED: Self = Self(12);
}

/// Names and causes by status. The first is success.
const STATUSES: [&str; 24] = [
    "success",
    "local length error: the piece is longer than the device allows",
    "local queue pair error: the request does not fit the queue pair",
    "local end-to-end context error",
    "local protection error: the local memory is not registered for this",
    "flushed: an earlier request of the queue pair failed, or it was closed",
    "memory window error",
    "bad response of the peer",
    "local access error: the local memory is not registered for this",
    "invalid request: the peer's device does not take it",
    "remote access error: the peer's memory is not registered for this address, length or access",
    "remote operation error: the peer's device failed",
    "retries exhausted: the peer does not answer; it has ended, or the network is down",
    "retries exhausted: the peer was not ready to receive",
    "local reliable datagram domain error",
    "invalid read request: the peer's device does not take it",
    "aborted by the peer",
    "invalid end-to-end context number",
    "invalid end-to-end context state",
    "fatal error of the device",
    "response timeout: the peer does not answer",
    "general error of the device",
    "tag matching error",
    "tag matching is incomplete",
];

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known = usize::try_from(self.0).ok().and_then(|at| STATUSES.get(at));
        match known {
            Some(text) => f.write_str(text),
            None => write!(f, "unknown status {}", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_status_has_a_text_of_its_own() {
        let texts: std::collections::BTreeSet<String> =
            (-1..25).map(|status| Status(status).to_string()).collect();
        assert_eq!(texts.len(), 26);
        assert!(Status::REMOTE_ACCESS.to_string().starts_with("remote access error"));
        assert!(Status::RETRIES_EXHAUSTED.to_string().starts_with("retries exhausted"));
    }

    #[test]
    fn a_failed_registration_names_the_limit_of_locked_memory() {
        let error = VerbsError::Call { call: "ibv_reg_mr", code: libc::ENOMEM };
        assert!(error.to_string().contains("ulimit -l"), "{error}");
    }
}
