//! What a GPU copied and registered and whether it is lost, as items of a report.

use cascade_block::with_causes;
use cascade_device::Context;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Adds the counts, which only grow while the GPU is in use, and why it is lost.
pub(crate) fn add_counts(report: &Bound<'_, PyDict>, context: &Context) -> PyResult<()> {
    let counts = context.copy_report();
    let registration_seconds = counts.registration_time.as_secs_f64();
    report.set_item("loaded_copies", counts.to_device.copies)?;
    report.set_item("loaded_bytes", counts.to_device.bytes)?;
    report.set_item("saved_copies", counts.to_host.copies)?;
    report.set_item("saved_bytes", counts.to_host.bytes)?;
    report.set_item("within_copies", counts.within.copies)?;
    report.set_item("within_bytes", counts.within.bytes)?;
    report.set_item("unregistered_bytes", counts.unregistered_bytes)?;
    report.set_item("submissions", counts.submissions)?;
    report.set_item("failed_submissions", counts.failed_submissions)?;
    report.set_item("ended_submissions", counts.ended_submissions)?;
    report.set_item("in_flight_host_seconds", counts.host_time.as_secs_f64())?;
    report.set_item("registered_bytes_total", counts.registered_bytes)?;
    report.set_item("refused_bytes_total", counts.refused_bytes)?;
    report.set_item("registration_seconds_total", registration_seconds)?;
    report.set_item("loss", context.poison().map(|error| with_causes(&**error)))
}
