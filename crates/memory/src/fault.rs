//! Ends the process with an explanation when the file behind a mapping was cut short.
//!
//! A pool with a name cannot be sealed: whoever may write its file may truncate it, and the next
//! access to the lost part raises SIGBUS. Nothing can be served from there any more, and a reader
//! that went on would read zeroes in place of a block, so the process ends; but it says why.
//! `docs/decisions/0022-a-truncated-pool.md` has what else was considered.
#![expect(unsafe_code, reason = "handles a signal")]

use std::io;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Mappings of one process that are watched; further ones end the process without an explanation.
const RANGES_MAX: usize = 64;

/// How the process ends: `EX_IOERR` of `sysexits.h`.
const EXIT_STATUS: i32 = 74;

const MESSAGE: &str = "cascade: another process truncated the file of the memory pool, so blocks \
                       in it are lost and this process ends. Processes of this user and root can \
                       do that: look which one did, and start again. Tiers below DRAM are kept.\n";

/// Addresses of one mapping; an end of zero is a free place.
struct Range {
    start: AtomicUsize,
    end: AtomicUsize,
}

static RANGES: [Range; RANGES_MAX] =
    [const { Range { start: AtomicUsize::new(0), end: AtomicUsize::new(0) } }; RANGES_MAX];

/// What handled the signal before us; it still does for other addresses.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

/// A mapping is watched while this lives.
#[derive(Debug)]
pub(crate) struct Watch(Option<usize>);

impl Watch {
    /// Watches a mapping of a file that others may cut short.
    ///
    /// # Errors
    /// The kernel takes no signal handler.
    pub(crate) fn over(start: usize, bytes: usize) -> io::Result<Self> {
        install()?;
        let place = RANGES.iter().position(|range| {
            // 1: taken, and no address lies before it.
            range.end.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        });
        if let Some(place) = place {
            RANGES[place].start.store(start, Ordering::Release);
            RANGES[place].end.store(start + bytes, Ordering::Release);
        }
        Ok(Self(place))
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if let Some(place) = self.0 {
            RANGES[place].start.store(0, Ordering::Release);
            RANGES[place].end.store(0, Ordering::Release);
        }
    }
}

fn install() -> io::Result<()> {
    static INSTALLED: OnceLock<Option<i32>> = OnceLock::new();
    let failure = INSTALLED.get_or_init(|| {
        // SAFETY: all zeroes are a valid action: the default one.
        let mut before: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: asks only; `before` is ours until the call returns.
        let asked = unsafe { libc::sigaction(libc::SIGBUS, ptr::null(), &raw mut before) };
        if asked != 0 {
            return io::Error::last_os_error().raw_os_error();
        }
        // Before the handler can run.
        BEFORE.get_or_init(|| before);
        let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) = on_bus_error;
        let mut action = before;
        action.sa_sigaction = handler as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: the handler calls nothing that is not safe in a signal handler: see there.
        let set = unsafe { libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut()) };
        if set == 0 { None } else { io::Error::last_os_error().raw_os_error() }
    });
    failure.map_or(Ok(()), |code| Err(io::Error::from_raw_os_error(code)))
}

/// Only atomics, `write`, `_exit` and `sigaction`: all safe in a signal handler.
extern "C" fn on_bus_error(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid one to a handler with SA_SIGINFO, until it returns.
    let info = unsafe { &*info };
    // SAFETY: SIGBUS of a fault has an address; of one that was sent it is meaningless and, below,
    // at worst compared with our ranges.
    let address = unsafe { info.si_addr() }.addr();
    let is_ours = RANGES.iter().any(|range| {
        let start = range.start.load(Ordering::Acquire);
        start != 0 && (start..range.end.load(Ordering::Acquire)).contains(&address)
    });
    if is_ours && info.si_code == libc::BUS_ADRERR {
        // SAFETY: the message is static. What it returns does not matter any more.
        unsafe { libc::write(libc::STDERR_FILENO, MESSAGE.as_ptr().cast(), MESSAGE.len()) };
        // SAFETY: ends the process at once, without running anything of it.
        unsafe { libc::_exit(EXIT_STATUS) };
    }
    if let Some(before) = BEFORE.get() {
        // The instruction is repeated on return, and meets whoever handled this before us.
        // SAFETY: an action that the kernel gave us.
        unsafe { libc::sigaction(libc::SIGBUS, before, ptr::null_mut()) };
    }
}
