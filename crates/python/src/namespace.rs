//! Namespaces in Python: sets of blocks that may be reused for each other.

use std::collections::BTreeMap;

use cascade_block::{Manifest, Namespace, NamespaceId, TenantSecret, WeightsFingerprint};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};

use crate::arguments::{self, type_error};
use crate::buffers::Sources;
use crate::keys::PyBlockKey;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyManifest>()?;
    module.add_class::<PyNamespace>()?;
    module.add_function(wrap_pyfunction!(weights_fingerprint, module)?)
}

/// A fingerprint of model weights, from the bytes of their files, or of their headers and index, in
/// a fixed order.
#[pyfunction]
#[pyo3(signature = (*parts))]
fn weights_fingerprint(py: Python<'_>, parts: Vec<Bound<'_, PyAny>>) -> PyResult<String> {
    let sources = parts.iter().map(|part| Sources::whole("parts", part));
    let sources = sources.collect::<PyResult<Vec<_>>>()?;
    // Detached: files of weights have gigabytes.
    let fingerprint =
        py.detach(|| WeightsFingerprint::of_parts(sources.iter().flat_map(Sources::slices)));
    Ok(fingerprint.as_str().to_owned())
}

/// A compatibility manifest: the names and values of everything that must match before an engine
/// may use the KV of another.
///
/// Weights are identified by a fingerprint, never by a path.
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

    /// The fields, in the order of their hash.
    #[getter]
    fn fields(&self) -> BTreeMap<&str, &str> {
        self.0.fields().collect()
    }

    /// The required fields that are missing. Without one of them, engines could exchange wrong KV.
    fn missing(&self) -> Vec<&'static str> {
        self.0.missing()
    }

    /// A sentence for each field in which the manifests differ. Empty if blocks may be reused.
    #[pyo3(signature = (other, /))]
    fn differences(&self, other: &Bound<'_, PyAny>) -> PyResult<Vec<String>> {
        let other = other.cast::<Self>().map_err(|_| type_error("other", other, "a Manifest"))?;
        let found = self.0.difference(&other.get().0);
        Ok(found.iter().map(ToString::to_string).collect())
    }

    /// The bytes that are hashed for the id of a namespace.
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

/// A set of blocks that may be reused for each other, defined by a manifest and a tenant's secret.
///
/// Without a secret, all tenants of a store share the blocks.
#[pyclass(name = "Namespace", module = "cascadekv", frozen, eq)]
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PyNamespace(pub(crate) Namespace);

#[pymethods]
impl PyNamespace {
    #[new]
    #[pyo3(signature = (manifest, secret = None))]
    fn new(manifest: &Bound<'_, PyAny>, secret: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        let Ok(manifest) = manifest.cast::<PyManifest>() else {
            return Err(type_error("manifest", manifest, "a Manifest"));
        };
        let secret = match secret {
            // A message must never show a secret, so this one does not contain the value.
            Some(secret) => secret
                .cast::<PyBytes>()
                .map(pyo3::types::PyBytesMethods::as_bytes)
                .map_err(|_| {
                    PyTypeError::new_err(
                        "secret: bytes are required, or None for a namespace that all tenants \
                         share",
                    )
                })?,
            None => &[],
        };
        let secret = TenantSecret::new(secret);
        Ok(Self(Namespace::new(manifest.get().0.clone(), &secret)))
    }

    /// The root key, from which every chain of this namespace starts. It is as secret as `secret`.
    #[getter]
    fn root(&self) -> PyBlockKey {
        PyBlockKey(self.0.root())
    }

    /// The 16-byte id of the namespace in stored records. It does not reveal the secret.
    #[getter]
    fn id(&self) -> [u8; 16] {
        *self.0.id().as_bytes()
    }

    /// The manifest of the namespace.
    #[getter]
    fn manifest(&self) -> PyManifest {
        PyManifest(self.0.manifest().clone())
    }

    /// The key for an id that the caller chooses, such as `"sys_prompt_v1"`. Text is encoded as
    /// UTF-8.
    #[pyo3(signature = (id, /))]
    fn key_of_id(&self, id: &Bound<'_, PyAny>) -> PyResult<PyBlockKey> {
        if id.is_instance_of::<PyString>() {
            let text = arguments::text("id", id)?;
            return Ok(PyBlockKey(self.0.key_of_id(text.as_bytes())));
        }
        let bytes = id.cast::<PyBytes>().map_err(|_| type_error("id", id, "text or bytes"))?;
        Ok(PyBlockKey(self.0.key_of_id(bytes.as_bytes())))
    }

    fn __repr__(&self) -> String {
        format!("<Namespace {}>", self.0.id())
    }
}

/// The id of a namespace, or `None`.
pub(crate) fn namespace_id(given: &Bound<'_, PyAny>) -> PyResult<Option<NamespaceId>> {
    if given.is_none() {
        return Ok(None);
    }
    let space = given.cast::<PyNamespace>();
    let space = space.map_err(|_| type_error("namespace", given, "a Namespace or None"))?;
    Ok(Some(space.get().0.id()))
}
