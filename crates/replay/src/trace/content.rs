//! Recognises files that are no trace, and says how to convert them.

use super::TraceError;

const UTF_32: &str = "iconv -f UTF-32 -t UTF-8 FILE > trace.jsonl";
const UTF_16: &str = "iconv -f UTF-16 -t UTF-8 FILE > trace.jsonl";
const UTF_16LE: &str = "iconv -f UTF-16LE -t UTF-8 FILE > trace.jsonl";
const UTF_16BE: &str = "iconv -f UTF-16BE -t UTF-8 FILE > trace.jsonl";
const PARQUET: &str = "python3 -c \"import pandas; pandas.read_parquet('FILE').to_json(\
                       'trace.jsonl', orient='records', lines=True)\"";
const FEATHER: &str = "python3 -c \"import pandas; pandas.read_feather('FILE').to_json(\
                       'trace.jsonl', orient='records', lines=True)\"";

/// First bytes, what they mean, and the command that converts such a file. The first match counts.
const FORMATS: &[(&[u8], &str, &str)] = &[
    (b"\xff\xfe\0\0", "text in UTF-32 (little-endian)", UTF_32),
    (b"\0\0\xfe\xff", "text in UTF-32 (big-endian)", UTF_32),
    (b"\xff\xfe", "text in UTF-16 (little-endian)", UTF_16),
    (b"\xfe\xff", "text in UTF-16 (big-endian)", UTF_16),
    (b"{\0", "text in UTF-16 (little-endian)", UTF_16LE),
    (b"\0{", "text in UTF-16 (big-endian)", UTF_16BE),
    (b"PAR1", "Parquet", PARQUET),
    (b"ARROW1", "Arrow", FEATHER),
    (b"\x1f\x8b", "compressed twice", "zcat FILE > trace.jsonl.gz"),
    (b"\x28\xb5\x2f\xfd", "compressed twice", "zstdcat FILE > trace.jsonl.zst"),
    (b"\xfd7zXZ\0", "compressed with xz", "xzcat FILE > trace.jsonl"),
    (b"BZh", "compressed with bzip2", "bzcat FILE > trace.jsonl"),
    (b"\x04\x22\x4d\x18", "compressed with lz4", "lz4 -d FILE trace.jsonl"),
    (b"PK\x03\x04", "a zip archive", "unzip -p FILE > trace.jsonl"),
];

/// Refuses other formats by the first bytes of a file.
pub(super) fn refuse_other_formats(file: &str, head: &[u8]) -> Result<(), TraceError> {
    let begin = head.trim_ascii_start();
    let known = FORMATS.iter().find(|(magic, ..)| begin.starts_with(magic));
    if let Some((_, found, command)) = known {
        return Err(unsupported(file, found, format!("convert it: {command}")));
    }
    if head.contains(&0) {
        return Err(unsupported(file, "not text", "expected JSON lines or CSV".to_owned()));
    }
    Ok(())
}

fn unsupported(file: &str, found: &str, advice: String) -> TraceError {
    TraceError::Unsupported { file: file.to_owned(), found: found.to_owned(), advice }
}
