//! The registered regions of an endpoint.

use std::collections::BTreeMap;
use std::sync::{Arc, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use cascade_runtime::{Deadline, LeafMutex, RwLock, SystemClock, sleep};

use crate::limits::REGIONS_MAX;
use crate::piece::{Direction, Place, RegionId};
use crate::region::{Region, Span};
use crate::{Refusal, TransportError};

/// How long `unregister` sleeps between two looks at whether a batch still uses the region.
const UNREGISTER_PAUSE: Duration = Duration::from_millis(1);

/// A slot of the table.
#[derive(Debug, Clone)]
enum Slot {
    Used(RegionId, Arc<Region>),
    /// It has the ID of its next region.
    Free(RegionId),
    /// All IDs of the slot were used.
    Retired,
}

/// The regions at one moment. Keeps their memory: a batch holds one while it runs, and looks up
/// nothing else.
#[derive(Debug, Clone, Default)]
pub(crate) struct Snapshot(Arc<Vec<Slot>>);

impl Snapshot {
    fn find(&self, id: RegionId) -> Result<&Arc<Region>, Refusal> {
        match self.0.get(id.slot()) {
            Some(Slot::Used(used, region)) if *used == id => Ok(region),
            _ => Err(Refusal::UnknownRegion),
        }
    }

    pub(crate) fn region(&self, id: RegionId) -> Result<&Region, Refusal> {
        self.find(id).map(Arc::as_ref)
    }

    /// A region that a device keeps registered.
    pub(crate) fn shared(&self, id: RegionId) -> Result<Arc<Region>, Refusal> {
        self.find(id).map(Arc::clone)
    }

    /// The bytes of a place, for this process.
    pub(crate) fn local(&self, place: Place, bytes: u64) -> Result<Span, Refusal> {
        self.region(place.region)?.span(place.offset, bytes)
    }

    /// The bytes of a place, for a peer that reads or writes them.
    pub(crate) fn for_peer(
        &self,
        place: Place,
        bytes: u64,
        direction: Direction,
    ) -> Result<Span, Refusal> {
        let region = self.region(place.region)?;
        let is_allowed = match direction {
            Direction::Read => region.access().read,
            Direction::Write => region.access().write,
        };
        if !is_allowed {
            return Err(Refusal::NotAllowed);
        }
        region.span(place.offset, bytes)
    }

    /// All regions, with their IDs.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (RegionId, &Region)> {
        self.0.iter().filter_map(|slot| match slot {
            Slot::Used(id, region) => Some((*id, &**region)),
            _ => None,
        })
    }
}

/// The table of regions. A change makes a new snapshot, so that batches take no lock for a piece.
#[derive(Debug, Default)]
pub(crate) struct Regions {
    current: RwLock<Snapshot>,
    /// Regions that were removed while batches used them.
    leaving: LeafMutex<BTreeMap<RegionId, Weak<Region>>>,
}

impl Regions {
    pub(crate) fn snapshot(&self) -> Snapshot {
        self.current.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn register(&self, region: Region) -> Result<RegionId, TransportError> {
        let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
        let mut slots = (*current.0).clone();
        let region = Arc::new(region);
        let mut free = slots.iter_mut().filter_map(|slot| match slot {
            Slot::Free(id) => Some((*id, slot)),
            _ => None,
        });
        let id = if let Some((id, slot)) = free.next() {
            *slot = Slot::Used(id, region);
            id
        } else {
            let (what, value) = ("the number of regions", slots.len() + 1);
            let limit = TransportError::TooLarge { what, value, limit: REGIONS_MAX };
            let id = RegionId::first_of(u16::try_from(slots.len()).map_err(|_| limit)?);
            slots.push(Slot::Used(id, region));
            id
        };
        *current = Snapshot(Arc::new(slots));
        Ok(id)
    }

    /// Removes a region, and waits until no batch uses it. `release` lets go of what else holds it;
    /// a batch that was posted just before may hold it again. After a time-out, another call waits
    /// again.
    pub(crate) fn unregister(
        &self,
        id: RegionId,
        deadline: Deadline,
        release: impl Fn(),
    ) -> Result<(), TransportError> {
        self.remove(id);
        release();
        // Each batch that may use the region holds a snapshot that holds it.
        while self.is_leaving(id) {
            if deadline.has_passed(&SystemClock) {
                return Err(TransportError::InUse(id));
            }
            sleep(UNREGISTER_PAUSE);
            release();
        }
        Ok(())
    }

    /// Removes a region from the table. Its slot gets another ID, or none if it had all of them.
    fn remove(&self, id: RegionId) {
        let removed = {
            let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
            let Ok(region) = current.find(id).map(Arc::clone) else {
                return;
            };
            let mut slots = (*current.0).clone();
            slots[id.slot()] = id.next_of_slot().map_or(Slot::Retired, Slot::Free);
            *current = Snapshot(Arc::new(slots));
            self.leaving().insert(id, Arc::downgrade(&region));
            region
        };
        // Its owner may be dropped here, which may wait: no lock is held.
        drop(removed);
    }

    /// Whether a batch still uses a region that was removed.
    fn is_leaving(&self, id: RegionId) -> bool {
        let mut leaving = self.leaving();
        leaving.retain(|_, region| region.strong_count() > 0);
        leaving.contains_key(&id)
    }

    fn leaving(&self) -> MutexGuard<'_, BTreeMap<RegionId, Weak<Region>>> {
        self.leaving.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Access;

    fn soon() -> Deadline {
        Deadline::after(&SystemClock, Duration::from_millis(20))
    }

    #[test]
    fn an_unregistered_region_is_unknown_and_its_id_is_not_used_again() {
        let regions = Regions::default();
        let first = regions.register(Region::shared(4096, Access::BOTH).unwrap()).unwrap();
        let place = Place { region: first, offset: 0 };
        assert!(regions.snapshot().local(place, 4096).is_ok());
        regions.unregister(first, soon(), || {}).unwrap();
        assert_eq!(regions.snapshot().local(place, 1).unwrap_err(), Refusal::UnknownRegion);
        let second = regions.register(Region::shared(4096, Access::BOTH).unwrap()).unwrap();
        assert_ne!(first, second);
        assert_eq!(first.slot(), second.slot());
        assert_eq!(regions.snapshot().local(place, 1).unwrap_err(), Refusal::UnknownRegion);
        let known: Vec<_> = regions.snapshot().iter().map(|(id, _)| id).collect();
        assert_eq!(known, [second]);
    }

    #[test]
    fn a_region_in_use_keeps_its_memory() {
        let regions = Regions::default();
        let id = regions.register(Region::shared(4096, Access::BOTH).unwrap()).unwrap();
        let in_use = regions.snapshot();
        let refused = regions.unregister(id, soon(), || {}).unwrap_err();
        assert!(matches!(refused, TransportError::InUse(it) if it == id), "{refused}");
        in_use.region(id).unwrap().fill(0, b"still mapped").unwrap();
        // Its slot may have another region meanwhile.
        let other = regions.register(Region::shared(4096, Access::BOTH).unwrap()).unwrap();
        assert!(regions.unregister(id, soon(), || {}).is_err(), "a second call waits too");
        drop(in_use);
        regions.unregister(id, soon(), || {}).unwrap();
        assert!(regions.snapshot().region(other).is_ok());
    }

    #[test]
    fn a_slot_that_had_all_its_ids_is_not_used_again() {
        let mut id = RegionId::first_of(3);
        let mut count = 1_u32;
        while let Some(next) = id.next_of_slot() {
            assert_eq!(next.slot(), 3);
            assert!(next > id);
            (id, count) = (next, count + 1);
        }
        assert_eq!(count, 1 << 16);
    }

    #[test]
    fn peers_get_only_the_access_that_was_given() {
        let regions = Regions::default();
        let id = regions.register(Region::shared(4096, Access::READ).unwrap()).unwrap();
        let (snapshot, place) = (regions.snapshot(), Place { region: id, offset: 0 });
        assert!(snapshot.for_peer(place, 1, Direction::Read).is_ok());
        let refused = snapshot.for_peer(place, 1, Direction::Write).unwrap_err();
        assert_eq!(refused, Refusal::NotAllowed);
    }
}
