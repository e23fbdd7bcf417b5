//! The address of a peer, `HOST:PORT`, and what its name stands for.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::sync::{Arc, PoisonError};

use cascade_runtime::thread::Builder;
use cascade_runtime::{Condvar, Deadline, Mutex, SystemClock};

use crate::TransportError;
use crate::stream::refused;

/// Where a peer listens.
#[derive(Debug, Clone)]
pub(crate) struct PeerAddress {
    /// `HOST:PORT`, for errors.
    pub(crate) text: String,
    /// The addresses of its host, in the order in which they are tried.
    pub(crate) sockets: Vec<SocketAddr>,
}

impl PeerAddress {
    /// Looks up the host's name, if it has one.
    pub(crate) fn look_up(text: String, deadline: Deadline) -> Result<Self, TransportError> {
        Self::look_up_by(text, deadline, |text| text.to_socket_addrs().map(Iterator::collect))
    }

    fn look_up_by(
        text: String,
        deadline: Deadline,
        look_up: fn(&str) -> io::Result<Vec<SocketAddr>>,
    ) -> Result<Self, TransportError> {
        if let Ok(socket) = text.parse() {
            return Ok(Self { text, sockets: vec![socket] });
        }
        let port = text.rsplit_once(':').map(|(_, port)| port.parse::<u16>());
        if !matches!(port, Some(Ok(1..))) {
            return Err(TransportError::Address { address: text });
        }
        // The system's call has no deadline of its own. A thread that is too late ends with it.
        let answer = Arc::new(Answer::default());
        let (of_thread, name) = (Arc::clone(&answer), text.clone());
        let builder = Builder::new().name("transport-name".to_owned());
        let started = builder.spawn(move || of_thread.give(look_up(&name)));
        started.map_err(|error| refused(&text, error))?;
        let late = TransportError::Deadline { what: "looking up the peer's name" };
        let found = answer.take(deadline).ok_or(late)?;
        let sockets = found.map_err(|error| refused(&text, error))?;
        if sockets.is_empty() {
            let source = Arc::new(io::Error::other("the name has no address"));
            return Err(TransportError::Connect { peer: text, source });
        }
        Ok(Self { text, sockets })
    }
}

/// What a name stands for, once that is known.
#[derive(Debug, Default)]
struct Answer {
    found: Mutex<Option<io::Result<Vec<SocketAddr>>>>,
    is_known: Condvar,
}

impl Answer {
    fn give(&self, found: io::Result<Vec<SocketAddr>>) {
        *self.found.lock().unwrap_or_else(PoisonError::into_inner) = Some(found);
        self.is_known.notify_one();
    }

    fn take(&self, deadline: Deadline) -> Option<io::Result<Vec<SocketAddr>>> {
        let found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        let left = deadline.remaining(&SystemClock);
        let waited = self.is_known.wait_timeout_while(found, left, |found| found.is_none());
        waited.unwrap_or_else(PoisonError::into_inner).0.take()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use cascade_runtime::sleep;

    use super::*;

    fn soon() -> Deadline {
        Deadline::after(&SystemClock, Duration::from_secs(20))
    }

    #[test]
    fn a_number_is_not_looked_up() {
        let never = |_: &str| panic!("there is no name");
        for text in ["127.0.0.1:80", "[::1]:80"] {
            let address = PeerAddress::look_up_by(text.to_owned(), soon(), never).unwrap();
            assert_eq!(address.sockets, [text.parse().unwrap()]);
        }
    }

    #[test]
    fn an_address_without_a_port_is_an_error_that_shows_the_form() {
        for text in ["", "host", "127.0.0.1", "host:", "host:http", "host:0", "host:65536"] {
            let error = PeerAddress::look_up(text.to_owned(), soon()).unwrap_err();
            assert!(matches!(error, TransportError::Address { .. }), "{error}");
            assert!(error.to_string().contains("HOST:PORT"), "{error}");
        }
    }

    #[test]
    fn a_name_that_is_not_found_in_time_is_an_error() {
        let slow = |_: &str| {
            sleep(Duration::from_secs(3600));
            Ok(vec![])
        };
        let short = Deadline::after(&SystemClock, Duration::from_millis(50));
        let error = PeerAddress::look_up_by("host:80".to_owned(), short, slow).unwrap_err();
        assert!(matches!(error, TransportError::Deadline { .. }), "{error}");
    }

    #[test]
    fn names_are_looked_up_and_their_errors_name_the_address() {
        let address = PeerAddress::look_up("localhost:80".to_owned(), soon()).unwrap();
        assert!(address.sockets.iter().all(|it| it.ip().is_loopback() && it.port() == 80));
        let none = |_: &str| Ok(vec![]);
        let error = PeerAddress::look_up_by("host:80".to_owned(), soon(), none).unwrap_err();
        assert!(error.to_string().contains("host:80"), "{error}");
    }
}
