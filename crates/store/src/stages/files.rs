//! Opens the file tier of a store's settings.

use std::sync::Arc;
use std::time::Duration;

use cascade_disk::io::FileIo;
use cascade_disk::{DiskError, FilesConfig, SegmentFiles, TIER_NAME};
use cascade_runtime::Deadline;
use cascade_tier::StoreError;
use cascade_tier::tier::Tier;

use super::StageContext;

/// Time-out of opening, which scans all records; a million take seconds.
const OPENING_TIMEOUT: Duration = Duration::from_secs(300);

/// Opens the file tier of a store's settings.
pub fn open_files(context: &StageContext<'_>) -> Result<Arc<dyn Tier>, StoreError> {
    let (config, deadline) = settings(context)?;
    opened(SegmentFiles::open(config, Arc::clone(context.clock), context.pool, deadline))
}

/// [`open_files`] with the caller's I/O instead of the system's, such as a simulated disk. The
/// setting of the I/O engine is ignored.
///
/// To run a store on it, replace the stage in its [`super::StageRegistry`]:
///
/// ```text
/// registry.register("Files", Arc::new(move |context| open_files_with(context, io.clone())));
/// ```
pub fn open_files_with(
    context: &StageContext<'_>,
    io: FileIo,
) -> Result<Arc<dyn Tier>, StoreError> {
    let (config, deadline) = settings(context)?;
    opened(SegmentFiles::open_with(config, io, deadline))
}

fn opened(tier: Result<SegmentFiles, DiskError>) -> Result<Arc<dyn Tier>, StoreError> {
    match tier {
        Ok(tier) => Ok(Arc::new(tier)),
        Err(error) => Err(StoreError::Tier {
            tier: TIER_NAME,
            operation: "open its directory",
            source: Arc::new(error),
        }),
    }
}

/// The settings of the file tier of a store, and the deadline of its opening.
fn settings(context: &StageContext<'_>) -> Result<(FilesConfig, Deadline), StoreError> {
    let config = context.config.files.as_ref().ok_or_else(|| StoreError::Config {
        setting: "files",
        reason: "the pipeline has a file tier: set its directory".to_owned(),
    })?;
    Ok((config.clone(), Deadline::after(&**context.clock, OPENING_TIMEOUT)))
}
