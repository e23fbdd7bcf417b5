//! Ranges of equally spaced pages, and whether two of them overlap. Arithmetic only.

/// `count` pages of `bytes` bytes, the first at `start`, each `stride` bytes after the one before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StridedPages {
    /// Start of the first page, in bytes from an origin that all runs share.
    pub start: usize,
    /// Bytes from the start of a page to the start of the next one.
    pub stride: usize,
    /// Bytes of a page.
    pub bytes: usize,
    /// Number of pages.
    pub count: usize,
}

impl StridedPages {
    /// Bytes from the start of the first page to the end of the last one; `None` on overflow.
    pub fn extent(&self) -> Option<usize> {
        let Some(steps) = self.count.checked_sub(1) else { return Some(0) };
        steps.checked_mul(self.stride)?.checked_add(self.bytes)
    }

    /// Whether any page of this run overlaps any page of another one. Takes logarithmic time in the
    /// strides, as Euclid's algorithm, independent of the number of pages.
    ///
    /// # Panics
    /// If a stride is zero, or if a run overflows the address space.
    pub fn overlaps(&self, other: &Self) -> bool {
        if self.count == 0 || other.count == 0 || self.bytes == 0 || other.bytes == 0 {
            return false;
        }
        let end = |run: &Self| run.extent().and_then(|bytes| run.start.checked_add(bytes));
        let [own_end, other_end] = [self, other].map(|run| end(run).expect("it is in memory"));
        if own_end <= other.start || other_end <= self.start {
            return false;
        }
        assert!(self.stride > 0 && other.stride > 0, "pages are apart");
        // A page of this run at x, relative to the other's start, overlaps the other's page j if
        // x - other.bytes < j * other.stride <= x + bytes - 1. The difference of the two sums over
        // all x counts these pairs.
        let first = self.start as i128 - other.start as i128;
        let up_to = |from: i128| multiples_up_to(from, self, other);
        up_to(first + self.bytes as i128 - 1) > up_to(first - other.bytes as i128)
    }
}

/// The sum over all pages i of `own` of how many pages j of `other`, less one, have
/// `j * other.stride <= from + i * own.stride`.
fn multiples_up_to(from: i128, own: &StridedPages, other: &StridedPages) -> i128 {
    let (step, divisor) = (own.stride as i128, other.stride as i128);
    let (count, last) = (own.count as i128, other.count as i128 - 1);
    // Number of pages i that start before the point.
    let before = |point: i128| {
        let up = (point - from).div_euclid(step) + i128::from((point - from).rem_euclid(step) > 0);
        up.clamp(0, count)
    };
    let (below, inside) = (before(0), before(last * divisor));
    let sum = sum_of_floors(inside - below, divisor, step, from + below * step);
    sum - below + (count - inside) * last
}

/// The sum of `(first + i * step) / divisor`, rounded down, for i from 0 to `count` - 1; none of
/// the numbers is negative. Counts lattice points under a line by swapping the axes repeatedly, as
/// Euclid's algorithm does.
fn sum_of_floors(mut count: i128, mut divisor: i128, mut step: i128, mut first: i128) -> i128 {
    let mut sum = 0;
    while count > 0 {
        sum += count * (count - 1) / 2 * (step / divisor) + count * (first / divisor);
        step %= divisor;
        first %= divisor;
        let top = step * count + first;
        count = top / divisor;
        first = top % divisor;
        (divisor, step) = (step, divisor);
    }
    sum
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn overlaps_by_pairs(one: &StridedPages, other: &StridedPages) -> bool {
        let starts = |run: &StridedPages| {
            let run = *run;
            (0..run.count).map(move |at| run.start + at * run.stride)
        };
        starts(one).any(|a| starts(other).any(|b| a < b + other.bytes && b < a + one.bytes))
    }

    fn run() -> impl Strategy<Value = StridedPages> {
        (0_usize..120, 1_usize..12, 0_usize..9, 0_usize..12).prop_map(
            |(start, bytes, gap, count)| StridedPages { start, stride: bytes + gap, bytes, count },
        )
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]
        #[test]
        fn the_result_matches_a_comparison_of_all_pairs(one in run(), other in run()) {
            prop_assert_eq!(one.overlaps(&other), overlaps_by_pairs(&one, &other));
            prop_assert_eq!(other.overlaps(&one), overlaps_by_pairs(&one, &other));
        }
    }

    #[test]
    fn layers_of_one_storage_do_not_overlap() {
        let (layers, pages, bytes) = (64_usize, 1_usize << 20, 64 << 10);
        let block_major = |layer: usize| StridedPages {
            start: layer * bytes,
            stride: layers * bytes,
            bytes,
            count: pages,
        };
        for layer in 1..layers {
            assert!(!block_major(0).overlaps(&block_major(layer)));
            let shifted = StridedPages { start: layer * bytes - 1, ..block_major(layer) };
            assert!(block_major(layer - 1).overlaps(&shifted));
        }
        // With other strides, an overlap at the last page only.
        let last =
            StridedPages { start: (pages - 1) * layers * bytes, stride: 1, bytes: 1, count: 1 };
        assert!(block_major(0).overlaps(&last));
        assert!(!block_major(1).overlaps(&last));
    }

    #[test]
    fn a_run_longer_than_memory_has_no_extent() {
        let run = StridedPages { start: 0, stride: usize::MAX / 2, bytes: 8, count: 4 };
        assert_eq!(run.extent(), None);
        assert_eq!(StridedPages { count: 0, ..run }.extent(), Some(0));
    }
}
