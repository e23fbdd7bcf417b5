//! Slabs in device memory are refused, each with its own error, and cost no other block anything.

use std::sync::Arc;

use cascade_disk::conformance::{
    append, assert_hits, block, content, deadline, key, meta, open, pool,
};
use cascade_disk::{DiskError, FilesConfig, Load, LoadOutcome};
use cascade_memory::{FakeDevice, Pool};
use cascade_runtime::SystemClock;
use cascade_tier::tier::{Tier as _, TierError};

const LENGTH: usize = 5000;

#[test]
fn files_refuse_slabs_in_device_memory() {
    let device = Pool::of_device(FakeDevice::new(1 << 20).unwrap()).unwrap();
    let (host, directory) = (pool(), tempfile::tempdir().unwrap());
    let config = FilesConfig::new(directory.path());
    // As a store would open it: no memory of a device is registered with the kernel.
    let (files, _) = open(config, Arc::new(SystemClock), &device, deadline()).unwrap();
    assert!(!files.disk_stats().is_registered);
    let stored = append(files.as_ref(), &host, &[(0, 4096), (1, 16 << 10)]);
    let mut slab = device.allocate(LENGTH).unwrap();
    slab.fill_from(&content(7, LENGTH)).unwrap();
    let batch = vec![(meta(7, LENGTH), slab.seal()), block(&host, 8, LENGTH)];
    let mut results = files.append(batch, deadline()).into_iter();
    let refused = results.next().unwrap();
    assert!(matches!(refused, Err(DiskError::NotHostMemory)), "{refused:?}");
    assert!(matches!(results.next(), Some(Ok(_))), "the other block of the batch is stored");
    let slab = device.allocate(stored[0].length).unwrap();
    let load = Load { key: key(stored[0].number), address: stored[0].address, slab };
    let refused = files.load(vec![load], deadline()).remove(0);
    assert!(matches!(refused, LoadOutcome::Failed(TierError::NotHostMemory)), "{refused:?}");
    assert_hits(files.as_ref(), &host, &stored);
}
