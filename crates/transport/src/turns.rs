//! Turns of large frames: while several peers move them, each has a few served at once, however
//! many connections it has.

use std::collections::{BTreeMap, VecDeque};
use std::sync::PoisonError;
use std::time::Duration;

use cascade_runtime::{Condvar, Mutex, MutexGuard, now};

use crate::limits::LARGE_FRAMES_MAX;
use crate::peer::EndpointId;

/// How often a thread that waits looks whether its connection has ended, and who is served.
const LOOK: Duration = Duration::from_millis(50);
/// A peer counts as served for this time after its last frame, in which its next one comes.
const LINGER: Duration = Duration::from_millis(100);

/// The large frames that an endpoint serves.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    lines: Mutex<BTreeMap<EndpointId, Line>>,
    /// A frame has ended, or begun before others that wait.
    changed: Condvar,
}

/// The large frames of one peer.
#[derive(Debug, Default)]
struct Line {
    served: usize,
    /// Frames that wait, in their order.
    waiting: VecDeque<u64>,
    last: u64,
    /// When the last one ended.
    ended: Duration,
}

impl Line {
    fn is_served(&self, now: Duration) -> bool {
        self.served > 0 || now < self.ended + LINGER
    }
}

/// A large frame while it is served.
#[derive(Debug)]
pub(crate) struct Turn<'a> {
    turns: &'a Turns,
    peer: EndpointId,
}

impl Turns {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<EndpointId, Line>> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until a large frame of a peer may be served: at once if fewer than
    /// `LARGE_FRAMES_MAX` of its frames are, or if no other peer has any. `None` if its connection
    /// ends before.
    pub(crate) fn take(&self, peer: EndpointId, has_ended: impl Fn() -> bool) -> Option<Turn<'_>> {
        let number = {
            let mut lines = self.lock();
            let line = lines.entry(peer).or_default();
            line.last += 1;
            line.waiting.push_back(line.last);
            line.last
        };
        loop {
            let at = now();
            let mut lines = self.lock();
            if begin(&mut lines, (peer, number), at) {
                if lines.get(&peer).is_some_and(|line| !line.waiting.is_empty()) {
                    self.changed.notify_all();
                }
                return Some(Turn { turns: self, peer });
            }
            let waited = self.changed.wait_timeout(lines, LOOK);
            drop(waited.unwrap_or_else(PoisonError::into_inner).0);
            if has_ended() {
                if let Some(line) = self.lock().get_mut(&peer) {
                    line.waiting.retain(|it| *it != number);
                }
                self.changed.notify_all();
                return None;
            }
        }
    }
}

/// Takes a frame from its line if it may be served.
fn begin(
    lines: &mut BTreeMap<EndpointId, Line>,
    (peer, number): (EndpointId, u64),
    now: Duration,
) -> bool {
    lines.retain(|_, line| line.is_served(now) || !line.waiting.is_empty());
    let others = lines.iter().any(|(of, line)| *of != peer && line.is_served(now));
    let Some(line) = lines.get_mut(&peer) else { return false };
    let is_first = line.waiting.front() == Some(&number);
    let is_due = is_first && (line.served < LARGE_FRAMES_MAX || !others);
    if is_due {
        line.waiting.pop_front();
        line.served += 1;
    }
    is_due
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let at = now();
        let mut lines = self.turns.lock();
        if let Some(line) = lines.get_mut(&self.peer) {
            line.served -= 1;
            line.ended = at;
        }
        let is_awaited = lines.values().any(|line| !line.waiting.is_empty());
        drop(lines);
        if is_awaited {
            self.turns.changed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GREEDY: EndpointId = EndpointId([1; 16]);
    const OTHER: EndpointId = EndpointId([2; 16]);

    fn add(lines: &mut BTreeMap<EndpointId, Line>, peer: EndpointId) -> u64 {
        let line = lines.entry(peer).or_default();
        line.last += 1;
        line.waiting.push_back(line.last);
        line.last
    }

    /// Frames of the greedy peer that begin at this time.
    fn begin_all(lines: &mut BTreeMap<EndpointId, Line>, frames: &[u64], at: Duration) -> usize {
        frames.iter().filter(|frame| begin(lines, (GREEDY, **frame), at)).count()
    }

    #[test]
    fn a_peer_alone_has_all_of_its_frames_served() {
        let mut lines = BTreeMap::new();
        let frames: Vec<_> = (0..16).map(|_| add(&mut lines, GREEDY)).collect();
        assert_eq!(begin_all(&mut lines, &frames, Duration::ZERO), 16);
    }

    #[test]
    fn beside_another_peer_it_has_a_few() {
        let mut lines = BTreeMap::new();
        let at = Duration::from_secs(9);
        let other = add(&mut lines, OTHER);
        assert!(begin(&mut lines, (OTHER, other), at));
        let frames: Vec<_> = (0..16).map(|_| add(&mut lines, GREEDY)).collect();
        assert_eq!(begin_all(&mut lines, &frames, at), LARGE_FRAMES_MAX);
        // One ends, and the one that has waited longest follows.
        lines.get_mut(&GREEDY).unwrap().served -= 1;
        let rest = &frames[LARGE_FRAMES_MAX..];
        assert!(!begin(&mut lines, (GREEDY, rest[1]), at), "it is not the first");
        assert_eq!(begin_all(&mut lines, rest, at), 1);
        // Between two frames of the other one nothing changes, and once it is silent all follow.
        let line = lines.get_mut(&OTHER).unwrap();
        (line.served, line.ended) = (0, at);
        assert_eq!(begin_all(&mut lines, &rest[1..], at + LINGER / 2), 0);
        assert_eq!(begin_all(&mut lines, &rest[1..], at + LINGER), rest.len() - 1);
    }

    #[test]
    fn a_connection_that_ends_while_it_waits_leaves_its_line() {
        let turns = Turns::default();
        let _other = turns.take(OTHER, || false).unwrap();
        let held: Vec<_> =
            (0..LARGE_FRAMES_MAX).map(|_| turns.take(GREEDY, || false).unwrap()).collect();
        assert!(turns.take(GREEDY, || true).is_none());
        drop(held);
        assert!(turns.take(GREEDY, || false).is_some(), "it waits for nobody");
    }
}
