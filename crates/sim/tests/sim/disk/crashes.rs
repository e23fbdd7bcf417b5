//! What crashes of the process and power losses leave.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use cascade_disk::format::PAGE_BYTES;
use cascade_disk::io::Transfer;
use cascade_runtime::simulated::{Domain, World};
use cascade_runtime::{Deadline, LeafMutex, SystemClock, sleep};
use cascade_sim::disk::{CallKind, DiskFault, DiskSettings};

use super::fixture::{
    Batch, DIRECTORY, FILE, Fixture, SECTOR_BYTES, SEEDS, always, file_io, in_world, page_write,
    pages_write, read,
};

#[test]
fn a_power_loss_leaves_what_was_synced_and_any_sectors_of_the_rest() {
    let (mut old, mut new, mut torn, mut versions) = (0, 0, 0, 0);
    for seed in 0..SEEDS {
        let fixture = Fixture::instant(seed);
        let file = fixture.create(FILE, 4 * PAGE_BYTES as u64);
        for page in 0..2 {
            fixture.write(&file, page, 1).unwrap();
        }
        fixture.sync(&file).unwrap();
        fixture.sync_directory();
        fixture.write(&file, 1, 2).unwrap();
        fixture.write(&file, 1, 3).unwrap();
        fixture.disk.power_loss();
        assert!(fixture.write(&file, 0, 9).is_err(), "its handle has ended with the process");
        let fixture = Fixture { io: file_io(&fixture.disk), ..fixture };
        let bytes = fixture.read(FILE).unwrap();
        assert!(bytes[..PAGE_BYTES].iter().all(|byte| *byte == 1), "seed {seed}: it was synced");
        let page = &bytes[PAGE_BYTES..2 * PAGE_BYTES];
        for sector in page.chunks(SECTOR_BYTES) {
            assert!((1..=3).contains(&sector[0]), "seed {seed}");
            assert!(sector.iter().all(|byte| *byte == sector[0]), "seed {seed}");
        }
        let found: BTreeSet<u8> = page.iter().copied().collect();
        old += u64::from(found == BTreeSet::from([1]));
        new += u64::from(found == BTreeSet::from([3]));
        versions += u64::from(found.contains(&2));
        torn += u64::from(found.len() > 1);
    }
    let each = [old, new, torn, versions];
    assert!(each.iter().all(|count| *count > SEEDS / 20), "{each:?}");
}

#[test]
fn a_file_that_was_never_synced_is_empty_or_has_any_part_of_its_bytes_after_a_power_loss() {
    let (mut empty, mut whole, mut noise) = (0, 0, 0);
    for seed in 0..SEEDS {
        let fixture = Fixture::instant(seed);
        let file = fixture.create(FILE, 0);
        for page in 0..4 {
            fixture.write(&file, page, 5).unwrap();
        }
        fixture.sync_directory();
        fixture.disk.power_loss();
        let bytes = read(&file_io(&fixture.disk), FILE).unwrap();
        assert!(bytes.is_empty() || bytes.len() == 4 * PAGE_BYTES);
        empty += u64::from(bytes.is_empty());
        whole += u64::from(!bytes.is_empty() && bytes.iter().all(|byte| *byte == 5));
        noise += u64::from(bytes.iter().any(|byte| !matches!(byte, 0 | 5)));
    }
    let each = [empty, whole, noise];
    assert!(each.iter().all(|count| *count > SEEDS / 50), "{each:?}");
}

#[test]
fn a_power_loss_keeps_the_first_changes_of_a_directory() {
    let mut counts = BTreeSet::new();
    for seed in 0..SEEDS {
        let fixture = Fixture::instant(seed);
        let path = |number: u8| format!("{DIRECTORY}/{number}");
        for number in 0..5 {
            fixture.create(&path(number), 0);
            if number == 1 {
                fixture.sync_directory();
            }
        }
        fixture.io.files.remove(Path::new(&path(0))).unwrap();
        fixture.disk.power_loss();
        let io = file_io(&fixture.disk);
        let has = |number| read(&io, &path(number)).is_ok();
        let kept = (2..5).filter(|number| has(*number)).count();
        assert!(has(1), "seed {seed}: its name was synced");
        assert_eq!(kept, (2..5).take_while(|number| has(*number)).count(), "seed {seed}: order");
        assert!(has(0) || kept == 3, "seed {seed}: the removal came last");
        counts.insert((kept, has(0)));
    }
    assert_eq!(counts.len(), 5, "{counts:?}");
}

#[test]
fn with_a_journal_any_sync_makes_all_earlier_names_durable() {
    let other = Path::new("/files/other");
    for (has_journal, expected) in [(true, 1), (false, 3)] {
        let mut found = BTreeSet::new();
        for seed in 0..SEEDS {
            let settings = DiskSettings { has_journal, ..DiskSettings::without_latency(seed) };
            let fixture = Fixture::new(settings);
            fixture.io.files.make_directory(other).unwrap();
            let file = fixture.create(FILE, 0);
            fixture.sync(&file).unwrap();
            fixture.disk.power_loss();
            let io = file_io(&fixture.disk);
            found.insert((read(&io, FILE).is_ok(), io.files.list(other).is_ok()));
        }
        assert!(found.contains(&(true, true)), "{found:?}");
        assert_eq!(found.len(), expected, "{found:?}");
    }
}

#[test]
fn a_replaced_file_is_old_or_new_after_any_crash() {
    let mut versions = BTreeSet::new();
    for seed in 0..SEEDS {
        let read_after = Arc::new(LeafMutex::new(0));
        let result = Arc::clone(&read_after);
        in_world(seed, move || {
            let fixture = Fixture::new(DiskSettings { seed, ..DiskSettings::default() });
            let done = Arc::new(LeafMutex::new(0_u8));
            let (acknowledged, io) = (Arc::clone(&done), fixture.io.clone());
            let world = World::current().unwrap();
            world.spawn_in(Domain(1), "writer", move || {
                for version in 1..=20 {
                    let bytes = vec![version; 3 * PAGE_BYTES + 100];
                    io.files.replace(Path::new(FILE), &bytes).unwrap();
                    *acknowledged.lock().unwrap() = version;
                }
            });
            // A time, because there is no scheduling point while the disk works.
            sleep(Duration::from_micros(37 * seed));
            world.kill(Domain(1));
            if seed % 2 == 0 {
                fixture.disk.kill();
            } else {
                fixture.disk.power_loss();
            }
            let done = *done.lock().unwrap();
            let found = match read(&file_io(&fixture.disk), FILE) {
                Err(error) if error.kind() == ErrorKind::NotFound => 0,
                bytes => {
                    let bytes = bytes.unwrap();
                    assert_eq!(bytes.len(), 3 * PAGE_BYTES + 100);
                    assert!(bytes.iter().all(|byte| *byte == bytes[0]), "one version, whole");
                    bytes[0]
                }
            };
            assert!((done..=done + 1).contains(&found), "{found} after {done}");
            *result.lock().unwrap() = found;
        });
        versions.insert(*read_after.lock().unwrap());
    }
    assert!(versions.len() > 5, "{versions:?}");
}

#[test]
fn a_kill_keeps_completed_writes_and_cuts_those_in_flight() {
    let mut in_flight = BTreeSet::new();
    for seed in 0..SEEDS {
        let found = Arc::new(LeafMutex::new(0));
        let result = Arc::clone(&found);
        in_world(seed, move || {
            let fixture = Fixture::new(DiskSettings { seed, ..DiskSettings::default() });
            let file = fixture.create(FILE, 1 << 20);
            fixture.write(&file, 0, 1).unwrap();
            let io = fixture.io.clone();
            let writer = World::current().unwrap().spawn_in(Domain(1), "writer", move || {
                let mut batch = Batch::default();
                batch.waiting.push_back(pages_write(&file, 1, 8, 2));
                let deadline = Deadline::after(&SystemClock, Duration::from_secs(60));
                io.engine.run(&mut batch, deadline);
            });
            sleep(Duration::from_micros(12));
            World::current().unwrap().kill(Domain(1));
            assert!(writer.join().is_err(), "no write is that fast");
            fixture.disk.kill();
            let bytes = read(&file_io(&fixture.disk), FILE).unwrap();
            assert!(bytes[..PAGE_BYTES].iter().all(|byte| *byte == 1), "it was complete");
            let second = &bytes[PAGE_BYTES..9 * PAGE_BYTES];
            let written = second.iter().take_while(|byte| **byte == 2).count();
            assert!(second[written..].iter().all(|byte| *byte == 0));
            *result.lock().unwrap() = written;
        });
        in_flight.insert(*found.lock().unwrap());
    }
    assert!(in_flight.contains(&0) && in_flight.contains(&(8 * PAGE_BYTES)), "{in_flight:?}");
    assert!(in_flight.len() > 10, "{in_flight:?}");
}

#[test]
fn a_sync_that_fails_loses_pages_and_the_next_one_succeeds_without_them() {
    let (mut lost, mut kept) = (0, 0);
    for seed in 0..SEEDS {
        let fixture = Fixture::instant(seed);
        let file = fixture.create(FILE, PAGE_BYTES as u64);
        fixture.sync(&file).unwrap();
        fixture.sync_directory();
        fixture.write(&file, 0, 1).unwrap();
        fixture.disk.inject(always(DiskFault::Error(CallKind::Sync)));
        fixture.sync(&file).unwrap_err();
        fixture.disk.clear_faults();
        fixture.sync(&file).unwrap();
        fixture.disk.power_loss();
        let bytes = read(&file_io(&fixture.disk), FILE).unwrap();
        assert!(bytes.iter().all(|byte| *byte == bytes[0]), "seed {seed}: no sector was in flight");
        if bytes[0] == 1 { kept += 1 } else { lost += 1 }
    }
    assert!(lost > SEEDS / 5 && kept > SEEDS / 5, "{lost} lost, {kept} kept");
}

#[test]
fn a_sync_covers_what_was_written_before_it_began() {
    let mut lost = 0;
    for seed in 0..SEEDS {
        let found = Arc::new(LeafMutex::new((0, 0)));
        let result = Arc::clone(&found);
        in_world(seed, move || {
            let fixture = Fixture::new(DiskSettings { seed, ..DiskSettings::default() });
            let file = fixture.create(FILE, 2 * PAGE_BYTES as u64);
            fixture.sync_directory();
            fixture.write(&file, 0, 1).unwrap();
            // The write of the second page is complete before the sync is, in most seeds.
            let transfers = vec![
                Transfer::sync(Arc::clone(&file)),
                page_write(&file, 0, 2),
                page_write(&file, 1, 2),
            ];
            let outcomes = fixture.run(transfers, Duration::from_secs(60));
            assert!(outcomes.iter().all(|(_, outcome)| outcome.result.is_ok()));
            fixture.disk.power_loss();
            let bytes = read(&file_io(&fixture.disk), FILE).unwrap();
            assert_eq!(bytes.len(), 2 * PAGE_BYTES);
            let sectors = bytes[..PAGE_BYTES].chunks(SECTOR_BYTES);
            assert!(sectors.clone().all(|sector| matches!(sector[0], 1 | 2)), "it was synced");
            *result.lock().unwrap() = (bytes[0], bytes[PAGE_BYTES]);
        });
        lost += u64::from(*found.lock().unwrap() == (1, 0));
    }
    assert!(lost > SEEDS / 10, "{lost}");
}

#[test]
fn a_lost_write_is_gone_after_a_power_loss_though_it_was_synced() {
    for seed in 0..SEEDS {
        let fixture = Fixture::instant(seed);
        let file = fixture.create(FILE, PAGE_BYTES as u64);
        fixture.disk.inject(always(DiskFault::LostWrite));
        fixture.write(&file, 0, 1).unwrap();
        fixture.sync(&file).unwrap();
        fixture.sync_directory();
        fixture.disk.power_loss();
        let bytes = read(&file_io(&fixture.disk), FILE).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0), "seed {seed}");
    }
}
