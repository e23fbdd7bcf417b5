//! Functions of virtual memory management: allocations, reserved addresses, mappings, descriptors.
//!
//! Reserved addresses stay without access for the processor, also where memory is mapped: its bytes
//! are elsewhere, as those of all memory of the fake.
#![expect(unsafe_code, reason = "exports functions with C's interface")]

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};

use super::write;
use crate::device_memory::PAGE_BYTES;
use crate::shared_memory::Allocation;
use crate::state::{
    INVALID_DEVICE, INVALID_VALUE, Memory, NOT_SUPPORTED, OUT_OF_MEMORY, PEER_ACCESS_UNSUPPORTED,
    Side, State,
};
use crate::world::{Needs, Status, World};

/// `CU_MEM_ALLOCATION_TYPE_PINNED`, `CU_MEM_LOCATION_TYPE_DEVICE` and
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const PINNED: c_uint = 1;
const DEVICE: c_uint = 1;
const FILE_DESCRIPTOR: c_uint = 1;
/// `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`, and what its ranges are multiples of.
const DMA_BUF: c_uint = 1;
const HOST_PAGE_BYTES: usize = 4096;
/// `CU_MEM_ACCESS_FLAGS_PROT_NONE` and `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`. Memory that is only
/// read is not faked.
const NO_ACCESS: c_uint = 0;
const READ_AND_WRITE: c_uint = 3;

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Location {
    kind: c_uint,
    id: c_int,
}

/// `CUmemAllocationProp`.
#[repr(C)]
pub(crate) struct Properties {
    kind: c_uint,
    handle_types: c_uint,
    location: Location,
    windows_metadata: *const c_void,
    compression: u8,
    is_for_rdma: u8,
    usage: u16,
    reserved: [u8; 4],
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Access {
    location: Location,
    flags: c_uint,
}

fn check_device(world: &World, location: Location) -> Result<c_int, Status> {
    if location.kind != DEVICE {
        return Err(INVALID_VALUE);
    }
    let exists = (0..world.settings.devices).contains(&location.id);
    exists.then_some(location.id).ok_or(INVALID_DEVICE)
}

/// The device that properties name.
///
/// # Safety
/// They are null, or as `cuda.h` declares them.
unsafe fn device_of(world: &World, properties: *const Properties) -> Result<c_int, Status> {
    // SAFETY: the promise above.
    let properties = unsafe { properties.as_ref() }.ok_or(INVALID_VALUE)?;
    let flags = [properties.compression, properties.is_for_rdma].map(c_uint::from);
    let is_plain = flags == [0; 2] && properties.usage == 0 && properties.reserved == [0; 4];
    if properties.kind != PINNED || !is_plain || !properties.windows_metadata.is_null() {
        return Err(INVALID_VALUE);
    }
    if properties.handle_types != FILE_DESCRIPTOR {
        return Err(NOT_SUPPORTED);
    }
    check_device(world, properties.location)
}

/// A length that may be allocated, reserved or mapped.
fn check_length(bytes: usize) -> Result<(), Status> {
    let fits = bytes > 0 && bytes.is_multiple_of(PAGE_BYTES);
    fits.then_some(()).ok_or(INVALID_VALUE)
}

fn number(address: u64) -> Result<usize, Status> {
    usize::try_from(address).map_err(|_| INVALID_VALUE)
}

#[unsafe(export_name = "cuMemGetAllocationGranularity")]
pub(crate) unsafe extern "C" fn get_granularity(
    granularity: *mut usize,
    properties: *const Properties,
    option: c_uint,
) -> Status {
    World::call("cuMemGetAllocationGranularity", Needs::Context, |world, _| {
        // SAFETY: the caller's promise.
        unsafe { device_of(world, properties) }?;
        if option > 1 {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller's promise.
        unsafe { write(granularity, PAGE_BYTES) }
    })
}

#[unsafe(export_name = "cuMemCreate")]
pub(crate) unsafe extern "C" fn create(
    handle: *mut u64,
    bytes: usize,
    properties: *const Properties,
    flags: c_ulonglong,
) -> Status {
    World::call("cuMemCreate", Needs::Context, |world, state| {
        // SAFETY: the caller's promise.
        let device = unsafe { device_of(world, properties) }?;
        check_length(bytes)?;
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        let used = state.used_bytes.checked_add(bytes);
        let used = used.filter(|used| *used <= world.settings.bytes).ok_or(OUT_OF_MEMORY)?;
        let allocation = Allocation::create(device, bytes).ok_or(OUT_OF_MEMORY)?;
        // SAFETY: the caller's promise.
        unsafe { insert(state, handle, allocation) }?;
        state.used_bytes = used;
        Ok(())
    })
}

/// # Safety
/// The handle is null, or may be written.
unsafe fn insert(
    state: &mut State,
    handle: *mut u64,
    allocation: Allocation,
) -> Result<(), Status> {
    let new = state.new_handle() as u64;
    // SAFETY: the promise above.
    unsafe { write(handle, new) }?;
    state.allocations.insert(new, allocation);
    Ok(())
}

/// Frees an allocation that nothing uses any more.
fn free_unused(state: &mut State, handle: u64) {
    let is_unused = |it: &Allocation| it.is_released && it.mappings == 0;
    if state.allocations.get(&handle).is_some_and(is_unused)
        && let Some(allocation) = state.allocations.remove(&handle)
        && allocation.is_own
    {
        state.used_bytes -= allocation.bytes;
    }
}

#[unsafe(export_name = "cuMemRelease")]
pub(crate) unsafe extern "C" fn release(handle: u64) -> Status {
    World::release("cuMemRelease", Needs::Context, |state| {
        let allocation = state.allocations.get_mut(&handle).filter(|it| !it.is_released);
        allocation.ok_or(INVALID_VALUE)?.is_released = true;
        free_unused(state, handle);
        Ok(())
    })
}

#[unsafe(export_name = "cuMemAddressReserve")]
pub(crate) unsafe extern "C" fn reserve(
    address: *mut u64,
    bytes: usize,
    alignment: usize,
    _wanted: u64,
    flags: c_ulonglong,
) -> Status {
    World::call("cuMemAddressReserve", Needs::Context, |_, state| {
        check_length(bytes)?;
        let is_aligned = alignment == 0 || alignment.is_power_of_two();
        if !is_aligned || alignment > PAGE_BYTES || flags != 0 {
            return Err(INVALID_VALUE);
        }
        let start = state.take_addresses(bytes)?;
        // SAFETY: the caller's promise.
        unsafe { write(address, start as u64) }?;
        state.reservations.insert(start, bytes);
        Ok(())
    })
}

/// Whether memory is mapped in a range.
fn is_used(state: &State, start: usize, bytes: usize) -> bool {
    let before = state.device.range(..start.saturating_add(bytes)).next_back();
    before.is_some_and(|(key, memory)| key + memory.bytes > start)
}

#[unsafe(export_name = "cuMemAddressFree")]
pub(crate) unsafe extern "C" fn free(address: u64, bytes: usize) -> Status {
    World::release("cuMemAddressFree", Needs::Context, |state| {
        let start = number(address)?;
        if state.reservations.get(&start) != Some(&bytes) || is_used(state, start, bytes) {
            return Err(INVALID_VALUE);
        }
        state.reservations.remove(&start);
        Ok(())
    })
}

#[unsafe(export_name = "cuMemMap")]
pub(crate) unsafe extern "C" fn map(
    address: u64,
    bytes: usize,
    offset: usize,
    handle: u64,
    flags: c_ulonglong,
) -> Status {
    World::call("cuMemMap", Needs::Context, |_, state| {
        let start = number(address)?;
        check_length(bytes)?;
        let reserved = state.reservations.range(..=start).next_back();
        let (first, length) = reserved.ok_or(INVALID_VALUE)?;
        let is_reserved = (start - first).checked_add(bytes).is_some_and(|end| end <= *length);
        let is_aligned = start.is_multiple_of(PAGE_BYTES) && offset == 0 && flags == 0;
        if !is_reserved || !is_aligned || is_used(state, start, bytes) {
            return Err(INVALID_VALUE);
        }
        let allocation = state.allocations.get_mut(&handle).filter(|it| !it.is_released);
        let allocation = allocation.ok_or(INVALID_VALUE)?;
        if bytes > allocation.bytes {
            return Err(INVALID_VALUE);
        }
        let mapping = allocation.map(bytes).ok_or(OUT_OF_MEMORY)?;
        allocation.mappings += 1;
        let mut memory = Memory::new(bytes, mapping.start(), Some(mapping));
        memory.allocation = Some(handle);
        memory.is_accessible = false;
        state.device.insert(start, memory);
        Ok(())
    })
}

#[unsafe(export_name = "cuMemUnmap")]
pub(crate) unsafe extern "C" fn unmap(address: u64, bytes: usize) -> Status {
    World::release("cuMemUnmap", Needs::Context, |state| {
        let start = number(address)?;
        let mapped = state.device.get(&start).filter(|memory| memory.bytes == bytes);
        let handle = mapped.and_then(|memory| memory.allocation).ok_or(INVALID_VALUE)?;
        state.remove(Side::Device, start, INVALID_VALUE)?;
        if let Some(allocation) = state.allocations.get_mut(&handle) {
            allocation.mappings -= 1;
        }
        free_unused(state, handle);
        Ok(())
    })
}

#[unsafe(export_name = "cuMemSetAccess")]
pub(crate) unsafe extern "C" fn set_access(
    address: u64,
    bytes: usize,
    access: *const Access,
    count: usize,
) -> Status {
    World::call("cuMemSetAccess", Needs::Context, |world, state| {
        // SAFETY: the caller's promise, for at least one description.
        let access = unsafe { access.as_ref() }.filter(|_| count == 1).ok_or(INVALID_VALUE)?;
        let device = check_device(world, access.location)?;
        let memory = state.device.get_mut(&number(address)?);
        let memory = memory.filter(|memory| memory.bytes == bytes).ok_or(INVALID_VALUE)?;
        let handle = memory.allocation.ok_or(INVALID_VALUE)?;
        let is_accessible = match access.flags {
            NO_ACCESS => false,
            READ_AND_WRITE => true,
            _ => return Err(NOT_SUPPORTED),
        };
        let is_others = state.allocations.get(&handle).is_some_and(|it| it.device != device);
        if is_others && !world.settings.has_peers {
            return Err(PEER_ACCESS_UNSUPPORTED);
        }
        memory.is_accessible = is_accessible;
        Ok(())
    })
}

#[unsafe(export_name = "cuMemExportToShareableHandle")]
pub(crate) unsafe extern "C" fn export(
    target: *mut c_void,
    handle: u64,
    kind: c_uint,
    flags: c_ulonglong,
) -> Status {
    World::call("cuMemExportToShareableHandle", Needs::Context, |_, state| {
        let allocation = state.allocations.get(&handle).filter(|it| !it.is_released);
        let allocation = allocation.ok_or(INVALID_VALUE)?;
        if kind != FILE_DESCRIPTOR || flags != 0 || target.is_null() {
            return Err(INVALID_VALUE);
        }
        let descriptor = allocation.export().ok_or(OUT_OF_MEMORY)?;
        // SAFETY: for this kind the caller promises an `int`; it is not null.
        unsafe { write(target.cast::<c_int>(), descriptor) }
    })
}

/// Only of memory that `cuMemMap` mapped, and from its first byte on: other memory has no file.
#[unsafe(export_name = "cuMemGetHandleForAddressRange")]
pub(crate) unsafe extern "C" fn get_handle_for_range(
    target: *mut c_void,
    address: u64,
    bytes: usize,
    kind: c_uint,
    flags: c_ulonglong,
) -> Status {
    World::call("cuMemGetHandleForAddressRange", Needs::Context, |_, state| {
        let is_aligned =
            address.is_multiple_of(HOST_PAGE_BYTES as u64) && bytes.is_multiple_of(HOST_PAGE_BYTES);
        if kind != DMA_BUF || flags != 0 || target.is_null() || bytes == 0 || !is_aligned {
            return Err(INVALID_VALUE);
        }
        let place = state.find(number(address)?, bytes)?;
        let memory = &state.map(place.side)[&place.key];
        let handle = memory.allocation.filter(|_| memory.start == place.start);
        let allocation = handle.and_then(|handle| state.allocations.get(&handle));
        let allocation = allocation.ok_or(NOT_SUPPORTED)?;
        let descriptor = allocation.export().ok_or(OUT_OF_MEMORY)?;
        // SAFETY: for this kind the caller promises an `int`; it is not null.
        unsafe { write(target.cast::<c_int>(), descriptor) }
    })
}

#[unsafe(export_name = "cuMemImportFromShareableHandle")]
pub(crate) unsafe extern "C" fn import(
    handle: *mut u64,
    descriptor: *mut c_void,
    kind: c_uint,
) -> Status {
    World::call("cuMemImportFromShareableHandle", Needs::Context, |world, state| {
        if kind != FILE_DESCRIPTOR {
            return Err(INVALID_VALUE);
        }
        let descriptor = c_int::try_from(descriptor.addr()).map_err(|_| INVALID_VALUE)?;
        let allocation = Allocation::import(descriptor).ok_or(INVALID_VALUE)?;
        if allocation.device >= world.settings.devices {
            return Err(INVALID_DEVICE);
        }
        // SAFETY: the caller's promise.
        unsafe { insert(state, handle, allocation) }
    })
}
