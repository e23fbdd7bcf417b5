//! Streams: a thread each, which does the work of its queue in order.
#![expect(unsafe_code, reason = "calls functions of the host")]

use std::ffi::c_void;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use cascade_runtime::{Clock, MutexGuard, SystemClock, sleep, thread, yield_now};

use crate::device_memory::{copy, fill};
use crate::state::{
    ILLEGAL_ADDRESS, INVALID_HANDLE, Item, Launch, Place, State, Stream, Transfer, Work,
};
use crate::wake::{announce, has_due_work};
use crate::world::{Status, World};

/// The byte that is wrong in spoiled fragments.
const SPOILED: u8 = 0xA5;

/// A new stream, with its thread.
pub(crate) fn create(state: &mut State) -> usize {
    let handle = state.new_handle();
    state.streams.insert(handle, Stream::default());
    drop(thread::spawn(move || run(handle)));
    handle
}

/// Adds work to a stream.
pub(crate) fn submit(
    state: &mut State,
    stream: usize,
    name: &'static str,
    work: Work,
) -> Result<(), Status> {
    let queue = state.streams.get_mut(&stream).filter(|stream| !stream.is_destroyed);
    let queue = &mut queue.ok_or(INVALID_HANDLE)?.queue;
    let transfers = match &work {
        Work::Transfers(transfers) => transfers.clone(),
        Work::Kernel(launch) => launch.uses(),
        _ => vec![],
    };
    queue.push_back(Item { name, work });
    for transfer in &transfers {
        state.use_memory(transfer, true);
    }
    Ok(())
}

/// Waits for a condition of the state.
pub(crate) fn wait_until<'a>(
    mut state: MutexGuard<'a, State>,
    world: &World,
    holds: impl Fn(&State) -> bool,
) -> MutexGuard<'a, State> {
    while state.death.is_none() && !holds(&state) {
        state = world.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
    }
    state
}

fn run(handle: usize) {
    let world = World::get();
    let mut state = world.lock();
    let Some(wake) = state.streams.get(&handle).map(|stream| Arc::clone(&stream.wake)) else {
        return;
    };
    while let Some(stream) = state.streams.get(&handle) {
        if stream.is_destroyed && stream.queue.is_empty() {
            state.streams.remove(&handle);
            break;
        }
        if !has_due_work(&state, stream) {
            state = wake.wait(state).unwrap_or_else(PoisonError::into_inner);
            continue;
        }
        let Some(stream) = state.streams.get_mut(&handle) else { break };
        let Some(item) = stream.queue.pop_front() else { continue };
        stream.is_running = true;
        drop(state);
        perform(world, item);
        state = world.lock();
        if let Some(stream) = state.streams.get_mut(&handle) {
            stream.is_running = false;
        }
        announce(&state, &world.changed);
    }
}

fn perform(world: &World, item: Item) {
    match item.work {
        Work::Transfers(transfers) => drop(move_all(world, item.name, transfers)),
        Work::Kernel(launch) => run_kernel(world, item.name, &launch),
        Work::Record { event, count } => {
            if let Some(event) = world.lock().events.get_mut(&event) {
                event.reached = event.reached.max(count);
                event.time = event.is_timed.then(|| SystemClock.monotonic());
            }
        }
        Work::Wait { .. } => {}
        Work::Call { function, argument } => {
            let argument = std::ptr::with_exposed_provenance_mut::<c_void>(argument);
            let function = std::ptr::with_exposed_provenance::<c_void>(function);
            // SAFETY: the address of a function that `cuLaunchHostFunc` got with this type.
            let function = unsafe {
                std::mem::transmute::<*const c_void, unsafe extern "C" fn(*mut c_void)>(function)
            };
            // SAFETY: the caller gave the argument for this function.
            unsafe { function(argument) };
        }
    }
}

/// Moves bytes in any order, of memory that counts as used. Returns false if the context is dead.
fn move_all(world: &World, name: &'static str, mut transfers: Vec<Transfer>) -> bool {
    let delay = Duration::from_micros(world.settings.delay_us(name));
    shuffle(&mut transfers, world.settings.seed);
    transfers.iter().all(|transfer| {
        let moved = move_bytes(world, transfer, delay);
        if moved {
            world.lock().use_memory(transfer, false);
        }
        moved
    })
}

/// Runs a kernel. Memory that is not there kills the context.
fn run_kernel(world: &World, name: &'static str, launch: &Launch) {
    let mut state = world.lock();
    let Ok(transfers) = launch.transfers(&state) else {
        state.death = Some(ILLEGAL_ADDRESS);
        return;
    };
    for transfer in &transfers {
        state.use_memory(transfer, true);
    }
    drop(state);
    let is_spoiled = |it: &&Transfer| Some(it.bytes) == world.settings.spoiled_length;
    let spoiled: Vec<Place> = transfers.iter().filter(is_spoiled).map(|it| it.target).collect();
    if move_all(world, name, transfers) {
        for target in spoiled {
            fill(target.start, SPOILED, 1);
        }
        let mut state = world.lock();
        for used in launch.uses() {
            state.use_memory(&used, false);
        }
    }
}

/// Moves bytes in two halves, with the delay in between. Returns false if the context is dead.
fn move_bytes(world: &World, transfer: &Transfer, delay: Duration) -> bool {
    let mut state = world.lock();
    state.copy_count += 1;
    if world.settings.die_at_copy == Some(state.copy_count) {
        state.death = Some(ILLEGAL_ADDRESS);
    }
    if state.death.is_some() {
        return false;
    }
    drop(state);
    let half = transfer.bytes / 2;
    for (first, last) in [(0, half), (half, transfer.bytes)] {
        let (target, bytes) = (transfer.target.start + first, last - first);
        match transfer.source {
            Ok(source) => copy(target, source.start + first, bytes),
            Err(byte) => fill(target, byte, bytes),
        }
        if first == 0 && !delay.is_zero() {
            sleep(delay);
        }
    }
    yield_now();
    true
}

/// Another order of the copies of a batch, which have none.
fn shuffle(transfers: &mut [Transfer], seed: u64) {
    let mut random = seed;
    for at in (1..transfers.len()).rev() {
        random =
            random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let other = usize::try_from(random >> 33).unwrap_or_default() % (at + 1);
        transfers.swap(at, other);
    }
}
