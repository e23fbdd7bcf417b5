//! Block keys in Python: a single key, and a sequence of keys as one object.

use std::fmt::Display;
use std::ops::Deref;
use std::sync::Arc;

use cascade_block::{BlockKey, ChainTail, Digest, DigestAlgorithm};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyInt, PyIterator, PyList, PySlice, PyString};

use crate::arguments::{of, position, selected_by, text, type_error, value_error};
use crate::buffers::Sources;
use crate::namespace::PyNamespace;

const KEY_BYTES: usize = 32;
/// Limit of the keys that a call reads from an iterable, which may be infinite.
const KEYS_MAX: usize = 1 << 22;
/// Limit of the tokens that a call reads from an iterable, which may be infinite.
const TOKENS_MAX: usize = 1 << 26;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyBlockKey>()?;
    module.add_class::<PyBlockKeys>()?;
    module.add_function(wrap_pyfunction!(chain_keys, module)?)?;
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
                "keys: text is not a key; make a key from text with Namespace.key_of_id",
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
        return Err(type_error(name, object, "a key: a BlockKey or 32 bytes"));
    };
    let bytes = bytes.as_bytes();
    let key = bytes.try_into().map_err(|_| {
        let got = bytes.len();
        PyValueError::new_err(format!("{name}: a key is {KEY_BYTES} bytes, got {got}"))
    })?;
    Ok(BlockKey::from_bytes(key))
}

/// The keys of consecutive blocks of `block_tokens` tokens below `parent`.
///
/// `parent` is a `Namespace`, or the key of the block before the first token. A last block that is
/// not full gets a key only if `keep_partial` is true.
#[pyfunction]
#[pyo3(signature = (parent, tokens, block_tokens, *, keep_partial = false))]
fn chain_keys(
    py: Python<'_>,
    parent: &Bound<'_, PyAny>,
    tokens: &Bound<'_, PyAny>,
    #[pyo3(from_py_with = of::block_tokens)] block_tokens: usize,
    #[pyo3(from_py_with = of::keep_partial)] keep_partial: bool,
) -> PyResult<PyBlockKeys> {
    if block_tokens == 0 || u32::try_from(block_tokens).is_err() {
        let message = format!("block_tokens: {block_tokens}; it is from 1 to 2**32 - 1");
        return Err(PyValueError::new_err(message));
    }
    let parent = match parent.cast::<PyNamespace>() {
        Ok(namespace) => namespace.get().0.root(),
        Err(_) => key_of("parent", parent)?,
    };
    let tokens = token_ids(tokens)?;
    let tail = if keep_partial { ChainTail::Keep } else { ChainTail::Drop };
    let keys = py.detach(|| cascade_block::chain_keys(parent, &tokens, block_tokens, tail));
    Ok(keys.into())
}

/// Token ids from an array of integers (NumPy, `array`, `memoryview`) or any iterable of `int`.
fn token_ids(tokens: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    if let Ok(array) = PyBuffer::<u32>::get(tokens) {
        return array.to_vec(tokens.py());
    }
    if let Ok(array) = PyBuffer::<i64>::get(tokens) {
        return array.to_vec(tokens.py())?.into_iter().enumerate().map(token_id).collect();
    }
    if let Ok(array) = PyBuffer::<i32>::get(tokens) {
        return array.to_vec(tokens.py())?.into_iter().enumerate().map(token_id).collect();
    }
    let what = "token ids: an array of integers or an iterable of int";
    let items = tokens.try_iter().map_err(|_| type_error("tokens", tokens, what))?;
    let mut ids = Vec::new();
    for item in items {
        let (at, item) = (ids.len(), item?);
        if at == TOKENS_MAX {
            let message = format!("tokens: more than {TOKENS_MAX}, the limit of one call");
            return Err(PyValueError::new_err(message));
        }
        let id = item.extract::<u32>();
        let is_integer = item.is_instance_of::<PyInt>();
        ids.push(id.map_err(|_| {
            let (name, what) = (format!("tokens[{at}]"), "a token id: an int from 0 to 2**32 - 1");
            if is_integer { value_error(name, &item, what) } else { type_error(name, &item, what) }
        })?);
    }
    Ok(ids)
}

fn token_id((at, id): (usize, impl TryInto<u32> + Copy + Display)) -> PyResult<u32> {
    id.try_into().map_err(|_| {
        let what = "a token id: an int from 0 to 2**32 - 1";
        PyValueError::new_err(format!("tokens[{at}]: {id} is not {what}"))
    })
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
