//! Access control of HTTP: by token, by the peer of a Unix socket, and by the `Host` header.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use axum::http::header::{AUTHORIZATION, HOST};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use rustls::ServerConfig;

use crate::http::security::{Secrets, token_hash};
use crate::status::StatusView;

/// Size limit of an `Authorization` header.
const AUTHORIZATION_BYTES_MAX: usize = 4096;

/// The origin of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Caller {
    /// TCP, without a known user.
    Tcp {
        /// Whether the client presented a certificate of `tls_client_ca` in the TLS handshake.
        has_certificate: bool,
    },
    /// The Unix socket, with the peer that the kernel reports.
    Unix {
        /// UID of the peer.
        user: u32,
        /// GID of the peer.
        group: u32,
    },
}

/// The access rules of a port.
pub(super) struct HttpAccess {
    address: SocketAddr,
    secrets: Secrets,
}

impl fmt::Debug for HttpAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpAccess").field("address", &self.address).finish_non_exhaustive()
    }
}

impl HttpAccess {
    pub(super) fn new(address: SocketAddr, secrets: Secrets) -> Self {
        Self { address, secrets }
    }

    pub(super) fn tls(&self) -> Option<Arc<ServerConfig>> {
        self.secrets.tls.clone()
    }

    /// The part of the status that a request may see, or the code of the refusal.
    ///
    /// 1. A token decides, also on the Unix socket. A wrong token is refused, not ignored. So are
    ///    two tokens: a proxy in front of this port may have checked the other one.
    /// 2. On the Unix socket without a token, the peer's user and group decide.
    /// 3. On the TCP port, a token or client certificate is required if one is configured. A
    ///    connection from before a reload that turned on mutual TLS has no certificate.
    /// 4. A port with neither is on loopback, where every local program can connect: it gets
    ///    totals. A browser is such a program, and a web page can make it send requests here under
    ///    the page's own name (DNS rebinding). Such a `Host` is refused.
    pub(super) fn check(
        &self,
        caller: Caller,
        headers: &HeaderMap,
        view_of_token: impl FnOnce(&[u8]) -> Option<StatusView>,
        view_of_peer: impl FnOnce(u32, u32) -> StatusView,
    ) -> Result<StatusView, StatusCode> {
        let mut credentials = headers.get_all(AUTHORIZATION).iter();
        if let Some(first) = credentials.next() {
            let only = credentials.next().is_none().then_some(first.as_bytes());
            let token = only.and_then(token_of).ok_or(StatusCode::UNAUTHORIZED)?;
            // Hashes are compared, since all of them have the same length.
            let is_node_token =
                self.secrets.token.is_some_and(|own| is_equal(&token_hash(&token), &own));
            let view = if is_node_token { Some(StatusView::All) } else { view_of_token(&token) };
            return view.ok_or(StatusCode::UNAUTHORIZED);
        }
        // The kernel reports these credentials; no header can change them. So the `Host` header is
        // not checked here.
        let has_certificate = match caller {
            Caller::Unix { user, group } => return Ok(view_of_peer(user, group)),
            Caller::Tcp { has_certificate } => has_certificate,
        };
        if self.secrets.token.is_some() {
            return Err(StatusCode::UNAUTHORIZED);
        }
        if self.secrets.is_mutual {
            return if has_certificate {
                Ok(StatusView::All)
            } else {
                Err(StatusCode::UNAUTHORIZED)
            };
        }
        // Without a `Host` header the client is no browser.
        let is_own = |host: &HeaderValue| host.to_str().is_ok_and(|host| self.is_own_host(host));
        if headers.get_all(HOST).iter().all(is_own) {
            Ok(StatusView::Totals)
        } else {
            Err(StatusCode::MISDIRECTED_REQUEST)
        }
    }

    /// Whether a `Host` header names this port: `localhost`, a loopback address or its own address.
    fn is_own_host(&self, host: &str) -> bool {
        // The last colon separates the port, if only digits follow. In an IPv6 address it does not:
        // the address ends with a bracket.
        let name = match host.rsplit_once(':') {
            Some((name, port)) if port.bytes().all(|digit| digit.is_ascii_digit()) => name,
            _ => host,
        };
        let name = name.trim_start_matches('[').trim_end_matches(']');
        let is_address = |ip: IpAddr| ip.is_loopback() || ip == self.address.ip();
        name.eq_ignore_ascii_case("localhost") || name.parse().is_ok_and(is_address)
    }
}

/// The token of `Bearer TOKEN`, or the password of `Basic`, which browsers can prompt for.
fn token_of(authorization: &[u8]) -> Option<Vec<u8>> {
    if authorization.len() > AUTHORIZATION_BYTES_MAX {
        return None;
    }
    let at = authorization.iter().position(|byte| *byte == b' ')?;
    let (scheme, rest) = (&authorization[..at], authorization[at..].trim_ascii());
    if scheme.eq_ignore_ascii_case(b"bearer") {
        return Some(rest.to_vec());
    }
    if scheme.eq_ignore_ascii_case(b"basic") {
        let pair = base64(rest)?;
        let colon = pair.iter().position(|byte| *byte == b':')?;
        return Some(pair[colon + 1..].to_vec());
    }
    None
}

/// Compares in constant time, so that the duration does not reveal a matching prefix.
fn is_equal(one: &[u8; 32], other: &[u8; 32]) -> bool {
    one.iter().zip(other).fold(0, |differing, (a, b)| differing | (a ^ b)) == 0
}

/// Decodes base64 with or without padding.
fn base64(text: &[u8]) -> Option<Vec<u8>> {
    let end = text.iter().rposition(|digit| *digit != b'=').map_or(0, |at| at + 1);
    let (mut bits, mut bit_count) = (0u32, 0);
    let mut bytes = Vec::with_capacity(end * 3 / 4);
    for digit in &text[..end] {
        let value = match digit {
            b'A'..=b'Z' => digit - b'A',
            b'a'..=b'z' => digit - b'a' + 26,
            b'0'..=b'9' => digit - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        // Older bits leave at the top: at most 13 of them are still needed.
        bits = (bits << 6) | u32::from(value);
        bit_count += 6;
        if bit_count >= 8 {
            bit_count -= 8;
            bytes.push(((bits >> bit_count) & 0xff) as u8);
        }
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Caller = Caller::Tcp { has_certificate: false };

    fn access(token: Option<&str>) -> HttpAccess {
        let token = token.map(|token| token_hash(token.as_bytes()));
        access_with(Secrets { token, tls: None, is_mutual: false })
    }

    fn access_with(secrets: Secrets) -> HttpAccess {
        HttpAccess::new("127.0.0.1:8080".parse().unwrap(), secrets)
    }

    fn headers(name: axum::http::HeaderName, value: &str) -> HeaderMap {
        HeaderMap::from_iter([(name, value.parse().unwrap())])
    }

    /// Checks a request over TCP, with one tenant that has a token.
    fn check(access: &HttpAccess, headers: &HeaderMap) -> Result<StatusView, StatusCode> {
        let view_of_token = |token: &[u8]| {
            (token == b"a-token-of-bob's").then(|| StatusView::Tenant("bob".to_owned()))
        };
        access.check(PLAIN, headers, view_of_token, |_, _| panic!("TCP has no peer user"))
    }

    /// Headers with the same name and these values, in this order.
    fn repeated(name: &axum::http::HeaderName, values: [&str; 2]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(name.clone(), value.parse().unwrap());
        }
        headers
    }

    #[test]
    fn a_token_is_accepted_as_bearer_or_as_a_password() {
        let access = access(Some("a-token-of-our-own"));
        for accepted in [
            "Bearer a-token-of-our-own",
            "bearer  a-token-of-our-own",
            "Basic YTphLXRva2VuLW9mLW91ci1vd24=",
            "Basic YTphLXRva2VuLW9mLW91ci1vd24",
        ] {
            let view = check(&access, &headers(AUTHORIZATION, accepted));
            assert_eq!(view, Ok(StatusView::All), "{accepted}");
        }
        let of_tenant = check(&access, &headers(AUTHORIZATION, "Bearer a-token-of-bob's"));
        assert_eq!(of_tenant, Ok(StatusView::Tenant("bob".to_owned())));
        for wrong in [
            "",
            "Bearer",
            "Bearer ",
            "Bearer a-token-of-our-ow",
            "Bearer a-token-of-our-own2",
            "Token a-token-of-our-own",
            "Basic YTph",
            "Basic !!!!",
            "a-token-of-our-own",
        ] {
            let refused = check(&access, &headers(AUTHORIZATION, wrong));
            assert_eq!(refused, Err(StatusCode::UNAUTHORIZED), "{wrong:?}");
        }
        assert_eq!(check(&access, &HeaderMap::new()), Err(StatusCode::UNAUTHORIZED));
        // Only the first token was checked, so a wrong one after it was ignored.
        let [right, wrong] = ["Bearer a-token-of-our-own", "Bearer a-token-of-nobody"];
        for two in [[right, wrong], [wrong, right], [right, right]] {
            let refused = check(&access, &repeated(&AUTHORIZATION, two));
            assert_eq!(refused, Err(StatusCode::UNAUTHORIZED), "{two:?}");
        }
    }

    /// A connection that was open before a reload turned on mutual TLS saw everything.
    #[test]
    fn with_mutual_tls_a_connection_without_a_certificate_is_refused() {
        let access = access_with(Secrets { token: None, tls: None, is_mutual: true });
        let check = |has_certificate| {
            let caller = Caller::Tcp { has_certificate };
            access.check(caller, &headers(HOST, "localhost"), |_| None, |_, _| StatusView::All)
        };
        assert_eq!(check(true), Ok(StatusView::All));
        assert_eq!(check(false), Err(StatusCode::UNAUTHORIZED));
    }

    #[test]
    fn a_request_for_another_host_is_refused() {
        let access = access(None);
        for own in ["127.0.0.1:8080", "localhost:9", "LocalHost", "[::1]:80", "127.0.0.1"] {
            assert_eq!(check(&access, &headers(HOST, own)), Ok(StatusView::Totals), "{own}");
        }
        for other in ["evil.example", "evil.example:8080", "192.0.2.1", "localhost.evil.example"] {
            let refused = check(&access, &headers(HOST, other));
            assert_eq!(refused, Err(StatusCode::MISDIRECTED_REQUEST), "{other}");
        }
        for two in [["localhost", "evil.example"], ["evil.example", "localhost"]] {
            let refused = check(&access, &repeated(&HOST, two));
            assert_eq!(refused, Err(StatusCode::MISDIRECTED_REQUEST), "{two:?}");
        }
        let without_host = check(&access, &HeaderMap::new());
        assert_eq!(without_host, Ok(StatusView::Totals), "browsers always send a Host header");
    }

    #[test]
    fn on_the_unix_socket_the_peer_decides_if_there_is_no_token() {
        for access in [access(None), access(Some("a-token-of-our-own"))] {
            let check = |headers: &HeaderMap| {
                let view_of_peer = |user, group| StatusView::Tenant(format!("{user} in {group}"));
                let caller = Caller::Unix { user: 7, group: 8 };
                access.check(caller, headers, |_| None, view_of_peer)
            };
            assert_eq!(check(&HeaderMap::new()), Ok(StatusView::Tenant("7 in 8".to_owned())));
            assert_eq!(check(&headers(AUTHORIZATION, "Bearer x")), Err(StatusCode::UNAUTHORIZED));
        }
    }

    #[test]
    fn base64_is_decoded_with_and_without_padding() {
        for (text, bytes) in [("", ""), ("Zg==", "f"), ("Zm8", "fo"), ("Zm9vYmFy", "foobar")] {
            assert_eq!(base64(text.as_bytes()).unwrap(), bytes.as_bytes());
        }
        assert_eq!(base64(b"Zm9v-mFy"), None);
    }
}
