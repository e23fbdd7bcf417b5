//! A pin word: one atomic that says whether a slot's block may be read, and how many read it.
//!
//! For slots that are reused, such as those of a table shared between processes, where no
//! reference count frees what the last reader drops. A slot goes round in one direction:
//! `Empty → Loading → Sealed → Condemned → Empty`, and each round is a new generation, so that a
//! reader who found the slot in an earlier round cannot pin what lies there now.
//!
//! Invariants: pins are above 0 only while `Sealed`; only at 0 does `Sealed` become `Condemned`.

use std::fmt;

use crate::sync::{AtomicU64, Ordering};

const STATE_BITS: u32 = 2;
const PIN_BITS: u32 = 24;
const STATE_MASK: u64 = (1 << STATE_BITS) - 1;
const ONE_PIN: u64 = 1 << STATE_BITS;
const PINS_MAX: u64 = (1 << PIN_BITS) - 1;
const GENERATION_SHIFT: u32 = STATE_BITS + PIN_BITS;
const ONE_GENERATION: u64 = 1 << GENERATION_SHIFT;

/// Where a slot is in its round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SlotState {
    /// Nothing is there.
    Empty,
    /// One owner writes.
    Loading,
    /// The bytes do not change and may be pinned.
    Sealed,
    /// Nobody reads and nobody may begin to; one owner takes the slot apart.
    Condemned,
}

/// Tells one use of a slot from the next. Wraps after 2^38 uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Generation(u64);

/// State, pins and generation of one slot.
pub struct PinWord(AtomicU64);

impl PinWord {
    /// An empty slot.
    pub fn new() -> Self {
        Self(AtomicU64::new(SlotState::Empty as u64))
    }

    /// Where the slot is in its round; may have changed before the caller looks at it.
    pub fn state(&self) -> SlotState {
        state(self.0.load(Ordering::Acquire))
    }

    /// How many pins it has; may have changed before the caller looks at it.
    pub fn pins(&self) -> u64 {
        pins(self.0.load(Ordering::Acquire))
    }

    /// Takes an empty slot to write to it, or nothing when it is in use.
    pub fn try_load(&self) -> Option<Generation> {
        let begin = |word| {
            let next = generation(word).wrapping_add(ONE_GENERATION);
            (state(word) == SlotState::Empty).then_some(next | SlotState::Loading as u64)
        };
        self.change(begin).map(|before| Generation(generation(before).wrapping_add(ONE_GENERATION)))
    }

    /// Ends writing: what was written before is seen by all who pin.
    ///
    /// # Panics
    /// If the slot was not being loaded.
    pub fn seal(&self) {
        self.advance(SlotState::Loading, SlotState::Sealed);
    }

    /// Gives up a load; the slot is empty again.
    ///
    /// # Panics
    /// If the slot was not being loaded.
    pub fn abandon(&self) {
        self.advance(SlotState::Loading, SlotState::Empty);
    }

    /// Keeps the bytes as they are until [`PinWord::unpin`], if they are still of that generation.
    pub fn try_pin(&self, of: Generation) -> bool {
        let pin = |word| {
            let is_there = state(word) == SlotState::Sealed && generation(word) == of.0;
            (is_there && pins(word) < PINS_MAX).then_some(word + ONE_PIN)
        };
        self.change(pin).is_some()
    }

    /// Gives up one pin.
    ///
    /// # Panics
    /// If there is none.
    pub fn unpin(&self) {
        let unpin = |word| (pins(word) > 0).then(|| word - ONE_PIN);
        assert!(self.change(unpin).is_some(), "each pin is given up once");
    }

    /// Ends reading: no pin succeeds from now on. Fails while there are pins.
    pub fn try_condemn(&self, of: Generation) -> bool {
        let condemn = |word| {
            let unread = of.0 | SlotState::Sealed as u64;
            (word == unread).then_some(of.0 | SlotState::Condemned as u64)
        };
        self.change(condemn).is_some()
    }

    /// Makes a condemned slot empty, for the next load.
    ///
    /// # Panics
    /// If the slot was not condemned.
    pub fn clear(&self) {
        self.advance(SlotState::Condemned, SlotState::Empty);
    }

    fn advance(&self, from: SlotState, to: SlotState) {
        let step = |word| (state(word) == from).then_some(generation(word) | to as u64);
        assert!(
            self.change(step).is_some(),
            "the owner of a slot takes it from {from:?} to {to:?}"
        );
    }

    /// Acquire on success, to see what was written before; Release, to show what we wrote.
    fn change(&self, step: impl FnMut(u64) -> Option<u64>) -> Option<u64> {
        self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, step).ok()
    }
}

impl Default for PinWord {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for PinWord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = self.0.load(Ordering::Acquire);
        let round = generation(word) >> GENERATION_SHIFT;
        write!(f, "PinWord({:?}, {} pins, generation {round})", state(word), pins(word))
    }
}

fn state(word: u64) -> SlotState {
    match word & STATE_MASK {
        0 => SlotState::Empty,
        1 => SlotState::Loading,
        2 => SlotState::Sealed,
        _ => SlotState::Condemned,
    }
}

fn pins(word: u64) -> u64 {
    word >> STATE_BITS & PINS_MAX
}

fn generation(word: u64) -> u64 {
    word >> GENERATION_SHIFT << GENERATION_SHIFT
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_slot_goes_round_and_the_next_generation_differs() {
        let word = PinWord::new();
        let first = word.try_load().expect("empty");
        assert!(word.try_load().is_none() && !word.try_pin(first), "being loaded");
        word.seal();
        assert!(word.try_pin(first) && word.try_pin(first));
        assert_eq!(word.pins(), 2);
        word.unpin();
        assert!(!word.try_condemn(first), "pinned");
        word.unpin();
        assert!(word.try_condemn(first) && !word.try_pin(first));
        word.clear();
        let second = word.try_load().expect("empty again");
        word.seal();
        assert_ne!(first, second);
        assert!(!word.try_pin(first) && !word.try_condemn(first), "of an earlier round");
        assert_eq!(format!("{word:?}"), "PinWord(Sealed, 0 pins, generation 2)");
    }

    #[test]
    fn pins_do_not_run_into_the_generation() {
        let word = PinWord(AtomicU64::new(SlotState::Sealed as u64 | PINS_MAX << STATE_BITS));
        assert!(!word.try_pin(Generation(0)));
        word.unpin();
        assert!(word.try_pin(Generation(0)));
    }

    #[test]
    #[should_panic(expected = "given up once")]
    fn a_pin_too_many_given_up_is_a_mistake() {
        PinWord::new().unpin();
    }
}
