//! Age bins: time since the last use, in intervals of growing length.

/// Number of bins; the last one is unbounded.
pub(super) const BINS: usize = 26;

/// Where bins begin, in seconds; the last value is the nominal end of the last bin.
pub(super) const EDGES: [f64; BINS + 1] = edges();

const FIRST_SECONDS: f64 = 2.0;
/// Edges grow to 2 s * 1.45^24, about four hours, where the last bin begins.
const GROWTH: f64 = 1.45;

const fn edges() -> [f64; BINS + 1] {
    let mut edges = [0.0; BINS + 1];
    let mut edge = FIRST_SECONDS;
    let mut bin = 1;
    while bin <= BINS {
        edges[bin] = edge;
        edge *= GROWTH;
        bin += 1;
    }
    edges
}

/// Length of a bin in seconds.
pub(super) fn width(bin: usize) -> f64 {
    EDGES[bin + 1] - EDGES[bin]
}

/// The position of an age within a bin, from 0 to 1.
pub(super) fn fraction(bin: usize, age: f64) -> f64 {
    ((age - EDGES[bin]) / width(bin)).clamp(0.0, 1.0)
}

/// One number for each bin.
pub(super) type PerBin = [f64; BINS];
