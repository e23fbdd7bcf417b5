//! What the threads of an endpoint share.

use crate::config::EndpointConfig;
use crate::notice::Notices;
use crate::peer::EndpointId;
use crate::regions::Regions;

/// What the threads of an endpoint share.
#[derive(Debug)]
pub(crate) struct EndpointState {
    pub(crate) id: EndpointId,
    pub(crate) config: EndpointConfig,
    pub(crate) regions: Regions,
    pub(crate) notices: Notices,
}
