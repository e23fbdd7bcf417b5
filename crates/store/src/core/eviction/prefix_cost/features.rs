//! Features of a unit, from the request that used it last and the caller's hints.

use cascade_tier::{Hints, Priority, StopReason};

use super::mark::FAN_MAX;

/// The octave of a coarse cell, which does not distinguish octaves. Real octaves are smaller.
const UNKNOWN_OCTAVE: u8 = 23;
/// Distinct workload labels.
const WORKLOADS_MAX: u8 = 16;

/// The kind of the request that used a unit last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum UnitKind {
    /// Only one conversation uses these blocks.
    Private {
        /// Turns before it, in buckets.
        turn: u8,
        /// Blocks that it added, in coarse buckets.
        added: u8,
        /// Octave of the time since the previous turn, 0 for none.
        gap_octave: u8,
        /// Octave of its length in blocks.
        length_octave: u8,
        /// Octave of the blocks that it added.
        added_octave: u8,
    },
    /// Conversations diverge below these blocks; how often, in buckets.
    Shared { fan: u8 },
    /// The rest of a unit after its conversation took another path.
    Superseded,
    /// The caller said that the session is over.
    Ended,
}

/// Features of a unit; units with equal features share a cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Features {
    pub(super) kind: UnitKind,
    pub(super) stop: Option<StopReason>,
    pub(super) workload: Option<u8>,
    pub(super) priority: Priority,
}

impl Features {
    /// Drops hints without effect and bounds the number of labels.
    pub(super) fn normal(mut self) -> Self {
        if !matches!(self.kind, UnitKind::Private { .. }) {
            self.stop = None;
        }
        self.workload = self.workload.map(|label| label % WORKLOADS_MAX);
        self
    }

    /// Without the octaves, which only the factors use.
    pub(super) fn coarse(mut self) -> Self {
        if let UnitKind::Private { gap_octave, length_octave, added_octave, .. } = &mut self.kind {
            (*gap_octave, *length_octave, *added_octave) =
                (UNKNOWN_OCTAVE, UNKNOWN_OCTAVE, UNKNOWN_OCTAVE);
        }
        self
    }
}

/// Properties of a request that become features of its units.
#[derive(Debug, Clone, Copy)]
pub(super) struct RequestShape {
    pub(super) turn: u8,
    pub(super) gap_seconds: Option<f64>,
    /// Whether the chain diverges from a known one.
    pub(super) diverges: bool,
    pub(super) blocks: usize,
    pub(super) known: usize,
    pub(super) hints: Hints,
}

/// The factor of a priority on the worth of a unit.
pub(super) fn boost(priority: Priority) -> f64 {
    match priority {
        Priority::Low => 0.25,
        Priority::Normal => 1.0,
        Priority::High => 4.0,
    }
}

pub(super) fn features(shape: &RequestShape, fan: u8) -> Features {
    let Hints { stop, workload, priority, .. } = shape.hints;
    let added = shape.blocks - shape.known;
    let kind = if fan > 0 {
        UnitKind::Shared { fan: fan_bucket(fan) }
    } else if shape.hints.ends_session {
        UnitKind::Ended
    } else {
        UnitKind::Private {
            turn: bucket(&[1, 2, 3, 4, 6, 9], usize::from(shape.turn)),
            added: bucket(&[5, 11, 21, 41], added),
            gap_octave: shape.gap_seconds.map_or(0, |gap| octave(gap + 1.0)),
            length_octave: octave_of(shape.blocks),
            added_octave: octave_of(added),
        }
    };
    Features { kind, stop, workload, priority }
}

/// The features after a later hint; `None` if the hint changes no feature.
pub(super) fn apply_hints(before: Features, hints: &Hints) -> Option<Features> {
    let mut after = before;
    if matches!(before.kind, UnitKind::Private { .. }) {
        if hints.ends_session {
            after.kind = UnitKind::Ended;
        }
        after.stop = hints.stop.or(before.stop);
    }
    after.workload = hints.workload.or(before.workload);
    if hints.priority != Priority::Normal {
        after.priority = hints.priority;
    }
    let after = after.normal();
    (after != before).then_some(after)
}

pub(super) fn fan_bucket(fan: u8) -> u8 {
    bucket(&[1, 2, 4, 11, FAN_MAX.into()], fan.into())
}

/// The number of ascending `edges` that a number reaches.
fn bucket(edges: &[usize], number: usize) -> u8 {
    let reached = edges.iter().take_while(|edge| number >= **edge).count();
    u8::try_from(reached).expect("a few edges")
}

/// One more than the binary logarithm of a number that is at least one, rounded down.
fn octave(number: f64) -> u8 {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped before")]
    let octave = number.log2().floor().clamp(0.0, 20.0) as u8;
    octave + 1
}

fn octave_of(count: usize) -> u8 {
    u8::try_from(usize::BITS - count.leading_zeros()).expect("at most 64").min(21)
}
