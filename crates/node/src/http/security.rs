//! What protects the TCP port: the rule when it may be open, and the secrets read from files.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use ring::digest::{SHA256, digest};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};

use crate::config::SecurityConfig;
use crate::http::HttpError;

/// The shortest token: 16 characters from a good source are beyond guessing over a network.
const TOKEN_BYTES_MIN: usize = 16;
/// No token, certificate chain or key is longer.
const FILE_BYTES_MAX: u64 = 1 << 20;

impl SecurityConfig {
    /// Whether the TCP port may listen there: on loopback as it is, elsewhere only with a token or
    /// with certificates on both sides. The configuration says so earlier, by its keys; this holds
    /// for whoever opens the port without one.
    ///
    /// # Errors
    /// Names the setting that is missing or contradicts another.
    pub fn check_port(&self, listen: SocketAddr) -> Result<(), HttpError> {
        let half = |setting, missing| Err(HttpError::Half { setting, missing });
        match (&self.certificate, &self.private_key) {
            (Some(_), None) => return half("certificate", "private_key"),
            (None, Some(_)) => return half("private_key", "certificate"),
            _ => {}
        }
        if self.client_authority.is_some() && self.certificate.is_none() {
            return half("client_authority", "certificate");
        }
        let is_guarded = self.token_file.is_some() || self.client_authority.is_some();
        if !listen.ip().is_loopback() && !is_guarded {
            return Err(HttpError::Open { address: listen });
        }
        Ok(())
    }
}

/// Whether somebody on the network could read the token on its way.
pub(super) fn is_token_in_the_clear(security: &SecurityConfig, address: SocketAddr) -> bool {
    security.token_file.is_some() && security.certificate.is_none() && !address.ip().is_loopback()
}

/// What the settings' files hold.
pub(super) struct Secrets {
    /// The hash of the token; the token itself is not kept.
    pub(super) token: Option<[u8; 32]>,
    pub(super) tls: Option<Arc<ServerConfig>>,
    /// Whether callers show a certificate.
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

/// A token's hash. Comparing hashes tells nobody how much of a guess was right.
pub(super) fn token_hash(token: &[u8]) -> [u8; 32] {
    let hash = digest(&SHA256, token);
    hash.as_ref().try_into().expect("SHA-256 has 32 bytes")
}

fn read_token(path: &Path) -> Result<[u8; 32], HttpError> {
    let bad = |reason| file("token_file", path, reason, None);
    let token = read_secret("token_file", path)?;
    let token = token.trim_ascii();
    if token.len() < TOKEN_BYTES_MIN {
        return Err(bad("has fewer than 16 characters; make one with `openssl rand -hex 32`"));
    }
    if !token.iter().all(u8::is_ascii_graphic) {
        return Err(bad("has characters that no header can carry; use one line of ASCII"));
    }
    Ok(token_hash(token))
}

/// A file that nobody else may read.
fn read_secret(setting: &'static str, path: &Path) -> Result<Vec<u8>, HttpError> {
    let cannot = |source| file(setting, path, "cannot be read", Some(Box::new(source)));
    let metadata = fs::metadata(path).map_err(cannot)?;
    if metadata.mode() & 0o077 != 0 {
        return Err(file(setting, path, "can be read by others; `chmod 600` it", None));
    }
    if metadata.len() > FILE_BYTES_MAX {
        return Err(file(setting, path, "is longer than 1 MiB; is it the right file?", None));
    }
    fs::read(path).map_err(cannot)
}

fn certificates(
    setting: &'static str,
    path: &Path,
) -> Result<Vec<CertificateDer<'static>>, HttpError> {
    let bad = |reason, source| Err(file(setting, path, reason, source));
    let chain: Result<Vec<_>, _> = CertificateDer::pem_file_iter(path).and_then(Iterator::collect);
    match chain {
        Ok(chain) if chain.is_empty() => bad("holds no certificate in PEM", None),
        Ok(chain) => Ok(chain),
        Err(error) => bad("cannot be read as PEM", Some(Box::new(error))),
    }
}

fn tls(
    certificate: &Path,
    private_key: &Path,
    authority: Option<&Path>,
) -> Result<Arc<ServerConfig>, HttpError> {
    let chain = certificates("certificate", certificate)?;
    let key = read_secret("private_key", private_key)?;
    let key = PrivateKeyDer::from_pem_slice(&key).map_err(|error| {
        file("private_key", private_key, "holds no private key in PEM", Some(Box::new(error)))
    })?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .expect("the provider knows TLS 1.2 and 1.3");
    let builder = match authority {
        None => builder.with_no_client_auth(),
        Some(path) => {
            let bad = |error: Box<dyn std::error::Error + Send + Sync>| {
                file("client_authority", path, "is no authority of certificates", Some(error))
            };
            let mut roots = RootCertStore::empty();
            for root in certificates("client_authority", path)? {
                roots.add(root).map_err(|error| bad(Box::new(error)))?;
            }
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
            let verifier = verifier.build().map_err(|error| bad(Box::new(error)))?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let mut config = builder.with_single_cert(chain, key).map_err(|error| {
        let reason = "does not go with the private key";
        file("certificate", certificate, reason, Some(Box::new(error)))
    })?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

fn file(
    setting: &'static str,
    path: &Path,
    reason: &'static str,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
) -> HttpError {
    HttpError::File { setting, path: path.to_owned(), reason, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(names: &[&str]) -> SecurityConfig {
        let file = |name: &str| names.contains(&name).then(|| format!("/{name}").into());
        SecurityConfig {
            token_file: file("token"),
            certificate: file("certificate"),
            private_key: file("key"),
            client_authority: file("authority"),
        }
    }

    #[test]
    fn beyond_loopback_the_port_needs_a_token_or_certificates_on_both_sides() {
        let inside = ["127.0.0.1:0", "127.9.9.9:80", "[::1]:9"];
        let outside = ["0.0.0.0:0", "[::]:0", "192.0.2.1:80"];
        let check = |names: &[&str], at: &str| with(names).check_port(at.parse().unwrap());
        for at in inside {
            check(&[], at).unwrap();
        }
        for at in outside {
            let said = check(&[], at).unwrap_err().to_string();
            assert!(said.contains(at) && said.contains("token_file"), "{said}");
            let one_sided = check(&["certificate", "key"], at);
            assert!(matches!(one_sided, Err(HttpError::Open { .. })), "encrypted is not guarded");
            check(&["token"], at).unwrap();
            check(&["certificate", "key", "authority"], at).unwrap();
        }
    }

    #[test]
    fn half_of_a_pair_is_refused_by_name() {
        let at = "127.0.0.1:0".parse().unwrap();
        for (names, missing) in
            [(["certificate"], "private_key"), (["key"], "certificate"), (["authority"], "certif")]
        {
            let said = with(&names).check_port(at).unwrap_err().to_string();
            assert!(said.contains(missing), "{said}");
        }
    }
}
