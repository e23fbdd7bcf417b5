//! A bug for the simulator to find: blocks that are published before their bytes are complete.

use cascade_memory::{Slab, SlabMut};

use crate::calls::put::PutBatch;
use crate::core::catalog::Content;
use crate::shared::StoreCore;

impl StoreCore {
    /// Publishes the blocks of a put with slabs that nobody has filled, and replaces these slabs
    /// under another hold of the lock. Used only where a simulated world has planted this bug.
    pub(super) fn publish_unfilled(&self, puts: &mut PutBatch<'_>, filled: &[(usize, Slab)]) {
        let mut published = Vec::new();
        let mut state = self.lock();
        let now = self.timestamps(&mut state);
        for (index, slab) in filled {
            state.slabs_in_flight -= 1;
            let key = puts.batch[*index].key;
            let is_new = state.catalog.find(&key).is_none();
            let unfilled = self.pool.allocate(slab.len()).filter(|_| is_new);
            let first = unfilled.map_or_else(|| slab.clone(), SlabMut::seal);
            self.publish_new(&mut state, puts, *index, &first, now);
            if let Some(found) = state.catalog.find(&key).filter(|_| is_new) {
                let content = state.catalog.entry(found).content;
                published.push((content, state.catalog.content(content).generation, slab));
            }
        }
        self.unlock(state);
        let mut state = self.lock();
        for (content, generation, slab) in published {
            let is_resident = |content: &mut Content| content.slab.is_some();
            if state.catalog.live_content((content, generation)).is_some_and(is_resident) {
                state.put_slab(content, slab.clone(), None);
            }
        }
        drop(state);
        self.notify_movers();
        self.notify_changed();
    }
}
