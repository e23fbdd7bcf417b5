//! Why a measurement failed.

use std::error::Error;

use thiserror::Error;

/// A failure of a measurement.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum MeasureError {
    /// The command line is not valid.
    #[error("{what}\n  {advice}")]
    Usage {
        /// What is wrong.
        what: String,
        /// What to do.
        advice: String,
    },
    /// A measurement failed.
    #[error("cannot measure {what}")]
    Measure {
        /// The measurement.
        what: String,
        /// The cause.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// A preparation failed.
    #[error("cannot {action}")]
    Other {
        /// What failed, after "cannot".
        action: &'static str,
        /// The cause.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// A figure could not be delivered.
    #[error(transparent)]
    Deliver(Box<dyn Error + Send + Sync>),
}

impl MeasureError {
    /// A command line that is not valid, and what to do.
    pub fn usage(what: impl Into<String>, advice: impl Into<String>) -> Self {
        Self::Usage { what: what.into(), advice: advice.into() }
    }

    /// Something else that failed: `cannot ACTION`.
    pub fn other(action: &'static str, source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::Other { action, source: source.into() }
    }

    /// A measurement that failed.
    pub fn measure(
        what: impl Into<String>,
        source: impl Into<Box<dyn Error + Send + Sync>>,
    ) -> Self {
        Self::Measure { what: what.into(), source: source.into() }
    }
}
