//! The operations of a client, drawn from a seed. Arguments that are interesting are likely: hot
//! keys, whole chains, the same key twice, old and new contents.

use cascade_runtime::simulated::Random;

use crate::profile::Profile;

/// Keys of one operation at most.
const BATCH_MAX: usize = 8;

/// One call of the store, with its keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Operation {
    /// Copies blocks in.
    Put(PutBatch),
    /// Asks for slabs, fills them, and puts them.
    PutSlabs(PutBatch),
    /// Copies blocks out.
    Get(Vec<u32>),
    /// Takes views, and holds some of them for a while.
    View(Vec<u32>),
    /// Leases blocks, as a node does for a process that maps its memory, for a while.
    Lease(Vec<u32>),
    /// Looks a chain up and takes views of what it matched.
    Acquire(Vec<u32>),
    LookupPrefix(Vec<u32>),
    Contains(Vec<u32>),
    Locate(Vec<u32>),
    Delete(Vec<u32>),
    Clear,
    Erase,
    Pin(Vec<u32>),
    /// Removes the pins of this client.
    Unpin,
    Prefetch(Vec<u32>),
    Hint(Vec<u32>),
    Flush,
    Explain(Vec<u32>),
    Scrub,
    Stats,
    /// Follows the changes, and compares the set of keys once it is exact.
    Changes,
    /// Drops the views that this client holds.
    Release,
}

/// The blocks of a put.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "each is drawn by itself")]
pub(crate) struct PutBatch {
    pub(crate) keys: Vec<u32>,
    /// Puts contents that no earlier put had.
    pub(crate) is_new: bool,
    /// Names the preceding key as parent, within a chain.
    pub(crate) has_parents: bool,
    pub(crate) is_prefix: bool,
    /// Whether the last block is partly filled.
    pub(crate) is_partial: bool,
    /// The time that the blocks live.
    pub(crate) ttl_ms: Option<u64>,
}

/// Draws operations.
#[derive(Debug)]
pub(crate) struct Workload {
    random: Random,
    key_count: u32,
    chain_length: u32,
    has_expiry: bool,
    weights: [u64; KINDS],
}

const KINDS: usize = 22;
/// How often an operation is drawn, in the order of their arms in `draw`.
const WEIGHTS: [u64; KINDS] = [
    2500, 1000, 1500, 1000, 400, 500, 500, 200, 100, 500, 5, 2, 150, 150, 300, 100, 150, 100, 10,
    50, 200, 300,
];

impl Workload {
    /// The workload of a client. All clients of a world share its profile of operations.
    pub(crate) fn new(profile: &Profile, world_seed: u64, stream: u64) -> Self {
        let mut shared = Random::new(world_seed, WEIGHTS_STREAM);
        // Worlds in which some operations do not occur reach states that a mixture does not.
        let weights =
            WEIGHTS.map(|weight| weight * [0, 1, 2, 2, 2, 2, 4, 6][shared.index_below(8)]);
        Self {
            random: Random::new(world_seed, stream),
            key_count: profile.key_count,
            chain_length: profile.chain_length,
            has_expiry: profile.has_expiry,
            // Something has to be put and read.
            weights: std::array::from_fn(|at| weights[at].max(u64::from(at < 5) * WEIGHTS[at] / 4)),
        }
    }

    /// The next operation.
    pub(crate) fn draw(&mut self) -> Operation {
        let mut left = self.random.below(self.weights.iter().sum());
        let mut kind = 0;
        while left >= self.weights[kind] {
            left -= self.weights[kind];
            kind += 1;
        }
        match kind {
            0 => Operation::Put(self.put_batch()),
            1 => Operation::PutSlabs(self.put_batch()),
            2 => Operation::Get(self.keys()),
            3 => Operation::View(self.keys()),
            4 => Operation::Lease(self.keys()),
            5 => Operation::Acquire(self.chain()),
            6 => Operation::LookupPrefix(self.chain()),
            7 => Operation::Contains(self.keys()),
            8 => Operation::Locate(self.keys()),
            9 => Operation::Delete(self.keys()),
            10 => Operation::Clear,
            11 => Operation::Erase,
            12 => Operation::Pin(self.keys()),
            13 => Operation::Unpin,
            14 => Operation::Prefetch(self.keys()),
            15 => Operation::Hint(self.chain()),
            16 => Operation::Flush,
            17 => Operation::Explain(self.keys()),
            18 => Operation::Scrub,
            19 => Operation::Stats,
            20 => Operation::Changes,
            _ => Operation::Release,
        }
    }

    /// The generator, for what is not part of an operation.
    pub(crate) fn random(&mut self) -> &mut Random {
        &mut self.random
    }

    /// The preceding key of the chain.
    pub(crate) fn parent(&self, key: u32) -> Option<u32> {
        (!key.is_multiple_of(self.chain_length)).then(|| key - 1)
    }

    fn put_batch(&mut self) -> PutBatch {
        PutBatch {
            keys: self.keys(),
            is_new: self.random.one_in(6),
            has_parents: self.random.one_in(3),
            is_prefix: self.random.one_in(16),
            is_partial: self.random.one_in(32),
            ttl_ms: self.ttl_ms(),
        }
    }

    /// Short against the time of a world, or long.
    fn ttl_ms(&mut self) -> Option<u64> {
        let expires = self.has_expiry && self.random.one_in(8);
        expires.then(|| [0, 1, 30, 1000, 3_600_000][self.random.index_below(5)])
    }

    /// Small numbers are hot.
    fn key(&mut self) -> u32 {
        let below = 1 + self.random.below(u64::from(self.key_count));
        u32::try_from(self.random.below(below)).expect("keys are counted in 32 bits")
    }

    fn count(&mut self) -> usize {
        1 + if self.random.one_in(2) { 0 } else { self.random.index_below(BATCH_MAX) }
    }

    /// Keys in a row, or any keys, perhaps one of them twice.
    fn keys(&mut self) -> Vec<u32> {
        let count = self.count();
        if self.random.one_in(2) {
            let first = self.key();
            let count = u32::try_from(count).expect("a batch is short");
            return (first..self.key_count.min(first + count)).collect();
        }
        (0..count).map(|_| self.key()).collect()
    }

    /// The first keys of a chain.
    fn chain(&mut self) -> Vec<u32> {
        let key = self.key();
        let first = key - key % self.chain_length;
        let longest = self.chain_length.min(self.key_count - first);
        let count = 1 + u32::try_from(self.random.below(u64::from(longest))).expect("as the limit");
        (first..first + count).collect()
    }
}

/// The stream of a world's seed that decides the mixture of operations.
const WEIGHTS_STREAM: u64 = 90;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_are_those_of_the_seed_and_name_keys_of_the_world() {
        for seed in 0..50 {
            let profile = Profile::draw(&mut Random::new(seed, 0));
            let draw = |stream| {
                let mut workload = Workload::new(&profile, seed, stream);
                (0..200).map(|_| workload.draw()).collect::<Vec<_>>()
            };
            assert_eq!(draw(100), draw(100));
            assert_ne!(draw(100), draw(101));
            for operation in draw(100) {
                let (Operation::Get(keys) | Operation::Acquire(keys)) = operation else { continue };
                assert!(!keys.is_empty());
                assert!(keys.iter().all(|key| *key < profile.key_count), "{keys:?}");
            }
        }
    }
}
