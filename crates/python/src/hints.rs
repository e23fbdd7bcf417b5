//! Conversion of a `cascadekv.Hints` to the hints of the store.

use cascade_store::Hints;
use cascade_store::eviction::{Priority, StopReason};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

use crate::arguments::{count, flag, optional_duration, text, type_error, value_error};
use crate::config::named;

static HINTS: PyOnceLock<Py<PyType>> = PyOnceLock::new();

const STOPS: [(&str, StopReason); 4] = [
    ("tool_use", StopReason::ToolUse),
    ("end_turn", StopReason::EndTurn),
    ("length", StopReason::Length),
    ("cancelled", StopReason::Cancelled),
];
const PRIORITIES: [(&str, Priority); 3] =
    [("low", Priority::Low), ("normal", Priority::Normal), ("high", Priority::High)];

/// The hints of a call; the defaults for `None`.
pub(crate) fn hints(object: Option<&Bound<'_, PyAny>>) -> PyResult<Hints> {
    let Some(object) = object else { return Ok(Hints::default()) };
    let class = HINTS.import(object.py(), "cascadekv.hints", "Hints")?;
    if !object.is_instance(class)? {
        return Err(type_error("hints", object, "a Hints or None"));
    }
    let get = |name: &str| object.getattr(name);
    let stop = get("stop")?;
    let stop = (!stop.is_none()).then(|| named("stop", &text("stop", &stop)?, &STOPS));
    let workload = get("workload")?;
    let workload = (!workload.is_none()).then(|| {
        let number = count("workload", &workload)?;
        u8::try_from(number)
            .map_err(|_| value_error("workload", &workload, "a number from 0 to 255"))
    });
    let priority = text("priority", &get("priority")?)?;
    Ok(Hints {
        ends_session: flag("ends_session", &get("ends_session")?)?,
        stop: stop.transpose()?,
        priority: named("priority", &priority, &PRIORITIES)?,
        workload: workload.transpose()?,
        expected_within: optional_duration("expected_within", &get("expected_within")?)?,
    })
}
