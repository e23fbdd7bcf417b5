//! A `cascadekv.Hints` as the store's own.

use std::time::Duration;

use cascade_store::Hints;
use cascade_store::eviction::{Priority, StopReason};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use crate::config::{named, seconds};

const STOPS: [(&str, StopReason); 4] = [
    ("tool_use", StopReason::ToolUse),
    ("end_turn", StopReason::EndTurn),
    ("length", StopReason::Length),
    ("cancelled", StopReason::Cancelled),
];
const PRIORITIES: [(&str, Priority); 3] =
    [("low", Priority::Low), ("normal", Priority::Normal), ("high", Priority::High)];

/// The fields of the Python dataclass; its enumerations are text.
#[derive(FromPyObject)]
struct Fields {
    ends_session: bool,
    stop: Option<String>,
    priority: String,
    workload: Option<u8>,
    expected_within: Option<f64>,
}

/// The hints of a call; none for `None`.
pub(crate) fn hints(object: Option<&Bound<'_, PyAny>>) -> PyResult<Hints> {
    let Some(object) = object else { return Ok(Hints::default()) };
    let fields: Fields = object.extract().map_err(|error: PyErr| {
        let told = PyTypeError::new_err(format!("hints is a Hints or None, not {object}"));
        told.set_cause(object.py(), Some(error));
        told
    })?;
    let stop = fields.stop.map(|stop| named("stop", &stop, &STOPS)).transpose()?;
    let within = fields.expected_within.map(|within| seconds("expected_within", within));
    let expected_within: Option<Duration> = within.transpose()?;
    Ok(Hints {
        ends_session: fields.ends_session,
        stop,
        priority: named("priority", &fields.priority, &PRIORITIES)?,
        workload: fields.workload,
        expected_within,
    })
}
