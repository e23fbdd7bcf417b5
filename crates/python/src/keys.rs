//! Block keys in Python: one key, and many keys as one object.

use std::fmt::Display;
use std::ops::Deref;
use std::sync::Arc;

use cascade_block::{BlockKey, ChainTail, Digest, DigestAlgorithm};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyIndexError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyIterator, PyList, PySlice, PyString};

use crate::buffers::Sources;
use crate::namespace::PyNamespace;

const KEY_BYTES: usize = 32;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyBlockKey>()?;
    module.add_class::<PyBlockKeys>()?;
    module.add_function(wrap_pyfunction!(chain_keys, module)?)?;
    module.add_function(wrap_pyfunction!(digest, module)?)?;
    module.add_function(wrap_pyfunction!(checksum, module)?)
}

/// Names a block by what it stands for: all tokens up to its end, in one namespace. 32 bytes.
#[pyclass(name = "BlockKey", module = "cascadekv", frozen, eq, ord, hash)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct PyBlockKey(pub(crate) BlockKey);

#[pymethods]
impl PyBlockKey {
    #[new]
    #[pyo3(signature = (key, /))]
    fn new(key: [u8; KEY_BYTES]) -> Self {
        Self(BlockKey::from_bytes(key))
    }

    /// The key that 64 hexadecimal digits stand for.
    #[staticmethod]
    #[pyo3(signature = (text, /))]
    fn from_hex(text: &str) -> PyResult<Self> {
        text.parse()
            .map(Self)
            .map_err(|error: cascade_block::KeyParseError| PyValueError::new_err(error.to_string()))
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

/// Keys of consecutive blocks as one object; a sequence of `BlockKey`.
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
    fn new(keys: &Bound<'_, PyAny>) -> PyResult<Self> {
        Ok(Self(keys.extract::<Keys>()?.into_shared()))
    }

    fn __len__(&self) -> usize {
        self.0.len()
    }

    fn __getitem__<'py>(&self, index: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let py = index.py();
        if let Ok(slice) = index.cast::<PySlice>() {
            let picked = picked_by(slice, self.0.len())?.map(|at| self.0[at]).collect::<Vec<_>>();
            return Ok(Self::from(picked).into_pyobject(py)?.into_any());
        }
        let at = position(index.extract()?, self.0.len())?;
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

/// The position that a Python index means, counting from the end where negative.
pub(crate) fn position(index: isize, count: usize) -> PyResult<usize> {
    let at = if index < 0 {
        count.checked_sub(index.unsigned_abs())
    } else {
        Some(index.unsigned_abs())
    };
    at.filter(|at| *at < count)
        .ok_or_else(|| PyIndexError::new_err(format!("index {index} of {count} blocks")))
}

/// The positions that a Python slice picks.
pub(crate) fn picked_by(
    slice: &Bound<'_, PySlice>,
    count: usize,
) -> PyResult<impl Iterator<Item = usize> + use<>> {
    let count = isize::try_from(count).expect("a sequence in memory fits isize");
    let picked = slice.indices(count)?;
    let at = move |nth: usize| picked.start + nth.cast_signed() * picked.step;
    Ok((0..picked.slicelength).map(move |nth| at(nth).cast_unsigned()))
}

/// The keys of one call: a `BlockKeys`, a `BlockKey`, bytes of n x 32, or a sequence of keys.
pub(crate) enum Keys {
    Shared(Arc<[BlockKey]>),
    Own(Vec<BlockKey>),
}

impl Keys {
    fn into_shared(self) -> Arc<[BlockKey]> {
        match self {
            Self::Shared(keys) => keys,
            Self::Own(keys) => keys.into(),
        }
    }

    fn from_bytes(bytes: &[u8]) -> PyResult<Self> {
        if !bytes.len().is_multiple_of(KEY_BYTES) {
            return Err(PyValueError::new_err(format!(
                "{} bytes are no whole number of keys of {KEY_BYTES} bytes",
                bytes.len()
            )));
        }
        let keys = bytes.as_chunks::<KEY_BYTES>().0.iter().map(|key| BlockKey::from_bytes(*key));
        Ok(Self::Own(keys.collect()))
    }
}

impl Deref for Keys {
    type Target = [BlockKey];

    fn deref(&self) -> &[BlockKey] {
        match self {
            Self::Shared(keys) => keys,
            Self::Own(keys) => keys,
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
            return Ok(Self::Own(vec![key.get().0]));
        }
        if let Ok(bytes) = object.cast::<PyBytes>() {
            return Self::from_bytes(bytes.as_bytes());
        }
        if object.is_instance_of::<PyString>() {
            return Err(PyTypeError::new_err(
                "keys are BlockKey or 32 bytes each, not text; Namespace.key_of_id makes a key \
                 from text",
            ));
        }
        if let Ok(buffer) = Sources::whole(&object) {
            return Self::from_bytes(buffer.slices()[0]);
        }
        let keys = object.try_iter()?.map(|item| key_of(&item?));
        Ok(Self::Own(keys.collect::<PyResult<_>>()?))
    }
}

/// One key, from a `BlockKey` or 32 bytes.
pub(crate) fn key_of(object: &Bound<'_, PyAny>) -> PyResult<BlockKey> {
    if let Ok(key) = object.cast::<PyBlockKey>() {
        return Ok(key.get().0);
    }
    let bytes = object.cast::<PyBytes>().map_err(|_| {
        let kind = object.get_type();
        PyTypeError::new_err(format!("a key is a BlockKey or 32 bytes, not {kind}"))
    })?;
    let bytes = bytes.as_bytes();
    let key = bytes.try_into().map_err(|_| {
        PyValueError::new_err(format!("a key is {KEY_BYTES} bytes, got {}", bytes.len()))
    })?;
    Ok(BlockKey::from_bytes(key))
}

/// The keys of consecutive blocks of `block_tokens` tokens below `parent`.
///
/// `parent` is a `Namespace`, or the key of the block before the first token. Tokens that do not
/// fill the last block get no key unless `keep_partial` is true.
#[pyfunction]
#[pyo3(signature = (parent, tokens, block_tokens, *, keep_partial = false))]
fn chain_keys(
    py: Python<'_>,
    parent: &Bound<'_, PyAny>,
    tokens: &Bound<'_, PyAny>,
    block_tokens: usize,
    keep_partial: bool,
) -> PyResult<PyBlockKeys> {
    if block_tokens == 0 || u32::try_from(block_tokens).is_err() {
        return Err(PyValueError::new_err("block_tokens is from 1 to 2**32 - 1"));
    }
    let parent = match parent.cast::<PyNamespace>() {
        Ok(namespace) => namespace.get().0.root(),
        Err(_) => key_of(parent)?,
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
    let ids = tokens.try_iter()?.map(|item| item?.extract::<i64>());
    ids.enumerate().map(|(at, id)| token_id((at, id?))).collect()
}

fn token_id((at, id): (usize, impl TryInto<u32> + Copy + Display)) -> PyResult<u32> {
    id.try_into().map_err(|_| {
        PyValueError::new_err(format!("tokens[{at}] is {id}; a token id is from 0 to 2**32 - 1"))
    })
}

/// The 32-byte digest of some bytes: `"blake3"` or `"sha256"`.
#[pyfunction]
#[pyo3(signature = (data, algorithm = "blake3"))]
fn digest(data: &Bound<'_, PyAny>, algorithm: &str) -> PyResult<[u8; KEY_BYTES]> {
    let algorithm = match algorithm {
        "blake3" => DigestAlgorithm::Blake3,
        "sha256" => DigestAlgorithm::Sha256,
        other => {
            let told = format!("algorithm is \"blake3\" or \"sha256\", not {other:?}");
            return Err(PyValueError::new_err(told));
        }
    };
    let source = Sources::whole(data)?;
    let digest = data.py().detach(|| Digest::of(algorithm, source.slices()[0]));
    Ok(*digest.as_bytes())
}

/// The CRC-32C of some bytes: what guards every byte that leaves DRAM.
#[pyfunction]
#[pyo3(signature = (data, /))]
fn checksum(data: &Bound<'_, PyAny>) -> PyResult<u32> {
    let source = Sources::whole(data)?;
    Ok(data.py().detach(|| cascade_block::checksum(source.slices()[0])))
}
