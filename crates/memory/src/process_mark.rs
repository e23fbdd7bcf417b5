//! A mark of this process, which differs from the marks of the processes that it was forked from.
#![expect(unsafe_code, reason = "maps a page that the kernel clears in a forked child")]

use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// Length of the mapping; the kernel maps a whole page.
const PAGE_BYTES: usize = 4096;

/// The page with the mark, once it is mapped; [`NO_PAGE`] if it cannot be. Never unmapped.
static PAGE: AtomicPtr<AtomicU64> = AtomicPtr::new(null_mut());
/// In place of a page that the kernel clears in children.
static NO_PAGE: AtomicU64 = AtomicU64::new(0);

/// The marks that this process and those it was forked from have taken so far.
static TAKEN: AtomicU64 = AtomicU64::new(0);

/// A number that stays the same in this process, and that no process had which this one was forked
/// from. A client asks once for each view that is dropped, because a forked child must not release
/// what its parent holds.
///
/// Not the process id: a child in a process namespace of its own can have the id of its parent, and
/// each question would take a system call. The mark is kept in a page that the kernel clears in
/// each forked child, so a child never reads the mark of its parent. Takes no lock: another thread
/// could have held it at the fork.
pub fn process_mark() -> u64 {
    let Some(kept) = page() else { return u64::from(std::process::id()) };
    // Relaxed, here and below: the numbers only have to differ.
    let mark = kept.load(Ordering::Relaxed);
    if mark != 0 {
        return mark;
    }
    // A child goes on counting where its parent was at the fork. So both get one number only if the
    // parent had none yet, and then the child has inherited nothing that is marked with it.
    let mark = 1 + TAKEN.fetch_add(1, Ordering::Relaxed);
    // Another thread may have been first.
    let kept = kept.compare_exchange(0, mark, Ordering::Relaxed, Ordering::Relaxed);
    kept.map_or_else(|first| first, |_| mark)
}

/// The page; none if the kernel cannot clear it in children (before Linux 4.14).
fn page() -> Option<&'static AtomicU64> {
    let mut page = PAGE.load(Ordering::Acquire);
    if page.is_null() {
        let mapped = map().map_or((&raw const NO_PAGE).cast_mut(), NonNull::as_ptr);
        // Not `OnceLock`: a child that is forked while another thread initialises it would wait
        // for a thread that it does not have.
        let set = PAGE.compare_exchange(null_mut(), mapped, Ordering::AcqRel, Ordering::Acquire);
        page = match set {
            Ok(_) => mapped,
            Err(first) => {
                if !is_no_page(mapped) {
                    // SAFETY: mapped above with this length, and nothing refers to it.
                    let unmapped = unsafe { munmap(mapped.cast(), PAGE_BYTES) };
                    debug_assert!(unmapped.is_ok(), "the range is a mapping");
                }
                first
            }
        };
    }
    if is_no_page(page) {
        return None;
    }
    // SAFETY: a page of zeroes that is mapped for as long as the process runs, aligned for any
    // atomic, which the kernel changes only in a child before the child runs.
    Some(unsafe { &*page })
}

fn is_no_page(page: *const AtomicU64) -> bool {
    std::ptr::eq(page, &raw const NO_PAGE)
}

fn map() -> Option<NonNull<AtomicU64>> {
    // SAFETY: a new mapping at an address that the kernel chooses affects no other memory.
    let page = unsafe {
        let (rights, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        mmap_anonymous(null_mut(), PAGE_BYTES, rights, flags).ok()?
    };
    // SAFETY: the range is the mapping from above, and the advice changes nothing in this process.
    if unsafe { madvise(page, PAGE_BYTES, Advice::LinuxWipeOnFork) }.is_err() {
        // SAFETY: mapped above with this length, and nothing refers to it.
        let unmapped = unsafe { munmap(page, PAGE_BYTES) };
        debug_assert!(unmapped.is_ok(), "the range is a mapping");
        return None;
    }
    NonNull::new(page.cast())
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Forks a child that ends with 0 if the check is true. Returns whether it was.
    fn is_true_in_child(check: impl FnOnce() -> bool) -> bool {
        // SAFETY: the children make only calls that are safe after a fork: they take no lock,
        // allocate nothing, and end with `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: ends the child without the parent's handlers.
            unsafe { libc::_exit(i32::from(!check())) };
        }
        let mut status = -1;
        // SAFETY: waits for the child from above and writes to a local variable.
        child > 0 && unsafe { libc::waitpid(child, &raw mut status, 0) } == child && status == 0
    }

    /// The ids of a parent and its child are equal if each is the first of a process namespace.
    fn enter_new_process_namespace() {
        // SAFETY: affects only the children of this process. Without the right to do so, they have
        // ids that differ.
        unsafe { libc::unshare(libc::CLONE_NEWPID) };
    }

    #[test]
    fn a_forked_child_has_a_mark_of_its_own() {
        let mark = process_mark();
        assert_eq!(process_mark(), mark);
        assert!(page().is_some_and(|page| page.load(Ordering::Relaxed) == mark));
        let differ = is_true_in_child(|| {
            enter_new_process_namespace();
            // This child has no mark before its own child has one.
            is_true_in_child(|| {
                let child = process_mark();
                enter_new_process_namespace();
                let has_own = || {
                    let grandchild = process_mark();
                    grandchild != child && grandchild != mark && process_mark() == grandchild
                };
                child != mark && process_mark() == child && is_true_in_child(has_own)
            })
        });
        assert!(differ, "the marks of a process and its children are different");
        assert_eq!(process_mark(), mark);
    }

    #[test]
    fn threads_have_the_same_mark() {
        let threads: Vec<_> = (0..4).map(|_| std::thread::spawn(process_mark)).collect();
        for thread in threads {
            assert_eq!(thread.join().expect("no panic"), process_mark());
        }
    }
}
