//! Ends the process with an explanation when the file behind a mapping is truncated.
//!
//! A named pool cannot be sealed: any process that may write its file may truncate it. The next
//! access to the truncated part raises SIGBUS. A reader that continued would read zeroes in place
//! of a block, so the process ends with a message. `docs/decisions/0022-a-truncated-pool.md` has
//! the alternatives.
#![expect(unsafe_code, reason = "handles a signal")]

use std::io;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Maximum number of watched mappings; a fault in a further one ends the process without a message.
const RANGES_MAX: usize = 64;

/// Exit status: `EX_IOERR` of `sysexits.h`.
const EXIT_STATUS: i32 = 74;

const MESSAGE: &str = "cascade: another process truncated the file of the memory pool, so blocks \
                       in it are lost and this process ends. Processes of this user and root can \
                       do that: find out which one and restart. Tiers below DRAM are kept.\n";

/// Addresses of one mapping. `end` is zero in a free entry.
struct Range {
    start: AtomicUsize,
    end: AtomicUsize,
}

static RANGES: [Range; RANGES_MAX] =
    [const { Range { start: AtomicUsize::new(0), end: AtomicUsize::new(0) } }; RANGES_MAX];

/// The previous signal handler, used for other addresses.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

/// Watches a mapping for as long as this value lives.
#[derive(Debug)]
pub(crate) struct Watch(Option<usize>);

impl Watch {
    /// Watches a mapping of a file that other processes may truncate.
    ///
    /// # Errors
    /// If the signal handler cannot be installed.
    pub(crate) fn over(start: usize, bytes: usize) -> io::Result<Self> {
        install()?;
        let place = RANGES.iter().position(|range| {
            // 1 marks the entry as taken; no address is below it, so it matches no fault yet.
            range.end.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        });
        if let Some(place) = place {
            // `start` before `end`: the range matches no address until `end` is stored.
            RANGES[place].start.store(start, Ordering::Release);
            RANGES[place].end.store(start + bytes, Ordering::Release);
        }
        Ok(Self(place))
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if let Some(place) = self.0 {
            // `start` before `end`: with a start of zero the range matches nothing, and the entry
            // is free for others only once `end` is zero.
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
        // SAFETY: a query; `before` is ours until the call returns.
        let queried = unsafe { libc::sigaction(libc::SIGBUS, ptr::null(), &raw mut before) };
        if queried != 0 {
            return io::Error::last_os_error().raw_os_error();
        }
        // Stored before the handler is installed, which reads it.
        PREVIOUS.get_or_init(|| before);
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
    // SAFETY: SIGBUS of a fault has an address. That of a sent signal is meaningless and is, below,
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
    if let Some(before) = PREVIOUS.get() {
        // On return the instruction is repeated, and the previous handler gets the signal.
        // SAFETY: an action that the kernel gave us.
        unsafe { libc::sigaction(libc::SIGBUS, before, ptr::null_mut()) };
    }
}
