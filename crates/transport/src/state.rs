//! What the threads of an endpoint share.

use std::sync::{Arc, OnceLock};

use crate::config::EndpointConfig;
use crate::generations::{Made, ServedConnections};
use crate::notice::Notices;
use crate::peer::EndpointId;
use crate::regions::Regions;
use crate::tls::Tls;
use crate::verbs::Rdma;

/// What the threads of an endpoint share.
#[derive(Debug)]
pub(crate) struct EndpointState {
    pub(crate) id: EndpointId,
    pub(crate) config: EndpointConfig,
    /// TLS of its TCP connections.
    pub(crate) tls: Option<Arc<Tls>>,
    pub(crate) regions: Regions,
    pub(crate) notices: Notices,
    /// The connections that it has made.
    pub(crate) made: Made,
    /// The connections of peers that it serves.
    pub(crate) served: ServedConnections,
    /// Its device, once one is used.
    pub(crate) rdma: OnceLock<Arc<Rdma>>,
}
