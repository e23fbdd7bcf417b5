//! The extent heap: the pool's free space, best fit, neighbours merged. Not thread-safe.
//!
//! Invariants: free extents do not overlap or touch, `by_offset` and `by_size` hold the same
//! ones, and their lengths add up to `free_bytes`.

use std::collections::{BTreeMap, BTreeSet};

/// Exclusive ownership of a piece of the region. Cannot be copied, so cannot be freed twice.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Extent {
    /// Start in the region, in bytes.
    pub(crate) offset: usize,
    /// Length.
    pub(crate) bytes: usize,
}

/// Pieces with a smaller alignment are cut from the end of a free extent, others from its start.
/// Small pieces thus collect at the top of the region and do not fragment it for large ones.
const PAGE: usize = 4096;

/// Tight candidates that are tried for an aligned fit, before one that fits at any alignment.
const TIGHT_FITS_MAX: usize = 8;

/// Free extents that are tried for a whole page. One of twice its length always has one.
const PAGE_TRIES_MAX: usize = 64;

#[derive(Debug)]
pub(crate) struct Heap {
    by_offset: BTreeMap<usize, usize>,
    by_size: BTreeSet<(usize, usize)>,
    free_bytes: usize,
    capacity_bytes: usize,
}

impl Heap {
    pub(crate) fn new(capacity_bytes: usize) -> Self {
        let mut heap = Self {
            by_offset: BTreeMap::new(),
            by_size: BTreeSet::new(),
            free_bytes: 0,
            capacity_bytes,
        };
        if capacity_bytes > 0 {
            heap.insert(0, capacity_bytes);
        }
        heap
    }

    pub(crate) fn free_bytes(&self) -> usize {
        self.free_bytes
    }

    pub(crate) fn largest_free_bytes(&self) -> usize {
        self.by_size.last().map_or(0, |(bytes, _)| *bytes)
    }

    /// Takes `bytes` at a multiple of `align`, a power of two.
    pub(crate) fn take(&mut self, bytes: usize, align: usize) -> Option<Extent> {
        debug_assert!(bytes > 0 && align.is_power_of_two(), "{bytes} bytes at {align}");
        let (free_offset, free_bytes, offset) = self.find(bytes, align)?;
        self.remove(free_offset, free_bytes);
        let end = free_offset + free_bytes;
        if offset > free_offset {
            self.insert(free_offset, offset - free_offset);
        }
        if end > offset + bytes {
            self.insert(offset + bytes, end - offset - bytes);
        }
        Some(Extent { offset, bytes })
    }

    /// Takes exactly this piece, if all of it is free.
    pub(crate) fn take_at(&mut self, offset: usize, bytes: usize) -> Option<Extent> {
        let end = offset.checked_add(bytes).filter(|_| bytes > 0)?;
        // Free extents do not overlap, so only the last one that starts at or before `offset` can
        // contain the piece.
        let (free_offset, free_bytes) =
            self.by_offset.range(..=offset).next_back().map(|(at, len)| (*at, *len))?;
        let free_end = free_offset + free_bytes;
        if end > free_end {
            return None;
        }
        self.remove(free_offset, free_bytes);
        if offset > free_offset {
            self.insert(free_offset, offset - free_offset);
        }
        if free_end > end {
            self.insert(end, free_end - end);
        }
        Some(Extent { offset, bytes })
    }

    /// Takes whole pages of `page_bytes`, a power of two, from one of the largest free extents: at
    /// most `bytes_max` bytes, a multiple of the page.
    pub(crate) fn take_pages(&mut self, page_bytes: usize, bytes_max: usize) -> Option<Extent> {
        let large = self.by_size.iter().rev().take_while(|(bytes, _)| *bytes >= page_bytes);
        let (offset, bytes) = large.take(PAGE_TRIES_MAX).find_map(|(bytes, offset)| {
            let start = offset.next_multiple_of(page_bytes);
            let end = (offset + bytes) / page_bytes * page_bytes;
            (end > start).then_some((start, end.saturating_sub(start)))
        })?;
        let taken = bytes.min(bytes_max);
        // From its end, so that the rest stays with what is before it.
        self.take_at(offset + bytes - taken, taken)
    }

    /// Frees an extent and merges it with its free neighbours.
    #[expect(clippy::needless_pass_by_value, reason = "freeing an extent ends its ownership")]
    pub(crate) fn free(&mut self, extent: Extent) {
        let Extent { mut offset, mut bytes } = extent;
        let end = offset + bytes;
        assert!(end <= self.capacity_bytes, "an extent of another pool");
        let before = self.by_offset.range(..offset).next_back().map(|(at, len)| (*at, *len));
        let after = self.by_offset.range(offset..).next().map(|(at, len)| (*at, *len));
        // In release builds too: a piece that is freed twice would get two owners.
        assert!(before.is_none_or(|(at, len)| at + len <= offset), "freed twice");
        assert!(after.is_none_or(|(at, _)| at >= end), "freed twice");
        if let Some((at, len)) = before.filter(|(at, len)| at + len == offset) {
            self.remove(at, len);
            offset = at;
            bytes += len;
        }
        if let Some((at, len)) = after.filter(|(at, _)| *at == end) {
            self.remove(at, len);
            bytes += len;
        }
        self.insert(offset, bytes);
    }

    /// The smallest free extent that fits, and the piece's offset in it.
    fn find(&self, bytes: usize, align: usize) -> Option<(usize, usize, usize)> {
        // Best fit first. A tight extent may be too short once its start is aligned; one of
        // `bytes + align` never is. So at most `TIGHT_FITS_MAX` + 1 extents are tried.
        let tight = self.by_size.range((bytes, 0)..).take(TIGHT_FITS_MAX);
        let ample = self.by_size.range((bytes.checked_add(align)?, 0)..).take(1);
        tight.chain(ample).find_map(|(free_bytes, free_offset)| {
            let end = free_offset + free_bytes;
            let offset = if align < PAGE {
                // No candidate is shorter than `bytes`, so this does not underflow.
                (end - bytes) / align * align
            } else {
                free_offset.next_multiple_of(align)
            };
            let fits = offset >= *free_offset && offset + bytes <= end;
            fits.then_some((*free_offset, *free_bytes, offset))
        })
    }

    fn insert(&mut self, offset: usize, bytes: usize) {
        self.by_offset.insert(offset, bytes);
        self.by_size.insert((bytes, offset));
        self.free_bytes += bytes;
    }

    fn remove(&mut self, offset: usize, bytes: usize) {
        let was_there = self.by_offset.remove(&offset) == Some(bytes);
        debug_assert!(was_there && self.by_size.contains(&(bytes, offset)), "indexes agree");
        self.by_size.remove(&(bytes, offset));
        self.free_bytes -= bytes;
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn freed_neighbours_are_merged() {
        let mut heap = Heap::new(1 << 20);
        let pieces: Vec<Extent> = (0..16).map_while(|_| heap.take(PAGE, PAGE)).collect();
        let (odd_pages, even_pages): (Vec<_>, Vec<_>) =
            pieces.into_iter().partition(|piece| piece.offset / PAGE % 2 == 1);
        for piece in odd_pages {
            heap.free(piece);
        }
        assert_eq!(heap.by_offset.len(), 8);
        for piece in even_pages {
            heap.free(piece);
        }
        assert_eq!(heap.largest_free_bytes(), 1 << 20);
    }

    #[test]
    fn take_at_succeeds_only_if_all_of_the_piece_is_free() {
        let mut heap = Heap::new(16 * PAGE);
        let middle = heap.take_at(4 * PAGE, 2 * PAGE).expect("all is free");
        for (offset, bytes) in [(4, 2), (3, 2), (5, 2), (0, 16), (15, 2), (16, 1), (2, 0)] {
            assert_eq!(heap.take_at(offset * PAGE, bytes * PAGE), None, "{bytes} at {offset}");
        }
        assert_eq!(heap.take_at(usize::MAX, 2), None, "no offset is trusted");
        let before = heap.take_at(3 * PAGE, PAGE).expect("free up to the middle");
        let after = heap.take_at(6 * PAGE, 10 * PAGE).expect("free up to the end");
        assert_eq!(heap.free_bytes(), 3 * PAGE);
        for piece in [middle, before, after] {
            heap.free(piece);
        }
        assert_eq!(heap.largest_free_bytes(), 16 * PAGE);
    }

    #[test]
    fn whole_pages_are_taken_from_the_largest_free_extent() {
        let mut heap = Heap::new(16 * PAGE);
        let used = heap.take_at(5 * PAGE + 64, 64).expect("all is free");
        // Five whole pages before it, ten behind.
        let some = heap.take_pages(PAGE, 4 * PAGE).expect("the larger part has ten");
        assert_eq!(some, Extent { offset: 12 * PAGE, bytes: 4 * PAGE });
        let sizes = std::iter::from_fn(|| heap.take_pages(PAGE, usize::MAX));
        let sizes: Vec<_> = sizes.map(|extent| (extent.offset, extent.bytes)).collect();
        assert_eq!(sizes, [(6 * PAGE, 6 * PAGE), (0, 5 * PAGE)]);
        assert_eq!(heap.free_bytes(), PAGE - 64);
        heap.free(used);
        assert!(heap.take_pages(2 * PAGE, usize::MAX).is_none());
        assert_eq!(heap.take_pages(PAGE, usize::MAX).map(|page| page.offset), Some(5 * PAGE));
    }

    #[test]
    #[should_panic(expected = "freed twice")]
    fn freeing_an_extent_twice_panics() {
        let mut heap = Heap::new(1 << 20);
        let piece = heap.take(PAGE, PAGE).expect("the heap is empty");
        let Extent { offset, bytes } = piece;
        heap.free(piece);
        heap.free(Extent { offset, bytes });
    }

    #[derive(Debug, Clone)]
    enum Step {
        Take { bytes: usize, align: usize },
        Free { index: usize },
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (1_usize..200, 0_u32..3).prop_map(|(units, align)| Step::Take {
                bytes: units * 64,
                align: [64, 512, PAGE][align as usize],
            }),
            (0_usize..1000).prop_map(|index| Step::Free { index }),
        ]
    }

    /// Searches a map of 64-byte units, true where taken.
    fn model_fits(taken: &[bool], bytes: usize, align: usize) -> bool {
        let units = bytes / 64;
        (0..taken.len()).step_by(align / 64).any(|start| {
            taken.get(start..start + units).is_some_and(|run| run.iter().all(|unit| !unit))
        })
    }

    proptest! {
        #[test]
        fn behaves_like_a_map_of_units(steps in prop::collection::vec(step(), 1..400)) {
            let mut heap = Heap::new(1 << 17);
            let mut taken = vec![false; (1 << 17) / 64];
            let mut held: Vec<Extent> = Vec::new();
            for step in steps {
                match step {
                    Step::Take { bytes, align } => match heap.take(bytes, align) {
                        Some(extent) => {
                            prop_assert_eq!(extent.offset % align, 0);
                            prop_assert_eq!(extent.bytes, bytes);
                            let units = extent.offset / 64..(extent.offset + bytes) / 64;
                            prop_assert!(taken[units.clone()].iter().all(|unit| !unit));
                            taken[units].fill(true);
                            held.push(extent);
                        }
                        None => {
                            // It may miss a tight aligned fit, but never one with slack for
                            // alignment.
                            prop_assert!(!model_fits(&taken, bytes + align, 64));
                        }
                    },
                    Step::Free { index } if !held.is_empty() => {
                        let extent = held.swap_remove(index % held.len());
                        let units = extent.offset / 64..(extent.offset + extent.bytes) / 64;
                        taken[units].fill(false);
                        heap.free(extent);
                    }
                    Step::Free { .. } => {}
                }
                let free = taken.iter().filter(|unit| !**unit).count() * 64;
                prop_assert_eq!(heap.free_bytes(), free);
            }
            for extent in held {
                heap.free(extent);
            }
            prop_assert_eq!(heap.largest_free_bytes(), 1 << 17);
        }
    }
}
