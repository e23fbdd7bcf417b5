//! The id of this process, without a system call for each question.
#![expect(unsafe_code, reason = "maps a page that the kernel clears in a forked child")]

use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// Length of the mapping; the kernel maps a whole page.
const PAGE_BYTES: usize = 4096;

/// The page, once it is mapped. Never unmapped.
static PAGE: AtomicPtr<AtomicU32> = AtomicPtr::new(null_mut());

/// The id of this process, as [`std::process::id`]. A client asks once for each view that is
/// dropped, because a forked child must not release what its parent holds.
///
/// The id is kept in a page that the kernel clears in each forked child, so a child never reads the
/// id of its parent. Takes no lock: another thread could have held it at the fork.
pub fn process_id() -> u32 {
    let Some(known) = page() else { return std::process::id() };
    // Relaxed: every thread of the process stores the same number.
    match known.load(Ordering::Relaxed) {
        0 => {
            let id = std::process::id();
            known.store(id, Ordering::Relaxed);
            id
        }
        id => id,
    }
}

/// The page; none if the kernel cannot clear it in children (before Linux 4.14).
fn page() -> Option<&'static AtomicU32> {
    let mut page = PAGE.load(Ordering::Acquire);
    if page.is_null() {
        let mapped = map()?.as_ptr();
        // Not `OnceLock`: a child that is forked while another thread initialises it would wait
        // for a thread that it does not have.
        let set = PAGE.compare_exchange(null_mut(), mapped, Ordering::AcqRel, Ordering::Acquire);
        page = match set {
            Ok(_) => mapped,
            Err(first) => {
                // SAFETY: mapped above with this length, and nothing refers to it.
                let unmapped = unsafe { munmap(mapped.cast(), PAGE_BYTES) };
                debug_assert!(unmapped.is_ok(), "the range is a mapping");
                first
            }
        };
    }
    // SAFETY: a page of zeroes that is mapped for as long as the process runs, aligned for any
    // atomic, which the kernel changes only in a child before the child runs.
    Some(unsafe { &*page })
}

fn map() -> Option<NonNull<AtomicU32>> {
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

    #[test]
    fn a_forked_child_has_an_id_of_its_own() {
        assert_eq!(process_id(), std::process::id());
        assert!(page().is_some_and(|page| page.load(Ordering::Relaxed) == process_id()));
        // SAFETY: the child makes only calls that are safe after a fork: it takes no lock,
        // allocates nothing, and ends with `_exit`.
        let child = unsafe { libc::fork() };
        assert!(child >= 0, "a process can be created");
        if child == 0 {
            let is_own = process_id() == std::process::id() && process_id() == std::process::id();
            // SAFETY: ends the child without the parent's handlers.
            unsafe { libc::_exit(i32::from(!is_own)) };
        }
        let mut status = -1;
        // SAFETY: waits for the child from above and writes to a local variable.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "the child saw its own id");
        assert_eq!(process_id(), std::process::id());
    }
}
