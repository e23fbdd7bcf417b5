//! The simulated devices of a world, and how a store gets them.

use cascade_runtime::simulated::Random;
use cascade_store::stages::StageRegistry;

use crate::profile::Profile;

/// The devices of a world. They survive crashes of the store; clones are handles on the same.
#[derive(Debug, Clone)]
pub(crate) struct Devices;

impl Devices {
    /// Whether worlds can have a file tier.
    pub(crate) const HAVE_FILES: bool = false;

    pub(crate) fn new(_: &Profile, _: &mut Random) -> Self {
        Self
    }

    /// The stages that a store can have.
    pub(crate) fn registry(&self) -> StageRegistry {
        StageRegistry::default()
    }
}
