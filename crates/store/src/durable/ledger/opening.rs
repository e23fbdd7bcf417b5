//! Opening of a pool with its ledger: checks the header, or writes a new one.

use std::fs;
use std::path::Path;
use std::sync::atomic::Ordering;

use cascade_block::{ByteSize, checksum};
use cascade_memory::{MemoryError, Pool, PoolConfig, PoolFiles};
use cascade_runtime::Clock;

use super::record::{BLOCK_WORDS, HELD_WORDS};
use super::{
    HEADER_FIELDS, HEADER_WORDS, HELD_MAX, HELD_MIN, LedgerTable, MAGIC, PAGE, POOL_BYTES_PER_HELD,
    POOL_BYTES_PER_RECORD, RECORDS_MIN, RUNS_WORD, USED, USED_WORD, VERSION, VERSION_WORD,
    WarmPool,
};

/// Removes the files of an earlier run, unless a store uses them.
pub(crate) fn remove(path: &Path) -> Result<(), MemoryError> {
    PoolFiles::discard(path)
}

/// Bytes of the ledger of a pool, which lies beside it.
pub fn ledger_bytes(pool_bytes: u64) -> u64 {
    let bytes = usize::try_from(pool_bytes).unwrap_or(usize::MAX - PAGE).next_multiple_of(PAGE);
    table_bytes(block_count(bytes), held_count(bytes)) as u64
}

fn block_count(pool_bytes: usize) -> usize {
    (pool_bytes / POOL_BYTES_PER_RECORD).max(RECORDS_MIN)
}

fn held_count(pool_bytes: usize) -> usize {
    (pool_bytes / POOL_BYTES_PER_HELD).clamp(HELD_MIN, HELD_MAX)
}

fn table_bytes(block_count: usize, held_count: usize) -> usize {
    let words = HEADER_WORDS + block_count * BLOCK_WORDS + held_count * HELD_WORDS;
    (words * size_of::<u64>()).next_multiple_of(PAGE)
}

/// Opens or makes the files, and recovers the blocks that the ledger describes. `stages` are the
/// names of the stages below DRAM.
pub(crate) fn open(
    path: &Path,
    config: &PoolConfig,
    stages: &[String],
    clock: &dyn Clock,
) -> Result<WarmPool, MemoryError> {
    let pool_bytes = config.capacity_bytes.next_multiple_of(PAGE);
    let (block_count, held_count) = (block_count(pool_bytes), held_count(pool_bytes));
    let table_bytes = table_bytes(block_count, held_count);
    // Read before the files are opened, which replaces a pool of another size.
    let bytes_before = path.metadata().ok().map(|file| file.len());
    let mut files = PoolFiles::open(path, pool_bytes, table_bytes)?;
    let sizes = [pool_bytes, block_count, held_count].map(|size| size as u64);
    let mut notes = Vec::new();
    let is_known = files.is_reused() && has_header(&files, header(&files, sizes)?);
    let is_used = is_known && files.words().words()[USED_WORD].load(Ordering::Acquire) == USED;
    if is_used {
        files.persist();
    } else {
        // A start that was killed before its first block left nothing to recover.
        if let Some(bytes) = bytes_before.filter(|_| !is_known) {
            notes.push(discarded(path, bytes, pool_bytes as u64));
        }
        if files.is_reused() {
            files.recreate()?;
        }
        write_header(&files, header(&files, sizes)?);
    }
    let runs = &files.words().words()[RUNS_WORD];
    // Relaxed: the file's lock excludes other processes, and no other thread has the table yet.
    let runs = runs.fetch_add(1, Ordering::Relaxed) + 1;
    let pool = Pool::of_files(config, &files)?;
    let count = |count: usize| u32::try_from(count).map_err(|_| MemoryError::Empty);
    let table =
        LedgerTable { files, block_count: count(block_count)?, held_count: count(held_count)? };
    // All memory is allocated by now, which can take far longer.
    let started = clock.monotonic();
    let mut opened = WarmPool::new(table, pool, is_used, stages);
    let took = clock.monotonic().saturating_sub(started);
    opened.stats.recover_ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
    opened.stats.runs = runs;
    opened.notes = notes;
    Ok(opened)
}

/// The note for operators when an earlier pool cannot be used.
fn discarded(path: &Path, bytes_before: u64, pool_bytes: u64) -> String {
    let path = path.display();
    if bytes_before == pool_bytes {
        return format!(
            "the blocks in {path} were discarded: written by another version, or before a reboot"
        );
    }
    let [before, now] = [bytes_before, pool_bytes].map(|bytes| ByteSize(bytes).rounded());
    format!(
        "the blocks in {path} were discarded: DRAM had {before} and has {now} now; blocks in lower \
         tiers are kept"
    )
}

/// The expected header: this version, this pool's sizes and file, this boot.
fn header(files: &PoolFiles, sizes: [u64; 3]) -> Result<[u64; HEADER_FIELDS], MemoryError> {
    let [pool_bytes, block_count, held_count] = sizes;
    // A pool file that was replaced has another inode: the records do not describe its bytes.
    let [device, inode] = files.pool_identity()?;
    let [boot_low, boot_high] = boot_id();
    // Numbers and widths of records, so that a build with another layout rejects the file.
    let records = [block_count, held_count, (BLOCK_WORDS << 32 | HELD_WORDS) as u64];
    let [blocks, held, words] = records;
    Ok([MAGIC, VERSION, pool_bytes, blocks, held, words, device, inode, boot_low, boot_high])
}

/// Whether the files have this header, complete.
fn has_header(files: &PoolFiles, header: [u64; HEADER_FIELDS]) -> bool {
    let words = files.words().words();
    let is_boot_known = header[8..] != [0, 0];
    let was = std::array::from_fn(|at| words[at].load(Ordering::Relaxed));
    let is_complete = is_complete(&was, words[HEADER_FIELDS].load(Ordering::Acquire));
    is_boot_known && is_complete && was == header
}

/// Whether a header with these words and this checksum is one of this version, and complete.
pub(super) fn is_complete(header: &[u64; HEADER_FIELDS], sum: u64) -> bool {
    header[0] == MAGIC && header[VERSION_WORD] == VERSION && sum == header_sum(header)
}

fn write_header(files: &PoolFiles, header: [u64; HEADER_FIELDS]) {
    let words = files.words().words();
    for (word, field) in words.iter().zip(header) {
        word.store(field, Ordering::Relaxed);
    }
    words[RUNS_WORD].store(0, Ordering::Relaxed);
    words[USED_WORD].store(0, Ordering::Relaxed);
    // The checksum comes last: the next start does not accept a header that was not completed.
    words[HEADER_FIELDS].store(header_sum(&header), Ordering::Release);
}

pub(super) fn header_sum(header: &[u64; HEADER_FIELDS]) -> u64 {
    let bytes: Vec<u8> = header.iter().flat_map(|field| field.to_le_bytes()).collect();
    u64::from(checksum(&bytes))
}

/// Identifies the boot: after another one, a file on a disk may hold older bytes than its table
/// says. Zero where the kernel does not provide it; then no pool is ever recovered.
pub(super) fn boot_id() -> [u64; 2] {
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    let half = |range| u64::from_str_radix(digits.get(range).unwrap_or(""), 16).unwrap_or(0);
    [half(0..16), half(16..32)]
}
