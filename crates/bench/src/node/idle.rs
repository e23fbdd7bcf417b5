//! Idle clients: the memory that they cost, and whether they wake the node.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use cascade_wire::{Access, Answer, Call, Frame, Hello, VERSION, VERSION_MIN, frame_length};

use super::process::kernel_bytes;
use super::served::ServedNode;
use super::{MIB, NodeBench, sleep};
use crate::{Figure, MeasureError, Target};

/// Number of idle clients.
const CLIENTS: usize = 2000;
/// Duration of the idle period.
const IDLE_TIME: Duration = Duration::from_secs(10);
/// Target for the memory of all clients, in MiB.
const MEMORY_MIB_MAX: f64 = 50.0;
/// Limit of the size of a welcome message.
const WELCOME_BYTES_MAX: usize = 64 << 10;

pub(super) fn run(bench: &mut NodeBench<'_, '_>) -> Result<(), MeasureError> {
    let count = if bench.options.is_short { CLIENTS / 10 } else { CLIENTS };
    let memory = format!("idle/{count}-clients/memory");
    let kernel = format!("idle/{count}-clients/memory-kernel");
    let wakes = format!("idle/{count}-clients/wake-ups");
    if !bench.wants_any(&[memory.clone(), kernel.clone(), wakes.clone()]) {
        return Ok(());
    }
    let idle_time = if bench.options.is_short { IDLE_TIME / 10 } else { IDLE_TIME };
    let served = ServedNode::start(64 * MIB)?;
    // The first client causes allocations that all clients share; they do not count.
    let first = client(&served.socket())?;
    sleep(Duration::from_secs(1));
    let with_one = switches(&served, idle_time)?;
    let (before, kernel_before) = (served.stats()?, kernel_bytes()?);
    let clients: Result<Vec<UnixStream>, MeasureError> =
        (0..count).map(|_| client(&served.socket())).collect();
    let clients = clients?;
    sleep(Duration::from_secs(1));
    let (after, kernel_after) = (served.stats()?, kernel_bytes()?);
    let mib = |bytes: u64| bytes as f64 / MIB as f64;
    let own = mib(after.own_bytes.saturating_sub(before.own_bytes));
    let kernels = mib(kernel_after.saturating_sub(kernel_before));
    let text = format!(
        "none; with one client the node has {:.1} MiB and {} descriptors, with {} more {}",
        mib(before.own_bytes),
        before.descriptors,
        clients.len(),
        after.descriptors
    );
    let most = Target::AtMost(MEMORY_MIB_MAX);
    let both = vec![own + kernels];
    bench.deliver(Figure::cost(memory, "MiB", both, (Vec::new(), &text), most))?;
    let text = "none; unreclaimable slabs, kernel stacks and page tables of the whole machine, \
                including other programs and both ends of each socket";
    bench.deliver(Figure::cost(kernel, "MiB", vec![kernels], (Vec::new(), text), Target::None))?;
    let switched = switches(&served, idle_time)?;
    let text = format!(
        "none; context switches of all threads of the node in {} s; with one client {with_one}",
        idle_time.as_secs_f64()
    );
    let none = Target::AtMost(0.0);
    bench.deliver(Figure::cost(wakes, "times", vec![switched], (Vec::new(), &text), none))?;
    drop((first, clients));
    Ok(())
}

/// Context switches of the node's threads during an idle period.
fn switches(served: &ServedNode, idle_time: Duration) -> Result<f64, MeasureError> {
    let before = served.stats()?.switches;
    sleep(idle_time);
    Ok(served.stats()?.switches.saturating_sub(before) as f64)
}

/// A connection after its handshake, without a mapping or a thread in this process. The message's
/// descriptor of the pool is not received, so the kernel closes it.
fn client(socket: &Path) -> Result<UnixStream, MeasureError> {
    let failed = |error: std::io::Error| MeasureError::measure("an idle client", error);
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
    let invalid = |error: cascade_wire::WireError| MeasureError::measure("an idle client", error);
    hello.write(&mut bytes, 1, None).map_err(invalid)?;
    stream.write_all(&bytes).map_err(failed)?;
    bytes.resize(WELCOME_BYTES_MAX, 0);
    let mut filled = 0;
    loop {
        let count = stream.read(&mut bytes[filled..]).map_err(failed)?;
        filled += count;
        if count == 0 {
            return Err(MeasureError::measure("an idle client", "the node closed its connection"));
        }
        let Some(length) = frame_length(&bytes[..filled]).map_err(invalid)? else { continue };
        if filled >= length {
            break;
        }
    }
    let answer = Frame::read(&bytes[..filled]).and_then(|frame| Answer::read(&frame));
    match answer.map_err(invalid)? {
        Answer::Welcome(_) => Ok(stream),
        other => Err(MeasureError::measure("an idle client", format!("the node sent {other:?}"))),
    }
}
