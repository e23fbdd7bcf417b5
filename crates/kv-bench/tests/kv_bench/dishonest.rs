//! Stores that cheat, lose data or fail: each makes the run INVALID, with a reason that fits.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use cascade_block::BlockKey;
use cascade_kv_bench::backend::{Backend, Held, KvTier, NewBlock, Read, Space, Stored};
use cascade_kv_bench::plan::{Phases, Workload};
use cascade_kv_bench::progress::Progress;
use cascade_kv_bench::run::{RunOptions, RunOutcome, run};
use cascade_kv_bench::validity::{DeviceProof, Evidence, Validity};
use cascade_runtime::SystemClock;

use crate::backends::MapBackend;
use crate::{options, sizes, workload};

/// How a store cheats or fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    None,
    AlwaysMisses,
    FlipsABit,
    CutsTheEndOfBlocks,
    GivesAnotherBlock,
    ReturnsBeforeTheDataIsThere,
    GivesStaleBytes,
    LosesTheLastBlocks,
    FailsReads,
    FailsWrites,
    FailsAllWrites,
    HasNoMemory,
    ForgetsOutcomes,
    SaysThatAllIsPresent,
}

/// A store in memory with a fault.
struct Dishonest {
    fault: Fault,
    says_tier: KvTier,
    map: MapBackend,
    calls: AtomicU64,
    /// What was put by the last call: it gets there with the next one.
    late: Mutex<HashMap<BlockKey, Vec<u8>>>,
}

impl Dishonest {
    fn new(fault: Fault, says_tier: KvTier) -> Self {
        let (map, late) = (MapBackend::default(), Mutex::default());
        Self { fault, says_tier, map, calls: AtomicU64::new(0), late }
    }

    /// Whether this call is one of the few that go wrong.
    fn is_due(&self) -> bool {
        self.calls.fetch_add(1, Ordering::Relaxed) % 40 == 39
    }

    /// Keeps the blocks of a call aside until the next one.
    fn put_late(&self, blocks: Vec<NewBlock>) -> Vec<Stored> {
        let mut late = self.late.lock().unwrap();
        late.clear();
        let count = blocks.len();
        for mut block in blocks {
            late.insert(block.key, block.space.bytes_mut().to_vec());
        }
        (0..count).map(|_| Stored::Yes).collect()
    }

    fn hit(&self, key: &BlockKey, held: &Held, first: &BlockKey) -> Vec<u8> {
        let mut bytes = held.bytes().to_vec();
        match self.fault {
            Fault::FlipsABit if key.as_bytes()[0].is_multiple_of(50) => bytes[5000] ^= 1,
            Fault::CutsTheEndOfBlocks if key.as_bytes()[0].is_multiple_of(50) => {
                bytes.truncate(bytes.len() - 1);
            }
            Fault::GivesAnotherBlock => {
                if let Some(Read::Hit { held, .. }) = self.map.read(&[*first]).pop() {
                    bytes = held.bytes().to_vec();
                }
            }
            Fault::GivesStaleBytes if key.as_bytes()[0].is_multiple_of(50) => bytes.fill(0),
            _ => {}
        }
        bytes
    }
}

impl Backend for Dishonest {
    fn reserve(&self, bytes: usize) -> Result<Space, String> {
        if self.fault == Fault::HasNoMemory && self.is_due() {
            return Err("no memory within the deadline".to_owned());
        }
        self.map.reserve(bytes)
    }

    fn put(&self, mut blocks: Vec<NewBlock>) -> Vec<Stored> {
        match self.fault {
            Fault::FailsAllWrites => {
                blocks.iter().map(|_| Stored::No("No space left on device".to_owned())).collect()
            }
            Fault::FailsWrites if self.is_due() && blocks.len() > 1 => {
                let last = blocks.len() - 1;
                blocks.truncate(last);
                let mut outcomes = self.map.put(blocks);
                outcomes.push(Stored::No("an error of the device".to_owned()));
                outcomes
            }
            Fault::ReturnsBeforeTheDataIsThere => self.put_late(blocks),
            Fault::LosesTheLastBlocks => {
                // Each call loses its end.
                let lost = blocks.pop();
                let mut outcomes = self.map.put(blocks);
                outcomes.extend(lost.map(|_| Stored::Yes));
                outcomes
            }
            Fault::ForgetsOutcomes if self.is_due() => {
                let mut outcomes = self.map.put(blocks);
                outcomes.pop();
                outcomes
            }
            Fault::SaysThatAllIsPresent => {
                self.map.put(blocks).into_iter().map(|_| Stored::Present).collect()
            }
            _ => self.map.put(blocks),
        }
    }

    fn read(&self, keys: &[BlockKey]) -> Vec<Read> {
        if self.fault == Fault::FailsReads && self.is_due() {
            return keys
                .iter()
                .map(|_| Read::Failed("an error of the device".to_owned()))
                .collect();
        }
        let reads = self.map.read(keys).into_iter().zip(keys).map(|(read, key)| match read {
            _ if self.fault == Fault::AlwaysMisses => Read::Miss,
            Read::Hit { held, .. } => {
                let held = Held::Owned(self.hit(key, &held, &keys[0]));
                Read::Hit { held, tier: self.says_tier }
            }
            other => other,
        });
        reads.collect()
    }

    fn clear(&self) {
        self.map.clear();
    }
}

fn run_with(fault: Fault, phases: Phases) -> (Workload, RunOptions, RunOutcome) {
    let backend = Dishonest::new(fault, KvTier::Cpu);
    run_backend(&backend, phases)
}

fn run_backend(backend: &Dishonest, phases: Phases) -> (Workload, RunOptions, RunOutcome) {
    let (workload, options) = (Workload { phases, ..workload(Some(60)) }, options(4));
    let outcome = run(backend, &workload, &options, &Progress::default(), &SystemClock);
    (workload, options, outcome.unwrap())
}

/// The codes of a run with a DRAM tier, whose writes to a device are not in question.
fn codes(fault: Fault, phases: Phases) -> Vec<&'static str> {
    let (workload, options, outcome) = run_with(fault, phases);
    let tiers = sizes(0, 64 << 20);
    let proof = DeviceProof::DirectIo;
    let evidence = Evidence::of_store((&workload, &options), &tiers, &outcome, None, proof);
    let validity = Validity::of(&evidence);
    validity.reasons.iter().map(|reason| reason.code).collect()
}

#[test]
fn an_honest_store_is_valid_in_each_phase() {
    for phases in [Phases::Both, Phases::PrefillOnly, Phases::DecodeOnly] {
        assert_eq!(codes(Fault::None, phases), [""; 0], "{phases:?}");
    }
}

#[test]
fn each_dishonest_store_is_invalid_for_a_reason_that_fits() {
    for (fault, expected) in [
        (Fault::AlwaysMisses, "lost_blocks"),
        (Fault::FlipsABit, "wrong_bytes"),
        (Fault::CutsTheEndOfBlocks, "wrong_bytes"),
        (Fault::GivesAnotherBlock, "wrong_bytes"),
        (Fault::ReturnsBeforeTheDataIsThere, "lost_blocks"),
        (Fault::GivesStaleBytes, "wrong_bytes"),
        (Fault::LosesTheLastBlocks, "lost_blocks"),
        (Fault::FailsReads, "failed"),
        (Fault::FailsWrites, "failed"),
        (Fault::HasNoMemory, "failed"),
        (Fault::ForgetsOutcomes, "failed"),
        (Fault::SaysThatAllIsPresent, "failed"),
    ] {
        let codes = codes(fault, Phases::Both);
        assert!(codes.contains(&expected), "{fault:?}: {codes:?}");
    }
    assert!(codes(Fault::AlwaysMisses, Phases::Both).contains(&"nothing_read"));
    assert!(codes(Fault::SaysThatAllIsPresent, Phases::Both).contains(&"nothing_written"));
}

/// No request reads the last blocks of a prefill alone: they are read again after the window.
#[test]
fn a_lost_tail_is_found_although_no_request_reads_it() {
    let (_, _, outcome) = run_with(Fault::None, Phases::PrefillOnly);
    assert_eq!((outcome.figures.audit.blocks, outcome.figures.audit.missing), (32, 0));
    let codes = |fault| codes(fault, Phases::PrefillOnly);
    assert!(codes(Fault::LosesTheLastBlocks).contains(&"lost_blocks"));
    assert!(codes(Fault::ReturnsBeforeTheDataIsThere).contains(&"lost_blocks"));
    assert!(codes(Fault::FlipsABit).contains(&"wrong_bytes"));
}

/// It would be valid, if it were not for the kernel: what the file tier gave came from memory.
#[test]
fn an_answer_from_memory_is_invalid_although_cold_was_asked() {
    let judge = |says_tier| {
        let backend = Dishonest::new(Fault::None, says_tier);
        let (workload, options, outcome) = run_backend(&backend, Phases::Both);
        let proof = DeviceProof::Kernel;
        let tiers = sizes(0, 0);
        let evidence = Evidence::of_store((&workload, &options), &tiers, &outcome, None, proof);
        let judged = Validity::of(&evidence);
        let unmeasured = Validity::of(&Evidence { process: None, ..evidence });
        (judged, unmeasured)
    };
    let codes = |it: &Validity| it.reasons.iter().map(|it| it.code).collect::<Vec<_>>();
    let (measured, unmeasured) = judge(KvTier::Storage);
    assert!(matches!(codes(&measured)[..], ["page_cache" | "device_unknown"]), "{measured:?}");
    assert_eq!(codes(&unmeasured), ["device_unknown"]);
    // It says DRAM, and the run has none.
    assert!(codes(&judge(KvTier::Cpu).0).contains(&"wrong_tier"));
}

#[test]
fn misses_of_a_store_without_room_are_no_lost_blocks() {
    let (workload, options, outcome) = run_with(Fault::LosesTheLastBlocks, Phases::Both);
    let tiers = cascade_kv_bench::store_backend::TierSizes {
        files_bytes: outcome.figures.written.bytes - outcome.figures.recomputed.bytes,
        ..sizes(0, 64 << 20)
    };
    assert!(outcome.figures.misses > 0);
    let proof = DeviceProof::DirectIo;
    let plan = (&workload, &options);
    assert!(Validity::of(&Evidence::of_store(plan, &tiers, &outcome, None, proof)).is_valid);
}

/// A full disk fails each write at once. The run would spin until the end of its window.
#[test]
fn a_store_that_only_fails_ends_the_run_early() {
    let plan = Workload { has_shared_prompts: false, ..workload(None) };
    let store = Dishonest::new(Fault::FailsAllWrites, KvTier::Cpu);
    let options = options(4);
    let outcome = run(&store, &plan, &options, &Progress::default(), &SystemClock).unwrap();
    let workload = plan;
    assert!(outcome.gave_up && !outcome.was_stopped);
    assert!(outcome.window.seconds() < options.duration.as_secs_f64());
    assert_eq!(outcome.figures.audit.blocks, 0);
    let failures = &outcome.figures.failures;
    assert!(failures.contains_key("No space left on device"), "{failures:?}");
    let tiers = sizes(0, 64 << 20);
    let proof = DeviceProof::DirectIo;
    let evidence = Evidence::of_store((&workload, &options), &tiers, &outcome, None, proof);
    let reasons = Validity::of(&evidence).reasons;
    assert!(reasons.iter().any(|reason| reason.code == "store_failed"), "{reasons:?}");
}
