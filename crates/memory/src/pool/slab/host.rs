//! Slabs that are known to be in host memory, for code that needs their bytes or addresses: I/O by
//! the kernel, buffers of other languages.

use std::ops::{Deref, DerefMut};

use super::{Slab, SlabMut};

const IN_HOST_MEMORY: &str = "checked when it was made, and a slab never moves";

/// A sealed slab in host memory; see [`Slab::into_host`].
#[derive(Debug, Clone)]
pub struct HostSlab(Slab);

/// A writable slab in host memory; see [`SlabMut::into_host`].
#[derive(Debug)]
pub struct HostSlabMut(SlabMut);

impl Slab {
    /// The slab with access to its bytes. Returns the slab itself if it is in device memory.
    pub fn into_host(self) -> Result<HostSlab, Self> {
        if self.host().is_some() { Ok(HostSlab(self)) } else { Err(self) }
    }
}

impl SlabMut {
    /// The slab with access to its bytes. Returns the slab itself if it is in device memory.
    pub fn into_host(self) -> Result<HostSlabMut, Self> {
        if self.host().is_some() { Ok(HostSlabMut(self)) } else { Err(self) }
    }
}

impl HostSlab {
    /// The slab.
    pub fn slab(&self) -> &Slab {
        &self.0
    }

    /// The slab.
    pub fn into_slab(self) -> Slab {
        self.0
    }
}

impl HostSlabMut {
    /// The slab.
    pub fn slab(&self) -> &SlabMut {
        &self.0
    }

    /// The slab.
    pub fn into_slab(self) -> SlabMut {
        self.0
    }

    /// As [`SlabMut::seal`].
    pub fn seal(self) -> HostSlab {
        HostSlab(self.0.seal())
    }
}

impl Deref for HostSlab {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        self.0.host().expect(IN_HOST_MEMORY)
    }
}

impl AsRef<[u8]> for HostSlab {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Deref for HostSlabMut {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        self.0.host().expect(IN_HOST_MEMORY)
    }
}

impl DerefMut for HostSlabMut {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        self.0.host_mut().expect(IN_HOST_MEMORY)
    }
}
