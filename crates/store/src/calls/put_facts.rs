//! What the catalog and the stages learn of a put block.

use std::borrow::Cow;

use cascade_block::Digest;
use cascade_memory::{DeviceError, Slab};
use cascade_runtime::Clock;
use cascade_tier::Put;
use cascade_tier::tier::BlockFacts;

use crate::core::catalog::NewKey;

/// The bytes of the blocks of a put.
#[derive(Debug, Clone, Copy)]
pub(super) struct PutBytes<'a> {
    puts: &'a [Put<'a>],
    /// Slabs in device memory that have the bytes. The puts have none then.
    on_device: Option<&'a [Slab]>,
}

impl<'a> PutBytes<'a> {
    pub(super) fn of_puts(puts: &'a [Put<'a>]) -> Self {
        Self { puts, on_device: None }
    }

    pub(super) fn on_device(puts: &'a [Put<'a>], slabs: &'a [Slab]) -> Self {
        Self { puts, on_device: Some(slabs) }
    }

    pub(super) fn length(&self, at: usize) -> usize {
        self.on_device.map_or(self.puts[at].bytes.len(), |slabs| slabs[at].len())
    }

    /// How many blocks to read before the first of them is dropped: a copy of a whole batch from a
    /// device could fill the host's memory.
    pub(super) fn read_at_once(&self) -> usize {
        if self.on_device.is_some() { 1 } else { usize::MAX }
    }

    /// The bytes, copied from a device if they are there.
    pub(super) fn read(&self, at: usize) -> Result<Cow<'a, [u8]>, DeviceError> {
        match self.on_device {
            Some(slabs) => slabs[at].bytes_or_copy(),
            None => Ok(Cow::Borrowed(self.puts[at].bytes)),
        }
    }
}

pub(super) fn facts(
    clock: &dyn Clock,
    put: &Put<'_>,
    bytes: usize,
    digest: Option<Digest>,
) -> BlockFacts {
    let expires = put.ttl_ms.map(|ttl| clock.unix_ms().saturating_add(ttl));
    BlockFacts {
        key: put.key,
        digest,
        parent: put.parent,
        namespace: put.namespace,
        bytes: u32::try_from(bytes).expect("longer blocks were refused"),
        is_prefix: put.is_prefix,
        written_unix_ms: 0,
        expires_unix_ms: expires,
    }
}

pub(super) fn new_key(facts: &BlockFacts) -> NewKey {
    NewKey {
        key: facts.key,
        parent: facts.parent,
        is_prefix: facts.is_prefix,
        expires_unix_ms: facts.expires_unix_ms.unwrap_or(0),
    }
}
