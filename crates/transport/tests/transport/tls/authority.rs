//! Certificates made on the spot.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use cascade_transport::{TlsConfig, TlsIdentity};
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};

/// A certificate authority, and the directory of the files that it makes.
pub(crate) struct Authority {
    directory: tempfile::TempDir,
    issuer: Issuer<'static, KeyPair>,
}

pub(crate) fn write_secret(path: &Path, text: &str) {
    // A new file, so that it has another inode than the one that it replaces.
    let new = path.with_extension("new");
    fs::write(&new, text).unwrap();
    fs::set_permissions(&new, fs::Permissions::from_mode(0o600)).unwrap();
    fs::rename(&new, path).unwrap();
}

impl Authority {
    pub(crate) fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        // Its key as the name, so that each authority has another one.
        let name = format!("{:02x?}", &key.public_key_raw()[..8]);
        params.distinguished_name.push(DnType::CommonName, name);
        let root = params.self_signed(&key).unwrap();
        let directory = tempfile::tempdir().unwrap();
        write_secret(&directory.path().join("authority.pem"), &root.pem());
        Self { directory, issuer: Issuer::new(params, key) }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Issues a certificate for names and addresses, and its key. `change` may change it before.
    pub(crate) fn issue_with(
        &self,
        file: &str,
        names: &[&str],
        change: impl FnOnce(&mut CertificateParams),
    ) -> TlsIdentity {
        let key = KeyPair::generate().unwrap();
        let names: Vec<String> = names.iter().map(ToString::to_string).collect();
        let mut params = CertificateParams::new(names).unwrap();
        change(&mut params);
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let identity = TlsIdentity {
            certificate: self.path(&format!("{file}.pem")),
            key: self.path(&format!("{file}.key")),
        };
        write_secret(&identity.certificate, &certificate.pem());
        write_secret(&identity.key, &key.serialize_pem());
        identity
    }

    pub(crate) fn issue(&self, file: &str, names: &[&str]) -> TlsIdentity {
        self.issue_with(file, names, |_| {})
    }

    /// Mutual TLS with a certificate for loopback.
    pub(crate) fn config(&self, file: &str) -> TlsConfig {
        let identity = self.issue(file, &["localhost", "127.0.0.1", "127.0.0.2"]);
        TlsConfig::mutual(identity.certificate, identity.key, self.path("authority.pem"))
    }
}
