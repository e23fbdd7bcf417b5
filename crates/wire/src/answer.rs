//! Answers: what a node says to a call.

use cascade_block::{Manifest, NamespaceId};
use cascade_store::{Change, Changes, PutOutcome, StoreError};

use crate::failure::{read_error, read_outcome, write_error, write_outcome};
use crate::fields::{Reader, Writer};
use crate::frame::Frame;
use crate::hello::SessionId;
use crate::{BODY_BYTES_MAX, TEXT_BYTES_MAX, WireError};

/// The answer to a hello. With the first of a session comes the pool's file descriptor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Welcome {
    /// The protocol that both speak from here on.
    pub version: u16,
    /// Names this run of the node: it differs after every start.
    pub epoch: u64,
    /// The session, to join with further connections.
    pub session: SessionId,
    /// Length of the pool.
    pub pool_bytes: u64,
    /// Most bytes of the pool that the session may hold at a time.
    pub hold_bytes_max: u64,
    /// How long a call may take unless it says otherwise.
    pub timeout_ms: u64,
    /// Whether a put returns only once every tier has the block.
    pub writes_through: bool,
    /// The tiers, fast to slow; later messages name them by their place in this list.
    pub tiers: Vec<String>,
    /// The tenant that the client is.
    pub tenant: String,
    /// The node's version.
    pub node_version: String,
}

/// What a node says to a block that a client wants to put.
#[derive(Debug)]
pub enum PreparedBlock {
    /// Write it there.
    Slab {
        /// Where in the pool.
        offset: u64,
    },
    /// Nothing is to be written.
    Settled(PutOutcome),
    /// The key is there: lease it and compare.
    Compare,
    /// Settle the others first, then ask again.
    Later,
}

/// What a node says to a block that a client wants to read.
#[derive(Debug)]
pub enum Lease {
    /// It is there, as long as the client holds it.
    Hit {
        /// Where in the pool.
        offset: u64,
        /// Its length.
        bytes: u32,
        /// Where it was found: a place in the list of tiers.
        tier: u8,
    },
    /// Not here, or no longer right.
    Miss,
    /// Failed.
    Failed(StoreError),
}

/// What a node says to a call.
#[derive(Debug)]
pub enum Answer {
    /// To a hello.
    Welcome(Welcome),
    /// To a hello or an administrator's call: no, and why.
    Refused {
        /// Why, for a person.
        reason: String,
    },
    /// It was done.
    Done,
    /// It failed as a whole.
    Failed(StoreError),
    /// To a prepare.
    Prepared(Vec<PreparedBlock>),
    /// To a reserve.
    Slab {
        /// Where in the pool.
        offset: u64,
    },
    /// To a seal.
    Puts(Vec<PutOutcome>),
    /// To a lease or an acquire, which has as many as were found in a row.
    Leases(Vec<Lease>),
    /// To a lookup: the tier of each leading block, as a place in the list of tiers.
    Matched(Vec<u8>),
    /// To a question that is answered by yes or no.
    Flags(Vec<bool>),
    /// To a locate: one bit for each tier.
    Places(Vec<u8>),
    /// To a prefetch.
    Count(u64),
    /// To a manifests.
    Manifests(Vec<(NamespaceId, Manifest)>),
    /// To an administrator's call: JSON.
    Text(String),
    /// To a changes.
    Changes(Changes),
}

impl Welcome {
    fn write(&self, into: &mut Writer<'_>) {
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
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, WireError> {
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
        })
    }
}

impl PreparedBlock {
    fn write(&self, into: &mut Writer<'_>) {
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

    fn read(from: &mut Reader<'_>) -> Result<Self, WireError> {
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
    fn write(&self, into: &mut Writer<'_>) {
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

    fn read(from: &mut Reader<'_>) -> Result<Self, WireError> {
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

    /// Appends its frame; that of a failure if it would be longer than a frame may be.
    #[expect(clippy::missing_panics_doc, reason = "a failure is a short message")]
    pub fn write(&self, into: &mut Vec<u8>, call: u32) {
        let write = |answer: &Self, into: &mut Vec<u8>| {
            let body = |body: &mut Vec<u8>| answer.write_body(&mut Writer(body));
            Frame::write(into, answer.kind(), call, None, body)
        };
        // Cut text is no JSON.
        let (is_cut, most) = match self {
            Self::Text(text) => (text.len() > TEXT_BYTES_MAX, TEXT_BYTES_MAX),
            _ => (false, BODY_BYTES_MAX as usize),
        };
        if is_cut || write(self, into).is_err() {
            let reason = format!("{most} bytes are the most; ask for less at once");
            let failed = Self::Failed(StoreError::Config { setting: "answer", reason });
            write(&failed, into).expect("a failure is a short message");
        }
    }

    fn write_body(&self, into: &mut Writer<'_>) {
        match self {
            Self::Welcome(welcome) => welcome.write(into),
            Self::Refused { reason } => into.text(reason),
            Self::Done => {}
            Self::Failed(error) => write_error(into, error),
            Self::Prepared(blocks) => {
                into.count(blocks.len());
                for block in blocks {
                    block.write(into);
                }
            }
            Self::Slab { offset } => into.u64(*offset),
            Self::Puts(outcomes) => {
                into.count(outcomes.len());
                for outcome in outcomes {
                    write_outcome(into, outcome);
                }
            }
            Self::Leases(leases) => {
                into.count(leases.len());
                for lease in leases {
                    lease.write(into);
                }
            }
            Self::Matched(tiers) | Self::Places(tiers) => {
                into.count(tiers.len());
                into.bytes(tiers);
            }
            Self::Flags(flags) => {
                into.count(flags.len());
                for flag in flags {
                    into.u8(u8::from(*flag));
                }
            }
            Self::Count(count) => into.u64(*count),
            Self::Manifests(all) => {
                into.count(all.len());
                for (namespace, manifest) in all {
                    into.bytes(namespace.as_bytes());
                    into.manifest(manifest);
                }
            }
            Self::Text(text) => into.text(text),
            Self::Changes(changes) => write_changes(into, changes),
        }
    }

    /// Reads the message of a frame.
    pub fn read(frame: &Frame<'_>) -> Result<Self, WireError> {
        let mut from = Reader::new(frame.body);
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

fn write_changes(into: &mut Writer<'_>, changes: &Changes) {
    into.bytes(&changes.next.to_bytes());
    into.u8(u8::from(changes.is_lost));
    into.u8(u8::from(changes.is_current));
    into.count(changes.changes.len());
    for change in &changes.changes {
        match change {
            Change::Stored(key) => {
                into.u8(0);
                into.key(key);
            }
            Change::Gone(key) => {
                into.u8(1);
                into.key(key);
            }
            Change::Cleared => into.u8(2),
        }
    }
}

fn read_changes(from: &mut Reader<'_>) -> Result<Changes, WireError> {
    Ok(Changes {
        next: from.cursor()?,
        is_lost: from.flag("lost")?,
        is_current: from.flag("current")?,
        changes: list(from, |from| {
            Ok(match from.u8("change")? {
                0 => Change::Stored(from.key()?),
                1 => Change::Gone(from.key()?),
                2 => Change::Cleared,
                _ => return Err(WireError::Field("change")),
            })
        })?,
    })
}

fn list<'a, T>(
    from: &mut Reader<'a>,
    read: impl Fn(&mut Reader<'a>) -> Result<T, WireError>,
) -> Result<Vec<T>, WireError> {
    let count = from.count(1, "count")?;
    from.all(count, read)
}
