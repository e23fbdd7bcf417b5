//! Files of users: compressed, with other encodings, units and formats. Each is read, or refused
//! with the reason and a command that converts it.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::fs;
use std::io::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use cascade_replay::trace::{
    HELD_BYTES_MAX, ReadOptions, TimeUnit, Trace, TraceError, TraceSource, parse,
};
use ruzstd::encoding::{CompressionLevel, compress_to_vec};

const LINES: &str = "\
{\"timestamp\": 0, \"input_length\": 1100, \"output_length\": 5, \"hash_ids\": [7, 8, 9]}\n\
{\"timestamp\": 2500, \"input_length\": 512, \"output_length\": 1, \"hash_ids\": [7]}\n";

fn read(bytes: &[u8]) -> Result<Trace, TraceError> {
    parse("trace", &[TraceSource { name: "FILE", bytes }], ReadOptions::default())
}

fn refusal(bytes: &[u8]) -> String {
    read(bytes).unwrap_err().to_string()
}

fn plain() -> Trace {
    read(LINES.as_bytes()).unwrap()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn zstd(bytes: &[u8]) -> Vec<u8> {
    compress_to_vec(bytes, CompressionLevel::Fastest)
}

/// It was "not JSON (expected value at line 1 column 1)".
#[test]
fn a_byte_order_mark_is_skipped() {
    let marked = ["\u{feff}", LINES].concat();
    assert_eq!(read(marked.as_bytes()).unwrap(), plain());
    assert_eq!(read(&gzip(marked.as_bytes())).unwrap(), plain());
    let crlf = marked.replace('\n', "\r\n");
    assert_eq!(read(crlf.as_bytes()).unwrap(), plain());
}

#[test]
fn gzip_and_zstd_are_read_by_their_content() {
    let (first, second) = LINES.split_at(LINES.find('\n').unwrap() + 1);
    for compress in [gzip, zstd] {
        assert_eq!(read(&compress(LINES.as_bytes())).unwrap(), plain());
        let members = [compress(first.as_bytes()), compress(second.as_bytes())].concat();
        assert_eq!(read(&members).unwrap(), plain(), "two parts, one after the other");
    }
    let skipped = b"\x50\x2a\x4d\x18\x04\0\0\0\x01\x02\x03\x04";
    assert_eq!(read(&[&skipped[..], &zstd(LINES.as_bytes())].concat()).unwrap(), plain());
}

#[test]
fn a_directory_has_compressed_files_too() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    fs::write(path("a.jsonl.gz"), gzip(LINES.as_bytes())).unwrap();
    fs::write(path("b.json.zst"), zstd(LINES.as_bytes())).unwrap();
    fs::write(path("notes.txt.gz"), gzip(b"notes")).unwrap();
    assert_eq!(Trace::read(directory.path()).unwrap().requests.len(), 4);
}

#[test]
fn damaged_compression_is_an_error_that_names_it() {
    for (compressed, name) in [(gzip(LINES.as_bytes()), "gzip"), (zstd(LINES.as_bytes()), "zstd")] {
        let cut = refusal(&compressed[..compressed.len() - 10]);
        assert!(cut.contains(&format!("its {name} data are damaged or cut off")), "{cut}");
    }
    let mut flipped = gzip(LINES.as_bytes());
    let checksum = flipped.len() - 6;
    flipped[checksum] ^= 1;
    assert!(refusal(&flipped).contains("gzip data are damaged"), "{}", refusal(&flipped));
    let twice = refusal(&gzip(&gzip(LINES.as_bytes())));
    assert_eq!(twice, "FILE is compressed twice; convert it: zcat FILE > trace.jsonl.gz");
}

/// A file of 260 KB held 256 MiB, and one of some MB would have held all memory.
#[test]
fn a_compression_bomb_is_an_error() {
    let blanks = vec![b' '; 1 << 20];
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(b"{").unwrap();
    for _ in 0..=HELD_BYTES_MAX >> 20 {
        encoder.write_all(&blanks).unwrap();
    }
    let text = refusal(&encoder.finish().unwrap());
    assert!(text.contains("the size of one session or line in bytes is 268435457"), "{text}");
    let zeros = refusal(&gzip(&vec![0; 1 << 20]));
    assert_eq!(zeros, "FILE is not text; expected JSON lines or CSV");
}

#[test]
fn other_encodings_and_formats_are_refused_with_a_command_that_converts_them() {
    let utf_16: Vec<u8> = LINES.encode_utf16().flat_map(u16::to_le_bytes).collect();
    let marked = [&b"\xff\xfe"[..], &utf_16].concat();
    assert_eq!(
        refusal(&marked),
        "FILE is text in UTF-16 (little-endian); convert it: iconv -f UTF-16 -t UTF-8 FILE > \
         trace.jsonl"
    );
    assert!(refusal(&utf_16).contains("iconv -f UTF-16LE"), "{}", refusal(&utf_16));
    let big: Vec<u8> = utf_16.chunks(2).flat_map(|pair| [pair[1], pair[0]]).collect();
    assert!(refusal(&big).contains("UTF-16 (big-endian)"), "{}", refusal(&big));
    let parquet = refusal(b"PAR1\x15\x04\x15\0");
    assert!(parquet.starts_with("FILE is Parquet; convert it: python3 -c"), "{parquet}");
    assert!(refusal(b"\xfd7zXZ\0\0").contains("xzcat FILE"));
}

#[test]
fn csv_with_the_columns_of_a_trace_is_read() {
    let csv = "\
hash_ids,timestamp,output_length,input_length,model\r\n\
\"[7, 8, 9]\",0,5,1100,\"a, \"\"b\"\"\"\r\n\
[7],2500,1,512,\r\n";
    assert_eq!(read(csv.as_bytes()).unwrap(), plain());
    let text = refusal(csv.replace("2500", "x").as_bytes());
    assert!(text.contains("FILE:3: field `timestamp`"), "{text}");
    let text = refusal(csv.replace("\"[7, 8, 9]\"", "[7, 8, 9]").as_bytes());
    assert_eq!(text, "FILE:2: not a row of CSV (7 cells for 5 columns)");
}

#[test]
fn other_csv_is_refused_with_its_columns_and_those_expected() {
    let text = refusal(b"name,count\nx,4808\n");
    assert!(text.starts_with("FILE is CSV with the fields name, count; expected"), "{text}");
    assert!(text.contains("TIMESTAMP, ContextTokens, GeneratedTokens (azure)"), "{text}");
    let missing = refusal(b"timestamp;input_length,output_length\n0,1,1\n");
    assert_eq!(
        missing,
        "FILE:1: field `timestamp`: expected a column of this name, as mooncake has it, found the \
         fields timestamp;input_length, output_length"
    );
}

/// They were one block, and the hit rate was that of another trace.
#[test]
fn keys_with_another_number_of_digits_are_other_blocks() {
    let line = |id: &str| {
        let ids = LINES.lines().nth(1).unwrap().replace("[7]", &format!("[\"{id}\"]"));
        ids + "\n"
    };
    let trace = read(["0a", "00a", "0A", "a"].map(line).concat().as_bytes()).unwrap();
    let blocks: Vec<u64> = trace.requests.iter().map(|request| request.blocks[0]).collect();
    assert_eq!(blocks, [0, 1, 0, 2]);
}

#[test]
fn integer_keys_of_64_bits_stay_apart() {
    let text = LINES.replace(
        "[7, 8, 9]",
        "[9007199254740992, 9007199254740993, \
                                          18446744073709551615]",
    );
    assert_eq!(read(text.as_bytes()).unwrap().requests[0].blocks, [0, 1, 2]);
}

/// A file with the requests at these times.
fn with_times(times: &[&str]) -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("trace.jsonl");
    let line = LINES.lines().nth(1).unwrap();
    let lines = times.iter().map(|time| line.replace("2500", time) + "\n");
    fs::write(&path, lines.collect::<String>()).unwrap();
    (directory, path)
}

/// A trace in seconds was replayed 1,000 times too fast, without a word.
#[test]
fn times_that_look_like_another_unit_are_noted() {
    let note = |times: &[&str]| Trace::read(&with_times(times).1).unwrap().time_note();
    assert_eq!(
        note(&["0", "1", "2"]).unwrap(),
        "timestamps were read as milliseconds: 3 requests in 0.002 s; that is 1000 requests a \
         second. If they are seconds, add --time-unit s; if not, --time-unit ms"
    );
    assert!(note(&["0", "5000.25"]).unwrap().contains("some have fractions"));
    assert!(note(&["1790000000.5", "1790000900.5"]).unwrap().contains("--time-unit s"));
    assert!(note(&["0", "900000000"]).unwrap().contains("--time-unit us"));
    for fine in [&["0", "1000", "3500"][..], &["0"], &["5", "5"]] {
        assert_eq!(note(fine), None);
    }
    let recorded = note(&["1790000001001", "1790000001502", "1790000003003"]);
    assert_eq!(recorded, None, "rounding is no fraction");
}

#[test]
fn the_unit_of_times_can_be_given() {
    let (_directory, path) = with_times(&["1.5", "4"]);
    for (unit, micros) in [
        (TimeUnit::Seconds, 4_000_000),
        (TimeUnit::Milliseconds, 4_000),
        (TimeUnit::Microseconds, 4),
    ] {
        let options = ReadOptions { time_unit: Some(unit), ..ReadOptions::default() };
        let trace = Trace::read_files("trace", std::slice::from_ref(&path), options).unwrap();
        assert_eq!(trace.requests[1].at, Duration::from_micros(micros));
    }
}
