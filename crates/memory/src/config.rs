//! The configuration of a pool.

use crate::HugePages;

/// Configuration of a pool.
#[derive(Debug, Clone)]
pub struct PoolConfig {
    /// Size of the region. Rounded up to a page. Minimum: one page.
    pub capacity_bytes: usize,
    /// Whether to request huge pages.
    pub huge_pages: HugePages,
    /// Whether to populate every page now rather than at first use.
    pub populate: bool,
}
