//! Planted bugs: the simulator finds each, and finds nothing in the same worlds without it.

use cascade_runtime::{Plant, SystemClock};
use cascade_sim::{Length, Progress, SimOptions, SimResult, WORLD_OPERATIONS, run};

/// Worlds in which a bug has to be found.
const WORLDS: u64 = 60;

fn world(number: u64, plant: Option<Plant>) -> SimResult {
    let options = SimOptions {
        seed: 3,
        length: Length::Operations(WORLDS * WORLD_OPERATIONS),
        world: Some(number),
        jobs: 1,
        twice: false,
        plant,
    };
    run(&options, &Progress::default(), &SystemClock)
}

/// Runs worlds until one has a violation with this text. That world has none without the bug.
fn finds(plant: Plant, text: &str) {
    let is_found = |result: &SimResult| result.listed.iter().any(|it| it.text.contains(text));
    let found = (0..WORLDS).find(|number| is_found(&world(*number, Some(plant))));
    let number = found.unwrap_or_else(|| panic!("{plant}: no world of {WORLDS} shows it"));
    let clean = world(number, None);
    assert!(clean.is_clean(), "{plant}: {:#?}", clean.listed);
}

#[test]
fn a_lost_wake_up_is_found() {
    finds(Plant::LostWakeUp, "did not finish before its deadline");
}

#[test]
fn a_block_that_is_published_before_its_bytes_is_found() {
    finds(Plant::EarlyPublish, "wrong bytes: ");
}

#[test]
fn an_address_that_reclaim_has_made_stale_is_found() {
    finds(Plant::StaleAddress, "wrong bytes: ");
}

#[test]
fn a_deadline_that_is_not_kept_is_found() {
    finds(Plant::LateDeadline, "with a time-out of 500ms");
}

#[test]
fn a_lease_that_outlives_its_slab_is_found() {
    finds(Plant::OutlivingLease, "the bytes of a lease of ");
}

#[test]
fn a_violation_names_the_command_that_repeats_it() {
    let result = world(0, Some(Plant::OutlivingLease));
    let repeat = &result.listed.first().unwrap().repeat;
    assert_eq!(
        repeat,
        "cascade sim --nodes 1 --seed 3 --world 0 --operations 1200000 --plant outliving-lease"
    );
}
