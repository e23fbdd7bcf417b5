//! Threads that do each iteration of their work at the same time.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Barrier;
use std::time::Duration;

use super::failed;
use crate::MeasureError;
use crate::node::machine_ns;

/// Runs each worker in a thread of its own, with the number of the iteration. The threads begin
/// each iteration together, after `before` was called, while none of them works. Returns how long
/// each took, from the first begin to the last end.
pub(super) fn in_step<W>(
    workers: Vec<W>,
    iterations: u64,
    mut before: impl FnMut(u64) -> Result<(), MeasureError>,
) -> Result<Vec<Duration>, MeasureError>
where
    W: FnMut(u64) -> Result<(), MeasureError> + Send,
{
    let barrier = Barrier::new(workers.len() + 1);
    let mut prepared = Ok(());
    let spans = std::thread::scope(|threads| {
        let run = |worker| threads.spawn(|| one(worker, iterations, &barrier));
        let threads: Vec<_> = workers.into_iter().map(run).collect();
        for iteration in 0..iterations {
            if prepared.is_ok() {
                let called = catch_unwind(AssertUnwindSafe(|| before(iteration)));
                prepared = called.unwrap_or_else(|_| Err(failed("a limit's sample panicked")));
            }
            barrier.wait();
            barrier.wait();
        }
        let join = |thread: std::thread::ScopedJoinHandle<'_, _>| thread.join();
        threads.into_iter().map(join).collect::<Result<Vec<_>, _>>()
    });
    prepared?;
    let spans = spans.map_err(|_| failed("a thread panicked"))?;
    let spans = spans.into_iter().collect::<Result<Vec<_>, MeasureError>>()?;
    let took = |at: usize| {
        let begin = spans.iter().map(|spans| spans[at].0).min().unwrap_or(0);
        let end = spans.iter().map(|spans| spans[at].1).max().unwrap_or(0);
        Duration::from_nanos(end - begin)
    };
    Ok((0..usize::try_from(iterations).map_err(failed)?).map(took).collect())
}

/// Begin and end of each iteration of one worker. After a failure it only meets the others.
fn one(
    mut worker: impl FnMut(u64) -> Result<(), MeasureError>,
    iterations: u64,
    barrier: &Barrier,
) -> Result<Vec<(u64, u64)>, MeasureError> {
    let mut spans = Ok(vec![]);
    for iteration in 0..iterations {
        barrier.wait();
        if let Ok(spans_so_far) = &mut spans {
            let begin = machine_ns();
            let worked = catch_unwind(AssertUnwindSafe(|| worker(iteration)));
            spans_so_far.push((begin, machine_ns()));
            match worked {
                Ok(Ok(())) => {}
                Ok(Err(error)) => spans = Err(error),
                Err(_) => spans = Err(failed("a thread panicked")),
            }
        }
        barrier.wait();
    }
    spans
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    #[test]
    fn every_worker_does_every_iteration() {
        let sum = AtomicU64::new(0);
        let work = |iteration| {
            sum.fetch_add(iteration, Ordering::Relaxed);
            Ok(())
        };
        assert_eq!(in_step(vec![work; 3], 4, |_| Ok(())).unwrap().len(), 4);
        assert_eq!(sum.into_inner(), 3 * 6);
    }

    #[test]
    fn a_worker_that_fails_or_panics_does_not_keep_the_others() {
        for is_panic in [false, true] {
            let worker = |fails: bool| {
                move |iteration| match (fails && iteration == 1, is_panic) {
                    (true, false) => Err(failed("on purpose")),
                    (true, true) => panic!("on purpose"),
                    _ => Ok(()),
                }
            };
            assert!(in_step(vec![worker(true), worker(false)], 4, |_| Ok(())).is_err());
        }
    }

    #[test]
    fn what_comes_before_an_iteration_runs_while_no_worker_does() {
        let (begun, ended) = (AtomicU64::new(0), AtomicU64::new(0));
        let work = |_| {
            begun.fetch_add(1, Ordering::Relaxed);
            std::thread::yield_now();
            ended.fetch_add(1, Ordering::Relaxed);
            Ok(())
        };
        let before = |iteration| {
            let counts = [&begun, &ended].map(|count| count.load(Ordering::Relaxed));
            assert_eq!(counts, [2 * iteration; 2]);
            Ok(())
        };
        in_step(vec![work; 2], 50, before).unwrap();
    }

    #[test]
    fn a_failure_before_an_iteration_ends_the_workers() {
        for is_panic in [false, true] {
            let before = |iteration| match (iteration, is_panic) {
                (1, false) => Err(failed("on purpose")),
                (1, true) => panic!("on purpose"),
                _ => Ok(()),
            };
            assert!(in_step(vec![|_| Ok(()); 2], 4, before).is_err());
        }
    }
}
