//! The calls of a block store, for an embedded store.

use cascade_block::{BlockKey, Manifest, Namespace, NamespaceId};
use cascade_memory::SlabMut;
use cascade_tier::{
    BlockStore, CallOptions, ChangeCursor, Changes, GetOutcome, PrefixMatch, PrepareOutcome, Put,
    PutOutcome, PutSlab, Request, StoreError, StoreStats, TierName, ViewOutcome,
};

use crate::Store;

impl BlockStore for Store {
    fn put(&self, batch: &[Put<'_>], options: CallOptions) -> Vec<PutOutcome> {
        Store::put(self, batch, options)
    }

    fn reserve(&self, bytes: usize, options: CallOptions) -> Result<SlabMut, StoreError> {
        Store::reserve(self, bytes, options)
    }

    fn prepare(
        &self,
        batch: &[Put<'_>],
        lengths: &[usize],
        options: CallOptions,
    ) -> Vec<PrepareOutcome> {
        Store::prepare_all(self, batch, lengths, options)
    }

    fn put_slabs(&self, batch: Vec<PutSlab>, options: CallOptions) -> Vec<PutOutcome> {
        Store::put_slabs(self, batch, options)
    }

    fn get(
        &self,
        keys: &[BlockKey],
        buffers: &mut [&mut [u8]],
        options: CallOptions,
    ) -> Vec<GetOutcome> {
        Store::get(self, keys, buffers, options)
    }

    fn view(&self, keys: &[BlockKey], options: CallOptions) -> Vec<ViewOutcome> {
        Store::view(self, keys, options)
    }

    fn lookup_prefix(&self, request: &Request<'_>) -> PrefixMatch {
        Store::lookup_prefix(self, request)
    }

    fn acquire(&self, request: &Request<'_>, options: CallOptions) -> Vec<ViewOutcome> {
        Store::acquire(self, request, options)
    }

    fn hint(&self, request: &Request<'_>) {
        Store::hint(self, request);
    }

    fn contains(&self, keys: &[BlockKey]) -> Vec<bool> {
        Store::contains(self, keys)
    }

    fn locate(&self, keys: &[BlockKey]) -> Vec<Vec<TierName>> {
        Store::locate(self, keys)
    }

    fn pin(&self, keys: &[BlockKey]) -> Vec<bool> {
        Store::pin(self, keys)
    }

    fn unpin(&self, keys: &[BlockKey]) -> Vec<bool> {
        Store::unpin(self, keys)
    }

    fn delete(&self, keys: &[BlockKey]) -> Vec<bool> {
        Store::delete(self, keys)
    }

    fn clear(&self) {
        Store::clear(self);
    }

    fn prefetch(&self, keys: &[BlockKey]) -> usize {
        Store::prefetch(self, keys)
    }

    fn register(&self, namespace: &Namespace, options: CallOptions) -> Result<(), StoreError> {
        Store::register(self, namespace, options)
    }

    fn manifests(&self, options: CallOptions) -> Result<Vec<(NamespaceId, Manifest)>, StoreError> {
        Store::manifests(self, options)
    }

    fn flush(&self, options: CallOptions) -> Result<(), StoreError> {
        Store::flush(self, options)
    }

    fn changes(&self, since: Option<ChangeCursor>, max: usize) -> Result<Changes, StoreError> {
        Store::changes(self, since, max)
    }

    fn stats(&self) -> StoreStats {
        Store::stats(self)
    }

    fn close(&self) -> Result<(), StoreError> {
        Store::close(self)
    }
}
