//! Checks of the network: descriptors for connections, the Unix socket and the TCP port.

use std::io;

use cascade_block::with_causes;

use super::{Check, CheckOutcome};
use crate::http;
use crate::socket_place::{SocketPathState, SocketPlaceError};

/// Descriptors of a node, in addition to those of clients, segments and HTTP connections.
const OWN_DESCRIPTORS: u64 = 256;

/// Descriptors of a client: its connection, and a pidfd that reports the end of its process.
const DESCRIPTORS_PER_CLIENT: u64 = 2;

const NO_PORT: &str = "no TCP port (listen is not set)";

pub(super) const OPEN_FILES: Check = Check {
    id: "open_files",
    why: "each client needs two descriptors, each segment and HTTP connection one; at the limit \
          the node refuses clients",
    run: |config, machine| {
        let clients = config.limits.connections_max as u64 * DESCRIPTORS_PER_CLIENT;
        let tenants = config.tenants.iter().filter_map(|tenant| tenant.store.files.as_ref());
        let files = tenants.chain(&config.store.files);
        let segments = files.map(|files| files.capacity_bytes / files.segment_bytes.max(1));
        let http = config.listen.map_or(0, |_| http::DESCRIPTORS_MAX);
        let needed = segments.fold(clients + http + OWN_DESCRIPTORS, u64::saturating_add);
        let Some((soft, hard)) = super::memory::limit(machine, "Max open files") else {
            return CheckOutcome::warning("the limit is unknown: cannot read /proc/self/limits", {
                "mount /proc in this container"
            });
        };
        let found = format!("soft limit {soft}, hard limit {hard}; up to {needed} needed");
        let remedy =
            format!("ulimit -n {needed}; systemd: LimitNOFILE={needed}; or lower connections_max");
        match needed {
            needed if needed <= soft => CheckOutcome::ok(found),
            needed if needed <= hard => {
                CheckOutcome::ok(format!("{found}; the node raises its soft limit"))
            }
            _ => CheckOutcome::failed(found, remedy),
        }
    },
};

pub(super) const SOCKET: Check = Check {
    id: "socket",
    why: "processes on this host connect to it; a user who can replace it receives their data",
    run: |config, machine| {
        let (path, at) = (&config.socket, config.socket.display());
        match machine.socket(path) {
            Ok(state) => {
                let directory = crate::socket_place::directory_of(path);
                if let Err(error) = machine.may_write(directory) {
                    return CheckOutcome::failed(
                        format!("cannot create a socket in {} ({error})", directory.display()),
                        "sudo chown \"$USER\" the directory; or set socket (--socket)",
                    );
                }
                CheckOutcome::ok(match state {
                    SocketPathState::Free => format!("{at} is free"),
                    SocketPathState::Stale => {
                        format!("{at} is stale; the node removes it at start")
                    }
                })
            }
            Err(SocketPlaceError::Directory { directory, source })
                if source.kind() == io::ErrorKind::NotFound =>
            {
                let mut above = directory.ancestors();
                let existing = above.find(|path| path.exists()).unwrap_or(&directory);
                match machine.may_write(existing) {
                    Ok(()) => {
                        CheckOutcome::ok(format!("{at} is free; the node creates its directory"))
                    }
                    Err(error) => {
                        let directory = directory.display();
                        CheckOutcome::failed(
                            format!("cannot create {directory} ({error})"),
                            format!(
                                "sudo install -d -m 0700 -o \"$USER\" {directory}; or set \
                                 socket (--socket)"
                            ),
                        )
                    }
                }
            }
            Err(SocketPlaceError::Taken { .. }) if let Some(node) = machine.running_node(path) => {
                CheckOutcome::ok(format!("the node that runs, process {}, serves {at}", node.pid))
            }
            Err(error) => {
                let remedy = match &error {
                    SocketPlaceError::Unsafe { directory, .. } => {
                        format!("chmod go-w {}; or set socket", directory.display())
                    }
                    SocketPlaceError::Taken { path } => {
                        let path = path.display();
                        format!("ss -xlp | grep {path} shows the process; stop it, or set socket")
                    }
                    SocketPlaceError::NoSocket { path } => {
                        format!("move {} elsewhere, or set socket", path.display())
                    }
                    _ => "set socket (--socket) to another path".to_owned(),
                };
                CheckOutcome::failed(with_causes(&error), remedy)
            }
        }
    },
};

pub(super) const PORT: Check = Check {
    id: "port",
    why: "the node serves metrics, health and the status page there",
    run: |config, machine| {
        let Some(address) = config.listen else {
            return CheckOutcome::absent(NO_PORT);
        };
        let Err(error) = machine.try_listen(address) else {
            return CheckOutcome::ok(format!("{address} is free"));
        };
        let port = address.port();
        if error.kind() == io::ErrorKind::AddrInUse
            && let Some(node) = machine.running_node(&config.socket)
            && node.ports.contains(&port)
        {
            let pid = node.pid;
            return CheckOutcome::ok(format!("the node that runs, process {pid}, has {address}"));
        }
        let remedy = match error.kind() {
            io::ErrorKind::AddrInUse => {
                format!("ss -ltnp 'sport = :{port}' shows the process; stop it, or set listen")
            }
            io::ErrorKind::PermissionDenied => "set listen to port 1024 or above".to_owned(),
            io::ErrorKind::AddrNotAvailable => {
                "set listen to an address of this host (ip -brief address lists them)".to_owned()
            }
            _ => "set listen (--listen) to another address".to_owned(),
        };
        CheckOutcome::failed(format!("cannot listen on {address} ({error})"), remedy)
    },
};

pub(super) const EXPOSURE: Check = Check {
    id: "exposure",
    why: "others on the network can read and use a token that is sent unencrypted",
    run: |config, _| {
        let Some(address) = config.listen else {
            return CheckOutcome::absent(NO_PORT);
        };
        let is_local = address.ip().to_canonical().is_loopback();
        match (&config.security.certificate, is_local) {
            (None, false) => CheckOutcome::warning(
                format!("{address} accepts connections from other hosts, without TLS"),
                "set tls_certificate and tls_private_key",
            ),
            (None, true) => CheckOutcome::ok("only this host can connect"),
            (Some(_), _) => CheckOutcome::ok("TLS"),
        }
    },
};
