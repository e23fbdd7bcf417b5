//! The UUID of a device, which names it in all processes of a host.
#![expect(unsafe_code, reason = "calls the driver")]

use std::fmt;

use crate::driver::Driver;
use crate::error::CudaError;
use crate::functions::{DeviceNumber, Status, Uuid};

/// The UUID of a device. Its index is no name: processes may see other devices, or another order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DeviceUuid(Uuid);

impl DeviceUuid {
    /// A UUID that another process sent.
    pub fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// Its bytes, to send them.
    pub fn bytes(&self) -> [u8; 16] {
        self.0
    }

    pub(crate) fn of(driver: &Driver, device: DeviceNumber) -> Result<Self, CudaError> {
        let mut uuid: Uuid = [0; 16];
        let get = |get: unsafe extern "C" fn(*mut Uuid, DeviceNumber) -> Status| {
            // SAFETY: writes 16 bytes to a local array.
            unsafe { get(&raw mut uuid, device) }
        };
        driver.run(&driver.functions.device_get_uuid, get)?;
        Ok(Self(uuid))
    }
}

impl fmt::Display for DeviceUuid {
    /// As `nvidia-smi -L` prints it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GPU")?;
        for (at, byte) in self.0.iter().enumerate() {
            let separator = if [0, 4, 6, 8, 10].contains(&at) { "-" } else { "" };
            write!(f, "{separator}{byte:02x}")?;
        }
        Ok(())
    }
}
