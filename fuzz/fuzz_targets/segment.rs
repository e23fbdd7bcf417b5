//! Fuzzes the decoding of segments, footers and checkpoints: no panic, and no more entries than the
//! bytes can hold.
//!
//! Most random inputs would fail a checksum, so half of the inputs get correct checksums.
#![no_main]

use cascade_disk::format::{
    Checkpoint, ENTRY_BYTES, PAGE_BYTES, RecordEntry, SegmentHeader, SegmentTrailer, decode_entries,
};
use cascade_disk::scan::{ScanOptions, read_segment};
use libfuzzer_sys::fuzz_target;

/// Corrects the checksum of each page, as an attacker would.
fn repair_pages(bytes: &mut [u8]) {
    for page in bytes.chunks_exact_mut(PAGE_BYTES) {
        let sum = cascade_disk::format::page_checksum(page);
        page[PAGE_BYTES - 4..].copy_from_slice(&sum.to_le_bytes());
    }
}

fn check(bytes: &[u8]) {
    for verify_scanned in [false, true] {
        let options = ScanOptions { number: 0, covered: None, verify_scanned };
        if let Ok(content) = read_segment(&bytes, options) {
            assert!(content.entries.len() * ENTRY_BYTES <= bytes.len());
            assert_eq!(content.file_bytes, bytes.len() as u64);
        }
    }
    if let Ok(checkpoint) = Checkpoint::decode(bytes) {
        assert_eq!(checkpoint.encode().len(), bytes.len());
    }
    if let Ok(entry) = RecordEntry::decode(bytes) {
        let mut again = [0; ENTRY_BYTES];
        entry.encode(&mut again);
        assert_eq!(RecordEntry::decode(&again), Ok(entry));
    }
    drop(SegmentHeader::decode(bytes));
    drop(SegmentTrailer::decode(bytes, bytes.len() as u64));
    drop(decode_entries(bytes, 0));
}

fuzz_target!(|input: (bool, u8, Vec<u8>)| {
    // Inputs are shorter than a page. Spread them over pages that each start with the fuzzer's
    // bytes.
    let (repair, spread, seed) = input;
    let chunk = usize::from(spread).max(16);
    let mut bytes = Vec::new();
    for part in seed.chunks(chunk).take(16) {
        let mut page = vec![0; PAGE_BYTES];
        page[..part.len()].copy_from_slice(part);
        bytes.extend_from_slice(&page);
    }
    if repair {
        repair_pages(&mut bytes);
    }
    check(&bytes);
    check(&seed);
});
