//! The handshake of TLS, by rustls. Reads no byte after it, because the kernel may decrypt those.

use std::io;

use cascade_runtime::{Deadline, SystemClock};
use rustls::client::{ClientConnectionData, UnbufferedClientConnection};
use rustls::pki_types::ServerName;
use rustls::server::{ServerConnectionData, UnbufferedServerConnection};
use rustls::unbuffered::{ConnectionState, EncodeError, EncodeTlsData, UnbufferedStatus};
use rustls::{Error, ExtractedSecrets};

use super::alert;
use super::keys::Keys;
use super::opener::{HEADER_BYTES, PAYLOAD_BYTES_MAX};
use crate::region::Span;
use crate::stream::byte_stream::{ByteStream as _, Refused, TICK};
use crate::stream::kernel::KernelSocket;
use crate::tls::{Certificates, PROTOCOL};
use crate::wire::{Header, Kind, MAGIC};

/// Bytes of the peer's handshake that are kept: far more than any chain of certificates has.
const INCOMING_BYTES_MAX: usize = 256 << 10;

type Made = (ExtractedSecrets, Keys);

/// One of rustls's two kinds of connections.
trait Party: Sized {
    type Data;
    /// Whether it tells a peer without TLS that there is TLS here.
    const IS_SERVER: bool;
    fn process<'c, 'i>(
        &'c mut self,
        incoming: &'i mut [u8],
    ) -> UnbufferedStatus<'c, 'i, Self::Data>;
    fn is_handshaking(&self) -> bool;
    fn protocol(&self) -> Option<&[u8]>;
    fn into_keys(self) -> Result<Made, Error>;
}

impl Party for UnbufferedClientConnection {
    type Data = ClientConnectionData;
    const IS_SERVER: bool = false;
    fn process<'c, 'i>(
        &'c mut self,
        incoming: &'i mut [u8],
    ) -> UnbufferedStatus<'c, 'i, Self::Data> {
        self.process_tls_records(incoming)
    }
    fn is_handshaking(&self) -> bool {
        (**self).is_handshaking()
    }
    fn protocol(&self) -> Option<&[u8]> {
        self.alpn_protocol()
    }
    fn into_keys(self) -> Result<Made, Error> {
        let (secrets, keys) = self.dangerous_into_kernel_connection()?;
        Ok((secrets, Keys::Client(keys)))
    }
}

impl Party for UnbufferedServerConnection {
    type Data = ServerConnectionData;
    const IS_SERVER: bool = true;
    fn process<'c, 'i>(
        &'c mut self,
        incoming: &'i mut [u8],
    ) -> UnbufferedStatus<'c, 'i, Self::Data> {
        self.process_tls_records(incoming)
    }
    fn is_handshaking(&self) -> bool {
        (**self).is_handshaking()
    }
    fn protocol(&self) -> Option<&[u8]> {
        self.alpn_protocol()
    }
    fn into_keys(self) -> Result<Made, Error> {
        let (secrets, keys) = self.dangerous_into_kernel_connection()?;
        Ok((secrets, Keys::Server(keys)))
    }
}

/// Makes the handshake of the side that connected.
pub(super) fn as_client(
    socket: &KernelSocket,
    certificates: Certificates,
    server: ServerName<'static>,
    until: Deadline,
) -> io::Result<Made> {
    let party = UnbufferedClientConnection::new(certificates.client, server);
    run(socket, party.map_err(refused)?, until)
}

/// Makes the handshake of the side that accepted.
pub(super) fn as_server(
    socket: &KernelSocket,
    certificates: Certificates,
    until: Deadline,
) -> io::Result<Made> {
    let config = certificates.server.ok_or_else(|| io::Error::other("there is no certificate"))?;
    let party = UnbufferedServerConnection::new(config).map_err(refused)?;
    let made = run(socket, party, until);
    if made.is_err() {
        // The client may have sent more, and would lose the reason with a reset.
        socket.drain(until);
    }
    made
}

fn run<P: Party>(socket: &KernelSocket, mut party: P, until: Deadline) -> io::Result<Made> {
    let (mut incoming, mut outgoing) = (vec![], vec![]);
    loop {
        let UnbufferedStatus { discard, state } = party.process(&mut incoming);
        let mut is_blocked = false;
        match state {
            Ok(ConnectionState::EncodeTlsData(data)) => encode(data, &mut outgoing)?,
            Ok(ConnectionState::TransmitTlsData(data)) => {
                send(socket, &outgoing, until)?;
                outgoing.clear();
                data.done();
            }
            // A server could send here, before the client has shown its certificate.
            Ok(ConnectionState::BlockedHandshake | ConnectionState::WriteTraffic(_)) => {
                is_blocked = true;
            }
            Ok(_) => return Err(io::Error::other("it ended TLS in the handshake")),
            Err(error) => {
                incoming.drain(..discard);
                return Err(end(socket, party, incoming, (outgoing, until), error));
            }
        }
        incoming.drain(..discard);
        if is_blocked {
            if !party.is_handshaking() {
                break;
            }
            if !receive_record(socket, &mut incoming, until)? {
                return Err(refuse_plain(socket, P::IS_SERVER, until));
            }
        }
    }
    if party.protocol() != Some(PROTOCOL) {
        return Err(io::Error::other(Refused("it is no endpoint of Cascade".to_owned())));
    }
    party.into_keys().map_err(io::Error::other)
}

/// Sends the alert for an error, and returns the reason.
fn end(
    socket: &KernelSocket,
    mut party: impl Party,
    mut incoming: Vec<u8>,
    (mut outgoing, until): (Vec<u8>, Deadline),
    error: Error,
) -> io::Error {
    loop {
        let UnbufferedStatus { discard, state } = party.process(&mut incoming);
        let Ok(ConnectionState::EncodeTlsData(data)) = state else {
            break;
        };
        if encode(data, &mut outgoing).is_err() {
            break;
        }
        incoming.drain(..discard);
    }
    // The peer may be gone; the reason is what matters here.
    drop(send(socket, &outgoing, until));
    refused(error)
}

fn refused(error: Error) -> io::Error {
    let reason = match error {
        Error::AlertReceived(alert) => match alert::about_certificate(alert) {
            Some(reason) => reason.to_owned(),
            None => format!("it ended the TLS handshake: {alert:?}"),
        },
        Error::InvalidCertificate(error) => format!("its certificate is not accepted: {error}"),
        error => format!("the TLS handshake failed: {error}"),
    };
    io::Error::other(Refused(reason))
}

fn encode<Data>(mut data: EncodeTlsData<'_, Data>, outgoing: &mut Vec<u8>) -> io::Result<()> {
    let at = outgoing.len();
    let encoded = match data.encode(&mut []) {
        Err(EncodeError::InsufficientSize(needed)) => {
            outgoing.resize(at + needed.required_size, 0);
            data.encode(&mut outgoing[at..])
        }
        other => other,
    };
    encoded.map(|_| ()).map_err(io::Error::other)
}

fn send(socket: &KernelSocket, bytes: &[u8], until: Deadline) -> io::Result<()> {
    let mut rest = Span::of_bytes(bytes);
    while rest.bytes() > 0 {
        rest = rest.after(or_wait(socket.send_some(&[rest]), until)?);
    }
    Ok(())
}

/// Appends one record of the peer's. False if the peer speaks the protocol without TLS.
fn receive_record(
    socket: &KernelSocket,
    incoming: &mut Vec<u8>,
    until: Deadline,
) -> io::Result<bool> {
    let at = incoming.len();
    incoming.resize(at + HEADER_BYTES, 0);
    fill(socket, &mut incoming[at..], until)?;
    let &[_, major, _, high, low] = incoming[at..].first_chunk().expect("it was received");
    if incoming[at..].starts_with(&MAGIC) {
        return Ok(false);
    }
    let bytes = usize::from(u16::from_le_bytes([low, high]));
    if major != 3 || bytes > PAYLOAD_BYTES_MAX || at + bytes > INCOMING_BYTES_MAX {
        return Err(io::Error::other(Refused("it does not use TLS".to_owned())));
    }
    incoming.resize(at + HEADER_BYTES + bytes, 0);
    fill(socket, &mut incoming[at + HEADER_BYTES..], until).map(|()| true)
}

/// The error for a peer that does not use TLS. A client gets the reason in the form that it
/// understands; nothing else is sent without TLS.
fn refuse_plain(socket: &KernelSocket, is_server: bool, until: Deadline) -> io::Error {
    if is_server {
        let reason = "this endpoint uses TLS, and the client does not";
        let header = Header::new(Kind::Refusal, 0).with_body(reason.as_bytes()).to_bytes();
        drop(send(socket, &[&header, reason.as_bytes()].concat(), until));
    }
    io::Error::other(Refused("it does not use TLS, and this side does".to_owned()))
}

fn fill(socket: &KernelSocket, mut into: &mut [u8], until: Deadline) -> io::Result<()> {
    while !into.is_empty() {
        let received = socket.receive_available(into, into.len(), TICK);
        if matches!(received, Ok(0)) {
            let reason = "it closed the connection during the TLS handshake";
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, reason));
        }
        into = &mut into[or_wait(received, until)?..];
    }
    Ok(())
}

/// How many bytes a call moved: none if it waited in vain. An error at the deadline, also while
/// bytes are moved, one after the other.
fn or_wait(moved: io::Result<usize>, until: Deadline) -> io::Result<usize> {
    let moved = moved.or_else(|error| match error.kind() {
        io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock => Ok(0),
        _ => Err(error),
    })?;
    if until.has_passed(&SystemClock) { Err(io::ErrorKind::TimedOut.into()) } else { Ok(moved) }
}
