//! Three tiers of whole entries, as in the original: GPU and CPU memory by size, then files.
//!
//! An entry goes to the first tier that can make room for it. To make room, a tier moves its least
//! recently used entries one tier down; files drop them. Reading an entry never moves it up. The
//! limits are those of the original: a tier is filled to 80 %, an entry of more than 95 % of a tier
//! goes to the next one, and files are filled to the end.

mod transfers;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use cascade_runtime::Clock;

use crate::KvBenchError;
use crate::backend::KvTier;
use crate::block_names::BlockNames;
use crate::compatible::entry::EntryName;
use crate::compatible::io_log::{IoLog, LoggedOperation};
use crate::compatible::object_file::{IoTimes, Unfinished};

/// The share of a tier above which entries are moved down.
const TARGET_SHARE: f64 = 0.8;
/// The share of a tier above which one entry does not fit.
const LARGE_SHARE: f64 = 0.95;
/// The share of a tier below which it takes an entry of any size that fits.
const EMPTY_SHARE: f64 = 0.05;
/// A tier with less than this share of entries has little to move down ...
const LITTLE_SHARE: f64 = 0.2;
/// ... and does not, for an entry of more than this share of the target.
const LARGE_OF_TARGET: f64 = 0.5;

/// The sizes of the tiers in bytes. One of size 0 takes nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WaterfallSizes {
    /// GPU memory, simulated in memory of this host.
    pub gpu_bytes: u64,
    /// CPU memory.
    pub cpu_bytes: u64,
    /// Files.
    pub files_bytes: u64,
}

/// What a tier contains.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TierContents {
    /// Entries, or blocks.
    pub entries: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// What was moved down.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MovedDown {
    /// Entries that went to CPU memory: at once, or from the GPU.
    pub to_cpu: u64,
    /// Entries that went to files: at once, or from memory.
    pub to_files: u64,
    /// Bytes that were moved from memory to files. The original has them in no latency and no rate.
    pub demoted_bytes: u64,
    /// Entries that files dropped.
    pub dropped: u64,
}

/// An entry that was written.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ObjectWrite {
    pub(crate) tier: KvTier,
    pub(crate) times: IoTimes,
}

/// The outcome of a read.
#[derive(Debug)]
pub(crate) enum ObjectRead {
    Hit { tier: KvTier, bytes: u64, times: IoTimes },
    Miss,
}

/// Looks at a piece that was read: its number and its bytes.
pub(crate) type Look<'a> = dyn FnMut(u64, &[u8]) + 'a;

/// The tiers.
pub struct Waterfall<'a> {
    directory: PathBuf,
    limits: [u64; 3],
    names: BlockNames,
    clock: &'a dyn Clock,
    /// Signalled when an entry was written.
    written: Condvar,
    /// With `--io-trace-log`: operations are written here instead of being carried out.
    log: Option<&'a IoLog<'a>>,
    state: Mutex<State>,
    is_cut: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    places: HashMap<EntryName, Place>,
    /// Entries that are being written. Two requests of a data set may have the same one.
    writing: HashSet<EntryName>,
    /// The entries of each tier that may be moved, by their last use.
    by_use: [BTreeMap<u64, EntryName>; 3],
    contents: [TierContents; 3],
    /// Bytes of entries that are there, or on their way.
    used: [u64; 3],
    uses: u64,
    moved: MovedDown,
    failures: BTreeMap<String, u64>,
}

#[derive(Debug)]
struct Place {
    tier: KvTier,
    last_use: u64,
    object: Arc<Object>,
}

#[derive(Debug)]
struct Object {
    bytes: u64,
    /// Locked while it is read or moved.
    body: Mutex<Body>,
}

#[derive(Debug)]
enum Body {
    Memory(KvTier, Vec<Box<[u8]>>),
    File,
    /// In this tier, if anything were stored.
    Logged(KvTier),
    Gone,
}

/// An entry that is about to leave its tier. No other thread chooses it.
struct Victim {
    name: EntryName,
    object: Arc<Object>,
}

impl<'a> Waterfall<'a> {
    /// Empty tiers, with files in a directory that is created.
    ///
    /// # Errors
    /// If it cannot be created.
    pub fn new(
        directory: &Path,
        sizes: WaterfallSizes,
        seed: u64,
        clock: &'a dyn Clock,
    ) -> Result<Self, KvBenchError> {
        fs::create_dir_all(directory).map_err(|source| KvBenchError::Directory {
            action: "create",
            path: directory.to_owned(),
            advice: "give a --cache-dir that you may write in",
            source,
        })?;
        Ok(Self {
            directory: directory.to_owned(),
            limits: [sizes.gpu_bytes, sizes.cpu_bytes, sizes.files_bytes],
            names: BlockNames::new(seed),
            clock,
            written: Condvar::new(),
            log: None,
            state: Mutex::default(),
            is_cut: AtomicBool::new(false),
        })
    }

    /// Empty tiers that store nothing: what they would do is logged.
    pub fn logged(
        log: &'a IoLog<'a>,
        sizes: WaterfallSizes,
        seed: u64,
        clock: &'a dyn Clock,
    ) -> Self {
        Self {
            directory: PathBuf::new(),
            limits: [sizes.gpu_bytes, sizes.cpu_bytes, sizes.files_bytes],
            names: BlockNames::new(seed),
            clock,
            written: Condvar::new(),
            log: Some(log),
            state: Mutex::default(),
            is_cut: AtomicBool::new(false),
        }
    }

    /// What each tier contains.
    pub fn contents(&self) -> [TierContents; 3] {
        self.state().contents
    }

    /// What was moved down since the counts were reset.
    pub fn moved(&self) -> MovedDown {
        self.state().moved
    }

    /// Starts to count again, as the original does before its window.
    pub(crate) fn start_window(&self) {
        self.state().moved = MovedDown::default();
        self.is_cut.store(false, Ordering::Relaxed);
    }

    /// Ends what is under way at its next piece: entries may take minutes.
    pub(crate) fn cut(&self) {
        self.is_cut.store(true, Ordering::Relaxed);
    }

    /// Whether no further piece is moved.
    pub(crate) fn is_cut(&self) -> bool {
        self.is_cut.load(Ordering::Relaxed)
    }

    /// Entries that were lost because they could not be moved, by reason.
    pub(crate) fn take_failures(&self) -> BTreeMap<String, u64> {
        std::mem::take(&mut self.state().failures)
    }

    /// What gives pieces of entries their keys, which determine their bytes.
    pub(crate) fn names(&self) -> BlockNames {
        self.names
    }

    /// The file of an entry, if it is in one.
    pub fn path(&self, name: EntryName) -> PathBuf {
        self.directory.join(name.file_name())
    }

    /// Writes an entry to the first tier that can make room for it. An entry that is there is not
    /// written again.
    pub(crate) fn write(
        &self,
        name: EntryName,
        bytes: u64,
        fill: &mut dyn FnMut(u64, &mut [u8]),
        piece: &mut Vec<u8>,
    ) -> Result<Option<ObjectWrite>, Unfinished> {
        if !self.begin_write(name) {
            return Ok(None);
        }
        let written = self.write_new(name, bytes, fill, piece);
        self.state().writing.remove(&name);
        self.written.notify_all();
        written.map(Some)
    }

    /// Waits while another thread writes the entry. False if it is there.
    fn begin_write(&self, name: EntryName) -> bool {
        let state = self.state();
        let is_busy = |state: &mut State| state.writing.contains(&name);
        let waited = self.written.wait_while(state, is_busy);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner);
        !state.places.contains_key(&name) && state.writing.insert(name)
    }

    fn write_new(
        &self,
        name: EntryName,
        bytes: u64,
        fill: &mut dyn FnMut(u64, &mut [u8]),
        piece: &mut Vec<u8>,
    ) -> Result<ObjectWrite, Unfinished> {
        let tier = KvTier::ALL.into_iter().find(|tier| self.make_room(*tier, bytes));
        // Files take an entry whatever their size. The file system has the last word.
        let tier = tier.unwrap_or(KvTier::Storage);
        let written = if let Some(log) = self.log {
            log.add(LoggedOperation::Prefill, name, bytes, tier);
            Ok((Body::Logged(tier), IoTimes::default()))
        } else if tier == KvTier::Storage {
            self.write_file(name, bytes, fill, piece).map(|times| (Body::File, times))
        } else {
            self.write_memory(tier, bytes, fill, piece)
        };
        let mut state = self.state();
        match written {
            Ok((body, times)) => {
                let object = Arc::new(Object { bytes, body: Mutex::new(body) });
                state.insert(name, tier, object);
                match tier {
                    KvTier::Gpu => {}
                    KvTier::Cpu => state.moved.to_cpu += 1,
                    KvTier::Storage => state.moved.to_files += 1,
                }
                Ok(ObjectWrite { tier, times })
            }
            Err(unfinished) => {
                state.release(tier, bytes);
                drop(state);
                drop(fs::remove_file(self.path(name)));
                Err(unfinished)
            }
        }
    }

    /// Reads an entry where it is. It stays there.
    pub(crate) fn read(
        &self,
        name: EntryName,
        piece: &mut Vec<u8>,
        look: &mut Look<'_>,
    ) -> Result<ObjectRead, Unfinished> {
        let Some(object) = self.state().touch(name) else { return Ok(ObjectRead::Miss) };
        let body = object.body.lock().unwrap_or_else(PoisonError::into_inner);
        let (tier, times) = match &*body {
            Body::Gone => return Ok(ObjectRead::Miss),
            Body::Logged(tier) => (*tier, self.log_read(name, object.bytes, *tier)),
            Body::Memory(tier, pieces) => (*tier, self.read_memory(*tier, pieces, piece, look)?),
            Body::File => (KvTier::Storage, self.read_file(name, object.bytes, piece, look)?),
        };
        Ok(ObjectRead::Hit { tier, bytes: object.bytes, times })
    }

    /// Reserves room in a tier. False if it cannot have any: the entry goes to the next tier.
    fn make_room(&self, tier: KvTier, bytes: u64) -> bool {
        let at = tier.index();
        let (limit, needed) = (self.limits[at] as f64, bytes as f64);
        let is_last = tier == KvTier::Storage;
        let target = if is_last { limit } else { limit * TARGET_SHARE };
        if !is_last && needed > limit * LARGE_SHARE {
            return false;
        }
        let mut is_first = true;
        loop {
            let mut state = self.state();
            let used = state.used[at] as f64;
            let is_free = used + needed <= target || used < limit * EMPTY_SHARE;
            if is_free || (is_last && state.by_use[at].is_empty()) {
                state.used[at] += bytes;
                return true;
            }
            let has_little = (state.contents[at].bytes as f64) < limit * LITTLE_SHARE;
            if is_first && !is_last && has_little && needed > target * LARGE_OF_TARGET {
                return false;
            }
            is_first = false;
            let Some(victim) = state.choose(tier) else { return false };
            drop(state);
            let next = KvTier::ALL.get(at + 1).copied();
            let has_left = match next {
                None => self.drop_file(&victim),
                Some(next) => self.demote(&victim, tier, next),
            };
            if !has_left {
                return false;
            }
        }
    }

    /// Moves an entry one tier down. False if that tier has no room.
    fn demote(&self, victim: &Victim, from: KvTier, to: KvTier) -> bool {
        let bytes = victim.object.bytes;
        if !self.make_room(to, bytes) {
            self.state().keep(victim.name);
            return false;
        }
        let mut body = victim.object.body.lock().unwrap_or_else(PoisonError::into_inner);
        let moved = match (std::mem::replace(&mut *body, Body::Gone), to) {
            (Body::Logged(_), tier) => Ok(self.log_move(victim.name, bytes, (from, tier))),
            (Body::Memory(held_by, pieces), KvTier::Storage) => {
                match self.write_pieces(victim.name, &pieces) {
                    Ok(()) => Ok(Body::File),
                    Err(Unfinished::Failed(error)) => Err(error),
                    Err(Unfinished::Cut { .. }) => {
                        *body = Body::Memory(held_by, pieces);
                        let mut state = self.state();
                        state.keep(victim.name);
                        state.release(to, bytes);
                        return false;
                    }
                }
            }
            (Body::Memory(_, pieces), tier) => Ok(Body::Memory(tier, pieces)),
            (Body::File | Body::Gone, _) => {
                self.state().release(to, bytes);
                return true;
            }
        };
        let mut state = self.state();
        match moved {
            Ok(moved) => {
                *body = moved;
                state.place(victim.name, from, to, bytes);
                match to {
                    KvTier::Storage => {
                        state.moved.to_files += 1;
                        state.moved.demoted_bytes += bytes;
                    }
                    _ => state.moved.to_cpu += 1,
                }
            }
            Err(error) => {
                // The entry is lost: its next read is a miss.
                state.remove(victim.name, from, bytes);
                state.release(to, bytes);
                let reason = format!("cannot move an entry to files: {error}");
                *state.failures.entry(reason).or_default() += 1;
            }
        }
        true
    }

    /// Removes the file of an entry.
    fn drop_file(&self, victim: &Victim) -> bool {
        let mut body = victim.object.body.lock().unwrap_or_else(PoisonError::into_inner);
        let is_file = matches!(std::mem::replace(&mut *body, Body::Gone), Body::File);
        let removed = if is_file { fs::remove_file(self.path(victim.name)) } else { Ok(()) };
        let mut state = self.state();
        state.remove(victim.name, KvTier::Storage, victim.object.bytes);
        state.moved.dropped += 1;
        if let Err(error) = removed {
            let reason = format!("cannot remove an entry: {error}");
            *state.failures.entry(reason).or_default() += 1;
        }
        true
    }

    fn log_read(&self, name: EntryName, bytes: u64, tier: KvTier) -> IoTimes {
        if let Some(log) = self.log {
            log.add(LoggedOperation::Decode, name, bytes, tier);
        }
        IoTimes::default()
    }

    fn log_move(&self, name: EntryName, bytes: u64, (from, to): (KvTier, KvTier)) -> Body {
        if let Some(log) = self.log {
            log.add(LoggedOperation::EvictRead, name, bytes, from);
            log.add(LoggedOperation::EvictWrite, name, bytes, to);
        }
        Body::Logged(to)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Waterfall<'_> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let shown = &mut formatter.debug_struct("Waterfall");
        shown.field("directory", &self.directory).field("limits", &self.limits);
        shown.finish_non_exhaustive()
    }
}

impl State {
    fn next_use(&mut self) -> u64 {
        self.uses += 1;
        self.uses
    }

    /// Adds an entry, for which room was reserved.
    fn insert(&mut self, name: EntryName, tier: KvTier, object: Arc<Object>) {
        let last_use = self.next_use();
        self.by_use[tier.index()].insert(last_use, name);
        let contents = &mut self.contents[tier.index()];
        contents.entries += 1;
        contents.bytes += object.bytes;
        self.places.insert(name, Place { tier, last_use, object });
    }

    /// Notes that an entry is used now.
    fn touch(&mut self, name: EntryName) -> Option<Arc<Object>> {
        let last_use = self.next_use();
        let place = self.places.get_mut(&name)?;
        let by_use = &mut self.by_use[place.tier.index()];
        // One that is about to leave is in no order.
        if by_use.remove(&place.last_use).is_some() {
            by_use.insert(last_use, name);
        }
        place.last_use = last_use;
        Some(Arc::clone(&place.object))
    }

    /// Takes the least recently used entry of a tier out of the order.
    fn choose(&mut self, tier: KvTier) -> Option<Victim> {
        let (_, name) = self.by_use[tier.index()].pop_first()?;
        let object = Arc::clone(&self.places.get(&name)?.object);
        Some(Victim { name, object })
    }

    /// Puts an entry that could not leave back into the order.
    fn keep(&mut self, name: EntryName) {
        if let Some(place) = self.places.get(&name) {
            self.by_use[place.tier.index()].insert(place.last_use, name);
        }
    }

    /// Puts an entry into another tier, which reserved room for it.
    fn place(&mut self, name: EntryName, from: KvTier, to: KvTier, bytes: u64) {
        if let Some(place) = self.places.get_mut(&name) {
            place.tier = to;
            self.by_use[to.index()].insert(place.last_use, name);
        }
        for (tier, is_new) in [(from, false), (to, true)] {
            let contents = &mut self.contents[tier.index()];
            if is_new {
                contents.entries += 1;
                contents.bytes += bytes;
            } else {
                contents.entries -= 1;
                contents.bytes -= bytes;
            }
        }
        self.release(from, bytes);
    }

    fn remove(&mut self, name: EntryName, tier: KvTier, bytes: u64) {
        self.places.remove(&name);
        let contents = &mut self.contents[tier.index()];
        contents.entries -= 1;
        contents.bytes -= bytes;
        self.release(tier, bytes);
    }

    fn release(&mut self, tier: KvTier, bytes: u64) {
        self.used[tier.index()] -= bytes;
    }
}
