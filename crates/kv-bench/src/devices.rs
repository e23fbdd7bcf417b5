//! What the kernel counted: processor time, bytes of this process, bytes of the device beside them.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use cascade_replay::kernel_io::KernelIo;
use serde::Serialize;

/// `/proc/diskstats` counts in sectors of 512 bytes, whatever the device has.
const SECTOR_BYTES: u64 = 512;

/// A block device, by its numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Device {
    major: u32,
    minor: u32,
}

/// What a device has transferred since boot, for all processes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DeviceBytes {
    /// Name of the device.
    pub name: String,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
}

/// The counters at one time.
#[derive(Debug, Clone)]
pub struct KernelCounters {
    /// Processor time of this process.
    pub cpu: Duration,
    /// Bytes of this process.
    pub process: Option<KernelIo>,
    /// Bytes of the device.
    pub device: Option<DeviceBytes>,
}

impl Device {
    /// The device of a directory. `None` without one: memory, a network, several devices.
    pub fn of(directory: &Path) -> Option<Self> {
        let number = fs::metadata(directory).ok()?.dev();
        let device = Self { major: rustix::fs::major(number), minor: rustix::fs::minor(number) };
        device.bytes().map(|_| device)
    }

    fn bytes(self) -> Option<DeviceBytes> {
        self.find(&fs::read_to_string("/proc/diskstats").ok()?)
    }

    fn find(self, table: &str) -> Option<DeviceBytes> {
        table.lines().find_map(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let number = |at: usize| fields.get(at)?.parse::<u64>().ok();
            let is_it = number(0)? == u64::from(self.major) && number(1)? == u64::from(self.minor);
            is_it.then_some(())?;
            Some(DeviceBytes {
                name: (*fields.get(2)?).to_owned(),
                read_bytes: number(5)? * SECTOR_BYTES,
                written_bytes: number(9)? * SECTOR_BYTES,
            })
        })
    }
}

impl KernelCounters {
    /// The counters now.
    pub fn now(device: Option<Device>) -> Self {
        let cpu = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
        Self {
            // Never negative.
            cpu: Duration::try_from(cpu).unwrap_or_default(),
            process: KernelIo::now(),
            device: device.and_then(Device::bytes),
        }
    }

    /// The difference to earlier ones.
    pub fn since(&self, earlier: &Self) -> Self {
        let process = self.process.zip(earlier.process).map(|(now, then)| now.since(then));
        let device = self.device.as_ref().zip(earlier.device.as_ref());
        Self {
            cpu: self.cpu.saturating_sub(earlier.cpu),
            process,
            device: device.map(|(now, then)| DeviceBytes {
                name: now.name.clone(),
                read_bytes: now.read_bytes.saturating_sub(then.read_bytes),
                written_bytes: now.written_bytes.saturating_sub(then.written_bytes),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_found_by_its_numbers_and_counted_in_sectors() {
        let table = "   7       0 loop0 1 0 8 0 0 0 0 0 0 0 0\n \
                     259       3 nvme0n1p2 10 2 2048 7 20 4 4096 9 0 5 16 0 0 0 0\n";
        let device = Device { major: 259, minor: 3 };
        let expected = DeviceBytes {
            name: "nvme0n1p2".to_owned(),
            read_bytes: 2048 * 512,
            written_bytes: 4096 * 512,
        };
        assert_eq!(device.find(table), Some(expected));
        assert_eq!(Device { major: 259, minor: 4 }.find(table), None);
        assert_eq!(Device { major: 7, minor: 0 }.find("7 0 loop0 1"), None);
    }

    #[test]
    fn processor_time_passes() {
        let before = KernelCounters::now(None);
        let mut number = 1_u64;
        (0..2_000_000).for_each(|at| number = std::hint::black_box(number.wrapping_mul(at | 1)));
        assert!(KernelCounters::now(None).since(&before).cpu > Duration::ZERO);
    }
}
