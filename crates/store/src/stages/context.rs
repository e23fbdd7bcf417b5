//! What a stage is made from.

use std::sync::Arc;

use cascade_memory::Pool;
use cascade_runtime::Clock;

use crate::StoreConfig;

/// The arguments of a factory.
#[derive(Debug, Clone, Copy)]
pub struct StageContext<'a> {
    /// The store's settings.
    pub config: &'a StoreConfig,
    /// The pool of all slabs, which a stage may register with the kernel.
    pub pool: &'a Pool,
    /// The store's clock.
    pub clock: &'a Arc<dyn Clock>,
}
