//! Reads one file or other source: recognises its format, and has its rows read.

use std::io::Read;

use serde_json::Value;

use super::field::{TraceObject, shown};
use super::format::{expected_fields, named_fields};
use super::input::Lines;
use super::parser::Parser;
use super::record::Record;
use super::row::RowReader;
use super::{SkipReason, TraceError, TraceFormat, agents, csv, lengths, mooncake, sharegpt};

/// Reads a source.
pub(super) fn read<'a>(
    parser: &mut Parser,
    name: &'a str,
    bytes: Box<dyn Read + 'a>,
) -> Result<(), TraceError> {
    let before = parser.begin_source();
    let mut lines = Lines::new(name, bytes)?;
    if let Some(first) = lines.next_record()? {
        read_rows(parser, &mut lines, first)?;
    }
    parser.end_source(name, before)
}

/// Reads a record and all after it in the format of the record.
fn read_rows(parser: &mut Parser, lines: &mut Lines<'_>, first: Record) -> Result<(), TraceError> {
    if !lines.is_array() && csv::is_header(&first.text) {
        return csv::parse(parser, lines, first.text, reader_of);
    }
    let mut next = Some(lines.whole_object(first)?);
    let mut format = None;
    while let Some(record) = next {
        let value = match record.parse(lines.file) {
            Err(_) if record.is_incomplete() && parser.has_rows() => {
                parser.skip(SkipReason::CutOff);
                return Ok(());
            }
            other => other?,
        };
        let format = match format {
            Some(format) => format,
            None => *format.insert(begin_format(parser, lines.file, &value)?),
        };
        let object = TraceObject { file: lines.file, line: record.line, prefix: "", value: &value };
        if !value.is_object() {
            return Err(object.error("", "a JSON object", shown(&value)));
        }
        let outcome = reader_of(format)(parser, format, object)?;
        parser.count(outcome);
        next = if parser.is_enough() { None } else { lines.next_record()? };
    }
    Ok(())
}

fn begin_format(parser: &mut Parser, file: &str, first: &Value) -> Result<TraceFormat, TraceError> {
    let format = parser.options.format.or_else(|| TraceFormat::of_record(first));
    let format = format.ok_or_else(|| {
        let names = first.as_object().into_iter().flat_map(serde_json::Map::keys);
        TraceError::Unsupported {
            file: file.to_owned(),
            found: format!("JSON with {}", named_fields(names.map(String::as_str))),
            advice: expected_fields(),
        }
    })?;
    parser.begin(format);
    Ok(format)
}

/// What reads a row of a format.
fn reader_of(format: TraceFormat) -> RowReader {
    match format {
        TraceFormat::Mooncake | TraceFormat::QwenBailian => mooncake::row,
        TraceFormat::Azure | TraceFormat::BurstGpt => lengths::row,
        TraceFormat::Agents => agents::row,
        TraceFormat::ShareGpt => sharegpt::row,
    }
}
