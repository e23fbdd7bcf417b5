//! What the driver and the devices of this host are, for `cascade doctor`.
#![expect(unsafe_code, reason = "calls the driver")]

use std::ffi::{CStr, c_char};

use crate::batch::BatchForm;
use crate::context::{Context, device_number, uuid_of};
use crate::device_uuid::DeviceUuid;
use crate::driver::Driver;
use crate::error::{CudaError, Unavailable};
use crate::functions::{DeviceNumber, Function, Status};
use crate::kernel;
use crate::version::DriverVersion;

/// `CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR` and `_MINOR`.
const CAPABILITY: [u32; 2] = [75, 76];

/// A device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceFacts {
    /// Its name, such as `NVIDIA H100 80GB HBM3`.
    pub name: String,
    /// Its address on the PCI bus; empty if the driver does not say.
    pub pci_address: String,
    /// Its UUID, as `nvidia-smi -L` prints it; empty if the driver does not say.
    pub uuid: String,
    /// Its memory; 0 if the driver does not say.
    pub memory_bytes: u64,
    /// Its compute capability, major and minor; zeroes if the driver does not say.
    pub capability: [i32; 2],
}

impl DeviceFacts {
    /// Whether it is a stand-in for tests, which says so in its name.
    pub fn is_fake(&self) -> bool {
        is_fake_name(&self.name)
    }
}

/// The driver and its devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverReport {
    /// The library that was loaded.
    pub library: String,
    /// Its version of CUDA.
    pub version: DriverVersion,
    /// Its devices.
    pub devices: Vec<DeviceFacts>,
    /// The form of the batched copy that it has.
    pub batch: Option<BatchForm>,
    /// Functions that a driver of this version should have and this one has not.
    pub missing_functions: Vec<&'static str>,
    /// Functions that kernels need and this driver lacks. With any of them, every copy is made by
    /// the driver itself.
    pub missing_for_kernels: Vec<&'static str>,
}

impl DriverReport {
    /// Loads and starts the driver, and asks it about its devices. Creates no context.
    ///
    /// # Errors
    /// Why there is no GPU.
    pub fn examine() -> Result<Self, Unavailable> {
        Self::of(&*Driver::load()?)
    }

    /// Asks a driver about its devices. Creates no context.
    ///
    /// # Errors
    /// If it finds no device, or does not answer.
    pub fn of(driver: &Driver) -> Result<Self, Unavailable> {
        let devices = devices(driver).map_err(|error| driver.unavailable(error))?;
        if devices.is_empty() {
            return Err(Unavailable::NoDevice { library: driver.library().to_owned() });
        }
        Ok(Self {
            library: driver.library().to_owned(),
            version: driver.version(),
            devices,
            batch: BatchForm::of(driver),
            missing_functions: driver.missing_functions(),
            missing_for_kernels: kernel::missing_functions(driver),
        })
    }

    /// Whether one of its devices is a stand-in for tests.
    pub fn is_fake(&self) -> bool {
        self.devices.iter().any(DeviceFacts::is_fake)
    }
}

fn devices(driver: &Driver) -> Result<Vec<DeviceFacts>, CudaError> {
    let mut count = 0;
    let functions = &driver.functions;
    // SAFETY: writes to a local variable.
    driver.run(&functions.device_get_count, |get| unsafe { get(&raw mut count) })?;
    (0..usize::try_from(count).unwrap_or_default()).map(|at| facts(driver, at)).collect()
}

/// Whether the device of a context can access memory of another one; none if this process does not
/// see that device, or the driver does not say it.
pub(crate) fn can_access(context: &Context, owner: DeviceUuid) -> Result<Option<bool>, CudaError> {
    let driver = context.driver();
    let functions = &driver.functions;
    let mut count = 0;
    // SAFETY: writes to a local variable.
    driver.run(&functions.device_get_count, |get| unsafe { get(&raw mut count) })?;
    for index in 0..usize::try_from(count).unwrap_or_default() {
        let device = device_number(driver, index)?;
        if uuid_of(driver, device)? == owner {
            let (mut can_access, own) = (0, context.device());
            let ask =
                |ask: unsafe extern "C" fn(*mut i32, DeviceNumber, DeviceNumber) -> Status| {
                    // SAFETY: writes to a local variable.
                    unsafe { ask(&raw mut can_access, own, device) }
                };
            let asked = driver.run(&functions.device_can_access_peer, ask);
            return Ok(asked.is_ok().then_some(can_access != 0));
        }
    }
    Ok(None)
}

/// Whether a device is a stand-in for tests.
pub(crate) fn is_fake(context: &Context) -> Result<bool, CudaError> {
    let driver = context.driver();
    let name = text(driver, &driver.functions.device_get_name, context.device())?;
    Ok(is_fake_name(&name))
}

fn is_fake_name(name: &str) -> bool {
    name.to_ascii_lowercase().contains("fake")
}

fn facts(driver: &Driver, index: usize) -> Result<DeviceFacts, CudaError> {
    let device = device_number(driver, index)?;
    let functions = &driver.functions;
    Ok(DeviceFacts {
        name: text(driver, &functions.device_get_name, device)?,
        pci_address: said(text(driver, &functions.device_get_pci_bus_id, device)),
        uuid: said(uuid_of(driver, device).map(|uuid| uuid.to_string())),
        memory_bytes: said(memory_bytes(driver, device)),
        capability: CAPABILITY.map(|which| said(attribute(driver, device, which))),
    })
}

/// A fact that is left out where the driver does not say it.
fn said<T: Default>(fact: Result<T, CudaError>) -> T {
    fact.unwrap_or_default()
}

type GetText = unsafe extern "C" fn(*mut c_char, i32, DeviceNumber) -> Status;

fn text(
    driver: &Driver,
    function: &Function<GetText>,
    device: DeviceNumber,
) -> Result<String, CudaError> {
    let mut text = [0_u8; 256];
    let get = |get: GetText| {
        // SAFETY: writes at most 255 bytes to a local array, so the last one stays zero.
        unsafe { get(text.as_mut_ptr().cast(), 255, device) }
    };
    driver.run(function, get)?;
    let text = CStr::from_bytes_until_nul(&text).unwrap_or_default();
    Ok(text.to_string_lossy().into_owned())
}

fn memory_bytes(driver: &Driver, device: DeviceNumber) -> Result<u64, CudaError> {
    let mut bytes = 0;
    let get = |get: unsafe extern "C" fn(*mut usize, DeviceNumber) -> Status| {
        // SAFETY: writes to a local variable.
        unsafe { get(&raw mut bytes, device) }
    };
    driver.run(&driver.functions.device_total_mem, get)?;
    Ok(bytes as u64)
}

pub(crate) fn attribute(
    driver: &Driver,
    device: DeviceNumber,
    which: u32,
) -> Result<i32, CudaError> {
    let mut value = 0;
    let get = |get: unsafe extern "C" fn(*mut i32, u32, DeviceNumber) -> Status| {
        // SAFETY: writes to a local variable.
        unsafe { get(&raw mut value, which, device) }
    };
    driver.run(&driver.functions.device_get_attribute, get)?;
    Ok(value)
}
