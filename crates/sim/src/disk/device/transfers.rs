//! Transfers in flight on a simulated disk, and what they do to files.

use std::io::{self, IoSliceMut};
use std::time::Duration;

use cascade_disk::format::PAGE_BYTES;
use cascade_disk::io::{Transfer, TransferKind};

use crate::disk::content::{SECTOR_BYTES, SyncPoint};
use crate::disk::faults::{CallKind, DiskFault};

use super::{Device, bad_handle, device_error, note};

/// What the buffers of a read contain until it completes, and after it failed.
const UNREAD_BYTE: u8 = 0xa5;

/// A transfer that the device has not completed.
#[derive(Debug)]
pub(in crate::disk) struct InFlight {
    inode: u64,
    kind: TransferKind,
    offset: u64,
    bytes: usize,
    /// What a write writes.
    data: Vec<u8>,
    effect: Option<DiskFault>,
    /// The transfer is invalid and ends with this error.
    refused: Option<io::Error>,
    sync_point: Option<SyncPoint>,
    /// Its caller has reported a time-out.
    is_late: bool,
}

impl Device {
    /// Starts a transfer. Returns its number and the time at which it ends.
    pub(in crate::disk) fn begin_transfer(
        &mut self,
        transfer: &mut Transfer,
        now: Duration,
    ) -> (u64, Duration) {
        let kind = call_kind(transfer.kind);
        let bytes = transfer.slices().iter().map(|slice| slice.len()).sum::<usize>();
        let (effect, due) = self.plan_call(kind, bytes, now);
        let opened = self.check_transfer(transfer);
        let mut in_flight = InFlight {
            inode: *opened.as_ref().unwrap_or(&0),
            kind: transfer.kind,
            offset: transfer.next_offset(),
            bytes,
            data: Vec::new(),
            effect,
            refused: opened.err(),
            sync_point: None,
            is_late: false,
        };
        if in_flight.refused.is_none() {
            self.note_overlaps(&in_flight);
            self.counts.add_transfer(transfer.kind, bytes);
            match transfer.kind {
                TransferKind::Read => {
                    for mut slice in transfer.slices_mut() {
                        slice.fill(UNREAD_BYTE);
                    }
                }
                TransferKind::Write => in_flight.data = bytes_of(transfer),
                TransferKind::Sync => {
                    in_flight.sync_point = self.begin_sync(in_flight.inode).ok();
                }
            }
        }
        let number = self.next_number();
        self.in_flight.insert(number, in_flight);
        (number, due)
    }

    /// The caller of a transfer has stopped waiting for it.
    pub(in crate::disk) fn mark_late(&mut self, number: u64) {
        if let Some(in_flight) = self.in_flight.get_mut(&number) {
            in_flight.is_late = true;
            self.counts.late_transfers += 1;
        }
    }

    /// Ends a transfer: now it has its effect.
    pub(in crate::disk) fn end_transfer(
        &mut self,
        number: u64,
        transfer: &mut Transfer,
        now: Duration,
    ) -> io::Result<usize> {
        // A crash has ended it.
        let mut in_flight = self.in_flight.remove(&number).ok_or_else(bad_handle)?;
        if let Some(error) = in_flight.refused.take() {
            return Err(error);
        }
        let InFlight { inode, offset, effect, is_late, .. } = in_flight;
        let result = match in_flight.kind {
            TransferKind::Read => self.read(inode, offset, &mut transfer.slices_mut(), effect, now),
            TransferKind::Write => {
                if !has_bytes(transfer, &in_flight.data) {
                    let text = format!(
                        "the buffers of a write at {offset} changed before it was complete"
                    );
                    self.violate(inode, is_late, text);
                }
                self.write(inode, offset, &in_flight.data, effect, now)
            }
            TransferKind::Sync => {
                self.end_sync(inode, in_flight.sync_point, effect, now).map(|()| 0)
            }
        };
        note(call_kind(in_flight.kind), inode, offset, &result);
        result
    }

    /// Draws how long a call takes and what goes wrong with it.
    pub(in crate::disk) fn plan_call(
        &mut self,
        kind: CallKind,
        bytes: usize,
        now: Duration,
    ) -> (Option<DiskFault>, Duration) {
        let planned = self.faults.plan(kind, now, &mut self.random);
        let settings = match kind {
            CallKind::Read => self.settings.read,
            CallKind::Write => self.settings.write,
            CallKind::Sync => self.settings.sync,
            CallKind::Name => self.settings.name,
        };
        let drawn = self.draw_latency(settings, bytes);
        if planned.extra_latency > 0 {
            self.count_fault(DiskFault::Slow(planned.extra_latency), now);
        }
        if let Some(until) = planned.hangs_until {
            self.count_fault(DiskFault::Hang(kind), until);
        }
        let latency = drawn.saturating_mul(planned.extra_latency.saturating_add(1));
        let due = planned.hangs_until.unwrap_or(now).saturating_add(latency);
        (planned.effect, due)
    }

    /// Reads bytes. Fewer than requested only at the end of the file, or by a fault.
    pub(in crate::disk) fn read(
        &mut self,
        inode: u64,
        offset: u64,
        buffers: &mut [IoSliceMut<'_>],
        effect: Option<DiskFault>,
        now: Duration,
    ) -> io::Result<usize> {
        let wanted: usize = buffers.iter().map(|buffer| buffer.len()).sum();
        let is_bad = self.content(inode)?.has_bad_page(offset, wanted);
        if let Some(fault) = effect {
            self.count_fault(fault, now);
        }
        if is_bad || matches!(effect, Some(DiskFault::Error(_))) {
            return Err(device_error());
        }
        let limit = match effect {
            Some(DiskFault::ShortTransfer) => self.short(wanted),
            _ => wanted,
        };
        let content = self.content(inode)?;
        let mut read = 0;
        for buffer in buffers.iter_mut() {
            let step = buffer.len().min(limit - read);
            let moved = content.read(offset + read as u64, &mut buffer[..step]);
            read += moved;
            if moved < buffer.len() {
                break;
            }
        }
        if effect == Some(DiskFault::FlippedRead) && read > 0 {
            let (at, bit) = (self.random.index_below(read), self.random.below(8));
            flip(buffers, at, 1 << bit);
        }
        Ok(read)
    }

    /// Writes bytes, as many as the fault lets it.
    pub(in crate::disk) fn write(
        &mut self,
        inode: u64,
        offset: u64,
        bytes: &[u8],
        effect: Option<DiskFault>,
        now: Duration,
    ) -> io::Result<usize> {
        let content = self.content(inode)?;
        let missing =
            if content.is_linked { content.missing_pages(offset, bytes.len()) } else { 0 };
        self.check_space(missing, now)?;
        let Some(fault) = effect else {
            return self
                .change(inode, |content| content.write(offset, bytes))
                .map(|()| bytes.len());
        };
        self.count_fault(fault, now);
        let (mut written, mut result) = (bytes.to_vec(), Ok(bytes.len()));
        match fault {
            DiskFault::ShortTransfer => {
                written.truncate(self.short(bytes.len()));
                result = Ok(written.len());
            }
            DiskFault::TornWrite => {
                written.truncate(self.sectors(bytes.len()));
                result = Err(device_error());
            }
            DiskFault::FlippedWrite if !bytes.is_empty() => {
                let at = self.random.index_below(bytes.len());
                written[at] ^= 1 << self.random.below(8);
            }
            DiskFault::LostWrite => {
                let is_cached = self.random.one_in(2);
                return self
                    .change(inode, |content| content.write_lost(offset, bytes, is_cached))
                    .map(|()| bytes.len());
            }
            _ => return Err(device_error()),
        }
        self.change(inode, |content| content.write(offset, &written))?;
        result
    }

    pub(in crate::disk) fn begin_sync(&mut self, inode: u64) -> io::Result<SyncPoint> {
        let name_changes = self.name_changes;
        Ok(self.content(inode)?.begin_sync(name_changes))
    }

    pub(in crate::disk) fn end_sync(
        &mut self,
        inode: u64,
        point: Option<SyncPoint>,
        effect: Option<DiskFault>,
        now: Duration,
    ) -> io::Result<()> {
        let point = point.ok_or_else(bad_handle)?;
        let Some(fault) = effect else {
            self.content(inode)?.end_sync(point);
            self.commit_journal(point.name_changes);
            return Ok(());
        };
        self.count_fault(fault, now);
        let mut random = self.random.clone();
        let failed = self.change(inode, |content| content.fail_sync(point, &mut random));
        self.random = random;
        failed.and_then(|()| Err(device_error()))
    }

    /// Ends the transfers in flight at a crash: each write leaves all, nothing, or its beginning.
    pub(in crate::disk) fn cut_transfers(&mut self) {
        for (_, in_flight) in std::mem::take(&mut self.in_flight) {
            if in_flight.kind != TransferKind::Write || in_flight.refused.is_some() {
                continue;
            }
            let written = match self.random.below(3) {
                0 => continue,
                1 => in_flight.bytes,
                _ => self.sectors(in_flight.bytes),
            };
            let InFlight { inode, offset, data, .. } = in_flight;
            let now = cascade_runtime::now();
            let cut = self.write(inode, offset, &data[..written], None, now);
            // A device without room keeps nothing of it.
            drop(cut);
        }
    }

    /// The inode of a valid transfer.
    fn check_transfer(&self, transfer: &Transfer) -> io::Result<u64> {
        let number = transfer.file.number().ok_or(io::ErrorKind::Unsupported)?;
        let file = self.handle(number)?;
        if transfer.kind == TransferKind::Write && !file.is_writable {
            return Err(bad_handle());
        }
        let is_aligned = |slice: &[u8]| {
            slice.len().is_multiple_of(PAGE_BYTES)
                && (slice.as_ptr() as usize).is_multiple_of(SECTOR_BYTES)
        };
        let slices = transfer.slices();
        let aligned = transfer.next_offset().is_multiple_of(PAGE_BYTES as u64)
            && slices.iter().all(|slice| is_aligned(slice));
        if file.is_direct && !aligned {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok(file.inode)
    }

    /// Records writes of a range that another transfer in flight reads or writes.
    fn note_overlaps(&mut self, new: &InFlight) {
        let end = |of: &InFlight| of.offset + of.bytes as u64;
        let is_write = |of: &InFlight| of.kind == TransferKind::Write;
        let overlapping = self.in_flight.values().find(|old| {
            let overlaps = old.offset < end(new) && new.offset < end(old);
            let is_conflict = is_write(old) || is_write(new);
            old.inode == new.inode && old.refused.is_none() && overlaps && is_conflict
        });
        if let Some(old) = overlapping {
            let text = format!(
                "a {:?} of {} bytes at {} overlaps a {:?} of {} bytes at {} that is in flight",
                new.kind, new.bytes, new.offset, old.kind, old.bytes, old.offset
            );
            let is_late = old.is_late;
            self.violate(new.inode, is_late, text);
        }
    }

    /// The length of a short transfer: whole pages, at least one.
    fn short(&mut self, bytes: usize) -> usize {
        let pages = bytes / PAGE_BYTES;
        if pages < 2 { bytes } else { (1 + self.random.index_below(pages - 1)) * PAGE_BYTES }
    }

    /// A part of a write, in whole sectors.
    fn sectors(&mut self, bytes: usize) -> usize {
        self.random.index_below(bytes / SECTOR_BYTES + 1) * SECTOR_BYTES
    }
}

fn call_kind(kind: TransferKind) -> CallKind {
    match kind {
        TransferKind::Read => CallKind::Read,
        TransferKind::Write => CallKind::Write,
        TransferKind::Sync => CallKind::Sync,
    }
}

fn bytes_of(transfer: &Transfer) -> Vec<u8> {
    let mut bytes = Vec::new();
    for slice in transfer.slices() {
        bytes.extend_from_slice(&slice);
    }
    bytes
}

fn has_bytes(transfer: &Transfer, mut bytes: &[u8]) -> bool {
    transfer.slices().iter().all(|slice| {
        let (expected, rest) = bytes.split_at(slice.len().min(bytes.len()));
        bytes = rest;
        slice[..] == *expected
    })
}

/// Flips bits of a byte in a list of buffers.
fn flip(buffers: &mut [IoSliceMut<'_>], mut at: usize, bits: u8) {
    for buffer in buffers {
        if at < buffer.len() {
            buffer[at] ^= bits;
            return;
        }
        at -= buffer.len();
    }
}
