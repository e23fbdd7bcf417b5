//! DMA-BUF descriptors of memory of the fake device, which are files in place of those of a driver.

#![expect(unsafe_code, reason = "names memory by its address")]
#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use cascade_device::{CudaMemory, CudaMemoryConfig, ForeignMemory};
use cascade_memory::{DeviceError, DeviceMemory as _};
use cascade_runtime::SystemClock;

use crate::fake::{context, is_child};

fn memory(shareable: bool) -> Arc<CudaMemory> {
    let driver = Arc::clone(context().driver());
    let config = CudaMemoryConfig { shareable, ..CudaMemoryConfig::new(2 << 20) };
    CudaMemory::new(&driver, &config, Arc::new(SystemClock)).unwrap()
}

#[test]
fn a_descriptor_has_the_bytes_of_the_memory() {
    if !is_child("a_descriptor_has_the_bytes_of_the_memory", &[]) {
        return;
    }
    let memory = memory(true);
    memory.copy_in(5000, b"a block").unwrap();
    let range = memory.dmabuf().unwrap().unwrap();
    assert_eq!((range.offset, range.bytes), (0, memory.bytes()));
    assert_eq!(range.address, memory.base());
    let mut bytes = [0; 7];
    File::from(range.descriptor).read_exact_at(&mut bytes, 5000).unwrap();
    assert_eq!(&bytes, b"a block");
    // A part that begins in a page: the descriptor has the whole page.
    // SAFETY: the memory is kept, and nothing copies to it meanwhile.
    let part =
        unsafe { ForeignMemory::new(memory.context(), memory.base() + 100, 50, Box::new(())) };
    let range = part.dmabuf().unwrap();
    assert_eq!((range.offset, range.bytes, range.address), (100, 50, memory.base() + 100));
}

#[test]
fn a_driver_without_them_says_what_to_do() {
    let none = [("FAKE_CUDA_ATTRIBUTE", "124=0")];
    if !is_child("a_driver_without_them_says_what_to_do", &none) {
        return;
    }
    let error = memory(true).dmabuf().unwrap_err();
    let DeviceError::DmaBuf { source } = &error else { panic!("{error}") };
    assert!(source.to_string().contains("open kernel modules"), "{source}");
}
