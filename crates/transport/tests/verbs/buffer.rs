//! Memory of a test that a device reads and writes: atomic bytes, so that tests can look at them.
#![expect(unsafe_code, reason = "gives memory to a device")]

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use cascade_transport::Access;
use cascade_transport::verbs::{Device, RegisteredMemory};

pub(crate) const BOTH: Access = Access { read: true, write: true };

pub(crate) struct Buffer {
    pub(crate) memory: RegisteredMemory,
    bytes: Arc<[AtomicU8]>,
}

impl Buffer {
    pub(crate) fn new(device: &Arc<Device>, bytes: usize, access: Access) -> Self {
        let bytes: Arc<[AtomicU8]> = (0..bytes).map(|_| AtomicU8::new(0)).collect();
        let base = NonNull::from(&*bytes).cast();
        let owner = Arc::clone(&bytes);
        // SAFETY: the owner keeps the bytes, to which no reference but of atomics exists.
        let memory =
            unsafe { RegisteredMemory::register(device, base, bytes.len(), access, owner) };
        Self { memory: memory.unwrap(), bytes }
    }

    pub(crate) fn fill(&self, offset: usize, bytes: &[u8]) {
        for (target, byte) in self.bytes[offset..offset + bytes.len()].iter().zip(bytes) {
            target.store(*byte, Ordering::Relaxed);
        }
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        self.bytes.iter().map(|byte| byte.load(Ordering::Relaxed)).collect()
    }
}
