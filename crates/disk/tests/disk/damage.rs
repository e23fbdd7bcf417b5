//! Flipped bits and truncated files give a miss or reported damage, never wrong bytes.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cascade_block::checksum;
use cascade_disk::conformance::{
    append, assert_gone, assert_hits, content, deadline, key, meta, open, pool,
};
use cascade_disk::format::{FORMAT_VERSION, PAGE_BYTES, SegmentHeader, page_checksum};
use cascade_disk::scan::{ScanOptions, SegmentContent, read_segment};
use cascade_disk::{DiskError, FilesConfig, Load, LoadOutcome, inspect};
use cascade_memory::Pool;
use cascade_runtime::SystemClock;
use cascade_tier::tier::Tier as _;

const BLOCKS: [(u64, usize); 6] = [(0, 100), (1, 4096), (2, 9000), (3, 1), (4, 16_384), (5, 4097)];
const OPTIONS: ScanOptions<'_> = ScanOptions { number: 0, covered: None, verify_scanned: true };

fn config(directory: &Path) -> FilesConfig {
    FilesConfig {
        capacity_bytes: 4 << 20,
        segment_bytes: 256 << 10,
        direct: false,
        ..FilesConfig::new(directory)
    }
}

/// A directory with one sealed segment.
fn sealed_segment(pool: &Pool) -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let clock = || Arc::new(SystemClock);
    let (files, _) = open(config(directory.path()), clock(), pool, deadline()).unwrap();
    append(files.as_ref(), pool, &BLOCKS[..3]);
    append(files.as_ref(), pool, &BLOCKS[3..]);
    drop(files);
    // Opening again seals it.
    drop(open(config(directory.path()), clock(), pool, deadline()).unwrap());
    let segment = directory.path().join("w0-00000000.segment");
    (directory, segment)
}

fn scan(bytes: &[u8]) -> Option<SegmentContent> {
    read_segment(&bytes, OPTIONS).ok()
}

/// Opens a directory and reads all blocks that it lists. Returns how many were read back.
fn read_back(directory: &Path, pool: &Pool) -> usize {
    let opened = open(config(directory), Arc::new(SystemClock), pool, deadline());
    let (files, recovery) = match opened {
        Ok(opened) => opened,
        Err(DiskError::UnknownVersion { .. }) => return 0,
        Err(error) => panic!("{error:?}"),
    };
    let mut hits = 0;
    for (meta, address) in recovery.live {
        let length = meta.bytes as usize;
        let slab = pool.allocate(length).unwrap();
        let request = Load { address, key: meta.key, slab };
        if let LoadOutcome::Hit(slab) = files.load(vec![request], deadline()).remove(0) {
            let number = BLOCKS.iter().find(|(number, _)| key(*number) == meta.key).unwrap().0;
            assert!(
                slab.host() == Some(&content(number, length)),
                "block {number} has wrong bytes"
            );
            hits += 1;
        }
    }
    hits
}

/// Changes a page to that of a later version, which ends with the checksum that all versions have.
fn set_version(page: &mut [u8], version: u16) {
    page[8..10].copy_from_slice(&version.to_le_bytes());
    let sum = page_checksum(&page[..PAGE_BYTES]);
    page[PAGE_BYTES - 4..PAGE_BYTES].copy_from_slice(&sum.to_le_bytes());
}

#[test]
fn a_flipped_bit_in_any_structure_is_detected() {
    let pool = pool();
    let (_directory, segment) = sealed_segment(&pool);
    let good = fs::read(&segment).unwrap();
    let original = scan(&good).unwrap();
    assert_eq!(original.entries.len(), BLOCKS.len());
    let trailer = original.trailer.unwrap();
    let footer = trailer.entries_page as usize * PAGE_BYTES;
    let structures = (0..2 * PAGE_BYTES).chain(footer..good.len());
    let mut bytes = good.clone();
    for (at, bit) in structures.enumerate().map(|(step, at)| (at, step % 8)) {
        bytes[at] ^= 1 << bit;
        if let Some(content) = scan(&bytes) {
            let is_known = |entry| original.entries.contains(entry);
            assert!(
                content.entries.iter().all(is_known),
                "byte {at}: an entry that was never written"
            );
        }
        bytes[at] ^= 1 << bit;
    }
    assert!(bytes == good);
}

#[test]
fn flipped_bits_never_return_wrong_bytes() {
    let pool = pool();
    let (directory, segment) = sealed_segment(&pool);
    let good = fs::read(&segment).unwrap();
    for step in 0..250 {
        let at = step * good.len() / 250 + step % 7;
        let mut bytes = good.clone();
        bytes[at] ^= 1 << (step % 8);
        fs::write(&segment, &bytes).unwrap();
        let hits = read_back(directory.path(), &pool);
        assert!(hits <= BLOCKS.len(), "byte {at}");
        fs::remove_file(&segment).unwrap();
        for leftover in fs::read_dir(directory.path()).unwrap() {
            fs::remove_file(leftover.unwrap().path()).unwrap();
        }
    }
}

#[test]
fn truncated_files_return_their_remaining_blocks() {
    let pool = pool();
    let (directory, segment) = sealed_segment(&pool);
    let good = fs::read(&segment).unwrap();
    let mut hits_before = 0;
    for length in (0..good.len()).step_by(512) {
        fs::write(&segment, &good[..length]).unwrap();
        let hits = read_back(directory.path(), &pool);
        assert!(hits >= hits_before, "{length} bytes hold {hits} blocks, fewer held {hits_before}");
        hits_before = hits;
    }
    assert_eq!(hits_before, BLOCKS.len());
}

#[test]
fn frames_of_another_segment_are_ignored() {
    let pool = pool();
    let (_directory, segment) = sealed_segment(&pool);
    let mut bytes = fs::read(&segment).unwrap();
    let header = SegmentHeader::decode(&bytes).unwrap();
    // The same disk blocks, now with the header of a newer segment.
    SegmentHeader { segment_id: [9; 16], ..header }.encode(&mut bytes);
    let content = scan(&bytes).unwrap();
    assert!(content.entries.is_empty(), "{content:?}");
}

#[test]
fn another_format_version_is_refused_with_the_file_name() {
    let pool = pool();
    let (directory, segment) = sealed_segment(&pool);
    let mut bytes = fs::read(&segment).unwrap();
    set_version(&mut bytes, FORMAT_VERSION + 1);
    fs::write(&segment, &bytes).unwrap();
    let error = open(config(directory.path()), Arc::new(SystemClock), &pool, deadline())
        .expect_err("a newer format");
    let text = error.to_string();
    assert!(matches!(error, DiskError::UnknownVersion { found: 2, .. }), "{text}");
    assert!(text.contains("w0-00000000.segment") && text.contains("version 2"), "{text}");
    assert_eq!(fs::read(&segment).unwrap(), bytes, "the file is unchanged");
    let report = inspect(directory.path(), true, &mut |_| {}).unwrap();
    assert!(!report.is_clean());
}

#[test]
fn an_inspection_finds_a_damaged_block() {
    let pool = pool();
    let (directory, segment) = sealed_segment(&pool);
    let clean = inspect(directory.path(), true, &mut |_| {}).unwrap();
    assert!(clean.is_clean(), "{clean:?}");
    assert_eq!(clean.files[0].live_records, 6);
    let mut bytes = fs::read(&segment).unwrap();
    let entry = scan(&bytes).unwrap().entries[4];
    bytes[(entry.address.0 & 0xffff_ffff) as usize * PAGE_BYTES + 77] ^= 4;
    fs::write(&segment, &bytes).unwrap();
    let mut damaged = Vec::new();
    let report = inspect(directory.path(), true, &mut |record| {
        if record.state == cascade_disk::inspect::RecordState::Damaged {
            damaged.push(record.meta.key);
        }
    });
    let report = report.unwrap();
    assert!(!report.is_clean());
    assert_eq!((report.files[0].damaged_records, report.files[0].live_records), (1, 5));
    assert_eq!(damaged, [key(4)]);
}

/// A slab whose bytes changed after its checksum was recorded got a new, valid checksum in its file
/// if nothing else compared them.
#[test]
fn a_slab_that_changed_in_memory_is_not_stored_and_its_neighbours_are() {
    let (pool, directory) = (pool(), tempfile::tempdir().unwrap());
    let (files, _) =
        open(config(directory.path()), Arc::new(SystemClock), &pool, deadline()).unwrap();
    let batch: Vec<_> = BLOCKS
        .iter()
        .map(|&(number, length)| {
            let mut slab = pool.allocate(length).unwrap();
            slab.fill_from(&content(number, length)).unwrap();
            let slab = slab.seal();
            let bytes = slab.host().expect("host memory");
            assert!(slab.verify_checksum(checksum(bytes)), "records the checksum");
            if number == 2 {
                let file = pool.region().host().expect("host memory").file();
                file.write_all_at(&[!bytes[77]], slab.offset() as u64 + 77).unwrap();
            }
            (meta(number, length), slab)
        })
        .collect();
    let results = files.append(batch, deadline());
    for (&(number, length), result) in BLOCKS.iter().zip(results) {
        if number == 2 {
            assert!(matches!(result, Err(DiskError::ChangedInMemory)), "{result:?}");
            continue;
        }
        let address = result.unwrap();
        let slab = pool.allocate(length).unwrap();
        let request = Load { address, key: key(number), slab };
        let outcome = files.load(vec![request], deadline()).remove(0);
        let LoadOutcome::Hit(slab) = outcome else { panic!("{number}: {outcome:?}") };
        assert!(slab.host() == Some(&content(number, length)), "block {number}");
    }
    assert_eq!(files.disk_stats().live_records, 5);
}

/// Damage of the first frame was not counted if the header was damaged too, and a frame of another
/// version was taken for damage.
#[test]
fn a_damaged_first_frame_behind_a_damaged_header_is_counted() {
    let pool = pool();
    let (directory, segment) = sealed_segment(&pool);
    let mut bytes = fs::read(&segment).unwrap();
    // Without its footer, the segment's ID is in the header and in the frames only.
    let entries_page = scan(&bytes).unwrap().trailer.unwrap().entries_page as usize;
    bytes.truncate(entries_page * PAGE_BYTES);
    bytes.resize(bytes.len() + PAGE_BYTES, 0);
    bytes[20] ^= 1;
    let header_only = scan(&bytes).unwrap();
    assert_eq!((header_only.damaged_structures, header_only.entries.len()), (1, BLOCKS.len()));
    let good_frame = bytes[PAGE_BYTES..2 * PAGE_BYTES].to_vec();
    bytes[PAGE_BYTES + 20] ^= 1;
    let both = scan(&bytes).unwrap();
    assert_eq!((both.damaged_structures, both.entries.len()), (2, 0));
    fs::write(&segment, &bytes).unwrap();
    let opened = open(config(directory.path()), Arc::new(SystemClock), &pool, deadline());
    let (files, recovery) = opened.unwrap();
    assert_eq!((recovery.live.len(), recovery.damaged_structures), (0, 2));
    let problems = files.stats().notes;
    assert!(problems.iter().any(|each| each.contains("none of its blocks")), "{problems:?}");
    drop(files);

    bytes[PAGE_BYTES..2 * PAGE_BYTES].copy_from_slice(&good_frame);
    set_version(&mut bytes[PAGE_BYTES..], FORMAT_VERSION + 1);
    fs::write(&segment, &bytes).unwrap();
    let opened = open(config(directory.path()), Arc::new(SystemClock), &pool, deadline());
    let error = opened.expect_err("a newer format");
    assert!(matches!(error, DiskError::UnknownVersion { found: 2, .. }), "{error}");
    assert_eq!(fs::read(&segment).unwrap(), bytes, "the file is unchanged");
}

/// Blocks in files that somebody had removed counted as written: a flush succeeded, and after a
/// restart they were missing.
#[test]
fn a_flush_reports_files_that_were_removed_in_use() {
    let (pool, directory) = (pool(), tempfile::tempdir().unwrap());
    let (files, _) =
        open(config(directory.path()), Arc::new(SystemClock), &pool, deadline()).unwrap();
    let lost = append(files.as_ref(), &pool, &BLOCKS[..3]);
    files.checkpoint(deadline()).unwrap();
    let segment = directory.path().join("w0-00000000.segment");
    fs::remove_file(&segment).unwrap();
    // As an administrator may do who mistakes it for the store's.
    fs::create_dir(&segment).unwrap();
    assert_hits(files.as_ref(), &pool, &lost);
    let error = files.checkpoint(deadline()).expect_err("the blocks are lost");
    assert!(error.to_string().contains("w0-00000000.segment"), "{error}");
    assert_gone(files.as_ref(), &pool, &lost);
    assert_eq!((files.disk_stats().structures_damaged, files.used_bytes()), (1, 0));
    let problems = files.stats().notes;
    assert!(problems.iter().any(|each| each.contains("was removed")), "{problems:?}");
    let kept = append(files.as_ref(), &pool, &BLOCKS[3..]);
    files.checkpoint(deadline()).expect("reported once");
    drop(files);
    let (files, recovery) =
        open(config(directory.path()), Arc::new(SystemClock), &pool, deadline()).unwrap();
    assert_eq!(recovery.live.len(), kept.len());
    assert_hits(files.as_ref(), &pool, &kept);
}
