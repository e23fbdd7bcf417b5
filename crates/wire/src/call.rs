//! Calls: messages from a worker to its node.

use cascade_block::{BlockKey, Manifest, NamespaceId};
use cascade_tier::ChangeCursor;

use crate::chain::ChainRequest;
use crate::fields::{FieldReader, FieldWriter};
use crate::frame::{Frame, TraceContext};
use crate::hello::Hello;
use crate::{KEYS_MAX, WireError};

/// A block that a client wants to put.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockToPrepare {
    /// Its key.
    pub key: BlockKey,
    /// Key of the block before it in the chain.
    pub parent: Option<BlockKey>,
    /// Its length.
    pub bytes: u32,
    /// Whether it belongs to a protected prefix.
    pub is_prefix: bool,
    /// Whether it is a partial block at the end of a request.
    pub is_partial: bool,
}

/// A block that a client has written in place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SealedBlock {
    /// The hold of the slab that it was written into.
    pub hold: u64,
    /// Its length; at most the reserved length.
    pub bytes: u32,
    /// Its key.
    pub key: BlockKey,
    /// Key of the block before it in the chain.
    pub parent: Option<BlockKey>,
    /// The namespace of its chain.
    pub namespace: NamespaceId,
    /// Whether it belongs to a protected prefix.
    pub is_prefix: bool,
    /// Whether it is a partial block at the end of a request.
    pub is_partial: bool,
    /// Milliseconds until it expires.
    pub ttl_ms: Option<u64>,
}

/// Holds with consecutive numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HoldRange {
    /// The first number.
    pub first: u64,
    /// The number of holds.
    pub count: u32,
}

/// Purpose of a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeasePurpose {
    /// To use the bytes.
    Use,
    /// To compare them in a put: not counted as an access.
    Compare,
}

/// A query or an operation on each of some blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyQuestion {
    /// Is it in any tier?
    Contains,
    /// Which tiers have it?
    Locate,
    /// Keep it in DRAM.
    Pin,
    /// Remove one pin.
    Unpin,
    /// Delete it.
    Delete,
    /// Promote it to DRAM.
    Prefetch,
}

/// The place of a question in this list is its code in the message, so the order is fixed.
const QUESTIONS: [KeyQuestion; 6] = [
    KeyQuestion::Contains,
    KeyQuestion::Locate,
    KeyQuestion::Pin,
    KeyQuestion::Unpin,
    KeyQuestion::Delete,
    KeyQuestion::Prefetch,
];

/// A message from a worker to its node. `timeout_ms` is the time until the caller's deadline. The
/// client numbers holds and never uses a number twice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Call {
    /// The client's identity; the first call on every connection.
    Hello(Hello),
    /// Checks that the node answers.
    Ping,
    /// Allocates slabs for blocks to put. The slab of block `i` gets hold `first_hold + i`.
    Prepare {
        /// Time until the caller's deadline.
        timeout_ms: u32,
        /// Hold of the first block.
        first_hold: u64,
        /// The blocks.
        blocks: Vec<BlockToPrepare>,
    },
    /// Allocates a slab outside a batch.
    Reserve {
        /// Time until the caller's deadline.
        timeout_ms: u32,
        /// Hold of the slab.
        hold: u64,
        /// Its length.
        bytes: u64,
    },
    /// Stores blocks that were written in place.
    Seal {
        /// Time until the caller's deadline.
        timeout_ms: u32,
        /// The blocks.
        blocks: Vec<SealedBlock>,
    },
    /// Releases holds. Has no answer.
    Release {
        /// The holds.
        holds: Vec<HoldRange>,
    },
    /// Outcomes of puts that the client decided itself. Has no answer.
    Settled {
        /// Blocks already present with equal bytes.
        present: u32,
        /// Blocks already present with other bytes.
        conflicts: u32,
        /// Blocks whose comparison failed.
        failures: u32,
    },
    /// Leases blocks. The lease of key `i` gets hold `first_hold + i`.
    Lease {
        /// Time until the caller's deadline.
        timeout_ms: u32,
        /// Hold of the first key.
        first_hold: u64,
        /// Purpose of the leases.
        purpose: LeasePurpose,
        /// The blocks.
        keys: Vec<BlockKey>,
    },
    /// Looks up a chain and leases the leading blocks that match.
    Acquire {
        /// Time until the caller's deadline.
        timeout_ms: u32,
        /// Hold of the first key.
        first_hold: u64,
        /// The chain.
        request: ChainRequest,
    },
    /// Looks up the leading blocks of a chain and their tiers.
    Lookup(ChainRequest),
    /// Updates the hints of a chain.
    Hint(ChainRequest),
    /// One query or operation on each of some blocks.
    Ask {
        /// The query or operation.
        question: KeyQuestion,
        /// The blocks.
        keys: Vec<BlockKey>,
    },
    /// Deletes every block.
    Clear,
    /// Registers a namespace's manifest.
    Register {
        /// Time until the caller's deadline.
        timeout_ms: u32,
        /// The namespace's root key.
        root: BlockKey,
        /// Its manifest.
        manifest: Manifest,
    },
    /// Lists the registered manifests.
    Manifests {
        /// Time until the caller's deadline.
        timeout_ms: u32,
    },
    /// Writes all pending blocks to the lower tiers.
    Flush {
        /// Time until the caller's deadline.
        timeout_ms: u32,
    },
    /// An administrator's request.
    Admin {
        /// Time until the caller's deadline.
        timeout_ms: u32,
        /// The name of the request.
        topic: String,
        /// Its arguments in JSON.
        arguments: String,
    },
    /// Releases everything that the client holds of an earlier run of the node. Has no answer.
    Forget {
        /// The earlier run.
        epoch: u64,
    },
    /// Reads changes of the set of blocks.
    Changes {
        /// The end of the changes that the caller has read.
        since: Option<ChangeCursor>,
        /// Maximum number of changes in the answer.
        most: u32,
    },
}

impl BlockToPrepare {
    fn write(&self, into: &mut FieldWriter<'_>) {
        into.key(&self.key);
        into.u32(self.bytes);
        into.u8(u8::from(self.is_prefix));
        into.u8(u8::from(self.is_partial));
        into.maybe_key(self.parent.as_ref());
    }

    fn read(from: &mut FieldReader<'_>) -> Result<Self, WireError> {
        Ok(Self {
            key: from.key()?,
            bytes: from.u32("length")?,
            is_prefix: from.flag("prefix")?,
            is_partial: from.flag("partial")?,
            parent: from.maybe_key()?,
        })
    }
}

impl SealedBlock {
    fn write(&self, into: &mut FieldWriter<'_>) {
        into.u64(self.hold);
        into.u32(self.bytes);
        into.key(&self.key);
        into.bytes(self.namespace.as_bytes());
        into.u8(u8::from(self.is_prefix));
        into.u8(u8::from(self.is_partial));
        into.maybe_u64(self.ttl_ms);
        into.maybe_key(self.parent.as_ref());
    }

    fn read(from: &mut FieldReader<'_>) -> Result<Self, WireError> {
        Ok(Self {
            hold: from.u64("hold")?,
            bytes: from.u32("length")?,
            key: from.key()?,
            namespace: from.namespace()?,
            is_prefix: from.flag("prefix")?,
            is_partial: from.flag("partial")?,
            ttl_ms: from.maybe_u64("ttl")?,
            parent: from.maybe_key()?,
        })
    }
}

impl HoldRange {
    fn read(from: &mut FieldReader<'_>) -> Result<Self, WireError> {
        let (first, count) = (from.u64("hold")?, from.u32("count")?);
        // Bounds the work of one range, and the end is checked for overflow once for all users.
        let is_small = count as usize <= KEYS_MAX;
        let is_sound = is_small && first.checked_add(u64::from(count)).is_some();
        if is_sound { Ok(Self { first, count }) } else { Err(WireError::Field("count")) }
    }
}

impl Call {
    fn kind(&self) -> u16 {
        match self {
            Self::Hello(_) => 1,
            Self::Ping => 2,
            Self::Prepare { .. } => 3,
            Self::Reserve { .. } => 4,
            Self::Seal { .. } => 5,
            Self::Release { .. } => 6,
            Self::Settled { .. } => 7,
            Self::Lease { .. } => 8,
            Self::Acquire { .. } => 9,
            Self::Lookup(_) => 10,
            Self::Hint(_) => 11,
            Self::Ask { .. } => 12,
            Self::Clear => 13,
            Self::Register { .. } => 14,
            Self::Manifests { .. } => 15,
            Self::Flush { .. } => 16,
            Self::Admin { .. } => 17,
            Self::Forget { .. } => 18,
            Self::Changes { .. } => 19,
        }
    }

    /// Its name in metrics and logs.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Hello(_) => "hello",
            Self::Ping => "ping",
            Self::Prepare { .. } => "prepare",
            Self::Reserve { .. } => "reserve",
            Self::Seal { .. } => "seal",
            Self::Release { .. } => "release",
            Self::Settled { .. } => "settled",
            Self::Lease { .. } => "lease",
            Self::Acquire { .. } => "acquire",
            Self::Lookup(_) => "lookup",
            Self::Hint(_) => "hint",
            Self::Ask { .. } => "ask",
            Self::Clear => "clear",
            Self::Register { .. } => "register",
            Self::Manifests { .. } => "manifests",
            Self::Flush { .. } => "flush",
            Self::Admin { .. } => "admin",
            Self::Forget { .. } => "forget",
            Self::Changes { .. } => "changes",
        }
    }

    /// Appends its frame. Appends nothing if the message is too long.
    pub fn write(
        &self,
        into: &mut Vec<u8>,
        call: u32,
        trace: Option<TraceContext>,
    ) -> Result<(), WireError> {
        Frame::write(into, self.kind(), call, trace, |body| self.write_body(&mut FieldWriter(body)))
    }

    fn write_body(&self, into: &mut FieldWriter<'_>) {
        match self {
            Self::Hello(hello) => hello.write(into),
            Self::Ping | Self::Clear => {}
            Self::Prepare { timeout_ms, first_hold, blocks } => {
                into.u32(*timeout_ms);
                into.u64(*first_hold);
                into.list(blocks, BlockToPrepare::write);
            }
            Self::Reserve { timeout_ms, hold, bytes } => {
                into.u32(*timeout_ms);
                into.u64(*hold);
                into.u64(*bytes);
            }
            Self::Seal { timeout_ms, blocks } => {
                into.u32(*timeout_ms);
                into.list(blocks, SealedBlock::write);
            }
            Self::Release { holds } => into.list(holds, |range, into| {
                into.u64(range.first);
                into.u32(range.count);
            }),
            Self::Settled { present, conflicts, failures } => {
                into.u32(*present);
                into.u32(*conflicts);
                into.u32(*failures);
            }
            Self::Lease { timeout_ms, first_hold, purpose, keys } => {
                into.u32(*timeout_ms);
                into.u64(*first_hold);
                into.u8(u8::from(*purpose == LeasePurpose::Compare));
                into.keys(keys);
            }
            Self::Acquire { timeout_ms, first_hold, request } => {
                into.u32(*timeout_ms);
                into.u64(*first_hold);
                request.write(into);
            }
            Self::Lookup(request) | Self::Hint(request) => request.write(into),
            Self::Ask { question, keys } => {
                let code = QUESTIONS.iter().position(|known| known == question);
                let code = code.expect("every question is in the list");
                into.u8(u8::try_from(code).expect("a handful of questions"));
                into.keys(keys);
            }
            Self::Register { timeout_ms, root, manifest } => {
                into.u32(*timeout_ms);
                into.key(root);
                into.manifest(manifest);
            }
            Self::Manifests { timeout_ms } | Self::Flush { timeout_ms } => into.u32(*timeout_ms),
            Self::Admin { timeout_ms, topic, arguments } => {
                into.u32(*timeout_ms);
                into.text(topic);
                into.text(arguments);
            }
            Self::Forget { epoch } => into.u64(*epoch),
            Self::Changes { since, most } => {
                into.maybe_cursor(since.as_ref());
                into.u32(*most);
            }
        }
    }

    /// Reads the message of a frame.
    pub fn read(frame: &Frame<'_>) -> Result<Self, WireError> {
        let mut from = FieldReader::new(frame.body);
        let call = match frame.header.kind {
            1 => Self::Hello(Hello::read(&mut from)?),
            2 => Self::Ping,
            3 => {
                let (timeout_ms, first_hold) = (from.u32("timeout")?, from.u64("hold")?);
                // The shortest block: key 32, length 4, two flags, and one byte for no parent.
                let count = from.count(39, "blocks")?;
                let first_hold = check_holds(first_hold, count)?;
                let blocks = from.all(count, BlockToPrepare::read)?;
                Self::Prepare { timeout_ms, first_hold, blocks }
            }
            4 => Self::Reserve {
                timeout_ms: from.u32("timeout")?,
                hold: check_holds(from.u64("hold")?, 1)?,
                bytes: from.u64("length")?,
            },
            5 => {
                let timeout_ms = from.u32("timeout")?;
                // The shortest block: hold 8, length 4, key 32, namespace 16, two flags, and one
                // byte each for no time to live and no parent.
                let count = from.count(64, "blocks")?;
                Self::Seal { timeout_ms, blocks: from.all(count, SealedBlock::read)? }
            }
            6 => {
                // A range: first number 8, count 4.
                let count = from.count(12, "holds")?;
                Self::Release { holds: from.all(count, HoldRange::read)? }
            }
            7 => Self::Settled {
                present: from.u32("present")?,
                conflicts: from.u32("conflicts")?,
                failures: from.u32("failures")?,
            },
            8..=12 | 19 => return Self::read_key_call(frame.header.kind, from),
            13 => Self::Clear,
            14 => Self::Register {
                timeout_ms: from.u32("timeout")?,
                root: from.key()?,
                manifest: from.manifest()?,
            },
            15 => Self::Manifests { timeout_ms: from.u32("timeout")? },
            16 => Self::Flush { timeout_ms: from.u32("timeout")? },
            17 => Self::Admin {
                timeout_ms: from.u32("timeout")?,
                topic: from.text("topic")?.to_owned(),
                arguments: from.text("arguments")?.to_owned(),
            },
            18 => Self::Forget { epoch: from.u64("epoch")? },
            kind => return Err(WireError::Kind(kind)),
        };
        from.end(call)
    }

    /// Reads the calls on keys and chains.
    fn read_key_call(kind: u16, mut from: FieldReader<'_>) -> Result<Self, WireError> {
        let call = match kind {
            8 => {
                let (timeout_ms, first_hold) = (from.u32("timeout")?, from.u64("hold")?);
                let is_compare = from.flag("purpose")?;
                let purpose = if is_compare { LeasePurpose::Compare } else { LeasePurpose::Use };
                let keys = from.keys()?;
                let first_hold = check_holds(first_hold, keys.len())?;
                Self::Lease { timeout_ms, first_hold, purpose, keys }
            }
            9 => {
                let (timeout_ms, first_hold) = (from.u32("timeout")?, from.u64("hold")?);
                let request = ChainRequest::read(&mut from)?;
                let first_hold = check_holds(first_hold, request.keys.len())?;
                Self::Acquire { timeout_ms, first_hold, request }
            }
            10 => Self::Lookup(ChainRequest::read(&mut from)?),
            11 => Self::Hint(ChainRequest::read(&mut from)?),
            12 => {
                let code = usize::from(from.u8("question")?);
                let question = QUESTIONS.get(code).ok_or(WireError::Field("question"))?;
                Self::Ask { question: *question, keys: from.keys()? }
            }
            19 => Self::Changes { since: from.maybe_cursor()?, most: from.u32("most")? },
            kind => return Err(WireError::Kind(kind)),
        };
        from.end(call)
    }
}

/// Checks that the numbers of `count` holds from `first` on do not overflow.
fn check_holds(first: u64, count: usize) -> Result<u64, WireError> {
    let end = u64::try_from(count).ok().and_then(|count| first.checked_add(count));
    end.map(|_| first).ok_or(WireError::Field("hold"))
}
