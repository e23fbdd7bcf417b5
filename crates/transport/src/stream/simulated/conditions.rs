//! What a simulated network does to its connections.

use std::time::Duration;

use cascade_runtime::simulated::Random;

/// What a simulated network does to connections that are made from now on. The default is a fast
/// network without faults.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Conditions {
    /// The least time from one host to the other.
    pub latency: Duration,
    /// The most time that is added to it, for each run of bytes.
    pub jitter: Duration,
    /// Bytes a second in each direction; 0 for no limit.
    pub bytes_per_second: u64,
    /// Bytes of one direction that are sent and not yet received, at most.
    pub window_bytes: usize,
    /// Bytes that one call sends or receives, at most: each call draws a number up to it.
    pub call_bytes: usize,
    /// One run of bytes in so many arrives late, as after a loss; 0 for none.
    pub late_one_in: u32,
    /// How late, at most.
    pub late: Duration,
    /// One direction of a connection in so many is reset at some byte; 0 for none.
    pub reset_one_in: u32,
    /// One direction in so many ends at some byte, while the other goes on; 0 for none.
    pub half_close_one_in: u32,
    /// One direction in so many has a flipped bit at some byte; 0 for none.
    pub flip_one_in: u32,
    /// These happen below so many bytes.
    pub fault_bytes: u64,
    /// One attempt to connect in so many is refused; 0 for none.
    pub refuse_one_in: u32,
    /// One attempt in so many makes a second connection, on which nothing is sent; 0 for none.
    pub duplicate_one_in: u32,
}

impl Default for Conditions {
    fn default() -> Self {
        Self {
            latency: Duration::from_micros(50),
            jitter: Duration::ZERO,
            bytes_per_second: 0,
            window_bytes: 256 << 10,
            call_bytes: usize::MAX,
            late_one_in: 0,
            late: Duration::ZERO,
            reset_one_in: 0,
            half_close_one_in: 0,
            flip_one_in: 0,
            fault_bytes: 0,
            refuse_one_in: 0,
            duplicate_one_in: 0,
        }
    }
}

/// What happens to one direction of a connection, by the number of bytes before it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fate {
    pub(super) reset: Option<u64>,
    pub(super) end: Option<u64>,
    pub(super) flip: Option<u64>,
}

impl Fate {
    pub(super) fn draw(conditions: &Conditions, random: &mut Random) -> Self {
        let mut at = |one_in| {
            // Early bytes are as likely as late ones: handshakes are short.
            let bits = u64::BITS - conditions.fault_bytes.leading_zeros();
            let below = 1 << random.below(u64::from(bits.max(1)));
            let byte = random.below(below);
            random.one_in(one_in).then_some(byte)
        };
        Self {
            reset: at(conditions.reset_one_in),
            end: at(conditions.half_close_one_in),
            flip: at(conditions.flip_one_in),
        }
    }
}

impl Conditions {
    /// The time that a run of bytes takes from one host to the other.
    pub(super) fn delay(&self, random: &mut Random) -> Duration {
        let mut delay = self.latency + below(self.jitter, random);
        if random.one_in(self.late_one_in) {
            delay += below(self.late, random);
        }
        delay
    }

    /// How many bytes one call moves, at most.
    pub(super) fn call(&self, random: &mut Random) -> usize {
        match self.call_bytes {
            usize::MAX => usize::MAX,
            most => 1 + random.index_below(most),
        }
    }
}

fn below(time: Duration, random: &mut Random) -> Duration {
    let nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    Duration::from_nanos(random.below(nanoseconds))
}
