//! A TCP connection with TLS 1.3. rustls makes the handshake and derives the keys; afterwards each
//! direction has a key, a counter and a lock of its own, so that one thread can encrypt while
//! another one decrypts, or the kernel does both.

mod alert;
mod handshake;
mod kernel_session;
mod keys;
mod opener;
mod sealer;
mod session;

use std::io;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use cascade_runtime::Deadline;
use rustls::pki_types::ServerName;

use self::kernel_session::KernelSession;
use self::session::Session;
use super::byte_stream::ByteStream;
use super::kernel::KernelSocket;
use crate::peer::RecordLayer;
use crate::region::Span;
use crate::tls::Tls;

/// TLS of a client, and the name that the server's certificate must have.
pub(crate) type ClientTls = (Arc<Tls>, ServerName<'static>);

/// A TCP connection with TLS.
#[derive(Debug)]
pub(super) struct TlsStream {
    socket: KernelSocket,
    tls: Arc<Tls>,
    /// The name of the server; `None` at the server.
    server: Option<ServerName<'static>>,
    /// Set by the handshake.
    session: OnceLock<Established>,
}

/// A connection after its handshake, by who encrypts it.
#[derive(Debug)]
enum Established {
    Kernel(KernelSession),
    Userspace(Box<Session>),
}

impl TlsStream {
    /// The side that connected. The handshake is made later.
    pub(super) fn of_client(socket: KernelSocket, (tls, server): ClientTls) -> Self {
        Self { socket, tls, server: Some(server), session: OnceLock::new() }
    }

    /// The side that accepted. The handshake is made later.
    pub(super) fn of_server(socket: KernelSocket, tls: Arc<Tls>) -> Self {
        Self { socket, tls, server: None, session: OnceLock::new() }
    }

    fn session(&self) -> io::Result<&Established> {
        self.session.get().ok_or_else(|| io::ErrorKind::NotConnected.into())
    }
}

impl TlsStream {
    /// Says that nothing more comes, so that the end is not taken for a cut.
    fn say_goodbye(&self) {
        match self.session.get() {
            Some(Established::Kernel(session)) => session.say_goodbye(&self.socket),
            Some(Established::Userspace(session)) => session.say_goodbye(&self.socket),
            None => {}
        }
    }
}

impl ByteStream for TlsStream {
    fn handshake(&self, until: Deadline) -> io::Result<()> {
        let certificates = self.tls.certificates();
        let made = match &self.server {
            Some(name) => handshake::as_client(&self.socket, certificates, name.clone(), until),
            None => handshake::as_server(&self.socket, certificates, until),
        };
        let (secrets, keys) = made?;
        let limit = self.tls.config.key_records_max;
        let in_kernel = if self.tls.config.kernel {
            KernelSession::start(&self.socket, &secrets, &keys, limit)?
        } else {
            None
        };
        let session = match in_kernel {
            Some(session) => Established::Kernel(session),
            None => Established::Userspace(Box::new(Session::new(secrets, keys, limit)?)),
        };
        self.session.set(session).map_err(|_| io::ErrorKind::AlreadyExists.into())
    }

    fn record_layer(&self) -> Option<RecordLayer> {
        self.session.get().map(|session| match session {
            Established::Kernel(_) => RecordLayer::Kernel,
            Established::Userspace(_) => RecordLayer::Userspace,
        })
    }

    fn send_some(&self, spans: &[Span]) -> io::Result<usize> {
        match self.session()? {
            Established::Kernel(session) => session.send_some(&self.socket, spans),
            Established::Userspace(session) => session.send_some(&self.socket, spans),
        }
    }

    fn receive_some(&self, spans: &[Span], more: usize, time: Duration) -> io::Result<usize> {
        match self.session()? {
            Established::Kernel(session) => session.receive_some(&self.socket, spans, time),
            Established::Userspace(session) => {
                session.receive_some(&self.socket, spans, more, time)
            }
        }
    }

    fn wait_readable(&self, left: Duration) -> io::Result<bool> {
        match self.session()? {
            Established::Kernel(_) => self.socket.wait_readable(left),
            Established::Userspace(session) => session.wait_readable(&self.socket, left),
        }
    }

    fn is_closed(&self) -> bool {
        let is_over = self.session.get().is_some_and(|session| match session {
            Established::Kernel(session) => session.is_over(),
            Established::Userspace(session) => session.has_failed(),
        });
        is_over || self.socket.is_closed()
    }

    fn shutdown(&self) {
        self.say_goodbye();
        self.socket.shutdown();
    }

    fn drain(&self, until: Deadline) {
        self.say_goodbye();
        self.socket.drain(until);
    }
}
