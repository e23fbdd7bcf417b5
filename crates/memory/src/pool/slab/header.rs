//! Headers of slabs: shared by all clones of a slab, and used again for later slabs.
//!
//! An `Arc` for each slab would allocate memory for each block that is put, and for each block that
//! a client leases. A thread keeps some of the headers that it dropped last, so that batch after
//! batch uses the same ones: no lock, and no cache line that other threads write. A thread that
//! drops more than it allocates passes them on in batches.
//!
//! A header belongs to one process, and its memory to one owner at a time: the references of a
//! slab, then the list that the last reference puts it on. So nothing that other processes write
//! has an effect on it, and no reference can see it as the header of a later slab.
#![expect(unsafe_code, reason = "counts the references to memory that it allocates")]

use std::cell::RefCell;
use std::mem::MaybeUninit;
use std::ops::Deref;
use std::ptr::NonNull;

use cascade_runtime::LeafMutex;

use super::SlabState;
use crate::sync::{AtomicUsize, Ordering};

/// Most unused headers of a thread: 26 KiB.
const UNUSED_MAX: usize = 2 * BATCH;
/// Headers that are passed on at a time.
const BATCH: usize = 128;
/// Most batches that no thread has: half a megabyte.
const BATCHES_MAX: usize = 32;

/// The memory of a header without a value.
pub(crate) type Unused<T> = Box<MaybeUninit<Header<T>>>;

/// A value whose headers are used again.
pub(crate) trait Reused: Sized {
    /// An unused header, if there is one.
    fn take_unused() -> Option<Unused<Self>>;

    /// Keeps the memory of a header, or frees it.
    fn keep_unused(memory: Unused<Self>);
}

thread_local! {
    static UNUSED: RefCell<Vec<Unused<SlabState>>> = const { RefCell::new(Vec::new()) };
}

/// Batches of unused headers for any thread. Nothing waits for the lock: a child that is forked
/// while another thread holds it would wait for ever.
static BATCHES: LeafMutex<Vec<Vec<Unused<SlabState>>>> = LeafMutex::new(Vec::new());

// No value is dropped while a list is borrowed or the lock is held, so neither is used twice at a
// time.
impl Reused for SlabState {
    fn take_unused() -> Option<Unused<Self>> {
        let take = |unused: &RefCell<Vec<Unused<Self>>>| {
            let mut unused = unused.borrow_mut();
            if unused.is_empty()
                && let Ok(mut batches) = BATCHES.try_lock()
            {
                unused.extend(batches.pop().into_iter().flatten());
            }
            unused.pop()
        };
        // A thread that is ending has no list any more.
        UNUSED.try_with(take).ok().flatten()
    }

    /// Frees the memory if there is much of it, or if the thread is ending.
    fn keep_unused(memory: Unused<Self>) {
        let keep = |unused: &RefCell<Vec<Unused<Self>>>| {
            let mut unused = unused.borrow_mut();
            if unused.len() >= UNUSED_MAX {
                let batch = unused.split_off(UNUSED_MAX - BATCH);
                if let Ok(mut batches) = BATCHES.try_lock()
                    && batches.len() < BATCHES_MAX
                {
                    batches.push(batch);
                }
            }
            unused.push(memory);
        };
        UNUSED.try_with(keep).unwrap_or_default();
    }
}

pub(crate) struct Header<T> {
    references: AtomicUsize,
    value: T,
}

/// Memory of a header: one for each slab, whatever the number of its clones.
pub(crate) const HEADER_BYTES: usize = size_of::<Header<SlabState>>();

// `docs/sizing.md` names it.
#[cfg(not(loom))]
const _: () = assert!(HEADER_BYTES == 96);

/// A counted reference to a value. The last one drops the value.
pub(crate) struct HeaderRef<T: Reused>(NonNull<Header<T>>);

// SAFETY: a reference gives shared access to the value, or exclusive access if it is the only one,
// from whichever thread has it. So the value has to be both `Send` and `Sync`, as for an `Arc`.
unsafe impl<T: Reused + Send + Sync> Send for HeaderRef<T> {}
// SAFETY: as above.
unsafe impl<T: Reused + Send + Sync> Sync for HeaderRef<T> {}

impl<T: Reused> HeaderRef<T> {
    /// The first reference to a new value.
    pub(crate) fn new(value: T) -> Self {
        let memory = T::take_unused().unwrap_or_else(Box::new_uninit);
        let header = Header { references: AtomicUsize::new(1), value };
        Self(NonNull::from(Box::leak(Box::write(memory, header))))
    }

    fn header(&self) -> &Header<T> {
        // SAFETY: the header lives until its last reference is dropped, and this is one. The only
        // `&mut` to it borrows the only reference mutably.
        unsafe { self.0.as_ref() }
    }

    /// Whether this is the only reference. It stays so while the caller has it exclusively: a new
    /// reference is a clone of one that exists.
    pub(crate) fn is_only(&self) -> bool {
        // Acquire, paired with the Release in `drop`: the accesses of other references are over.
        self.header().references.load(Ordering::Acquire) == 1
    }

    /// The value, if this is the only reference to it.
    pub(crate) fn get_mut(&mut self) -> Option<&mut T> {
        // SAFETY: the only reference, which is borrowed mutably, so nothing else reads the value.
        self.is_only().then(|| unsafe { &mut (*self.0.as_ptr()).value })
    }

    /// Whether both refer to the same value.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        // Both live, so neither header is one that is used again.
        self.0 == other.0
    }
}

impl<T: Reused> Deref for HeaderRef<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.header().value
    }
}

impl<T: Reused> Clone for HeaderRef<T> {
    fn clone(&self) -> Self {
        // Relaxed: the caller has a reference already. Each reference takes 8 bytes of memory, and
        // 2^63 of them do not fit, unless some are leaked: then the count must not wrap around.
        let before = self.header().references.fetch_add(1, Ordering::Relaxed);
        if before > usize::MAX / 2 {
            std::process::abort();
        }
        Self(self.0)
    }
}

impl<T: Reused> Drop for HeaderRef<T> {
    fn drop(&mut self) {
        // The only reference needs no atomic change, which most views of a client save.
        if !self.is_only() {
            let references = &self.header().references;
            // Release: the accesses of this reference come before the drop of the value. After a
            // result other than 1 another thread may free the header: it is not accessed any more.
            if references.fetch_sub(1, Ordering::Release) != 1 {
                return;
            }
            // Acquire: and those of all other references.
            references.load(Ordering::Acquire);
        }
        // SAFETY: this was the last reference, so nothing accesses the value any more. If its drop
        // panics, the memory is leaked and not used again.
        unsafe { self.0.drop_in_place() };
        // SAFETY: the memory of the box in `new`. Its value is dropped, so it is uninitialised.
        let memory = unsafe { Box::from_raw(self.0.cast::<MaybeUninit<Header<T>>>().as_ptr()) };
        T::keep_unused(memory);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize as Counter;

    use cascade_runtime::LeafMutex;

    use crate::{HugePages, Pool, PoolConfig};

    /// Held by tests that hold the lock of the batches, or count them.
    static USES_BATCHES: LeafMutex<()> = LeafMutex::new(());

    struct CountedDrop(Arc<Counter>);

    impl Drop for CountedDrop {
        fn drop(&mut self) {
            self.0.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        }
    }

    fn pool() -> Pool {
        let config =
            PoolConfig { capacity_bytes: 8 << 20, huge_pages: HugePages::Never, populate: false };
        Pool::new(&config).expect("8 MiB can be mapped")
    }

    #[test]
    fn a_state_is_dropped_once_with_its_last_reference() {
        let (pool, dropped) = (pool(), Arc::new(Counter::new(0)));
        let count = || dropped.load(std::sync::atomic::Ordering::SeqCst);
        let mut slab = pool.allocate(4096).expect("the pool is empty");
        slab.attach_guard(Box::new(CountedDrop(Arc::clone(&dropped))));
        drop(slab);
        assert_eq!((count(), pool.stats().reserved_bytes), (1, 0));
        let slab = pool.allocate(4096).expect("the pool is empty").seal();
        let other = slab.clone();
        drop(slab);
        assert_eq!(pool.stats().reserved_bytes, 4096);
        drop(other);
        assert_eq!(pool.stats().reserved_bytes, 0);
    }

    #[test]
    fn clones_are_dropped_by_any_threads() {
        let pool = pool();
        let slabs: Vec<_> = (0..64_u8)
            .map(|number| {
                let mut slab = pool.allocate(100).expect("the pool is large enough");
                slab.host_mut().expect("host memory").fill(number);
                slab.seal()
            })
            .collect();
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let slabs = slabs.clone();
                std::thread::spawn(move || {
                    for round in 0..100 {
                        let again = slabs.clone();
                        let of = |at: usize| u8::try_from(at).expect("64 slabs");
                        let is_right = |(at, slab): (usize, &crate::Slab)| {
                            let bytes = slab.host().expect("host memory");
                            bytes.iter().all(|byte| *byte == of(at))
                        };
                        assert!(again.iter().enumerate().all(is_right), "{round}");
                    }
                })
            })
            .collect();
        drop(slabs);
        for thread in threads {
            thread.join().expect("no thread panics");
        }
        assert_eq!(pool.stats().reserved_bytes, 0);
    }

    /// Waiting for the lock would never end: the thread that had it is not in the child.
    #[test]
    fn a_forked_child_drops_slabs_while_the_lock_is_held() {
        let pool = pool();
        let count = super::UNUSED_MAX + super::BATCH + 1;
        let slabs: Vec<_> = (0..count).map(|_| pool.allocate(64).expect("small")).collect();
        let _alone = USES_BATCHES.lock().expect("no panic");
        let lock = super::BATCHES.lock().expect("no panic");
        // SAFETY: the child uses only what this thread owns, and the allocator, which can be used
        // after a fork. It ends with `_exit`.
        let child = unsafe { libc::fork() };
        assert!(child >= 0, "a process can be created");
        if child == 0 {
            // SAFETY: ends a child that waits, with an error.
            unsafe { libc::alarm(60) };
            drop(slabs);
            let slabs: Vec<_> = (0..count).map_while(|_| pool.allocate(64)).collect();
            // SAFETY: ends the child without the parent's handlers.
            unsafe { libc::_exit(i32::from(slabs.len() != count)) };
        }
        let mut status = -1;
        // SAFETY: waits for the child from above and writes to a local variable.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "the child ended by itself");
        drop(lock);
        drop(slabs);
        assert_eq!(pool.stats().reserved_bytes, 0);
    }

    /// Headers of slabs that other threads allocated do not pile up.
    #[test]
    fn threads_pass_on_a_bounded_number_of_headers() {
        let _alone = USES_BATCHES.lock().expect("no panic");
        let pool = pool();
        let count = (super::BATCHES_MAX + 4) * super::BATCH;
        let slabs: Vec<_> = (0..count).map(|_| pool.allocate(64).expect("small")).collect();
        let unused = std::thread::spawn(move || {
            drop(slabs);
            let batches = super::BATCHES.lock().expect("no panic").len();
            (super::UNUSED.with(|unused| unused.borrow().len()), batches)
        });
        let (unused, batches) = unused.join().expect("no panic");
        assert!(unused <= super::UNUSED_MAX, "{unused}");
        assert!((1..=super::BATCHES_MAX).contains(&batches), "{batches}");
        assert_eq!(pool.stats().reserved_bytes, 0);
    }
}

/// Every interleaving of two or three threads that share, drop and use headers again.
#[cfg(all(test, loom))]
mod loom_models {
    use loom::cell::UnsafeCell;
    use loom::sync::Mutex;
    use loom::thread;

    use super::*;
    use crate::holders::Holders;

    loom::lazy_static! {
        static ref LIST: Mutex<Vec<Unused<Modelled>>> = Mutex::new(Vec::new());
        static ref DROPS: AtomicUsize = AtomicUsize::new(0);
        static ref REPORTS: AtomicUsize = AtomicUsize::new(0);
    }

    /// Loom panics if its bytes are read and dropped at a time, or without an order.
    struct Modelled {
        bytes: UnsafeCell<u64>,
        holders: Holders,
    }

    impl Reused for Modelled {
        fn take_unused() -> Option<Unused<Self>> {
            LIST.lock().expect("no model panics inside").pop()
        }

        fn keep_unused(memory: Unused<Self>) {
            LIST.lock().expect("no model panics inside").push(memory);
        }
    }

    impl Drop for Modelled {
        fn drop(&mut self) {
            // SAFETY: loom checks that nothing else accesses the cell.
            self.bytes.with_mut(|bytes| unsafe { *bytes = 0 });
            DROPS.fetch_add(1, Ordering::Relaxed);
        }
    }

    // SAFETY: the cell is written only by the drop.
    unsafe impl Sync for Modelled {}

    fn header(bytes: u64) -> HeaderRef<Modelled> {
        HeaderRef::new(Modelled { bytes: UnsafeCell::new(bytes), holders: Holders::one() })
    }

    fn read(header: &HeaderRef<Modelled>) -> u64 {
        // SAFETY: loom checks that nothing writes to the cell.
        header.bytes.with(|bytes| unsafe { *bytes })
    }

    fn drops() -> usize {
        DROPS.load(Ordering::Relaxed)
    }

    #[test]
    fn loom_a_value_is_dropped_once_after_all_its_reads() {
        loom::model(|| {
            let first = header(7);
            let threads: Vec<_> = (0..2)
                .map(|_| {
                    let clone = first.clone();
                    thread::spawn(move || read(&clone))
                })
                .collect();
            drop(first);
            for thread in threads {
                assert_eq!(thread.join().expect("no thread panics"), 7);
            }
            assert_eq!(drops(), 1);
        });
    }

    /// A header that is used again while others drop their references to its earlier value.
    #[test]
    fn loom_a_late_drop_has_no_effect_on_the_next_value() {
        loom::model(|| {
            let first = header(1);
            let clone = first.clone();
            let other = thread::spawn(move || {
                assert_eq!(read(&clone), 1);
                drop(clone);
                let mut next = header(2);
                assert!(next.get_mut().is_some(), "a new value has one reference");
                read(&next)
            });
            assert_eq!(read(&first), 1);
            drop(first);
            let mut next = header(3);
            assert!(next.get_mut().is_some(), "a new value has one reference");
            assert_eq!(read(&next), 3);
            assert_eq!(other.join().expect("no thread panics"), 2);
            assert_eq!(drops(), 2, "the third value lives");
            drop(next);
            assert_eq!(drops(), 3);
        });
    }

    #[test]
    fn loom_exclusive_access_begins_after_the_last_other_read() {
        loom::model(|| {
            let mut first = header(1);
            let clone = first.clone();
            let writer = thread::spawn(move || {
                if let Some(value) = first.get_mut() {
                    // SAFETY: loom checks that nothing else accesses the cell.
                    value.bytes.with_mut(|bytes| unsafe { *bytes = 2 });
                }
            });
            assert_eq!(read(&clone), 1);
            drop(clone);
            writer.join().expect("no thread panics");
            assert_eq!(drops(), 1);
        });
    }

    /// As `Slab` does: the only holder is not counted down.
    fn let_go(header: HeaderRef<Modelled>) {
        if !header.is_only() && header.holders.remove().is_some() {
            REPORTS.fetch_add(1, Ordering::Relaxed);
        }
        drop(header);
    }

    /// A search that finds a slab held learns when its holders are gone, although the last
    /// reference is dropped without a change of the counts.
    #[test]
    fn loom_the_shortcut_of_the_last_reference_misses_no_report() {
        loom::model(|| {
            let kept = header(1);
            kept.holders.add();
            let clone = kept.clone();
            let other = thread::spawn(move || let_go(clone));
            let is_held = kept.holders.watch(5);
            let reports = || REPORTS.load(Ordering::Relaxed);
            if is_held {
                other.join().expect("no thread panics");
                assert_eq!((reports(), kept.holders.count()), (1, 1));
                let_go(kept);
            } else {
                // The eviction that follows may drop the slab before the other thread has.
                let_go(kept);
                other.join().expect("no thread panics");
            }
            assert_eq!((drops(), reports()), (1, usize::from(is_held)));
        });
    }
}
