//! Backends for tests: a map in memory, and one that takes its time.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use cascade_block::BlockKey;
use cascade_kv_bench::backend::{Backend, Held, KvTier, NewBlock, Read, Space, Stored};

/// Keeps all blocks in a map.
#[derive(Default)]
pub(crate) struct MapBackend {
    blocks: Mutex<HashMap<BlockKey, Vec<u8>>>,
    most_blocks: AtomicUsize,
}

impl MapBackend {
    /// Number of blocks.
    pub(crate) fn len(&self) -> usize {
        self.blocks.lock().unwrap().len()
    }

    /// Most blocks that it had when it was cleared.
    pub(crate) fn most_blocks(&self) -> usize {
        self.most_blocks.load(Ordering::Relaxed)
    }
}

impl Backend for MapBackend {
    fn reserve(&self, bytes: usize) -> Result<Space, String> {
        Ok(Space::Owned(vec![0; bytes]))
    }

    fn put(&self, blocks: Vec<NewBlock>) -> Vec<Stored> {
        let mut map = self.blocks.lock().unwrap();
        let outcomes = blocks.into_iter().map(|mut block| {
            let bytes = block.space.bytes_mut().to_vec();
            match map.insert(block.key, bytes) {
                None => Stored::Yes,
                Some(_) => Stored::Present,
            }
        });
        outcomes.collect()
    }

    fn read(&self, keys: &[BlockKey]) -> Vec<Read> {
        let map = self.blocks.lock().unwrap();
        let read = |key| match map.get(key) {
            Some(bytes) => Read::Hit { held: Held::Owned(bytes.clone()), tier: KvTier::Cpu },
            None => Read::Miss,
        };
        keys.iter().map(read).collect()
    }

    fn clear(&self) {
        let mut map = self.blocks.lock().unwrap();
        self.most_blocks.fetch_max(map.len(), Ordering::Relaxed);
        map.clear();
    }
}

/// A map whose calls take a time.
pub(crate) struct SlowBackend {
    map: MapBackend,
    time: Duration,
    puts: AtomicUsize,
    most_puts: AtomicUsize,
}

impl SlowBackend {
    /// A map whose calls take `time`.
    pub(crate) fn new(time: Duration) -> Self {
        Self { map: MapBackend::default(), time, puts: 0.into(), most_puts: 0.into() }
    }

    /// Most puts that were under way together.
    pub(crate) fn most_puts_at_once(&self) -> usize {
        self.most_puts.load(Ordering::Relaxed)
    }
}

impl Backend for SlowBackend {
    fn reserve(&self, bytes: usize) -> Result<Space, String> {
        self.map.reserve(bytes)
    }

    fn put(&self, blocks: Vec<NewBlock>) -> Vec<Stored> {
        let puts = self.puts.fetch_add(1, Ordering::Relaxed) + 1;
        self.most_puts.fetch_max(puts, Ordering::Relaxed);
        // The shared prompts, before the window, are put one by one.
        if blocks.len() > 1 {
            cascade_runtime::sleep(self.time);
        }
        self.puts.fetch_sub(1, Ordering::Relaxed);
        self.map.put(blocks)
    }

    fn read(&self, keys: &[BlockKey]) -> Vec<Read> {
        cascade_runtime::sleep(self.time);
        self.map.read(keys)
    }

    fn clear(&self) {
        self.map.clear();
    }
}
