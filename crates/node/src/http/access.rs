//! Who may see what: a token, the user at the other end of a Unix socket, and the name that a
//! browser believes to talk to.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use axum::http::header::{AUTHORIZATION, HOST};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use rustls::ServerConfig;

use crate::http::security::{Secrets, token_hash};
use crate::status::View;

/// No credentials are longer.
const AUTHORIZATION_BYTES_MAX: usize = 4096;

/// Where a request came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Caller {
    /// Over TCP: anybody who reaches the port.
    Tcp,
    /// Over the Unix socket: the kernel says which user.
    Unix {
        /// Its number.
        user: u32,
    },
}

/// What a caller has to show.
pub(super) struct Access {
    address: SocketAddr,
    secrets: Secrets,
}

impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Access").field("address", &self.address).finish_non_exhaustive()
    }
}

impl Access {
    pub(super) fn new(address: SocketAddr, secrets: Secrets) -> Self {
        Self { address, secrets }
    }

    pub(super) fn tls(&self) -> Option<Arc<ServerConfig>> {
        self.secrets.tls.clone()
    }

    /// How much of the node a request may see.
    ///
    /// A token says more than where the request came from, and a wrong one is never overlooked.
    /// Without one the kernel says who a user of the Unix socket is. The port without a token and
    /// without client certificates is on loopback, where every local program may ask: it gets
    /// totals. A browser is such a program and does what strange pages tell it: one that was led
    /// here under another name (DNS rebinding) is refused by that name.
    pub(super) fn check(
        &self,
        caller: Caller,
        headers: &HeaderMap,
        of_token: impl FnOnce(&[u8]) -> Option<View>,
        of_user: impl FnOnce(u32) -> View,
    ) -> Result<View, StatusCode> {
        if let Some(shown) = headers.get(AUTHORIZATION).map(HeaderValue::as_bytes) {
            let token = token_of(shown).ok_or(StatusCode::UNAUTHORIZED)?;
            let is_ours =
                self.secrets.token.is_some_and(|ours| is_equal(&token_hash(&token), &ours));
            let view = if is_ours { Some(View::All) } else { of_token(&token) };
            return view.ok_or(StatusCode::UNAUTHORIZED);
        }
        if let Caller::Unix { user } = caller {
            return Ok(of_user(user));
        }
        if self.secrets.token.is_some() {
            return Err(StatusCode::UNAUTHORIZED);
        }
        if self.secrets.is_mutual {
            return Ok(View::All);
        }
        match headers.get(HOST).map(|host| host.to_str()) {
            None => Ok(View::Totals),
            Some(Ok(host)) if self.is_our_name(host) => Ok(View::Totals),
            Some(_) => Err(StatusCode::MISDIRECTED_REQUEST),
        }
    }

    fn is_our_name(&self, host: &str) -> bool {
        let name = match host.rsplit_once(':') {
            Some((name, port)) if port.bytes().all(|digit| digit.is_ascii_digit()) => name,
            _ => host,
        };
        let name = name.trim_start_matches('[').trim_end_matches(']');
        let is_address = |ip: IpAddr| ip.is_loopback() || ip == self.address.ip();
        name.eq_ignore_ascii_case("localhost") || name.parse().is_ok_and(is_address)
    }
}

/// The token in `Bearer TOKEN`, or in the password of `Basic`, which browsers ask for.
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

/// Compares all bytes whatever they are.
fn is_equal(one: &[u8; 32], other: &[u8; 32]) -> bool {
    one.iter().zip(other).fold(0, |differing, (a, b)| differing | (a ^ b)) == 0
}

/// Decodes base64 with or without padding.
fn base64(text: &[u8]) -> Option<Vec<u8>> {
    let end = text.iter().rposition(|digit| *digit != b'=').map_or(0, |at| at + 1);
    let (mut bits, mut held) = (0u32, 0);
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
        bits = (bits << 6) | u32::from(value);
        held += 6;
        if held >= 8 {
            held -= 8;
            bytes.push(((bits >> held) & 0xff) as u8);
        }
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access(token: Option<&str>) -> Access {
        let token = token.map(|token| token_hash(token.as_bytes()));
        let secrets = Secrets { token, tls: None, is_mutual: false };
        Access::new("127.0.0.1:8080".parse().unwrap(), secrets)
    }

    fn headers(name: axum::http::HeaderName, value: &str) -> HeaderMap {
        HeaderMap::from_iter([(name, value.parse().unwrap())])
    }

    /// Over TCP, with one tenant that has a token.
    fn check(access: &Access, headers: &HeaderMap) -> Result<View, StatusCode> {
        let of_token =
            |token: &[u8]| (token == b"a-token-of-bob's").then(|| View::Tenant("bob".to_owned()));
        access.check(Caller::Tcp, headers, of_token, |_| panic!("no user is known over TCP"))
    }

    #[test]
    fn a_token_is_taken_as_bearer_or_as_a_password() {
        let access = access(Some("a-token-of-our-own"));
        for right in [
            "Bearer a-token-of-our-own",
            "bearer  a-token-of-our-own",
            "Basic YTphLXRva2VuLW9mLW91ci1vd24=",
            "Basic YTphLXRva2VuLW9mLW91ci1vd24",
        ] {
            assert_eq!(check(&access, &headers(AUTHORIZATION, right)), Ok(View::All), "{right}");
        }
        let of_tenant = check(&access, &headers(AUTHORIZATION, "Bearer a-token-of-bob's"));
        assert_eq!(of_tenant, Ok(View::Tenant("bob".to_owned())));
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
    }

    #[test]
    fn a_browser_that_was_led_here_under_another_name_is_refused() {
        let access = access(None);
        for ours in ["127.0.0.1:8080", "localhost:9", "LocalHost", "[::1]:80", "127.0.0.1"] {
            assert_eq!(check(&access, &headers(HOST, ours)), Ok(View::Totals), "{ours}");
        }
        for other in ["evil.example", "evil.example:8080", "192.0.2.1", "localhost.evil.example"] {
            let refused = check(&access, &headers(HOST, other));
            assert_eq!(refused, Err(StatusCode::MISDIRECTED_REQUEST), "{other}");
        }
        let nameless = check(&access, &HeaderMap::new());
        assert_eq!(nameless, Ok(View::Totals), "no browser leaves it out");
    }

    #[test]
    fn over_the_unix_socket_the_user_decides_unless_a_token_does() {
        for access in [access(None), access(Some("a-token-of-our-own"))] {
            let ask = |headers: &HeaderMap| {
                let of_user = |user| View::Tenant(format!("user {user}"));
                access.check(Caller::Unix { user: 7 }, headers, |_| None, of_user)
            };
            assert_eq!(ask(&HeaderMap::new()), Ok(View::Tenant("user 7".to_owned())));
            assert_eq!(ask(&headers(AUTHORIZATION, "Bearer x")), Err(StatusCode::UNAUTHORIZED));
        }
    }

    #[test]
    fn base64_is_read_as_others_write_it() {
        for (text, bytes) in [("", ""), ("Zg==", "f"), ("Zm8", "fo"), ("Zm9vYmFy", "foobar")] {
            assert_eq!(base64(text.as_bytes()).unwrap(), bytes.as_bytes());
        }
        assert_eq!(base64(b"Zm9v-mFy"), None);
    }
}
