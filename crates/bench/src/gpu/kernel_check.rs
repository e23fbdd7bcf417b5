//! Whether the kernel copies the right bytes on this GPU: fragments of every alignment and many
//! lengths, and the bytes between them, which have to stay as they were.

use std::ops::Range;
use std::sync::Arc;

use cascade_device::{Copier, Direction, Fragment, Slabs, Transfer, Way as DeviceWay};
use cascade_memory::HostSlab;

use super::memory::{ABSENT, Pinned, Plain};
use super::rows::{Way, name_of_call};
use super::work::{Work, timed_work};
use super::{Gpu, Notes, copies, failed, hbm};
use crate::{Bench, Figure, MeasureError, Target, keys};

/// Bytes on each side. A case on the host fits into one slice of staged copies.
const AREA: usize = 8 << 20;
const CASE_BYTES: usize = 3 << 20;
/// Fragments of a case, which is one launch.
const CASE_FRAGMENTS: usize = 2000;
/// The kernel copies units of at most 16 bytes, so these are all alignments.
const ALIGNMENTS: usize = 16;
/// A warp copies many rounds of these.
const LONG: [usize; 4] = [4097, 8191, 16_384, 65_537];
/// Byte by byte, a warp may take tens of milliseconds for these: not at all pairs of alignments.
const LONGEST: [usize; 2] = [262_157, 1_048_581];

/// Why nothing else is measured with a kernel that failed.
const WRONG: &str = "the kernel copies wrong bytes, see kernel-check";

const WAYS: [(Way, DeviceWay); 2] =
    [(Way::Mapped, DeviceWay::Mapped), (Way::Staged, DeviceWay::Staged)];
const DIRECTIONS: [(Direction, &str); 2] =
    [(Direction::ToDevice, "to-device"), (Direction::ToHost, "to-host")];

/// Fragments between a slab and the device's memory.
struct Case {
    fragments: Vec<Fragment>,
    /// Where each side ends.
    host_bytes: usize,
    device_bytes: usize,
}

/// Checks all ways that use the kernel. A wrong byte is a failure, and no reason to stop.
pub(super) fn run(gpu: &Gpu, bench: &mut Bench<'_>, notes: &mut Notes) -> Result<(), MeasureError> {
    let name = |direction: &str, way: Way| format!("kernel-check/{direction}/{}", way.name());
    let is_wanted =
        DIRECTIONS.iter().any(|it| WAYS.iter().any(|way| bench.wants(&name(it.1, way.0))));
    let is_used = copies::wants_kernel(gpu, bench) || hbm::wants_kernel(gpu, bench);
    if notes.no_kernel.is_some() || !is_wanted && !is_used {
        return Ok(());
    }
    let mut plain = Plain::new(&gpu.context, AREA)?;
    let pinned = Pinned::new(&gpu.context, 2 * AREA + (4 << 20))?;
    let contents = pinned.full_slab(AREA, &keys("gpu kernel", 1)[0])?;
    let mut right = 0;
    for (way, device_way) in WAYS {
        let copier = match pinned.copier_by(&gpu.context, device_way, None) {
            Ok(copier) => copier,
            Err(error) => {
                let reason = gpu.reason(error)?;
                for (_, direction) in DIRECTIONS {
                    notes.leave_out(&name(direction, way), &reason);
                }
                continue;
            }
        };
        for (direction, text) in DIRECTIONS {
            let check = Check { way, direction, copier: &copier, contents: &contents };
            match check.all(gpu.is_fake(), &pinned, &mut plain)? {
                Ok(count) => {
                    let samples = vec![count as f64];
                    let limit = (Vec::new(), "");
                    let name = name(text, way);
                    let figure = Figure::rate(name, "right", samples, limit, Target::None);
                    gpu.deliver(bench, figure)?;
                    right += count;
                }
                Err(difference) => {
                    notes.no_kernel = Some(WRONG);
                    notes.failures.push(format!("{}: {difference}", name(text, way)));
                }
            }
        }
    }
    if right > 0 && notes.no_kernel.is_none() {
        let fake = if gpu.is_fake() { " (FAKE driver: not the kernel of a GPU)" } else { "" };
        notes.findings.push(format!("the kernel's results are right: {right} fragments{fake}"));
    }
    Ok(())
}

/// A way and a direction.
struct Check<'a> {
    way: Way,
    direction: Direction,
    copier: &'a Copier,
    /// The bytes that fragments to the device have.
    contents: &'a HostSlab,
}

impl Check<'_> {
    /// Checks every pair of alignments. The number of fragments, or the first difference.
    fn all(
        &self,
        is_fake: bool,
        pinned: &Pinned,
        plain: &mut Plain,
    ) -> Result<Result<usize, String>, MeasureError> {
        // A fake kernel is no kernel of a GPU: a few cases show that this check works.
        let (step, pairs) = if is_fake { (97, 5) } else { (1, 1) };
        let mut count = 0;
        for pair in (0..ALIGNMENTS * ALIGNMENTS).step_by(pairs) {
            let (device, host) = (pair / ALIGNMENTS, pair % ALIGNMENTS);
            let longest = if host == 0 { &LONGEST[..] } else { &[] };
            let long = LONG.iter().chain(longest).copied();
            let lengths = (1..=4096).step_by(step).chain(long).collect();
            for case in cases((device, host), shuffled(lengths, pair as u64)) {
                count += case.fragments.len();
                if let Err(difference) = self.one(&case, pinned, plain)? {
                    return Ok(Err(difference));
                }
            }
        }
        Ok(Ok(count))
    }

    /// Copies a case by the kernel, and compares both sides with what direct copies say.
    fn one(
        &self,
        case: &Case,
        pinned: &Pinned,
        plain: &mut Plain,
    ) -> Result<Result<(), String>, MeasureError> {
        plain.fill_device(case.device_bytes)?;
        plain.forget(case.device_bytes);
        let slabs = match self.direction {
            Direction::ToDevice => Slabs::ToDevice(vec![self.contents.clone()]),
            Direction::ToHost => {
                let mut slab = pinned.slab(AREA)?;
                slab[..case.host_bytes].fill(ABSENT);
                Slabs::ToHost(vec![slab])
            }
        };
        let (memory, fragments) = (vec![Arc::clone(&plain.foreign)], case.fragments.clone());
        let work = Work::Transfer(Transfer { slabs, memory: memory.clone(), fragments });
        let (plan, slabs) = work.planned(self.copier).map_err(failed)?;
        if plan.calls.iter().any(|call| name_of_call(call) != Some(self.way.name())) {
            return Ok(Err(format!("not all fragments were copied {}", self.way.name())));
        }
        let work = Work::Transfer(Transfer { slabs, memory, fragments: case.fragments.clone() });
        let (_, slabs) = timed_work(vec![(self.copier, work)])?;
        plain.read_device(case.device_bytes)?;
        let device = &plain.found()[..case.device_bytes];
        let known = &plain.known()[..case.device_bytes];
        Ok(compare(case, &slabs, device, known, self.contents))
    }
}

/// Compares the targets of a case. `device` is what its memory has, `known` what it had before.
fn compare(
    case: &Case,
    slabs: &[Slabs],
    device: &[u8],
    known: &[u8],
    contents: &[u8],
) -> Result<(), String> {
    let [Slabs::ToHost(slabs)] = slabs else {
        let of = |it: &Fragment| (device_range(it), host_range(it));
        return difference(device, known.to_vec(), contents, of, case);
    };
    let host = slabs.first().map(|slab| &slab[..case.host_bytes]).unwrap_or_default();
    let of = |it: &Fragment| (host_range(it), device_range(it));
    difference(host, vec![ABSENT; case.host_bytes], known, of, case)?;
    difference_of_sources(device, known)
}

fn host_range(fragment: &Fragment) -> Range<usize> {
    fragment.slab_offset..fragment.slab_offset + fragment.bytes
}

fn device_range(fragment: &Fragment) -> Range<usize> {
    fragment.memory_offset..fragment.memory_offset + fragment.bytes
}

/// Compares the targets of a case, and what is between them, with what they should be: `expected`
/// is what they were before.
fn difference(
    found: &[u8],
    mut expected: Vec<u8>,
    sources: &[u8],
    ranges: impl Fn(&Fragment) -> (Range<usize>, Range<usize>),
    case: &Case,
) -> Result<(), String> {
    for fragment in &case.fragments {
        let (target, source) = ranges(fragment);
        expected[target].copy_from_slice(&sources[source]);
    }
    if found == expected {
        return Ok(());
    }
    let at = found.iter().zip(&expected).position(|(found, expected)| found != expected);
    let at = at.unwrap_or(found.len().min(expected.len()));
    let bytes = format!("{:?}, not {:?}", found.get(at), expected.get(at));
    let fragment = case.fragments.iter().find(|it| ranges(it).0.contains(&at));
    let Some(fragment) = fragment else {
        return Err(format!("WRONG BYTES: byte {at}, which is in no fragment, is {bytes}"));
    };
    let (length, offset) = (fragment.bytes, at - ranges(fragment).0.start);
    let (host, device) = (fragment.slab_offset % ALIGNMENTS, fragment.memory_offset % ALIGNMENTS);
    Err(format!(
        "WRONG BYTES: byte {offset} of a fragment of {length} bytes is {bytes}; its place in host \
         memory is {host} modulo 16, that on the device {device}"
    ))
}

/// Whether a kernel that reads the device's memory left it as it was.
fn difference_of_sources(found: &[u8], known: &[u8]) -> Result<(), String> {
    if found == known { Ok(()) } else { Err("WRONG BYTES: a source was written".to_owned()) }
}

/// Cases with fragments of these lengths, whose places have these values modulo 16 on the device
/// and on the host. Fragments follow each other on the host without gaps, so that they are staged
/// together: short ones in between, which are checked, too, set the alignment of the next. On the
/// device there are gaps, which have to stay as they are.
fn cases((device, host): (usize, usize), lengths: Vec<usize>) -> Vec<Case> {
    let mut cases = Vec::new();
    let empty = || Case { fragments: Vec::new(), host_bytes: 0, device_bytes: 0 };
    let mut case = empty();
    for length in lengths {
        let is_full = case.host_bytes + length + ALIGNMENTS > CASE_BYTES
            || case.fragments.len() + 2 > CASE_FRAGMENTS;
        if is_full {
            cases.push(std::mem::replace(&mut case, empty()));
        }
        let filler = (host + ALIGNMENTS - case.host_bytes % ALIGNMENTS) % ALIGNMENTS;
        let next = case.device_bytes + 1;
        case.add(next, filler);
        let next = case.device_bytes + 1;
        let aligned = next + (device + ALIGNMENTS - next % ALIGNMENTS) % ALIGNMENTS;
        case.add(aligned, length);
    }
    cases.push(case);
    cases
}

impl Case {
    fn add(&mut self, memory_offset: usize, bytes: usize) {
        if bytes == 0 {
            return;
        }
        let slab_offset = self.host_bytes;
        self.fragments.push(Fragment { slab: 0, slab_offset, memory: 0, memory_offset, bytes });
        self.host_bytes += bytes;
        self.device_bytes = memory_offset + bytes;
    }
}

/// Another order, which is the same in each run.
fn shuffled(mut lengths: Vec<usize>, seed: u64) -> Vec<usize> {
    let mut state = seed;
    for at in (1..lengths.len()).rev() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
        let other = usize::try_from(state >> 33).unwrap_or_default() % (at + 1);
        lengths.swap(at, other);
    }
    lengths
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases_have_every_length_at_its_alignments_and_gaps_on_the_device() {
        let lengths: Vec<usize> = (1..=4096).chain(LONG).chain(LONGEST).collect();
        for (device, host) in [(0, 0), (3, 0), (0, 7), (15, 1)] {
            let cases = cases((device, host), shuffled(lengths.clone(), 5));
            let mut aligned = Vec::new();
            for case in &cases {
                assert!(case.fragments.len() <= CASE_FRAGMENTS && case.host_bytes <= CASE_BYTES);
                assert!(case.device_bytes <= AREA);
                for pair in case.fragments.windows(2) {
                    assert_eq!(host_range(&pair[0]).end, pair[1].slab_offset);
                    assert!(device_range(&pair[0]).end < pair[1].memory_offset);
                }
                let is_aligned =
                    |it: &&Fragment| it.slab_offset % 16 == host && it.memory_offset % 16 == device;
                aligned.extend(case.fragments.iter().filter(is_aligned).map(|it| it.bytes));
            }
            aligned.sort_unstable();
            aligned.dedup();
            let missing = lengths.iter().find(|it| aligned.binary_search(it).is_err());
            assert_eq!(missing, None, "{device} {host}");
        }
    }

    #[test]
    fn a_wrong_byte_in_or_between_fragments_is_found() {
        let case = cases((1, 0), vec![3, 5]).remove(0);
        let sources: Vec<u8> = (1..=32).collect();
        let before = || vec![0; case.device_bytes];
        let compare = |found: &[u8]| {
            let of = |it: &Fragment| (device_range(it), host_range(it));
            difference(found, before(), &sources, of, &case)
        };
        let mut found = before();
        for it in &case.fragments {
            found[device_range(it)].copy_from_slice(&sources[host_range(it)]);
        }
        assert_eq!(compare(&found), Ok(()));
        found[2] ^= 1;
        let message = compare(&found).expect_err("it differs");
        assert!(message.contains("byte 1 of a fragment of 3 bytes is Some(3), not Some(2)"));
        found[2] ^= 1;
        found[0] = 9;
        let message = compare(&found).expect_err("it differs");
        assert!(message.contains("byte 0, which is in no fragment, is Some(9)"), "{message}");
    }
}
