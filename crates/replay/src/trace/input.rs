//! The bytes of a trace as lines: opens files and pipes, decompresses, and bounds every size.

use std::fs::OpenOptions;
use std::io::{self, BufRead, BufReader, Cursor, Read};
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;

use super::compression::Compression;
use super::{FILE_BYTES_MAX, HELD_BYTES_MAX, TraceError, content, limit};

/// A pipe to which nothing is written for this time is an error.
const PIPE_TIMEOUT: Duration = Duration::from_secs(10);
/// Bytes from which the content is recognised.
const HEAD_BYTES: u64 = 512;
const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

/// The lines of one trace.
pub(super) struct Lines<'a> {
    /// Its name in errors.
    pub(super) file: &'a str,
    reader: Box<dyn BufRead + 'a>,
    /// Number of the last line, from 1.
    pub(super) line: usize,
    bytes: u64,
}

impl<'a> Lines<'a> {
    /// Decompresses, skips a byte order mark, and refuses content that cannot be a trace.
    pub(super) fn new(file: &'a str, source: Box<dyn Read + 'a>) -> Result<Self, TraceError> {
        let read = |source| TraceError::Read { path: file.into(), source };
        let (mut head, mut rest) = with_head(source).map_err(read)?;
        if let Some(compression) = Compression::of(&head) {
            let decoded = compression.decoder(Box::new(Cursor::new(head).chain(rest)));
            (head, rest) = with_head(decoded).map_err(read)?;
        }
        if head.starts_with(BYTE_ORDER_MARK) {
            head.drain(..BYTE_ORDER_MARK.len());
        }
        content::refuse_other_formats(file, &head)?;
        let reader = Box::new(Cursor::new(head).chain(rest));
        Ok(Self { file, reader, line: 0, bytes: 0 })
    }

    /// Lines of text that was read before. Counting starts again at line 1.
    pub(super) fn of_text(file: &'a str, text: &'a [u8]) -> Self {
        Self { file, reader: Box::new(text), line: 0, bytes: 0 }
    }

    /// The next line that is not blank; `None` at the end.
    pub(super) fn next_line(&mut self) -> Result<Option<Vec<u8>>, TraceError> {
        loop {
            let mut line = Vec::new();
            let mut bounded = self.reader.by_ref().take(HELD_BYTES_MAX + 1);
            let found = bounded.read_until(b'\n', &mut line);
            let found = found.map_err(|error| self.read_error(error))?;
            self.count(found as u64, line.len())?;
            if found == 0 {
                return Ok(None);
            }
            self.line += 1;
            if !line.trim_ascii().is_empty() {
                return Ok(Some(line));
            }
        }
    }

    /// Appends all that is left.
    pub(super) fn read_rest(&mut self, text: &mut Vec<u8>) -> Result<(), TraceError> {
        let room = (HELD_BYTES_MAX + 1).saturating_sub(text.len() as u64);
        let found = self.reader.by_ref().take(room).read_to_end(text);
        let found = found.map_err(|error| self.read_error(error))?;
        self.count(found as u64, text.len())
    }

    fn count(&mut self, found: u64, held: usize) -> Result<(), TraceError> {
        self.bytes += found;
        limit(self.file, "its size in bytes, decompressed,", self.bytes, FILE_BYTES_MAX)?;
        limit(self.file, "the size of one session or line in bytes", held, HELD_BYTES_MAX)
    }

    fn read_error(&self, source: io::Error) -> TraceError {
        TraceError::Read { path: self.file.into(), source }
    }
}

/// The first bytes, and a reader of the others.
fn with_head<'a>(source: Box<dyn Read + 'a>) -> io::Result<(Vec<u8>, Box<dyn BufRead + 'a>)> {
    let mut rest = BufReader::new(source);
    let mut head = Vec::new();
    rest.by_ref().take(HEAD_BYTES).read_to_end(&mut head)?;
    Ok((head, Box::new(rest)))
}

/// Opens a regular file or a pipe.
pub(super) fn open(path: &Path) -> Result<Box<dyn Read>, TraceError> {
    let read = |source| TraceError::Read { path: path.to_owned(), source };
    // The opening of a pipe would wait for a writer without a deadline.
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(read)?;
    let kind = file.metadata().map_err(read)?.file_type();
    if kind.is_fifo() {
        return Ok(Box::new(Pipe { file, timeout: PIPE_TIMEOUT }));
    }
    if kind.is_file() {
        return Ok(Box::new(file));
    }
    Err(TraceError::Unsupported {
        file: path.display().to_string(),
        found: if kind.is_dir() { "a directory" } else { "a device" }.to_owned(),
        advice: "give a file or a pipe".to_owned(),
    })
}

/// A pipe that is read with a deadline.
struct Pipe {
    file: std::fs::File,
    timeout: Duration,
}

impl Read for Pipe {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let timeout = Timespec::try_from(self.timeout).map_err(io::Error::other)?;
        let mut ready = [PollFd::new(&self.file, PollFlags::IN)];
        if poll(&mut ready, Some(&timeout))? > 0 {
            return self.file.read(buffer);
        }
        let seconds = self.timeout.as_secs_f64();
        let message = format!(
            "a pipe to which nothing was written for {seconds} s; start its writer first, or give \
             a file"
        );
        Err(io::Error::new(io::ErrorKind::TimedOut, message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pipe_without_a_writer_is_an_error_after_a_deadline() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("pipe");
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mkfifoat(rustix::fs::CWD, &path, mode).expect("a pipe");
        let flags = OFlags::NONBLOCK.bits().cast_signed();
        let file = OpenOptions::new().read(true).custom_flags(flags).open(&path);
        let file = file.expect("opening does not wait");
        let mut pipe = Pipe { file, timeout: Duration::from_millis(20) };
        let error = pipe.read(&mut [0; 8]).expect_err("nothing is written");
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        let text = error.to_string();
        assert!(text.contains("nothing was written for 0.02 s"), "{text}");
        assert!(open(&path).is_ok());
    }

    #[test]
    fn a_device_is_refused() {
        let error = open(Path::new("/dev/zero")).err().expect("endless").to_string();
        assert_eq!(error, "/dev/zero is a device; give a file or a pipe");
    }
}
