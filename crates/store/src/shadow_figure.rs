//! Predicted hit rates of other cache sizes.

use serde::{Deserialize, Serialize};

use crate::TierName;

/// Results of one shadow.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShadowFigure {
    /// The tier. Hits count from the start of a request, in this tier and those above it.
    #[serde(deserialize_with = "crate::names::tier_name")]
    pub tier: TierName,
    /// The shadow's size in percent of the tier's: 100 is the calibration.
    pub capacity_percent: u64,
    /// The tier size that the shadow models.
    pub capacity_bytes: u64,
    /// One block in this many is sampled.
    pub sampled_one_in: u64,
    /// Over the last 15 to 30 minutes of requests.
    pub recent: ShadowRates,
    /// Since the store was opened.
    pub since_start: ShadowRates,
}

/// Block counts of chain lookups, measured and predicted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ShadowRates {
    /// Blocks requested.
    pub blocks_requested: u64,
    /// Blocks matched in the tier as it is, without a gap from the start of their request.
    pub blocks_matched: u64,
    /// Blocks matched by the shadow alone.
    pub blocks_simulated: u64,
    /// Blocks predicted to match at the shadow's size: `blocks_matched`, plus the misses that this
    /// shadow saves against the one at 100 %.
    pub blocks_predicted: u64,
}

impl ShadowRates {
    /// The measured hit rate.
    pub fn hit_rate(&self) -> f64 {
        self.rate(self.blocks_matched)
    }

    /// The hit rate predicted for the shadow's size.
    pub fn predicted_hit_rate(&self) -> f64 {
        self.rate(self.blocks_predicted)
    }

    /// The hit rate of the shadow alone. At 100 %, its distance to the measured rate is its error.
    pub fn simulated_hit_rate(&self) -> f64 {
        self.rate(self.blocks_simulated)
    }

    #[expect(clippy::cast_precision_loss, reason = "counts of blocks stay far below 2^52")]
    fn rate(&self, blocks: u64) -> f64 {
        if self.blocks_requested == 0 {
            return 0.0;
        }
        blocks as f64 / self.blocks_requested as f64
    }
}
