//! Requests and hints for chains, in as many holds of the lock as a long chain needs.
//!
//! Between two holds, other calls may change the models. A model that was replaced gets no more of
//! the request; a block that left the sample is not inserted.

use std::time::Duration;

use cascade_block::{BlockKey, FingerprintSeed};
use cascade_tier::Hints;

use super::cache::Arrival;
use super::sample::Sample;
use super::window::WindowCounts;
use super::{ChainLookup, PENDING_PUTS_MAX, SIZES, Shadows, in_pages};
use crate::core::eviction::{ChainHint, ChainRequest, RequestedBlock, Visits};

/// What the insertion of a block costs, in visits: it may evict others.
const VISITS_PER_INSERT: usize = 4;

/// A chain's blocks in the sample of a tier.
#[derive(Debug, Default)]
struct SampledChain {
    sample: Option<Sample>,
    fingerprints: Vec<u64>,
    /// Their places in the whole chain.
    places: Vec<usize>,
}

impl SampledChain {
    fn select(&mut self, keys: &[BlockKey], seed: FingerprintSeed) {
        let Some(sample) = self.sample else { return };
        for (place, key) in keys.iter().enumerate() {
            let fingerprint = seed.of_key(key);
            if sample.holds(fingerprint) {
                self.fingerprints.push(fingerprint);
                self.places.push(place);
            }
        }
    }

    fn len(&self) -> usize {
        self.fingerprints.len()
    }

    /// How many blocks the sampled ones from this one on represent.
    fn blocks_from(&self, at: usize) -> u64 {
        (self.len() - at) as u64 * self.sample.map_or(0, Sample::weight)
    }

    fn emptied(mut self) -> Self {
        self.fingerprints.clear();
        self.places.clear();
        Self { sample: None, ..self }
    }

    fn memory_bytes(&self) -> usize {
        self.fingerprints.capacity() * size_of::<u64>()
            + self.places.capacity() * size_of::<usize>()
    }
}

/// How far a request or the hints for a chain are. Kept by the caller from one hold to the next.
#[derive(Debug, Default)]
pub(crate) struct ShadowRequest {
    /// The models that it is for.
    generation: u64,
    files: SampledChain,
    dram: SampledChain,
    are_files_done: bool,
    model: usize,
    /// The next block of the current model.
    at: usize,
    /// How many leading blocks the current model has, once that is known.
    leading: Option<usize>,
    missed: [u64; SIZES.len()],
    /// The blocks as the current model of DRAM has them.
    requested: Vec<RequestedBlock>,
    /// What the current model's policy does with them.
    report: Option<ChainRequest>,
    hint: Option<ChainHint>,
}

impl ShadowRequest {
    /// Selects the blocks that are in the samples. Needs no lock.
    pub(crate) fn select(&mut self, keys: &[BlockKey], seed: FingerprintSeed) {
        self.files.select(keys, seed);
        self.dram.select(keys, seed);
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.files.memory_bytes()
            + self.dram.memory_bytes()
            + self.requested.capacity() * size_of::<RequestedBlock>()
    }

    fn begin_next_model(&mut self) {
        self.model += 1;
        self.at = 0;
        self.leading = None;
        self.requested.clear();
        (self.report, self.hint) = (None, None);
    }

    /// A new one with the same memory.
    fn emptied(mut self) -> Self {
        self.requested.clear();
        let (files, dram) = (self.files.emptied(), self.dram.emptied());
        Self { files, dram, requested: self.requested, ..Self::default() }
    }
}

impl Shadows {
    /// A chain was looked up.
    pub(crate) fn request(&mut self, lookup: &ChainLookup<'_>) {
        let mut request = self.begin_request(lookup.block_bytes);
        request.select(lookup.keys, self.seed);
        let is_done = self.continue_request(&mut request, lookup, &mut Visits::unlimited());
        debug_assert!(is_done, "the visits suffice for every chain");
    }

    /// Begins the request of a chain; the next step is [`ShadowRequest::select`].
    pub(crate) fn begin_request(&mut self, block_bytes: u32) -> ShadowRequest {
        self.start(block_bytes);
        let mut request = std::mem::take(&mut self.spare);
        request.generation = self.generation;
        request.files.sample = self.files.as_ref().map(|tier| tier.sample);
        request.dram.sample = self.dram.as_ref().map(|tier| tier.sample);
        request
    }

    /// One hold's part of a request. Returns whether the request is done.
    pub(crate) fn continue_request(
        &mut self,
        request: &mut ShadowRequest,
        lookup: &ChainLookup<'_>,
        visits: &mut Visits,
    ) -> bool {
        if request.generation != self.generation {
            return true;
        }
        // The file tier first: its hits depend on the content of DRAM before this request.
        if !request.are_files_done {
            if !self.request_files(request, lookup, visits) {
                return false;
            }
            request.are_files_done = true;
            (request.model, request.missed) = (0, [0; SIZES.len()]);
        }
        let is_done = self.request_dram(request, lookup, visits);
        if is_done {
            self.spare = std::mem::take(request).emptied();
        }
        is_done
    }

    fn request_files(
        &mut self,
        request: &mut ShadowRequest,
        lookup: &ChainLookup<'_>,
        visits: &mut Visits,
    ) -> bool {
        let Some(tier) = self.files.as_mut() else { return true };
        // All sizes of the file tier see the DRAM model at 100 %: one tier is enlarged at a time.
        let dram = self.dram.as_ref().map(|tier| &tier.models[0]);
        let is_in_dram = |fingerprint: u64| dram.is_some_and(|dram| dram.holds(fingerprint));
        while let Some(queue) = tier.models.get_mut(request.model) {
            // A block in DRAM is a hit without a read from files, so it gets no reference.
            while request.leading.is_none() {
                let Some(fingerprint) = request.files.fingerprints.get(request.at).copied() else {
                    request.leading = Some(request.at);
                    continue;
                };
                if !visits.take(1) {
                    return false;
                }
                if is_in_dram(fingerprint) {
                    request.at += 1;
                } else if queue.holds(fingerprint) {
                    queue.mark_referenced(fingerprint);
                    request.at += 1;
                } else {
                    request.leading = Some(request.at);
                }
            }
            let leading = request.leading.unwrap_or(request.at);
            request.missed[request.model] = request.files.blocks_from(leading);
            while request.at < request.files.len() {
                if !visits.take(VISITS_PER_INSERT) {
                    return false;
                }
                let fingerprint = request.files.fingerprints[request.at];
                // As for DRAM: a block that the store has is not put again.
                let is_here = request.files.places[request.at] < lookup.matched;
                if is_here && tier.sample.holds(fingerprint) {
                    let bytes = in_pages(lookup.block_bytes);
                    queue.insert(fingerprint, bytes, false, &is_in_dram);
                }
                request.at += 1;
            }
            request.begin_next_model();
        }
        let counts = WindowCounts::of_request(lookup.keys.len(), lookup.matched);
        self.files_window.add(lookup.at, &WindowCounts { missed: request.missed, ..counts });
        true
    }

    fn request_dram(
        &mut self,
        request: &mut ShadowRequest,
        lookup: &ChainLookup<'_>,
        visits: &mut Visits,
    ) -> bool {
        if self.dram.is_none() {
            return true;
        }
        // A request without sampled blocks counts as well: rates are over all blocks requested.
        while request.model < SIZES.len() && request.dram.len() > 0 {
            if !self.request_model(request, lookup, visits) {
                return false;
            }
            request.begin_next_model();
        }
        let counts = WindowCounts::of_request(lookup.keys.len(), lookup.in_dram);
        self.dram_window.add(lookup.at, &WindowCounts { missed: request.missed, ..counts });
        true
    }

    /// The part of one model of DRAM. Returns whether it is done.
    fn request_model(
        &mut self,
        request: &mut ShadowRequest,
        lookup: &ChainLookup<'_>,
        visits: &mut Visits,
    ) -> bool {
        let Some(tier) = self.dram.as_mut() else { return true };
        let cache = &mut tier.models[request.model];
        let ShadowRequest { dram: chain, requested, report, at, .. } = request;
        let is_last_sampled = chain.places.last().is_some_and(|last| last + 1 == lookup.keys.len());
        let partial_tail = lookup.partial_tail && is_last_sampled;
        if request.leading.is_none() {
            if !cache.find_chain(&chain.fingerprints, requested, visits) {
                return false;
            }
            let part = (lookup.at, partial_tail, lookup.hints);
            let Some(leading) = cache.continue_request(report, requested, part, visits) else {
                return false;
            };
            (request.leading, *at) = (Some(leading), leading);
            request.missed[request.model] = chain.blocks_from(leading);
        }
        // A policy that does not promote leaves blocks of lower tiers where they are.
        let here = if cache.promotes_hits() { lookup.matched } else { lookup.in_dram };
        while *at < chain.len() {
            if !visits.take(VISITS_PER_INSERT) {
                return false;
            }
            let fingerprint = chain.fingerprints[*at];
            let parent = at.checked_sub(1).map(|before| chain.fingerprints[before]);
            let is_sampled = tier.sample.holds(fingerprint);
            // A block that the store has is not put again, so it is inserted now. Other blocks are
            // inserted when they are put.
            if is_sampled && chain.places[*at] < here {
                cache.insert(
                    lookup.at,
                    &Arrival {
                        fingerprint,
                        parent,
                        bytes: lookup.block_bytes,
                        is_protected: false,
                        may_decline: self.may_decline,
                    },
                );
            } else if is_sampled && !(partial_tail && *at + 1 == chain.len()) {
                // Entries of puts that never come would accumulate. A lost entry costs only the
                // nearest sampled ancestor of one block.
                if self.pending_puts.len() >= PENDING_PUTS_MAX {
                    self.pending_puts.clear();
                }
                self.pending_puts.insert(fingerprint, parent);
            }
            *at += 1;
        }
        true
    }

    /// Begins the hints for a chain, which arrived without a request for it; the next step is
    /// [`ShadowRequest::select`].
    pub(crate) fn begin_hint(&mut self) -> ShadowRequest {
        let mut request = std::mem::take(&mut self.spare);
        request.generation = self.generation;
        request.dram.sample = self.dram.as_ref().map(|tier| tier.sample);
        request
    }

    /// One hold's part of the hints for a chain. Returns whether they are done.
    pub(crate) fn continue_hint(
        &mut self,
        request: &mut ShadowRequest,
        (now, hints): (Duration, &Hints),
        visits: &mut Visits,
    ) -> bool {
        let models = self.dram.as_mut().filter(|_| request.generation == self.generation);
        let Some(models) = models.map(|tier| &mut tier.models) else { return true };
        while let Some(cache) = models.get_mut(request.model).filter(|_| request.dram.len() > 0) {
            let ShadowRequest { dram: chain, requested, hint, .. } = &mut *request;
            if !cache.find_chain(&chain.fingerprints, requested, visits)
                || !cache.continue_hint(hint, requested, (now, hints), visits)
            {
                return false;
            }
            request.begin_next_model();
        }
        self.spare = std::mem::take(request).emptied();
        true
    }
}
