//! Access to the HTTP port: tokens, plain TCP, TLS with client certificates.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use cascade_node::config::SecurityConfig;
use cascade_node::http::{self, HttpConfig};
use cascade_node::{Node, NodeConfig};
use rcgen::{BasicConstraints, Certificate, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

use super::served::{Answer, Served, exchange, get, request, send};

const TOKEN: &str = "a-token-of-at-least-16-characters";
const GUARDED: [&str; 4] = ["/", "/live", "/status.json", "/metrics"];

fn secret(directory: &Path, name: &str, text: &str) -> PathBuf {
    let path = directory.join(name);
    fs::write(&path, text).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    path
}

#[test]
fn without_the_token_only_health_and_readiness_are_served() {
    let directory = tempfile::tempdir().unwrap();
    let token_file = secret(directory.path(), "token", &format!("{TOKEN}\n"));
    let security = SecurityConfig { token_file: Some(token_file), ..SecurityConfig::default() };
    let served = Served::start_with(security.clone(), |_| {});
    for path in ["/healthz", "/readyz"] {
        assert_eq!(served.get_over_tcp(path).code, 200, "{path}");
    }
    let right = format!("Authorization: Bearer {TOKEN}");
    for path in GUARDED {
        let refused = served.get_over_tcp(path);
        assert_eq!(refused.code, 401, "{path}");
        assert!(refused.header("www-authenticate").unwrap().starts_with("Bearer"));
        assert!(!refused.body.contains("cascade_"), "metrics leak: {}", refused.body);
        let wrong = get(served.address(), path, &["Authorization: Bearer a-token"]);
        assert_eq!(wrong.code, 401, "{path}");
        assert_eq!(get(served.address(), path, &[&right]).code, 200, "{path}");
    }
    assert_eq!(served.node.traffic().status().http.refused, 8);
    // A new token replaces the old one without a restart.
    secret(directory.path(), "token", "another-token-that-is-long-enough");
    served.handle.reload(&security).unwrap();
    assert_eq!(get(served.address(), "/metrics", &[&right]).code, 401);
    // With an invalid token the current one stays in force.
    secret(directory.path(), "token", "short");
    let error = served.handle.reload(&security).unwrap_err().to_string();
    assert!(error.contains("16 characters") && !error.contains("short"), "{error}");
    let other = "Authorization: Bearer another-token-that-is-long-enough";
    assert_eq!(get(served.address(), "/metrics", &[other]).code, 200);
}

#[test]
fn a_foreign_page_in_a_local_browser_cannot_read_the_status() {
    let served = Served::start();
    for path in GUARDED {
        let answer = get(served.address(), path, &["Host: rebound.example"]);
        assert_eq!(answer.code, 421, "{path}");
        assert!(!answer.body.contains("tenant"), "{}", answer.body);
        assert_eq!(served.get_over_tcp(path).code, 200, "{path}");
    }
    let page = served.get_over_tcp("/");
    let policy = page.header("content-security-policy").unwrap();
    assert!(policy.contains("default-src 'none'") && policy.contains("frame-ancestors 'none'"));
    assert!(!policy.contains("unsafe"), "{policy}");
    assert_ne!(
        policy,
        served.get_over_tcp("/").header("content-security-policy").unwrap(),
        "each page has a nonce of its own"
    );
    assert!(page.header("access-control-allow-origin").is_none());
}

#[test]
fn methods_that_change_something_are_refused() {
    let served = Served::start();
    for method in ["POST", "PUT", "DELETE", "PATCH"] {
        for path in ["/", "/metrics", "/status.json", "/healthz", "/readyz"] {
            let request = request(served.address(), path, &["Content-Length: 0"]);
            let answer = send(served.address(), &request.replacen("GET", method, 1));
            assert_eq!(answer.code, 405, "{method} {path}");
        }
    }
    assert_eq!(served.get("/admin").code, 404);
    assert_eq!(served.get("/../../etc/passwd").code, 404);
}

#[test]
fn a_port_open_to_the_network_needs_access_control() {
    let directory = tempfile::tempdir().unwrap();
    let node = Node::open(NodeConfig::new(directory.path().join("socket"))).unwrap();
    let open = HttpConfig::new("0.0.0.0:0".parse().unwrap(), SecurityConfig::default());
    let error = http::serve(&node, open.clone()).unwrap_err().to_string();
    assert!(error.contains("0.0.0.0:0") && error.contains("token_file"), "{error}");
    let mut guarded = open;
    guarded.security.token_file = Some(secret(directory.path(), "token", TOKEN));
    http::serve(&node, guarded).unwrap().stop(Duration::from_secs(1));
}

#[test]
fn a_token_that_others_can_read_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = secret(directory.path(), "token", TOKEN);
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    let node = Node::open(NodeConfig::new(directory.path().join("socket"))).unwrap();
    let security = SecurityConfig { token_file: Some(path), ..SecurityConfig::default() };
    let config = HttpConfig::new("127.0.0.1:0".parse().unwrap(), security);
    let error = http::serve(&node, config).unwrap_err().to_string();
    assert!(error.contains("chmod 600"), "{error}");
}

/// A certificate authority that issues certificates for a node and for clients.
struct Authority {
    directory: tempfile::TempDir,
    issuer: Issuer<'static, KeyPair>,
    root: Certificate,
}

impl Authority {
    fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let root = params.self_signed(&key).unwrap();
        let directory = tempfile::tempdir().unwrap();
        secret(directory.path(), "authority", &root.pem());
        Self { directory, issuer: Issuer::new(params, key), root }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Issues a certificate with its key.
    fn issue(&self, name: &str) {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        secret(self.directory.path(), &format!("{name}.pem"), &certificate.pem());
        secret(self.directory.path(), &format!("{name}.key"), &key.serialize_pem());
    }

    fn security(&self) -> SecurityConfig {
        SecurityConfig {
            token_file: None,
            certificate: Some(self.path("node.pem")),
            private_key: Some(self.path("node.key")),
            client_authority: Some(self.path("authority")),
        }
    }

    /// Requests the metrics with a client certificate of an authority, or without one.
    fn request_metrics(
        &self,
        served: &Served,
        certificate: Option<(&Self, &str)>,
    ) -> std::io::Result<Answer> {
        let mut roots = RootCertStore::empty();
        roots.add(self.root.der().clone()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots);
        let config = match certificate {
            None => builder.with_no_client_auth(),
            Some((authority, name)) => {
                let path = authority.path(&format!("{name}.pem"));
                let chain = vec![CertificateDer::from_pem_file(path).unwrap()];
                let key = PrivateKeyDer::from_pem_file(authority.path(&format!("{name}.key")));
                builder.with_client_auth_cert(chain, key.unwrap()).unwrap()
            }
        };
        let name = "localhost".try_into().unwrap();
        let connection = ClientConnection::new(Arc::new(config), name).unwrap();
        let stream = TcpStream::connect(served.address())?;
        stream.set_read_timeout(Some(Duration::from_secs(20)))?;
        let mut stream = StreamOwned::new(connection, stream);
        stream.write_all(request(served.address(), "/metrics", &[]).as_bytes())?;
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes)?;
        Ok(super::served::answer(&bytes))
    }
}

/// A connection in its TLS handshake delayed the stop by the whole time limit.
#[test]
fn the_port_stops_during_a_tls_handshake() {
    let authority = Authority::new();
    authority.issue("node");
    let hour = Duration::from_secs(3600);
    let served = Served::start_with(authority.security(), |config| {
        (config.head_timeout, config.connection_timeout) = (hour, hour);
    });
    let _silent = TcpStream::connect(served.address()).unwrap();
    // The port accepts connections in order. The silent connection came first, so it is accepted
    // by the time that this request is refused.
    authority.request_metrics(&served, None).unwrap_err();
    let (stopped, is_stopped) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        served.handle.stop(hour);
        stopped.send(()).unwrap();
    });
    is_stopped.recv_timeout(Duration::from_secs(60)).expect("the port has stopped");
}

#[test]
fn with_mutual_tls_only_clients_with_a_certificate_are_served() {
    let ours = Authority::new();
    ours.issue("node");
    ours.issue("client");
    let other = Authority::new();
    other.issue("client");
    let served = Served::start_with(ours.security(), |_| {});
    let answer = ours.request_metrics(&served, Some((&ours, "client"))).unwrap();
    assert_eq!(answer.code, 200, "{answer:?}");
    assert!(answer.body.contains("cascade_gets_total"));
    ours.request_metrics(&served, None).unwrap_err();
    ours.request_metrics(&served, Some((&other, "client"))).unwrap_err();
    let plain = TcpStream::connect(served.address()).unwrap();
    plain.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let unencrypted = exchange(plain, &request(served.address(), "/metrics", &[]));
    assert_ne!(unencrypted.code, 200);
    assert!(!unencrypted.body.contains("cascade_"));
    assert!(served.node.traffic().status().http.handshake_failures >= 2);
    // Certificates of a new authority replace the old ones without a restart.
    other.issue("node");
    served.handle.reload(&other.security()).unwrap();
    assert_eq!(other.request_metrics(&served, Some((&other, "client"))).unwrap().code, 200);
    ours.request_metrics(&served, Some((&ours, "client"))).unwrap_err();
}
