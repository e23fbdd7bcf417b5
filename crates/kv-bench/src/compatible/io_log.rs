//! A log of the operations on entries in the original's columns, written by a thread of its own.
//!
//! A run with a log stores nothing: a row says what the tiers would do, and when it would begin if
//! operations took no time.

use std::fmt::Write as _;
use std::io::{self, Read, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use cascade_runtime::Clock;
use ruzstd::encoding::{CompressionLevel, FrameCompressor};
use serde::Serialize;

use crate::backend::KvTier;
use crate::compatible::entry::EntryName;

/// The first row.
const HEADER: &str = "Timestamp,Operation,Object_Size_Bytes,Tier,Key,Phase\n";
/// Bytes of rows that the writer gets at once.
const CHUNK_BYTES: usize = 64 << 10;
/// Chunks that wait for the writer. With them, the memory of a log is bounded.
const CHUNKS_MAX: usize = 8;

/// An operation of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LoggedOperation {
    /// A new entry.
    Prefill,
    /// Reading an entry: of an earlier turn, of a document, or while tokens are generated.
    Decode,
    /// An entry leaves a tier of memory ...
    EvictRead,
    /// ... and goes to the tier below.
    EvictWrite,
}

impl LoggedOperation {
    fn columns(self) -> (&'static str, &'static str) {
        match self {
            Self::Prefill => ("Write", "Prefill"),
            Self::Decode => ("Read", "Decode"),
            Self::EvictRead => ("Read", "Evict"),
            Self::EvictWrite => ("Write", "Evict"),
        }
    }
}

/// The rows of a tier.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct LoggedTier {
    /// Rows that write.
    pub writes: u64,
    /// Their bytes.
    pub written_bytes: u64,
    /// Rows that read.
    pub reads: u64,
    /// Their bytes.
    pub read_bytes: u64,
}

/// The rows of a log.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LoggedRows {
    /// By tier.
    pub tiers: [LoggedTier; 3],
}

impl LoggedRows {
    /// All rows but the first one, which names the columns.
    pub fn count(&self) -> u64 {
        self.tiers.iter().map(|tier| tier.writes + tier.reads).sum()
    }
}

/// A log of operations.
#[derive(Debug)]
pub struct IoLog<'a> {
    clock: &'a dyn Clock,
    /// The time since 1970 at which the clock was 0.
    epoch: Duration,
    state: Mutex<State>,
    has_failed: Arc<AtomicBool>,
}

#[derive(Debug)]
struct State {
    text: String,
    rows: LoggedRows,
    chunks: SyncSender<String>,
    writer: JoinHandle<io::Result<()>>,
}

impl<'a> IoLog<'a> {
    /// A log with times of `clock`, which is 0 at `epoch`.
    ///
    /// # Errors
    /// If its thread cannot be started.
    pub fn new(
        output: impl Write + Send + 'static,
        is_compressed: bool,
        epoch: Duration,
        clock: &'a dyn Clock,
    ) -> io::Result<Self> {
        let (chunks, receiver) = sync_channel(CHUNKS_MAX);
        let has_failed = Arc::new(AtomicBool::new(false));
        let failed = Arc::clone(&has_failed);
        let write = move || {
            let written =
                if is_compressed { compress(receiver, output) } else { copy(&receiver, output) };
            failed.store(written.is_err(), Ordering::Relaxed);
            written
        };
        let writer = Builder::new().name("io-log".to_owned()).spawn(write)?;
        let text = HEADER.to_owned();
        let state = Mutex::new(State { text, rows: LoggedRows::default(), chunks, writer });
        Ok(Self { clock, epoch, state, has_failed })
    }

    /// Whether rows were lost, so that the run should end.
    pub(crate) fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Relaxed)
    }

    /// Adds a row.
    pub(crate) fn add(
        &self,
        operation: LoggedOperation,
        name: EntryName,
        bytes: u64,
        tier: KvTier,
    ) {
        let at = self.epoch + self.clock.monotonic();
        let (verb, phase) = operation.columns();
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let State { text, rows, chunks, .. } = &mut *state;
        let (seconds, micros, number) = (at.as_secs(), at.subsec_micros(), tier.index());
        let written = writeln!(
            text,
            "{seconds}.{micros:06},{verb},{bytes},Tier-{number},{},{phase}",
            name.text()
        );
        debug_assert!(written.is_ok(), "a string takes all text");
        let row = &mut rows.tiers[number];
        let (count, sum) = match verb {
            "Write" => (&mut row.writes, &mut row.written_bytes),
            _ => (&mut row.reads, &mut row.read_bytes),
        };
        *count += 1;
        *sum += bytes;
        if text.len() >= CHUNK_BYTES {
            let chunk = std::mem::replace(text, String::with_capacity(CHUNK_BYTES + 128));
            // The writer that is gone has failed, and says why at the end.
            if chunks.send(chunk).is_err() {
                self.has_failed.store(true, Ordering::Relaxed);
            }
        }
    }

    /// Writes what is left. Returns the rows of the complete log.
    ///
    /// # Errors
    /// If a row could not be written.
    pub fn finish(self) -> io::Result<LoggedRows> {
        let state = self.state.into_inner().unwrap_or_else(PoisonError::into_inner);
        let State { text, rows, chunks, writer } = state;
        // As above: the writer's own error follows.
        drop(chunks.send(text));
        drop(chunks);
        match writer.join() {
            Ok(written) => written.map(|()| rows),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}

/// Writes the chunks as they are.
fn copy(chunks: &Receiver<String>, mut output: impl Write) -> io::Result<()> {
    for chunk in chunks {
        output.write_all(chunk.as_bytes())?;
    }
    output.flush()
}

/// Writes the chunks as one frame of Zstandard, which every reader takes.
fn compress(chunks: Receiver<String>, output: impl Write) -> io::Result<()> {
    let failure = Mutex::new(None);
    let source = Source { chunks, chunk: String::new(), read: 0, failure: &failure };
    let mut compressor = FrameCompressor::new(CompressionLevel::Fastest);
    compressor.set_source(source);
    compressor.set_drain(Drain { output, failure: &failure });
    compressor.compress();
    drop(compressor);
    failure.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}

/// What the compressor reads. It ends early once writing has failed.
struct Source<'a> {
    chunks: Receiver<String>,
    chunk: String,
    read: usize,
    failure: &'a Mutex<Option<io::Error>>,
}

impl Read for Source<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        if self.failure.lock().unwrap_or_else(PoisonError::into_inner).is_some() {
            return Ok(0);
        }
        if self.read == self.chunk.len() {
            let Ok(chunk) = self.chunks.recv() else { return Ok(0) };
            (self.chunk, self.read) = (chunk, 0);
        }
        let count = (&self.chunk.as_bytes()[self.read..]).read(bytes)?;
        self.read += count;
        Ok(count)
    }
}

/// Where the compressor writes. It panics on errors, so that they are kept here.
struct Drain<'a, W> {
    output: W,
    failure: &'a Mutex<Option<io::Error>>,
}

impl<W: Write> Write for Drain<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        if failure.is_none() {
            *failure = self.output.write_all(bytes).err();
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use cascade_runtime::ManualClock;
    use tempfile::NamedTempFile;

    use super::*;

    const NAME: EntryName = EntryName::Turn { user: 3, conversation: 2, turn: 1 };

    fn written(is_compressed: bool, rows: u64) -> (Vec<u8>, LoggedRows) {
        let file = NamedTempFile::new().unwrap();
        let clock = ManualClock::default();
        let epoch = Duration::from_secs(1_700_000_000);
        let log = IoLog::new(file.reopen().unwrap(), is_compressed, epoch, &clock).unwrap();
        for number in 0..rows {
            clock.advance(Duration::from_micros(1500));
            log.add(LoggedOperation::Prefill, NAME, number, KvTier::Cpu);
        }
        let rows = log.finish().unwrap();
        (std::fs::read(file.path()).unwrap(), rows)
    }

    #[test]
    fn a_row_has_the_columns_of_the_original() {
        let (bytes, rows) = written(false, 2);
        assert_eq!(
            String::from_utf8(bytes).unwrap(),
            "Timestamp,Operation,Object_Size_Bytes,Tier,Key,Phase\n\
             1700000000.001500,Write,0,Tier-1,user-3-conversation-2-turn-1,Prefill\n\
             1700000000.003000,Write,1,Tier-1,user-3-conversation-2-turn-1,Prefill\n"
        );
        assert_eq!(rows.count(), 2);
        assert_eq!((rows.tiers[1].writes, rows.tiers[1].written_bytes), (2, 1));
    }

    /// More rows than chunks may wait, in one frame.
    #[test]
    fn a_compressed_log_has_the_same_rows() {
        let (plain, _) = written(false, 30_000);
        let (compressed, _) = written(true, 30_000);
        assert!(plain.len() > CHUNK_BYTES * CHUNKS_MAX);
        assert!(compressed.len() < plain.len() / 3, "{}", compressed.len());
        let mut decoder = ruzstd::decoding::StreamingDecoder::new(&compressed[..]).unwrap();
        let mut text = Vec::new();
        decoder.read_to_end(&mut text).unwrap();
        assert!(text == plain, "the rows differ");
    }

    #[test]
    fn a_full_disk_is_an_error_and_nothing_waits_for_it() {
        for is_compressed in [false, true] {
            let clock = ManualClock::default();
            let full = File::options().write(true).open("/dev/full").unwrap();
            let log = IoLog::new(full, is_compressed, Duration::ZERO, &clock).unwrap();
            for _ in 0..30_000 {
                log.add(LoggedOperation::Decode, NAME, 7, KvTier::Storage);
            }
            assert!(log.has_failed());
            let error = log.finish().unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::StorageFull, "{error}");
        }
    }
}
