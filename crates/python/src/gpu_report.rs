//! What a GPU has copied and whether it is lost, as items of a report.

use cascade_block::with_causes;
use cascade_device::{Context, CopyReport, RegistrationReport};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Adds the counts of copies, which only grow while the GPU is in use.
pub(crate) fn add_copies(report: &Bound<'_, PyDict>, copies: &CopyReport) -> PyResult<()> {
    report.set_item("loaded_copies", copies.to_device.copies)?;
    report.set_item("loaded_bytes", copies.to_device.bytes)?;
    report.set_item("saved_copies", copies.to_host.copies)?;
    report.set_item("saved_bytes", copies.to_host.bytes)?;
    report.set_item("unregistered_bytes", copies.unregistered_bytes)?;
    report.set_item("submissions", copies.submissions)?;
    report.set_item("failed_submissions", copies.failed_submissions)?;
    report.set_item("ended_submissions", copies.ended_submissions)?;
    report.set_item("in_flight_host_seconds", copies.host_time.as_secs_f64())
}

/// Adds what became of the pool's registration, and of the GPU.
pub(crate) fn add_failures(
    report: &Bound<'_, PyDict>,
    registration: Option<&RegistrationReport>,
    context: &Context,
) -> PyResult<()> {
    let refused = registration.filter(|it| it.refusal.is_some());
    report.set_item("refused_bytes", refused.map_or(0, |it| it.staged_bytes))?;
    report.set_item("loss", context.poison().map(|error| with_causes(&**error)))
}
