//! Simulated processes.

/// Threads that crash together: one simulated process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Domain(pub u8);

impl Domain {
    /// The domain of the first thread, which starts processes and checks them.
    pub const HARNESS: Self = Self(0);
}
