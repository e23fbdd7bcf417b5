//! A call that waits for the store's lock ends at its deadline, with an outcome for each block.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::sync::{Arc, mpsc};
use std::thread::ThreadId;
use std::time::Duration;

use cascade_block::BlockKey;
use cascade_runtime::{Clock, LeafMutex, SystemClock};
use cascade_store::stages::StageRegistry;
use cascade_store::{
    CallOptions, GetOutcome, ListRequest, PrepareOutcome, Put, PutOutcome, PutSlab, Request, Store,
    StoreConfig, StoreError, ViewOutcome,
};

use crate::blocks::{self, bytes_of, dram, keys};

const BLOCKS: u64 = 300;
/// How long a call may wait beyond its deadline before the test fails.
const LONG: Duration = Duration::from_secs(60);

/// The machine's clock. One thread stops when it asks for the time of day, which a deletion does
/// under the lock.
#[derive(Debug)]
struct StoppingClock {
    stops: LeafMutex<Option<Stop>>,
}

#[derive(Debug)]
struct Stop {
    thread: ThreadId,
    stopped: mpsc::Sender<()>,
    goes_on: mpsc::Receiver<()>,
}

impl Clock for StoppingClock {
    fn monotonic(&self) -> Duration {
        SystemClock.monotonic()
    }

    fn unix_ms(&self) -> u64 {
        let me = std::thread::current().id();
        let stop = self.stops.lock().unwrap().take_if(|it| it.thread == me);
        if let Some(stop) = stop {
            stop.stopped.send(()).expect("the test waits for this");
            stop.goes_on.recv_timeout(4 * LONG).expect("the test lets a deletion go on");
        }
        SystemClock.unix_ms()
    }
}

fn is_late(error: &StoreError) -> bool {
    matches!(error, StoreError::Timeout { .. })
}

fn is_late_put(outcome: &PutOutcome) -> bool {
    matches!(outcome, PutOutcome::Failed(error) if is_late(error))
}

/// Makes each call with a deadline, while another call has the lock.
fn call_all(store: &Store, slabs: Vec<PutSlab>) {
    let options =
        CallOptions { timeout: Some(Duration::from_millis(20)), ..CallOptions::default() };
    let many = keys(0..BLOCKS);
    let puts: Vec<Put<'_>> = many.iter().map(|key| Put::new(*key, b"other")).collect();
    let outcomes = store.put(&puts, options);
    assert!(outcomes.len() == many.len() && outcomes.iter().all(is_late_put), "{outcomes:?}");
    let outcomes = store.put_slabs(slabs, options);
    assert!(outcomes.len() == many.len() && outcomes.iter().all(is_late_put), "{outcomes:?}");
    let prepared = store.prepare_all(&puts, &vec![5; puts.len()], options);
    let is_late_slab = |it: &PrepareOutcome| match it {
        PrepareOutcome::Settled(outcome) => is_late_put(outcome),
        _ => false,
    };
    assert!(prepared.len() == many.len() && prepared.iter().all(is_late_slab));

    let views = store.view(&many, options);
    let is_late_view =
        |it: &ViewOutcome| matches!(it, ViewOutcome::Failed(error) if is_late(error));
    assert!(views.len() == many.len() && views.iter().all(is_late_view), "{views:?}");
    let mut memory = vec![[0_u8; 8]; many.len()];
    let mut buffers: Vec<&mut [u8]> = memory.iter_mut().map(|it| &mut it[..]).collect();
    let gets = store.get(&many, &mut buffers, options);
    let is_late_get = |it: &GetOutcome| matches!(it, GetOutcome::Failed(error) if is_late(error));
    assert!(gets.len() == many.len() && gets.iter().all(is_late_get), "{gets:?}");

    assert!(is_late(&store.reserve(8, options).unwrap_err()));
    assert!(is_late(&store.flush(options).unwrap_err()));
    assert!(is_late(&store.erase(options).unwrap_err()));
    assert!(is_late(&store.find_keys(|_| true, 10, options).unwrap_err()));
    let request = ListRequest { most: 10, ..ListRequest::default() };
    assert!(is_late(&store.list_keys(&request, |_| true, options).unwrap_err()));
    assert!(is_late(&store.explain(&many, None, options).unwrap_err()));

    // With the timeout of the store.
    assert_eq!(store.contains(&many), vec![false; many.len()]);
    assert_eq!(store.contains(&many[..1]), [false]);
    assert!(store.locate(&many).iter().all(Vec::is_empty));
    assert!(store.lookup_prefix(&Request::new(&many)).tiers.is_empty());
    assert!(store.acquire(&Request::new(&many), options).is_empty());
    assert!(store.view_resident(&many, options).is_empty());
    assert!(store.own().peek(&many, options).is_empty());
}

impl StoppingClock {
    fn new() -> Arc<Self> {
        Arc::new(Self { stops: LeafMutex::new(None) })
    }

    /// Makes a call in another thread, while a deletion of this block has the lock. Returns whether
    /// it ended meanwhile.
    fn ends_beside_a_hold(
        &self,
        store: &Store,
        key: &BlockKey,
        call: impl FnOnce() + Send,
    ) -> bool {
        std::thread::scope(|scope| {
            let (stopped, is_stopped) = mpsc::channel();
            let (go_on, goes_on) = mpsc::channel();
            scope.spawn(move || {
                let thread = std::thread::current().id();
                *self.stops.lock().unwrap() = Some(Stop { thread, stopped, goes_on });
                assert_eq!(store.delete(&[*key]), [true]);
            });
            is_stopped.recv_timeout(LONG).expect("a deletion asks for the time of day");
            let (ended, is_ended) = mpsc::channel();
            let caller = scope.spawn(move || {
                call();
                ended.send(()).unwrap();
            });
            let was_in_time = is_ended.recv_timeout(LONG).is_ok();
            // Without this, a call without a deadline would keep the test for ever.
            go_on.send(()).expect("the deletion waits for this");
            caller.join().unwrap();
            was_in_time
        })
    }
}

/// It waited until the timeout of the store, and read the blocks then with its own.
#[test]
fn an_acquire_waits_for_the_lock_until_its_own_deadline() {
    let clock = StoppingClock::new();
    let config = StoreConfig { timeout: 2 * LONG, ..dram(16) };
    let store = Store::open_with(config, &StageRegistry::default(), clock.clone()).unwrap();
    let many = keys(0..BLOCKS);
    blocks::put(&store, &many, 8);
    let options =
        CallOptions { timeout: Some(Duration::from_millis(20)), ..CallOptions::default() };
    let acquire = || assert!(store.acquire(&Request::new(&many), options).is_empty());
    assert!(clock.ends_beside_a_hold(&store, &many[0], acquire));
    let unhurried = CallOptions { timeout: Some(LONG), ..CallOptions::default() };
    let views = store.acquire(&Request::new(&many[1..]), unhurried);
    assert_eq!(views.len(), many.len() - 1);
}

#[test]
fn a_call_that_waits_for_the_lock_ends_at_its_deadline() {
    let clock = StoppingClock::new();
    // That of calls that take none.
    let config = StoreConfig { timeout: Duration::from_millis(20), ..dram(16) };
    let unhurried = CallOptions { timeout: Some(LONG), ..CallOptions::default() };
    let store = Store::open_with(config, &StageRegistry::default(), clock.clone()).unwrap();
    let many = keys(0..BLOCKS);
    let bytes: Vec<_> = many.iter().map(|key| bytes_of(key, 8)).collect();
    let puts: Vec<_> = many.iter().zip(&bytes).map(|(key, bytes)| Put::new(*key, bytes)).collect();
    let outcomes = store.put(&puts, unhurried);
    assert!(outcomes.iter().all(|it| matches!(it, PutOutcome::Stored)));
    let slab = |key: &_| PutSlab::new(*key, store.reserve(8, unhurried).unwrap());
    let slabs: Vec<PutSlab> = keys(1000..1000 + BLOCKS).iter().map(slab).collect();
    let before = store.stats().counters;

    let call = || call_all(&store, slabs);
    let was_in_time = clock.ends_beside_a_hold(&store, &many[0], call);
    assert!(was_in_time, "a call waited for the lock beyond its deadline");

    let after = store.stats().counters;
    assert_eq!(after.put_failures - before.put_failures, 3 * BLOCKS);
    assert_eq!(after.get_failures - before.get_failures, 2 * BLOCKS);
    assert_eq!(after.gets - before.gets, 2 * BLOCKS);
    for (view, bytes) in store.view(&many[1..], unhurried).iter().zip(&bytes[1..]) {
        assert!(
            matches!(view, ViewOutcome::Hit { slab, .. } if slab.host() == Some(&bytes[..])),
            "{view:?}"
        );
    }
    assert!(store.contains(&keys(1000..1000 + BLOCKS)).iter().all(|is_here| !is_here));
}
