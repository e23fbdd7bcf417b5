//! Places for connections: so many at a time, and which one ends when a newcomer needs its place.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;

/// One user other than the node's own and root may have this share of the places of a Unix socket.
const USER_SHARE: usize = 4;

/// A bounded set of connections.
#[derive(Debug)]
pub(super) struct Places {
    most: usize,
    /// How long a connection is idle before a newcomer may have its place.
    patience: Duration,
    open: Mutex<HashMap<u64, Open>>,
}

#[derive(Debug)]
struct Open {
    user: Option<u32>,
    /// Since when it has no request in work: it waits for one, or for its answer to be taken.
    idle_since: Option<Instant>,
    /// When this goes, the connection ends.
    _end: oneshot::Sender<()>,
}

/// A connection's place, until this goes.
#[derive(Debug)]
pub(super) struct Place {
    places: Arc<Places>,
    id: u64,
}

/// Resolves when a newcomer took the place.
pub(super) type Ended = oneshot::Receiver<()>;

impl Places {
    /// With patience, a crowd that comes at once cannot end its own connections before their first
    /// request is there, again and again, so that none is ever served.
    pub(super) fn new(most: usize, patience: Duration) -> Arc<Self> {
        Arc::new(Self { most, patience, open: Mutex::default() })
    }

    /// A place for a connection. When there is none, the connection that has been idle longest
    /// gives its own: whoever sends its request at once is served before that becomes its turn.
    /// None when all are busy or were so just now, or when that is so for a user with its share.
    ///
    /// `id` tells connections apart, `user` is who has only a share of the places.
    pub(super) fn take(self: &Arc<Self>, id: u64, user: Option<u32>) -> Option<(Place, Ended)> {
        let mut open = self.lock();
        let of_user = |one: &Open| user.is_some() && one.user == user;
        let has_share = user.is_some()
            && open.values().filter(|one| of_user(one)).count() >= self.most.div_ceil(USER_SHARE);
        if has_share || open.len() >= self.most {
            let candidates = open.iter().filter(|(_, one)| !has_share || of_user(one));
            let idle = candidates.filter_map(|(id, one)| Some((one.idle_since?, *id)));
            let (since, longest) = idle.min()?;
            if since.elapsed() < self.patience {
                return None;
            }
            open.remove(&longest);
        }
        let (end, ended) = oneshot::channel();
        open.insert(id, Open { user, idle_since: Some(Instant::now()), _end: end });
        Some((Place { places: Arc::clone(self), id }, ended))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Open>> {
        // It changes in single steps.
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Place {
    /// A request is in work: the place is not given to a newcomer.
    pub(super) fn note_busy(&self) {
        self.note(None);
    }

    /// No request is in work.
    pub(super) fn note_idle(&self) {
        self.note(Some(Instant::now()));
    }

    fn note(&self, idle_since: Option<Instant>) {
        if let Some(open) = self.places.lock().get_mut(&self.id) {
            open.idle_since = idle_since;
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.places.lock().remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_newcomer_takes_the_place_that_has_been_idle_longest() {
        let places = Places::new(3, Duration::ZERO);
        let (first, mut first_ended) = places.take(1, None).unwrap();
        let (second, mut second_ended) = places.take(2, None).unwrap();
        let (_third, mut third_ended) = places.take(3, None).unwrap();
        first.note_busy();
        let (_fourth, _fourth_ended) = places.take(4, None).unwrap();
        assert!(first_ended.try_recv() == Err(oneshot::error::TryRecvError::Empty), "busy");
        assert!(second_ended.try_recv() == Err(oneshot::error::TryRecvError::Closed));
        assert!(third_ended.try_recv() == Err(oneshot::error::TryRecvError::Empty), "younger");
        drop(second);
        assert_eq!(places.lock().len(), 3, "a place that another has is not given back");
        first.note_idle();
    }

    #[test]
    fn nobody_has_a_place_when_all_are_busy() {
        let places = Places::new(2, Duration::ZERO);
        let held: Vec<_> = (0..2).map(|id| places.take(id, None).unwrap()).collect();
        for (place, _) in &held {
            place.note_busy();
        }
        assert!(places.take(2, None).is_none());
        drop(held);
        assert!(places.take(3, None).is_some());
    }

    #[test]
    fn a_connection_that_was_busy_just_now_keeps_its_place() {
        let places = Places::new(1, Duration::MAX);
        let _held = places.take(0, None).unwrap();
        assert!(places.take(1, None).is_none());
    }

    #[test]
    fn a_user_with_its_share_takes_only_from_itself() {
        let places = Places::new(8, Duration::ZERO);
        let (_other, mut other_ended) = places.take(1, Some(7)).unwrap();
        let mut own: Vec<_> = (2..6).filter_map(|id| places.take(id, Some(8))).collect();
        assert_eq!(places.lock().len(), 3, "two of eight are a quarter");
        assert_eq!(other_ended.try_recv(), Err(oneshot::error::TryRecvError::Empty));
        let last = own.pop().unwrap();
        for (place, _) in &own {
            place.note_busy();
        }
        last.0.note_busy();
        let (third, _) = own.pop().unwrap();
        third.note_busy();
        assert!(places.take(9, Some(8)).is_none(), "both are busy");
        assert!(places.take(10, None).is_some(), "others have room");
    }
}
