//! An administrator's connection: questions and orders in words, without pool or threads.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use cascade_block::{Deadline, SystemClock};
use cascade_wire::{Access, Answer, Call, Hello, VERSION, VERSION_MIN};
use thiserror::Error;

use crate::client::node_time;
use crate::line::{Line, LineError};

/// Why an administrator has no answer, by what can be done about it.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum AskError {
    /// Nothing serves there.
    #[error("no node answers at {}: {reason}", socket.display())]
    Away {
        /// Where.
        socket: PathBuf,
        /// What was seen.
        reason: String,
    },
    /// Something is there, but did not answer in time.
    #[error(
        "the node at {} did not answer within {} s; is it stopped?",
        socket.display(),
        timeout.as_secs_f64()
    )]
    Late {
        /// Where.
        socket: PathBuf,
        /// How long it was given.
        timeout: Duration,
    },
    /// The node does not take this user for an administrator or a tenant.
    #[error("the node at {} refuses this user: {reason}", socket.display())]
    Refused {
        /// Where.
        socket: PathBuf,
        /// Why, in the node's words.
        reason: String,
    },
    /// The node understood, and does not do it.
    #[error("{reason}")]
    Declined {
        /// Why, in the node's words.
        reason: String,
    },
}

/// A connection for asking a node and for giving it orders. It connects again after a failure.
#[derive(Debug)]
pub struct Administrator {
    socket: PathBuf,
    token: Option<Vec<u8>>,
    name: String,
    line: Mutex<Option<Line>>,
}

impl Administrator {
    /// Connects to the node at a socket within a time, under a name that its status shows.
    ///
    /// # Errors
    /// Why there is no connection.
    pub fn connect(
        socket: impl Into<PathBuf>,
        token: Option<Vec<u8>>,
        name: &str,
        timeout: Duration,
    ) -> Result<Self, AskError> {
        let (socket, name) = (socket.into(), name.to_owned());
        let new = Self { socket, token, name, line: Mutex::new(None) };
        let line = new.open(Deadline::after(&SystemClock, timeout), timeout)?;
        *new.line.lock().unwrap_or_else(PoisonError::into_inner) = Some(line);
        Ok(new)
    }

    /// The socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Whether the node answers.
    ///
    /// # Errors
    /// Why it does not.
    pub fn ping(&self, timeout: Duration) -> Result<(), AskError> {
        match self.call(timeout, |_| Call::Ping)? {
            Answer::Done => Ok(()),
            other => Err(self.unexpected(&other)),
        }
    }

    /// A question or an order: a topic, and arguments in JSON. The answer is JSON.
    ///
    /// # Errors
    /// Why there is no answer.
    pub fn ask(&self, topic: &str, arguments: &str, timeout: Duration) -> Result<String, AskError> {
        let call = |timeout_ms| Call::Admin {
            timeout_ms,
            topic: topic.to_owned(),
            arguments: arguments.to_owned(),
        };
        match self.call(timeout, call)? {
            Answer::Text(text) => Ok(text),
            Answer::Refused { reason } => Err(AskError::Declined { reason }),
            Answer::Failed(error) => {
                Err(AskError::Declined { reason: cascade_block::with_causes(&error) })
            }
            other => Err(self.unexpected(&other)),
        }
    }

    fn call(&self, timeout: Duration, call: impl Fn(u32) -> Call) -> Result<Answer, AskError> {
        let deadline = Deadline::after(&SystemClock, timeout);
        let mut kept = self.line.lock().unwrap_or_else(PoisonError::into_inner);
        // A line that failed is out of step; it is closed and the next call opens another.
        let mut line = match kept.take() {
            Some(line) => line,
            None => self.open(deadline, timeout)?,
        };
        let left = deadline.remaining(&SystemClock);
        let answer = line.ask(&[], &call(node_time(left)), deadline);
        let answer = answer.map_err(|error| self.failure(error, timeout))?;
        *kept = Some(line);
        Ok(answer)
    }

    fn open(&self, deadline: Deadline, timeout: Duration) -> Result<Line, AskError> {
        let failed = |error| self.failure(error, timeout);
        let mut line = Line::connect(&self.socket, deadline).map_err(failed)?;
        let hello = Call::Hello(Hello {
            version_min: VERSION_MIN,
            version_max: VERSION,
            access: Access::Administer,
            session: None,
            token: self.token.clone(),
            name: self.name.clone(),
        });
        match line.greet(&hello, deadline).map_err(failed)?.0 {
            Answer::Welcome(_) => Ok(line),
            Answer::Refused { reason } => {
                Err(AskError::Refused { socket: self.socket.clone(), reason })
            }
            other => Err(self.unexpected(&other)),
        }
    }

    fn failure(&self, error: LineError, timeout: Duration) -> AskError {
        let socket = self.socket.clone();
        match error {
            LineError::Late | LineError::NoTime | LineError::Stuck => {
                AskError::Late { socket, timeout }
            }
            LineError::TooLong(reason) => AskError::Declined { reason },
            LineError::Broken(reason) => AskError::Away { socket, reason },
        }
    }

    fn unexpected(&self, answer: &Answer) -> AskError {
        let reason = format!("it answers something else than was asked: {answer:?}");
        AskError::Away { socket: self.socket.clone(), reason }
    }
}
