//! Clients that are connected and say nothing: what they cost the node and whether they wake it.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use cascade_wire::{Access, Answer, Call, Frame, Hello, VERSION, VERSION_MIN, frame_length};

use super::process::kernel_bytes;
use super::served::Served;
use super::{MIB, NodeBench, rest};
use crate::cli::Failure;
use crate::measure::{Figure, Target};

/// Clients of the figure.
const CLIENTS: usize = 2000;
/// How long nothing happens.
const QUIET: Duration = Duration::from_secs(10);
/// What all of them may take, in MiB.
const MEMORY_MIB_MAX: f64 = 50.0;
/// Longest welcome that is expected.
const WELCOME_BYTES_MAX: usize = 64 << 10;

pub(super) fn run(bench: &mut NodeBench<'_, '_>) -> Result<(), Failure> {
    let count = if bench.options.is_short { CLIENTS / 10 } else { CLIENTS };
    let memory = format!("idle/{count}-clients/memory");
    let kernel = format!("idle/{count}-clients/memory-kernel");
    let wakes = format!("idle/{count}-clients/wake-ups");
    if !bench.wants_any(&[memory.clone(), kernel.clone(), wakes.clone()]) {
        return Ok(());
    }
    let quiet = if bench.options.is_short { QUIET / 10 } else { QUIET };
    let served = Served::start(64 * MIB)?;
    // The first brings what every later one finds made.
    let first = client(&served.socket())?;
    rest(Duration::from_secs(1));
    let alone = switches(&served, quiet)?;
    let (before, kernel_before) = (served.facts()?, kernel_bytes()?);
    let clients: Result<Vec<UnixStream>, Failure> =
        (0..count).map(|_| client(&served.socket())).collect();
    let clients = clients?;
    rest(Duration::from_secs(1));
    let (after, kernel_after) = (served.facts()?, kernel_bytes()?);
    let mib = |bytes: u64| bytes as f64 / MIB as f64;
    let own = mib(after.own_bytes.saturating_sub(before.own_bytes));
    let kernels = mib(kernel_after.saturating_sub(kernel_before));
    let text = format!(
        "none; with one client it has {:.1} MiB and {} descriptors, with {} more {} descriptors",
        mib(before.own_bytes),
        before.descriptors,
        clients.len(),
        after.descriptors
    );
    let most = Target::AtMost(MEMORY_MIB_MAX);
    let both = vec![own + kernels];
    bench.deliver(Figure::cost(memory, "MiB", both, (Vec::new(), &text), most))?;
    let text = "none; unreclaimable slabs, kernel stacks and page tables of the whole machine: \
                what other programs do meanwhile is in it, and both ends of each socket";
    bench.deliver(Figure::cost(kernel, "MiB", vec![kernels], (Vec::new(), text), Target::None))?;
    let woken = switches(&served, quiet)?;
    let text = format!(
        "none; switches of all threads of the node in {} s; with one client there were {alone}",
        quiet.as_secs_f64()
    );
    let none = Target::AtMost(0.0);
    bench.deliver(Figure::cost(wakes, "times", vec![woken], (Vec::new(), &text), none))?;
    drop((first, clients));
    Ok(())
}

/// How often the node's threads are switched while nothing is asked of it.
fn switches(served: &Served, quiet: Duration) -> Result<f64, Failure> {
    let before = served.facts()?.switches;
    rest(quiet);
    Ok(served.facts()?.switches.saturating_sub(before) as f64)
}

/// A connection that said who it is, and that has no more: no mapping, no thread. The pool's
/// descriptor is not taken, so the kernel closes it.
fn client(socket: &Path) -> Result<UnixStream, Failure> {
    let failed = |error: std::io::Error| Failure::measure("an idle client", error);
    let mut stream = UnixStream::connect(socket).map_err(failed)?;
    stream.set_read_timeout(Some(Duration::from_secs(10))).map_err(failed)?;
    let hello = Call::Hello(Hello {
        version_min: VERSION_MIN,
        version_max: VERSION,
        access: Access::Read,
        session: None,
        token: None,
        name: "idle".to_owned(),
    });
    let mut bytes = Vec::new();
    let wrong = |error: cascade_wire::WireError| Failure::measure("an idle client", error);
    hello.write(&mut bytes, 1, None).map_err(wrong)?;
    stream.write_all(&bytes).map_err(failed)?;
    bytes.resize(WELCOME_BYTES_MAX, 0);
    let mut filled = 0;
    loop {
        let count = stream.read(&mut bytes[filled..]).map_err(failed)?;
        filled += count;
        if count == 0 {
            return Err(Failure::measure("an idle client", "the node closed its connection"));
        }
        let Some(length) = frame_length(&bytes[..filled]).map_err(wrong)? else { continue };
        if filled >= length {
            break;
        }
    }
    let answer = Frame::read(&bytes[..filled]).and_then(|frame| Answer::read(&frame));
    match answer.map_err(wrong)? {
        Answer::Welcome(_) => Ok(stream),
        other => Err(Failure::measure("an idle client", format!("the node answers {other:?}"))),
    }
}
