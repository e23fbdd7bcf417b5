//! What the threads of an endpoint share.

use std::borrow::Cow;
use std::sync::{Arc, OnceLock};

use crate::config::EndpointConfig;
use crate::generations::{Made, ServedConnections};
use crate::notice::Notices;
use crate::peer::EndpointId;
use crate::places::Places;
use crate::regions::Regions;
use crate::tls::Tls;
use crate::turns::Turns;
use crate::user_token::{read_or_make, why_not};
use crate::verbs::Rdma;

/// What the threads of an endpoint share.
#[derive(Debug)]
pub(crate) struct EndpointState {
    pub(crate) id: EndpointId,
    pub(crate) config: EndpointConfig,
    /// TLS of its TCP connections.
    pub(crate) tls: Option<Arc<Tls>>,
    pub(crate) regions: Regions,
    pub(crate) notices: Notices,
    /// The connections that it has made.
    pub(crate) made: Made,
    /// The connections of peers that it serves.
    pub(crate) served: ServedConnections,
    /// The places of these.
    pub(crate) places: Places,
    /// Their large frames.
    pub(crate) turns: Turns,
    /// Its device, once one is used.
    pub(crate) rdma: OnceLock<Arc<Rdma>>,
}

impl EndpointState {
    /// Whether its listeners ask peers for a certificate.
    pub(crate) fn asks_for_certificates(&self) -> bool {
        self.config.tls.as_ref().is_some_and(|tls| tls.client_certificates)
    }

    /// The token that it asks the peers of a listener for. `loopback`: the listener's port, if that
    /// is one of loopback.
    ///
    /// # Errors
    /// If it needs that of this user and cannot have it, with the reason.
    pub(crate) fn token_of_server(
        &self,
        loopback: Option<u16>,
    ) -> Result<Option<Cow<'_, [u8]>>, String> {
        match (&self.config.token, loopback) {
            (Some(token), _) => Ok(Some(token.into())),
            (None, Some(port)) if !self.asks_for_certificates() => self.user_token(port).map(Some),
            (None, _) => Ok(None),
        }
    }

    /// The token that it and a server prove to each other that they know. `loopback`: the server's
    /// port, if that is one of loopback; `needs_token`: the server asks for one.
    ///
    /// # Errors
    /// If the server must not be trusted, or cannot be answered, with the reason.
    pub(crate) fn token_of_client(
        &self,
        loopback: Option<u16>,
        needs_token: bool,
    ) -> Result<Option<Cow<'_, [u8]>>, String> {
        match (&self.config.token, needs_token, loopback) {
            (Some(token), true, _) => Ok(Some(token.into())),
            // An endpoint with a token talks to no endpoint without: it could be anybody.
            (Some(_), false, _) => Err("it has no token, and this side has one".to_owned()),
            (None, true, Some(port)) => self.user_token(port).map(Some),
            (None, true, None) => Err("it needs a token, and none is configured".to_owned()),
            // Over TLS, its certificate was checked.
            (None, false, Some(_)) if self.tls.is_none() => {
                Err("it asks for no token: it may be a process of another user".to_owned())
            }
            (None, false, _) => Ok(None),
        }
    }

    /// Where its token comes from, for errors.
    pub(crate) fn origin_of_token(&self) -> String {
        match &self.config.token {
            Some(_) => "the configured one".to_owned(),
            None => {
                format!("that of {}, because none is configured", self.config.user_token.display())
            }
        }
    }

    /// The token of this user, for one port: a process of another user that this endpoint connects
    /// to could pass the messages of the handshake on to another port, and read what follows.
    fn user_token(&self, port: u16) -> Result<Cow<'_, [u8]>, String> {
        let path = &self.config.user_token;
        match read_or_make(path) {
            Ok(token) => Ok([&*token, b" at port ", &port.to_le_bytes()].concat().into()),
            Err(error) => Err(why_not(path, &error)),
        }
    }
}
