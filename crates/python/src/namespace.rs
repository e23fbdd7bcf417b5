//! Namespaces in Python: which blocks may be reused for each other.

use std::collections::BTreeMap;

use cascade_block::{Manifest, Namespace, TenantSecret, WeightsFingerprint};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};

use crate::arguments::{self, wrong};
use crate::buffers::Sources;
use crate::keys::PyBlockKey;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyManifest>()?;
    module.add_class::<PyNamespace>()?;
    module.add_function(wrap_pyfunction!(weights_fingerprint, module)?)
}

/// Names weights by the bytes of their files, or of their headers and index, in a fixed order.
#[pyfunction]
#[pyo3(signature = (*parts))]
fn weights_fingerprint(parts: Vec<Bound<'_, PyAny>>) -> PyResult<String> {
    let sources = parts.iter().map(|part| Sources::whole("parts", part));
    let sources = sources.collect::<PyResult<Vec<_>>>()?;
    let parts = sources.iter().flat_map(Sources::slices);
    Ok(WeightsFingerprint::of_parts(parts).as_str().to_owned())
}

/// All that must match for one engine's KV to be right in another, as names and values.
///
/// Weights are named by a fingerprint, never by a path.
#[pyclass(name = "Manifest", module = "cascadekv", frozen, eq)]
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PyManifest(Manifest);

#[pymethods]
impl PyManifest {
    #[new]
    #[pyo3(signature = (fields, /))]
    fn new(#[pyo3(from_py_with = arguments::fields)] fields: Vec<(String, String)>) -> Self {
        let manifest = Manifest::new();
        Self(
            fields.into_iter().fold(manifest, |manifest, (name, value)| manifest.with(name, value)),
        )
    }

    /// The fields in the order in which they are hashed.
    #[getter]
    fn fields(&self) -> BTreeMap<&str, &str> {
        self.0.fields().collect()
    }

    /// The required fields that are not stated: without one, wrong KV could pass for right.
    fn missing(&self) -> Vec<&'static str> {
        self.0.missing()
    }

    /// The fields in which the two differ, each as a sentence; none when blocks may be reused.
    #[pyo3(signature = (other, /))]
    fn differences(&self, other: &Bound<'_, PyAny>) -> PyResult<Vec<String>> {
        let other = other.cast::<Self>().map_err(|_| wrong("other", other, "a Manifest"))?;
        let found = self.0.difference(&other.get().0);
        Ok(found.iter().map(ToString::to_string).collect())
    }

    /// The bytes that are hashed.
    fn canonical_bytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.canonical_bytes())
    }

    fn __repr__(&self) -> String {
        format!("Manifest({:?})", self.fields())
    }

    fn __getnewargs__(&self) -> (BTreeMap<&str, &str>,) {
        (self.fields(),)
    }
}

/// One set of blocks that may be reused for each other: a manifest under a tenant's secret.
///
/// Without a secret all tenants of a store share their blocks.
#[pyclass(name = "Namespace", module = "cascadekv", frozen, eq)]
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PyNamespace(pub(crate) Namespace);

#[pymethods]
impl PyNamespace {
    #[new]
    #[pyo3(signature = (manifest, secret = None))]
    fn new(manifest: &Bound<'_, PyAny>, secret: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        let Ok(manifest) = manifest.cast::<PyManifest>() else {
            return Err(wrong("manifest", manifest, "a Manifest"));
        };
        let secret = match secret {
            // A message must not show a secret, so a wrong one is told by its type.
            Some(secret) => secret
                .cast::<PyBytes>()
                .map(pyo3::types::PyBytesMethods::as_bytes)
                .map_err(|_| {
                    let told = "secret: bytes, or None for a namespace that all tenants share";
                    PyTypeError::new_err(told)
                })?,
            None => &[],
        };
        let secret = TenantSecret::new(secret);
        Ok(Self(Namespace::new(manifest.get().0.clone(), &secret)))
    }

    /// The key that every chain of this namespace starts from. As secret as the tenant's secret.
    #[getter]
    fn root(&self) -> PyBlockKey {
        PyBlockKey(self.0.root())
    }

    /// Sixteen bytes that name the namespace in stored records and reveal no secret.
    #[getter]
    fn id(&self) -> [u8; 16] {
        *self.0.id().as_bytes()
    }

    /// The manifest that it was made from.
    #[getter]
    fn manifest(&self) -> PyManifest {
        PyManifest(self.0.manifest().clone())
    }

    /// The key for an id of the caller's, such as `"sys_prompt_v1"`; text counts as UTF-8.
    #[pyo3(signature = (id, /))]
    fn key_of_id(&self, id: &Bound<'_, PyAny>) -> PyResult<PyBlockKey> {
        if id.is_instance_of::<PyString>() {
            let text = arguments::text("id", id)?;
            return Ok(PyBlockKey(self.0.key_of_id(text.as_bytes())));
        }
        let bytes = id.cast::<PyBytes>().map_err(|_| wrong("id", id, "text or bytes"))?;
        Ok(PyBlockKey(self.0.key_of_id(bytes.as_bytes())))
    }

    fn __repr__(&self) -> String {
        format!("<Namespace {}>", self.0.id())
    }
}
