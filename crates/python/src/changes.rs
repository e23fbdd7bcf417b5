//! What came and went in a store, as a follower is told it.

use cascade_block::BlockKey;
use cascade_store::{Change, ChangeCursor, Changes};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyIterator, PyList, PyType};

use crate::keys::{PyBlockKey, PyBlockKeys};

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyChanges>()
}

static CHANGE_KIND: PyOnceLock<Py<PyType>> = PyOnceLock::new();

/// The numbers of `ChangeKind`.
const STORED: u8 = 0;
const GONE: u8 = 1;
const CLEARED: u8 = 2;

/// What a store tells a follower at a time: an iterable of kinds and keys.
#[pyclass(name = "Changes", module = "cascadekv", frozen)]
#[derive(Debug)]
pub(crate) struct PyChanges {
    next: ChangeCursor,
    is_lost: bool,
    is_current: bool,
    kinds: Vec<u8>,
    keys: PyBlockKeys,
}

impl From<Changes> for PyChanges {
    fn from(told: Changes) -> Self {
        let parts = told.changes.into_iter().map(|change| match change {
            Change::Stored(key) => (STORED, key),
            Change::Gone(key) => (GONE, key),
            Change::Cleared => (CLEARED, BlockKey::from_bytes([0; 32])),
        });
        let (kinds, keys): (Vec<u8>, Vec<BlockKey>) = parts.unzip();
        let Changes { next, is_lost, is_current, .. } = told;
        Self { next, is_lost, is_current, kinds, keys: keys.into() }
    }
}

#[pymethods]
impl PyChanges {
    /// What to pass as `since` the next time.
    #[getter]
    fn next(&self) -> [u8; ChangeCursor::BYTES] {
        self.next.to_bytes()
    }

    /// Whether the set begins anew: empty it before these changes are applied.
    #[getter]
    fn is_lost(&self) -> bool {
        self.is_lost
    }

    /// Whether the set is exact with these changes. Otherwise ask again at once.
    #[getter]
    fn is_current(&self) -> bool {
        self.is_current
    }

    /// The `ChangeKind` of each change, one byte each.
    #[getter]
    fn kinds<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.kinds)
    }

    /// The key of each change; zeros for `ChangeKind.CLEARED`.
    #[getter]
    fn keys(&self) -> PyBlockKeys {
        self.keys.clone()
    }

    fn __len__(&self) -> usize {
        self.kinds.len()
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyIterator>> {
        let class = CHANGE_KIND.import(py, "cascadekv.results", "ChangeKind")?;
        let mut members = Vec::new();
        for kind in [STORED, GONE, CLEARED] {
            members.push(class.call1((kind,))?);
        }
        let pairs = self.kinds.iter().zip(self.keys.as_slice());
        let pairs = pairs.map(|(kind, key)| {
            let key = (*kind != CLEARED).then_some(PyBlockKey(*key));
            (members[usize::from(*kind)].clone(), key)
        });
        PyList::new(py, pairs.collect::<Vec<_>>())?.try_iter()
    }

    fn __repr__(&self) -> String {
        let count = self.kinds.len();
        let lost = if self.is_lost { ", lost" } else { "" };
        let current = if self.is_current { ", current" } else { "" };
        format!("<Changes: {count}{lost}{current}>")
    }
}

/// The cursor that `Changes.next` gave.
pub(crate) fn cursor(bytes: &[u8]) -> PyResult<ChangeCursor> {
    let wrong = || {
        let (most, got) = (ChangeCursor::BYTES, bytes.len());
        let text = format!("since: what Changes.next gave has {most} bytes; got {got}");
        PyValueError::new_err(text)
    };
    bytes.try_into().map(ChangeCursor::from_bytes).map_err(|_| wrong())
}
