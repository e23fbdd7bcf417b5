//! Tells a service manager (`sd_notify(3)`) that the node is ready, reloads or stops.

use std::ffi::OsString;
use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use crate::config::Environment;

/// Whoever started the process and waits to hear of it; often nobody.
#[derive(Debug)]
pub struct Supervisor {
    to: Option<(UnixDatagram, SocketAddr)>,
}

impl Supervisor {
    /// The one that the environment names.
    ///
    /// # Errors
    /// The address makes no sense, or no socket could be made.
    pub fn of(environment: &Environment) -> io::Result<Self> {
        environment.notify_socket().map_or(Ok(Self { to: None }), |address| Self::at(&address))
    }

    fn at(address: &OsString) -> io::Result<Self> {
        // A name that starts with @ lies in the abstract namespace, not among files.
        let target = match address.as_bytes() {
            [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
            _ => SocketAddr::from_pathname(address)?,
        };
        let socket = UnixDatagram::unbound()?;
        // A manager that does not read must not stop the node.
        socket.set_nonblocking(true)?;
        Ok(Self { to: Some((socket, target)) })
    }

    /// The node serves.
    ///
    /// # Errors
    /// The manager did not take the message; the node can go on.
    pub fn ready(&self, status: &str) -> io::Result<()> {
        self.tell(&format!("READY=1\nSTATUS={}", one_line(status)))
    }

    /// The node reads its configuration again; [`Supervisor::ready`] ends it.
    ///
    /// # Errors
    /// The manager did not take the message; the node can go on.
    pub fn reloading(&self) -> io::Result<()> {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let microseconds = now.tv_sec * 1_000_000 + now.tv_nsec / 1000;
        self.tell(&format!("RELOADING=1\nMONOTONIC_USEC={microseconds}"))
    }

    /// The node ends.
    ///
    /// # Errors
    /// The manager did not take the message; the node can go on.
    pub fn stopping(&self) -> io::Result<()> {
        self.tell("STOPPING=1\nSTATUS=shutting down")
    }

    fn tell(&self, message: &str) -> io::Result<()> {
        let Some((socket, target)) = &self.to else { return Ok(()) };
        socket.send_to_addr(message.as_bytes(), target).map(drop)
    }
}

fn one_line(text: &str) -> String {
    text.replace('\n', " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heard(manager: &UnixDatagram) -> String {
        let mut bytes = [0; 256];
        let length = manager.recv(&mut bytes).unwrap();
        String::from_utf8(bytes[..length].to_vec()).unwrap()
    }

    fn tells(manager: &UnixDatagram, address: &str) {
        let environment = Environment::new([("NOTIFY_SOCKET", address)], 0);
        let supervisor = Supervisor::of(&environment).unwrap();
        supervisor.ready("serves on\n/run/cascade.sock").unwrap();
        assert_eq!(heard(manager), "READY=1\nSTATUS=serves on /run/cascade.sock");
        supervisor.reloading().unwrap();
        assert!(heard(manager).starts_with("RELOADING=1\nMONOTONIC_USEC="));
        supervisor.stopping().unwrap();
        assert!(heard(manager).starts_with("STOPPING=1\n"));
    }

    #[test]
    fn a_manager_with_a_file_hears_each_state() {
        let directory = tempfile::TempDir::new().unwrap();
        let path = directory.path().join("notify");
        let manager = UnixDatagram::bind(&path).unwrap();
        tells(&manager, path.to_str().unwrap());
    }

    #[test]
    fn a_manager_with_an_abstract_address_hears_each_state() {
        let name = format!("cascade-notify-test-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let manager = UnixDatagram::bind_addr(&address).unwrap();
        tells(&manager, &format!("@{name}"));
    }

    #[test]
    fn without_a_manager_nothing_is_said() {
        let supervisor = Supervisor::of(&Environment::new([("A", "")], 0)).unwrap();
        assert!(supervisor.ready("").is_ok());
    }
}
