//! What admin commands need of the process that a node runs in: reload, log filter, stop.

use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use tokio::sync::Notify;

use crate::NodeConfig;
use crate::config::ConfigError;
use crate::http::ReloadableAccess;
use crate::telemetry::LogFilter;

type LoadConfig = dyn Fn() -> Result<NodeConfig, ConfigError> + Send;

/// Handles on the process; a node embedded in another program has none.
pub(crate) struct ProcessControls {
    load: Mutex<Box<LoadConfig>>,
    pub(crate) log: LogFilter,
    /// A notification shuts the process down as SIGTERM does.
    pub(crate) stop: Arc<Notify>,
    /// The access rules of the HTTP port. Empty if the node has no port.
    pub(crate) http_access: OnceLock<ReloadableAccess>,
}

impl ProcessControls {
    pub(crate) fn new(
        load: impl Fn() -> Result<NodeConfig, ConfigError> + Send + 'static,
        log: LogFilter,
        stop: &Arc<Notify>,
    ) -> Self {
        Self {
            load: Mutex::new(Box::new(load)),
            log,
            stop: Arc::clone(stop),
            http_access: OnceLock::new(),
        }
    }

    /// Loads the configuration from its sources as they are now.
    pub(crate) fn load_config(&self) -> Result<NodeConfig, ConfigError> {
        (self.load.lock().unwrap_or_else(PoisonError::into_inner))()
    }
}

impl fmt::Debug for ProcessControls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProcessControls").field("log", &self.log).finish_non_exhaustive()
    }
}
