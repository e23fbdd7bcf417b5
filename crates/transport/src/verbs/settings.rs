//! Settings of links and of the choice of devices.

use super::error::VerbsError;

/// Queue pairs of one link.
pub(super) const LANES_MAX: usize = 8;

/// Which batches end with a short read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Flush {
    /// Those that write memory of a GPU.
    #[default]
    GpuMemory,
    /// All whose target may be read.
    Always,
    /// None: memory of a GPU may lack bytes when a batch ends.
    Never,
}

/// Settings of links and of the choice of devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VerbsSettings {
    /// Devices that may be used, by name. Empty: all. Default: empty.
    pub devices: Vec<String>,
    /// Index of the GID. Default: the first of the best kind.
    pub gid_index: Option<u8>,
    /// Queue pairs of a link. Minimum: 1, maximum: 8. Default: 4.
    pub queue_pairs: usize,
    /// Work requests that are given to the device at once. Minimum: 1, maximum: 256. Default: 32.
    pub chain: usize,
    /// Work requests that one queue pair holds; the device may allow less. Minimum: 4 chains.
    /// Default: 2048.
    pub depth: usize,
    /// Time until a device repeats a packet that was not acknowledged: 4.096 microseconds times two
    /// to this power. Minimum: 1, maximum: 31. Default: 18, which is 1.07 s.
    pub timeout: u8,
    /// How often it repeats a packet before the link fails. Maximum: 7. Default: 6, because
    /// soft-RoCE takes 7 for ever.
    pub retries: u8,
    /// Traffic class of the packets. Default: 0.
    pub traffic_class: u8,
    /// Which batches end with a short read, so that the memory has the bytes when the batch ends.
    /// Default: those that write memory of a GPU.
    pub flush: Flush,
    /// Registers memory for relaxed ordering where the device has it. Default: false.
    pub relaxed_ordering: bool,
}

impl Default for VerbsSettings {
    fn default() -> Self {
        Self {
            devices: Vec::new(),
            gid_index: None,
            queue_pairs: 4,
            chain: 32,
            depth: 2048,
            timeout: 18,
            retries: 6,
            traffic_class: 0,
            flush: Flush::GpuMemory,
            relaxed_ordering: false,
        }
    }
}

impl VerbsSettings {
    /// Checks the ranges.
    ///
    /// # Errors
    /// If a setting is out of its range.
    pub fn check(&self) -> Result<(), VerbsError> {
        let ranges = [
            ("queue_pairs", self.queue_pairs, 1, LANES_MAX),
            ("chain", self.chain, 1, 256),
            ("depth", self.depth, 4 * self.chain, 32_768),
            ("timeout", self.timeout.into(), 1, 31),
            ("retries", self.retries.into(), 0, 7),
        ];
        for (setting, value, least, most) in ranges {
            if !(least..=most).contains(&value) {
                return Err(VerbsError::Setting { setting, value, least, most });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_out_of_range_are_refused_by_name() {
        assert_eq!(VerbsSettings::default().check(), Ok(()));
        let wrong = VerbsSettings { timeout: 0, ..VerbsSettings::default() };
        assert!(wrong.check().unwrap_err().to_string().starts_with("timeout is 0"));
        let wrong = VerbsSettings { chain: 256, depth: 1023, ..VerbsSettings::default() };
        assert!(wrong.check().unwrap_err().to_string().starts_with("depth is 1023"));
    }
}
