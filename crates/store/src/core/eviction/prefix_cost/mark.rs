//! The four bytes kept for every known block: its unit and its position in its tree.

/// Largest count of divergences.
pub(super) const FAN_MAX: u8 = 40;

const FAN_BITS: u32 = 6;
const HAS_CHILD: u32 = 1 << FAN_BITS;

/// Four bytes: unit (25 bits), whether a block follows, number of divergences below (6 bits).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Mark(u32);

impl Mark {
    pub(super) fn new(unit: u32, has_child: bool, fan: u8) -> Self {
        let child = if has_child { HAS_CHILD } else { 0 };
        Self(unit << (FAN_BITS + 1) | child | u32::from(fan.min(FAN_MAX)))
    }

    pub(super) fn from_raw(raw: u32) -> Self {
        Self(raw)
    }

    pub(super) fn raw(self) -> u32 {
        self.0
    }

    pub(super) fn unit(self) -> u32 {
        self.0 >> (FAN_BITS + 1)
    }

    pub(super) fn has_child(self) -> bool {
        self.0 & HAS_CHILD != 0
    }

    pub(super) fn with_child(self) -> Self {
        Self(self.0 | HAS_CHILD)
    }

    pub(super) fn fan(self) -> u8 {
        (self.0 & (HAS_CHILD - 1)).to_le_bytes()[0]
    }
}
