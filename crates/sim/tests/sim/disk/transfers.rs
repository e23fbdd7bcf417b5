//! Transfers: their order, late ones, invalid ones.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use cascade_disk::conformance::pool;
use cascade_disk::format::PAGE_BYTES;
use cascade_disk::io::{Buffer, OpenMode, Transfer, TransferKind};
use cascade_runtime::simulated::{Ending, Settings, World};
use cascade_runtime::{LeafMutex, now, sleep};
use cascade_sim::disk::{CallKind, DiskFault, DiskSettings, Episode};

use super::fixture::{FILE, Fixture, in_world, page_write, pages_read, pages_write};

#[test]
fn what_was_written_is_read_back_and_a_hole_reads_as_zeroes() {
    let fixture = Fixture::instant(1);
    let file = fixture.create(FILE, 0);
    assert_eq!(fixture.write(&file, 2, 7).unwrap(), PAGE_BYTES);
    assert_eq!(fixture.io.files.next_data(&file, 0).unwrap(), Some(2 * PAGE_BYTES as u64));
    assert_eq!(fixture.io.files.next_data(&file, 3 * PAGE_BYTES as u64).unwrap(), None);
    let (transfer, result) = fixture.run_one(pages_read(&file, 1, 4));
    assert_eq!(result.unwrap(), 2 * PAGE_BYTES, "the file ends after its third page");
    let transfer = transfer.unwrap();
    let bytes = transfer.buffers[0].bytes();
    assert!(bytes[..PAGE_BYTES].iter().all(|byte| *byte == 0));
    assert!(bytes[PAGE_BYTES..2 * PAGE_BYTES].iter().all(|byte| *byte == 7));
    fixture.io.files.truncate(&file, 100).unwrap();
    fixture.io.files.truncate(&file, 3 * PAGE_BYTES as u64).unwrap();
    assert!(fixture.read(FILE).unwrap().iter().all(|byte| *byte == 0), "it was cut off");
}

#[test]
fn a_direct_transfer_has_to_be_aligned() {
    let fixture = Fixture::instant(1);
    let file = fixture.create(FILE, 1 << 20);
    let mut transfer = page_write(&file, 0, 1);
    transfer.offset = 100;
    assert_eq!(fixture.run_one(transfer).1.unwrap_err().kind(), ErrorKind::InvalidInput);
    let settings = DiskSettings { supports_direct: false, ..DiskSettings::without_latency(1) };
    let fixture = Fixture::new(settings);
    let mode = OpenMode::Create { allocate_bytes: 0 };
    let refused = fixture.io.files.open(Path::new(FILE), mode, true).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::InvalidInput);
    assert_eq!(fixture.read(FILE).unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn transfers_end_in_any_order() {
    let mut orders = BTreeSet::new();
    for seed in 0..20 {
        let fixture = Arc::new(LeafMutex::new(Vec::new()));
        let result = Arc::clone(&fixture);
        in_world(seed, move || {
            let fixture = Fixture::new(DiskSettings { seed, ..DiskSettings::default() });
            let file = fixture.create(FILE, 1 << 20);
            let transfers = (0..20).map(|page| page_write(&file, page, 1)).collect();
            let outcomes = fixture.run(transfers, Duration::from_secs(60));
            assert!(outcomes.iter().all(|(_, outcome)| outcome.result.is_ok()));
            *result.lock().unwrap() = outcomes.iter().map(|(number, _)| *number).collect();
        });
        orders.insert(fixture.lock().unwrap().clone());
    }
    assert_eq!(orders.len(), 20);
    assert!(orders.iter().all(|order| !order.is_sorted()));
}

#[test]
fn a_late_read_keeps_its_buffers_until_it_ends() {
    in_world(3, || {
        let fixture = Fixture::new(DiskSettings::default());
        let file = fixture.create(FILE, 1 << 20);
        let until = now() + Duration::from_secs(2);
        fixture.disk.inject(Episode::new(DiskFault::Hang(CallKind::Read), now(), until));
        let pool = pool();
        let before = pool.stats().requested_bytes;
        let slab = pool.allocate(PAGE_BYTES).unwrap().into_host().unwrap();
        let buffers = vec![Buffer::Open(slab, 0..PAGE_BYTES)];
        let transfer = Transfer::new(TransferKind::Read, Arc::clone(&file), 0, buffers);
        let (began, timeout) = (now(), Duration::from_millis(50));
        let (_, outcome) = fixture.run(vec![transfer], timeout).pop().unwrap();
        let took = now().saturating_sub(began);
        assert!(took >= timeout && took < timeout + Duration::from_millis(1), "{took:?}");
        assert_eq!(outcome.result.unwrap_err().kind(), ErrorKind::TimedOut);
        assert!(outcome.transfer.is_none(), "the device has the buffers");
        assert_eq!(fixture.io.engine.stuck_calls(), 1);
        assert!(pool.stats().requested_bytes > before);
        sleep(Duration::from_secs(3));
        assert_eq!(fixture.io.engine.stuck_calls(), 0);
        assert_eq!(pool.stats().requested_bytes, before);
        assert_eq!(fixture.disk.counts().late_transfers, 1);
    });
}

#[test]
fn a_late_write_lands_after_its_deadline() {
    in_world(4, || {
        let fixture = Fixture::new(DiskSettings::default());
        let file = fixture.create(FILE, PAGE_BYTES as u64);
        let until = now() + Duration::from_secs(2);
        fixture.disk.inject(Episode::new(DiskFault::Hang(CallKind::Write), now(), until));
        let timeout = Duration::from_millis(50);
        let (_, outcome) = fixture.run(vec![page_write(&file, 0, 9)], timeout).pop().unwrap();
        assert_eq!(outcome.result.unwrap_err().kind(), ErrorKind::TimedOut);
        assert_eq!(fixture.read(FILE).unwrap()[0], 0);
        fixture.disk.clear_faults();
        fixture.write(&file, 0, 3).unwrap();
        let violations = fixture.disk.violations();
        assert!(violations.len() == 1 && violations[0].is_late, "{violations:?}");
        assert_eq!(fixture.read(FILE).unwrap()[0], 3);
        sleep(Duration::from_secs(3));
        assert_eq!(fixture.read(FILE).unwrap()[0], 9);
    });
}

#[test]
fn late_calls_end_in_worlds_that_cannot_start_a_thread() {
    let settings = Settings { spawn_fails_one_in: 2, ..Settings::from_seed(11) };
    let report = World::run(settings, || {
        let fixture = Fixture::new(DiskSettings::default());
        let file = fixture.create(FILE, 1 << 20);
        for page in 0..10 {
            let until = now() + Duration::from_millis(20);
            fixture.disk.inject(Episode::new(DiskFault::Hang(CallKind::Write), now(), until));
            fixture.run(vec![page_write(&file, page, 1)], Duration::from_millis(1));
            sleep(Duration::from_millis(30));
        }
        // A call without transfers starts what is left.
        // Ten calls are late. Half of the threads can be started.
        let mut calls_left = 1000;
        while fixture.io.engine.stuck_calls() > 0 {
            assert!(calls_left > 0, "waited in vain for the end of the late calls");
            calls_left -= 1;
            fixture.run(Vec::new(), Duration::from_millis(1));
            sleep(Duration::from_millis(30));
        }
        assert!(fixture.read(FILE).unwrap()[..10 * PAGE_BYTES].iter().all(|byte| *byte == 1));
    });
    assert_eq!(report.ending, Ending::Finished);
}

#[test]
fn overlapping_transfers_are_violations() {
    in_world(1, || {
        let fixture = Fixture::new(DiskSettings::default());
        let file = fixture.create(FILE, 1 << 20);
        let run = |transfers| drop(fixture.run(transfers, Duration::from_secs(60)));
        run(vec![pages_write(&file, 0, 2, 1), pages_write(&file, 2, 2, 1)]);
        run(vec![pages_read(&file, 0, 4), pages_read(&file, 0, 4)]);
        assert_eq!(fixture.disk.violations(), []);
        run(vec![pages_write(&file, 0, 2, 1), pages_write(&file, 1, 2, 1)]);
        run(vec![pages_write(&file, 0, 2, 1), pages_read(&file, 0, 1)]);
        let violations = fixture.disk.violations();
        assert_eq!(violations.len(), 2, "{violations:?}");
        assert!(violations.iter().all(|violation| !violation.is_late));
        assert_eq!(violations[0].path.as_deref(), Some(Path::new(FILE)));
    });
}
