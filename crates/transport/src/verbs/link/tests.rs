//! Links over the stand-in: how much work they give a device, and what they make of its errors.
#![expect(unsafe_code, reason = "registers memory")]

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use cascade_runtime::SystemClock;

use super::super::error::Status;
use super::super::fake;
use super::super::settings::VerbsSettings;
use super::*;
use crate::Access;

fn soon() -> Deadline {
    Deadline::after(&SystemClock, Duration::from_secs(30))
}

fn at_once() -> Deadline {
    Deadline::after(&SystemClock, Duration::from_millis(1))
}

/// A link of the stand-in to itself, and memory on both sides.
struct World {
    link: Link,
    local: RegisteredMemory,
    remote: RegisteredMemory,
    bytes: Arc<[AtomicU8]>,
    device: Arc<Device>,
}

/// One queue pair with a chain of 32.
fn one() -> VerbsSettings {
    VerbsSettings { queue_pairs: 1, ..VerbsSettings::default() }
}

fn world(settings: &VerbsSettings) -> World {
    let device = fake::device(settings);
    let link = OpenLink::open(&device).unwrap();
    let address = link.address();
    let link = link.connect(&address).unwrap();
    let (local, _) = memory(&device, 1 << 16);
    let (remote, bytes) = memory(&device, 1 << 16);
    World { link, local, remote, bytes, device }
}

/// The byte at an offset.
fn pattern(at: usize) -> u8 {
    u8::try_from(at % 251).unwrap()
}

fn memory(device: &Arc<Device>, count: usize) -> (RegisteredMemory, Arc<[AtomicU8]>) {
    let bytes: Arc<[AtomicU8]> = (0..count).map(|at| AtomicU8::new(pattern(at))).collect();
    let base = NonNull::from(&*bytes).cast();
    let access = Access { read: true, write: true };
    // SAFETY: the owner keeps the bytes, to which no reference but of atomics exists.
    let memory =
        unsafe { RegisteredMemory::register(device, base, count, access, Arc::clone(&bytes)) };
    (memory.unwrap(), bytes)
}

impl World {
    fn moves(&self, count: usize) -> impl ExactSizeIterator<Item = Move> {
        (0..count).map(|at| {
            let at = (at * 16 % (1 << 16)) as u64;
            Move::new(Direction::Write, (&self.local, at), (&self.remote.remote(), at), 16).unwrap()
        })
    }

    fn write(&self, count: usize, deadline: Deadline) -> Result<Posted, VerbsError> {
        self.link.post(Direction::Write, self.moves(count), &[], deadline)
    }

    fn state(&self) -> &fake::State {
        fake::state(&self.device)
    }

    /// Doorbells, requests and signals so far.
    fn counts(&self) -> [u64; 3] {
        let state = self.state();
        [&state.doorbells, &state.requests, &state.signals].map(|it| it.load(Ordering::Relaxed))
    }
}

#[test]
fn a_batch_rings_once_for_32_requests_and_has_one_completion() {
    for (count, doorbells) in [(1, 1), (31, 1), (32, 1), (33, 2), (1024, 32), (1538, 49)] {
        let world = world(&one());
        world.link.wait(&world.write(count, soon()).unwrap(), soon()).unwrap();
        // A queue of 2,048 has one more signal when half of it was posted without one.
        let signals = 1 + u64::from(count > 1024);
        assert_eq!(world.counts(), [doorbells, count as u64, signals], "{count} requests");
    }
}

#[test]
fn several_queue_pairs_ring_no_more_and_have_a_completion_each() {
    let world = world(&VerbsSettings::default());
    world.link.wait(&world.write(1538, soon()).unwrap(), soon()).unwrap();
    assert_eq!(world.counts(), [49, 1538, 4]);
    // A short batch uses one queue pair.
    world.link.wait(&world.write(20, soon()).unwrap(), soon()).unwrap();
    assert_eq!(world.counts(), [50, 1558, 5]);
}

#[test]
fn a_queue_never_holds_more_than_it_has_room_for() {
    let world = world(&VerbsSettings { chain: 8, depth: 32, ..one() });
    world.link.wait(&world.write(4000, soon()).unwrap(), soon()).unwrap();
    assert!(world.state().most_held.load(Ordering::Relaxed) <= 32);
    // Without completions it takes what fits, and then the deadline passes.
    world.state().is_held.store(true, Ordering::Relaxed);
    let [_, before, _] = world.counts();
    let error = world.write(4000, at_once()).unwrap_err();
    assert!(matches!(error, VerbsError::Deadline { .. }), "{error}");
    let [_, after, _] = world.counts();
    assert!((25..=32).contains(&(after - before)), "{} requests", after - before);
    assert!(!world.link.is_open(), "a batch that was posted in part closes the link");
}

#[test]
fn a_wait_that_times_out_may_be_called_again() {
    let world = world(&one());
    world.state().is_held.store(true, Ordering::Relaxed);
    let posted = world.write(10, soon()).unwrap();
    let error = world.link.wait(&posted, at_once()).unwrap_err();
    assert!(matches!(error, VerbsError::Deadline { .. }), "{error}");
    assert!(world.link.is_open());
    world.state().is_held.store(false, Ordering::Relaxed);
    let second = world.write(10, soon()).unwrap();
    world.link.wait(&posted, soon()).unwrap();
    world.link.wait(&second, soon()).unwrap();
}

#[test]
fn a_completion_wakes_the_thread_that_waits_for_its_event() {
    let world = Arc::new(world(&one()));
    world.state().is_held.store(true, Ordering::Relaxed);
    let posted = world.write(10, soon()).unwrap();
    let waiting = {
        let world = Arc::clone(&world);
        let spawned =
            cascade_runtime::thread::Builder::new().spawn(move || world.link.wait(&posted, soon()));
        spawned.unwrap()
    };
    assert!(world.link.wait(&posted, at_once()).is_err());
    world.state().is_held.store(false, Ordering::Relaxed);
    let second = world.write(10, soon()).unwrap();
    waiting.join().unwrap().unwrap();
    world.link.wait(&second, soon()).unwrap();
}

#[test]
fn each_status_of_a_completion_is_an_error() {
    // The failed request has no signal of its own in the middle of a batch.
    for (at, status) in (1..=23).map(|status| (1 + status * 7 % 100, status)) {
        let world = world(&VerbsSettings::default());
        world.state().status.store(status, Ordering::Relaxed);
        world.state().fail_at.store(u64::try_from(at).unwrap(), Ordering::Relaxed);
        let posted = world.write(100, soon());
        let result = posted.and_then(|posted| world.link.wait(&posted, soon()));
        let expected = VerbsError::Request { status: Status(status), vendor: 0 };
        assert_eq!(result, Err(expected.clone()), "request {at}");
        assert!(!world.link.is_open());
        let after = world.write(1, soon());
        assert_eq!(after.map(|_| ()), Err(expected), "the first error stays");
    }
}

#[test]
fn a_batch_that_completed_before_an_error_has_succeeded() {
    let world = world(&one());
    let posted = world.write(10, soon()).unwrap();
    world.state().status.store(12, Ordering::Relaxed);
    world.state().fail_at.store(15, Ordering::Relaxed);
    let failed = world.write(10, soon()).unwrap();
    assert!(world.link.wait(&failed, soon()).is_err());
    world.link.wait(&posted, soon()).unwrap();
}

#[test]
fn a_refused_post_closes_the_link() {
    let world = world(&VerbsSettings::default());
    world.state().refusal.store(libc::ENOMEM, Ordering::Relaxed);
    let error = world.write(100, soon()).unwrap_err();
    assert_eq!(error, VerbsError::Call { call: "ibv_post_send", code: libc::ENOMEM });
    assert!(!world.link.is_open());
}

#[test]
fn a_flushed_write_ends_with_one_read_on_each_queue_pair() {
    let world = world(&VerbsSettings { queue_pairs: 2, ..VerbsSettings::default() });
    let flushes = [FlushPlace::start_of(&world.remote.remote()).unwrap()];
    let posted = world.link.post(Direction::Write, world.moves(100), &flushes, soon()).unwrap();
    world.link.wait(&posted, soon()).unwrap();
    assert_eq!(world.counts(), [4, 102, 2]);
    let written = world.bytes[..1600].iter().map(|byte| byte.load(Ordering::Relaxed));
    assert!(written.eq((0..1600).map(pattern)), "nothing else is changed");
}

/// A device that still had a queue pair could write into memory that is used for other things.
#[test]
fn a_link_that_is_closed_or_fails_has_no_queue_pairs_left() {
    let objects = |world: &World| world.state().objects.load(Ordering::Relaxed);
    let closed = world(&VerbsSettings::default());
    closed.state().is_held.store(true, Ordering::Relaxed);
    let before = objects(&closed);
    let posted = closed.write(100, soon()).unwrap();
    closed.link.close();
    assert_eq!(objects(&closed), before - 4);
    assert_eq!(closed.link.wait(&posted, soon()), Err(VerbsError::Closed));

    let failed = world(&VerbsSettings::default());
    failed.state().status.store(10, Ordering::Relaxed);
    failed.state().fail_at.store(1, Ordering::Relaxed);
    let before = objects(&failed);
    // All four queue pairs go, and not only the one whose request failed.
    failed.write(1, soon()).and_then(|posted| failed.link.wait(&posted, soon())).unwrap_err();
    assert_eq!(objects(&failed), before - 4);
}

/// Everything that was made of the device is destroyed before it: the stand-in checks that.
#[test]
fn a_link_that_is_dropped_with_requests_in_flight_leaves_nothing() {
    let world = world(&VerbsSettings::default());
    world.state().is_held.store(true, Ordering::Relaxed);
    let posted = world.write(100, soon()).unwrap();
    assert!(world.link.wait(&posted, at_once()).is_err());
    let device = Arc::clone(&world.device);
    drop(world);
    assert_eq!(fake::state(&device).objects.load(Ordering::Relaxed), 0);
}
