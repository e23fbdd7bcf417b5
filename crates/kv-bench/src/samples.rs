//! A bounded list of samples, evenly spread over all that were offered.

use serde::Serialize;

/// Keeps every n-th sample. At the limit it drops every second one and doubles n.
#[derive(Debug, Clone)]
pub struct Samples {
    kept: Vec<f64>,
    offered: u64,
    stride: u64,
    limit: usize,
}

/// How many samples a list holds, and of how many.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct SampleCounts {
    /// Samples in the list.
    pub kept: usize,
    /// Samples that there were.
    pub of: u64,
    /// One in this many was kept.
    pub one_in: u64,
}

impl Samples {
    /// An empty list of at most `limit` samples.
    pub fn new(limit: usize) -> Self {
        Self { kept: Vec::new(), offered: 0, stride: 1, limit: limit.max(2) }
    }

    /// Offers a sample.
    pub fn offer(&mut self, sample: f64) {
        let is_kept = self.offered.is_multiple_of(self.stride);
        self.offered += 1;
        if !is_kept {
            return;
        }
        self.kept.push(sample);
        if self.kept.len() >= self.limit {
            let mut at = 0;
            self.kept.retain(|_| {
                at += 1;
                at % 2 == 1
            });
            self.stride *= 2;
        }
    }

    /// The samples in the order of their arrival.
    pub fn kept(&self) -> &[f64] {
        &self.kept
    }

    /// How many they are, and of how many.
    pub fn counts(&self) -> SampleCounts {
        SampleCounts { kept: self.kept.len(), of: self.offered, one_in: self.stride }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_stays_below_its_limit_and_evenly_spread() {
        let mut samples = Samples::new(100);
        (0..12_345).for_each(|at| samples.offer(f64::from(at)));
        let counts = samples.counts();
        assert_eq!((counts.of, counts.one_in), (12_345, 128));
        assert!(counts.kept < 100 && counts.kept > 40, "{counts:?}");
        for (at, sample) in samples.kept().iter().enumerate() {
            assert!((sample - (at as u64 * counts.one_in) as f64).abs() < 1e-9);
        }
    }
}
