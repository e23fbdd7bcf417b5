//! Shadow caches: predict the hit rate of each tier at 150 % and 200 % of its size.
//!
//! Beside each bounded tier run three models of it, on names alone: at its size, at 150 % and at
//! 200 %. They follow a sample of all blocks (`sample.rs`), see the same chain lookups and puts,
//! and use the store's own rules: the policy for DRAM, segments for the file tier. The model at 100
//! % calibrates: the prediction is the measured rate plus the misses that the larger model saves.
//! The models count misses, not hits: blocks that every request shares never miss, so the result
//! does not depend on whether they are in the sample.

mod cache;
mod queue;
mod request;
mod sample;
mod window;

use std::collections::HashMap;
use std::time::Duration;

use cascade_block::{BlockKey, FingerprintSeed};
use cascade_tier::{Hints, PrepareOutcome, Put, PutOutcome, ShadowFigure, ShadowRates, TierName};

use crate::core::eviction::EvictionLimits;
use crate::{PolicyKind, StoreConfig};
use cache::{Arrival, DramShadow};
use queue::FilesShadow;
pub(crate) use request::ShadowRequest;
use sample::Sample;
use window::{Window, WindowCounts};

/// Sizes of the shadows, in percent of their tier.
const SIZES: [u64; 3] = [100, 150, 200];
/// Most sampled blocks in the shadow at 100 %.
const SAMPLE_BLOCKS: u64 = 2048;
/// Most sampled blocks that were requested and not yet put.
const PENDING_PUTS_MAX: usize = 4096;
/// Blocks take whole pages in the file tier.
const PAGE_BYTES: u32 = 4096;

/// A chain lookup with its result.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ChainLookup<'a> {
    pub(crate) at: Duration,
    pub(crate) keys: &'a [BlockKey],
    pub(crate) partial_tail: bool,
    pub(crate) hints: &'a Hints,
    /// Leading blocks in DRAM.
    pub(crate) in_dram: usize,
    /// Leading blocks in any tier.
    pub(crate) matched: usize,
    /// Approximate length of this store's blocks; zero while there are none.
    pub(crate) block_bytes: u32,
}

/// One tier's sample and its models, smallest first.
#[derive(Debug)]
struct TierModels<M> {
    sample: Sample,
    models: [M; SIZES.len()],
}

/// Settings of a tier, known before its first block.
#[derive(Debug, Clone, Copy)]
struct TierPlan {
    name: TierName,
    capacity_bytes: u64,
}

/// The shadows of one store.
#[derive(Debug)]
pub(crate) struct Shadows {
    seed: FingerprintSeed,
    policy: PolicyKind,
    limits: EvictionLimits,
    dram_blocks: u64,
    segment_bytes: u64,
    dram_plan: Option<TierPlan>,
    files_plan: Option<TierPlan>,
    dram: Option<TierModels<DramShadow>>,
    files: Option<TierModels<FilesShadow>>,
    dram_window: Window,
    files_window: Window,
    /// Whether an incoming block may be declined: only with no tier below DRAM.
    may_decline: bool,
    /// Sampled blocks that are not yet put, each with its parent in the sample.
    pending_puts: HashMap<u64, Option<u64>>,
    /// Counts how often the models were replaced.
    generation: u64,
    /// Empty between requests; kept to save allocations.
    spare: ShadowRequest,
}

impl Shadows {
    /// The shadows for a store's settings and lower tiers, fast to slow.
    pub(crate) fn new(
        config: &StoreConfig,
        memory: Option<TierName>,
        lower: &[TierName],
        seed: FingerprintSeed,
    ) -> Self {
        let plan = |name, capacity_bytes| TierPlan { name, capacity_bytes };
        let files = config.files.as_ref().filter(|_| lower.contains(&"files"));
        Self {
            seed,
            policy: config.policy,
            limits: EvictionLimits {
                capacity_bytes: config.dram_bytes,
                protected_percent: config.protected_percent,
                admit_partial: config.admit_partial,
            },
            dram_blocks: config.dram_blocks.unwrap_or(u64::MAX),
            segment_bytes: files.map_or(0, |files| files.segment_bytes),
            dram_plan: memory.map(|name| plan(name, config.dram_bytes)),
            files_plan: files.map(|files| plan("files", files.capacity_bytes)),
            dram: None,
            files: None,
            dram_window: Window::default(),
            files_window: Window::default(),
            may_decline: lower.is_empty(),
            pending_puts: HashMap::new(),
            generation: 0,
            spare: ShadowRequest::default(),
        }
    }

    /// Sizes the sample by the number of blocks that a tier holds, so it waits for the first block.
    fn start(&mut self, block_bytes: u32) {
        if block_bytes == 0 || self.dram.is_some() || self.files.is_some() {
            return;
        }
        let mut sample = Sample::of_at_most(0, SAMPLE_BLOCKS);
        if let Some(plan) = self.dram_plan {
            let blocks = (plan.capacity_bytes / u64::from(block_bytes)).min(self.dram_blocks);
            sample = Sample::of_at_most(blocks, SAMPLE_BLOCKS);
            let models = SIZES.map(|percent| {
                let of = |whole: u64| sample.share(scale(whole, percent));
                let limits =
                    EvictionLimits { capacity_bytes: of(plan.capacity_bytes), ..self.limits };
                DramShadow::new(self.policy, limits, of(self.dram_blocks))
            });
            self.dram = Some(TierModels { sample, models });
        }
        if let Some(plan) = self.files_plan {
            let blocks = plan.capacity_bytes / u64::from(in_pages(block_bytes));
            // At most DRAM's share: the file tier's hits depend on what the DRAM shadow holds.
            let sample = sample.max(Sample::of_at_most(blocks, SAMPLE_BLOCKS));
            let models = SIZES.map(|percent| {
                let capacity = sample.share(scale(plan.capacity_bytes, percent));
                FilesShadow::new(capacity, sample.share(self.segment_bytes))
            });
            self.files = Some(TierModels { sample, models });
        }
    }

    /// Blocks of these lengths were put, with these outcomes.
    pub(crate) fn put(
        &mut self,
        now: Duration,
        batch: &[Put<'_>],
        length: impl Fn(usize) -> usize,
        outcomes: &[PutOutcome],
    ) {
        use cascade_tier::DeclineReason::{Full, WorthLess};
        for (at, (put, outcome)) in batch.iter().zip(outcomes).enumerate() {
            let is_taken = match outcome {
                PutOutcome::Stored | PutOutcome::Deduplicated | PutOutcome::Present => true,
                // A larger tier may store what this one declines.
                PutOutcome::Declined(reason) => matches!(reason, Full | WorthLess),
                PutOutcome::Conflict | PutOutcome::Failed(_) => false,
            };
            if let Some(bytes) = u32::try_from(length(at)).ok().filter(|_| is_taken) {
                self.start(bytes);
                self.insert_put(now, put, bytes);
            }
        }
        self.limit_sample();
    }

    /// Blocks of these lengths were prepared: the first phase of a put. Blocks declined for lack of
    /// room are never put, so they are inserted here.
    pub(crate) fn declined(
        &mut self,
        now: Duration,
        batch: &[Put<'_>],
        lengths: &[usize],
        prepared: &[PrepareOutcome],
    ) {
        use cascade_tier::DeclineReason::{Full, WorthLess};
        for ((put, bytes), prepared) in batch.iter().zip(lengths).zip(prepared) {
            let PrepareOutcome::Settled(PutOutcome::Declined(Full | WorthLess)) = prepared else {
                continue;
            };
            if let Ok(bytes) = u32::try_from(*bytes) {
                self.start(bytes);
                self.insert_put(now, put, bytes);
            }
        }
        self.limit_sample();
    }

    fn insert_put(&mut self, now: Duration, put: &Put<'_>, bytes: u32) {
        let seed = self.seed;
        let fingerprint = seed.of_key(&put.key);
        if let Some(tier) = self.dram.as_mut().filter(|tier| tier.sample.holds(fingerprint)) {
            // A put names only its direct parent. The request found the nearest ancestor in the
            // sample, so that has priority.
            let put_parent = put.parent.map(|parent| seed.of_key(&parent));
            let put_parent = put_parent.filter(|parent| tier.sample.holds(*parent));
            let arrival = Arrival {
                fingerprint,
                parent: self.pending_puts.remove(&fingerprint).flatten().or(put_parent),
                bytes,
                is_protected: put.is_prefix,
                may_decline: self.may_decline,
            };
            tier.models.iter_mut().for_each(|cache| cache.insert(now, &arrival));
        }
        let Some(tier) = self.files.as_mut() else { return };
        if tier.sample.holds(fingerprint) {
            let dram = self.dram.as_ref().map(|tier| &tier.models[0]);
            let is_in_dram = |fingerprint: u64| dram.is_some_and(|dram| dram.holds(fingerprint));
            for queue in &mut tier.models {
                queue.insert(fingerprint, in_pages(bytes), put.is_prefix, &is_in_dram);
            }
        }
    }

    /// Blocks were deleted.
    pub(crate) fn remove(&mut self, keys: &[BlockKey]) {
        let seed = self.seed;
        for fingerprint in keys.iter().map(|key| seed.of_key(key)) {
            if let Some(tier) = &mut self.dram {
                tier.models.iter_mut().for_each(|cache| cache.remove(fingerprint));
            }
            if let Some(tier) = &mut self.files {
                tier.models.iter_mut().for_each(|queue| queue.remove(fingerprint));
            }
        }
    }

    /// All blocks were deleted; the next ones may have another length.
    pub(crate) fn clear(&mut self) {
        self.dram = None;
        self.files = None;
        self.pending_puts.clear();
        self.generation += 1;
    }

    /// The capacity of a tier has changed: its models begin again at the new size.
    pub(crate) fn resize(&mut self, tier: TierName, capacity_bytes: u64) {
        for plan in [&mut self.dram_plan, &mut self.files_plan].into_iter().flatten() {
            if plan.name == tier {
                plan.capacity_bytes = capacity_bytes;
            }
        }
        self.dram_window = Window::default();
        self.files_window = Window::default();
        self.clear();
    }

    /// Makes these the successors of others, whose unfinished requests they ignore.
    pub(super) fn succeed(&mut self, before: &Self) {
        self.generation = before.generation + 1;
        // The capacities of the configuration are those at the start.
        self.dram_plan = before.dram_plan;
        self.files_plan = before.files_plan;
    }

    /// Halves the sample when blocks shorter than the first one made it too large.
    fn limit_sample(&mut self) {
        let most = 2 * usize::try_from(SAMPLE_BLOCKS).expect("a few thousand");
        if let Some(tier) = self.dram.as_mut().filter(|tier| tier.models[0].len() > most) {
            tier.sample = tier.sample.halved();
            tier.models.iter_mut().for_each(|cache| cache.thin(tier.sample));
        }
        let least = self.dram.as_ref().map(|tier| tier.sample);
        let Some(tier) = &mut self.files else { return };
        // Samples compare by their shift: the smaller one has more blocks. The sample of the file
        // tier stays a subset of DRAM's, because its model uses the DRAM model.
        if tier.models[0].len() > most || least.is_some_and(|least| tier.sample < least) {
            tier.sample = tier.sample.halved();
            tier.models.iter_mut().for_each(|queue| queue.thin(tier.sample));
        }
    }

    /// Memory of all shadows.
    pub(crate) fn memory_bytes(&self) -> usize {
        let dram = self.dram.iter().flat_map(|tier| &tier.models).map(DramShadow::memory_bytes);
        let files = self.files.iter().flat_map(|tier| &tier.models).map(FilesShadow::memory_bytes);
        let pending_puts = self.pending_puts.capacity() * (size_of::<(u64, Option<u64>)>() + 1);
        let spare = self.spare.memory_bytes();
        size_of::<Self>() + dram.chain(files).sum::<usize>() + pending_puts + spare
    }

    /// The results by tier and size; none before the first block.
    pub(crate) fn figures(&self) -> Vec<ShadowFigure> {
        let dram = self.dram.as_ref().map(|tier| tier.sample).zip(self.dram_plan);
        let files = self.files.as_ref().map(|tier| tier.sample).zip(self.files_plan);
        let tiers = [(dram, &self.dram_window), (files, &self.files_window)];
        let known = tiers.into_iter().filter_map(|(tier, window)| Some((tier?, window)));
        let mut figures = Vec::new();
        for ((sample, plan), window) in known {
            figures.extend(SIZES.iter().enumerate().map(|(size, percent)| ShadowFigure {
                tier: plan.name,
                capacity_percent: *percent,
                capacity_bytes: scale(plan.capacity_bytes, *percent),
                sampled_one_in: sample.weight(),
                recent: rates_of(&window.recent(), size),
                since_start: rates_of(&window.all(), size),
            }));
        }
        figures
    }
}

/// The rates of the shadow of one size.
fn rates_of(counts: &WindowCounts, size: usize) -> ShadowRates {
    let WindowCounts { requested, matched, missed } = *counts;
    // Misses are estimates from a sample, so the result may leave the range from zero to
    // `requested`.
    let expected = (matched + missed[0]).saturating_sub(missed[size]);
    ShadowRates {
        blocks_requested: requested,
        blocks_matched: matched,
        blocks_simulated: requested.saturating_sub(missed[size]),
        blocks_predicted: expected.min(requested),
    }
}

impl WindowCounts {
    fn of_request(requested: usize, matched: usize) -> Self {
        Self { requested: requested as u64, matched: matched as u64, ..Self::default() }
    }
}

fn scale(whole: u64, percent: u64) -> u64 {
    let scaled = u128::from(whole) * u128::from(percent) / 100;
    u64::try_from(scaled).unwrap_or(u64::MAX)
}

fn in_pages(bytes: u32) -> u32 {
    bytes.div_ceil(PAGE_BYTES).saturating_mul(PAGE_BYTES)
}
