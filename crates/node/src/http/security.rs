//! The token and the certificates of the TCP port, read from files.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use cascade_store::{SecretReaders, read_secret};
use ring::digest::{SHA256, digest};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};

use crate::config::SecurityConfig;
use crate::http::error::HttpError;

/// The shortest token: 16 random characters cannot be guessed over a network.
const TOKEN_BYTES_MIN: usize = 16;
/// Size limit of a file with a token or key.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Whether others on the network could read the token in transit.
pub(super) fn is_token_in_the_clear(security: &SecurityConfig, address: SocketAddr) -> bool {
    security.token_file.is_some()
        && security.certificate.is_none()
        && !address.ip().to_canonical().is_loopback()
}

/// The contents of the files that the settings name.
pub(super) struct Secrets {
    /// The hash of the token. The token itself is not kept in memory.
    pub(super) token: Option<[u8; 32]>,
    pub(super) tls: Option<Arc<ServerConfig>>,
    /// Whether clients must present a certificate (mutual TLS).
    pub(super) is_mutual: bool,
}

impl Secrets {
    pub(super) fn read(security: &SecurityConfig) -> Result<Self, HttpError> {
        let token = security.token_file.as_deref().map(read_token).transpose()?;
        let tls = match (&security.certificate, &security.private_key) {
            (Some(certificate), Some(private_key)) => {
                Some(tls(certificate, private_key, security.client_authority.as_deref())?)
            }
            _ => None,
        };
        Ok(Self { token, tls, is_mutual: security.client_authority.is_some() })
    }
}

/// Hash of a token. The time to compare hashes does not reveal how much of a guess is right.
pub(super) fn token_hash(token: &[u8]) -> [u8; 32] {
    let hash = digest(&SHA256, token);
    hash.as_ref().try_into().expect("SHA-256 has 32 bytes")
}

fn read_token(path: &Path) -> Result<[u8; 32], HttpError> {
    let invalid = |reason| file_error("token_file", path, reason, None);
    let token = secret("token_file", path, SecretReaders::Group)?;
    let token = token.trim_ascii();
    if token.len() < TOKEN_BYTES_MIN {
        return Err(invalid(
            "has fewer than 16 characters; create a token with `openssl rand -hex 32`",
        ));
    }
    if !token.iter().all(u8::is_ascii_graphic) {
        return Err(invalid(
            "has characters that are not allowed in a header; use one line of ASCII",
        ));
    }
    Ok(token_hash(token))
}

fn secret(
    setting: &'static str,
    path: &Path,
    readers: SecretReaders,
) -> Result<Vec<u8>, HttpError> {
    read_secret(path, FILE_BYTES_MAX, readers)
        .map_err(|source| HttpError::Secret { setting, source })
}

fn certificates(
    setting: &'static str,
    path: &Path,
) -> Result<Vec<CertificateDer<'static>>, HttpError> {
    let invalid = |reason, source| Err(file_error(setting, path, reason, source));
    let chain: Result<Vec<_>, _> = CertificateDer::pem_file_iter(path).and_then(Iterator::collect);
    match chain {
        Ok(chain) if chain.is_empty() => invalid("contains no PEM certificate", None),
        Ok(chain) => Ok(chain),
        Err(error) => invalid("cannot be read as PEM", Some(Box::new(error))),
    }
}

fn tls(
    certificate: &Path,
    private_key: &Path,
    authority: Option<&Path>,
) -> Result<Arc<ServerConfig>, HttpError> {
    let chain = certificates("tls_certificate", certificate)?;
    let key = secret("tls_private_key", private_key, SecretReaders::Owner)?;
    let key = PrivateKeyDer::from_pem_slice(&key).map_err(|error| {
        let reason = "contains no PEM private key";
        file_error("tls_private_key", private_key, reason, Some(Box::new(error)))
    })?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .expect("the provider supports TLS 1.2 and 1.3");
    let builder = match authority {
        None => builder.with_no_client_auth(),
        Some(path) => {
            let invalid = |error: Box<dyn std::error::Error + Send + Sync>| {
                file_error("tls_client_ca", path, "is not a CA certificate", Some(error))
            };
            let mut roots = RootCertStore::empty();
            for root in certificates("tls_client_ca", path)? {
                roots.add(root).map_err(|error| invalid(Box::new(error)))?;
            }
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
            let verifier = verifier.build().map_err(|error| invalid(Box::new(error)))?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let mut config = builder.with_single_cert(chain, key).map_err(|error| {
        let reason = "does not match the private key";
        file_error("tls_certificate", certificate, reason, Some(Box::new(error)))
    })?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

fn file_error(
    setting: &'static str,
    path: &Path,
    reason: &'static str,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
) -> HttpError {
    HttpError::File { setting, path: path.to_owned(), reason, source }
}
