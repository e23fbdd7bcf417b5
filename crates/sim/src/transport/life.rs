//! The life of a process of a world of the transport, from its start to its last checks.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use cascade_runtime::simulated::{Domain, Random, World};
use cascade_runtime::thread::JoinHandle;

use super::client::Caller;
use super::living::Living;
use super::process::Process;
use super::shared::Phase;

/// Streams of a world's seed. Those of processes and their clients follow.
const STREAMS: u64 = 1000;

/// Starts a process, and all that runs in it.
pub(super) fn start(living: &Arc<Living>, number: usize, incarnation: u64) -> JoinHandle<()> {
    let world = World::current().expect("the harness runs in the world");
    let living = Arc::clone(living);
    let name = format!("process {number}");
    world.spawn_in(domain(number), &name, move || live(&living, number, incarnation))
}

/// The threads of a process.
pub(super) fn domain(number: usize) -> Domain {
    Domain(u8::try_from(number + 1).expect("a world has few processes"))
}

fn live(living: &Arc<Living>, number: usize, incarnation: u64) {
    let shared = &living.shared;
    let stream = STREAMS * (1 + incarnation) + 100 * number as u64;
    let process = Arc::new(Process::new(shared, number, &mut Random::new(shared.seed, stream)));
    process.listen(shared);
    living.add(&process);
    let world = World::current().expect("a process runs in the world");
    let spawn =
        |name: String, body: Box<dyn FnOnce() + Send>| world.spawn_in(domain(number), &name, body);
    let reader = {
        let (shared, process) = (Arc::clone(shared), Arc::clone(&process));
        spawn(format!("notices {number}"), Box::new(move || process.read_notices(&shared)))
    };
    living.wait_for_start();
    let clients: Vec<_> = (0..shared.profile.clients)
        .map(|client| {
            let random = Random::new(shared.seed, stream + 1 + client as u64);
            let client = Caller::new(living, &process, client, random);
            spawn(format!("client {number}/{}", client.number()), Box::new(move || client.run()))
        })
        .collect();
    for client in clients {
        // The report has a panic.
        drop(client.join());
    }
    process.close_links();
    process.is_done.store(true, Ordering::Relaxed);
    shared.wait_for(Phase::Closing);
    process.close(shared);
    drop(reader.join());
}
