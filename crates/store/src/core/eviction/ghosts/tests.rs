//! Tests of ghosts: the work of one push, and the order against a naive queue.

use proptest::prelude::*;

use super::*;

/// A ring that doubles, and then moves all ghosts and drops the holes.
#[derive(Default)]
struct Model {
    /// Oldest first; `None` is a hole.
    entries: VecDeque<Option<(u64, u32)>>,
    limit: usize,
}

impl Model {
    fn drop_holes(&mut self) {
        while self.entries.front() == Some(&None) {
            self.entries.pop_front();
        }
    }

    fn push(&mut self, fingerprint: u64, value: u32, slots: usize) -> Option<(u64, u32)> {
        let mut forgotten = None;
        self.drop_holes();
        if self.entries.len() >= self.limit {
            if self.limit < slots {
                self.limit = (self.limit * 2).clamp(16.min(slots), slots);
                self.entries.retain(Option::is_some);
            } else {
                forgotten = self.pop();
            }
        }
        self.entries.push_back(Some((fingerprint, value)));
        forgotten
    }

    fn pop(&mut self) -> Option<(u64, u32)> {
        self.drop_holes();
        let oldest = self.entries.pop_front().flatten();
        self.drop_holes();
        oldest
    }

    fn find(&mut self, fingerprint: u64) -> Option<&mut Option<(u64, u32)>> {
        let is_it = |entry: &&mut Option<(u64, u32)>| entry.is_some_and(|it| it.0 == fingerprint);
        self.entries.iter_mut().rev().find(is_it)
    }
}

proptest! {
    #[test]
    fn ghosts_are_forgotten_as_by_a_ring_that_doubles(
        operations in prop::collection::vec((0u8..10, 0u64..600, 0usize..40), 1..3000),
    ) {
        let (mut ghosts, mut model) = (Ghosts::default(), Model::default());
        for (number, (operation, fingerprint, slots)) in (0..).zip(operations) {
            match operation {
                0..6 => {
                    // A limit that grows, as that of a tier that fills.
                    let slots = 1 + slots + number as usize / 8;
                    ghosts.take(fingerprint);
                    if let Some(entry) = model.find(fingerprint) {
                        *entry = None;
                    }
                    prop_assert_eq!(
                        ghosts.push(fingerprint, number, slots),
                        model.push(fingerprint, number, slots)
                    );
                }
                6 | 7 => {
                    let taken = model.find(fingerprint).and_then(Option::take).map(|it| it.1);
                    prop_assert_eq!(ghosts.take(fingerprint), taken);
                }
                8 => prop_assert_eq!(ghosts.pop(), model.pop()),
                _ => {
                    let found = model.find(fingerprint).and_then(|it| it.as_mut());
                    let is_set = found.map(|it| it.1 = number).is_some();
                    prop_assert_eq!(ghosts.set(fingerprint, number), is_set);
                }
            }
            let live = model.entries.iter().flatten().count();
            prop_assert_eq!(ghosts.len(), live);
        }
        for fingerprint in 0..600 {
            let value = model.find(fingerprint).and_then(|it| *it).map(|it| it.1);
            prop_assert_eq!(ghosts.get(fingerprint), value);
        }
    }
}

/// A ring that doubled moved all ghosts in one push, four million of them in a large tier.
#[test]
fn no_push_moves_many_ghosts() {
    const COUNT: u64 = 300_000;
    const SLOTS: usize = 600_000;
    let mut ghosts = Ghosts::default();
    let mut most = 0;
    for fingerprint in 0..COUNT {
        ghosts.steps = 0;
        ghosts.push(fingerprint.wrapping_mul(0x1234_5678_9abc_def1), 1, SLOTS);
        most = most.max(ghosts.steps);
    }
    assert!(most <= 2 * HOLES_PER_PUSH, "{most} steps in one push");
    // All but the first are holes; they are freed by and by once the first is one, too.
    for fingerprint in (0..COUNT).rev() {
        ghosts.take(fingerprint.wrapping_mul(0x1234_5678_9abc_def1)).expect("it was pushed");
    }
    for fingerprint in 0..=COUNT / HOLES_PER_PUSH as u64 {
        ghosts.steps = 0;
        ghosts.push(fingerprint, 1, SLOTS);
        assert!(ghosts.steps <= 2 * HOLES_PER_PUSH, "{} steps in one push", ghosts.steps);
    }
    assert!(ghosts.span < 2 * CHUNK * HOLES_PER_PUSH, "{} entries are left", ghosts.span);
}

#[test]
fn memory_follows_use_and_is_used_again() {
    let mut ghosts = Ghosts::default();
    ghosts.push(1, 1, 1 << 20);
    assert!(ghosts.memory_bytes() < 1 << 15, "{}", ghosts.memory_bytes());
    for fingerprint in 0..100_000 {
        ghosts.push(fingerprint, 1, 10_000);
    }
    assert_eq!(ghosts.len(), 10_000);
    assert!(ghosts.memory_bytes() < 10_000 * 24 + (1 << 16), "{}", ghosts.memory_bytes());
}
