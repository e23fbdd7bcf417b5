//! Planted bugs: the simulator finds each, and finds nothing in the same worlds without it.

use std::ops::Range;
use std::time::Duration;

use cascade_runtime::{Plant, SystemClock};
use cascade_sim::{
    Length, Progress, SimOptions, SimResult, Subject, WORLD_OPERATIONS, Workers, run,
};

/// Worlds in which a bug has to be found.
const WORLDS: u64 = 60;

const LENGTH: Length = Length::Operations(WORLDS * WORLD_OPERATIONS);

fn world(number: u64, plant: Option<Plant>, length: Length) -> SimResult {
    world_of(Subject::Store, number, plant, length)
}

fn world_of(subject: Subject, number: u64, plant: Option<Plant>, length: Length) -> SimResult {
    let options =
        SimOptions { subject, seed: 3, length, world: Some(number), jobs: 1, twice: false, plant };
    run(&options, Workers::Threads, &Progress::default(), &SystemClock).expect("threads start")
}

/// Runs worlds until one has a violation with this text. That world has none without the bug.
fn finds(plant: Plant, text: &str) {
    finds_in(Subject::Store, plant, text);
}

fn finds_in(subject: Subject, plant: Plant, text: &str) {
    let world = |number, plant| world_of(subject, number, plant, LENGTH);
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
fn a_notice_before_its_bytes_is_found() {
    finds_in(Subject::Transport, Plant::EarlyNotice, "came before its bytes");
}

#[test]
fn a_cancel_that_returns_too_early_is_found() {
    finds_in(Subject::Transport, Plant::EarlyCancel, "was changed");
}

#[test]
fn a_batch_that_is_waited_for_beyond_its_deadline_is_found() {
    finds_in(Subject::Transport, Plant::LateDeadline, "after its deadline");
}

#[test]
fn a_violation_names_the_command_that_repeats_it() {
    // The first of these worlds in which the bug shows, and the command that repeats it.
    let repeat = |mut numbers: Range<u64>, length| {
        let found = numbers.find_map(|number| {
            let result = world(number, Some(Plant::OutlivingLease), length);
            result.listed.first().map(|it| (number, it.repeat.clone()))
        });
        found.expect("one of these worlds has a lease")
    };
    let command = |operations, number| {
        format!(
            "cascade sim --nodes 1 --seed 3 --operations {operations} --world {number} \
             --plant outliving-lease"
        )
    };
    let (number, text) = repeat(0..WORLDS, LENGTH);
    assert_eq!(text, command(1_200_000, number));
    // A simulation with a time has worlds of the whole length.
    let (number, text) = repeat(70..70 + WORLDS, Length::Time(Duration::from_millis(1)));
    assert_eq!(text, command((number + 1) * WORLD_OPERATIONS, number));
}
