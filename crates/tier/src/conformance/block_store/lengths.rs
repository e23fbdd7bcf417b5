//! Checks of every call with batches larger than one message between processes.

use cascade_block::{Manifest, Namespace, TenantSecret};

use super::{NOW, Subject, bytes_of, keys, tier_of};
use crate::{
    GetOutcome, PrepareOutcome, Put, PutOutcome, PutSlab, Request, StoreError, ViewOutcome,
};

/// More blocks than fit one message.
const MANY: u64 = 10_000;

/// Regression: a served store returned only the first 2,048 blocks.
pub(super) fn a_chain_of_any_length_is_acquired(subject: &Subject) {
    let all = keys(0..MANY);
    subject.put_new(&all, 512);
    for count in [0, 1, 2047, 2048, 2049, 4097, all.len()] {
        let views = subject.store.acquire(&Request::new(&all[..count]), NOW);
        assert_eq!(views.len(), count);
        let is_right = |(key, view)| tier_of(key, view).is_some();
        assert!(all.iter().zip(views).all(is_right), "{count} blocks");
    }
    let requests = (subject.counters)().requests;
    assert_eq!(requests, 7, "each call is one request, whatever its length");
    subject.store.delete(&all[5000..5001]);
    let views = subject.store.acquire(&Request::new(&all), NOW);
    assert_eq!(views.len(), 5000, "it ends at the first gap");
}

pub(super) fn every_call_accepts_a_batch_of_any_length(subject: &Subject) {
    let (store, all) = (&subject.store, keys(0..MANY));
    subject.put_new(&all, 512);
    let views = store.view(&all, NOW);
    assert!(all.iter().zip(views).all(|(key, view)| tier_of(key, view).is_some()));
    let mut buffers = vec![[0; 512]; all.len()];
    let mut slices: Vec<&mut [u8]> = buffers.iter_mut().map(<[u8; 512]>::as_mut).collect();
    let read = store.get(&all, &mut slices, NOW);
    assert!(read.iter().all(|outcome| matches!(outcome, GetOutcome::Hit { bytes: 512, .. })));
    assert!(all.iter().zip(&buffers).all(|(key, buffer)| bytes_of(key, 512) == buffer));
    let yes = vec![true; all.len()];
    assert_eq!(store.contains(&all), yes);
    assert!(store.locate(&all).iter().all(|tiers| tiers.first() == Some(&subject.memory)));
    assert_eq!(store.pin(&all), yes);
    assert_eq!(store.unpin(&all), yes);
    assert!(store.prefetch(&all) <= all.len());
    assert_eq!(store.stats().counters.stored, MANY);
    assert_eq!(store.delete(&all), yes);
    assert!(store.contains(&all).iter().all(|is_there| !is_there));
}

pub(super) fn any_number_of_slabs_is_prepared_and_sealed(subject: &Subject) {
    let (store, all) = (&subject.store, keys(0..MANY));
    let batch: Vec<_> = all.iter().map(|key| Put::new(*key, &[])).collect();
    let prepared = store.prepare(&batch, &vec![512; all.len()], NOW);
    let fill = |(key, one)| {
        let PrepareOutcome::Slab(mut slab) = one else { panic!("{key}: {one:?}") };
        slab.fill_from(&bytes_of(key, 512)).expect("host memory never fails");
        PutSlab::new(*key, slab)
    };
    let slabs = all.iter().zip(prepared).map(fill).collect();
    let outcomes = store.put_slabs(slabs, NOW);
    assert_eq!(outcomes.len(), all.len());
    let other = outcomes.iter().position(|outcome| !matches!(outcome, PutOutcome::Stored));
    assert!(other.is_none(), "block {other:?}: {:?}", other.map(|at| &outcomes[at]));
    assert!(subject.has_all(&all));
}

pub(super) fn every_call_on_a_closed_store_returns(subject: &Subject) {
    let (store, keys) = (&subject.store, keys(0..2));
    subject.put_new(&keys, 4096);
    assert_eq!(store.pin(&keys), [true; 2]);
    store.close().expect("every tier can store the blocks");
    assert_eq!(store.contains(&keys), [false; 2]);
    assert_eq!(store.locate(&keys), [[""; 0]; 2]);
    assert_eq!(store.pin(&keys), [false; 2]);
    assert_eq!(store.prefetch(&keys), 0);
    for view in store.acquire(&Request::new(&keys), NOW) {
        assert!(matches!(view, ViewOutcome::Failed(StoreError::Closed)), "{view:?}");
    }
    let (mut one, mut other) = ([0; 4096], [0; 4096]);
    let mut buffers: [&mut [u8]; 2] = [&mut one, &mut other];
    for outcome in store.get(&keys, &mut buffers, NOW) {
        assert!(matches!(outcome, GetOutcome::Failed(StoreError::Closed)), "{outcome:?}");
    }
    store.hint(&Request::new(&keys));
    store.clear();
    let namespace = Namespace::new(Manifest::new().with("weights", "w"), &TenantSecret::new("s"));
    // A closed tier may succeed or fail here, but must not panic.
    drop(store.register(&namespace, NOW));
    drop(store.manifests(NOW));
    drop(store.stats());
}
