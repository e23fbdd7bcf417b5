//! TLS of TCP connections: the settings, and the certificates that they name. No I/O on sockets.

mod files;

use std::fmt;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};

use cascade_runtime::Mutex;
use rustls::client::Resumption;
use rustls::crypto::CryptoProvider;
use rustls::crypto::ring::{self, cipher_suite};
use rustls::pki_types::ServerName;
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::version::TLS13;
use rustls::{ClientConfig, RootCertStore, ServerConfig};

use crate::TransportError;

/// What both sides must name in the handshake (ALPN), so that a certificate's other uses do not
/// reach this one.
pub(crate) const PROTOCOL: &[u8] = b"cascade-transport";

/// TLS of an endpoint's TCP connections, in both directions. Only TLS 1.3 is spoken.
///
/// The files are PEM. They are read when the endpoint is made, and again before a handshake after
/// one of them has changed; while they cannot be read, the last certificates that could stay in
/// use.
#[derive(Debug, Clone)]
pub struct TlsConfig {
    /// The certificate of this endpoint and its key. Needed to listen, and to connect to peers that
    /// require a certificate.
    pub identity: Option<TlsIdentity>,
    /// CA certificates: a peer's certificate must be signed by one of them.
    pub authority: PathBuf,
    /// Whether clients of this endpoint must present a certificate (mutual TLS). If not, a
    /// listener beyond loopback needs a token.
    pub client_certificates: bool,
    /// The name that a server's certificate must have. Default: the host name or IP address that
    /// was connected to.
    pub server_name: Option<String>,
    /// Whether the kernel may encrypt, where it can.
    pub kernel: bool,
    /// Records after which the key of a direction is replaced. At most what the cipher allows,
    /// which is 2^24 for AES-GCM.
    pub key_records_max: u64,
}

/// A certificate and its key.
#[derive(Debug, Clone)]
pub struct TlsIdentity {
    /// The certificate chain, that of the endpoint first.
    pub certificate: PathBuf,
    /// Its private key, which only this user may read.
    pub key: PathBuf,
}

impl TlsConfig {
    /// Mutual TLS: each side presents a certificate of the same authority.
    pub fn mutual(
        certificate: impl Into<PathBuf>,
        key: impl Into<PathBuf>,
        authority: impl Into<PathBuf>,
    ) -> Self {
        let identity = TlsIdentity { certificate: certificate.into(), key: key.into() };
        Self { identity: Some(identity), ..Self::anonymous(authority) }
    }

    /// Without a certificate of this side: it can connect to peers that require none.
    pub fn anonymous(authority: impl Into<PathBuf>) -> Self {
        Self {
            identity: None,
            authority: authority.into(),
            client_certificates: true,
            server_name: None,
            kernel: true,
            key_records_max: u64::MAX,
        }
    }

    fn files(&self) -> impl Iterator<Item = &Path> {
        let identity = self.identity.iter();
        let own = identity.flat_map(|it| [it.certificate.as_path(), it.key.as_path()]);
        own.chain([self.authority.as_path()])
    }
}

/// Tells whether a file was replaced: device, inode, length, time of the last change.
type Stamp = Option<(u64, u64, u64, (i64, i64))>;

/// The settings of an endpoint and its certificates.
#[derive(Debug)]
pub(crate) struct Tls {
    pub(crate) config: TlsConfig,
    loaded: Mutex<(Vec<Stamp>, Certificates)>,
}

/// What handshakes use, made of the files.
#[derive(Clone)]
pub(crate) struct Certificates {
    pub(crate) client: Arc<ClientConfig>,
    /// `None` without a certificate of this endpoint.
    pub(crate) server: Option<Arc<ServerConfig>>,
}

impl fmt::Debug for Certificates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Certificates").finish_non_exhaustive()
    }
}

impl Tls {
    /// Reads the files.
    pub(crate) fn new(config: TlsConfig) -> Result<Self, TransportError> {
        if let Some(name) = &config.server_name {
            server_name(name)?;
        }
        // Before the files, so that a replacement in between is seen later.
        let stamps = stamps(&config);
        let certificates = Certificates::read(&config)?;
        Ok(Self { config, loaded: Mutex::new((stamps, certificates)) })
    }

    /// The name that the certificate of the server at `host` must have.
    pub(crate) fn server_name(&self, host: &str) -> Result<ServerName<'static>, TransportError> {
        server_name(self.config.server_name.as_deref().unwrap_or(host))
    }

    /// The certificates as they are in the files now, or the last ones that could be read.
    pub(crate) fn certificates(&self) -> Certificates {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        let stamps = stamps(&self.config);
        // A pair of files is not replaced at once: an attempt that fails is made again.
        if stamps != loaded.0
            && let Ok(certificates) = Certificates::read(&self.config)
        {
            *loaded = (stamps, certificates);
        }
        loaded.1.clone()
    }
}

fn server_name(name: &str) -> Result<ServerName<'static>, TransportError> {
    let plain = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
    ServerName::try_from(plain.to_owned())
        .map_err(|_| TransportError::Tls(format!("{name:?} is no host name or IP address")))
}

fn stamps(config: &TlsConfig) -> Vec<Stamp> {
    let stamp = |path: &Path| {
        let it = fs::metadata(path).ok()?;
        Some((it.dev(), it.ino(), it.len(), (it.mtime(), it.mtime_nsec())))
    };
    config.files().map(stamp).collect()
}

impl Certificates {
    fn read(config: &TlsConfig) -> Result<Self, TransportError> {
        let provider = Arc::new(provider());
        let mut roots = RootCertStore::empty();
        for root in files::certificates(&config.authority)? {
            let added = roots.add(root);
            added.map_err(|error| {
                files::invalid(&config.authority, "is no CA certificate", error)
            })?;
        }
        let roots = Arc::new(roots);
        let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&[&TLS13])
            .expect("the ciphers are those of TLS 1.3")
            .with_root_certificates(Arc::clone(&roots));
        let Some(identity) = &config.identity else {
            let client = client_config(builder.with_no_client_auth());
            return Ok(Self { client, server: None });
        };
        let chain = files::certificates(&identity.certificate)?;
        let key = files::key(&identity.key)?;
        let invalid = |error| files::invalid(&identity.certificate, "does not fit its key", error);
        let client = builder.with_client_auth_cert(chain.clone(), key.clone_key());
        let client = client_config(client.map_err(invalid)?);
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&[&TLS13])
            .expect("the ciphers are those of TLS 1.3");
        let builder = if config.client_certificates {
            let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider);
            let no_roots = |error| files::invalid(&config.authority, "cannot be used", error);
            builder.with_client_cert_verifier(verifier.build().map_err(no_roots)?)
        } else {
            builder.with_no_client_auth()
        };
        let server = server_config(builder.with_single_cert(chain, key).map_err(invalid)?);
        Ok(Self { client, server: Some(server) })
    }
}

/// A connection lasts long, and its handshake is not repeated: there are no session tickets.
fn client_config(mut config: ClientConfig) -> Arc<ClientConfig> {
    config.resumption = Resumption::disabled();
    config.alpn_protocols = vec![PROTOCOL.to_vec()];
    config.enable_secret_extraction = true;
    Arc::new(config)
}

/// As `client_config`.
fn server_config(mut config: ServerConfig) -> Arc<ServerConfig> {
    config.send_tls13_tickets = 0;
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.alpn_protocols = vec![PROTOCOL.to_vec()];
    config.enable_secret_extraction = true;
    Arc::new(config)
}

/// The ciphers of TLS 1.3. AES with 128 bits comes first: processors of servers have instructions
/// for it.
fn provider() -> CryptoProvider {
    let cipher_suites = vec![
        cipher_suite::TLS13_AES_128_GCM_SHA256,
        cipher_suite::TLS13_AES_256_GCM_SHA384,
        cipher_suite::TLS13_CHACHA20_POLY1305_SHA256,
    ];
    CryptoProvider { cipher_suites, ..ring::default_provider() }
}
