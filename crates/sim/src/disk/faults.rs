//! Faults of a simulated disk: episodes in which calls fail, hang or do something else.

use std::ops::Range;
use std::time::Duration;

use cascade_runtime::simulated::Random;

/// What a call of the disk does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum CallKind {
    /// Reads bytes of a file.
    Read,
    /// Writes bytes of a file.
    Write,
    /// Makes the bytes of a file or the names of a directory durable.
    Sync,
    /// Opens, creates, lists, renames or removes files.
    Name,
}

/// A fault. Each concerns one call, unless it says otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum DiskFault {
    /// The call fails with an I/O error and does nothing. A sync that fails leaves its pages
    /// durable or lost by lot, and clean.
    Error(CallKind),
    /// The call does not end before the episode does.
    Hang(CallKind),
    /// No call ends before the episode does.
    Stall,
    /// Every call takes so many times longer.
    Slow(u32),
    /// A transfer moves and reports fewer bytes, in whole pages.
    ShortTransfer,
    /// A write fails after its first bytes.
    TornWrite,
    /// A write is reported as done, but the device loses its bytes.
    LostWrite,
    /// A read returns one wrong bit. The disk has the right one.
    FlippedRead,
    /// A write stores one wrong bit.
    FlippedWrite,
    /// The file system has no more space, whatever its capacity.
    Full,
    /// Directories have another identity, as if another file system were mounted over them.
    OtherDirectory,
}

/// A time in which a fault happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Episode {
    /// The fault.
    pub fault: DiskFault,
    /// Its beginning, in time since the start of the world.
    pub from: Duration,
    /// Its end.
    pub until: Duration,
    /// It concerns one call in so many, in the mean; with 1 every call. Not for faults that concern
    /// every call anyway.
    pub one_in: u32,
}

/// Episodes, and what they do to a call.
#[derive(Debug, Default)]
pub(super) struct FaultPlan {
    episodes: Vec<Episode>,
}

/// What the faults of the moment make of one call.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct PlannedFault {
    /// The fault that changes the effect of the call, if there is one.
    pub(super) effect: Option<DiskFault>,
    /// The call does not end earlier.
    pub(super) hangs_until: Option<Duration>,
    /// The call takes so many times longer, and once more.
    pub(super) extra_latency: u32,
}

impl Episode {
    /// A fault of every call in a time.
    pub fn new(fault: DiskFault, from: Duration, until: Duration) -> Self {
        Self { fault, from, until, one_in: 1 }
    }

    /// A fault drawn by lot, with a beginning in this time.
    pub fn draw(random: &mut Random, within: Range<Duration>) -> Self {
        use CallKind::{Name, Read, Sync, Write};
        let faults = [
            DiskFault::Error(Read),
            DiskFault::Error(Write),
            DiskFault::Error(Sync),
            DiskFault::Error(Name),
            DiskFault::Hang(Read),
            DiskFault::Hang(Write),
            DiskFault::Hang(Sync),
            DiskFault::Hang(Name),
            DiskFault::Stall,
            DiskFault::Slow(10),
            DiskFault::Slow(100),
            DiskFault::ShortTransfer,
            DiskFault::TornWrite,
            DiskFault::LostWrite,
            DiskFault::FlippedRead,
            DiskFault::FlippedWrite,
            DiskFault::Full,
            DiskFault::OtherDirectory,
        ];
        let fault = faults[random.index_below(faults.len())];
        let span = within.end.saturating_sub(within.start).as_micros();
        let offset = random.below(u64::try_from(span).unwrap_or(u64::MAX));
        let from = within.start + Duration::from_micros(offset);
        // Shorter and longer than time-outs: from a millisecond to two seconds.
        let length_max = 1000 << random.below(12);
        let length = Duration::from_micros(1 + random.below(length_max));
        let one_in = [1, 1, 3, 20][random.index_below(4)];
        Self { fault, from, until: from + length, one_in }
    }

    fn is_active(&self, now: Duration) -> bool {
        (self.from..self.until).contains(&now)
    }
}

impl DiskFault {
    /// Whether the fault changes what a call of this kind does.
    fn has_effect_on(self, kind: CallKind) -> bool {
        match self {
            Self::Error(of) => of == kind,
            Self::ShortTransfer => matches!(kind, CallKind::Read | CallKind::Write),
            Self::FlippedRead => kind == CallKind::Read,
            Self::TornWrite | Self::LostWrite | Self::FlippedWrite => kind == CallKind::Write,
            Self::Hang(_) | Self::Stall | Self::Slow(_) | Self::Full | Self::OtherDirectory => {
                false
            }
        }
    }
}

impl FaultPlan {
    pub(super) fn add(&mut self, episode: Episode) {
        self.episodes.push(episode);
    }

    pub(super) fn clear(&mut self) {
        self.episodes.clear();
    }

    /// Whether a fault without an effect of its own on one call is active.
    pub(super) fn is_active(&self, fault: DiskFault, now: Duration) -> bool {
        self.episodes.iter().any(|episode| episode.fault == fault && episode.is_active(now))
    }

    /// The end of the last episode.
    pub(super) fn end(&self) -> Duration {
        self.episodes.iter().map(|episode| episode.until).max().unwrap_or_default()
    }

    /// Draws what happens to a call. Draws nothing while no episode is active.
    pub(super) fn plan(&self, kind: CallKind, now: Duration, random: &mut Random) -> PlannedFault {
        let mut planned = PlannedFault::default();
        for episode in self.episodes.iter().filter(|episode| episode.is_active(now)) {
            match episode.fault {
                DiskFault::Slow(times) => planned.extra_latency = times.saturating_sub(1),
                DiskFault::Stall => {
                    planned.hangs_until = planned.hangs_until.max(Some(episode.until));
                }
                DiskFault::Hang(of) if of == kind && random.one_in(episode.one_in) => {
                    planned.hangs_until = planned.hangs_until.max(Some(episode.until));
                }
                fault if fault.has_effect_on(kind) && random.one_in(episode.one_in) => {
                    planned.effect = planned.effect.or(Some(fault));
                }
                _ => {}
            }
        }
        planned
    }
}
