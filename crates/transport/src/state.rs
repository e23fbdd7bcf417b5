//! What the threads of an endpoint share.

use std::sync::{Arc, OnceLock};

use crate::config::EndpointConfig;
use crate::notice::Notices;
use crate::peer::EndpointId;
use crate::regions::Regions;
use crate::verbs::Rdma;

/// What the threads of an endpoint share.
#[derive(Debug)]
pub(crate) struct EndpointState {
    pub(crate) id: EndpointId,
    pub(crate) config: EndpointConfig,
    pub(crate) regions: Regions,
    pub(crate) notices: Notices,
    /// Its device, once one is used.
    pub(crate) rdma: OnceLock<Arc<Rdma>>,
}
