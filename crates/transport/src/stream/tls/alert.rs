//! Alerts of TLS: what they say, and whether they are about this side's certificate.

use std::io;

use rustls::AlertDescription;

use crate::stream::byte_stream::Refused;

/// The end of a direction, which is no error.
pub(super) const CLOSE_NOTIFY: u8 = 0;
pub(super) const UNEXPECTED_MESSAGE: u8 = 10;
pub(super) const BAD_RECORD_MAC: u8 = 20;
pub(super) const RECORD_OVERFLOW: u8 = 22;
pub(super) const INTERNAL_ERROR: u8 = 80;

/// The two bytes of an alert.
pub(super) fn encode(alert: u8) -> [u8; 2] {
    let (warning, fatal) = (1, 2);
    [if alert == CLOSE_NOTIFY { warning } else { fatal }, alert]
}

/// The error for an alert of the peer.
pub(super) fn received(alert: u8) -> io::Error {
    match about_certificate(AlertDescription::from(alert)) {
        Some(reason) => io::Error::other(Refused(reason.to_owned())),
        None => io::Error::other(format!("it ended TLS: {:?}", AlertDescription::from(alert))),
    }
}

/// What the peer says of the certificate of this side, if the alert is about it.
pub(super) fn about_certificate(alert: AlertDescription) -> Option<&'static str> {
    Some(match alert {
        AlertDescription::CertificateRequired => {
            "it requires a certificate, and this side presented none"
        }
        AlertDescription::CertificateExpired => "the certificate of this side has expired there",
        AlertDescription::UnknownCA => {
            "the certificate of this side is of an authority that it does not know"
        }
        AlertDescription::CertificateRevoked => "the certificate of this side is revoked",
        AlertDescription::BadCertificate
        | AlertDescription::UnsupportedCertificate
        | AlertDescription::CertificateUnknown
        | AlertDescription::AccessDenied
        | AlertDescription::DecryptError => "it does not accept the certificate of this side",
        _ => return None,
    })
}
