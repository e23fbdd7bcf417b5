//! The results of calls: the outcome of each block, and the match of a chain.

use cascade_store::{DeclineReason, GetOutcome, PrefixMatch, PutOutcome, StoreError, TierName};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyString, PyType};

use crate::errors;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyPutResult>()?;
    module.add_class::<PyGetResult>()?;
    module.add_class::<PyPrefixMatch>()
}

static PUT_STATUS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
static GET_STATUS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
static DECLINE_REASON: PyOnceLock<Py<PyType>> = PyOnceLock::new();

/// A member of one of the enumerations of `cascadekv.results`.
fn member<'py>(
    py: Python<'py>,
    class: &'static PyOnceLock<Py<PyType>>,
    class_name: &str,
    value: &str,
) -> PyResult<Bound<'py, PyAny>> {
    class.import(py, "cascadekv.results", class_name)?.call1((value,))
}

/// The outcome of a put of one block.
#[pyclass(name = "PutResult", module = "cascadekv", frozen)]
#[derive(Debug)]
pub(crate) struct PyPutResult(PutOutcome);

fn says_the_same(one: &PutOutcome, other: &PutOutcome) -> bool {
    use PutOutcome::{Conflict, Declined, Deduplicated, Failed, Present, Stored};
    use StoreError::Timeout;

    match (one, other) {
        (Stored, Stored)
        | (Deduplicated, Deduplicated)
        | (Present, Present)
        | (Conflict, Conflict) => true,
        (Declined(one), Declined(other)) => one == other,
        (
            Failed(Timeout { operation: one, timeout_ms: its_time }),
            Failed(Timeout { operation: other, timeout_ms }),
        ) => (one, its_time) == (other, timeout_ms),
        _ => false,
    }
}

impl PyPutResult {
    /// The results of a call. Neighbours that say the same share an object, which cannot change: a
    /// call may have a million blocks, and objects of their own would take most of its time.
    pub(crate) fn all(py: Python<'_>, outcomes: Vec<PutOutcome>) -> PyResult<Vec<Py<Self>>> {
        let mut results: Vec<Py<Self>> = Vec::with_capacity(outcomes.len());
        for outcome in outcomes {
            let before = results.last().filter(|before| says_the_same(&before.get().0, &outcome));
            let result = match before {
                Some(before) => before.clone_ref(py),
                None => Py::new(py, Self(outcome))?,
            };
            results.push(result);
        }
        Ok(results)
    }

    fn status_name(&self) -> &'static str {
        match self.0 {
            PutOutcome::Stored => "stored",
            PutOutcome::Deduplicated => "deduplicated",
            PutOutcome::Present => "present",
            PutOutcome::Conflict => "conflict",
            PutOutcome::Declined(_) => "declined",
            PutOutcome::Failed(_) => "failed",
        }
    }

    fn reason_name(&self) -> Option<&'static str> {
        match self.0 {
            PutOutcome::Declined(DeclineReason::Partial) => Some("partial"),
            PutOutcome::Declined(DeclineReason::TooLarge) => Some("too_large"),
            PutOutcome::Declined(DeclineReason::Full) => Some("full"),
            PutOutcome::Declined(DeclineReason::WorthLess) => Some("worth_less"),
            PutOutcome::Declined(DeclineReason::Empty) => Some("empty"),
            _ => None,
        }
    }

    fn failure(&self) -> Option<&StoreError> {
        if let PutOutcome::Failed(error) = &self.0 { Some(error) } else { None }
    }
}

#[pymethods]
impl PyPutResult {
    /// The outcome, a member of `PutStatus`.
    #[getter]
    fn status<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        member(py, &PUT_STATUS, "PutStatus", self.status_name())
    }

    /// Whether the store has the block: stored, deduplicated or present.
    #[getter]
    fn ok(&self) -> bool {
        matches!(self.0, PutOutcome::Stored | PutOutcome::Deduplicated | PutOutcome::Present)
    }

    /// The reason of a declined block, a member of `DeclineReason`, else `None`.
    #[getter]
    fn reason<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let name = self.reason_name();
        name.map(|name| member(py, &DECLINE_REASON, "DeclineReason", name)).transpose()
    }

    /// The exception of a failed block, else `None`.
    #[getter]
    fn error(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.failure().map(|error| errors::to_python(error).into_value(py).into_any())
    }

    fn __repr__(&self) -> String {
        match (self.reason_name(), self.failure()) {
            (Some(reason), _) => format!("<PutResult declined: {reason}>"),
            (None, Some(error)) => format!("<PutResult failed: {error}>"),
            (None, None) => format!("<PutResult {}>", self.status_name()),
        }
    }
}

/// The outcome of a copying get of one block.
#[pyclass(name = "GetResult", module = "cascadekv", frozen)]
#[derive(Debug)]
pub(crate) struct PyGetResult(GetOutcome);

impl From<GetOutcome> for PyGetResult {
    fn from(outcome: GetOutcome) -> Self {
        Self(outcome)
    }
}

impl PyGetResult {
    fn status_name(&self) -> &'static str {
        match self.0 {
            GetOutcome::Hit { .. } => "hit",
            GetOutcome::Miss => "miss",
            GetOutcome::TooShort { .. } => "too_short",
            GetOutcome::Failed(_) => "failed",
        }
    }
}

#[pymethods]
impl PyGetResult {
    /// The outcome, a member of `GetStatus`.
    #[getter]
    fn status<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        member(py, &GET_STATUS, "GetStatus", self.status_name())
    }

    /// Whether the block's bytes are in the buffer.
    #[getter]
    fn ok(&self) -> bool {
        matches!(self.0, GetOutcome::Hit { .. })
    }

    /// Bytes copied to the start of the buffer.
    #[getter]
    fn bytes(&self) -> usize {
        if let GetOutcome::Hit { bytes, .. } = self.0 { bytes } else { 0 }
    }

    /// Size of the block if the buffer was too short, else `None`.
    #[getter]
    fn needed_bytes(&self) -> Option<usize> {
        if let GetOutcome::TooShort { needed_bytes } = self.0 { Some(needed_bytes) } else { None }
    }

    /// The tier that the block was read from, or `None` without a hit.
    #[getter]
    fn tier(&self) -> Option<&str> {
        if let GetOutcome::Hit { tier, .. } = &self.0 { Some(tier) } else { None }
    }

    /// The exception of a failed block, else `None`.
    #[getter]
    fn error(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        let GetOutcome::Failed(error) = &self.0 else { return None };
        Some(errors::to_python(error).into_value(py).into_any())
    }

    fn __repr__(&self) -> String {
        match &self.0 {
            GetOutcome::Hit { bytes, tier } => {
                format!("<GetResult hit: {bytes} bytes from {tier}>")
            }
            GetOutcome::TooShort { needed_bytes } => {
                format!("<GetResult too_short: the block needs {needed_bytes} bytes>")
            }
            GetOutcome::Failed(error) => format!("<GetResult failed: {error}>"),
            GetOutcome::Miss => "<GetResult miss>".to_owned(),
        }
    }
}

/// The leading blocks of a chain that the store has.
#[pyclass(name = "PrefixMatch", module = "cascadekv", frozen, eq)]
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct PyPrefixMatch(PrefixMatch);

impl From<PrefixMatch> for PyPrefixMatch {
    fn from(found: PrefixMatch) -> Self {
        Self(found)
    }
}

#[pymethods]
impl PyPrefixMatch {
    /// Number of leading blocks that are available.
    #[getter]
    fn blocks(&self) -> usize {
        self.0.tiers.len()
    }

    /// The fastest tier of each of these blocks.
    #[getter]
    fn tiers<'py>(&self, py: Python<'py>) -> Vec<Bound<'py, PyString>> {
        self.0.tiers.iter().map(|tier| tier_name(py, tier)).collect()
    }

    fn __repr__(&self) -> String {
        format!("<PrefixMatch of {} blocks>", self.blocks())
    }
}

/// The name of a tier as an interned string.
pub(crate) fn tier_name<'py>(py: Python<'py>, tier: &TierName) -> Bound<'py, PyString> {
    PyString::intern(py, tier)
}
