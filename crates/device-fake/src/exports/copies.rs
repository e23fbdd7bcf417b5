//! Functions that copy and fill.
#![expect(unsafe_code, reason = "exports functions with C's interface")]

use std::ffi::{c_int, c_uint, c_void};
use std::slice;

use crate::state::{INVALID_VALUE, Side, State, Transfer, Work};
use crate::streams::submit;
use crate::world::{Needs, Status, World};

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Location {
    kind: c_uint,
    id: c_int,
}

/// `CUmemcpyAttributes`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Attributes {
    source_access_order: c_uint,
    source_hint: Location,
    target_hint: Location,
    flags: c_uint,
}

/// A copy between addresses; `sides` says where target and source have to be, if it matters.
fn transfer(
    state: &State,
    (target, source): (u64, u64),
    bytes: usize,
    sides: Option<(Side, Side)>,
) -> Result<Transfer, Status> {
    let find = |address| state.find(usize::try_from(address).map_err(|_| INVALID_VALUE)?, bytes);
    let (target, source) = (find(target)?, find(source)?);
    if sides.is_some_and(|sides| sides != (target.side, source.side)) {
        return Err(INVALID_VALUE);
    }
    Ok(Transfer { target, source: Ok(source), bytes })
}

fn copy(
    name: &'static str,
    addresses: (u64, u64),
    bytes: usize,
    stream: *mut c_void,
    sides: (Side, Side),
) -> Status {
    World::call(name, Needs::Current, |_, state| {
        let transfer = transfer(state, addresses, bytes, Some(sides))?;
        submit(state, stream.addr(), name, Work::Transfers(vec![transfer]))
    })
}

#[unsafe(export_name = "cuMemcpyHtoDAsync_v2")]
pub(crate) unsafe extern "C" fn to_device(
    target: u64,
    source: *const c_void,
    bytes: usize,
    stream: *mut c_void,
) -> Status {
    let addresses = (target, source.expose_provenance() as u64);
    copy("cuMemcpyHtoDAsync_v2", addresses, bytes, stream, (Side::Device, Side::Host))
}

#[unsafe(export_name = "cuMemcpyDtoHAsync_v2")]
pub(crate) unsafe extern "C" fn to_host(
    target: *mut c_void,
    source: u64,
    bytes: usize,
    stream: *mut c_void,
) -> Status {
    let addresses = (target.expose_provenance() as u64, source);
    copy("cuMemcpyDtoHAsync_v2", addresses, bytes, stream, (Side::Host, Side::Device))
}

#[unsafe(export_name = "cuMemcpyDtoDAsync_v2")]
pub(crate) unsafe extern "C" fn within(
    target: u64,
    source: u64,
    bytes: usize,
    stream: *mut c_void,
) -> Status {
    let sides = (Side::Device, Side::Device);
    copy("cuMemcpyDtoDAsync_v2", (target, source), bytes, stream, sides)
}

#[unsafe(export_name = "cuMemsetD8Async")]
pub(crate) unsafe extern "C" fn fill(
    target: u64,
    byte: u8,
    bytes: usize,
    stream: *mut c_void,
) -> Status {
    World::call("cuMemsetD8Async", Needs::Current, |_, state| {
        let address = usize::try_from(target).map_err(|_| INVALID_VALUE)?;
        let target = state.find(address, bytes)?;
        let transfer = Transfer { target, source: Err(byte), bytes };
        submit(state, stream.addr(), "cuMemsetD8Async", Work::Transfers(vec![transfer]))
    })
}

/// What both forms of the batched copy share.
struct Batch {
    targets: *mut u64,
    sources: *mut u64,
    lengths: *mut usize,
    count: usize,
    attributes: *mut Attributes,
    holds_from: *mut usize,
    attribute_count: usize,
    stream: *mut c_void,
}

/// # Safety
/// The arrays have `count` and `attribute_count` elements.
unsafe fn batch(name: &'static str, batch: &Batch) -> Status {
    World::call(name, Needs::Current, |_, state| {
        let count = batch.count;
        let arrays = [batch.targets, batch.sources];
        if arrays.iter().any(|array| array.is_null()) || batch.lengths.is_null() || count == 0 {
            return Err(INVALID_VALUE);
        }
        if batch.attributes.is_null() || batch.holds_from.is_null() || batch.attribute_count != 1 {
            return Err(INVALID_VALUE);
        }
        // SAFETY: one attribute, by the caller's promise.
        let attributes = unsafe { batch.attributes.read() };
        // SAFETY: as above.
        let holds_from = unsafe { batch.holds_from.read() };
        if !(1..=3).contains(&attributes.source_access_order) || holds_from != 0 {
            return Err(INVALID_VALUE);
        }
        let hints = [attributes.source_hint, attributes.target_hint];
        if hints.iter().any(|hint| hint.kind > 4 || hint.id != 0) || attributes.flags > 1 {
            return Err(INVALID_VALUE);
        }
        // SAFETY: arrays of this length, by the caller's promise.
        let [targets, sources] = arrays.map(|array| unsafe { slice::from_raw_parts(array, count) });
        // SAFETY: as above.
        let lengths = unsafe { slice::from_raw_parts(batch.lengths, count) };
        let addresses = targets.iter().zip(sources).zip(lengths);
        let transfers = addresses
            .map(|((target, source), bytes)| transfer(state, (*target, *source), *bytes, None))
            .collect::<Result<Vec<Transfer>, Status>>()?;
        submit(state, batch.stream.addr(), name, Work::Transfers(transfers))
    })
}

#[unsafe(export_name = "cuMemcpyBatchAsync")]
pub(crate) unsafe extern "C" fn batch_with_index(
    targets: *mut u64,
    sources: *mut u64,
    lengths: *mut usize,
    count: usize,
    attributes: *mut Attributes,
    holds_from: *mut usize,
    attribute_count: usize,
    fail_index: *mut usize,
    stream: *mut c_void,
) -> Status {
    let these =
        Batch { targets, sources, lengths, count, attributes, holds_from, attribute_count, stream };
    // SAFETY: the caller's promise.
    let status = unsafe { batch("cuMemcpyBatchAsync", &these) };
    if status != 0 && !fail_index.is_null() {
        // SAFETY: the caller's promise. No copy is at fault by itself.
        unsafe { fail_index.write(usize::MAX) };
    }
    status
}

#[unsafe(export_name = "cuMemcpyBatchAsync_v2")]
pub(crate) unsafe extern "C" fn batch_without_index(
    targets: *mut u64,
    sources: *mut u64,
    lengths: *mut usize,
    count: usize,
    attributes: *mut Attributes,
    holds_from: *mut usize,
    attribute_count: usize,
    stream: *mut c_void,
) -> Status {
    let these =
        Batch { targets, sources, lengths, count, attributes, holds_from, attribute_count, stream };
    // SAFETY: the caller's promise.
    unsafe { batch("cuMemcpyBatchAsync_v2", &these) }
}
