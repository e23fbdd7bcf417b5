//! Bugs that a world can plant in the code under test, to show that the simulator finds them.

use std::fmt;
use std::str::FromStr;

/// A bug that a world can plant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Plant {
    /// A wake-up between the check of a condition and the wait for it is lost.
    LostWakeUp,
    /// A block is published before its bytes are complete.
    EarlyPublish,
    /// The catalog keeps the address of a block that reclaim has moved.
    StaleAddress,
    /// A call waits beyond its deadline.
    LateDeadline,
    /// A lease outlives the slab that it grants.
    OutlivingLease,
    /// A notice is given before the bytes of its batch have arrived.
    EarlyNotice,
    /// The cancel of a batch returns while its memory is still written.
    EarlyCancel,
}

/// A name that is no plant's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown bug `{0}`; one of {names}", names = Plant::ALL.map(Plant::name).join(", "))]
pub struct UnknownPlant(String);

impl Plant {
    /// All plants.
    pub const ALL: [Self; 7] = [
        Self::LostWakeUp,
        Self::EarlyPublish,
        Self::StaleAddress,
        Self::LateDeadline,
        Self::OutlivingLease,
        Self::EarlyNotice,
        Self::EarlyCancel,
    ];

    /// Its name on a command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::LostWakeUp => "lost-wake-up",
            Self::EarlyPublish => "early-publish",
            Self::StaleAddress => "stale-address",
            Self::LateDeadline => "late-deadline",
            Self::OutlivingLease => "outliving-lease",
            Self::EarlyNotice => "early-notice",
            Self::EarlyCancel => "early-cancel",
        }
    }
}

impl FromStr for Plant {
    type Err = UnknownPlant;

    fn from_str(name: &str) -> Result<Self, UnknownPlant> {
        let found = Self::ALL.into_iter().find(|plant| plant.name() == name);
        found.ok_or_else(|| UnknownPlant(name.to_owned()))
    }
}

impl fmt::Display for Plant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
