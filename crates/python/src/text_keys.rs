//! Text keys: one id of the caller's in the place of the keys of a call, and one result instead of
//! a list.

use std::ops::Deref;

use cascade_block::{BlockKey, Namespace, NamespaceId};
use cascade_store::{BlockStore, CallOptions, PutOutcome, StoreError, ViewOutcome};
use pyo3::IntoPyObjectExt;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};

use crate::arguments::{self, shown};
use crate::errors::{ConflictError, to_python};
use crate::keys::{Keys, PyBlockKey};

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(text_key, module)?)
}

/// The block key of a text key: not empty, encoded as UTF-8, in a namespace of its own.
#[pyfunction]
#[pyo3(signature = (text, /))]
fn text_key(text: &Bound<'_, PyAny>) -> PyResult<PyBlockKey> {
    checked("text", text).map(|text| PyBlockKey(cascade_block::text_key(&text)))
}

fn checked(name: &str, given: &Bound<'_, PyAny>) -> PyResult<String> {
    let text = arguments::text(name, given)?;
    if text.is_empty() {
        let message = format!("{name}: a text key is not empty; give any other text");
        return Err(PyValueError::new_err(message));
    }
    Ok(text)
}

/// The keys of a call that also takes a text key.
pub(crate) struct CallKeys {
    keys: Keys,
    /// The text as messages show it.
    text: Option<String>,
}

impl Deref for CallKeys {
    type Target = [BlockKey];

    fn deref(&self) -> &[BlockKey] {
        &self.keys
    }
}

impl<'py> FromPyObject<'_, 'py> for CallKeys {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if !object.is_instance_of::<PyString>() {
            return Ok(Self { keys: object.extract()?, text: None });
        }
        let key = cascade_block::text_key(&checked("keys", &object)?);
        Ok(Self { keys: Keys::Owned(vec![key]), text: Some(shown(&object)) })
    }
}

impl CallKeys {
    /// The result of a text key, or the list of the results of all keys.
    pub(crate) fn results<'py, T: IntoPyObject<'py>>(
        &self,
        py: Python<'py>,
        mut results: Vec<T>,
    ) -> PyResult<Bound<'py, PyAny>> {
        if self.text.is_none() {
            return results.into_bound_py_any(py);
        }
        results.pop().expect("a call has a result for each key").into_bound_py_any(py)
    }

    /// The namespace of a put. Refuses what places a text key in a chain or another namespace.
    pub(crate) fn namespace(
        &self,
        given: Option<NamespaceId>,
        is_in_chain: bool,
    ) -> PyResult<NamespaceId> {
        if self.text.is_none() {
            return Ok(given.unwrap_or_default());
        }
        if given.is_some() || is_in_chain {
            return Err(PyValueError::new_err(
                "keys: a text key is in no chain and has a namespace of its own; leave out parent, \
                 last_is_partial and namespace, or make a key with Namespace.key_of_id",
            ));
        }
        Ok(Namespace::of_text().id())
    }

    /// Raises the error of a text key: of a put that failed, and of other bytes under the key.
    pub(crate) fn check_put(&self, outcomes: &[PutOutcome]) -> PyResult<()> {
        let Some(text) = &self.text else { return Ok(()) };
        match outcomes {
            [PutOutcome::Failed(error)] => Err(to_python(error)),
            [PutOutcome::Conflict] => Err(ConflictError::new_err(format!(
                "{text} is stored with other bytes, which stay; delete it first, or put the new \
                 bytes under another key"
            ))),
            _ => Ok(()),
        }
    }

    /// A copy of the block of a text key; `None` for a miss.
    pub(crate) fn get_text<'py>(
        &self,
        py: Python<'py>,
        store: &dyn BlockStore,
        options: CallOptions,
    ) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let viewed = py.detach(|| store.view(&self.keys, options)).pop();
        match viewed {
            Some(ViewOutcome::Hit { slab, .. }) => {
                let bytes = slab.bytes_or_copy();
                let bytes = bytes.map_err(|error| to_python(&StoreError::Device(error)))?;
                Ok(Some(PyBytes::new(py, &bytes)))
            }
            Some(ViewOutcome::Failed(error)) => Err(to_python(&error)),
            Some(ViewOutcome::Miss) | None => Ok(None),
        }
    }

    /// Refuses buffers for a text key, and block keys without buffers. Returns the buffers.
    pub(crate) fn buffers<'a, 'py>(
        &self,
        given: Option<&'a Bound<'py, PyAny>>,
    ) -> PyResult<Option<&'a Bound<'py, PyAny>>> {
        match (&self.text, given) {
            (Some(_), Some(_)) => Err(PyTypeError::new_err(
                "buffers: get returns the bytes of a text key; leave buffers out",
            )),
            (None, None) => Err(PyTypeError::new_err(
                "buffers: none given; give a writable buffer for each key, or one for all of them",
            )),
            (_, buffers) => Ok(buffers),
        }
    }
}
