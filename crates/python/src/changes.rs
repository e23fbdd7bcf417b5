//! The changes of a store's set of keys, for a follower.

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

/// The values of `ChangeKind`.
const STORED: u8 = 0;
const GONE: u8 = 1;
const CLEARED: u8 = 2;

/// A batch of changes in a store: an iterable of pairs of `ChangeKind` and key.
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
    fn from(changes: Changes) -> Self {
        let Changes { next, is_lost, is_current, changes, .. } = changes;
        let parts = changes.into_iter().map(|change| match change {
            Change::Stored(key) => (STORED, key),
            Change::Removed(key) => (GONE, key),
            Change::Cleared => (CLEARED, BlockKey::from_bytes([0; 32])),
        });
        let (kinds, keys): (Vec<u8>, Vec<BlockKey>) = parts.unzip();
        Self { next, is_lost, is_current, kinds, keys: keys.into() }
    }
}

#[pymethods]
impl PyChanges {
    /// The cursor to pass as `since` to the next call.
    #[getter]
    fn next(&self) -> [u8; ChangeCursor::BYTES] {
        self.next.to_bytes()
    }

    /// Whether changes were lost: empty the set of keys before you apply these changes.
    #[getter]
    fn is_lost(&self) -> bool {
        self.is_lost
    }

    /// Whether the set is up to date with these changes. If not, call `changes` again at once.
    #[getter]
    fn is_current(&self) -> bool {
        self.is_current
    }

    /// The `ChangeKind` of each change as one byte.
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

/// The cursor from the bytes of `Changes.next`.
pub(crate) fn cursor(bytes: &[u8]) -> PyResult<ChangeCursor> {
    bytes.try_into().map(ChangeCursor::from_bytes).map_err(|_| {
        let (expected, got) = (ChangeCursor::BYTES, bytes.len());
        let message = format!("since: a cursor of Changes.next has {expected} bytes; got {got}");
        PyValueError::new_err(message)
    })
}
