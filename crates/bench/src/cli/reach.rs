//! Reaching a running node: the socket that a command is given, and the question it asks there.

use std::path::{Path, PathBuf};
use std::time::Duration;

use cascade_client::{Access, Administrator, AskError, Client, ConnectOptions};
use cascade_node::config::Environment;
use cascade_store::{Readers, StoreError, read_secret};
use clap::Args;
use serde::de::DeserializeOwned;

use crate::cli::{Failure, parse_time};

/// What the node's status shows for this program.
const NAME: &str = "cascade (command line)";
/// Longest file with a token.
const TOKEN_BYTES_MAX: u64 = 4096;
const NO_NODE: &str = "start a node with `cascade serve`, or say where it is with --socket";

/// Which node.
#[derive(Debug, Clone, Args)]
pub(super) struct Reach {
    /// The node's Unix socket [default: the one of `CASCADE_NODE`, else the one that
    /// `cascade serve` would choose].
    #[arg(long, value_name = "PATH", help_heading = "Node")]
    socket: Option<PathBuf>,
    /// How long to wait for its answer.
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = parse_time)]
    #[arg(help_heading = "Node")]
    pub(super) timeout: Duration,
    /// A file with a tenant's token: ask as that tenant.
    #[arg(long, value_name = "PATH", help_heading = "Node")]
    token_file: Option<PathBuf>,
}

/// A connection for asking.
#[derive(Debug)]
pub(super) struct Asker {
    administrator: Administrator,
    timeout: Duration,
}

impl Reach {
    /// Where the node should be.
    pub(super) fn socket(&self) -> PathBuf {
        let given = self.socket.clone();
        given.unwrap_or_else(|| Environment::of_process().socket())
    }

    fn token(&self) -> Result<Option<Vec<u8>>, Failure> {
        let Some(path) = &self.token_file else { return Ok(None) };
        let token = read_secret(path, TOKEN_BYTES_MAX, Readers::Group);
        let mut token = token.map_err(|source| Failure::Read {
            path: path.clone(),
            advice: "give a file with a tenant's token, which nobody else can read".to_owned(),
            source: Box::new(source),
        })?;
        token.truncate(token.trim_ascii_end().len());
        Ok(Some(token))
    }

    /// Connects for questions and orders.
    pub(super) fn connect(&self) -> Result<Asker, Failure> {
        let timeout = self.timeout;
        let administrator = Administrator::connect(self.socket(), self.token()?, NAME, timeout);
        Ok(Asker { administrator: administrator.map_err(unanswered)?, timeout })
    }

    /// Connects as a worker does, to read and write blocks.
    pub(super) fn connect_as_worker(&self, access: Access) -> Result<Client, Failure> {
        let mut options = ConnectOptions::new(self.socket());
        options.access = access;
        options.token = self.token()?;
        NAME.clone_into(&mut options.name);
        options.timeout = self.timeout;
        Client::connect(options).map_err(|error| no_worker(&error))
    }
}

impl Asker {
    /// A question in words, its arguments and its answer in JSON.
    pub(super) fn ask<T: DeserializeOwned>(
        &self,
        topic: &str,
        arguments: &serde_json::Value,
    ) -> Result<T, Failure> {
        let answer = self.administrator.ask(topic, &arguments.to_string(), self.timeout);
        let text = answer.map_err(unanswered)?;
        serde_json::from_str(&text).map_err(|source| Failure::Read {
            path: self.administrator.socket().to_owned(),
            advice: "the node speaks of things that this command does not know; use the command \
                     of the node's version"
                .to_owned(),
            source: Box::new(source),
        })
    }

    /// Whether the node answers at all.
    pub(super) fn ping(&self) -> Result<(), Failure> {
        self.administrator.ping(self.timeout).map_err(unanswered)
    }

    /// Where the node is.
    pub(super) fn socket(&self) -> &Path {
        self.administrator.socket()
    }
}

fn unanswered(error: AskError) -> Failure {
    let what = error.to_string();
    let advice = match error {
        AskError::Declined { reason } => return Failure::Declined(reason),
        AskError::Away { .. } => NO_NODE,
        AskError::Refused { .. } => {
            "`sudo cascade ...` works, whichever user the node runs as; a tenant may give its \
             token with --token-file"
        }
        _ => "look at the node's process and log, or wait longer with --timeout",
    };
    Failure::Unreachable { what, advice: advice.to_owned() }
}

fn no_worker(error: &StoreError) -> Failure {
    let advice = match error {
        // A worker's client says the same of a node that is stopped.
        StoreError::Away { .. } => NO_NODE,
        StoreError::Refused { .. } => {
            "blocks are for users of their tenant; one who is none can give its token with \
             --token-file"
        }
        _ => "try again with a longer --timeout",
    };
    Failure::Unreachable { what: cascade_block::with_causes(error), advice: advice.to_owned() }
}
