//! What follows the window: how long requests that began in it are served on.

use std::thread::{self, ScopedJoinHandle};
use std::time::Duration;

use cascade_runtime::now;

/// How long the original waits for each of its threads after the window, one after another.
pub const THREAD_WAIT: Duration = Duration::from_secs(2);

/// Longest time until the state of a thread is looked at again.
const POLL: Duration = Duration::from_millis(10);

/// Waits for the end of the window, then for each worker for up to `thread_wait`, one after
/// another. Returns at once when all of them have ended, or the run is stopped.
pub(super) fn wait_for_workers(
    workers: &[ScopedJoinHandle<'_, ()>],
    window_left: Duration,
    thread_wait: Duration,
    is_stopped: &dyn Fn() -> bool,
) {
    let wait = |workers: &[ScopedJoinHandle<'_, ()>], until: Duration| {
        while !workers.iter().all(ScopedJoinHandle::is_finished) && !is_stopped() {
            let left = until.saturating_sub(now());
            if left.is_zero() {
                return;
            }
            thread::park_timeout(left.min(POLL));
        }
    };
    wait(workers, now().saturating_add(window_left));
    for worker in workers {
        wait(std::slice::from_ref(worker), now().saturating_add(thread_wait));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use cascade_runtime::SystemClock;
    use tempfile::TempDir;

    use super::*;
    use crate::backend::KvTier;
    use crate::compatible::entry::{EntryName, PIECE_BYTES};
    use crate::compatible::object_file::Unfinished;
    use crate::compatible::waterfall::{ObjectRead, Waterfall, WaterfallSizes};

    const HOUR: Duration = Duration::from_secs(3600);
    const PIECE: u64 = PIECE_BYTES as u64;

    /// Runs workers that end when their sender is dropped.
    fn with_workers(count: usize, test: impl FnOnce(Vec<Sender<()>>, &[ScopedJoinHandle<'_, ()>])) {
        let wait = |held: Receiver<()>| assert!(held.recv().is_err(), "nothing is sent");
        let (senders, receivers): (Vec<_>, Vec<_>) = (0..count).map(|_| channel()).unzip();
        thread::scope(|scope| {
            let start = |receiver| scope.spawn(move || wait(receiver));
            let workers: Vec<_> = receivers.into_iter().map(start).collect();
            test(senders, &workers);
        });
    }

    #[test]
    fn waiting_ends_with_the_last_worker() {
        with_workers(3, |senders, workers| {
            drop(senders);
            wait_for_workers(workers, HOUR, HOUR, &|| false);
            assert!(workers.iter().all(ScopedJoinHandle::is_finished));
        });
    }

    #[test]
    fn each_worker_is_waited_for_after_the_window_in_its_turn() {
        let (window, turn) = (Duration::from_millis(40), Duration::from_millis(30));
        with_workers(3, |senders, workers| {
            let began = now();
            wait_for_workers(workers, window, turn, &|| false);
            // No upper limit: the machine may be busy.
            assert!(now() >= began + window + turn * 3);
            assert!(!workers.iter().any(ScopedJoinHandle::is_finished));
            drop(senders);
        });
    }

    #[test]
    fn a_run_that_is_stopped_waits_for_none() {
        with_workers(2, |senders, workers| {
            wait_for_workers(workers, HOUR, HOUR, &|| true);
            drop(senders);
        });
    }

    fn waterfall(directory: &TempDir, cpu_bytes: u64) -> Waterfall<'static> {
        let sizes = WaterfallSizes { gpu_bytes: 0, cpu_bytes, files_bytes: 1 << 40 };
        Waterfall::new(directory.path(), sizes, 1, &SystemClock).unwrap()
    }

    /// Writes an entry of four pieces, and cuts it while it fills the one of this number.
    fn write(
        waterfall: &Waterfall<'_>,
        name: EntryName,
        cut_at: Option<u64>,
    ) -> Result<KvTier, Unfinished> {
        let mut fill = |number, piece: &mut [u8]| {
            name.fill(waterfall.names(), number, piece);
            if Some(number) == cut_at {
                waterfall.cut();
            }
        };
        let written = waterfall.write(name, 4 * PIECE, &mut fill, &mut Vec::new())?;
        Ok(written.unwrap().tier)
    }

    fn read(
        waterfall: &Waterfall<'_>,
        name: EntryName,
        cut_at: Option<u64>,
    ) -> Result<Option<KvTier>, Unfinished> {
        let mut wrong = None;
        let mut look = |number, piece: &[u8]| {
            wrong = wrong.or_else(|| name.first_wrong(waterfall.names(), number, piece));
            if Some(number) == cut_at {
                waterfall.cut();
            }
        };
        let read = waterfall.read(name, &mut Vec::new(), &mut look)?;
        assert_eq!(wrong, None);
        Ok(match read {
            ObjectRead::Hit { tier, .. } => Some(tier),
            ObjectRead::Miss => None,
        })
    }

    #[test]
    fn an_entry_that_is_cut_is_not_there_and_holds_no_space() {
        let directory = TempDir::new().unwrap();
        for (cpu_bytes, tier) in [(0, KvTier::Storage), (40 * PIECE, KvTier::Cpu)] {
            let waterfall = waterfall(&directory, cpu_bytes);
            let name = EntryName::Context(1);
            let cut = write(&waterfall, name, Some(1)).unwrap_err();
            let Unfinished::Cut { tier: cut_in, bytes } = cut else { panic!("{cut:?}") };
            assert_eq!((cut_in, bytes), (tier, 2 * PIECE));
            assert!(waterfall.contents().iter().all(|it| it.entries == 0 && it.bytes == 0));
            assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
            waterfall.start_window();
            assert_eq!(read(&waterfall, name, None).unwrap(), None);
            assert_eq!(write(&waterfall, name, None).unwrap(), tier);
            // A read that is cut changes nothing, either.
            let cut = read(&waterfall, name, Some(2)).unwrap_err();
            assert!(matches!(cut, Unfinished::Cut { bytes, .. } if bytes == 3 * PIECE), "{cut:?}");
            waterfall.start_window();
            assert_eq!(read(&waterfall, name, None).unwrap(), Some(tier));
        }
    }

    #[test]
    fn an_entry_whose_move_is_cut_stays_where_it_was() {
        let directory = TempDir::new().unwrap();
        // Memory takes one entry: a second one moves it to files.
        let waterfall = waterfall(&directory, 6 * PIECE);
        let (first, second) = (EntryName::Context(1), EntryName::Context(2));
        assert_eq!(write(&waterfall, first, None).unwrap(), KvTier::Cpu);
        waterfall.cut();
        assert!(matches!(write(&waterfall, second, None), Err(Unfinished::Cut { .. })));
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
        waterfall.start_window();
        assert_eq!(read(&waterfall, first, None).unwrap(), Some(KvTier::Cpu));
        assert_eq!(write(&waterfall, second, None).unwrap(), KvTier::Cpu);
        assert_eq!(read(&waterfall, first, None).unwrap(), Some(KvTier::Storage));
        assert_eq!(waterfall.contents()[1].bytes, 4 * PIECE);
    }
}
