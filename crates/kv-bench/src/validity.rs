//! Whether the figures of a run can be trusted, and if not, why.

use cascade_replay::kernel_io::KernelIo;
use serde::Serialize;

use crate::backend::KvTier;
use crate::plan::{Phases, Workload};
use crate::run::{RunOptions, RunOutcome};
use crate::store_backend::TierSizes;

/// Share of the file tier's bytes that have to come from a device.
const DEVICE_SHARE_MIN: f64 = 0.9;

/// A file tier that is filled to one part in this many has room: it drops blocks to make some only
/// when it is fuller.
const ROOM_SHARE: u64 = 2;

/// Whether a run is valid.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Validity {
    /// Whether nothing speaks against it.
    pub is_valid: bool,
    /// What does.
    pub reasons: Vec<Reason>,
}

/// Why a run is not valid.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Reason {
    /// A name that programs can compare.
    pub code: &'static str,
    /// What happened.
    pub text: String,
}

/// What is known of a run.
#[derive(Debug, Clone, Copy)]
pub struct Evidence<'a> {
    /// Whether bytes were compared.
    pub verifies: bool,
    /// What the requests did: read, write, or both.
    pub phases: Phases,
    /// Blocks with wrong bytes.
    pub wrong_blocks: u64,
    /// Operations that failed.
    pub failed: u64,
    /// Whether the run ended early, because the store did not work any more.
    pub gave_up: bool,
    /// Bytes that were written, to whichever tier.
    pub written_bytes: u64,
    /// Blocks that were stored and not found, although there was room for all.
    pub lost_blocks: u64,
    /// Bytes that are said to come from a tier that the run does not have, and its name.
    pub from_no_tier: Option<(&'static str, u64)>,
    /// Says that the build was not optimised, if so.
    pub build_warning: Option<&'a str>,
    /// Bytes that were read.
    pub read_bytes: u64,
    /// Bytes that the file tier gave.
    pub storage_read_bytes: u64,
    /// Bytes that the file tier took.
    pub storage_written_bytes: u64,
    /// What the kernel counted for this process. `None` if it does not tell.
    pub process: Option<KernelIo>,
    /// How it is known what came from a device.
    pub proof: DeviceProof,
}

impl<'a> Evidence<'a> {
    /// What is known of a run on Cascade's store.
    pub fn of_store(
        (workload, options): (&Workload, &RunOptions),
        sizes: &TierSizes,
        outcome: &RunOutcome,
        build_warning: Option<&'a str>,
        proof: DeviceProof,
    ) -> Self {
        let figures = &outcome.figures;
        let has = [sizes.gpu_bytes > 0, sizes.cpu_bytes > 0, true];
        let missing_tier = KvTier::ALL.into_iter().find_map(|tier| {
            let bytes = figures.read[tier.index()].bytes;
            (bytes > 0 && !has[tier.index()]).then_some((tier.name(), bytes))
        });
        Self {
            verifies: options.verifies,
            phases: workload.phases,
            wrong_blocks: figures.wrong_blocks,
            failed: figures.failures.values().sum(),
            gave_up: outcome.gave_up,
            build_warning,
            read_bytes: figures.read_total().bytes,
            written_bytes: figures.written.bytes,
            lost_blocks: lost_blocks(workload, sizes, outcome),
            from_no_tier: missing_tier,
            storage_read_bytes: figures.read[KvTier::Storage.index()].bytes,
            storage_written_bytes: figures.written.bytes,
            process: outcome.kernel.process,
            proof,
        }
    }
}

/// Blocks that were not found, if the store had no reason to drop any.
fn lost_blocks(workload: &Workload, sizes: &TierSizes, outcome: &RunOutcome) -> u64 {
    let figures = &outcome.figures;
    let before = outcome.blocks_before * workload.model.block_bytes as u64;
    let stored = before + figures.written.bytes.saturating_sub(figures.recomputed.bytes);
    // A block that failed to be stored is rightly missed.
    let may_miss = stored > sizes.files_bytes / ROOM_SHARE || !figures.failures.is_empty();
    if may_miss { 0 } else { figures.misses + figures.audit.missing }
}

/// How it is known that the bytes of the file tier went to and came from a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceProof {
    /// The kernel counts them.
    Kernel,
    /// It does not, as they go over a network, and the page cache is bypassed.
    DirectIo,
    /// It does not, and the page cache is used.
    Missing,
}

/// Types of file systems whose bytes come over a network or from user space.
const WITHOUT_DEVICE: [&str; 13] = [
    "9p", "afs", "beegfs", "ceph", "cifs", "fuse", "gpfs", "lustre", "nfs", "nfs4", "smb3",
    "virtiofs", "wekafs",
];

impl DeviceProof {
    /// The proof on a file system of this type.
    pub fn on(file_system: &str, has_direct_io: bool) -> Self {
        let kind = file_system.split('.').next().unwrap_or(file_system);
        match (WITHOUT_DEVICE.contains(&kind), has_direct_io) {
            (false, _) => Self::Kernel,
            (true, true) => Self::DirectIo,
            (true, false) => Self::Missing,
        }
    }
}

impl Validity {
    /// The code of an unoptimised build.
    pub const UNOPTIMISED: &'static str = "unoptimised";

    /// Judges the evidence.
    pub fn of(evidence: &Evidence<'_>) -> Self {
        let mut reasons = Vec::new();
        judge_operations(evidence, &mut reasons);
        judge_device(evidence, &mut reasons);
        Self { is_valid: reasons.is_empty(), reasons }
    }

    /// A run that logged its operations and did none of them is no measurement.
    pub fn of_log() -> Self {
        let text = "nothing was stored and nothing was read: operations were only logged";
        let reason = Reason { code: "nothing_stored", text: text.to_owned() };
        Self { is_valid: false, reasons: vec![reason] }
    }

    /// Whether an unoptimised build is all that speaks against the run.
    pub fn is_only_unoptimised(&self) -> bool {
        self.reasons.iter().all(|reason| reason.code == Self::UNOPTIMISED)
    }
}

/// What the operations say.
fn judge_operations(evidence: &Evidence<'_>, reasons: &mut Vec<Reason>) {
    let mut add = |is_true: bool, code, text: String| {
        if is_true {
            reasons.push(Reason { code, text });
        }
    };
    let Evidence { wrong_blocks, failed, lost_blocks, .. } = *evidence;
    add(
        wrong_blocks > 0,
        "wrong_bytes",
        format!("{wrong_blocks} blocks had other bytes than were written"),
    );
    add(
        lost_blocks > 0,
        "lost_blocks",
        format!(
            "{lost_blocks} blocks that were stored were not found, although the file tier had \
             room for all: the figures are of a store that loses blocks"
        ),
    );
    add(
        failed > 0,
        "failed",
        format!("{failed} operations failed; the figures lack what they would move"),
    );
    add(
        evidence.gave_up,
        "store_failed",
        "the run ended early: every operation failed at last".to_owned(),
    );
    add(
        !evidence.verifies,
        "unverified",
        "bytes were not compared with what was written".to_owned(),
    );
    if let Some(warning) = evidence.build_warning {
        add(true, Validity::UNOPTIMISED, warning.to_owned());
    }
    let has_no_reads = evidence.read_bytes == 0 && evidence.phases != Phases::PrefillOnly;
    add(has_no_reads, "nothing_read", "nothing was read from the store".to_owned());
    let has_no_writes = evidence.written_bytes == 0 && evidence.phases != Phases::DecodeOnly;
    add(has_no_writes, "nothing_written", "nothing was written to the store".to_owned());
    if let Some((tier, bytes)) = evidence.from_no_tier {
        let text = format!("{bytes} bytes came from tier {tier:?}, which this run does not have");
        add(true, "wrong_tier", text);
    }
}

/// What the kernel says of the file tier.
fn judge_device(evidence: &Evidence<'_>, reasons: &mut Vec<Reason>) {
    let mut add = |code, text: String| reasons.push(Reason { code, text });
    let read = evidence.storage_read_bytes;
    let written = evidence.storage_written_bytes;
    if evidence.proof == DeviceProof::Missing && read > 0 {
        add(
            "page_cache",
            "no direct I/O was used, and the kernel does not tell what came from the page cache"
                .to_owned(),
        );
    }
    if evidence.proof != DeviceProof::Kernel {
        return;
    }
    let is_less = |io: u64, bytes: u64| (io as f64) < bytes as f64 * DEVICE_SHARE_MIN;
    match evidence.process {
        None if read + written > 0 => add(
            "device_unknown",
            "the kernel does not tell what went to and came from a device, so that the page \
             cache cannot be excluded"
                .to_owned(),
        ),
        Some(io) if is_less(io.read_bytes, read) || is_less(io.written_bytes, written) => add(
            "page_cache",
            format!(
                "the file tier gave {read} bytes, of which {} came from a device, and took \
                 {written}, of which {} went to one: the rest was in memory",
                io.read_bytes, io.written_bytes
            ),
        ),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: Evidence<'_> = Evidence {
        verifies: true,
        phases: Phases::Both,
        wrong_blocks: 0,
        failed: 0,
        gave_up: false,
        written_bytes: 500,
        lost_blocks: 0,
        from_no_tier: None,
        build_warning: None,
        read_bytes: 2000,
        storage_read_bytes: 1000,
        storage_written_bytes: 500,
        process: Some(KernelIo { read_bytes: 1000, written_bytes: 500 }),
        proof: DeviceProof::Kernel,
    };

    fn codes(evidence: &Evidence<'_>) -> Vec<&'static str> {
        let validity = Validity::of(evidence);
        assert_eq!(validity.is_valid, validity.reasons.is_empty());
        validity.reasons.iter().map(|reason| reason.code).collect()
    }

    #[test]
    fn file_systems_of_a_network_have_no_device() {
        for (kind, has_direct_io, proof) in [
            ("ext4", true, DeviceProof::Kernel),
            ("tmpfs", false, DeviceProof::Kernel),
            ("lustre", true, DeviceProof::DirectIo),
            ("fuse.x", false, DeviceProof::Missing),
        ] {
            assert_eq!(DeviceProof::on(kind, has_direct_io), proof, "{kind}");
        }
    }

    #[test]
    fn each_reason_makes_a_run_invalid() {
        assert!(codes(&GOOD).is_empty());
        assert_eq!(codes(&Evidence { wrong_blocks: 1, ..GOOD }), ["wrong_bytes"]);
        assert_eq!(codes(&Evidence { failed: 1, ..GOOD }), ["failed"]);
        assert_eq!(codes(&Evidence { verifies: false, ..GOOD }), ["unverified"]);
        assert_eq!(codes(&Evidence { build_warning: Some("slow"), ..GOOD }), ["unoptimised"]);
        let nothing = Evidence { read_bytes: 0, storage_read_bytes: 0, ..GOOD };
        assert_eq!(codes(&nothing), ["nothing_read"]);
        assert!(
            codes(&Evidence { phases: Phases::PrefillOnly, ..nothing }).is_empty(),
            "prefill alone"
        );
        assert_eq!(codes(&Evidence { lost_blocks: 1, ..GOOD }), ["lost_blocks"]);
        assert_eq!(
            codes(&Evidence { failed: 1, gave_up: true, ..GOOD }),
            ["failed", "store_failed"]
        );
        let unwritten = Evidence { written_bytes: 0, storage_written_bytes: 0, ..GOOD };
        assert_eq!(codes(&unwritten), ["nothing_written"]);
        assert!(
            codes(&Evidence { phases: Phases::DecodeOnly, ..unwritten }).is_empty(),
            "decode alone"
        );
        let from_no_tier = Some(("cpu", 7));
        assert_eq!(codes(&Evidence { from_no_tier, ..GOOD }), ["wrong_tier"]);
        let cached = Some(KernelIo { read_bytes: 899, written_bytes: 500 });
        assert_eq!(codes(&Evidence { process: cached, ..GOOD }), ["page_cache"]);
        let cached = Some(KernelIo { read_bytes: 1000, written_bytes: 0 });
        assert_eq!(codes(&Evidence { process: cached, ..GOOD }), ["page_cache"]);
        assert_eq!(codes(&Evidence { process: None, ..GOOD }), ["device_unknown"]);
        let remote = Evidence { proof: DeviceProof::DirectIo, process: None, ..GOOD };
        assert!(codes(&remote).is_empty());
        let cached = Evidence { proof: DeviceProof::Missing, ..remote };
        assert_eq!(codes(&cached), ["page_cache"]);
        let from_memory =
            Evidence { storage_read_bytes: 0, storage_written_bytes: 0, process: None, ..GOOD };
        assert!(codes(&from_memory).is_empty(), "DRAM alone gave everything");
    }
}
