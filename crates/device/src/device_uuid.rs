//! The UUID of a device, which names it in all processes of a host.

use std::fmt;

use crate::functions::Uuid;

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
