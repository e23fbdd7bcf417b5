//! The interface that an embedded store and the client of a served store share.

use std::fmt;

use cascade_block::{BlockKey, Manifest, Namespace, NamespaceId};
use cascade_memory::SlabMut;

use crate::outcome::{PrepareOutcome, PutSlab};
use crate::{
    CallOptions, ChangeCursor, Changes, GetOutcome, PrefixMatch, Put, PutOutcome, Request, Store,
    StoreError, StoreStats, TierName, ViewOutcome,
};

/// The calls of a block store. [`Store`] serves them in this process; a client sends them to its
/// node. One conformance suite runs over both.
pub trait BlockStore: Send + Sync + fmt::Debug {
    /// As [`Store::put`].
    fn put(&self, batch: &[Put<'_>], options: CallOptions) -> Vec<PutOutcome>;
    /// As [`Store::reserve`].
    fn reserve(&self, bytes: usize, options: CallOptions) -> Result<SlabMut, StoreError>;
    /// As [`Store::prepare_all`]: the first phase of a two-phase put. The caller fills the slabs
    /// and passes them to `put_slabs`. Dropping a slab returns its memory and counts nothing.
    ///
    /// # Panics
    /// If the numbers of lengths and blocks differ.
    fn prepare(
        &self,
        batch: &[Put<'_>],
        lengths: &[usize],
        options: CallOptions,
    ) -> Vec<PrepareOutcome>;
    /// As [`Store::put_slabs`].
    fn put_slabs(&self, batch: Vec<PutSlab>, options: CallOptions) -> Vec<PutOutcome>;
    /// As [`Store::get`].
    ///
    /// # Panics
    /// If the numbers of buffers and keys differ.
    fn get(
        &self,
        keys: &[BlockKey],
        buffers: &mut [&mut [u8]],
        options: CallOptions,
    ) -> Vec<GetOutcome>;
    /// As [`Store::view`].
    fn view(&self, keys: &[BlockKey], options: CallOptions) -> Vec<ViewOutcome>;
    /// As [`Store::lookup_prefix`].
    fn lookup_prefix(&self, request: &Request<'_>) -> PrefixMatch;
    /// As [`Store::acquire`].
    fn acquire(&self, request: &Request<'_>, options: CallOptions) -> Vec<ViewOutcome>;
    /// As [`Store::hint`].
    fn hint(&self, request: &Request<'_>);
    /// As [`Store::contains`].
    fn contains(&self, keys: &[BlockKey]) -> Vec<bool>;
    /// As [`Store::locate`].
    fn locate(&self, keys: &[BlockKey]) -> Vec<Vec<TierName>>;
    /// As [`Store::pin`].
    fn pin(&self, keys: &[BlockKey]) -> Vec<bool>;
    /// As [`Store::unpin`].
    fn unpin(&self, keys: &[BlockKey]) -> Vec<bool>;
    /// As [`Store::delete`].
    fn delete(&self, keys: &[BlockKey]) -> Vec<bool>;
    /// As [`Store::clear`].
    fn clear(&self);
    /// As [`Store::prefetch`].
    fn prefetch(&self, keys: &[BlockKey]) -> usize;
    /// As [`Store::register`].
    fn register(&self, namespace: &Namespace, options: CallOptions) -> Result<(), StoreError>;
    /// As [`Store::manifests`].
    fn manifests(&self, options: CallOptions) -> Result<Vec<(NamespaceId, Manifest)>, StoreError>;
    /// As [`Store::flush`].
    fn flush(&self, options: CallOptions) -> Result<(), StoreError>;
    /// As [`Store::changes`].
    fn changes(&self, since: Option<ChangeCursor>, max: usize) -> Result<Changes, StoreError>;
    /// As [`Store::stats`].
    fn stats(&self) -> StoreStats;
    /// As [`Store::close`].
    fn close(&self) -> Result<(), StoreError>;
}

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
