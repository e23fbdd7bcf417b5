//! The connection of a command to a running node: its flags and its requests.

use std::path::{Path, PathBuf};
use std::time::Duration;

use cascade_client::{Access, AdminError, Administrator, Client, ConnectOptions};
use cascade_node::config::Environment;
use cascade_store::{SecretReaders, StoreError, read_secret};
use clap::Args;
use serde::de::DeserializeOwned;

use crate::{Failure, parse_time};

/// The client name that the node's status shows.
const NAME: &str = "cascade (command line)";
/// Limit of the size of a token file.
const TOKEN_BYTES_MAX: u64 = 4096;
const NO_NODE: &str = "start a node with `cascade serve`, or give its socket with --socket";

/// The flags that select a node.
#[derive(Debug, Clone, Args)]
pub(super) struct ConnectionArgs {
    /// Unix socket of the node [default: the value of `CASCADE_NODE` or `CASCADE_SOCKET`, else the
    /// default of `cascade serve`].
    #[arg(long, value_name = "PATH", help_heading = "Node")]
    socket: Option<PathBuf>,
    /// Time-out of each request.
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = parse_time)]
    #[arg(help_heading = "Node")]
    pub(super) timeout: Duration,
    /// File with the token of a tenant, to act as that tenant.
    #[arg(long, value_name = "PATH", help_heading = "Node")]
    token_file: Option<PathBuf>,
}

/// A connection for administrative requests.
#[derive(Debug)]
pub(super) struct AdminConnection {
    administrator: Administrator,
    timeout: Duration,
}

impl ConnectionArgs {
    /// The node that a process of this host uses without flags.
    pub(super) fn of_process(timeout: Duration) -> Self {
        Self { socket: None, timeout, token_file: None }
    }

    /// The path of the node's socket.
    pub(super) fn socket(&self) -> PathBuf {
        self.socket.clone().unwrap_or_else(|| Environment::of_process().socket())
    }

    /// The same flags for the node at another socket.
    pub(super) fn at(&self, socket: impl Into<PathBuf>) -> Self {
        Self { socket: Some(socket.into()), ..self.clone() }
    }

    fn token(&self) -> Result<Option<Vec<u8>>, Failure> {
        let Some(path) = &self.token_file else { return Ok(None) };
        let token = read_secret(path, TOKEN_BYTES_MAX, SecretReaders::Group);
        let mut token = token.map_err(|source| Failure::Read {
            path: path.clone(),
            advice: "give a file with a tenant's token that other users cannot read".to_owned(),
            source: Box::new(source),
        })?;
        token.truncate(token.trim_ascii_end().len());
        Ok(Some(token))
    }

    /// Connects for administrative requests.
    pub(super) fn connect(&self) -> Result<AdminConnection, Failure> {
        let timeout = self.timeout;
        let administrator = Administrator::connect(self.socket(), self.token()?, NAME, timeout);
        Ok(AdminConnection { administrator: administrator.map_err(request_failure)?, timeout })
    }

    /// Connects as a worker, to read and write blocks.
    pub(super) fn connect_as_worker(&self, access: Access) -> Result<Client, Failure> {
        let mut options = ConnectOptions::new(self.socket());
        options.access = access;
        options.token = self.token()?;
        NAME.clone_into(&mut options.name);
        options.timeout = self.timeout;
        Client::connect(options).map_err(|error| worker_failure(&error))
    }
}

impl AdminConnection {
    /// Sends a request with JSON arguments and parses the JSON answer.
    pub(super) fn request<T: DeserializeOwned>(
        &self,
        topic: &str,
        arguments: &serde_json::Value,
    ) -> Result<T, Failure> {
        let answer = self.administrator.request(topic, &arguments.to_string(), self.timeout);
        let text = answer.map_err(request_failure)?;
        serde_json::from_str(&text).map_err(|source| Failure::Read {
            path: self.administrator.socket().to_owned(),
            advice:
                "this command does not understand the node's answer; use the `cascade` command \
                     of the node's version"
                    .to_owned(),
            source: Box::new(source),
        })
    }

    /// Waits for an empty answer of the node.
    pub(super) fn ping(&self) -> Result<(), Failure> {
        self.administrator.ping(self.timeout).map_err(request_failure)
    }

    /// The path of the node's socket.
    pub(super) fn socket(&self) -> &Path {
        self.administrator.socket()
    }
}

fn request_failure(error: AdminError) -> Failure {
    let what = error.to_string();
    let advice = match error {
        AdminError::Declined { reason } => return Failure::Declined(reason),
        AdminError::Unavailable { .. } => NO_NODE,
        AdminError::Refused { .. } => {
            "use `sudo cascade ...`, which works whichever user the node runs as, or act as a \
             tenant with --token-file"
        }
        _ => "check the node's process and its log, or set a longer --timeout",
    };
    Failure::Unreachable { what, advice: advice.to_owned() }
}

fn worker_failure(error: &StoreError) -> Failure {
    let advice = match error {
        // The worker's client reports a stopped node with the same error.
        StoreError::Unavailable { .. } => NO_NODE,
        StoreError::Refused { .. } => {
            "only users of a tenant can access its blocks; to act as a tenant, give its token \
             with --token-file"
        }
        _ => "try again with a longer --timeout",
    };
    Failure::Unreachable { what: cascade_block::with_causes(error), advice: advice.to_owned() }
}
