//! A TCP proxy that misbehaves.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use cascade_runtime::{Mutex, sleep, thread};

/// Passes bytes on, and spoils them as it is told.
#[derive(Debug)]
pub(crate) struct Proxy {
    /// Bytes of both directions of the last connection so far. The places below are its bytes.
    passed: Mutex<Arc<AtomicU64>>,
    /// The byte of which one bit is flipped.
    pub(crate) flip_at: AtomicU64,
    /// The byte before which both connections are cut.
    pub(crate) cut_at: AtomicU64,
    /// The byte before which nothing more is passed on, until this is larger.
    pub(crate) freeze_at: AtomicU64,
    /// The most bytes that are passed on at a time.
    pub(crate) piece: AtomicUsize,
    /// Milliseconds before each of these, for answers.
    pub(crate) answer_delay_ms: AtomicU64,
}

pub(crate) const NEVER: u64 = u64::MAX;

impl Proxy {
    pub(crate) fn start(to: SocketAddr) -> (Arc<Self>, SocketAddr) {
        let proxy = Arc::new(Self {
            passed: Mutex::default(),
            flip_at: AtomicU64::new(NEVER),
            cut_at: AtomicU64::new(NEVER),
            freeze_at: AtomicU64::new(NEVER),
            piece: AtomicUsize::new(1 << 16),
            answer_delay_ms: AtomicU64::new(0),
        });
        let listener = TcpListener::bind("127.0.0.1:0").expect("it works on loopback");
        let address = listener.local_addr().expect("it works on loopback");
        let of_thread = Arc::clone(&proxy);
        thread::spawn(move || {
            while let Ok((client, _)) = listener.accept() {
                let server = TcpStream::connect(to).expect("the server listens");
                let passed = Arc::new(AtomicU64::new(0));
                *of_thread.passed.lock().expect("no thread panics") = Arc::clone(&passed);
                for (from, into, is_answer) in [(&client, &server, false), (&server, &client, true)]
                {
                    let (from, into) = (from.try_clone(), into.try_clone());
                    let (from, into) = (from.expect("a socket"), into.expect("a socket"));
                    let (proxy, passed) = (Arc::clone(&of_thread), Arc::clone(&passed));
                    thread::spawn(move || proxy.pass(&passed, from, into, is_answer));
                }
            }
        });
        (proxy, address)
    }

    fn pass(&self, passed: &AtomicU64, mut from: TcpStream, mut into: TcpStream, is_answer: bool) {
        let mut buffer = vec![0; 1 << 16];
        loop {
            let most = self.piece.load(Ordering::Relaxed);
            let Ok(count @ 1..) = from.read(&mut buffer[..most]) else {
                break;
            };
            if is_answer {
                sleep(Duration::from_millis(self.answer_delay_ms.load(Ordering::Relaxed)));
            }
            let first = passed.fetch_add(count as u64, Ordering::Relaxed);
            let has = |at: &AtomicU64| {
                let at = at.load(Ordering::Relaxed);
                at >= first && at < first + count as u64
            };
            if has(&self.cut_at) {
                let before = self.cut_at.load(Ordering::Relaxed) - first;
                drop(into.write_all(&buffer[..usize::try_from(before).expect("inside")]));
                break;
            }
            while first >= self.freeze_at.load(Ordering::Relaxed) {
                sleep(Duration::from_millis(5));
            }
            if has(&self.flip_at) {
                let at = self.flip_at.load(Ordering::Relaxed) - first;
                buffer[usize::try_from(at).expect("inside")] ^= 0x10;
            }
            if into.write_all(&buffer[..count]).is_err() {
                break;
            }
        }
        // The other direction ends too.
        for socket in [from, into] {
            drop(socket.shutdown(std::net::Shutdown::Both));
        }
    }

    /// Bytes of both directions of the last connection so far.
    pub(crate) fn passed(&self) -> u64 {
        self.passed.lock().expect("no thread panics").load(Ordering::Relaxed)
    }

    pub(crate) fn at(&self, which: &AtomicU64, after: u64) {
        which.store(self.passed() + after, Ordering::Relaxed);
    }
}
