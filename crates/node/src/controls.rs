//! What an administrator's orders need of the process that a node runs in.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::Notify;

use crate::NodeConfig;
use crate::config::ConfigError;
use crate::telemetry::LogFilter;

type Reload = dyn Fn() -> Result<NodeConfig, ConfigError> + Send;

/// Handles on the process.
pub(crate) struct Controls {
    /// Reads the configuration again.
    reload: Mutex<Box<Reload>>,
    pub(crate) log: LogFilter,
    /// Ends the process as SIGTERM does.
    pub(crate) stop: Arc<Notify>,
}

impl Controls {
    pub(crate) fn new(
        reload: impl Fn() -> Result<NodeConfig, ConfigError> + Send + 'static,
        log: LogFilter,
        stop: &Arc<Notify>,
    ) -> Self {
        Self { reload: Mutex::new(Box::new(reload)), log, stop: Arc::clone(stop) }
    }

    /// The configuration as its sources have it now.
    pub(crate) fn read_again(&self) -> Result<NodeConfig, ConfigError> {
        (self.reload.lock().unwrap_or_else(PoisonError::into_inner))()
    }
}

impl fmt::Debug for Controls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Controls").field("log", &self.log).finish_non_exhaustive()
    }
}
