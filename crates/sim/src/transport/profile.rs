//! What a world of the transport is like, drawn from its seed.

use std::fmt;
use std::time::Duration;

use cascade_runtime::simulated::Random;
use cascade_transport::simulated::Conditions;
use cascade_transport::{Heartbeat, Limits};

/// Bytes of a slot in which a batch has more pieces than a frame takes.
const WIDE_SLOT_BYTES: usize = 24 << 10;

/// Connections that an endpoint serves in worlds where there are few.
const FEW_PEERS: usize = 3;

/// What happens in a world. Each kind includes those before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Trouble {
    /// Nothing: all calls succeed.
    None,
    /// The network is slow. Deadlines are short, batches are cancelled.
    Haste,
    /// Connections are reset, refused and closed; hosts are frozen and apart.
    Breaks,
    /// Bits are flipped.
    Damage,
    /// Processes are killed.
    Kills,
}

/// What a world is like.
#[derive(Debug, Clone)]
pub(super) struct Profile {
    pub(super) processes: usize,
    /// Clients of each process.
    pub(super) clients: usize,
    /// Batches that a client has in flight, at most: each has a slot of its own.
    pub(super) slots: usize,
    pub(super) slot_bytes: usize,
    pub(super) trouble: Trouble,
    pub(super) conditions: Conditions,
    pub(super) limits: Limits,
    pub(super) has_token: bool,
    /// The pause of a process between two notices that it reads.
    pub(super) notice_pause: Duration,
    /// Whether threads cannot be started now and then.
    pub(super) fails_threads: bool,
    /// Streams of each connection.
    pub(super) streams: usize,
}

impl Profile {
    pub(super) fn draw(random: &mut Random) -> Self {
        let trouble =
            [Trouble::None, Trouble::Haste, Trouble::Breaks, Trouble::Damage, Trouble::Kills]
                [random.index_below(5)];
        let is_wide = random.one_in(5);
        let slot_bytes = match random.below(3) {
            _ if is_wide => WIDE_SLOT_BYTES,
            0 => 64 + random.index_below(256),
            1 => 256 + random.index_below(4096),
            _ => 1024 + random.index_below(20 << 10),
        };
        let mut profile = Self {
            processes: 2 + random.index_below(5),
            clients: 1 + random.index_below(3),
            slots: 1 + random.index_below(4),
            slot_bytes,
            trouble,
            conditions: conditions(random, trouble, slot_bytes),
            limits: limits(random, trouble),
            has_token: random.one_in(2),
            notice_pause: Duration::from_micros([0, 0, 100, 20_000][random.index_below(4)]),
            fails_threads: trouble >= Trouble::Breaks && random.one_in(4),
            streams: 1,
        };
        // Clients that each have some of few places would keep the others out.
        if !profile.has_few_places() {
            profile.streams = [1, 2, 4][random.index_below(3)];
        }
        profile
    }

    /// Whether an endpoint serves few connections.
    pub(super) fn has_few_places(&self) -> bool {
        self.limits.peers_max <= FEW_PEERS
    }

    /// Clients of all processes.
    pub(super) fn clients_of_all(&self) -> usize {
        self.processes * self.clients
    }
}

fn limits(random: &mut Random, trouble: Trouble) -> Limits {
    let stall_ms = [300, 2000, 10_000][random.index_below(3)];
    let handshake_ms = [500, 5000][random.index_below(2)];
    // If no client receives the answer of a read, its connection stalls.
    let stall_ms = if trouble == Trouble::None { 1_000_000 } else { stall_ms };
    let has_few_peers = trouble >= Trouble::Breaks && random.one_in(4);
    Limits {
        peers_max: if has_few_peers { FEW_PEERS } else { 1024 },
        handshake_timeout: Duration::from_millis(handshake_ms),
        stall_timeout: Duration::from_millis(stall_ms),
        notices_max: [2, 10, 65_536][random.index_below(3)],
        heartbeat: heartbeat(random, trouble),
    }
}

fn heartbeat(random: &mut Random, trouble: Trouble) -> Option<Heartbeat> {
    if random.one_in(2) {
        return None;
    }
    let ms = |choices: [u64; 3], random: &mut Random| {
        Duration::from_millis(choices[random.index_below(3)])
    };
    let interval = ms([20, 300, 2000], random);
    let limit = ms([100, 1000, 10_000], random);
    // Answers come in order: one that no client has received yet delays those after it.
    let limit = if trouble == Trouble::None { Duration::from_secs(1000) } else { limit };
    Some(Heartbeat { interval, limit })
}

fn conditions(random: &mut Random, trouble: Trouble, slot_bytes: usize) -> Conditions {
    let one_in = |random: &mut Random, least: Trouble, most: u64| {
        let is_on = trouble >= least && !random.one_in(3);
        let drawn = 2 + u32::try_from(random.below(most)).expect("small");
        if is_on { drawn } else { 0 }
    };
    // Each byte of the largest slots would be a call of its own.
    let least_call = 1 + slot_bytes / 100;
    let is_slow = trouble >= Trouble::Haste && random.one_in(2);
    let rates = [4 << 10, 100 << 10, 2 << 20, 100 << 20];
    Conditions {
        latency: Duration::from_micros(random.below(300)),
        jitter: Duration::from_micros([0, 10, 1000, 20_000][random.index_below(4)]),
        bytes_per_second: if is_slow { rates[random.index_below(4)] } else { 0 },
        window_bytes: [50, 1 << 10, 16 << 10, 256 << 10][random.index_below(4)].max(least_call),
        call_bytes: [least_call, 2 * least_call, 50 * least_call, usize::MAX]
            [random.index_below(4)],
        late_one_in: one_in(random, Trouble::Haste, 300),
        late: Duration::from_millis([200, 3000, 15_000][random.index_below(3)]),
        reset_one_in: one_in(random, Trouble::Breaks, 6),
        half_close_one_in: one_in(random, Trouble::Breaks, 10),
        flip_one_in: one_in(random, Trouble::Damage, 3),
        fault_bytes: [4 << 10, 64 << 10, 1 << 20][random.index_below(3)],
        refuse_one_in: one_in(random, Trouble::Breaks, 10),
        duplicate_one_in: one_in(random, Trouble::None, 5),
    }
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { processes, clients, slots, slot_bytes, .. } = self;
        write!(
            f,
            "{processes} endpoints, {clients} clients each, {slots} slots of {slot_bytes} B"
        )?;
        if self.streams > 1 {
            write!(f, ", {} streams", self.streams)?;
        }
        let rate = self.conditions.bytes_per_second;
        if rate > 0 {
            write!(f, ", {} KiB/s", rate >> 10)?;
        }
        let (window, stall) = (self.conditions.window_bytes, self.limits.stall_timeout);
        write!(f, ", windows of {window} B, stalls of {stall:?}")?;
        if let Some(Heartbeat { interval, limit }) = self.limits.heartbeat {
            write!(f, ", heartbeats each {interval:?} up to {limit:?}")?;
        }
        let token = if self.has_token { ", token" } else { "" };
        let threads = if self.fails_threads { ", threads fail" } else { "" };
        write!(f, "{token}{threads}")?;
        f.write_str(match self.trouble {
            Trouble::None => "",
            Trouble::Haste => ", haste",
            Trouble::Breaks => ", breaks",
            Trouble::Damage => ", damage",
            Trouble::Kills => ", kills",
        })
    }
}
