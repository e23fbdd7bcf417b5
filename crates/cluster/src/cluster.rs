//! One node's side of a cluster.

use std::net::SocketAddr;
use std::sync::{Arc, PoisonError};

use cascade_runtime::thread::{Builder, JoinHandle};
use cascade_runtime::{LeafMutex, Mutex};
use cascade_tier::source::Source;
use cascade_transport::{Endpoint, EndpointConfig, Heartbeat, Limits, Listener, TlsConfig};

use crate::error::ClusterError;
use crate::hosts::Host;
use crate::link::{Link, NodeStatus};
use crate::owner::{LocalBlocks, Owner};
use crate::source::Peers;

/// What endpoints of nodes say of themselves: others are refused.
const GEOMETRY: &[u8] = b"cascade node 1";

/// How a node takes part in a cluster.
#[derive(Debug, Clone)]
pub struct ClusterConfig {
    /// The name of this node in the list.
    pub name: String,
    /// All nodes of the cluster, with this one.
    pub hosts: Vec<Host>,
    /// Where this node answers the others.
    pub listen: SocketAddr,
    /// The token that all nodes know.
    pub token: Option<Vec<u8>>,
    /// TLS between the nodes.
    pub tls: Option<TlsConfig>,
}

/// One node's side of a cluster.
#[derive(Debug)]
pub struct Cluster {
    endpoint: Endpoint,
    listen: SocketAddr,
    owner: Arc<Owner>,
    links: Arc<[Arc<Link>]>,
    listener: LeafMutex<Option<Listener>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Cluster {
    /// Begins to connect to the other nodes. Does not answer them yet.
    ///
    /// # Errors
    /// If this node is not in the list, or its endpoint cannot be made.
    pub fn start(config: ClusterConfig) -> Result<Self, ClusterError> {
        let ClusterConfig { name, hosts, listen, token, tls } = config;
        if !hosts.iter().any(|host| host.name == name) {
            return Err(ClusterError::NotListed { name });
        }
        let owner = Arc::new(Owner::default());
        let accepts = |geometry: &[u8]| match geometry {
            GEOMETRY => Ok(()),
            _ => Err("it is no node of a Cascade cluster of this version".to_owned()),
        };
        let endpoint = Endpoint::new(EndpointConfig {
            name: name.clone(),
            geometry: GEOMETRY.to_vec(),
            accepts: Arc::new(accepts),
            token,
            tls,
            answers: Some(Arc::<Owner>::clone(&owner)),
            limits: Limits { heartbeat: Some(Heartbeat::default()), ..Limits::default() },
            ..EndpointConfig::default()
        })?;
        let others = hosts.into_iter().filter(|host| host.name != name);
        let link = |(number, host)| Arc::new(Link::new(number, host, endpoint.clone()));
        let links: Arc<[Arc<Link>]> = others.enumerate().map(link).collect();
        let (listener, threads) = Default::default();
        let cluster = Self { endpoint, listen, owner, links, listener, threads };
        for link in cluster.links.iter() {
            let of_thread = Arc::clone(link);
            let builder = Builder::new().name("cascade-peer".to_owned());
            let thread = builder.spawn(move || of_thread.run()).map_err(ClusterError::Thread)?;
            cluster.threads.lock().unwrap_or_else(PoisonError::into_inner).push(thread);
        }
        Ok(cluster)
    }

    /// The other nodes as a source of blocks.
    pub fn source(&self) -> Arc<dyn Source> {
        Arc::new(Peers::new(Arc::clone(&self.links)))
    }

    /// Answers the other nodes. Returns the address.
    ///
    /// # Errors
    /// If it cannot listen: other hosts reach it, and there is neither a token nor TLS with client
    /// certificates.
    pub fn serve(&self, blocks: Arc<dyn LocalBlocks>) -> Result<SocketAddr, ClusterError> {
        self.owner.set(blocks);
        let listener = self.endpoint.listen_tcp(self.listen)?;
        let address = listener.tcp_address().unwrap_or(self.listen);
        *self.listener.lock().unwrap_or_else(PoisonError::into_inner) = Some(listener);
        Ok(address)
    }

    /// What is known of the other nodes.
    pub fn nodes(&self) -> Vec<NodeStatus> {
        self.links.iter().map(|link| link.status()).collect()
    }

    /// Answers no more, and asks no more.
    pub fn stop(&self) {
        let listener = self.listener.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(listener);
        for link in self.links.iter() {
            link.stop();
        }
        let threads: Vec<_> =
            std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        for thread in threads {
            // A panic of such a thread was reported when it happened.
            drop(thread.join());
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.stop();
    }
}
