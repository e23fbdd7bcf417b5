//! Pages at equal distances, and whether two such runs share a byte: arithmetic, no memory.

/// `count` pages of `bytes` bytes, the first at `start`, each `stride` bytes after the one before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Strided {
    /// Where the first page begins, in bytes from wherever all runs are counted.
    pub start: usize,
    /// Bytes from the start of a page to the start of the next one.
    pub stride: usize,
    /// Bytes of a page.
    pub bytes: usize,
    /// How many pages there are.
    pub count: usize,
}

impl Strided {
    /// Bytes from the start of the first page to the end of the last one; `None` if an address
    /// space has not as many.
    pub fn extent(&self) -> Option<usize> {
        let Some(steps) = self.count.checked_sub(1) else { return Some(0) };
        steps.checked_mul(self.stride)?.checked_add(self.bytes)
    }

    /// Whether any page of this run shares a byte with any page of another one. Takes as long as
    /// Euclid's algorithm on the two strides, however many pages there are.
    ///
    /// # Panics
    /// If a stride is zero, or a run is longer than an address space.
    pub fn shares_bytes_with(&self, other: &Self) -> bool {
        if self.count == 0 || other.count == 0 || self.bytes == 0 || other.bytes == 0 {
            return false;
        }
        let end = |run: &Self| run.extent().and_then(|bytes| run.start.checked_add(bytes));
        let [own_end, other_end] = [self, other].map(|run| end(run).expect("it is in memory"));
        if own_end <= other.start || other_end <= self.start {
            return false;
        }
        assert!(self.stride > 0 && other.stride > 0, "pages are apart");
        // A page of this run at x, counted from the other's start, shares bytes with page j there
        // when x - other.bytes < j * other.stride <= x + bytes - 1: so many multiples lie between.
        let first = self.start as i128 - other.start as i128;
        let up_to = |from: i128| multiples_up_to(from, self, other);
        up_to(first + self.bytes as i128 - 1) > up_to(first - other.bytes as i128)
    }
}

/// The sum over all pages i of `own` of how many pages j of `other`, less one, have
/// `j * other.stride <= from + i * own.stride`.
fn multiples_up_to(from: i128, own: &Strided, other: &Strided) -> i128 {
    let (step, divisor) = (own.stride as i128, other.stride as i128);
    let (count, last) = (own.count as i128, other.count as i128 - 1);
    // Pages i that come before the point: how many of them there are.
    let before = |point: i128| {
        let up = (point - from).div_euclid(step) + i128::from((point - from).rem_euclid(step) > 0);
        up.clamp(0, count)
    };
    let (below, inside) = (before(0), before(last * divisor));
    let sum = sum_of_floors(inside - below, divisor, step, from + below * step);
    sum - below + (count - inside) * last
}

/// The sum of `(first + i * step) / divisor`, rounded down, for i from 0 to `count` - 1; none of
/// the numbers is negative. The triangle under the line is cut along the other axis again and
/// again, as Euclid's algorithm does it.
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

    fn by_looking(one: &Strided, other: &Strided) -> bool {
        let starts = |run: &Strided| {
            let run = *run;
            (0..run.count).map(move |at| run.start + at * run.stride)
        };
        starts(one).any(|a| starts(other).any(|b| a < b + other.bytes && b < a + one.bytes))
    }

    fn run() -> impl Strategy<Value = Strided> {
        (0_usize..120, 1_usize..12, 0_usize..9, 0_usize..12).prop_map(
            |(start, bytes, gap, count)| Strided { start, stride: bytes + gap, bytes, count },
        )
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]
        #[test]
        fn it_says_what_looking_at_every_pair_says(one in run(), other in run()) {
            prop_assert_eq!(one.shares_bytes_with(&other), by_looking(&one, &other));
            prop_assert_eq!(other.shares_bytes_with(&one), by_looking(&one, &other));
        }
    }

    #[test]
    fn layers_of_one_storage_are_told_apart() {
        let (layers, pages, bytes) = (64_usize, 1_usize << 20, 64 << 10);
        let block_major = |layer: usize| Strided {
            start: layer * bytes,
            stride: layers * bytes,
            bytes,
            count: pages,
        };
        for layer in 1..layers {
            assert!(!block_major(0).shares_bytes_with(&block_major(layer)));
            let shifted = Strided { start: layer * bytes - 1, ..block_major(layer) };
            assert!(block_major(layer - 1).shares_bytes_with(&shifted));
        }
        // Other strides: they meet at the last page only.
        let last = Strided { start: (pages - 1) * layers * bytes, stride: 1, bytes: 1, count: 1 };
        assert!(block_major(0).shares_bytes_with(&last));
        assert!(!block_major(1).shares_bytes_with(&last));
    }

    #[test]
    fn a_run_longer_than_memory_has_no_extent() {
        let run = Strided { start: 0, stride: usize::MAX / 2, bytes: 8, count: 4 };
        assert_eq!(run.extent(), None);
        assert_eq!(Strided { count: 0, ..run }.extent(), Some(0));
    }
}
