//! Reaching a running node: the socket that a command is given, and the question it asks there.

use std::path::PathBuf;
use std::time::Duration;

use cascade_client::{Access, Client, ConnectOptions};
use cascade_node::config::Environment;
use cascade_store::{CallOptions, StoreError};
use clap::Args;
use serde::de::DeserializeOwned;

use crate::cli::{Failure, parse_time};

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
    timeout: Duration,
}

/// A connection for asking.
#[derive(Debug)]
pub(super) struct Asker {
    client: Client,
    socket: PathBuf,
    options: CallOptions,
}

impl Reach {
    /// Connects.
    pub(super) fn connect(&self) -> Result<Asker, Failure> {
        let timeout = self.timeout;
        let socket = self.socket.clone();
        let socket = socket.unwrap_or_else(|| Environment::of_process().socket());
        let mut options = ConnectOptions::new(&socket);
        options.access = Access::Read;
        "cascade (command line)".clone_into(&mut options.name);
        options.timeout = timeout;
        let client =
            Client::connect(options).map_err(|source| unreachable_node(source, &socket))?;
        Ok(Asker {
            client,
            socket,
            options: CallOptions { timeout: Some(timeout), ..CallOptions::default() },
        })
    }
}

impl Asker {
    /// A question in words, its arguments and its answer in JSON.
    pub(super) fn ask<T: DeserializeOwned>(
        &self,
        topic: &str,
        arguments: &serde_json::Value,
    ) -> Result<T, Failure> {
        let answer = self.client.administer(topic, &arguments.to_string(), self.options);
        let text = answer.map_err(|source| unreachable_node(source, &self.socket))?;
        serde_json::from_str(&text).map_err(|source| Failure::Read {
            path: self.socket.clone(),
            advice: "the node speaks of things that this command does not know; use the command \
                     of the node's version"
                .to_owned(),
            source: Box::new(source),
        })
    }
}

fn unreachable_node(source: StoreError, socket: &std::path::Path) -> Failure {
    let advice = match &source {
        StoreError::Away { .. } => {
            "start a node with `cascade serve`, or say where it is with --socket"
        }
        StoreError::Refused { .. } => "run the command as the user that the node runs as",
        _ => "try again with a longer --timeout",
    };
    Failure::Read { path: socket.to_owned(), advice: advice.to_owned(), source: Box::new(source) }
}
