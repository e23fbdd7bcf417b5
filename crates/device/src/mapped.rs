//! Memory of a device as the driver's virtual memory management has it: an allocation, and its
//! mapping into reserved addresses.
//!
//! Each of the three parts is released by its own value, so that a step that fails releases the
//! steps before it. Unlike `cuMemFree`, `cuMemUnmap` does not wait for the work of the device:
//! copies hold the memory until they are over.
#![expect(unsafe_code, reason = "calls the driver")]

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::ptr::null;
use std::sync::Arc;

use crate::context::Context;
use crate::error::{CudaError, OPERATING_SYSTEM};
use crate::functions::{Address, MemoryLocation, Status};

/// `CU_MEM_ALLOCATION_TYPE_PINNED`.
const PINNED: c_uint = 1;
/// `CU_MEM_LOCATION_TYPE_DEVICE`.
const ON_DEVICE: c_uint = 1;
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const FILE_DESCRIPTOR: c_uint = 1;
/// `CU_MEM_ALLOC_GRANULARITY_RECOMMENDED`, which is a multiple of the smallest one.
const RECOMMENDED: c_uint = 1;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
const READ_AND_WRITE: c_uint = 3;
/// The smallest granularity that we use, whatever the driver says.
const GRANULARITY_MIN: usize = 4096;

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Debug)]
struct AllocationProperties {
    kind: c_uint,
    handle_types: c_uint,
    location: MemoryLocation,
    windows_metadata: *const c_void,
    /// Compression, RDMA, use: none of them.
    flags: [u8; 8],
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Debug)]
struct AccessDescription {
    location: MemoryLocation,
    flags: c_uint,
}

fn location(context: &Context) -> MemoryLocation {
    MemoryLocation { kind: ON_DEVICE, id: context.device() }
}

/// Memory of the device that other processes may map.
fn properties(context: &Context) -> AllocationProperties {
    AllocationProperties {
        kind: PINNED,
        handle_types: FILE_DESCRIPTOR,
        location: location(context),
        windows_metadata: null(),
        flags: [0; 8],
    }
}

/// What lengths and addresses have to be multiples of.
pub(crate) fn granularity(context: &Context) -> Result<usize, CudaError> {
    let (mut granularity, properties) = (0, properties(context));
    let get = |get: unsafe extern "C" fn(*mut usize, *const c_void, c_uint) -> Status| {
        let properties = (&raw const properties).cast();
        // SAFETY: reads the properties and writes to a local variable.
        unsafe { get(&raw mut granularity, properties, RECOMMENDED) }
    };
    context.with(|| context.call(|functions| &functions.mem_get_granularity, get))?;
    Ok(granularity.max(GRANULARITY_MIN))
}

/// A reference to an allocation, released when it is dropped. The memory is freed when all
/// references and mappings of all processes, and all descriptors, are gone.
#[derive(Debug)]
pub(crate) struct Handle {
    context: Arc<Context>,
    value: u64,
}

impl Handle {
    /// Allocates memory.
    pub(crate) fn create(context: &Arc<Context>, bytes: usize) -> Result<Self, CudaError> {
        type Call = unsafe extern "C" fn(*mut u64, usize, *const c_void, c_ulonglong) -> Status;
        let properties = properties(context);
        context.with(|| {
            let mut value = 0;
            let create = |create: Call| {
                let properties = (&raw const properties).cast();
                // SAFETY: reads the properties and writes to a local variable. The flags are zero.
                unsafe { create(&raw mut value, bytes, properties, 0) }
            };
            context.call(|functions| &functions.mem_create, create)?;
            Ok(Self { context: Arc::clone(context), value })
        })
    }

    /// A reference to the allocation of a descriptor, which may be closed afterwards.
    pub(crate) fn import(
        context: &Arc<Context>,
        descriptor: BorrowedFd<'_>,
    ) -> Result<Self, CudaError> {
        type Call = unsafe extern "C" fn(*mut u64, *mut c_void, c_uint) -> Status;
        // The number of the descriptor itself, in place of an address.
        let number = usize::try_from(descriptor.as_raw_fd()).unwrap_or(usize::MAX);
        context.with(|| {
            let mut value = 0;
            let import = |import: Call| {
                let number = std::ptr::without_provenance_mut(number);
                // SAFETY: writes to a local variable; the driver checks the descriptor.
                unsafe { import(&raw mut value, number, FILE_DESCRIPTOR) }
            };
            context.call(|functions| &functions.mem_import, import)?;
            Ok(Self { context: Arc::clone(context), value })
        })
    }

    /// A new descriptor of the allocation.
    pub(crate) fn export(&self) -> Result<OwnedFd, CudaError> {
        type Call = unsafe extern "C" fn(*mut c_void, u64, c_uint, c_ulonglong) -> Status;
        let context = &*self.context;
        context.with(|| {
            let mut number: c_int = -1;
            let export = |export: Call| {
                let number = (&raw mut number).cast();
                // SAFETY: for this kind of handle it writes one `int`, to a local variable. The
                // allocation exists until this value is dropped.
                unsafe { export(number, self.value, FILE_DESCRIPTOR, 0) }
            };
            context.call(|functions| &functions.mem_export, export)?;
            // SAFETY: `fcntl` checks the descriptor. Programs that this process starts do not
            // get it.
            let set = unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) };
            if set == -1 {
                let call = "cuMemExportToShareableHandle";
                return Err(context.driver().call_error(call, OPERATING_SYSTEM).into());
            }
            // SAFETY: a new descriptor that the driver gave to its caller.
            Ok(unsafe { OwnedFd::from_raw_fd(number) })
        })
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let release = |release: unsafe extern "C" fn(u64) -> Status| {
            // SAFETY: created or imported once, and released once. Mappings keep the memory.
            unsafe { release(self.value) }
        };
        self.context.release(|functions| &functions.mem_release, release);
    }
}

/// Addresses without memory, freed when the value is dropped.
#[derive(Debug)]
pub(crate) struct Reservation {
    context: Arc<Context>,
    start: Address,
    bytes: usize,
}

impl Reservation {
    pub(crate) fn new(
        context: &Arc<Context>,
        bytes: usize,
        alignment: usize,
    ) -> Result<Self, CudaError> {
        type Call =
            unsafe extern "C" fn(*mut Address, usize, usize, Address, c_ulonglong) -> Status;
        context.with(|| {
            let mut start = 0;
            let reserve = |reserve: Call| {
                // SAFETY: writes to a local variable. The driver chooses the address; no flags
                // exist.
                unsafe { reserve(&raw mut start, bytes, alignment, 0, 0) }
            };
            context.call(|functions| &functions.mem_address_reserve, reserve)?;
            Ok(Self { context: Arc::clone(context), start, bytes })
        })
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let free = |free: unsafe extern "C" fn(Address, usize) -> Status| {
            // SAFETY: reserved by `new` with this length, and freed once. The driver refuses if
            // memory is still mapped there because it refused to unmap it.
            unsafe { free(self.start, self.bytes) }
        };
        self.context.release(|functions| &functions.mem_address_free, free);
    }
}

/// Memory at the start of reserved addresses, unmapped when the value is dropped.
#[derive(Debug)]
struct Mapping {
    context: Arc<Context>,
    start: Address,
    bytes: usize,
}

impl Mapping {
    /// Maps memory. Nothing may access it yet.
    ///
    /// The reservation outlives the mapping.
    fn new(reservation: &Reservation, handle: &Handle, bytes: usize) -> Result<Self, CudaError> {
        type Call = unsafe extern "C" fn(Address, usize, usize, u64, c_ulonglong) -> Status;
        let (context, start) = (&reservation.context, reservation.start);
        if bytes > reservation.bytes {
            return Err(CudaError::Outside { offset: 0, bytes, length: reservation.bytes });
        }
        let map = |map: Call| {
            // SAFETY: the addresses are reserved and nothing is mapped there; the driver checks
            // that the allocation has that many bytes. Offset and flags have to be zero.
            unsafe { map(start, bytes, 0, handle.value, 0) }
        };
        context.with(|| {
            context.call(|functions| &functions.mem_map, map)?;
            Ok(Self { context: Arc::clone(context), start, bytes })
        })
    }

    /// Lets the device of the context read and write it.
    fn allow_access(&self) -> Result<(), CudaError> {
        type Call = unsafe extern "C" fn(Address, usize, *const c_void, usize) -> Status;
        let context = &*self.context;
        let access = AccessDescription { location: location(context), flags: READ_AND_WRITE };
        let set = |set: Call| {
            let access = (&raw const access).cast();
            // SAFETY: reads one description; all of the range is mapped until this value is
            // dropped.
            unsafe { set(self.start, self.bytes, access, 1) }
        };
        context.with(|| context.call(|functions| &functions.mem_set_access, set))
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let unmap = |unmap: unsafe extern "C" fn(Address, usize) -> Status| {
            // SAFETY: mapped by `new` with this length and unmapped once: copies hold the memory
            // until they are over.
            unsafe { unmap(self.start, self.bytes) }
        };
        self.context.release(|functions| &functions.mem_unmap, unmap);
    }
}

/// An allocation of this process or of another one, which the device may read and write.
///
/// The order of the fields is the order in which they are released.
#[derive(Debug)]
pub(crate) struct MappedMemory {
    mapping: Mapping,
    handle: Handle,
    _reservation: Reservation,
}

impl MappedMemory {
    /// Maps all of an allocation.
    pub(crate) fn new(
        reservation: Reservation,
        handle: Handle,
        bytes: usize,
    ) -> Result<Self, CudaError> {
        let mapping = Mapping::new(&reservation, &handle, bytes)?;
        mapping.allow_access()?;
        Ok(Self { mapping, handle, _reservation: reservation })
    }

    /// Whether an allocation has that many bytes: the driver has no function that tells its length,
    /// and refuses to map more than there is.
    pub(crate) fn fits(
        reservation: &Reservation,
        handle: &Handle,
        bytes: usize,
    ) -> Result<bool, CudaError> {
        match Mapping::new(reservation, handle, bytes) {
            Ok(_) => Ok(true),
            Err(error) if error.is_refusal() => Ok(false),
            Err(error) => Err(error),
        }
    }

    pub(crate) fn handle(&self) -> &Handle {
        &self.handle
    }

    pub(crate) fn start(&self) -> Address {
        self.mapping.start
    }

    pub(crate) fn bytes(&self) -> usize {
        self.mapping.bytes
    }
}
