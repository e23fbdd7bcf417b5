//! Every message is decoded as it was encoded, and invalid bytes are refused without a panic.

use std::sync::Arc;
use std::time::Duration;

use cascade_block::{BlockKey, Manifest, NamespaceId};
use cascade_tier::{
    Change, ChangeCursor, Changes, DeclineReason, Hints, Priority, PutOutcome, StopReason,
    StoreError,
};
use cascade_wire::{
    Access, Answer, BLOCKS_MAX, BlockToPrepare, Call, ChainRequest, Frame, HEADER_BYTES, Hello,
    HoldRange, KEYS_MAX, KeyQuestion, Lease, LeasePurpose, PreparedBlock, SealedBlock,
    TEXT_BYTES_MAX, TraceContext, VERSION, Welcome, WireError, frame_length,
};
use proptest::prelude::*;

fn key(fill: u8) -> BlockKey {
    BlockKey::from_bytes([fill; 32])
}

fn request() -> ChainRequest {
    ChainRequest {
        keys: vec![key(1), key(2)],
        partial_tail: true,
        hints: Hints {
            ends_session: true,
            stop: Some(StopReason::ToolUse),
            priority: Priority::High,
            workload: Some(200),
            expected_within: Some(Duration::from_millis(1500)),
        },
        at: Some(Duration::from_secs(12)),
    }
}

fn hello() -> Hello {
    Hello {
        version_min: 1,
        version_max: 7,
        access: Access::Write,
        session: Some([9; 16]),
        token: Some(b"secret".to_vec()),
        name: "worker 3".to_owned(),
    }
}

fn calls() -> Vec<Call> {
    let (timeout_ms, first_hold, keys) = (250, 77, vec![key(1), key(2), key(3)]);
    let unwritten = BlockToPrepare {
        key: key(4),
        parent: Some(key(3)),
        bytes: 131_072,
        is_prefix: true,
        is_partial: false,
    };
    let sealed = SealedBlock {
        hold: 5,
        bytes: 9,
        key: key(4),
        parent: None,
        namespace: NamespaceId::from_bytes([3; 16]),
        is_prefix: false,
        is_partial: true,
        ttl_ms: Some(60_000),
    };
    vec![
        Call::Hello(hello()),
        Call::Ping,
        Call::Prepare { timeout_ms, first_hold, blocks: vec![unwritten, unwritten] },
        Call::Reserve { timeout_ms, hold: 1, bytes: 4096 },
        Call::Seal { timeout_ms, blocks: vec![sealed] },
        Call::Release { holds: vec![HoldRange { first: 3, count: 4 }] },
        Call::Settled { present: 1, conflicts: 2, failures: 3 },
        Call::Lease { timeout_ms, first_hold, purpose: LeasePurpose::Compare, keys: keys.clone() },
        Call::Acquire { timeout_ms, first_hold, request: request() },
        Call::Lookup(request()),
        Call::Hint(request()),
        Call::Ask { question: KeyQuestion::Prefetch, keys },
        Call::Clear,
        Call::Register {
            timeout_ms,
            root: key(6),
            manifest: Manifest::new().with("weights", "w").with("dtype", "bf16"),
        },
        Call::Manifests { timeout_ms },
        Call::Flush { timeout_ms },
        Call::Admin { timeout_ms, topic: "status".to_owned(), arguments: "{}".to_owned() },
        Call::Forget { epoch: u64::MAX },
        Call::Changes { since: Some(cursor()), most: 1000 },
        Call::Changes { since: None, most: 1 },
    ]
}

fn cursor() -> ChangeCursor {
    ChangeCursor::from_bytes(std::array::from_fn(|at| 0xA0 + u8::try_from(at).expect("few")))
}

fn failures() -> Vec<StoreError> {
    vec![
        StoreError::Timeout { operation: "flush", timeout_ms: 30 },
        StoreError::Busy { tier: "files", pending_bytes: 1 << 40 },
        StoreError::NoRoom { needed_bytes: 5 },
        StoreError::Tier {
            tier: "files",
            operation: "read a block",
            source: Arc::new(std::io::Error::other("the disk is gone")),
        },
        StoreError::Config { setting: "dram", reason: "too small".to_owned() },
        StoreError::Closed,
    ]
}

fn welcome() -> Welcome {
    Welcome {
        version: VERSION,
        epoch: 42,
        session: [7; 16],
        pool_bytes: 1 << 30,
        hold_bytes_max: 1 << 29,
        timeout_ms: 30_000,
        writes_through: false,
        tiers: vec!["dram".to_owned(), "files".to_owned()],
        tenant: "default".to_owned(),
        node_version: "0.1.0".to_owned(),
        device: None,
    }
}

fn answers() -> Vec<Answer> {
    let mut all = vec![
        Answer::Welcome(welcome()),
        Answer::Refused { reason: "no".to_owned() },
        Answer::Done,
        Answer::Prepared(vec![
            PreparedBlock::Slab { offset: 4096 },
            PreparedBlock::Settled(PutOutcome::Declined(DeclineReason::WorthLess)),
            PreparedBlock::Compare,
            PreparedBlock::Later,
        ]),
        Answer::Slab { offset: 64 },
        Answer::Puts(vec![PutOutcome::Stored, PutOutcome::Deduplicated, PutOutcome::Conflict]),
        Answer::Leases(vec![Lease::Hit { offset: 1 << 33, bytes: 7, tier: 1 }, Lease::Miss]),
        Answer::Matched(vec![0, 0, 1]),
        Answer::Flags(vec![true, false]),
        Answer::Places(vec![3, 0]),
        Answer::Count(12),
        Answer::Manifests(vec![(
            NamespaceId::from_bytes([1; 16]),
            Manifest::new().with("layout", "nhd"),
        )]),
        Answer::Text("{\"ready\":true}".to_owned()),
    ];
    all.extend(failures().into_iter().map(Answer::Failed));
    all.push(Answer::Puts(failures().into_iter().map(PutOutcome::Failed).collect()));
    all.push(Answer::Leases(failures().into_iter().map(Lease::Failed).collect()));
    all.push(Answer::Changes(Changes {
        next: cursor(),
        is_lost: true,
        is_current: false,
        changes: vec![Change::Cleared, Change::Stored(key(1)), Change::Removed(key(2))],
    }));
    all
}

/// A part of the welcome that the fixture of version 1 does not contain.
#[test]
fn the_device_of_a_pool_is_decoded_as_encoded() {
    let welcome = Welcome { device: Some([9; 16]), ..welcome() };
    let mut bytes = Vec::new();
    Answer::Welcome(welcome.clone()).write(&mut bytes, 1);
    let frame = Frame::read(&bytes).expect("it was just written");
    assert!(matches!(Answer::read(&frame), Ok(Answer::Welcome(read)) if read == welcome));
}

/// Failures that the fixture of version 1 does not contain.
#[test]
fn failures_outside_the_fixture_are_decoded_as_encoded() {
    let all = || [StoreError::Erasing, StoreError::Limit { limit: "pins", most: u64::MAX }];
    let mut bytes = Vec::new();
    Answer::Leases(all().map(Lease::Failed).into()).write(&mut bytes, 1);
    let answer = Answer::read(&Frame::read(&bytes).expect("it was just written"));
    let Ok(Answer::Leases(leases)) = answer else { panic!("{answer:?}") };
    for (lease, error) in leases.iter().zip(all()) {
        let Lease::Failed(read) = lease else { panic!("{lease:?}") };
        assert_eq!(format!("{read:?}"), format!("{error:?}"));
    }
}

#[test]
fn every_call_is_decoded_as_encoded() {
    for (number, call) in (0..).zip(calls()) {
        let trace = TraceContext { trace: [1; 16], span: [2; 8], is_sampled: number % 2 == 0 };
        let trace = Some(trace).filter(|_| number % 3 > 0);
        let mut bytes = vec![0xEE];
        call.write(&mut bytes, number, trace).expect("it is short");
        let frame = &bytes[1..];
        assert_eq!(frame_length(frame), Ok(Some(frame.len())));
        let frame = Frame::read(frame).expect("it was just written");
        assert_eq!((frame.header.call, frame.trace), (number, trace));
        assert_eq!(Call::read(&frame), Ok(call));
    }
}

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const SPAN: &str = "00f067aa0ba902b7";

#[test]
fn a_hello_has_one_of_three_kinds_of_access() {
    for (code, access) in [(0, Access::Read), (1, Access::Write), (2, Access::Administer)] {
        let call = Call::Hello(Hello { access, ..hello() });
        let mut frame = Vec::new();
        call.write(&mut frame, 1, None).expect("it is short");
        assert_eq!(frame[cascade_wire::HEADER_BYTES + 4], code);
        let frame = Frame::read(&frame).expect("it is sound");
        assert_eq!(Call::read(&frame), Ok(call));
        let mut body = frame.body.to_vec();
        body[4] = 3;
        let unknown = Frame { body: &body, ..frame };
        assert!(Call::read(&unknown).is_err());
    }
}

#[test]
fn a_traceparent_is_parsed_and_printed() {
    let context = TraceContext::parse(&format!("00-{TRACE}-{SPAN}-01")).expect("it is one");
    assert_eq!(context.trace[..2], [0x4b, 0xf9]);
    assert_eq!(context.span[6..], [0x02, 0xb7]);
    assert!(context.is_sampled);
    assert_eq!(context.to_string(), format!("00-{TRACE}-{SPAN}-01"));
    let unsampled = TraceContext::parse(&format!("00-{TRACE}-{SPAN}-00")).expect("it is one");
    assert!(!unsampled.is_sampled);
    let later_version = format!("cc-{TRACE}-{SPAN}-01-what-else");
    assert!(TraceContext::parse(&later_version).is_some(), "a later version may have more fields");
}

#[test]
fn an_invalid_traceparent_is_refused() {
    let zero = "0".repeat(32);
    for wrong in [
        String::new(),
        "00".to_owned(),
        format!("00-{TRACE}-{SPAN}"),
        format!("00-{TRACE}-{SPAN}-01-more"),
        format!("ff-{TRACE}-{SPAN}-01"),
        format!("00-{zero}-{SPAN}-01"),
        format!("00-{TRACE}-0000000000000000-01"),
        format!("00-{}-{SPAN}-01", TRACE.to_uppercase()),
        format!("00-{}é-{SPAN}-01", &TRACE[..30]),
    ] {
        assert_eq!(TraceContext::parse(&wrong), None, "{wrong:?}");
    }
}

#[test]
fn every_answer_is_decoded_as_encoded() {
    for (number, answer) in (0..).zip(answers()) {
        let mut bytes = Vec::new();
        answer.write(&mut bytes, number);
        let frame = Frame::read(&bytes).expect("it was just written");
        let back = Answer::read(&frame).expect("it was just written");
        let mut again = Vec::new();
        back.write(&mut again, number);
        assert_eq!(bytes, again, "{answer:?} was decoded as {back:?}");
    }
}

/// The frames of version 1, one per line in hexadecimal: every call, then every answer.
const FIXTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/wire-v1.txt");

fn frames() -> Vec<Vec<u8>> {
    let trace = Some(TraceContext { trace: [1; 16], span: [2; 8], is_sampled: false });
    let call = |(number, call): (u32, Call)| {
        let mut bytes = Vec::new();
        // Every second call belongs to a trace.
        call.write(&mut bytes, number, trace.filter(|_| number % 2 == 1)).expect("it is short");
        bytes
    };
    let answer = |(number, answer): (u32, Answer)| {
        let mut bytes = Vec::new();
        answer.write(&mut bytes, number);
        bytes
    };
    (0..).zip(calls()).map(call).chain((0..).zip(answers()).map(answer)).collect()
}

fn hexadecimal(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").expect("a String takes everything");
        text
    })
}

/// A fixture of a released version never changes. To add one for a new version, raise `VERSION`,
/// name a new file, and run this test with `--ignored`.
#[test]
#[ignore = "writes the fixture"]
fn write_the_fixture() {
    let lines: Vec<String> = frames().iter().map(|frame| hexadecimal(frame) + "\n").collect();
    std::fs::write(FIXTURE, lines.concat()).expect("the directory is there");
}

#[test]
fn frames_of_version_1_match_the_fixture() {
    let text = std::fs::read_to_string(FIXTURE).expect("the fixture is there");
    let mut kinds = std::collections::BTreeSet::new();
    let frames = frames();
    assert_eq!(text.lines().count(), frames.len());
    for (line, now) in text.lines().zip(frames) {
        assert_eq!(line, hexadecimal(&now), "a frame differs from version 1");
        let digits = |at: usize| u8::from_str_radix(&line[at..at + 2], 16).expect("hexadecimal");
        let bytes: Vec<u8> = (0..line.len()).step_by(2).map(digits).collect();
        let frame = Frame::read(&bytes).expect("a frame of version 1");
        let kind = frame.header.kind;
        kinds.insert(kind);
        let is_read =
            if kind < 100 { Call::read(&frame).is_ok() } else { Answer::read(&frame).is_ok() };
        assert!(is_read, "kind {kind}");
    }
    let all: std::collections::BTreeSet<u16> = (1..=19).chain(101..=115).collect();
    assert_eq!(kinds, all, "every kind of message has a frame in the fixture");
}

#[test]
fn the_longest_answer_about_blocks_fits_a_frame() {
    let worst = || StoreError::Tier {
        tier: "files",
        operation: "read a block",
        source: Arc::new(std::io::Error::other("x".repeat(100_000))),
    };
    let leases = (0..BLOCKS_MAX).map(|_| Lease::Failed(worst())).collect();
    let mut bytes = Vec::new();
    Answer::Leases(leases).write(&mut bytes, 1);
    let frame = Frame::read(&bytes).expect("it was just written");
    assert!(matches!(Answer::read(&frame), Ok(Answer::Leases(all)) if all.len() == BLOCKS_MAX));
}

#[test]
fn the_longest_answer_about_changes_fits_a_frame() {
    let changes = vec![Change::Removed(key(7)); KEYS_MAX];
    let all = Changes { next: cursor(), is_lost: false, is_current: true, changes };
    let mut bytes = Vec::new();
    Answer::Changes(all.clone()).write(&mut bytes, 1);
    let frame = Frame::read(&bytes).expect("it was just written");
    assert!(matches!(Answer::read(&frame), Ok(Answer::Changes(read)) if read == all));
}

#[test]
fn an_answer_that_is_too_long_becomes_a_failure() {
    let manifest = Manifest::new().with("name", "v".repeat(1 << 20));
    let many = (0..9).map(|fill| (NamespaceId::from_bytes([fill; 16]), manifest.clone()));
    let mut bytes = Vec::new();
    Answer::Manifests(many.collect()).write(&mut bytes, 1);
    let frame = Frame::read(&bytes).expect("it was just written");
    let answer = Answer::read(&frame);
    assert!(matches!(answer, Ok(Answer::Failed(StoreError::Config { .. }))), "{answer:?}");
}

#[test]
fn an_invalid_frame_is_refused_with_the_field_at_fault() {
    let mut bytes = Vec::new();
    Call::Ping.write(&mut bytes, 1, None).expect("it is short");
    let with = |at: usize, value: u8| {
        let mut changed = bytes.clone();
        changed[at] = value;
        changed
    };
    assert!(matches!(frame_length(&with(0, b'G')), Err(WireError::Magic(_))));
    assert_eq!(frame_length(&with(4, 99)), Err(WireError::Version(99)));
    assert!(matches!(frame_length(&with(11, 0xFF)), Err(WireError::TooLong(_))));
    assert_eq!(frame_length(&with(16, 4)), Err(WireError::Field("flags")));
    assert_eq!(Frame::read(&with(12, 9)), Err(WireError::Checksum));
    assert_eq!(frame_length(&bytes[..HEADER_BYTES - 1]), Ok(None));
}

#[test]
fn a_count_beyond_the_message_is_refused_without_an_allocation() {
    let mut bytes = Vec::new();
    let call = Call::Ask { question: KeyQuestion::Pin, keys: Vec::new() };
    call.write(&mut bytes, 1, None).expect("it is short");
    let mut body = bytes[HEADER_BYTES..].to_vec();
    body[1..5].copy_from_slice(&u32::MAX.to_le_bytes());
    let mut frame = Vec::new();
    Frame::write(&mut frame, 12, 1, None, |into| into.extend_from_slice(&body))
        .expect("it is short");
    let frame = Frame::read(&frame).expect("its checksum is right");
    assert_eq!(Call::read(&frame), Err(WireError::Field("keys")));
}

proptest! {
    #[test]
    fn random_bytes_never_cause_a_panic(
        kind in 0_u16..130,
        body in prop::collection::vec(any::<u8>(), 0..300),
    ) {
        let mut bytes = Vec::new();
        Frame::write(&mut bytes, kind, 1, None, |into| into.extend_from_slice(&body))
            .expect("it is short");
        let frame = Frame::read(&bytes).expect("its checksum is right");
        if let Ok(call) = Call::read(&frame) {
            let mut again = Vec::new();
            call.write(&mut again, 1, None).expect("it was as short");
            prop_assert_eq!(Call::read(&Frame::read(&again).expect("sound")), Ok(call));
        }
        drop(Answer::read(&frame));
    }

    #[test]
    fn a_flipped_bit_anywhere_is_detected(
        index in 0_usize..20,
        at in 0_usize..200,
        bit in 0_u8..8,
    ) {
        let mut bytes = Vec::new();
        calls()[index].write(&mut bytes, 3, None).expect("it is short");
        let at = at % bytes.len();
        bytes[at] ^= 1 << bit;
        let read = frame_length(&bytes).and_then(|_| Frame::read(&bytes).map(|_| ()));
        prop_assert!(read.is_err());
    }
}

/// Counting through such hold numbers would overflow.
#[test]
fn hold_numbers_that_overflow_are_refused() {
    let (timeout_ms, keys, first_hold) = (1, vec![key(1), key(2)], u64::MAX - 1);
    let unwritten =
        BlockToPrepare { key: key(1), parent: None, bytes: 1, is_prefix: false, is_partial: false };
    let purpose = LeasePurpose::Use;
    for call in [
        Call::Prepare { timeout_ms, first_hold, blocks: vec![unwritten; 2] },
        Call::Reserve { timeout_ms, hold: u64::MAX, bytes: 1 },
        Call::Lease { timeout_ms, first_hold, purpose, keys },
        Call::Acquire { timeout_ms, first_hold, request: request() },
        Call::Release { holds: vec![HoldRange { first: u64::MAX, count: 1 }] },
    ] {
        let mut bytes = Vec::new();
        call.write(&mut bytes, 1, None).unwrap();
        let read = Call::read(&Frame::read(&bytes).unwrap());
        let expected = matches!(read, Err(WireError::Field("hold" | "count")));
        assert!(expected, "{call:?} was read as {read:?}");
    }
}

/// A truncated status of many clients could not be parsed as JSON.
#[test]
fn long_text_is_refused_instead_of_truncated() {
    let write = |text: String| {
        let mut bytes = Vec::new();
        Answer::Text(text).write(&mut bytes, 1);
        Answer::read(&Frame::read(&bytes).unwrap()).unwrap()
    };
    let whole = "x".repeat(TEXT_BYTES_MAX);
    assert!(matches!(write(whole.clone()), Answer::Text(text) if text == whole));
    let answer = write(whole + "x");
    let Answer::Failed(StoreError::Config { setting, reason }) = answer else {
        panic!("{answer:?}");
    };
    assert_eq!(setting, "answer");
    assert!(reason.contains("ask for less"), "{reason}");
}
