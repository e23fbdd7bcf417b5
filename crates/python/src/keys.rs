//! Block keys in Python: a single key, and a sequence of keys as one object.

use std::fmt::Display;
use std::ops::Deref;
use std::sync::Arc;

use cascade_block::{BlockKey, Digest, DigestAlgorithm};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyIterator, PyList, PySlice, PyString};

use crate::arguments::{of, position, selected_by, text, type_error, value_error};
use crate::buffers::Sources;

const KEY_BYTES: usize = 32;
/// Limit of the keys that a call reads from an iterable, which may be infinite.
const KEYS_MAX: usize = 1 << 22;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyBlockKey>()?;
    module.add_class::<PyBlockKeys>()?;
    module.add_function(wrap_pyfunction!(digest, module)?)?;
    module.add_function(wrap_pyfunction!(checksum, module)?)
}

/// The key of a block: 32 bytes that identify all tokens up to its end, in one namespace.
#[pyclass(name = "BlockKey", module = "cascadekv", frozen, eq, ord, hash)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct PyBlockKey(pub(crate) BlockKey);

#[pymethods]
impl PyBlockKey {
    #[new]
    #[pyo3(signature = (key, /))]
    fn new(key: &Bound<'_, PyAny>) -> PyResult<Self> {
        key_of("key", key).map(Self)
    }

    /// The key from its 64 hexadecimal digits.
    #[staticmethod]
    #[pyo3(signature = (text, /))]
    fn from_hex(#[pyo3(from_py_with = of::text)] text: String) -> PyResult<Self> {
        text.parse().map(Self).map_err(|error: cascade_block::KeyParseError| {
            PyValueError::new_err(format!("text: {error}"))
        })
    }

    /// The key as 64 hexadecimal digits.
    fn hex(&self) -> String {
        self.0.to_string()
    }

    fn __bytes__(&self) -> [u8; KEY_BYTES] {
        *self.0.as_bytes()
    }

    fn __repr__(&self) -> String {
        format!("BlockKey.from_hex('{}')", self.0)
    }

    fn __getnewargs__(&self) -> ([u8; KEY_BYTES],) {
        (*self.0.as_bytes(),)
    }
}

/// Keys of consecutive blocks: a sequence of `BlockKey` that is stored as one object.
#[pyclass(name = "BlockKeys", module = "cascadekv", frozen, eq, sequence)]
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PyBlockKeys(Arc<[BlockKey]>);

impl From<Vec<BlockKey>> for PyBlockKeys {
    fn from(keys: Vec<BlockKey>) -> Self {
        Self(keys.into())
    }
}

impl PyBlockKeys {
    pub(crate) fn as_slice(&self) -> &[BlockKey] {
        &self.0
    }
}

#[pymethods]
impl PyBlockKeys {
    #[new]
    #[pyo3(signature = (keys, /))]
    fn new(keys: Keys) -> Self {
        Self(keys.into_shared())
    }

    fn __len__(&self) -> usize {
        self.0.len()
    }

    fn __getitem__<'py>(&self, index: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let py = index.py();
        if let Ok(slice) = index.cast::<PySlice>() {
            let keys = selected_by(slice, self.0.len())?.map(|at| self.0[at]).collect::<Vec<_>>();
            return Ok(Self::from(keys).into_pyobject(py)?.into_any());
        }
        let at = position(index, self.0.len())?;
        Ok(PyBlockKey(self.0[at]).into_pyobject(py)?.into_any())
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyIterator>> {
        PyList::new(py, self.0.iter().map(|key| PyBlockKey(*key)))?.try_iter()
    }

    fn __bytes__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        PyBytes::new_with(py, self.0.len() * KEY_BYTES, |bytes| {
            for (piece, key) in bytes.chunks_exact_mut(KEY_BYTES).zip(self.0.iter()) {
                piece.copy_from_slice(key.as_bytes());
            }
            Ok(())
        })
    }

    fn __repr__(&self) -> String {
        format!("<BlockKeys of {} blocks>", self.0.len())
    }

    fn __getnewargs__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyBytes>,)> {
        Ok((self.__bytes__(py)?,))
    }
}

/// The keys of one call: a `BlockKeys`, a `BlockKey`, a multiple of 32 bytes, or an iterable.
pub(crate) enum Keys {
    Shared(Arc<[BlockKey]>),
    Owned(Vec<BlockKey>),
}

impl Keys {
    fn into_shared(self) -> Arc<[BlockKey]> {
        match self {
            Self::Shared(keys) => keys,
            Self::Owned(keys) => keys.into(),
        }
    }

    fn from_bytes(bytes: &[u8]) -> PyResult<Self> {
        if !bytes.len().is_multiple_of(KEY_BYTES) {
            return Err(PyValueError::new_err(format!(
                "keys: {} bytes are not a whole number of keys of {KEY_BYTES} bytes",
                bytes.len()
            )));
        }
        let keys = bytes.as_chunks::<KEY_BYTES>().0.iter().map(|key| BlockKey::from_bytes(*key));
        Ok(Self::Owned(keys.collect()))
    }
}

impl Deref for Keys {
    type Target = [BlockKey];

    fn deref(&self) -> &[BlockKey] {
        match self {
            Self::Shared(keys) => keys,
            Self::Owned(keys) => keys,
        }
    }
}

impl<'py> FromPyObject<'_, 'py> for Keys {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(keys) = object.cast::<PyBlockKeys>() {
            return Ok(Self::Shared(Arc::clone(&keys.get().0)));
        }
        if let Ok(key) = object.cast::<PyBlockKey>() {
            return Ok(Self::Owned(vec![key.get().0]));
        }
        if let Ok(bytes) = object.cast::<PyBytes>() {
            return Self::from_bytes(bytes.as_bytes());
        }
        if object.is_instance_of::<PyString>() {
            return Err(PyTypeError::new_err(
                "keys: text is not a key here; make one with cascadekv.keys.text_key or \
                 Namespace.key_of_id",
            ));
        }
        if let Ok(buffer) = Sources::whole("keys", &object) {
            return Self::from_bytes(buffer.slices()[0]);
        }
        let what = "keys: BlockKeys, a BlockKey, or an iterable of BlockKey or 32 bytes each";
        let items = object.try_iter().map_err(|_| type_error("keys", &object, what))?;
        let mut keys = Vec::new();
        for item in items {
            if keys.len() == KEYS_MAX {
                let message = format!("keys: more than {KEYS_MAX}, the limit of one call");
                return Err(PyValueError::new_err(message));
            }
            keys.push(key_of(format_args!("keys[{}]", keys.len()), &item?)?);
        }
        Ok(Self::Owned(keys))
    }
}

/// One key, from a `BlockKey` or 32 bytes.
pub(crate) fn key_of(name: impl Display, object: &Bound<'_, PyAny>) -> PyResult<BlockKey> {
    if let Ok(key) = object.cast::<PyBlockKey>() {
        return Ok(key.get().0);
    }
    let Ok(bytes) = object.cast::<PyBytes>() else {
        let mut what = "a key: a BlockKey or 32 bytes".to_owned();
        if object.is_instance_of::<PyString>() {
            what.push_str("; make one from text with cascadekv.keys.text_key");
        }
        return Err(type_error(name, object, what));
    };
    let bytes = bytes.as_bytes();
    let key = bytes.try_into().map_err(|_| {
        let got = bytes.len();
        PyValueError::new_err(format!("{name}: a key is {KEY_BYTES} bytes, got {got}"))
    })?;
    Ok(BlockKey::from_bytes(key))
}

/// The 32-byte digest of a buffer. `algorithm` is `"blake3"` or `"sha256"`.
#[pyfunction]
#[pyo3(signature = (data, algorithm = DigestAlgorithm::Blake3))]
#[pyo3(text_signature = "(data, algorithm='blake3')")]
fn digest(
    data: &Bound<'_, PyAny>,
    #[pyo3(from_py_with = digest_algorithm)] algorithm: DigestAlgorithm,
) -> PyResult<[u8; KEY_BYTES]> {
    let source = Sources::whole("data", data)?;
    let digest = data.py().detach(|| Digest::of(algorithm, source.slices()[0]));
    Ok(*digest.as_bytes())
}

fn digest_algorithm(given: &Bound<'_, PyAny>) -> PyResult<DigestAlgorithm> {
    match &*text("algorithm", given)? {
        "blake3" => Ok(DigestAlgorithm::Blake3),
        "sha256" => Ok(DigestAlgorithm::Sha256),
        _ => Err(value_error("algorithm", given, "\"blake3\" or \"sha256\"")),
    }
}

/// The CRC-32C of a buffer, which the store computes for every block that leaves DRAM.
#[pyfunction]
#[pyo3(signature = (data, /))]
fn checksum(data: &Bound<'_, PyAny>) -> PyResult<u32> {
    let source = Sources::whole("data", data)?;
    Ok(data.py().detach(|| cascade_block::checksum(source.slices()[0])))
}
