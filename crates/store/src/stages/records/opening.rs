//! Opening of a record stage: reads the header of every record, and no block.

use std::sync::Arc;
use std::time::Duration;

use cascade_block::{Manifest, NamespaceId};
use cascade_runtime::{Clock, Deadline};
use cascade_tier::tier::{Address, BlockFacts, TierError};

use super::super::host_buffers::HostBuffers;
use super::index::RecordIndex;
use super::record::{HEADER_BYTES, RecordHeader, RecordKind, address_of, manifest_of, name_of};
use super::{RecordAnswer, RecordBuffer, RecordCall, Records};

/// Headers requested at once.
const BATCH: usize = 256;
/// Addresses per millisecond: they begin with the time, so that no name is used twice.
const ADDRESSES_PER_MS: u64 = 1 << 20;

/// The records found at opening.
#[derive(Debug, Default)]
pub(super) struct OpenedRecords {
    pub(super) index: RecordIndex,
    /// The youngest first: of two blocks with one key the later one is used.
    pub(super) blocks: Vec<(BlockFacts, Address)>,
    pub(super) manifests: Vec<(NamespaceId, Manifest)>,
    pub(super) next_address: u64,
    pub(super) damaged: u64,
    pub(super) notes: Vec<String>,
}

/// A record's address and length, and its header if that is valid.
struct HeaderRead {
    address: u64,
    /// As reported by the implementation of [`Records`].
    bytes: u64,
    header: Option<RecordHeader>,
}

/// Reads all headers. Each batch gets `timeout`.
pub(super) fn read_all(
    records: &dyn Records,
    buffers: &Arc<HostBuffers>,
    clock: &dyn Clock,
    timeout: Duration,
) -> Result<OpenedRecords, TierError> {
    let reader = RecordReader { records, buffers, clock, timeout };
    let answer = reader.perform(vec![RecordCall::Names])?.pop();
    let Some(RecordAnswer::Names(names)) = answer else { return Err(TierError::NoResult) };
    let count = names.len();
    let mut ours: Vec<_> =
        names.into_iter().filter_map(|(name, bytes)| Some((address_of(&name)?, bytes))).collect();
    let unknown = count - ours.len();
    ours.sort_unstable();
    // A listing in pages may return a name twice.
    ours.dedup_by_key(|(address, _)| *address);
    let mut found = OpenedRecords::default();
    let first = clock.unix_ms().saturating_mul(ADDRESSES_PER_MS);
    // Above every address found, too: the clock may have been set back.
    found.next_address = ours.last().map_or(0, |(last, _)| last.saturating_add(1)).max(first);
    let (mut obsolete, mut name_records) = (Vec::new(), Vec::new());
    for batch in ours.chunks(BATCH) {
        for read in reader.headers(batch)? {
            found.enter(&reader, read, &mut obsolete, &mut name_records)?;
        }
    }
    // After all blocks: a name has an effect only if its block is there.
    found.enter_names(&name_records, &mut obsolete);
    for names in obsolete.chunks(BATCH) {
        reader.perform(vec![RecordCall::Delete { names: names.to_vec() }])?;
    }
    found.blocks.reverse();
    if unknown > 0 {
        found.notes.push(format!("{unknown} names are not Cascade's: not touched"));
    }
    if found.damaged > 0 {
        let damaged = found.damaged;
        found.notes.push(format!("{damaged} damaged records were deleted at opening"));
    }
    Ok(found)
}

/// Reads records with a deadline for each batch.
struct RecordReader<'a> {
    records: &'a dyn Records,
    buffers: &'a Arc<HostBuffers>,
    clock: &'a dyn Clock,
    timeout: Duration,
}

impl RecordReader<'_> {
    fn perform(&self, calls: Vec<RecordCall>) -> Result<Vec<RecordAnswer>, TierError> {
        let deadline = Deadline::after(self.clock, self.timeout);
        self.records.perform(calls, deadline).into_iter().collect()
    }

    fn get(&self, address: u64, bytes: usize) -> RecordCall {
        let into = RecordBuffer { bytes, buffers: Arc::clone(self.buffers) };
        RecordCall::Get { name: name_of(address), into }
    }

    fn headers(&self, batch: &[(u64, u64)]) -> Result<Vec<HeaderRead>, TierError> {
        let calls = batch.iter().map(|(address, _)| self.get(*address, HEADER_BYTES)).collect();
        let answers = self.perform(calls)?;
        let read = |((address, bytes), answer): (&(u64, u64), RecordAnswer)| {
            let header = match answer {
                RecordAnswer::Got { buffer, bytes: HEADER_BYTES } => RecordHeader::read(&buffer),
                _ => None,
            };
            HeaderRead { address: *address, bytes: *bytes, header }
        };
        Ok(batch.iter().zip(answers).map(read).collect())
    }

    fn manifest(&self, header: &RecordHeader) -> Result<Option<Manifest>, TierError> {
        let bytes = HEADER_BYTES + header.payload_bytes as usize;
        let answer = self.perform(vec![self.get(header.address, bytes)])?.pop();
        let Some(RecordAnswer::Got { buffer, bytes: got }) = answer else { return Ok(None) };
        let payload = &buffer[HEADER_BYTES..];
        Ok((got == bytes && header.fits(payload)).then(|| manifest_of(payload)).flatten())
    }
}

impl OpenedRecords {
    fn enter(
        &mut self,
        reader: &RecordReader<'_>,
        read: HeaderRead,
        obsolete: &mut Vec<String>,
        name_records: &mut Vec<RecordHeader>,
    ) -> Result<(), TierError> {
        let name = name_of(read.address);
        let header = read
            .header
            // A record that was copied under another name, or cut, is damaged.
            .filter(|header| header.address == read.address && header.record_bytes() == read.bytes);
        let Some(header) = header else {
            self.damaged += 1;
            obsolete.push(name);
            return Ok(());
        };
        match header.kind {
            RecordKind::Block => {
                self.index.reserve(header.record_bytes(), u64::MAX);
                self.index.insert(header.address, &header.facts);
                self.blocks.push((header.facts, Address(header.address)));
            }
            RecordKind::Alias | RecordKind::Revocation => name_records.push(header),
            RecordKind::Manifest => {
                if let Some(manifest) = reader.manifest(&header)? {
                    self.manifests.push((header.facts.namespace, manifest));
                } else {
                    self.damaged += 1;
                    obsolete.push(name);
                }
            }
            // The process ended during a probe.
            RecordKind::Probe => obsolete.push(name),
        }
        Ok(())
    }

    fn enter_names(&mut self, name_records: &[RecordHeader], obsolete: &mut Vec<String>) {
        for header in name_records {
            self.index.reserve(HEADER_BYTES as u64, u64::MAX);
            if !self.index.apply(header) {
                obsolete.push(name_of(header.address));
            } else if header.kind == RecordKind::Alias {
                self.blocks.push((header.facts, Address(header.target)));
            }
        }
        // Removes the first names that a record revokes.
        let index = &self.index;
        self.blocks.retain(|(facts, address)| {
            index.get(address.0).is_some_and(|entry| entry.has(&facts.key))
        });
        self.blocks.sort_by_key(|(_, address)| address.0);
    }
}
