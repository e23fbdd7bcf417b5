//! The two sides of a stream that rustls's own connections encrypt, as a program does that uses
//! rustls without more.

use std::net::TcpStream;
use std::sync::Arc;

use rustls::crypto::CryptoProvider;
use rustls::crypto::ring::{self, cipher_suite};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::version::TLS13;
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, ServerConfig, ServerConnection, Stream,
};

use super::failed;
use crate::MeasureError;

/// The cipher that our own connections use.
fn provider() -> Arc<CryptoProvider> {
    let cipher_suites = vec![cipher_suite::TLS13_AES_128_GCM_SHA256];
    Arc::new(CryptoProvider { cipher_suites, ..ring::default_provider() })
}

/// The sending side.
#[derive(Debug)]
pub(crate) struct ClientTls(ClientConnection);

impl ClientTls {
    /// A connection to a server on loopback with a certificate of this authority.
    pub(crate) fn new(authority: CertificateDer<'static>) -> Result<Self, MeasureError> {
        let mut roots = RootCertStore::empty();
        roots.add(authority).map_err(failed)?;
        let config = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])
            .map_err(failed)?
            .with_root_certificates(roots)
            .with_no_client_auth();
        let name = ServerName::try_from("127.0.0.1").map_err(failed)?;
        let mut connection = ClientConnection::new(Arc::new(config), name).map_err(failed)?;
        // As much as a call writes.
        connection.set_buffer_limit(None);
        Ok(Self(connection))
    }

    /// The stream over its socket, always the same. The first use makes the handshake.
    pub(super) fn over<'a>(
        &'a mut self,
        socket: &'a mut TcpStream,
    ) -> Stream<'a, ClientConnection, TcpStream> {
        Stream::new(&mut self.0, socket)
    }
}

/// The receiving side.
#[derive(Debug, Clone)]
pub(crate) struct ServerTls(Arc<ServerConfig>);

impl ServerTls {
    pub(crate) fn new(
        certificate: CertificateDer<'static>,
        key: PrivateKeyDer<'static>,
    ) -> Result<Self, MeasureError> {
        let mut config = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])
            .map_err(failed)?
            .with_no_client_auth()
            .with_single_cert(vec![certificate], key)
            .map_err(failed)?;
        config.send_tls13_tickets = 0;
        Ok(Self(Arc::new(config)))
    }

    /// The connection of a stream that was accepted.
    pub(super) fn accept(&self) -> Result<ServerConnection, MeasureError> {
        ServerConnection::new(Arc::clone(&self.0)).map_err(failed)
    }
}
