//! Calls for views: of the matched blocks of a chain, and as far as they need no wait for a tier.

use cascade_block::BlockKey;
use cascade_memory::Slab;
use cascade_tier::{CallOptions, PrefixMatch, Request, ViewOutcome};

use crate::Store;
use crate::calls::lookup::Lookup;
use crate::calls::read::Reads;
use crate::calls::read_flow::ReadPurpose;
use crate::calls::resident_views::{ResidentViews, failed_views};
use crate::shared::StoreCore;
use crate::shared::call::CallContext;

impl Store {
    /// Matches the leading blocks of a chain, and returns the fastest tier of each. The eviction
    /// policy learns of requests from this call: look up the whole chain first, then read the
    /// matched blocks and put the others. Matches only the blocks that it could look up within the
    /// timeout of the store.
    pub fn lookup_prefix(&self, request: &Request<'_>) -> PrefixMatch {
        Lookup { core: self.core(), request }.lookup_prefix(true)
    }

    /// Looks up a chain and returns views of the matched blocks: one round trip instead of two
    /// where the store is in another process. Matches as [`Store::lookup_prefix`], within the
    /// timeout of the call.
    pub fn acquire(&self, request: &Request<'_>, options: CallOptions) -> Vec<ViewOutcome> {
        let core = self.core();
        let call = core.call(options);
        let read_below = |below: &[BlockKey]| Reads::new(core, call).view_from_tiers(below);
        acquire(core, (request, call), true, read_below)
    }

    /// As [`Store::acquire`], for a caller that needs permission to wait: `read_below` reads the
    /// matched blocks that are only in lower tiers. It is not called if there are none. The sources
    /// are asked only if `asks_sources` is set.
    pub fn acquire_with(
        &self,
        request: &Request<'_>,
        options: CallOptions,
        asks_sources: bool,
        read_below: impl FnOnce(&[BlockKey]) -> Vec<ViewOutcome>,
    ) -> Vec<ViewOutcome> {
        acquire(self.core(), (request, self.core().call(options)), asks_sources, read_below)
    }

    /// As [`Store::view`], as far as it needs no wait for a tier: the views of the leading blocks,
    /// up to the first batch of 256 that has a block which is only in lower tiers, or that the call
    /// did not reach within its timeout.
    pub fn view_resident(&self, keys: &[BlockKey], options: CallOptions) -> Vec<ViewOutcome> {
        let core = self.core();
        if let Err(error) = core.check_in_place("view blocks") {
            return failed_views(keys, &error);
        }
        ResidentViews(core).view(keys, ReadPurpose::Use, core.call(options))
    }

    /// What this store has itself: its calls wait for no lower tier and no source.
    pub fn own(&self) -> OwnBlocks<'_> {
        OwnBlocks(self)
    }
}

/// What a store has itself: these calls wait for no lower tier and no source.
#[derive(Debug, Clone, Copy)]
pub struct OwnBlocks<'a>(&'a Store);

impl OwnBlocks<'_> {
    /// As [`Store::lookup_prefix`], without the sources.
    pub fn lookup_prefix(self, request: &Request<'_>) -> PrefixMatch {
        Lookup { core: self.0.core(), request }.lookup_prefix(false)
    }

    /// As [`Store::peek`], as far as it needs no wait for a tier; see [`Store::view_resident`].
    pub fn peek(self, keys: &[BlockKey], options: CallOptions) -> Vec<ViewOutcome> {
        let core = self.0.core();
        if let Err(error) = core.check_in_place("view blocks") {
            return failed_views(keys, &error);
        }
        ResidentViews(core).view(keys, ReadPurpose::Compare, core.call(options))
    }

    /// Views of the blocks that are in memory, whatever the lower tiers and the sources have; one
    /// for each key. Does not count as an access. `None` beyond the timeout of the call, and for a
    /// store in the memory of a device.
    pub fn in_memory(self, keys: &[BlockKey], options: CallOptions) -> Vec<Option<Slab>> {
        let core = self.0.core();
        if core.check_in_place("view blocks").is_err() {
            return vec![None; keys.len()];
        }
        ResidentViews(core).in_memory(keys, core.call(options))
    }
}

/// See [`Store::acquire_with`].
fn acquire(
    core: &StoreCore,
    (request, call): (&Request<'_>, CallContext),
    asks_sources: bool,
    read_below: impl FnOnce(&[BlockKey]) -> Vec<ViewOutcome>,
) -> Vec<ViewOutcome> {
    if let Err(error) = core.check_in_place("view the blocks of a chain") {
        return failed_views(request.keys, &error);
    }
    let (mut views, below) = ResidentViews(core).acquire(request, call, asks_sources);
    if !below.is_empty() {
        let below_keys: Vec<BlockKey> = below.iter().map(|at| request.keys[*at]).collect();
        for (at, view) in below.into_iter().zip(read_below(&below_keys)) {
            views[at] = view;
        }
    }
    views
}

#[cfg(test)]
mod tests;
