//! An administrator's connection: requests by topic with JSON arguments, without pool or threads.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cascade_runtime::{Deadline, SystemClock};
use cascade_wire::{Access, Answer, Call, Hello, VERSION, VERSION_MIN};
use thiserror::Error;

use crate::client::node_timeout_ms;
use crate::connection::{Connection, ConnectionError};

/// Why an administrator's request failed, by what can be done about it.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum AdminError {
    /// No node serves at the socket.
    #[error("no node answers at {}: {reason}", socket.display())]
    Unavailable {
        /// The socket.
        socket: PathBuf,
        /// What failed.
        reason: String,
    },
    /// The node did not answer in time.
    #[error(
        "the node at {} did not answer within {} s; check whether it is stopped",
        socket.display(),
        timeout.as_secs_f64()
    )]
    Timeout {
        /// The socket.
        socket: PathBuf,
        /// The request's timeout.
        timeout: Duration,
    },
    /// This user is neither an administrator nor a tenant of the node.
    #[error("the node at {} refuses this user: {reason}", socket.display())]
    Refused {
        /// The socket.
        socket: PathBuf,
        /// The node's reason.
        reason: String,
    },
    /// The node understood the request and declined it.
    #[error("{reason}")]
    Declined {
        /// The node's reason.
        reason: String,
    },
}

/// A connection for administrative requests. It reconnects after a failure.
#[derive(Debug)]
pub struct Administrator {
    socket: PathBuf,
    token: Option<Vec<u8>>,
    name: String,
    /// The connection between two calls; none after a failure.
    idle: Mutex<Option<Connection>>,
}

impl Administrator {
    /// Connects to the node at a socket. The node's status shows `name`.
    ///
    /// # Errors
    /// If there is no connection within the timeout.
    pub fn connect(
        socket: impl Into<PathBuf>,
        token: Option<Vec<u8>>,
        name: &str,
        timeout: Duration,
    ) -> Result<Self, AdminError> {
        let (socket, name) = (socket.into(), name.to_owned());
        let new = Self { socket, token, name, idle: Mutex::new(None) };
        let connection = new.open(Deadline::after(&SystemClock, timeout), timeout)?;
        *new.idle() = Some(connection);
        Ok(new)
    }

    /// The socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Checks that the node answers.
    ///
    /// # Errors
    /// If it does not answer within the timeout.
    pub fn ping(&self, timeout: Duration) -> Result<(), AdminError> {
        match self.call(timeout, |_| Call::Ping)? {
            Answer::Done => Ok(()),
            other => Err(self.unexpected(&other)),
        }
    }

    /// Sends a request with a topic and JSON arguments. Returns the answer's JSON.
    ///
    /// # Errors
    /// If there is no answer, or if the node declines the request.
    pub fn request(
        &self,
        topic: &str,
        arguments: &str,
        timeout: Duration,
    ) -> Result<String, AdminError> {
        let call = |timeout_ms| Call::Admin {
            timeout_ms,
            topic: topic.to_owned(),
            arguments: arguments.to_owned(),
        };
        match self.call(timeout, call)? {
            Answer::Text(text) => Ok(text),
            Answer::Refused { reason } => Err(AdminError::Declined { reason }),
            Answer::Failed(error) => {
                Err(AdminError::Declined { reason: cascade_block::with_causes(&error) })
            }
            other => Err(self.unexpected(&other)),
        }
    }

    fn call(&self, timeout: Duration, call: impl Fn(u32) -> Call) -> Result<Answer, AdminError> {
        let deadline = Deadline::after(&SystemClock, timeout);
        // Taken out of the lock: another call does not wait for this one, it opens a connection. A
        // restarted node has closed the idle connection.
        let idle = self.idle().take().filter(|connection| !connection.is_closed());
        let mut connection = match idle {
            Some(connection) => connection,
            None => self.open(deadline, timeout)?,
        };
        // After opening, which may have used a part of the time.
        let left = deadline.remaining(&SystemClock);
        let answer = connection.call(&[], &call(node_timeout_ms(left)), deadline);
        let answer = answer.map_err(|error| self.failure(error, timeout))?;
        // Kept only after a complete answer: a late answer may still arrive on a failed connection.
        *self.idle() = Some(connection);
        Ok(answer)
    }

    fn idle(&self) -> MutexGuard<'_, Option<Connection>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn open(&self, deadline: Deadline, timeout: Duration) -> Result<Connection, AdminError> {
        let failed = |error| self.failure(error, timeout);
        let mut connection = Connection::connect(&self.socket, deadline).map_err(failed)?;
        let hello = Call::Hello(Hello {
            version_min: VERSION_MIN,
            version_max: VERSION,
            access: Access::Administer,
            session: None,
            token: self.token.clone(),
            name: self.name.clone(),
        });
        match connection.handshake(&hello, deadline).map_err(failed)?.0 {
            Answer::Welcome(_) => Ok(connection),
            Answer::Refused { reason } => {
                Err(AdminError::Refused { socket: self.socket.clone(), reason })
            }
            other => Err(self.unexpected(&other)),
        }
    }

    fn failure(&self, error: ConnectionError, timeout: Duration) -> AdminError {
        let socket = self.socket.clone();
        match error {
            ConnectionError::Timeout | ConnectionError::NotSent | ConnectionError::SendBlocked => {
                AdminError::Timeout { socket, timeout }
            }
            ConnectionError::TooLong(reason) => AdminError::Declined { reason },
            ConnectionError::Broken(reason) => AdminError::Unavailable { socket, reason },
        }
    }

    fn unexpected(&self, answer: &Answer) -> AdminError {
        let reason = format!("the node sent an answer of the wrong kind: {answer:?}");
        AdminError::Unavailable { socket: self.socket.clone(), reason }
    }
}
