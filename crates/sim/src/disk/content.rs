//! The content of a simulated file: sparse pages, and what a power loss may leave of unsynced ones.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::ops::Range;

use cascade_disk::format::PAGE_BYTES;
use cascade_runtime::simulated::Random;

/// What a disk writes at once: a power loss leaves the old or the new bytes of a sector.
pub(super) const SECTOR_BYTES: usize = 512;
/// Contents kept of a page that is overwritten again and again without a sync.
const OVERWRITTEN_MAX: usize = 3;
/// Pages of a file that were never written and read as noise after a power loss.
const NOISE_PAGES_MAX: u64 = 4;
const PAGE: u64 = PAGE_BYTES as u64;

type Page = Box<[u8; PAGE_BYTES]>;

/// The content of a file. A page that is missing reads as zeroes.
#[derive(Debug, Default)]
pub(super) struct Content {
    /// Whether it has a name. Without one its space counts as free.
    pub(super) is_linked: bool,
    pages: BTreeMap<u64, Page>,
    length: u64,
    /// Pages from the start of the file whose space is taken even if they are missing.
    allocated_pages: u64,
    /// Pages that are not in `allocated_pages` and have space of their own.
    extra_pages: u64,
    /// Pages whose content may not survive a power loss.
    unsynced: BTreeMap<u64, PageHistory>,
    durable_length: u64,
    /// Number of the last change of a page or of the length.
    changes: u64,
    /// The last change that a sync has made durable.
    synced_changes: u64,
    syncs_in_flight: u32,
    /// Pages that fail to be read until they are written again.
    bad_pages: BTreeSet<u64>,
}

/// The contents of a page that a power loss may leave, beside the current one.
#[derive(Debug)]
struct PageHistory {
    /// The content that is on stable storage.
    durable: Option<Page>,
    /// Later contents that were overwritten, each with the change that wrote it. The device may
    /// have written any of them back.
    overwritten: Vec<(u64, Option<Page>)>,
    /// The change that wrote the current content.
    written_by: u64,
    /// The current content is in the page cache alone. No sync makes it durable.
    is_lost: bool,
}

/// What a sync makes durable: everything before its start.
#[derive(Debug, Clone, Copy)]
pub(super) struct SyncPoint {
    changes: u64,
    length: u64,
    /// The last change of a name on the disk.
    pub(super) name_changes: u64,
}

/// Which unsynced pages of a file a power loss leaves.
#[derive(Debug, Clone, Copy)]
enum Survivors {
    All,
    None,
    /// The pages before this one.
    Before(u64),
    /// Some of the contents of each page, sector by sector.
    Mixed,
}

impl Content {
    /// An empty file, or one of zeroes whose space is allocated.
    pub(super) fn new(allocated_bytes: u64) -> Self {
        let allocated_pages = allocated_bytes.div_ceil(PAGE);
        Self { is_linked: true, length: allocated_bytes, allocated_pages, ..Self::default() }
    }

    pub(super) fn length(&self) -> u64 {
        self.length
    }

    /// Pages that the file uses on the device.
    pub(super) fn used_pages(&self) -> u64 {
        self.allocated_pages + self.extra_pages
    }

    /// Pages that a write of this range needs in addition.
    pub(super) fn missing_pages(&self, offset: u64, bytes: usize) -> u64 {
        let is_missing =
            |index: &u64| *index >= self.allocated_pages && !self.pages.contains_key(index);
        pages_of(offset, bytes).filter(is_missing).count() as u64
    }

    /// Whether the range has a page that cannot be read.
    pub(super) fn has_bad_page(&self, offset: u64, bytes: usize) -> bool {
        !self.bad_pages.is_empty() && self.bad_pages.range(pages_of(offset, bytes)).next().is_some()
    }

    /// Reads up to the end of the file. Returns the number of bytes read.
    pub(super) fn read(&self, offset: u64, buffer: &mut [u8]) -> usize {
        let left = usize::try_from(self.length.saturating_sub(offset)).unwrap_or(usize::MAX);
        let bytes = buffer.len().min(left);
        let mut at = 0;
        while at < bytes {
            let (index, start) = position(offset + at as u64);
            let step = (PAGE_BYTES - start).min(bytes - at);
            let target = &mut buffer[at..at + step];
            match self.pages.get(&index) {
                Some(page) => target.copy_from_slice(&page[start..start + step]),
                None => target.fill(0),
            }
            at += step;
        }
        bytes
    }

    /// Writes bytes and extends the file if they reach beyond its end.
    pub(super) fn write(&mut self, offset: u64, bytes: &[u8]) {
        self.changes += 1;
        let mut at = 0;
        while at < bytes.len() {
            let (index, start) = position(offset + at as u64);
            let step = (PAGE_BYTES - start).min(bytes.len() - at);
            let mut page = match self.pages.get(&index) {
                Some(page) if step < PAGE_BYTES => page.clone(),
                _ => zeroed(),
            };
            page[start..start + step].copy_from_slice(&bytes[at..at + step]);
            self.set_page(index, Some(page));
            self.bad_pages.remove(&index);
            at += step;
        }
        self.length = self.length.max(offset + bytes.len() as u64);
    }

    /// As [`Self::write`], but the device loses the bytes. They are visible as long as the page
    /// cache has them, if `is_cached`.
    pub(super) fn write_lost(&mut self, offset: u64, bytes: &[u8], is_cached: bool) {
        if is_cached {
            self.write(offset, bytes);
            for index in pages_of(offset, bytes.len()) {
                self.lose_page(index);
            }
        }
    }

    /// Sets the length. What is cut off reads as zeroes if the file is extended again.
    pub(super) fn truncate(&mut self, length: u64) {
        self.changes += 1;
        let (index, start) = position(length);
        if start > 0
            && let Some(mut page) = self.pages.get(&index).cloned()
        {
            page[start..].fill(0);
            self.set_page(index, Some(page));
        }
        let cut: Vec<u64> = self.pages.range(length.div_ceil(PAGE)..).map(|(at, _)| *at).collect();
        for index in cut {
            self.set_page(index, None);
        }
        self.allocated_pages = self.allocated_pages.min(length.div_ceil(PAGE));
        self.extra_pages = self.pages.range(self.allocated_pages..).count() as u64;
        self.length = length;
    }

    /// The start of the first page with data at or after an offset.
    pub(super) fn next_data(&self, offset: u64) -> Option<u64> {
        let (&index, _) = self.pages.range(offset / PAGE..).next()?;
        (index * PAGE < self.length && offset < self.length).then_some(index * PAGE)
    }

    /// Overwrites all data with zeroes. Returns the number of bytes overwritten.
    pub(super) fn overwrite(&mut self) -> u64 {
        self.changes += 1;
        let with_data: Vec<u64> = self.pages.keys().copied().collect();
        let length = self.length;
        let bytes = with_data.iter().map(|index| PAGE.min(length.saturating_sub(index * PAGE)));
        let overwritten = bytes.sum();
        for index in with_data {
            self.set_page(index, Some(zeroed()));
        }
        overwritten
    }

    /// Starts a sync. Exactly one of [`Self::end_sync`] and [`Self::fail_sync`] has to follow.
    pub(super) fn begin_sync(&mut self, name_changes: u64) -> SyncPoint {
        self.syncs_in_flight += 1;
        SyncPoint { changes: self.changes, length: self.length, name_changes }
    }

    /// Makes everything durable that was written before the sync began.
    pub(super) fn end_sync(&mut self, point: SyncPoint) {
        self.syncs_in_flight = self.syncs_in_flight.saturating_sub(1);
        self.unsynced.retain(|_, history| history.is_lost || !history.sync(point.changes));
        self.sync_length(point);
    }

    /// A sync that fails. Of what was written before it, each page is durable or lost, and is
    /// clean: the next sync succeeds without it (as on Linux since 4.13).
    pub(super) fn fail_sync(&mut self, point: SyncPoint, random: &mut Random) {
        self.syncs_in_flight = self.syncs_in_flight.saturating_sub(1);
        let is_clean = |(index, history): (&u64, &PageHistory)| {
            (!history.is_lost && history.written_by <= point.changes).then_some(*index)
        };
        let clean: Vec<u64> = self.unsynced.iter().filter_map(is_clean).collect();
        for index in clean {
            match random.below(4) {
                0 => self.lose_page(index),
                // The page cache drops the page, and the next read finds the old content.
                1 => self.drop_from_cache(index),
                _ => drop(self.unsynced.remove(&index)),
            }
        }
        if random.one_in(2) {
            self.sync_length(point);
        }
    }

    /// The process ends, and with it the syncs that it waits for.
    pub(super) fn cancel_syncs(&mut self) {
        self.syncs_in_flight = 0;
    }

    /// Leaves what a power loss leaves: everything that was synced, and some of the rest.
    pub(super) fn lose_power(&mut self, random: &mut Random, noise_one_in: u32) {
        let has_noise = random.one_in(noise_one_in);
        let unsynced = mem::take(&mut self.unsynced);
        let last = unsynced.last_key_value().map_or(0, |(index, _)| *index);
        let survivors = match random.below(4) {
            0 => Survivors::All,
            1 => Survivors::None,
            2 => Survivors::Before(random.below(last + 1)),
            _ => Survivors::Mixed,
        };
        for (index, history) in unsynced {
            let current = self.pages.remove(&index);
            if let Some(page) = history.survivor(index, current, survivors, has_noise, random) {
                self.pages.insert(index, page);
            }
        }
        let never_synced = self.durable_length.min(self.length)..self.length;
        if random.one_in(2) {
            self.length = self.durable_length;
        } else if has_noise {
            self.fill_with_noise(never_synced, random);
        }
        self.allocated_pages = self.allocated_pages.min(self.length.div_ceil(PAGE));
        self.pages.split_off(&self.length.div_ceil(PAGE));
        let (index, start) = position(self.length);
        if let Some(page) = self.pages.get_mut(&index) {
            page[start..].fill(0);
        }
        self.extra_pages = self.pages.range(self.allocated_pages..).count() as u64;
        self.durable_length = self.length;
        self.synced_changes = self.changes;
    }

    /// Flips a bit of a page with data, for good. Returns whether the offset has data.
    pub(super) fn flip_bit(&mut self, offset: u64, bit: u8) -> bool {
        let (index, start) = position(offset);
        let page = self.pages.get_mut(&index).filter(|_| offset < self.length);
        page.map(|page| page[start] ^= 1 << (bit % 8)).is_some()
    }

    /// Makes a page unreadable until it is written again.
    pub(super) fn fail_page(&mut self, offset: u64) {
        self.bad_pages.insert(offset / PAGE);
    }

    /// The offsets of the pages with data.
    pub(super) fn data(&self) -> impl Iterator<Item = u64> {
        self.pages.keys().map(|index| index * PAGE).filter(|offset| *offset < self.length)
    }

    /// Replaces the current content of a page. Returns the old one.
    fn replace_page(&mut self, index: u64, page: Option<Page>) -> Option<Page> {
        let is_present = page.is_some();
        let before = match page {
            Some(page) => self.pages.insert(index, page),
            None => self.pages.remove(&index),
        };
        if index >= self.allocated_pages {
            self.extra_pages += u64::from(is_present && before.is_none());
            self.extra_pages -= u64::from(!is_present && before.is_some());
        }
        before
    }

    fn set_page(&mut self, index: u64, page: Option<Page>) {
        let before = self.replace_page(index, page);
        let written_by = self.changes;
        let Some(history) = self.unsynced.get_mut(&index) else {
            let overwritten = Vec::new();
            let history = PageHistory { durable: before, overwritten, written_by, is_lost: false };
            self.unsynced.insert(index, history);
            return;
        };
        let overwritten_by = mem::replace(&mut history.written_by, written_by);
        if !mem::replace(&mut history.is_lost, false) {
            history.overwritten.push((overwritten_by, before));
        }
        // A sync in flight may be waiting for the oldest one.
        if self.syncs_in_flight == 0 && history.overwritten.len() > OVERWRITTEN_MAX {
            history.overwritten.remove(0);
        }
    }

    /// The current content of a page is not written back, now or by a later sync.
    fn lose_page(&mut self, index: u64) {
        if let Some(history) = self.unsynced.get_mut(&index) {
            history.is_lost = true;
            history.overwritten.clear();
        }
    }

    fn drop_from_cache(&mut self, index: u64) {
        if let Some(history) = self.unsynced.remove(&index) {
            self.replace_page(index, history.durable);
        }
    }

    fn sync_length(&mut self, point: SyncPoint) {
        // A sync that began earlier may end later.
        if point.changes >= self.synced_changes {
            self.synced_changes = point.changes;
            self.durable_length = point.length;
        }
    }

    /// Fills some of the missing pages of a range with noise.
    fn fill_with_noise(&mut self, range: Range<u64>, random: &mut Random) {
        let first = range.start.div_ceil(PAGE);
        let count = range.end.div_ceil(PAGE).saturating_sub(first);
        for _ in 0..count.min(NOISE_PAGES_MAX) {
            if let Entry::Vacant(missing) = self.pages.entry(first + random.below(count)) {
                random.fill(missing.insert(zeroed()).as_mut_slice());
            }
        }
    }
}

impl PageHistory {
    /// Makes the newest content durable that was written by this change or an earlier one. Returns
    /// whether that is the current content.
    fn sync(&mut self, changes: u64) -> bool {
        if self.written_by <= changes {
            return true;
        }
        let is_synced = |(written_by, _): &(u64, Option<Page>)| *written_by <= changes;
        if let Some(newest) = self.overwritten.iter().rposition(is_synced) {
            let (_, page) = self.overwritten.drain(..=newest).next_back().expect("not empty");
            self.durable = page;
        }
        false
    }

    /// What a power loss leaves of a page.
    fn survivor(
        mut self,
        index: u64,
        current: Option<Page>,
        survivors: Survivors,
        has_noise: bool,
        random: &mut Random,
    ) -> Option<Page> {
        match survivors {
            _ if self.is_lost => return self.durable,
            Survivors::None => return self.durable,
            Survivors::All => return current,
            Survivors::Before(end) if index < end => return current,
            Survivors::Before(end) if index > end => return self.durable,
            Survivors::Before(_) | Survivors::Mixed => {}
        }
        let mut contents = vec![self.durable.take(), current];
        contents.extend(self.overwritten.into_iter().map(|(_, page)| page));
        if random.one_in(2) {
            let whole = random.index_below(contents.len());
            return contents.swap_remove(whole);
        }
        let mut page = zeroed();
        for (number, sector) in page.chunks_mut(SECTOR_BYTES).enumerate() {
            let start = number * SECTOR_BYTES;
            match &contents[random.index_below(contents.len())] {
                Some(content) => sector.copy_from_slice(&content[start..start + sector.len()]),
                None if has_noise => random.fill(sector),
                None => {}
            }
        }
        Some(page)
    }
}

fn zeroed() -> Page {
    Box::new([0; PAGE_BYTES])
}

/// The page of an offset, and the position in it.
fn position(offset: u64) -> (u64, usize) {
    let start = usize::try_from(offset % PAGE).expect("a page is small");
    (offset / PAGE, start)
}

fn pages_of(offset: u64, bytes: usize) -> Range<u64> {
    offset / PAGE..(offset + bytes as u64).div_ceil(PAGE)
}
