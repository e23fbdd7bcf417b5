//! Calls to stages, guarded: a stage that panics, or answers too little or with the wrong length,
//! costs its blocks and nothing else.

use std::panic::{AssertUnwindSafe, catch_unwind};

use cascade_block::Deadline;
use cascade_memory::Slab;

use super::{Address, BlockFacts, Load, Loaded, Stage, StageError};

/// As [`Stage::store`], with exactly one result for each block.
pub(crate) fn store(
    stage: &dyn Stage,
    batch: Vec<(BlockFacts, Slab)>,
    deadline: Deadline,
) -> Vec<Result<Address, StageError>> {
    let count = batch.len();
    let mut results = caught(|| stage.store(batch, deadline)).unwrap_or_default();
    results.resize_with(count, || Err(StageError::NoAnswer));
    results
}

/// As [`Stage::load`], with exactly one result for each block, each of the right length.
pub(crate) fn load(stage: &dyn Stage, batch: Vec<Load>, deadline: Deadline) -> Vec<Loaded> {
    let lengths: Vec<usize> = batch.iter().map(|load| load.slab.len()).collect();
    let mut results = caught(|| stage.load(batch, deadline)).unwrap_or_default();
    results.resize_with(lengths.len(), || Loaded::Failed(StageError::NoAnswer));
    for (loaded, length) in results.iter_mut().zip(lengths) {
        if matches!(loaded, Loaded::Hit(slab) if slab.len() != length) {
            *loaded = Loaded::Damaged;
        }
    }
    results
}

/// Any other call that succeeds or fails.
pub(crate) fn call<T>(call: impl FnOnce() -> Result<T, StageError>) -> Result<T, StageError> {
    caught(call).unwrap_or(Err(StageError::NoAnswer))
}

/// What unwinds is the stage's own affair: the store shares nothing with it that could be torn.
fn caught<T>(call: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(call)).ok()
}
