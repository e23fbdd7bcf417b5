//! Keys of the blocks of a sequence of tokens.

use std::fmt::Display;

use cascade_block::ChainTail;
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyInt;

use crate::arguments::{of, type_error, value_error};
use crate::keys::{PyBlockKeys, key_of};
use crate::namespace::PyNamespace;

/// Limit of the tokens that a call reads from an iterable, which may be infinite.
const TOKENS_MAX: usize = 1 << 26;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(chain_keys, module)?)
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
