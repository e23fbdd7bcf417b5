//! Headers of slabs: shared by all clones of a slab, and used again for later slabs.
//!
//! An `Arc` for each slab would allocate memory for each block that is put, and for each block that
//! a client leases. A thread keeps some of the headers that it dropped last, so that batch after
//! batch uses the same ones: no lock, and no cache line that other threads write. A thread that
//! drops more than it allocates passes them on in batches.
#![expect(unsafe_code, reason = "counts the references to memory that it allocates")]

use std::cell::RefCell;
use std::mem::MaybeUninit;
use std::ops::Deref;
use std::ptr::NonNull;

use cascade_runtime::LeafMutex;

use super::SlabState;
use crate::sync::{AtomicUsize, Ordering};

/// Most unused headers of a thread.
const UNUSED_MAX: usize = 2 * BATCH;
/// Headers that are passed on at a time.
const BATCH: usize = 128;
/// Most batches that no thread has: half a megabyte.
const BATCHES_MAX: usize = 32;

type Unused = Vec<Box<MaybeUninit<Header>>>;

thread_local! {
    static UNUSED: RefCell<Unused> = const { RefCell::new(Vec::new()) };
}

/// Batches of unused headers for any thread. Nothing waits for the lock: a child that is forked
/// while another thread holds it would wait for ever.
static BATCHES: LeafMutex<Vec<Unused>> = LeafMutex::new(Vec::new());

/// An unused header, if there is one.
fn take_unused() -> Option<Box<MaybeUninit<Header>>> {
    let take = |unused: &RefCell<Unused>| {
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

/// Keeps the memory of a header. Frees it if there are many, or if the thread is ending.
fn keep_unused(memory: Box<MaybeUninit<Header>>) {
    let keep = |unused: &RefCell<Unused>| {
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

struct Header {
    references: AtomicUsize,
    slab: SlabState,
}

/// A counted reference to a slab's state. The last one drops the state.
pub(crate) struct HeaderRef(NonNull<Header>);

// SAFETY: a reference gives shared access to the state, or exclusive access if it is the only one,
// from whichever thread has it. So the state has to be both `Send` and `Sync`, as for an `Arc`;
// `is_shareable` checks it.
unsafe impl Send for HeaderRef {}
// SAFETY: as above.
unsafe impl Sync for HeaderRef {}

const _: fn() = || {
    fn is_shareable<T: Send + Sync>() {}
    is_shareable::<SlabState>();
};

impl HeaderRef {
    /// The first reference to a new state.
    pub(crate) fn new(slab: SlabState) -> Self {
        let memory = take_unused().unwrap_or_else(Box::new_uninit);
        let header = Header { references: AtomicUsize::new(1), slab };
        Self(NonNull::from(Box::leak(Box::write(memory, header))))
    }

    fn header(&self) -> &Header {
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

    /// The state, if this is the only reference to it.
    pub(crate) fn get_mut(&mut self) -> Option<&mut SlabState> {
        // SAFETY: the only reference, which is borrowed mutably, so nothing else reads the state.
        self.is_only().then(|| unsafe { &mut (*self.0.as_ptr()).slab })
    }

    /// Whether both refer to the same state.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}

impl Deref for HeaderRef {
    type Target = SlabState;

    fn deref(&self) -> &SlabState {
        &self.header().slab
    }
}

impl Clone for HeaderRef {
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

impl Drop for HeaderRef {
    fn drop(&mut self) {
        // The only reference needs no atomic change, which most views of a client save.
        if !self.is_only() {
            let references = &self.header().references;
            // Release: the accesses of this reference come before the drop of the state.
            if references.fetch_sub(1, Ordering::Release) != 1 {
                return;
            }
            // Acquire: and those of all other references.
            references.load(Ordering::Acquire);
        }
        // SAFETY: this was the last reference, so nothing accesses the state any more.
        unsafe { self.0.drop_in_place() };
        // SAFETY: the memory of the box in `new`. Its value is dropped, so it is uninitialised.
        let memory = unsafe { Box::from_raw(self.0.cast::<MaybeUninit<Header>>().as_ptr()) };
        keep_unused(memory);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize as Counter;

    use crate::{HugePages, Pool, PoolConfig};

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
                slab.fill(number);
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
                            slab.iter().all(|byte| *byte == of(at))
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

    /// Headers of slabs that other threads allocated do not pile up.
    #[test]
    fn threads_pass_on_a_bounded_number_of_headers() {
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
