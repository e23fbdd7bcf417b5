//! Errors of a pipeline.

use thiserror::Error;

/// What is wrong with a pipeline.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PipelineError {
    /// The registry does not have a stage of this name.
    #[error("pipeline {pipeline:?}: unknown stage {stage:?}; known are {known}")]
    UnknownStage {
        /// The whole pipeline.
        pipeline: String,
        /// The unknown stage.
        stage: String,
        /// The known stages.
        known: String,
    },
    /// The order of the stages is not valid, or a stage is missing.
    #[error("pipeline {pipeline:?}: {reason}")]
    BadOrder {
        /// The whole pipeline.
        pipeline: String,
        /// What is wrong, and with which stage.
        reason: String,
    },
}
