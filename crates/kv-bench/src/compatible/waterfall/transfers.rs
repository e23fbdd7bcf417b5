//! Moves the pieces of an entry into and out of a tier, until the run is cut.

use std::fs;

use super::{Body, Look, Waterfall};
use crate::backend::KvTier;
use crate::compatible::entry::{EntryName, PIECE_BYTES, pieces};
use crate::compatible::object_file::{IoTimes, ObjectFile, Unfinished};

impl Waterfall<'_> {
    pub(super) fn write_file(
        &self,
        name: EntryName,
        bytes: u64,
        fill: &mut dyn FnMut(u64, &mut [u8]),
        piece: &mut Vec<u8>,
    ) -> Result<IoTimes, Unfinished> {
        let mut file = ObjectFile::create(&self.path(name), self.clock)?;
        for (number, length) in pieces(bytes) {
            self.go_on(KvTier::Storage, number)?;
            piece.resize(length, 0);
            fill(number, piece);
            file.write(piece)?;
        }
        Ok(file.sync()?)
    }

    pub(super) fn write_pieces(
        &self,
        name: EntryName,
        pieces: &[Box<[u8]>],
    ) -> Result<(), Unfinished> {
        let write = || {
            let mut file = ObjectFile::create(&self.path(name), self.clock)?;
            for (number, piece) in (0..).zip(pieces) {
                self.go_on(KvTier::Storage, number)?;
                file.write(piece)?;
            }
            file.sync()?;
            Ok(())
        };
        write().inspect_err(|_| {
            // Before another entry can have the name.
            drop(fs::remove_file(self.path(name)));
        })
    }

    pub(super) fn write_memory(
        &self,
        tier: KvTier,
        bytes: u64,
        fill: &mut dyn FnMut(u64, &mut [u8]),
        piece: &mut Vec<u8>,
    ) -> Result<(Body, IoTimes), Unfinished> {
        let mut times = IoTimes::default();
        let mut copies = Vec::new();
        for (number, length) in pieces(bytes) {
            self.go_on(tier, number)?;
            piece.resize(length, 0);
            fill(number, piece);
            let began = self.clock.monotonic();
            copies.push(piece.clone().into_boxed_slice());
            times.device += self.clock.monotonic().saturating_sub(began);
        }
        Ok((Body::Memory(tier, copies), times))
    }

    pub(super) fn read_memory(
        &self,
        tier: KvTier,
        pieces: &[Box<[u8]>],
        copy: &mut Vec<u8>,
        look: &mut Look<'_>,
    ) -> Result<IoTimes, Unfinished> {
        let mut times = IoTimes::default();
        for (number, piece) in (0..).zip(pieces) {
            self.go_on(tier, number)?;
            let began = self.clock.monotonic();
            copy.clear();
            copy.extend_from_slice(piece);
            times.device += self.clock.monotonic().saturating_sub(began);
            look(number, copy);
        }
        Ok(times)
    }

    pub(super) fn read_file(
        &self,
        name: EntryName,
        bytes: u64,
        piece: &mut Vec<u8>,
        look: &mut Look<'_>,
    ) -> Result<IoTimes, Unfinished> {
        let mut file = ObjectFile::open(&self.path(name), self.clock)?;
        for (number, length) in pieces(bytes) {
            self.go_on(KvTier::Storage, number)?;
            piece.resize(length, 0);
            file.read(piece)?;
            look(number, piece);
        }
        Ok(file.times())
    }

    /// Whether the piece of this number is moved.
    fn go_on(&self, tier: KvTier, number: u64) -> Result<(), Unfinished> {
        if self.is_cut() {
            return Err(Unfinished::Cut { tier, bytes: number * PIECE_BYTES as u64 });
        }
        Ok(())
    }
}
