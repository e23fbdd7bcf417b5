//! The keys of a connection, and those that follow them.

use std::fmt;
use std::io;

use rustls::client::ClientConnectionData;
use rustls::crypto::cipher::{AeadKey, Iv, MessageDecrypter, MessageEncrypter};
use rustls::kernel::KernelConnection;
use rustls::server::ServerConnectionData;
use rustls::{ConnectionTrafficSecrets, Error, Tls13CipherSuite};

/// Derives the next key of a direction.
pub(super) enum Keys {
    Client(KernelConnection<ClientConnectionData>),
    Server(KernelConnection<ServerConnectionData>),
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Keys")
    }
}

impl Keys {
    /// The cipher, which stays the same.
    pub(super) fn suite(&self) -> io::Result<&'static Tls13CipherSuite> {
        let suite = match self {
            Self::Client(keys) => keys.negotiated_cipher_suite(),
            Self::Server(keys) => keys.negotiated_cipher_suite(),
        };
        suite.tls13().ok_or_else(|| io::Error::other("the cipher is not one of TLS 1.3"))
    }

    /// The next key of what this side sends.
    pub(super) fn next_encrypter(&mut self) -> io::Result<Box<dyn MessageEncrypter>> {
        let updated = match self {
            Self::Client(keys) => keys.update_tx_secret(),
            Self::Server(keys) => keys.update_tx_secret(),
        };
        encrypter(self.suite()?, next(updated)?)
    }

    /// The next key of what the peer sends.
    pub(super) fn next_decrypter(&mut self) -> io::Result<Box<dyn MessageDecrypter>> {
        let updated = match self {
            Self::Client(keys) => keys.update_rx_secret(),
            Self::Server(keys) => keys.update_rx_secret(),
        };
        decrypter(self.suite()?, next(updated)?)
    }
}

fn next(
    updated: Result<(u64, ConnectionTrafficSecrets), Error>,
) -> io::Result<ConnectionTrafficSecrets> {
    let (sequence, secrets) = updated.map_err(io::Error::other)?;
    assert_eq!(sequence, 0, "a new key counts its records from 0");
    Ok(secrets)
}

pub(super) fn encrypter(
    suite: &Tls13CipherSuite,
    secrets: ConnectionTrafficSecrets,
) -> io::Result<Box<dyn MessageEncrypter>> {
    let (key, iv) = parts(secrets)?;
    Ok(suite.aead_alg.encrypter(key, iv))
}

pub(super) fn decrypter(
    suite: &Tls13CipherSuite,
    secrets: ConnectionTrafficSecrets,
) -> io::Result<Box<dyn MessageDecrypter>> {
    let (key, iv) = parts(secrets)?;
    Ok(suite.aead_alg.decrypter(key, iv))
}

fn parts(secrets: ConnectionTrafficSecrets) -> io::Result<(AeadKey, Iv)> {
    match secrets {
        ConnectionTrafficSecrets::Aes128Gcm { key, iv }
        | ConnectionTrafficSecrets::Aes256Gcm { key, iv }
        | ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => Ok((key, iv)),
        _ => Err(io::Error::other("the cipher is unknown")),
    }
}
