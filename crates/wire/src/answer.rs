//! Answers: messages from a node to a worker.

use cascade_block::{Manifest, NamespaceId};
use cascade_tier::{Change, Changes, PutOutcome, StoreError};

use crate::failure::{read_error, read_outcome, write_error, write_outcome};
use crate::fields::{FieldReader, FieldWriter};
use crate::frame::Frame;
use crate::hello::SessionId;
use crate::{BODY_BYTES_MAX, TEXT_BYTES_MAX, WireError};

/// The answer to a hello. The first one of a session carries the pool's file descriptor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Welcome {
    /// The protocol version of the connection.
    pub version: u16,
    /// Identifies this run of the node; different after every start.
    pub epoch: u64,
    /// The session that further connections join.
    pub session: SessionId,
    /// Length of the pool.
    pub pool_bytes: u64,
    /// Maximum bytes of the pool that the session may hold at a time.
    pub hold_bytes_max: u64,
    /// Timeout of calls that have none of their own.
    pub timeout_ms: u64,
    /// Whether a put returns only after every tier has the block (write-through).
    pub writes_through: bool,
    /// The tiers, fast to slow; later messages contain indexes into this list.
    pub tiers: Vec<String>,
    /// The client's tenant.
    pub tenant: String,
    /// The node's version.
    pub node_version: String,
    /// The device that the pool is on, by its UUID; none if it is in host memory. The descriptor
    /// that comes with this message is that of memory of the device then.
    pub device: Option<[u8; 16]>,
}

/// The answer for one block of a prepare.
#[derive(Debug)]
pub enum PreparedBlock {
    /// A slab to write the block into.
    Slab {
        /// Offset in the pool.
        offset: u64,
    },
    /// The final outcome; nothing has to be written.
    Settled(PutOutcome),
    /// The key is already present: lease it and compare.
    Compare,
    /// Deferred: prepare it again after the other blocks.
    Later,
}

/// The answer for one block of a lease.
#[derive(Debug)]
pub enum Lease {
    /// Leased for as long as the client holds it.
    Hit {
        /// Offset in the pool.
        offset: u64,
        /// Its length.
        bytes: u32,
        /// The tier that had it: an index into the list of tiers.
        tier: u8,
    },
    /// Not present, or damaged.
    Miss,
    /// Failed.
    Failed(StoreError),
}

/// A message from a node to a worker.
#[derive(Debug)]
pub enum Answer {
    /// To a hello.
    Welcome(Welcome),
    /// A hello or an administrator's request was refused.
    Refused {
        /// The reason.
        reason: String,
    },
    /// Done.
    Done,
    /// The whole call failed.
    Failed(StoreError),
    /// To a prepare.
    Prepared(Vec<PreparedBlock>),
    /// To a reserve.
    Slab {
        /// Offset in the pool.
        offset: u64,
    },
    /// To a seal.
    Puts(Vec<PutOutcome>),
    /// To a lease, or to an acquire: then one for each leading block that matched.
    Leases(Vec<Lease>),
    /// To a lookup: the tier of each leading block, as an index into the list of tiers.
    Matched(Vec<u8>),
    /// To a query with a yes-or-no result per key.
    Flags(Vec<bool>),
    /// To a locate: one bit for each tier.
    Places(Vec<u8>),
    /// To a prefetch.
    Count(u64),
    /// To a request for manifests.
    Manifests(Vec<(NamespaceId, Manifest)>),
    /// To an administrator's request: JSON.
    Text(String),
    /// To a request for changes.
    Changes(Changes),
}

impl Welcome {
    fn write(&self, into: &mut FieldWriter<'_>) {
        into.u16(self.version);
        into.u64(self.epoch);
        into.bytes(&self.session);
        into.u64(self.pool_bytes);
        into.u64(self.hold_bytes_max);
        into.u64(self.timeout_ms);
        into.u8(u8::from(self.writes_through));
        into.count(self.tiers.len());
        for tier in &self.tiers {
            into.text(tier);
        }
        into.text(&self.tenant);
        into.text(&self.node_version);
        // The last field, and left out for host memory: so it was in version 1 from the start.
        if let Some(device) = &self.device {
            into.bytes(device);
        }
    }

    fn read(from: &mut FieldReader<'_>) -> Result<Self, WireError> {
        let version = from.u16("version")?;
        let epoch = from.u64("epoch")?;
        let session = from.array("session")?;
        let pool_bytes = from.u64("pool")?;
        let hold_bytes_max = from.u64("share")?;
        let timeout_ms = from.u64("timeout")?;
        let writes_through = from.flag("write policy")?;
        let count = from.count(4, "tiers")?;
        let tiers = (0..count).map(|_| from.text("tier").map(str::to_owned));
        Ok(Self {
            version,
            epoch,
            session,
            pool_bytes,
            hold_bytes_max,
            timeout_ms,
            writes_through,
            tiers: tiers.collect::<Result<_, _>>()?,
            tenant: from.text("tenant")?.to_owned(),
            node_version: from.text("node version")?.to_owned(),
            device: if from.is_at_end() { None } else { Some(from.array("device")?) },
        })
    }
}

impl PreparedBlock {
    fn write(&self, into: &mut FieldWriter<'_>) {
        match self {
            Self::Slab { offset } => {
                into.u8(0);
                into.u64(*offset);
            }
            Self::Settled(outcome) => {
                into.u8(1);
                write_outcome(into, outcome);
            }
            Self::Compare => into.u8(2),
            Self::Later => into.u8(3),
        }
    }

    fn read(from: &mut FieldReader<'_>) -> Result<Self, WireError> {
        Ok(match from.u8("prepared")? {
            0 => Self::Slab { offset: from.u64("offset")? },
            1 => Self::Settled(read_outcome(from)?),
            2 => Self::Compare,
            3 => Self::Later,
            _ => return Err(WireError::Field("prepared")),
        })
    }
}

impl Lease {
    fn write(&self, into: &mut FieldWriter<'_>) {
        match self {
            Self::Hit { offset, bytes, tier } => {
                into.u8(0);
                into.u64(*offset);
                into.u32(*bytes);
                into.u8(*tier);
            }
            Self::Miss => into.u8(1),
            Self::Failed(error) => {
                into.u8(2);
                write_error(into, error);
            }
        }
    }

    fn read(from: &mut FieldReader<'_>) -> Result<Self, WireError> {
        Ok(match from.u8("lease")? {
            0 => Self::Hit {
                offset: from.u64("offset")?,
                bytes: from.u32("length")?,
                tier: from.u8("tier")?,
            },
            1 => Self::Miss,
            2 => Self::Failed(read_error(from)?),
            _ => return Err(WireError::Field("lease")),
        })
    }
}

impl Answer {
    fn kind(&self) -> u16 {
        match self {
            Self::Welcome(_) => 101,
            Self::Refused { .. } => 102,
            Self::Done => 103,
            Self::Failed(_) => 104,
            Self::Prepared(_) => 105,
            Self::Slab { .. } => 106,
            Self::Puts(_) => 107,
            Self::Leases(_) => 108,
            Self::Matched(_) => 109,
            Self::Flags(_) => 110,
            Self::Places(_) => 111,
            Self::Count(_) => 112,
            Self::Manifests(_) => 113,
            Self::Text(_) => 114,
            Self::Changes(_) => 115,
        }
    }

    /// Appends its frame. If the message is too long, appends a failure instead.
    #[expect(clippy::missing_panics_doc, reason = "a failure is a short message")]
    pub fn write(&self, into: &mut Vec<u8>, call: u32) {
        let write = |answer: &Self, into: &mut Vec<u8>| {
            let body = |body: &mut Vec<u8>| answer.write_body(&mut FieldWriter(body));
            Frame::write(into, answer.kind(), call, None, body)
        };
        // `FieldWriter::text` would truncate a longer text, which is then not valid JSON.
        let (is_too_long, most) = match self {
            Self::Text(text) => (text.len() > TEXT_BYTES_MAX, TEXT_BYTES_MAX),
            _ => (false, BODY_BYTES_MAX as usize),
        };
        // `Frame::write` appends nothing on an error, so the failure takes the place of the answer.
        if is_too_long || write(self, into).is_err() {
            let reason = format!("longer than the maximum of {most} bytes; ask for less at once");
            let failed = Self::Failed(StoreError::Config { setting: "answer", reason });
            write(&failed, into).expect("a failure is a short message");
        }
    }

    fn write_body(&self, into: &mut FieldWriter<'_>) {
        match self {
            Self::Welcome(welcome) => welcome.write(into),
            Self::Refused { reason } => into.text(reason),
            Self::Done => {}
            Self::Failed(error) => write_error(into, error),
            Self::Prepared(blocks) => into.list(blocks, PreparedBlock::write),
            Self::Slab { offset } => into.u64(*offset),
            Self::Puts(outcomes) => into.list(outcomes, |it, into| write_outcome(into, it)),
            Self::Leases(leases) => into.list(leases, Lease::write),
            Self::Matched(tiers) | Self::Places(tiers) => {
                into.count(tiers.len());
                into.bytes(tiers);
            }
            Self::Flags(flags) => into.list(flags, |flag, into| into.u8(u8::from(*flag))),
            Self::Count(count) => into.u64(*count),
            Self::Manifests(all) => into.list(all, |(namespace, manifest), into| {
                into.bytes(namespace.as_bytes());
                into.manifest(manifest);
            }),
            Self::Text(text) => into.text(text),
            Self::Changes(changes) => write_changes(into, changes),
        }
    }

    /// Reads the message of a frame.
    pub fn read(frame: &Frame<'_>) -> Result<Self, WireError> {
        let mut from = FieldReader::new(frame.body);
        let answer = match frame.header.kind {
            101 => Self::Welcome(Welcome::read(&mut from)?),
            102 => Self::Refused { reason: from.text("reason")?.to_owned() },
            103 => Self::Done,
            104 => Self::Failed(read_error(&mut from)?),
            105 => Self::Prepared(list(&mut from, PreparedBlock::read)?),
            106 => Self::Slab { offset: from.u64("offset")? },
            107 => Self::Puts(list(&mut from, read_outcome)?),
            108 => Self::Leases(list(&mut from, Lease::read)?),
            109 | 111 => {
                let count = from.count(1, "tiers")?;
                let tiers = from.bytes(count, "tiers")?.to_vec();
                if frame.header.kind == 109 { Self::Matched(tiers) } else { Self::Places(tiers) }
            }
            110 => Self::Flags(list(&mut from, |from| from.flag("flag"))?),
            112 => Self::Count(from.u64("count")?),
            113 => {
                Self::Manifests(list(&mut from, |from| Ok((from.namespace()?, from.manifest()?)))?)
            }
            114 => Self::Text(from.text("text")?.to_owned()),
            115 => Self::Changes(read_changes(&mut from)?),
            kind => return Err(WireError::Kind(kind)),
        };
        from.end(answer)
    }
}

fn write_changes(into: &mut FieldWriter<'_>, changes: &Changes) {
    into.bytes(&changes.next.to_bytes());
    into.u8(u8::from(changes.is_lost));
    into.u8(u8::from(changes.is_current));
    into.list(&changes.changes, |change, into| match change {
        Change::Stored(key) => {
            into.u8(0);
            into.key(key);
        }
        Change::Removed(key) => {
            into.u8(1);
            into.key(key);
        }
        Change::Cleared => into.u8(2),
    });
}

fn read_changes(from: &mut FieldReader<'_>) -> Result<Changes, WireError> {
    Ok(Changes {
        next: from.cursor()?,
        is_lost: from.flag("lost")?,
        is_current: from.flag("current")?,
        changes: list(from, |from| {
            Ok(match from.u8("change")? {
                0 => Change::Stored(from.key()?),
                1 => Change::Removed(from.key()?),
                2 => Change::Cleared,
                _ => return Err(WireError::Field("change")),
            })
        })?,
    })
}

fn list<'a, T>(
    from: &mut FieldReader<'a>,
    read: impl Fn(&mut FieldReader<'a>) -> Result<T, WireError>,
) -> Result<Vec<T>, WireError> {
    // Items differ in length; each has at least one byte, so the count is bounded by the message.
    let count = from.count(1, "count")?;
    from.all(count, read)
}
