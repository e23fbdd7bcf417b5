//! Store errors as Python exceptions, one class for each reaction of a caller.

use cascade_block::with_causes;
use cascade_store::StoreError;
use pyo3::PyErr;
use pyo3::import_exception;

import_exception!(cascadekv.errors, AwayError);
import_exception!(cascadekv.errors, BusyError);
import_exception!(cascadekv.errors, CascadeError);
import_exception!(cascadekv.errors, ClosedError);
import_exception!(cascadekv.errors, ConfigError);
import_exception!(cascadekv.errors, ConflictError);
import_exception!(cascadekv.errors, DeadlineError);
import_exception!(cascadekv.errors, ForkError);
import_exception!(cascadekv.errors, GpuError);
import_exception!(cascadekv.errors, PipelineError);
import_exception!(cascadekv.errors, PoolError);
import_exception!(cascadekv.errors, RefusedError);
import_exception!(cascadekv.errors, TierError);

/// The exception for an error. Its message includes those of the causes.
pub(crate) fn to_python(error: &StoreError) -> PyErr {
    let message = with_causes(error);
    match error {
        StoreError::Timeout { .. } => DeadlineError::new_err(message),
        StoreError::Busy { .. } | StoreError::Erasing | StoreError::Limit { .. } => {
            BusyError::new_err(message)
        }
        StoreError::Tier { .. } => TierError::new_err(message),
        StoreError::Pipeline(_) => PipelineError::new_err(message),
        StoreError::Config { .. } => ConfigError::new_err(message),
        StoreError::Memory(_) | StoreError::Resize(_) => PoolError::new_err(message),
        StoreError::Unavailable { .. } => AwayError::new_err(message),
        StoreError::Refused { .. } => RefusedError::new_err(message),
        StoreError::Closed => ClosedError::new_err(message),
        _ => CascadeError::new_err(message),
    }
}
