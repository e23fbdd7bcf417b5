//! Certificates for the benchmark of TLS, made on the spot.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use cascade_transport::TlsConfig;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use super::failed;
use crate::MeasureError;
use crate::plain_stream::{ClientTls, ServerTls};

const AUTHORITY: &str = "authority.pem";
const CERTIFICATE: &str = "certificate.pem";
const KEY: &str = "key.pem";

/// Makes an authority and one certificate for both processes, in a directory.
pub(crate) fn make(directory: &Path) -> Result<(), MeasureError> {
    let authority_key = KeyPair::generate().map_err(failed)?;
    let mut params = CertificateParams::new([]).map_err(failed)?;
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = params.self_signed(&authority_key).map_err(failed)?;
    let issuer = Issuer::new(params, authority_key);
    let key = KeyPair::generate().map_err(failed)?;
    let params = CertificateParams::new(["127.0.0.1".to_owned()]).map_err(failed)?;
    let certificate = params.signed_by(&key, &issuer).map_err(failed)?;
    for (name, text) in
        [(AUTHORITY, authority.pem()), (CERTIFICATE, certificate.pem()), (KEY, key.serialize_pem())]
    {
        let mut options = OpenOptions::new();
        let file = options.write(true).create_new(true).mode(0o600).open(directory.join(name));
        file.and_then(|mut file| file.write_all(text.as_bytes())).map_err(failed)?;
    }
    Ok(())
}

/// Mutual TLS with the certificate of the directory.
pub(super) fn config(directory: &Path) -> TlsConfig {
    let file = |name| directory.join(name);
    TlsConfig::mutual(file(CERTIFICATE), file(KEY), file(AUTHORITY))
}

/// The sending side of a stream that rustls's own connections encrypt.
pub(crate) fn of_client(directory: &Path) -> Result<ClientTls, MeasureError> {
    ClientTls::new(certificate(directory, AUTHORITY)?)
}

/// Its receiving side.
pub(crate) fn of_server(directory: &Path) -> Result<ServerTls, MeasureError> {
    let key = PrivateKeyDer::from_pem_file(directory.join(KEY)).map_err(failed)?;
    ServerTls::new(certificate(directory, CERTIFICATE)?, key)
}

fn certificate(directory: &Path, name: &str) -> Result<CertificateDer<'static>, MeasureError> {
    CertificateDer::from_pem_file(directory.join(name)).map_err(failed)
}
