//! Notifies a service manager (`sd_notify(3)`) that the node is ready, reloading or stopping.

use std::ffi::OsString;
use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use crate::config::Environment;

/// The service manager that started the process. Without one, notifications do nothing.
#[derive(Debug)]
pub struct ServiceManager {
    connection: Option<(UnixDatagram, SocketAddr)>,
}

impl ServiceManager {
    /// The service manager of the environment's `NOTIFY_SOCKET`.
    ///
    /// # Errors
    /// The address is invalid, or the socket cannot be created.
    pub fn of(environment: &Environment) -> io::Result<Self> {
        match environment.notify_socket() {
            Some(address) => Self::at(&address),
            None => Ok(Self { connection: None }),
        }
    }

    fn at(address: &OsString) -> io::Result<Self> {
        // A leading @ stands for the abstract namespace, which has no file.
        let target = match address.as_bytes() {
            [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
            _ => SocketAddr::from_pathname(address)?,
        };
        let socket = UnixDatagram::unbound()?;
        // A manager that does not read its socket must not block the node.
        socket.set_nonblocking(true)?;
        Ok(Self { connection: Some((socket, target)) })
    }

    /// Reports that the node serves requests.
    ///
    /// # Errors
    /// The message could not be sent. The node can continue.
    pub fn ready(&self, status: &str) -> io::Result<()> {
        self.send(&format!("READY=1\nSTATUS={}", one_line(status)))
    }

    /// Reports that the node reloads its configuration; [`ServiceManager::ready`] has to follow.
    ///
    /// # Errors
    /// The message could not be sent. The node can continue.
    pub fn reloading(&self) -> io::Result<()> {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let microseconds = now.tv_sec * 1_000_000 + now.tv_nsec / 1000;
        self.send(&format!("RELOADING=1\nMONOTONIC_USEC={microseconds}"))
    }

    /// Reports that the node shuts down.
    ///
    /// # Errors
    /// The message could not be sent. The node can continue.
    pub fn stopping(&self) -> io::Result<()> {
        self.send("STOPPING=1\nSTATUS=shutting down")
    }

    fn send(&self, message: &str) -> io::Result<()> {
        let Some((socket, target)) = &self.connection else { return Ok(()) };
        socket.send_to_addr(message.as_bytes(), target).map(drop)
    }
}

fn one_line(text: &str) -> String {
    text.replace('\n', " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn receive(manager: &UnixDatagram) -> String {
        let mut bytes = [0; 256];
        let length = manager.recv(&mut bytes).unwrap();
        String::from_utf8(bytes[..length].to_vec()).unwrap()
    }

    fn assert_notifies(manager: &UnixDatagram, address: &str) {
        let environment = Environment::new([("NOTIFY_SOCKET", address)], 0);
        let service_manager = ServiceManager::of(&environment).unwrap();
        service_manager.ready("serves on\n/run/cascade.sock").unwrap();
        assert_eq!(receive(manager), "READY=1\nSTATUS=serves on /run/cascade.sock");
        service_manager.reloading().unwrap();
        assert!(receive(manager).starts_with("RELOADING=1\nMONOTONIC_USEC="));
        service_manager.stopping().unwrap();
        assert!(receive(manager).starts_with("STOPPING=1\n"));
    }

    #[test]
    fn a_manager_at_a_path_is_notified_of_each_state() {
        let directory = tempfile::TempDir::new().unwrap();
        let path = directory.path().join("notify");
        let manager = UnixDatagram::bind(&path).unwrap();
        assert_notifies(&manager, path.to_str().unwrap());
    }

    #[test]
    fn a_manager_at_an_abstract_address_is_notified_of_each_state() {
        let name = format!("cascade-notify-test-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let manager = UnixDatagram::bind_addr(&address).unwrap();
        assert_notifies(&manager, &format!("@{name}"));
    }

    #[test]
    fn without_a_manager_notifications_do_nothing() {
        let service_manager = ServiceManager::of(&Environment::new([("A", "")], 0)).unwrap();
        assert!(service_manager.ready("").is_ok());
    }
}
