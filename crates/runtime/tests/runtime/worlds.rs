//! Worlds: equal seeds run equally, bugs are found, time is virtual, crashes forget.
#![cfg(feature = "simulated")]
#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use cascade_runtime::simulated::{Domain, Ending, Policy, Report, Settings, World};
use cascade_runtime::{
    Condvar, Deadline, LeafMutex, Mutex, Plant, RwLock, SystemClock, fill_random, is_planted,
    is_simulated, now, random_u64, sleep, thread, unix_ms, yield_now,
};

/// Seeds in which a planted bug has to be found.
const SEEDS: u64 = 200;

/// Threads that move money between accounts, some of them slowly.
fn transfers() {
    let accounts = Arc::new([const { Mutex::new(100_i64) }; 4]);
    let done = Arc::new((Mutex::new(0), Condvar::new()));
    for number in 0..5 {
        let (accounts, done) = (Arc::clone(&accounts), Arc::clone(&done));
        thread::spawn(move || {
            for round in 0..20 {
                let random = random_u64().unwrap();
                let from = usize::try_from(random % 4).unwrap();
                let to = usize::try_from(random / 4 % 4).unwrap();
                *accounts[from].lock().unwrap() -= 1;
                if (round + number) % 7 == 0 {
                    sleep(Duration::from_micros(random % 50));
                }
                *accounts[to].lock().unwrap() += 1;
            }
            *done.0.lock().unwrap() += 1;
            done.1.notify_one();
        });
    }
    let mut ended = done.0.lock().unwrap();
    while *ended < 5 {
        ended = done.1.wait(ended).unwrap();
    }
    let sum: i64 = accounts.iter().map(|account| *account.lock().unwrap()).sum();
    assert_eq!(sum, 400);
    World::current().unwrap().note(u64::from(*accounts[0].lock().unwrap() > 100));
}

fn finishes(seed: u64, body: impl FnOnce() + Send + 'static) -> Report {
    let report = World::run(Settings::from_seed(seed), body);
    assert_eq!(report.ending, Ending::Finished, "seed {seed}");
    assert_eq!(report.panics, [""; 0], "seed {seed}");
    report
}

#[test]
fn a_seed_gives_the_same_run_each_time() {
    let mut hashes = Vec::new();
    for seed in 0..40 {
        let first = finishes(seed, transfers);
        // Locks lie at other addresses now. The order of addresses must not matter.
        let shift = vec![vec![0_u8; 1 << (seed % 13)]; 3];
        assert_eq!(first, finishes(seed, transfers), "seed {seed}");
        drop(shift);
        hashes.push(first.event_hash);
    }
    hashes.sort_unstable();
    hashes.dedup();
    assert_eq!(hashes.len(), 40, "seeds differ");
}

#[test]
fn a_trace_changes_nothing_and_shows_where_runs_part() {
    let run = |extra: bool, trace_every| {
        let settings = Settings { trace_every, ..Settings::from_seed(3) };
        World::run(settings, move || {
            transfers();
            if extra {
                World::current().unwrap().note(1);
            }
            transfers();
        })
    };
    let traced = run(false, 10);
    assert_eq!(traced.trace.len() as u64, traced.decisions / 10);
    assert_eq!(traced.event_hash, run(false, 0).event_hash);
    let other = run(true, 10);
    let parts = traced.trace.iter().zip(&other.trace).position(|(one, other)| one != other);
    assert!((1..traced.trace.len()).contains(&parts.unwrap()), "after the first transfers");
}

#[test]
fn worlds_on_several_os_threads_do_not_influence_each_other() {
    let alone: Vec<Report> = (0..8).map(|seed| finishes(seed, transfers)).collect();
    let beside: Vec<_> =
        (0..8).map(|seed| std::thread::spawn(move || finishes(seed, transfers))).collect();
    // The calling thread is in no world meanwhile.
    let outside = Mutex::new(0);
    for _ in 0..1000 {
        *outside.lock().unwrap() += 1;
        assert!(!is_simulated());
    }
    for (alone, beside) in alone.iter().zip(beside) {
        assert_eq!(*alone, beside.join().unwrap());
    }
}

/// A queue whose consumer can lose a wake-up: it unlocks between its check and its wait.
fn queue_with_plant() {
    let queue = Arc::new((Mutex::new(Vec::new()), Condvar::new()));
    let consumer = Arc::clone(&queue);
    let consumer = thread::Builder::new().name("consumer".to_owned()).spawn(move || {
        let mut taken = 0;
        let mut items = consumer.0.lock().unwrap();
        while taken < 10 {
            if items.pop().is_some() {
                taken += 1;
                continue;
            }
            if is_planted(Plant::LostWakeUp) {
                drop(items);
                items = consumer.0.lock().unwrap();
            }
            items = consumer.1.wait(items).unwrap();
        }
    });
    for item in 0..10 {
        queue.0.lock().unwrap().push(item);
        queue.1.notify_one();
    }
    consumer.unwrap().join().unwrap();
}

#[test]
fn a_lost_wake_up_is_found_by_both_policies_and_only_where_it_is_planted() {
    let policies = [
        Policy::Uniform { gap_mean: 1 },
        Policy::Uniform { gap_mean: 4 },
        Policy::Priorities { change_gap_mean: 20 },
    ];
    for policy in policies {
        let settings = |seed| Settings { seed, policy, ..Settings::default() };
        let mut found = 0;
        for seed in 0..SEEDS {
            let clean = World::run(settings(seed), queue_with_plant);
            assert_eq!(clean.ending, Ending::Finished, "{policy:?}, seed {seed}");
            let planted = Settings { plant: Some(Plant::LostWakeUp), ..settings(seed) };
            match World::run(planted, queue_with_plant).ending {
                Ending::Finished => {}
                Ending::Deadlock(what) => {
                    assert!(what.contains("`consumer` waits for a notification at "), "{what}");
                    assert!(what.contains("`main` waits for the end of `consumer` at "), "{what}");
                    found += 1;
                }
                other => panic!("{policy:?}, seed {seed}: {other:?}"),
            }
        }
        assert!(found > 0, "{policy:?}: no seed of {SEEDS} loses the wake-up");
    }
}

/// Two threads that take two locks in opposite orders.
fn opposite_orders() {
    let locks = Arc::new((Mutex::new(()), Mutex::new(())));
    let other = Arc::clone(&locks);
    let other = thread::Builder::new().name("other".to_owned()).spawn(move || {
        let _second = other.1.lock().unwrap();
        let _first = other.0.lock().unwrap();
    });
    let first = locks.0.lock().unwrap();
    let second = locks.1.lock().unwrap();
    drop((first, second));
    other.unwrap().join().unwrap();
}

#[test]
fn a_deadlock_is_reported_with_who_waits_for_what() {
    let reports = (0..SEEDS).map(|seed| World::run(Settings::from_seed(seed), opposite_orders));
    let endings: Vec<Ending> = reports.map(|report| report.ending).collect();
    assert!(endings.contains(&Ending::Finished), "some orders do not deadlock");
    let deadlock = endings.iter().find_map(|ending| match ending {
        Ending::Deadlock(what) => Some(what),
        _ => None,
    });
    let lines: Vec<&str> = deadlock.expect("some orders deadlock").lines().collect();
    assert_eq!(lines.len(), 2, "{lines:?}");
    let line = |name: &str| lines.iter().find(|it| it.starts_with(name)).unwrap().to_owned();
    let (main, other) = (line("`main`"), line("`other`"));
    assert!(main.starts_with("`main` waits for a mutex held by `other` since "), "{main}");
    assert!(other.starts_with("`other` waits for a mutex held by `main` since "), "{other}");
    assert!(main.matches("worlds.rs:").count() == 2, "both places: {main}");
}

#[test]
fn a_reader_that_reads_again_deadlocks_with_a_writer_between() {
    let body = || {
        let lock = Arc::new(RwLock::new(0));
        let writing = Arc::clone(&lock);
        let writer = thread::spawn(move || *writing.write().unwrap() += 1);
        let outer = lock.read().unwrap();
        let inner = lock.read().unwrap();
        assert_eq!(*outer, *inner);
        drop((outer, inner));
        writer.join().unwrap();
        assert_eq!(*lock.read().unwrap(), 1);
    };
    let reports: Vec<Report> =
        (0..SEEDS).map(|seed| World::run(Settings::from_seed(seed), body)).collect();
    let deadlocks = reports.iter().filter(|it| matches!(it.ending, Ending::Deadlock(_))).count();
    let finished = reports.iter().filter(|it| it.ending.is_finished()).count();
    assert!(deadlocks > 0 && finished > 0, "{deadlocks} deadlocks, {finished} finished");
    assert_eq!(deadlocks + finished, reports.len());
}

#[test]
fn time_outs_fire_in_virtual_time() {
    const DAY: Duration = Duration::from_secs(24 * 60 * 60);
    let report = finishes(1, || {
        let begin = now();
        let (lock, condition) = (Mutex::new(()), Condvar::new());
        let (guard, waited) = condition.wait_timeout(lock.lock().unwrap(), DAY).unwrap();
        assert!(waited.timed_out());
        drop(guard);
        assert!((DAY..DAY + Duration::from_millis(1)).contains(&now().saturating_sub(begin)));
        let before_ms = unix_ms();
        sleep(DAY);
        assert!((unix_ms() - before_ms).abs_diff(86_400_000) <= 1);

        // Sleepers wake in the order of their times, not of their starts.
        let woken = Arc::new(LeafMutex::new(Vec::new()));
        let sleepers: Vec<_> = [30, 10, 20]
            .map(|hours| {
                let woken = Arc::clone(&woken);
                thread::spawn(move || {
                    sleep(Duration::from_secs(hours * 3600));
                    woken.lock().unwrap().push(hours);
                })
            })
            .into_iter()
            .collect();
        for sleeper in sleepers {
            sleeper.join().unwrap();
        }
        assert_eq!(*woken.lock().unwrap(), [10, 20, 30]);

        let world = World::current().unwrap();
        let (before, before_ms) = (now(), unix_ms());
        world.stall(DAY);
        world.shift_wall_clock(-2 * 86_400_000);
        assert_eq!(now().saturating_sub(before), DAY);
        assert_eq!(before_ms - unix_ms(), 86_400_000);
    });
    assert!(report.now > 4 * DAY, "{report:?}");
}

#[test]
fn a_lock_is_waited_for_until_a_deadline_in_virtual_time() {
    const LONG: Duration = Duration::from_secs(3600);
    let (mut in_time, mut late) = (0, 0);
    for seed in 0..50 {
        let outcomes = Arc::new([AtomicU64::new(0), AtomicU64::new(0)]);
        let counted = Arc::clone(&outcomes);
        finishes(seed, move || {
            let lock = Arc::new(Mutex::new(0));
            let waiters: Vec<_> = (0..4)
                .map(|hours| {
                    let (lock, counted) = (Arc::clone(&lock), Arc::clone(&counted));
                    thread::spawn(move || {
                        let deadline = Deadline::after(&SystemClock, LONG * hours);
                        let guard = lock.lock_until(deadline, &SystemClock);
                        counted[usize::from(guard.is_none())].fetch_add(1, Ordering::Relaxed);
                        assert!(guard.is_some() || deadline.has_passed(&SystemClock));
                        let Some(guard) = guard else { return };
                        *guard.unwrap() += 1;
                    })
                })
                .collect();
            let guard = lock.lock().unwrap();
            sleep(LONG + LONG / 2);
            drop(guard);
            for waiter in waiters {
                waiter.join().unwrap();
            }
            assert_eq!(*lock.lock().unwrap(), counted[0].load(Ordering::Relaxed));
        });
        in_time += outcomes[0].load(Ordering::Relaxed);
        late += outcomes[1].load(Ordering::Relaxed);
    }
    assert!(in_time > 0 && late > 0, "{in_time} in time, {late} late");
    assert_eq!(in_time + late, 200);
}

#[test]
fn a_notification_comes_before_the_time_out_and_a_stale_timer_does_nothing() {
    for seed in 0..50 {
        finishes(seed, || {
            let pair = Arc::new((Mutex::new(false), Condvar::new()));
            let notifying = Arc::clone(&pair);
            let notifier = thread::spawn(move || {
                sleep(Duration::from_secs(1));
                *notifying.0.lock().unwrap() = true;
                notifying.1.notify_one();
            });
            let (guard, waited) = pair
                .1
                .wait_timeout_while(pair.0.lock().unwrap(), Duration::from_secs(5), |set| !*set)
                .unwrap();
            assert!(*guard && !waited.timed_out());
            drop(guard);
            let begin = now();
            // Longer than what was left of the five seconds.
            sleep(Duration::from_secs(100));
            assert!(now().saturating_sub(begin) >= Duration::from_secs(100));
            notifier.join().unwrap();
        });
    }
}

#[test]
fn a_wait_without_a_length_times_out_and_one_that_was_notified_does_not() {
    for seed in 0..20 {
        finishes(seed, || {
            let pair = Arc::new((Mutex::new(0), Condvar::new()));
            let notifying = Arc::clone(&pair);
            let notifier = thread::spawn(move || {
                for _ in 0..3000 {
                    *notifying.0.lock().unwrap() += 1;
                    notifying.1.notify_one();
                }
            });
            let mut count = pair.0.lock().unwrap();
            let (mut zero, mut timed_out) = (true, 0);
            while *count < 3000 {
                let time = Duration::from_secs(if zero { 0 } else { 1_000_000 });
                zero = !zero;
                let (guard, waited) = pair.1.wait_timeout(count, time).unwrap();
                timed_out += u32::from(waited.timed_out());
                count = guard;
            }
            assert!(timed_out > 0, "waits without a length time out");
            drop(count);
            notifier.join().unwrap();
            assert!(now() < Duration::from_secs(1_000_000), "no other wait does");
        });
    }
}

/// Counts its drops.
struct Dropped(Arc<AtomicU64>);

impl Drop for Dropped {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn a_crash_forgets_coroutines_at_any_point() {
    let dropped = Arc::new(AtomicU64::new(0));
    let mut reached = Vec::new();
    for seed in 0..60 {
        let (drops, steps) = (Arc::clone(&dropped), Arc::new(AtomicU64::new(0)));
        let stepped = Arc::clone(&steps);
        finishes(seed, move || {
            let world = World::current().unwrap();
            let node = Domain(1);
            let shared = Arc::new((Mutex::new(0_u64), Condvar::new()));
            let workers: Vec<_> = ["one", "two"]
                .map(|name| {
                    let (drops, stepped) = (Dropped(Arc::clone(&drops)), Arc::clone(&stepped));
                    let shared = Arc::clone(&shared);
                    world.spawn_in(node, name, move || {
                        let _forgotten = drops;
                        // A thread of the node belongs to the node.
                        thread::spawn(|| sleep(Duration::from_secs(1_000_000)));
                        loop {
                            *shared.0.lock().unwrap() += 1;
                            stepped.fetch_add(1, Ordering::Relaxed);
                            let guard = shared.0.lock().unwrap();
                            let pause = Duration::from_micros(3);
                            drop(shared.1.wait_timeout(guard, pause).unwrap());
                        }
                    })
                })
                .into_iter()
                .collect();
            world.kill_after(seed * 3, node);
            assert!(world.wait_for_kill(Duration::from_secs(10)));
            assert_eq!(world.live_threads(node), 0);
            let after = stepped.load(Ordering::Relaxed);
            sleep(Duration::from_secs(1));
            assert_eq!(stepped.load(Ordering::Relaxed), after, "nothing runs after the crash");
            for worker in workers {
                let killed = worker.join().unwrap_err();
                assert!(killed.downcast_ref::<thread::Killed>().is_some());
            }
        });
        reached.push(steps.load(Ordering::Relaxed));
    }
    assert_eq!(dropped.load(Ordering::Relaxed), 0, "a killed thread drops nothing");
    reached.sort_unstable();
    reached.dedup();
    assert!(reached.len() > 10, "crashes at different points: {reached:?}");
}

#[test]
fn a_lock_of_a_killed_thread_stays_locked() {
    let report = World::run(Settings::default(), || {
        let world = World::current().unwrap();
        let lock = Arc::new(Mutex::new(()));
        let held = Arc::clone(&lock);
        drop(world.spawn_in(Domain(1), "victim", move || {
            let _guard = held.lock().unwrap();
            sleep(Duration::from_secs(1000));
        }));
        sleep(Duration::from_secs(1));
        world.kill(Domain(1));
        drop(lock.lock());
    });
    let Ending::Deadlock(what) = report.ending else { panic!("{:?}", report.ending) };
    assert!(what.starts_with("`main` waits for a mutex held by `victim`, which was killed, since"));
}

#[test]
fn panics_are_recorded_also_when_they_are_caught() {
    let report = World::run(Settings::default(), || {
        let lock = Arc::new(Mutex::new(0));
        let locked = Arc::clone(&lock);
        let panicking = thread::Builder::new().name("panicking".to_owned()).spawn(move || {
            let _guard = locked.lock().unwrap();
            panic!("on purpose");
        });
        let payload = panicking.unwrap().join().unwrap_err();
        assert_eq!(payload.downcast_ref::<&str>(), Some(&"on purpose"));
        assert!(lock.lock().is_err(), "poisoned");
        panic!("the end {}", 7);
    });
    assert_eq!(report.ending, Ending::Panicked("the end 7".to_owned()));
    assert_eq!(report.panics.len(), 2, "{:?}", report.panics);
    assert!(report.panics[0].starts_with("`panicking` at "), "{:?}", report.panics);
    assert!(report.panics[0].ends_with(": on purpose"), "{:?}", report.panics);
    assert!(report.panics[0].contains("worlds.rs:"), "{:?}", report.panics);
    // A world that ended so does no harm to a later one.
    finishes(1, transfers);
}

/// Waits while it is dropped.
struct Sleepy;

impl Drop for Sleepy {
    fn drop(&mut self) {
        sleep(Duration::from_secs(1));
    }
}

#[test]
fn a_wait_while_a_thread_unwinds_is_reported() {
    let report = World::run(Settings::default(), || {
        let _sleepy = Sleepy;
        panic!("on purpose");
    });
    assert!(matches!(&report.ending, Ending::WaitWhileUnwinding(what) if what.contains("`main`")));
    finishes(1, transfers);
}

#[test]
fn a_livelock_is_reported_with_who_ran() {
    let settings = Settings { decisions_max: 1000, ..Settings::default() };
    let report = World::run(settings, || {
        loop {
            yield_now();
        }
    });
    assert!(
        matches!(&report.ending, Ending::Livelock(what) if what.contains("`main` is runnable"))
    );
}

#[test]
fn a_thread_that_polls_starves_nobody() {
    for seed in 0..50 {
        finishes(seed, || {
            let done = Arc::new(Mutex::new(false));
            let setting = Arc::clone(&done);
            let setter = thread::spawn(move || *setting.lock().unwrap() = true);
            // No yield: a scheduler by priorities has to see the starvation.
            while !*done.lock().unwrap() {}
            setter.join().unwrap();
        });
    }
}

#[test]
fn spurious_wake_ups_and_failed_starts_come_as_often_as_set() {
    let settings = Settings { spurious_one_in: 5, spawn_fails_one_in: 4, ..Settings::default() };
    let report = World::run(settings, || {
        let mut failed = 0;
        for _ in 0..100 {
            match thread::Builder::new().spawn(|| ()) {
                Ok(started) => started.join().unwrap(),
                Err(error) => {
                    assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
                    failed += 1;
                }
            }
        }
        assert!((10..45).contains(&failed), "{failed} of 100 starts");

        let pair = Arc::new((Mutex::new(0), Condvar::new()));
        let waiting = Arc::clone(&pair);
        drop(World::current().unwrap().spawn_in(Domain(1), "waiting", move || {
            let mut woken = waiting.0.lock().unwrap();
            loop {
                woken = waiting.1.wait(woken).unwrap();
                *woken += 1;
            }
        }));
        for _ in 0..200 {
            yield_now();
        }
        let woken = *pair.0.lock().unwrap();
        assert!(woken > 5, "{woken} spurious wake-ups");
    });
    assert_eq!(report.ending, Ending::Finished);
}

#[test]
fn a_wait_without_a_limit_under_a_lock_is_listed() {
    let report = finishes(1, || {
        let outer = Mutex::new(());
        let guard = outer.lock().unwrap();
        thread::spawn(|| ()).join().unwrap();
        drop(guard);
        thread::spawn(|| ()).join().unwrap();
    });
    let [listed] = &report.waits_under_lock[..] else { panic!("{:?}", report.waits_under_lock) };
    assert!(listed.starts_with("a wait at ") && listed.contains(" holds the lock of "), "{listed}");
}

#[test]
fn a_lock_that_another_os_thread_holds_is_waited_for() {
    let lock = Arc::new(Mutex::new(0));
    let shared = Arc::clone(&lock);
    let (started, start) = std::sync::mpsc::channel();
    let guard = lock.lock().unwrap();
    let world = std::thread::spawn(move || {
        finishes(1, move || {
            started.send(()).unwrap();
            *shared.lock().unwrap() += 1;
        });
    });
    start.recv_timeout(Duration::from_secs(60)).unwrap();
    drop(guard);
    world.join().unwrap();
    assert_eq!(*lock.lock().unwrap(), 1);
}

#[test]
fn randomness_comes_from_the_seed() {
    let draw = |seed| {
        let drawn = Arc::new(LeafMutex::new([0_u8; 13]));
        let filled = Arc::clone(&drawn);
        finishes(seed, move || fill_random(&mut *filled.lock().unwrap()).unwrap());
        *drawn.lock().unwrap()
    };
    assert_eq!(draw(1), draw(1));
    assert_ne!(draw(1), draw(2));
}
