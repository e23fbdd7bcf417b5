//! What calls to a stage say about its health.

use cascade_tier::tier::{LoadOutcome, TierError};

/// What one call to a stage says about its health.
#[derive(Debug, Clone)]
pub(crate) enum HealthSignal {
    /// The call succeeded.
    Success,
    /// The call failed.
    Failure(TierError),
    /// The call hangs.
    Hang,
    /// The call timed out, but its timeout was too short for a conclusion.
    Inconclusive,
    /// The call says nothing about the health.
    None,
}

impl HealthSignal {
    /// The signal of a call, from the results of its blocks. One failed block makes a failed call.
    /// `is_long_enough` says whether the timeout was long enough to count a time-out as a failure.
    pub(crate) fn of<'a>(
        errors: impl Iterator<Item = Option<&'a TierError>>,
        is_long_enough: bool,
    ) -> Self {
        use TierError::{ChangedInMemory, Declined, Full};

        let mut signal = Self::None;
        for error in errors {
            match error {
                // These are replies: the stage works.
                None | Some(Full | Declined { .. } | ChangedInMemory) => {
                    if matches!(signal, Self::None) {
                        signal = Self::Success;
                    }
                }
                // Consequences of a close or of an open circuit, which say nothing new. Or the
                // memory of the block is the reason: the stage was not called, or did its part.
                Some(
                    TierError::Closed
                    | TierError::CircuitOpen
                    | TierError::Device(_)
                    | TierError::NotHostMemory,
                ) => {}
                // Outweighs successes of other blocks; a failure outweighs both.
                Some(TierError::Timeout) if !is_long_enough => signal = Self::Inconclusive,
                Some(error) => return Self::Failure(error.clone()),
            }
        }
        signal
    }

    /// Adds the signal of another part of the same call.
    pub(crate) fn add(&mut self, other: Self) {
        let rank = |signal: &Self| match signal {
            Self::None => 0,
            Self::Success => 1,
            Self::Inconclusive => 2,
            Self::Hang => 3,
            Self::Failure(_) => 4,
        };
        if rank(&other) > rank(self) {
            *self = other;
        }
    }

    /// The signal of a load.
    pub(crate) fn of_load<'a>(
        loaded: impl Iterator<Item = &'a LoadOutcome>,
        is_long_enough: bool,
    ) -> Self {
        let errors = loaded.map(|loaded| match loaded {
            LoadOutcome::Failed(error) => Some(error),
            LoadOutcome::Hit(_) | LoadOutcome::Gone | LoadOutcome::Damaged => None,
        });
        Self::of(errors, is_long_enough)
    }
}
