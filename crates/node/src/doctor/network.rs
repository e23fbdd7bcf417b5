//! Checks of how a node is reached: descriptors, the Unix socket, the TCP port.

use std::io;

use cascade_block::with_causes;

use super::{Check, Outcome};
use crate::socket_place::{Occupant, SocketPlaceError};

/// Descriptors that a node has open besides those of clients and files.
const OWN_DESCRIPTORS: u64 = 256;

/// A client costs its connection and a descriptor by which its death is noticed.
const DESCRIPTORS_PER_CLIENT: u64 = 2;

pub(super) const OPEN_FILES: Check = Check {
    id: "open_files",
    why: "each client takes two descriptors and each segment one; beyond the limit clients are \
          refused",
    run: |config, machine| {
        let clients = config.limits.connections_max as u64 * DESCRIPTORS_PER_CLIENT;
        let tenants = config.tenants.iter().filter_map(|tenant| tenant.store.files.as_ref());
        let files = tenants.chain(&config.store.files);
        let segments = files.map(|files| files.capacity_bytes / files.segment_bytes.max(1));
        let needed = segments.fold(clients + OWN_DESCRIPTORS, u64::saturating_add);
        let Some((soft, hard)) = super::memory::limit(machine, "Max open files") else {
            return Outcome::warning("/proc/self/limits does not say", "mount /proc");
        };
        let found = format!("{soft} (at most {hard}); {needed} can be needed");
        let remedy =
            format!("ulimit -n {needed}; systemd: LimitNOFILE={needed}; or lower connections_max");
        match needed {
            needed if needed <= soft => Outcome::ok(found),
            needed if needed <= hard => Outcome::ok(format!("{found}; the node raises it")),
            _ => Outcome::failed(found, remedy),
        }
    },
};

pub(super) const SOCKET: Check = Check {
    id: "socket",
    why: "processes of this host reach the node by it; who can replace it gets what they send",
    run: |config, machine| {
        let (path, at) = (&config.socket, config.socket.display());
        match machine.socket(path) {
            Ok(Occupant::Nobody) => Outcome::ok(format!("{at} is free")),
            Ok(Occupant::Stale) => {
                Outcome::ok(format!("{at} was left by a node that is gone; the next removes it"))
            }
            Err(SocketPlaceError::Directory { directory, source })
                if source.kind() == io::ErrorKind::NotFound =>
            {
                let mut above = directory.ancestors();
                let existing = above.find(|path| path.exists()).unwrap_or(&directory);
                match machine.may_write(existing) {
                    Ok(()) => Outcome::ok(format!("{at} is free; the node makes its directory")),
                    Err(error) => {
                        let directory = directory.display();
                        Outcome::failed(
                            format!("{directory} cannot be made ({error})"),
                            format!(
                                "sudo install -d -m 0700 -o \"$USER\" {directory}; or set \
                                 socket (--socket)"
                            ),
                        )
                    }
                }
            }
            Err(error) => {
                let remedy = match &error {
                    SocketPlaceError::Unsafe { directory, .. } => {
                        format!("chmod go-w {}; or set socket", directory.display())
                    }
                    SocketPlaceError::Taken { path } => {
                        let path = path.display();
                        format!("ss -xlp | grep {path} shows whose; stop it or set socket")
                    }
                    SocketPlaceError::NoSocket { path } => {
                        format!("move {} away, or set socket", path.display())
                    }
                    _ => "set socket (--socket) to another path".to_owned(),
                };
                Outcome::failed(with_causes(&error), remedy)
            }
        }
    },
};

pub(super) const PORT: Check = Check {
    id: "port",
    why: "metrics, health and the status page are served there",
    run: |config, machine| {
        let Some(address) = config.listen else {
            return Outcome::absent("no TCP port is configured (listen)");
        };
        let Err(error) = machine.try_listen(address) else {
            return Outcome::ok(format!("{address} is free"));
        };
        let port = address.port();
        let remedy = match error.kind() {
            io::ErrorKind::AddrInUse => {
                format!("ss -ltnp 'sport = :{port}' shows whose; or set listen to another")
            }
            io::ErrorKind::PermissionDenied => "set listen to a port of 1024 or above".to_owned(),
            io::ErrorKind::AddrNotAvailable => {
                "ip -brief address lists the addresses of this host; set listen".to_owned()
            }
            _ => "set listen (--listen) to another address".to_owned(),
        };
        Outcome::failed(format!("cannot listen on {address} ({error})"), remedy)
    },
};

pub(super) const EXPOSURE: Check = Check {
    id: "exposure",
    why: "a token that travels unencrypted can be read on the way and used by others",
    run: |config, _| {
        let Some(address) = config.listen else {
            return Outcome::absent("no TCP port is configured (listen)");
        };
        let is_local = address.ip().to_canonical().is_loopback();
        match (&config.security.certificate, is_local) {
            (None, false) => Outcome::warning(
                format!("{address} is reached from other hosts, without TLS"),
                "set tls_certificate and tls_private_key",
            ),
            (None, true) => Outcome::ok("this host alone reaches the port"),
            (Some(_), _) => Outcome::ok("TLS"),
        }
    },
};
