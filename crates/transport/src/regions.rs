//! The registered regions of an endpoint.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use cascade_runtime::{Deadline, RwLock, SystemClock, sleep};

use crate::limits::REGIONS_MAX;
use crate::piece::{Direction, Place, RegionId};
use crate::region::{Region, Span};
use crate::{Refusal, TransportError};

/// How long `unregister` sleeps between two looks at whether a batch still uses the region.
const UNREGISTER_PAUSE: Duration = Duration::from_millis(1);

/// The regions at one moment. Keeps their memory: a batch holds one while it runs, and looks up
/// nothing else.
#[derive(Debug, Clone, Default)]
pub(crate) struct Snapshot(Arc<Vec<Option<Arc<Region>>>>);

impl Snapshot {
    pub(crate) fn region(&self, id: RegionId) -> Result<&Region, Refusal> {
        let region = self.0.get(id.0 as usize).and_then(Option::as_deref);
        region.ok_or(Refusal::UnknownRegion)
    }

    /// A region that a device keeps registered.
    pub(crate) fn shared(&self, id: RegionId) -> Result<Arc<Region>, Refusal> {
        let region = self.0.get(id.0 as usize).and_then(Option::as_ref);
        region.map(Arc::clone).ok_or(Refusal::UnknownRegion)
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
        let slots = self.0.iter().zip(0_u32..);
        slots.filter_map(|(slot, id)| Some((RegionId(id), slot.as_deref()?)))
    }
}

/// The table of regions. A change makes a new snapshot, so that batches take no lock for a piece.
#[derive(Debug, Default)]
pub(crate) struct Regions(RwLock<Snapshot>);

impl Regions {
    pub(crate) fn snapshot(&self) -> Snapshot {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn register(&self, region: Region) -> Result<RegionId, TransportError> {
        let mut current = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let count = current.0.len();
        if count >= REGIONS_MAX {
            let what = "the number of regions";
            return Err(TransportError::TooLarge { what, value: count + 1, limit: REGIONS_MAX });
        }
        let mut slots = (*current.0).clone();
        slots.push(Some(Arc::new(region)));
        *current = Snapshot(Arc::new(slots));
        let id = u32::try_from(count).expect("REGIONS_MAX fits");
        Ok(RegionId(id))
    }

    /// Removes a region, and waits until no batch uses it. `release` lets go of what else holds it;
    /// a batch that was posted just before may hold it again.
    pub(crate) fn unregister(
        &self,
        id: RegionId,
        deadline: Deadline,
        release: impl Fn(),
    ) -> Result<(), TransportError> {
        let removed = {
            let mut current = self.0.write().unwrap_or_else(PoisonError::into_inner);
            let mut slots = (*current.0).clone();
            let removed = slots.get_mut(id.0 as usize).and_then(Option::take);
            *current = Snapshot(Arc::new(slots));
            removed
        };
        let Some(region) = removed else {
            return Ok(());
        };
        release();
        // Each batch that may use the region holds a snapshot that holds it.
        while Arc::strong_count(&region) > 1 {
            if deadline.has_passed(&SystemClock) {
                return Err(TransportError::InUse(id));
            }
            sleep(UNREGISTER_PAUSE);
            release();
        }
        Ok(())
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
