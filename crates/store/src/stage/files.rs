//! The file tier as a stage: adapts crate `disk` to the pipeline.

use std::sync::Arc;

use super::{Stage, StageContext};
use crate::{FileLayout, StoreError};

/// Shim.
#[derive(Debug)]
pub struct FilesStage;

impl FilesStage {
    pub(crate) fn open(
        _context: &StageContext<'_>,
        _layout: Option<FileLayout>,
    ) -> Result<Arc<dyn Stage>, StoreError> {
        Err(StoreError::Config { setting: "files", reason: "shim".to_owned() })
    }
}
