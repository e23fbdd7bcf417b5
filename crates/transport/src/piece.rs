//! The pieces of a batch, and the plan that merges neighbours and splits long ones. Pure.

/// Identifies a registered region at its endpoint. An ID is never used again: its low 16 bits are a
/// slot of the endpoint's table, the others count the regions that the slot has had.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RegionId(pub u32);

impl RegionId {
    /// The first region of a slot.
    pub(crate) const fn first_of(slot: u16) -> Self {
        Self(slot as u32)
    }

    /// Its slot in the endpoint's table.
    pub(crate) const fn slot(self) -> usize {
        (self.0 & 0xFFFF) as usize
    }

    /// The next region of the same slot; `None` after the last one.
    pub(crate) const fn next_of_slot(self) -> Option<Self> {
        match self.0.checked_add(1 << 16) {
            Some(id) => Some(Self(id)),
            None => None,
        }
    }

    /// Whether it is the first region of its slot. Only these are mapped by peers and registered
    /// with devices, whose tables have an entry for each number.
    pub(crate) const fn is_first(self) -> bool {
        self.0 >> 16 == 0
    }
}

/// A place in a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The region.
    pub region: RegionId,
    /// Bytes from its start.
    pub offset: u64,
}

impl Place {
    /// The place `bytes` further on, unless the offset overflows.
    pub(crate) fn after(self, bytes: u64) -> Option<Self> {
        Some(Self { offset: self.offset.checked_add(bytes)?, ..self })
    }
}

/// A run of bytes that a batch moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Where the bytes are in this process.
    pub local: Place,
    /// Where they are at the peer.
    pub remote: Place,
    /// How many.
    pub bytes: u64,
}

/// Which way a batch moves bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From this process to the peer.
    Write,
    /// From the peer to this process.
    Read,
}

/// Plans a batch: merges pieces that follow each other on both sides, splits what is longer than
/// `bytes_max`, and leaves out empty pieces. The planned pieces replace the contents of `planned`.
///
/// Only consecutive pieces of the list are merged, in time linear in its length.
///
/// # Panics
/// If `bytes_max` is 0.
pub fn plan(pieces: &[Piece], bytes_max: u64, planned: &mut Vec<Piece>) {
    assert!(bytes_max > 0, "a piece has at least one byte");
    planned.clear();
    let mut pieces = pieces.iter().filter(|piece| piece.bytes > 0);
    let Some(mut run) = pieces.next().copied() else {
        return;
    };
    for piece in pieces {
        match merged(&run, piece) {
            Some(longer) => run = longer,
            None => split(std::mem::replace(&mut run, *piece), bytes_max, planned),
        }
    }
    split(run, bytes_max, planned);
}

fn merged(run: &Piece, next: &Piece) -> Option<Piece> {
    let follows =
        run.local.after(run.bytes)? == next.local && run.remote.after(run.bytes)? == next.remote;
    let bytes = run.bytes.checked_add(next.bytes)?;
    follows.then_some(Piece { bytes, ..*run })
}

fn split(mut run: Piece, bytes_max: u64, planned: &mut Vec<Piece>) {
    while run.bytes > bytes_max {
        // An offset that overflows is out of bounds anyway; the check of bounds refuses the whole.
        let (Some(local), Some(remote)) = (run.local.after(bytes_max), run.remote.after(bytes_max))
        else {
            break;
        };
        planned.push(Piece { bytes: bytes_max, ..run });
        run = Piece { local, remote, bytes: run.bytes - bytes_max };
    }
    planned.push(run);
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn piece(local: u64, remote: u64, bytes: u64) -> Piece {
        Piece {
            local: Place { region: RegionId(0), offset: local },
            remote: Place { region: RegionId(1), offset: remote },
            bytes,
        }
    }

    fn planned(pieces: &[Piece], bytes_max: u64) -> Vec<Piece> {
        let mut into = vec![piece(9, 9, 9)];
        plan(pieces, bytes_max, &mut into);
        into
    }

    #[test]
    fn neighbours_on_both_sides_are_merged() {
        let merged = planned(&[piece(0, 100, 10), piece(10, 110, 10), piece(20, 0, 5)], 1000);
        assert_eq!(merged, [piece(0, 100, 20), piece(20, 0, 5)]);
        let other_region =
            Piece { remote: Place { region: RegionId(2), offset: 110 }, ..piece(10, 110, 10) };
        assert_eq!(planned(&[piece(0, 100, 10), other_region], 1000).len(), 2);
    }

    #[test]
    fn an_offset_that_overflows_is_left_for_the_check_of_bounds() {
        let far = piece(u64::MAX - 3, 0, 100);
        assert_eq!(planned(&[far], 10), [far]);
    }

    /// Which byte of the peer each local byte belongs to.
    fn pairs(pieces: &[Piece]) -> BTreeMap<(u64, u64), usize> {
        let mut pairs = BTreeMap::new();
        for piece in pieces {
            for at in 0..piece.bytes {
                *pairs.entry((piece.local.offset + at, piece.remote.offset + at)).or_default() += 1;
            }
        }
        pairs
    }

    proptest! {
        #[test]
        fn a_plan_moves_the_same_bytes(
            list in prop::collection::vec((0_u64..40, 0_u64..40, 0_u64..30), 0..20),
            bytes_max in 1_u64..40,
        ) {
            let list: Vec<_> = list.into_iter().map(|(l, r, n)| piece(l, r, n)).collect();
            let plan = planned(&list, bytes_max);
            prop_assert_eq!(pairs(&plan), pairs(&list));
            prop_assert!(plan.iter().all(|it| (1..=bytes_max).contains(&it.bytes)));
        }
    }
}
