//! The bytes of a trace as rows: opens files and pipes, decompresses, and bounds every size.

use std::fs::OpenOptions;
use std::io::{self, BufRead, BufReader, Cursor, Read};
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use serde::de::IgnoredAny;

use super::array::{ArrayState, ElementScan, Found};
use super::compression::Compression;
use super::record::Record;
use super::{FILE_BYTES_MAX, HELD_BYTES_MAX, TraceError, content, limit};

/// A pipe to which nothing is written for this time is an error.
const PIPE_TIMEOUT: Duration = Duration::from_secs(10);
/// Bytes from which the content is recognised.
const HEAD_BYTES: u64 = 512;
const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

/// The lines of one trace, or the elements of its array.
pub(super) struct Lines<'a> {
    /// Its name in errors.
    pub(super) file: &'a str,
    pub(super) reader: Box<dyn BufRead + 'a>,
    /// Number of the last line, from 1.
    pub(super) line: usize,
    bytes: u64,
    array: Option<ArrayState>,
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
        let array = head.trim_ascii_start().starts_with(b"[").then(ArrayState::default);
        let reader = Box::new(Cursor::new(head).chain(rest));
        Ok(Self { file, reader, line: 0, bytes: 0, array })
    }

    /// Whether the rows are elements of one array.
    pub(super) fn is_array(&self) -> bool {
        self.array.is_some()
    }

    /// The next row: a line that is not blank, or an element of the array. `None` at the end.
    pub(super) fn next_record(&mut self) -> Result<Option<Record>, TraceError> {
        if let Some(state) = self.array.take() {
            let (state, element) = self.next_element(state)?;
            self.array = Some(state);
            return Ok(element);
        }
        let Some(text) = self.next_line()? else { return Ok(None) };
        let ends_file = !text.ends_with(b"\n");
        Ok(Some(Record { line: self.line, text, ends_file }))
    }

    /// The first row, with all that is left if it is an object that goes on in the next line.
    pub(super) fn whole_object(&mut self, mut first: Record) -> Result<Record, TraceError> {
        let goes_on = !self.is_array()
            && serde_json::from_slice::<IgnoredAny>(&first.text).is_err_and(|it| it.is_eof());
        if goes_on {
            self.read_rest(&mut first.text)?;
        }
        Ok(first)
    }

    fn next_line(&mut self) -> Result<Option<Vec<u8>>, TraceError> {
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
    fn read_rest(&mut self, text: &mut Vec<u8>) -> Result<(), TraceError> {
        let room = (HELD_BYTES_MAX + 1).saturating_sub(text.len() as u64);
        let found = self.reader.by_ref().take(room).read_to_end(text);
        let found = found.map_err(|error| self.read_error(error))?;
        self.count(found as u64, text.len())
    }

    /// The next element of the array, as text that may be no JSON.
    fn next_element(
        &mut self,
        mut state: ArrayState,
    ) -> Result<(ArrayState, Option<Record>), TraceError> {
        self.line = self.line.max(1);
        let mut scan = ElementScan::new(self.line);
        loop {
            let available = match self.reader.fill_buf() {
                Ok(available) => available,
                Err(error) => return Err(self.read_error(error)),
            };
            if available.is_empty() {
                let record = (!state.has_ended).then(|| scan.record(true));
                state.has_ended = true;
                return Ok((state, record));
            }
            let (used, found) = scan.feed(available, &mut state);
            self.reader.consume(used);
            self.line = scan.line;
            self.count(used as u64, scan.text.len())?;
            match found {
                Found::More => {}
                Found::Element => return Ok((state, Some(scan.record(false)))),
                Found::Trailing => {
                    return Err(TraceError::Syntax {
                        file: self.file.to_owned(),
                        line: self.line,
                        reason: "trailing characters after the array".to_owned(),
                    });
                }
            }
        }
    }

    /// Counts bytes that were read, and bounds them and those that are held.
    pub(super) fn count(&mut self, found: u64, held: usize) -> Result<(), TraceError> {
        self.bytes += found;
        limit(self.file, "its size in bytes, decompressed,", self.bytes, FILE_BYTES_MAX)?;
        limit(self.file, "the size of one session or line in bytes", held, HELD_BYTES_MAX)
    }

    pub(super) fn read_error(&self, source: io::Error) -> TraceError {
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
