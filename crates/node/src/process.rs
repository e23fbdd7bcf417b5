//! The node's process, from its configuration to its end.

use crate::NodeConfig;
use crate::NodeError;
use crate::config::ConfigError;

/// Serves until the process is told to end. `reload` reads the configuration anew.
pub fn run(
    _config: NodeConfig,
    _reload: impl Fn() -> Result<NodeConfig, ConfigError> + Send + 'static,
) -> Result<(), NodeError> {
    Err(NodeError::NotBuilt)
}
