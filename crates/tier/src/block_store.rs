//! The interface that an embedded store and the client of a served store share.

use std::fmt;

use cascade_block::{BlockKey, Manifest, Namespace, NamespaceId};
use cascade_memory::SlabMut;

use crate::{
    CallOptions, ChangeCursor, Changes, GetOutcome, PrefixMatch, PrepareOutcome, Put, PutOutcome,
    PutSlab, Request, StoreError, StoreStats, TierName, ViewOutcome,
};

/// The calls of a block store. `Store` serves them in this process; a client sends them to its
/// node. One conformance suite runs over both.
pub trait BlockStore: Send + Sync + fmt::Debug {
    /// As `Store::put`.
    fn put(&self, batch: &[Put<'_>], options: CallOptions) -> Vec<PutOutcome>;
    /// As `Store::reserve`.
    fn reserve(&self, bytes: usize, options: CallOptions) -> Result<SlabMut, StoreError>;
    /// As `Store::prepare_all`: the first phase of a two-phase put. The caller fills the slabs
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
    /// As `Store::put_slabs`.
    fn put_slabs(&self, batch: Vec<PutSlab>, options: CallOptions) -> Vec<PutOutcome>;
    /// As `Store::get`.
    ///
    /// # Panics
    /// If the numbers of buffers and keys differ.
    fn get(
        &self,
        keys: &[BlockKey],
        buffers: &mut [&mut [u8]],
        options: CallOptions,
    ) -> Vec<GetOutcome>;
    /// As `Store::view`.
    fn view(&self, keys: &[BlockKey], options: CallOptions) -> Vec<ViewOutcome>;
    /// As `Store::lookup_prefix`.
    fn lookup_prefix(&self, request: &Request<'_>) -> PrefixMatch;
    /// As `Store::acquire`.
    fn acquire(&self, request: &Request<'_>, options: CallOptions) -> Vec<ViewOutcome>;
    /// As `Store::hint`.
    fn hint(&self, request: &Request<'_>);
    /// As `Store::contains`.
    fn contains(&self, keys: &[BlockKey]) -> Vec<bool>;
    /// As `Store::locate`.
    fn locate(&self, keys: &[BlockKey]) -> Vec<Vec<TierName>>;
    /// As `Store::pin`.
    fn pin(&self, keys: &[BlockKey]) -> Vec<bool>;
    /// As `Store::unpin`.
    fn unpin(&self, keys: &[BlockKey]) -> Vec<bool>;
    /// As `Store::delete`.
    fn delete(&self, keys: &[BlockKey]) -> Vec<bool>;
    /// As `Store::clear`.
    fn clear(&self);
    /// As `Store::prefetch`.
    fn prefetch(&self, keys: &[BlockKey]) -> usize;
    /// As `Store::register`.
    fn register(&self, namespace: &Namespace, options: CallOptions) -> Result<(), StoreError>;
    /// As `Store::manifests`.
    fn manifests(&self, options: CallOptions) -> Result<Vec<(NamespaceId, Manifest)>, StoreError>;
    /// As `Store::flush`.
    fn flush(&self, options: CallOptions) -> Result<(), StoreError>;
    /// As `Store::changes`.
    fn changes(&self, since: Option<ChangeCursor>, max: usize) -> Result<Changes, StoreError>;
    /// As `Store::stats`.
    fn stats(&self) -> StoreStats;
    /// As `Store::close`.
    fn close(&self) -> Result<(), StoreError>;
}
