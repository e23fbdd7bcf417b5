//! What the facade costs outside of a world, and what a switch and a lock cost in one.

use std::hint::black_box;
use std::time::Duration;

use cascade_runtime::simulated::{Ending, Policy, Settings, World};
use cascade_runtime::{Condvar, Mutex, thread, yield_now};
use criterion::{Criterion, criterion_group, criterion_main};

fn outside(c: &mut Criterion) {
    let mut group = c.benchmark_group("outside");
    let (std_lock, std_condition) = (std::sync::Mutex::new(0_u64), std::sync::Condvar::new());
    let (lock, condition) = (Mutex::new(0_u64), Condvar::new());
    group.bench_function("std_lock", |b| {
        b.iter(|| *black_box(&std_lock).lock().expect("not poisoned") += 1);
    });
    group.bench_function("lock", |b| {
        b.iter(|| *black_box(&lock).lock().expect("not poisoned") += 1);
    });
    group.bench_function("std_notify", |b| b.iter(|| black_box(&std_condition).notify_one()));
    group.bench_function("notify", |b| b.iter(|| black_box(&condition).notify_one()));
    // From the first world of the process on, each call asks whether its thread is in one.
    World::run(Settings::default(), || ());
    group.bench_function("lock_after_a_world", |b| {
        b.iter(|| *black_box(&lock).lock().expect("not poisoned") += 1);
    });
    group.finish();
}

/// The time of a world that does something `count` times.
#[expect(clippy::disallowed_methods, reason = "real time is what is measured")]
fn timed(policy: Policy, count: u64, body: fn(u64)) -> Duration {
    let settings = Settings { policy, decisions_max: u64::MAX, ..Settings::default() };
    let begin = std::time::Instant::now();
    let report = World::run(settings, move || body(count));
    assert_eq!(report.ending, Ending::Finished);
    begin.elapsed()
}

/// By priorities each yield is a switch.
fn switches(count: u64) {
    let yields = move |share: u64| (0..share).for_each(|_| yield_now());
    let others: Vec<_> = (0..9).map(|_| thread::spawn(move || yields(count / 10))).collect();
    yields(count / 10);
    for other in others {
        other.join().expect("no panic");
    }
}

fn locks(count: u64) {
    let lock = Mutex::new(0_u64);
    (0..count).for_each(|_| *black_box(&lock).lock().expect("not poisoned") += 1);
}

fn in_a_world(c: &mut Criterion) {
    let mut group = c.benchmark_group("in_a_world");
    let priorities = Policy::Priorities { change_gap_mean: 1000 };
    let uniform = Policy::Uniform { gap_mean: 4 };
    group.bench_function("switch", |b| b.iter_custom(|count| timed(priorities, count, switches)));
    group.bench_function("lock", |b| b.iter_custom(|count| timed(priorities, count, locks)));
    group.bench_function("lock_uniform", |b| b.iter_custom(|count| timed(uniform, count, locks)));
    group.finish();
}

criterion_group!(benches, outside, in_a_world);
criterion_main!(benches);
