//! The arguments that the put methods share: parents, reservations and keywords.

use cascade_block::{BlockKey, NamespaceId};
use cascade_store::Put;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::arguments::type_error;
use crate::buffers::PyReservation;
use crate::keys::key_of;

/// Limit of the reservations that a call reads from an iterable, which may be infinite.
const RESERVATIONS_MAX: usize = 1 << 20;

/// The keywords that the put methods share.
pub(super) struct PutKeywords {
    pub(super) parents: Vec<Option<BlockKey>>,
    pub(super) namespace: NamespaceId,
    pub(super) is_prefix: bool,
    pub(super) last_is_partial: bool,
    pub(super) ttl_ms: Option<u64>,
}

impl PutKeywords {
    pub(super) fn put<'a>(
        &self,
        at: usize,
        key: BlockKey,
        bytes: &'a [u8],
        count: usize,
    ) -> Put<'a> {
        Put {
            key,
            bytes,
            parent: self.parents[at],
            namespace: self.namespace,
            is_prefix: self.is_prefix,
            is_partial: self.last_is_partial && at + 1 == count,
            ttl_ms: self.ttl_ms,
        }
    }
}

/// The reservations of a call.
pub(super) fn reserved<'py>(given: &Bound<'py, PyAny>) -> PyResult<Vec<Bound<'py, PyReservation>>> {
    let what = "a list of reservations, one for each key";
    let items = given.try_iter().map_err(|_| type_error("reservations", given, what))?;
    let one = |(at, item): (usize, PyResult<Bound<'py, PyAny>>)| {
        let item = item?;
        let reservation = item.cast::<PyReservation>().cloned();
        reservation.map_err(|_| type_error(format!("reservations[{at}]"), &item, "a Reservation"))
    };
    items.take(RESERVATIONS_MAX).enumerate().map(one).collect()
}

/// The parent of each key of a call.
pub(super) fn parents(
    keys: &[BlockKey],
    parent: Option<&Bound<'_, PyAny>>,
    chain: bool,
) -> PyResult<Vec<Option<BlockKey>>> {
    let first = parent.map(|parent| key_of("parent", parent)).transpose()?;
    if chain {
        let before = keys.iter().map(|key| Some(*key));
        return Ok([first].into_iter().chain(before).take(keys.len()).collect());
    }
    if first.is_some() {
        return Err(PyValueError::new_err(
            "parent: it requires a chain; pass chain=True, or leave parent out",
        ));
    }
    Ok(vec![None; keys.len()])
}
