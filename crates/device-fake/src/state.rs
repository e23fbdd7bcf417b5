//! What exists in the driver: contexts, memory, streams, events.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use cascade_runtime::Condvar;

use crate::device_memory::{Mapping, Space};
use crate::shared_memory::Allocation;

/// `CUDA_ERROR_*`.
pub(crate) const INVALID_VALUE: i32 = 1;
pub(crate) const OUT_OF_MEMORY: i32 = 2;
pub(crate) const NOT_INITIALIZED: i32 = 3;
pub(crate) const NO_DEVICE: i32 = 100;
pub(crate) const INVALID_DEVICE: i32 = 101;
pub(crate) const INVALID_CONTEXT: i32 = 201;
pub(crate) const INVALID_HANDLE: i32 = 400;
pub(crate) const PEER_ACCESS_UNSUPPORTED: i32 = 217;
pub(crate) const INVALID_PTX: i32 = 218;
pub(crate) const NOT_FOUND: i32 = 500;
pub(crate) const NOT_READY: i32 = 600;
pub(crate) const ILLEGAL_ADDRESS: i32 = 700;
pub(crate) const ALREADY_REGISTERED: i32 = 712;
pub(crate) const NOT_REGISTERED: i32 = 713;
pub(crate) const NOT_SUPPORTED: i32 = 801;

/// Errors that a context never recovers from.
pub(crate) fn is_fatal(code: i32) -> bool {
    matches!(code, 214 | 220 | 700 | 702 | 709 | 710 | 714..=719 | 999)
}

/// Memory, and the copies that use it now.
#[derive(Debug)]
pub(crate) struct Memory {
    pub(crate) bytes: usize,
    /// Where the bytes are; the host's own address for registered memory.
    pub(crate) start: usize,
    pub(crate) in_flight: usize,
    /// Unmapped with this value; none for registered memory.
    pub(crate) mapping: Option<Mapping>,
    /// The allocation that was mapped by `cuMemMap`.
    pub(crate) allocation: Option<u64>,
    /// Whether a device may access it.
    pub(crate) is_accessible: bool,
}

impl Memory {
    pub(crate) fn new(bytes: usize, start: usize, mapping: Option<Mapping>) -> Self {
        let allocation = None;
        Self { bytes, start, in_flight: 0, mapping, allocation, is_accessible: true }
    }
}

/// Which of the maps of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Device,
    Host,
}

/// A piece of memory that was found.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    pub(crate) side: Side,
    /// Key of its map.
    pub(crate) key: usize,
    /// Where its bytes are.
    pub(crate) start: usize,
}

/// One copy, or one fill.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Transfer {
    pub(crate) target: Place,
    /// None for a fill with a byte.
    pub(crate) source: Result<Place, u8>,
    pub(crate) bytes: usize,
}

/// A launch of the kernel that copies.
#[derive(Debug)]
pub(crate) struct Launch {
    /// The arrays. A kernel reads them when it runs.
    pub(crate) lists: [Place; 3],
    pub(crate) count: usize,
}

/// Work of a stream.
#[derive(Debug)]
pub(crate) enum Work {
    Transfers(Vec<Transfer>),
    Kernel(Launch),
    Record {
        event: usize,
        count: u64,
    },
    Wait {
        event: usize,
        count: u64,
    },
    /// A function of the host and its argument.
    Call {
        function: usize,
        argument: usize,
    },
}

/// Work, and the function that started it.
#[derive(Debug)]
pub(crate) struct Item {
    pub(crate) name: &'static str,
    pub(crate) work: Work,
}

#[derive(Debug, Default)]
pub(crate) struct Stream {
    /// Wakes its thread.
    pub(crate) wake: Arc<Condvar>,
    pub(crate) queue: VecDeque<Item>,
    pub(crate) is_running: bool,
    pub(crate) is_destroyed: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Event {
    /// How often it was recorded, and how many of these records were reached.
    pub(crate) recorded: u64,
    pub(crate) reached: u64,
    /// When the last record was reached; none without times.
    pub(crate) time: Option<Duration>,
    pub(crate) is_timed: bool,
    pub(crate) is_destroyed: bool,
}

/// Everything, under one lock.
#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) is_initialized: bool,
    /// How often the primary context of each device is retained.
    pub(crate) retained: BTreeMap<i32, u64>,
    /// The error that killed the contexts.
    pub(crate) death: Option<i32>,
    pub(crate) space: Option<Space>,
    pub(crate) used_bytes: usize,
    pub(crate) device: BTreeMap<usize, Memory>,
    /// Registered, and allocated by the driver.
    pub(crate) host: BTreeMap<usize, Memory>,
    /// Allocations of `cuMemCreate` and imported ones, by handle.
    pub(crate) allocations: BTreeMap<u64, Allocation>,
    /// Lengths of reserved ranges of addresses.
    pub(crate) reservations: BTreeMap<usize, usize>,
    pub(crate) streams: BTreeMap<usize, Stream>,
    pub(crate) events: BTreeMap<usize, Event>,
    /// The handle of the kernel that each module has, if it has one that is known.
    pub(crate) modules: BTreeMap<usize, Option<usize>>,
    pub(crate) held: BTreeSet<String>,
    pub(crate) calls: BTreeMap<&'static str, u64>,
    pub(crate) call_count: u64,
    pub(crate) copy_count: u64,
    /// Live objects of contexts whose last holder released them.
    pub(crate) leaked: u64,
    /// Memory that was released under a copy.
    pub(crate) misused: u64,
    next_handle: usize,
}

impl State {
    /// A handle that is no address.
    pub(crate) fn new_handle(&mut self) -> usize {
        self.next_handle += 1;
        0xfa_0000 + self.next_handle
    }

    /// Addresses of devices that were never used before.
    pub(crate) fn take_addresses(&mut self, bytes: usize) -> Result<usize, i32> {
        if self.space.is_none() {
            self.space = Space::new();
        }
        self.space.as_mut().and_then(|space| space.take(bytes)).ok_or(OUT_OF_MEMORY)
    }

    /// The memory that has these bytes, in one piece.
    pub(crate) fn find(&self, address: usize, bytes: usize) -> Result<Place, i32> {
        let is_device = self.space.as_ref().is_some_and(|space| space.contains(address));
        let side = if is_device { Side::Device } else { Side::Host };
        let before = self.map(side).range(..=address).next_back();
        let (key, memory) = before.ok_or(INVALID_VALUE)?;
        let offset = address - key;
        let fits = offset.checked_add(bytes).is_some_and(|end| end <= memory.bytes);
        let place = Place { side, key: *key, start: memory.start + offset };
        if fits && memory.is_accessible { Ok(place) } else { Err(INVALID_VALUE) }
    }

    pub(crate) fn map(&self, side: Side) -> &BTreeMap<usize, Memory> {
        match side {
            Side::Device => &self.device,
            Side::Host => &self.host,
        }
    }

    fn map_mut(&mut self, side: Side) -> &mut BTreeMap<usize, Memory> {
        match side {
            Side::Device => &mut self.device,
            Side::Host => &mut self.host,
        }
    }

    /// Counts a copy that starts to use memory, or one that is over.
    pub(crate) fn use_memory(&mut self, transfer: &Transfer, starts: bool) {
        for place in [Some(transfer.target), transfer.source.ok()].into_iter().flatten() {
            if let Some(memory) = self.map_mut(place.side).get_mut(&place.key) {
                memory.in_flight =
                    if starts { memory.in_flight + 1 } else { memory.in_flight.saturating_sub(1) };
            }
        }
    }

    /// Removes memory. Memory that a copy uses stays, and the context dies.
    pub(crate) fn remove(&mut self, side: Side, key: usize, missing: i32) -> Result<Memory, i32> {
        let memory = self.map(side).get(&key).ok_or(missing)?;
        if memory.in_flight > 0 {
            self.misused += 1;
            self.death = Some(ILLEGAL_ADDRESS);
            return Err(ILLEGAL_ADDRESS);
        }
        self.map_mut(side).remove(&key).ok_or(missing)
    }

    /// Objects that somebody has to release.
    pub(crate) fn live(&self) -> u64 {
        let streams = self.streams.values().filter(|stream| !stream.is_destroyed).count();
        let events = self.events.values().filter(|event| !event.is_destroyed).count();
        let handles = self.allocations.values().filter(|it| !it.is_released).count();
        let memory = self.device.len() + self.host.len() + handles + self.reservations.len();
        (memory + streams + events + self.modules.len()) as u64
    }

    /// The counts that a report has.
    pub(crate) fn count(&self, what: &str) -> u64 {
        match what {
            "live" => self.live() + self.leaked,
            "contexts" => self.retained.values().sum(),
            "deaths" => u64::from(self.death.is_some()),
            "misused" => self.misused,
            "copies" => self.copy_count,
            name => self.calls.get(name).copied().unwrap_or(0),
        }
    }
}
