//! A bug for the simulator to find: blocks that are published before their bytes are complete.

use cascade_memory::{Slab, SlabMut};

use super::PutBatch;
use crate::calls::put_check::Admission;
use crate::core::catalog::Content;

impl PutBatch<'_> {
    /// Publishes the blocks of a put with slabs that nobody has filled, and replaces these slabs
    /// under another hold of the lock. Used only where a simulated world has planted this bug.
    pub(super) fn publish_unfilled(&mut self, filled: &[(usize, Slab)]) {
        let core = self.core;
        let mut published = Vec::new();
        let mut state = core.lock();
        let admission = Admission::new(core, &mut state);
        for (index, slab) in filled {
            state.memory.slabs_in_flight -= 1;
            let key = self.batch[*index].key;
            let is_new = state.catalog.find(&key).is_none();
            let unfilled = core.pool.allocate(slab.len()).filter(|_| is_new);
            let first = unfilled.map_or_else(|| slab.clone(), SlabMut::seal);
            self.publish_new(&mut state, *index, &first, admission);
            if let Some(found) = state.catalog.find(&key).filter(|_| is_new) {
                let content = state.catalog.entry(found).content;
                published.push((content, state.catalog.content(content).generation, slab));
            }
        }
        core.unlock(state);
        let mut state = core.lock();
        for (content, generation, slab) in published {
            let is_resident = |content: &mut Content| content.slab.is_some();
            if state.catalog.live_content((content, generation)).is_some_and(is_resident) {
                state.put_slab(content, slab.clone(), None);
            }
        }
        drop(state);
        core.notify_movers();
        core.notify_changed();
    }
}
