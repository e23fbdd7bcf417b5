//! Outside of a world the crate behaves like `std`, also while a world runs beside.

use std::sync::{Arc, TryLockError};
use std::time::Duration;

use cascade_runtime::{
    Clock, Condvar, Deadline, DeadlineMutex, ManualClock, Mutex, Plant, RwLock, SystemClock,
    fill_random, is_planted, is_simulated, now, random_u64, sleep, thread,
};

const LONG: Duration = Duration::from_secs(60);

#[test]
fn a_mutex_excludes_and_is_poisoned_by_a_panic() {
    let lock = Arc::new(Mutex::new(1));
    let guard = lock.lock().unwrap();
    assert!(matches!(lock.try_lock(), Err(TryLockError::WouldBlock)));
    assert_eq!(format!("{lock:?}"), "Mutex { data: <locked>, poisoned: false }");
    drop(guard);
    *lock.try_lock().unwrap() += 1;

    let locked = Arc::clone(&lock);
    let panicked = thread::spawn(move || {
        let _guard = locked.lock().unwrap();
        panic!("on purpose");
    });
    let payload = panicked.join().unwrap_err();
    assert_eq!(payload.downcast_ref::<&str>(), Some(&"on purpose"));
    assert!(lock.is_poisoned());
    assert_eq!(*lock.lock().unwrap_err().into_inner(), 2);
    assert!(matches!(lock.try_lock(), Err(TryLockError::Poisoned(_))));
    assert_eq!(format!("{lock:?}"), "Mutex { data: 2, poisoned: true }");
    let lock = Arc::into_inner(lock).unwrap();
    assert_eq!(lock.into_inner().unwrap_err().into_inner(), 2);
}

#[test]
fn a_reader_writer_lock_is_poisoned_by_a_writer_only() {
    let lock = Arc::new(RwLock::new(1));
    let reads = (lock.read().unwrap(), lock.read().unwrap());
    assert_eq!((*reads.0, *reads.1), (1, 1));
    drop(reads);
    let locked = Arc::clone(&lock);
    let reader = move || -> () {
        let _guard = locked.read().unwrap();
        panic!("on purpose");
    };
    thread::spawn(reader).join().unwrap_err();
    assert!(!lock.is_poisoned());
    *lock.write().unwrap() = 2;
    let locked = Arc::clone(&lock);
    let writer = move || -> () {
        let _guard = locked.write().unwrap();
        panic!("on purpose");
    };
    thread::spawn(writer).join().unwrap_err();
    assert!(lock.is_poisoned());
    assert_eq!(*lock.read().unwrap_err().into_inner(), 2);
    assert_eq!(*lock.write().unwrap_err().into_inner(), 2);
}

#[test]
fn a_wait_times_out_or_is_notified() {
    let pair = Arc::new((Mutex::new(false), Condvar::new()));
    let begin = now();
    let (guard, waited) = pair
        .1
        .wait_timeout_while(pair.0.lock().unwrap(), Duration::from_millis(20), |set| !*set)
        .unwrap();
    assert!(
        waited.timed_out() && !*guard && now().saturating_sub(begin) >= Duration::from_millis(20)
    );
    drop(guard);

    let notifying = Arc::clone(&pair);
    let notifier = thread::Builder::new().name("notifier".to_owned()).spawn(move || {
        *notifying.0.lock().unwrap() = true;
        notifying.1.notify_all();
    });
    let mut guard = pair.0.lock().unwrap();
    while !*guard {
        guard = pair.1.wait(guard).unwrap();
    }
    let deadline = Deadline::after(&SystemClock, LONG);
    let (guard, waited) =
        pair.1.wait_timeout_while(guard, deadline.remaining(&SystemClock), |set| !*set).unwrap();
    assert!(*guard && !waited.timed_out());
    drop(guard);
    notifier.unwrap().join().unwrap();
}

#[test]
fn a_wait_returns_the_poison_of_its_mutex() {
    let pair = Arc::new((Mutex::new(false), Condvar::new()));
    let panicking = Arc::clone(&pair);
    let guard = pair.0.lock().unwrap();
    let panicked = thread::spawn(move || -> () {
        // Can lock only while the other one waits.
        let mut guard = panicking.0.lock().unwrap();
        *guard = true;
        panicking.1.notify_one();
        panic!("on purpose");
    });
    let mut locked = Ok(guard);
    while let Ok(guard) = locked {
        locked = pair.1.wait(guard);
    }
    assert!(*locked.unwrap_err().into_inner());
    panicked.join().unwrap_err();
}

#[test]
fn a_wait_until_a_deadline_obeys_the_clock_that_it_is_given() {
    let (lock, condition) = (Mutex::new(()), Condvar::new());
    let clock = ManualClock::default();
    let deadline = Deadline::after(&clock, Duration::from_secs(1));
    let (guard, waited) = condition.wait_until(lock.lock().unwrap(), deadline, &clock).unwrap();
    assert!(!waited.timed_out(), "the clock stands still");
    clock.advance(Duration::from_secs(1));
    let (_guard, waited) = condition.wait_until(guard, deadline, &clock).unwrap();
    assert!(waited.timed_out());
}

#[test]
fn a_mutex_is_waited_for_until_a_deadline() {
    let lock = Mutex::new(1);
    let clock = ManualClock::default();
    let deadline = Deadline::after(&clock, Duration::from_secs(1));
    let guard = lock.lock().unwrap();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| lock.lock_until(deadline, &clock).is_none());
        clock.advance(Duration::from_secs(1));
        assert!(waiter.join().unwrap(), "the deadline has passed");
    });
    drop(guard);
    let guard = lock.lock_until(deadline, &clock).expect("a free lock is taken also then");
    let guard = guard.unwrap();
    let later = Deadline::after(&clock, Duration::from_secs(1));
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| *lock.lock_until(later, &clock).unwrap().unwrap());
        drop(guard);
        assert_eq!(waiter.join().unwrap(), 1);
    });
}

#[test]
fn a_deadline_mutex_is_waited_for_until_the_deadline() {
    let lock = Arc::new(DeadlineMutex::new(1));
    let mut guard = lock.lock(Deadline::after(&SystemClock, LONG), &SystemClock).unwrap();
    *guard += 1;
    let soon = Deadline::after(&SystemClock, Duration::from_millis(10));
    assert!(lock.lock(soon, &SystemClock).is_none());
    let waiting = Arc::clone(&lock);
    let waiter = thread::spawn(move || {
        *waiting.lock(Deadline::after(&SystemClock, LONG), &SystemClock).unwrap()
    });
    drop(guard);
    assert_eq!(waiter.join().unwrap(), 2);
}

#[test]
fn time_passes_and_randomness_differs() {
    let begin = SystemClock.monotonic();
    sleep(Duration::from_millis(2));
    assert!(SystemClock.monotonic().saturating_sub(begin) >= Duration::from_millis(2));
    assert!(SystemClock.unix_ms() > 1_700_000_000_000);
    let mut bytes = [0; 1000];
    fill_random(&mut bytes).unwrap();
    assert!(bytes[900..].iter().any(|byte| *byte != 0), "the end is filled too");
    assert_ne!(random_u64().unwrap(), random_u64().unwrap());
    assert!(!is_simulated());
    assert!(Plant::ALL.into_iter().all(|plant| !is_planted(plant)));
}

#[test]
fn plants_are_known_by_their_names() {
    for plant in Plant::ALL {
        assert_eq!(plant.name().parse(), Ok(plant));
    }
    let unknown = "no-plant".parse::<Plant>().unwrap_err();
    assert!(unknown.to_string().contains("lost-wake-up, early-publish"), "{unknown}");
}
