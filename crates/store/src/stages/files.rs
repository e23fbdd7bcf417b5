//! Opens the file tier of a store's settings.

use std::sync::Arc;
use std::time::Duration;

use cascade_disk::io::FileIo;
use cascade_disk::{DiskError, FilesTier};
use cascade_runtime::Deadline;
use cascade_tier::tier::Tier;
use cascade_tier::{StoreError, TierName};

use super::StageContext;
use crate::{FileLayout, FilesConfig};

/// Its name in results and statistics.
const NAME: TierName = "files";
/// Time-out of opening, which scans all records; a million take seconds.
const OPENING_TIMEOUT: Duration = Duration::from_secs(300);

/// Opens the file tier of a store's settings; `layout` overrides theirs.
pub fn open_files(
    context: &StageContext<'_>,
    layout: Option<FileLayout>,
) -> Result<Arc<dyn Tier>, StoreError> {
    let (config, deadline) = settings(context, layout)?;
    opened(FilesTier::open(config, NAME, Arc::clone(context.clock), context.pool, deadline))
}

/// [`open_files`] with the caller's I/O instead of the system's, such as a simulated disk. The
/// setting of the I/O engine is ignored.
///
/// To run a store on it, replace the stage in its [`super::StageRegistry`]:
///
/// ```text
/// registry.register("Files", Arc::new(move |context| {
///     open_files_with(context, None, io.clone())
/// }));
/// ```
pub fn open_files_with(
    context: &StageContext<'_>,
    layout: Option<FileLayout>,
    io: FileIo,
) -> Result<Arc<dyn Tier>, StoreError> {
    let (config, deadline) = settings(context, layout)?;
    opened(FilesTier::open_with(config, NAME, Arc::clone(context.clock), io, deadline))
}

fn opened(tier: Result<FilesTier, DiskError>) -> Result<Arc<dyn Tier>, StoreError> {
    match tier {
        Ok(tier) => Ok(Arc::new(tier)),
        Err(error) => Err(StoreError::Tier {
            tier: NAME,
            operation: "open its directory",
            source: Arc::new(error),
        }),
    }
}

/// The settings of the file tier of a store, and the deadline of its opening.
fn settings(
    context: &StageContext<'_>,
    layout: Option<FileLayout>,
) -> Result<(FilesConfig, Deadline), StoreError> {
    let config = context.config.files.as_ref().ok_or_else(|| StoreError::Config {
        setting: "files",
        reason: "the pipeline has a file tier: set its directory".to_owned(),
    })?;
    let config = FilesConfig { layout: layout.unwrap_or(config.layout), ..config.clone() };
    Ok((config, Deadline::after(&**context.clock, OPENING_TIMEOUT)))
}
