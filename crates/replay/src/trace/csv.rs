//! Rows of CSV, as JSON objects of the fields of their format.

use std::io::{self, Cursor, Read};

use csv::{ByteRecord, Reader, ReaderBuilder, StringRecord, Terminator, Trim};
use serde_json::{Map, Value};

use super::field::TraceObject;
use super::format::{expected_fields, is_column, named_fields};
use super::input::Lines;
use super::parser::Parser;
use super::row::RowReader;
use super::{SkipReason, TraceError, TraceFormat};

/// Whether a first line has columns.
pub(super) fn is_header(line: &[u8]) -> bool {
    let line = line.trim_ascii();
    !line.starts_with(b"{") && line.iter().any(|byte| matches!(byte, b',' | b';' | b'\t'))
}

/// Parses the rows below a header.
pub(super) fn parse(
    parser: &mut Parser,
    lines: &mut Lines<'_>,
    header: Vec<u8>,
    reader_of: fn(TraceFormat) -> RowReader,
) -> Result<(), TraceError> {
    let source = CsvSource::new(lines, header);
    let mut options = ReaderBuilder::new();
    options.has_headers(false).flexible(true).trim(Trim::All);
    // A carriage return before it is trimmed. As a terminator of its own it would hide which line
    // a row has.
    options.terminator(Terminator::Any(b'\n'));
    let reader = options.from_reader(source);
    let mut table = Table { reader, row: ByteRecord::new(), columns: Vec::new(), width: 0 };
    let format = table.read_header(parser)?;
    parser.begin(format);
    let read = reader_of(format);
    while !parser.is_enough() && table.next_row()? {
        if let Err(error) = table.read_row(parser, format, read) {
            if table.is_cut_off()? && parser.has_rows() {
                parser.skip(SkipReason::CutOff);
                return Ok(());
            }
            return Err(error);
        }
    }
    Ok(())
}

struct Table<'l, 'a> {
    reader: Reader<CsvSource<'l, 'a>>,
    row: ByteRecord,
    /// The fields of the format, with their columns.
    columns: Vec<(&'static str, usize)>,
    /// Number of columns of the header.
    width: usize,
}

impl Table<'_, '_> {
    fn file(&self) -> &str {
        self.reader.get_ref().lines.file
    }

    /// The first line of the row that was read last, from 1.
    fn line(&self) -> usize {
        let (source, position) = (self.reader.get_ref(), self.reader.position());
        let is_at_end = position.byte() == source.bytes && source.last_byte != b'\n';
        let behind = usize::try_from(position.line()).unwrap_or(usize::MAX / 2);
        let last = source.lines_before + behind - usize::from(!is_at_end && behind > 1);
        let inside = count(self.row.as_slice(), b'\n');
        last.saturating_sub(inside).max(1)
    }

    /// Reads the next row that is not blank. False at the end.
    fn next_row(&mut self) -> Result<bool, TraceError> {
        loop {
            self.reader.get_mut().held = 0;
            match self.reader.read_byte_record(&mut self.row) {
                Ok(true) if self.row.len() == 1 && self.row.as_slice().is_empty() => {}
                Ok(is_there) => return Ok(is_there),
                Err(error) => return Err(self.failure(error)),
            }
        }
    }

    fn failure(&mut self, error: csv::Error) -> TraceError {
        let line = self.line();
        let source = self.reader.get_mut();
        if let Some(failure) = source.failure.take() {
            return failure;
        }
        match error.into_kind() {
            csv::ErrorKind::Io(error) => source.lines.read_error(error),
            other => TraceError::Row {
                file: source.lines.file.to_owned(),
                line,
                reason: format!("{other:?}"),
            },
        }
    }

    fn damage(&self, reason: String) -> TraceError {
        TraceError::Row { file: self.file().to_owned(), line: self.line(), reason }
    }

    fn text(&self) -> Result<StringRecord, TraceError> {
        let text = StringRecord::from_byte_record(self.row.clone());
        text.map_err(|error| self.damage(error.to_string()))
    }

    fn read_header(&mut self, parser: &Parser) -> Result<TraceFormat, TraceError> {
        self.next_row()?;
        let names: Vec<String> = self.text()?.iter().map(ToOwned::to_owned).collect();
        let found = || named_fields(names.iter().map(String::as_str));
        let format = parser.options.format.or_else(|| TraceFormat::of_columns(&names));
        let Some(format) = format.filter(|format| format.has_csv()) else {
            let advice = match format {
                Some(format) => format!("{format} is JSON with `{}`", format.fields().0[0]),
                None => expected_fields(),
            };
            let found = format!("CSV with {}", found());
            return Err(TraceError::Unsupported { file: self.file().to_owned(), found, advice });
        };
        let (required, optional) = format.fields();
        for field in required.iter().chain(optional) {
            let exact = names.iter().position(|name| name == field);
            let column = exact.or_else(|| names.iter().position(|name| is_column(name, field)));
            if let Some(column) = column {
                self.columns.push((field, column));
            } else if required.contains(field) {
                return Err(TraceError::Field {
                    file: self.file().to_owned(),
                    line: self.line(),
                    field: (*field).to_owned(),
                    expected: format!("a column of this name, as {format} has it"),
                    found: found(),
                });
            }
        }
        self.width = names.len();
        Ok(format)
    }

    fn read_row(
        &self,
        parser: &mut Parser,
        format: TraceFormat,
        read: RowReader,
    ) -> Result<(), TraceError> {
        if self.row.len() != self.width {
            return Err(self.damage(format!(
                "{} cells for {} columns",
                self.row.len(),
                self.width
            )));
        }
        let text = self.text()?;
        let cell = |column: usize| value(text.get(column).unwrap_or_default());
        let fields = self.columns.iter().map(|(name, at)| ((*name).to_owned(), cell(*at)));
        let object = Value::Object(fields.collect::<Map<_, _>>());
        let (file, line) = (self.file(), self.line());
        let outcome = read(parser, format, TraceObject { file, line, prefix: "", value: &object })?;
        parser.count(outcome);
        Ok(())
    }

    /// Whether the file ends within this row: after too few cells, or within quotes.
    fn is_cut_off(&mut self) -> Result<bool, TraceError> {
        let is_short = self.row.len() < self.width;
        let is_last = !self.next_row()?;
        let source = self.reader.get_ref();
        let is_in_quotes = !source.quotes.is_multiple_of(2);
        Ok(is_last && source.last_byte != b'\n' && (is_short || is_in_quotes))
    }
}

fn count(bytes: &[u8], byte: u8) -> usize {
    bytes.iter().map(|one| usize::from(*one == byte)).sum()
}

/// A cell as JSON: a number or a list if it is one, nothing if it is empty, else text.
fn value(cell: &str) -> Value {
    match cell.trim() {
        "" => Value::Null,
        text => serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.to_owned())),
    }
}

/// The bytes of a file of CSV, counted and bounded.
struct CsvSource<'l, 'a> {
    lines: &'l mut Lines<'a>,
    header: Cursor<Vec<u8>>,
    /// Lines before the header.
    lines_before: usize,
    bytes: u64,
    /// Bytes since the last row.
    held: usize,
    quotes: usize,
    last_byte: u8,
    /// Why the reading ended, if it did.
    failure: Option<TraceError>,
}

impl<'l, 'a> CsvSource<'l, 'a> {
    fn new(lines: &'l mut Lines<'a>, header: Vec<u8>) -> Self {
        let lines_before = lines.line - 1;
        Self {
            lines,
            header: Cursor::new(header),
            lines_before,
            bytes: 0,
            held: 0,
            quotes: 0,
            last_byte: b'\n',
            failure: None,
        }
    }
}

impl Read for CsvSource<'_, '_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut found = self.header.read(buffer)?;
        if found == 0 {
            found = self.lines.reader.read(buffer)?;
            self.held += found;
            if let Err(failure) = self.lines.count(found as u64, self.held) {
                self.failure = Some(failure);
                return Err(io::Error::other("a limit of a trace"));
            }
        }
        let bytes = buffer.get(..found).unwrap_or_default();
        self.bytes += found as u64;
        self.quotes += count(bytes, b'"');
        self.last_byte = bytes.last().copied().unwrap_or(self.last_byte);
        Ok(found)
    }
}
