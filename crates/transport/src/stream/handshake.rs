//! The handshake: versions, token, geometry and regions, before the first frame.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cascade_runtime::{Deadline, SystemClock, fill_random};

use super::socket::{Patience, Socket};
use crate::TransportError;
use crate::generations::{Number, ServedConnection};
use crate::limits::Limits;
use crate::peer::{EndpointId, Peer};
use crate::places::{ConnectionPlace, HostAddress};
use crate::proof::{Side, is_proven, prove};
use crate::region::Span;
use crate::state::EndpointState;
use crate::wire::{
    ANSWERS_QUESTIONS, Challenge, HEADER_BYTES, Header, Hello, Kind, OfferedRegion, VERSION,
    VERSION_MIN, Welcome,
};

/// How the first record of TLS starts: a handshake message, version 3.
const TLS_CLIENT_HELLO: [u8; 2] = [22, 3];
/// What a server says of a proof with another token.
const WRONG_TOKEN: &str = "the token is wrong";
/// Characters of a reason for a refusal that are sent and shown.
const REASON_CHARS_MAX: usize = 500;

/// Sends one message of the handshake.
fn send(
    socket: &Socket,
    kind: Kind,
    body: &[u8],
    patience: &mut Patience<'_>,
) -> Result<(), TransportError> {
    let header = Header::new(kind, 0).with_body(body).to_bytes();
    socket.send(&mut [Span::of_bytes(&header), Span::of_bytes(body)], patience)
}

/// Receives one message of the handshake and its body. Nothing is allocated for other kinds than
/// `kinds`, whose bodies may be longer.
fn receive(
    socket: &Socket,
    kinds: &[Kind],
    patience: &mut Patience<'_>,
) -> Result<(Kind, Vec<u8>), TransportError> {
    let mut bytes = [0; HEADER_BYTES];
    socket.receive(&mut [Span::of_buffer(&mut bytes)], patience)?;
    let invalid = |error| TransportError::Handshake {
        peer: socket.peer().to_owned(),
        reason: format!("{error}"),
    };
    if bytes.starts_with(&TLS_CLIENT_HELLO) {
        return Err(refusal(socket, "the client uses TLS, and this endpoint does not"));
    }
    let header = Header::parse(&bytes).map_err(invalid)?;
    if !kinds.contains(&header.kind) {
        let reason = format!("it sent {:?} instead of {:?}", header.kind, kinds[0]);
        return Err(refusal(socket, reason));
    }
    let mut body = vec![0; header.body_bytes as usize];
    socket.receive(&mut [Span::of_buffer(&mut body)], patience)?;
    if cascade_block::checksum(&body) != header.body_checksum {
        return Err(invalid(crate::wire::WireError::Checksum("body")));
    }
    Ok((header.kind, body))
}

fn refusal(socket: &Socket, reason: impl Into<String>) -> TransportError {
    TransportError::Handshake { peer: socket.peer().to_owned(), reason: reason.into() }
}

/// A message of this kind of a client.
fn of_client(
    socket: &Socket,
    kind: Kind,
    patience: &mut Patience<'_>,
) -> Result<Vec<u8>, TransportError> {
    receive(socket, &[kind], patience).map(|(_, body)| body)
}

/// A message of this kind of a server, or its reason for a refusal.
fn of_server(
    socket: &Socket,
    kind: Kind,
    patience: &mut Patience<'_>,
) -> Result<Vec<u8>, TransportError> {
    let (received, body) = receive(socket, &[kind, Kind::Refusal], patience)?;
    if received == kind {
        return Ok(body);
    }
    let reason = String::from_utf8_lossy(&body);
    let plain: String =
        reason.chars().filter(|it| !it.is_control()).take(REASON_CHARS_MAX).collect();
    Err(refusal(socket, plain))
}

fn patience(limits: &Limits, deadline: Deadline) -> Patience<'static> {
    Patience::until(deadline, limits.handshake_timeout)
}

fn nonce(socket: &Socket) -> Result<[u8; 32], TransportError> {
    let mut nonce = [0; 32];
    fill_random(&mut nonce).map_err(|error| refusal(socket, error.to_string()))?;
    Ok(nonce)
}

/// Introduces this endpoint to the one that listens at the other end.
pub(super) fn as_client(
    socket: &Socket,
    state: &EndpointState,
    deadline: Deadline,
) -> Result<(Peer, Number), TransportError> {
    socket.handshake(deadline)?;
    introduce(socket, state, deadline).map_err(|error| match error {
        TransportError::Deadline { .. } => TransportError::Deadline { what: "the handshake" },
        other => other,
    })
}

fn introduce(
    socket: &Socket,
    state: &EndpointState,
    deadline: Deadline,
) -> Result<(Peer, Number), TransportError> {
    let (number, live) = state.made.next()?;
    let patience = &mut patience(&state.config.limits, deadline);
    let hello = Hello {
        version_min: VERSION_MIN,
        version_max: VERSION,
        capabilities: 0,
        id: state.id.0,
        nonce: nonce(socket)?,
        name: state.config.name.clone(),
        geometry: state.config.geometry.clone(),
        number: number.get(),
        live,
    };
    let hello = hello.to_bytes();
    send(socket, Kind::Hello, &hello, patience)?;
    let body = of_server(socket, Kind::Challenge, patience)?;
    let invalid = |error| refusal(socket, format!("{error}"));
    let challenge = Challenge::parse(&body).map_err(invalid)?;
    if !(VERSION_MIN..=VERSION).contains(&challenge.version) {
        let reason = format!("it chose version {}, which is not supported", challenge.version);
        return Err(refusal(socket, reason));
    }
    let token = state.token_of_client(socket.loopback_port(), challenge.needs_token);
    let token = token.map_err(|reason| refusal(socket, reason))?;
    let proof = token.as_ref().map(|token| prove(token, Side::Client, &hello, &body));
    send(socket, Kind::Proof, &proof.unwrap_or_default(), patience)?;
    let welcome = of_server(socket, Kind::Welcome, patience).map_err(|error| match error {
        TransportError::Handshake { peer, reason } if reason == WRONG_TOKEN => {
            let reason = format!("{reason}: this side used {}", state.origin_of_token());
            TransportError::Handshake { peer, reason }
        }
        other => other,
    })?;
    let welcome = Welcome::parse(&welcome).map_err(invalid)?;
    if let Some(token) = token
        && !is_proven(&token, Side::Server, &hello, &body, &welcome.proof)
    {
        return Err(refusal(socket, "it does not know the token"));
    }
    let check = &state.config.accepts;
    check(&welcome.geometry).map_err(|reason| refusal(socket, reason))?;
    let peer = Peer {
        id: EndpointId(challenge.id),
        name: welcome.name,
        address: socket.peer().to_owned(),
        answers_questions: challenge.capabilities & ANSWERS_QUESTIONS != 0,
        tls: socket.record_layer(),
        geometry: welcome.geometry.into(),
        regions: Arc::new(welcome.regions),
    };
    Ok((peer, number))
}

/// A peer that was admitted, while its connection is served.
pub(super) struct Admitted<'a> {
    pub(super) peer: EndpointId,
    /// Dropped before the next: a connection that waits for the end of this one takes its place.
    _place: ConnectionPlace<'a>,
    /// Held until nothing of the connection is written any more.
    _generation: ServedConnection<'a>,
}

/// Checks the endpoint that connected. A refusal is sent to it and returned.
pub(super) fn as_server<'a>(
    socket: &Arc<Socket>,
    state: &'a EndpointState,
    is_admitted: &AtomicBool,
) -> Result<Admitted<'a>, TransportError> {
    let limits = &state.config.limits;
    let deadline = Deadline::after(&SystemClock, limits.handshake_timeout);
    socket.handshake(deadline)?;
    let patience = &mut patience(limits, deadline);
    match admit(socket, (state, is_admitted), (&mut *patience, deadline)) {
        Err(TransportError::Handshake { peer, reason }) => {
            // The peer may be gone; the refusal is what matters here.
            let told: String = reason.chars().take(REASON_CHARS_MAX).collect();
            drop(send(socket, Kind::Refusal, told.as_bytes(), patience));
            socket.drain(deadline);
            Err(TransportError::Handshake { peer, reason })
        }
        other => other,
    }
}

fn admit<'a>(
    socket: &Arc<Socket>,
    (state, is_admitted): (&'a EndpointState, &AtomicBool),
    (patience, deadline): (&mut Patience<'_>, Deadline),
) -> Result<Admitted<'a>, TransportError> {
    let invalid = |error| refusal(socket, format!("{error}"));
    let hello_body = of_client(socket, Kind::Hello, patience)?;
    let hello = Hello::parse(&hello_body).map_err(invalid)?;
    let version = hello.version_max.min(VERSION);
    if version < hello.version_min.max(VERSION_MIN) {
        let reason = format!(
            "the versions {} to {} were offered, this endpoint has {VERSION_MIN} to {VERSION}",
            hello.version_min, hello.version_max
        );
        return Err(refusal(socket, reason));
    }
    let token = state.token_of_server(socket.loopback_port());
    let token = token.map_err(|reason| refusal(socket, reason))?;
    let answers = state.config.answers.is_some();
    let challenge = Challenge {
        version,
        capabilities: if answers { ANSWERS_QUESTIONS } else { 0 },
        id: state.id.0,
        nonce: nonce(socket)?,
        needs_token: token.is_some(),
    };
    let challenge = challenge.to_bytes();
    send(socket, Kind::Challenge, &challenge, patience)?;
    let proof = of_client(socket, Kind::Proof, patience)?;
    let mut answer = [0; 32];
    if let Some(token) = token {
        if !is_proven(&token, Side::Client, &hello_body, &challenge, &proof) {
            return Err(refusal(socket, WRONG_TOKEN));
        }
        answer = prove(&token, Side::Server, &hello_body, &challenge);
    }
    let check = &state.config.accepts;
    check(&hello.geometry).map_err(|reason| refusal(socket, reason))?;
    let id = EndpointId(hello.id);
    let generation = state.served.add(id, (hello.number, &hello.live), socket, deadline);
    let busy = "an earlier connection of this endpoint, which was given up, has not ended here yet";
    let generation = generation.ok_or_else(|| refusal(socket, busy))?;
    // Those before it that the peer has given up have ended, and left their places.
    let place = state.places.reserve(id, socket.host().map(HostAddress::from));
    let place = place.map_err(|no_place| refusal(socket, no_place.to_string()))?;
    let welcome = Welcome {
        proof: answer,
        name: state.config.name.clone(),
        geometry: state.config.geometry.clone(),
        regions: offered(state),
    };
    is_admitted.store(true, Ordering::Release);
    send(socket, Kind::Welcome, &welcome.to_bytes(), patience)?;
    Ok(Admitted { peer: id, _place: place, _generation: generation })
}

/// The regions that peers may use.
fn offered(state: &EndpointState) -> Vec<OfferedRegion> {
    let snapshot = state.regions.snapshot();
    let regions = snapshot.iter().filter(|(_, region)| {
        let access = region.access();
        access.read || access.write
    });
    let offer = |(id, region): (_, &crate::Region)| OfferedRegion {
        id,
        access: region.access(),
        is_mappable: region.file().is_some(),
        bytes: region.bytes() as u64,
    };
    regions.map(offer).collect()
}
