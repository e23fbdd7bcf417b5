//! Injected faults, space, locks, names.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::path::Path;

use cascade_disk::format::PAGE_BYTES;
use cascade_disk::io::{LockedBy, OpenMode};
use cascade_sim::disk::{CallKind, DiskFault, DiskSettings};

use super::fixture::{DIRECTORY, FILE, Fixture, always, pages_read, pages_write};

#[test]
fn faults_do_what_they_say() {
    let written = |fault| {
        let fixture = Fixture::instant(5);
        let file = fixture.create(FILE, 4 * PAGE_BYTES as u64);
        fixture.disk.inject(always(fault));
        let result = fixture.run_one(pages_write(&file, 0, 4, 255)).1;
        fixture.disk.clear_faults();
        let zero_bits: u32 =
            fixture.read(FILE).unwrap().iter().map(|byte| byte.count_zeros()).sum();
        (result.map_err(|error| error.raw_os_error()), zero_bits, fixture.disk.counts())
    };
    let all = 4 * PAGE_BYTES;
    let all_bits = u32::try_from(all * 8).unwrap();
    let (result, zero_bits, counts) = written(DiskFault::Error(CallKind::Write));
    assert_eq!((result, zero_bits, counts.errors), (Err(Some(5)), all_bits, 1));
    let (result, zero_bits, counts) = written(DiskFault::TornWrite);
    assert!(result == Err(Some(5)) && zero_bits < all_bits && zero_bits > 0, "{zero_bits}");
    assert_eq!(counts.torn_writes, 1);
    let (result, zero_bits, counts) = written(DiskFault::ShortTransfer);
    let short = result.unwrap();
    assert!(short < all && short.is_multiple_of(PAGE_BYTES) && short > 0);
    assert_eq!(zero_bits as usize, (all - short) * 8);
    assert_eq!(counts.short_transfers, 1);
    let (result, zero_bits, counts) = written(DiskFault::FlippedWrite);
    assert_eq!((result, zero_bits, counts.flipped_bits), (Ok(all), 1, 1));
    let (result, _, counts) = written(DiskFault::LostWrite);
    assert_eq!((result, counts.lost_writes), (Ok(all), 1));
    let (result, _, _) = written(DiskFault::Full);
    assert_eq!(result, Ok(all), "the space was allocated before");
}

#[test]
fn reads_fail_and_return_wrong_bits_by_faults() {
    let fixture = Fixture::instant(6);
    let file = fixture.create(FILE, 0);
    fixture.write(&file, 0, 0).unwrap();
    fixture.disk.inject(always(DiskFault::FlippedRead));
    let ones: u32 = fixture.read(FILE).unwrap().iter().map(|byte| byte.count_ones()).sum();
    assert_eq!(ones, 1);
    fixture.disk.clear_faults();
    assert!(fixture.disk.flip_bit(Path::new(FILE), 17, 3));
    assert_eq!(fixture.read(FILE).unwrap()[17], 8);
    assert!(fixture.disk.fail_page(Path::new(FILE), 17));
    assert_eq!(fixture.read(FILE).unwrap_err().raw_os_error(), Some(5));
    fixture.write(&file, 0, 1).unwrap();
    assert_eq!(fixture.read(FILE).unwrap()[17], 1, "a write heals the page");
    assert_eq!(fixture.disk.draw_page(), Some((FILE.into(), 0)));
}

#[test]
fn a_full_disk_refuses_new_space_alone() {
    let capacity_bytes = 10 * PAGE_BYTES as u64;
    let settings = DiskSettings { capacity_bytes, ..DiskSettings::without_latency(1) };
    let fixture = Fixture::new(settings);
    let file = fixture.create(FILE, 8 * PAGE_BYTES as u64);
    let refused = fixture.run_one(pages_write(&file, 8, 3, 1)).1.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::StorageFull);
    fixture.run_one(pages_write(&file, 0, 10, 1)).1.unwrap();
    assert_eq!(fixture.disk.used_bytes(), capacity_bytes);
    let mode = OpenMode::Create { allocate_bytes: 1 };
    let other = Path::new("/files/two");
    let refused = fixture.io.files.open(other, mode, false).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::StorageFull);
    assert_eq!(fixture.read("/files/two").unwrap_err().kind(), ErrorKind::NotFound);
    fixture.io.files.remove(Path::new(FILE)).unwrap();
    assert_eq!(fixture.disk.used_bytes(), 0);
    fixture.io.files.open(other, mode, false).unwrap();
    // Its handle stays usable.
    let (transfer, result) = fixture.run_one(pages_read(&file, 9, 1));
    assert_eq!(result.unwrap(), PAGE_BYTES);
    assert_eq!(transfer.unwrap().buffers[0].bytes()[0], 1);
    fixture.disk.inject(always(DiskFault::Full));
    let refused = fixture.io.files.open(Path::new("/files/three"), mode, false).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::StorageFull);
}

#[test]
fn a_lock_is_held_until_it_is_dropped_or_the_process_ends() {
    let fixture = Fixture::instant(1);
    let path = Path::new("/files/w0.lock");
    let lock = || fixture.io.files.lock_file(path);
    let held = lock().unwrap();
    assert!(held.is_current().unwrap());
    let refused = lock().unwrap_err();
    assert!(LockedBy::of(&refused).is_some(), "{refused:?}");
    drop(held);
    let held = lock().unwrap();
    fixture.disk.kill();
    assert!(fixture.read("/files/w0.lock").is_ok_and(|text| !text.is_empty()), "the file stays");
    let again = lock().unwrap();
    drop(held);
    assert!(lock().is_err(), "the lock of the dead process does not free the new one");
    fixture.io.files.remove(path).unwrap();
    assert!(!again.is_current().unwrap());
    fixture.create("/files/w0.lock", 0);
    assert!(again.is_current().is_err(), "another file has its name");
}

#[test]
fn another_directory_has_another_identity_while_a_tier_is_open() {
    let fixture = Fixture::instant(1);
    let identity = || fixture.io.files.directory_identity(Path::new(DIRECTORY)).unwrap();
    let before = identity();
    assert_eq!(before, identity());
    fixture.disk.inject(always(DiskFault::OtherDirectory));
    assert_eq!(before, identity(), "no tier holds its lock");
    let lock = fixture.io.files.lock_file(Path::new("/files/one.lock")).unwrap();
    assert_ne!(before, identity());
    fixture.disk.clear_faults();
    drop(lock);
    assert_eq!(before, identity());
}

#[test]
fn a_directory_is_set_aside_for_a_file() {
    let fixture = Fixture::instant(1);
    let files = &fixture.io.files;
    files.make_directory(Path::new("/files/one/inside")).unwrap();
    files.replace(Path::new(FILE), b"new").unwrap();
    assert_eq!(fixture.read(FILE).unwrap(), b"new");
    let listed: BTreeSet<_> = files.list(Path::new(DIRECTORY)).unwrap().into_iter().collect();
    let expected = ["/files/one", "/files/one.set-aside-0"].map(Into::into);
    assert_eq!(listed, BTreeSet::from(expected));
    assert_eq!(files.list(Path::new("/files/one.set-aside-0")).unwrap().len(), 1);
    let error = files.make_directory(Path::new(FILE)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AlreadyExists);
    let error = files.make_directory(Path::new("/files/one/below")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotADirectory);
    let error = files.remove(Path::new(DIRECTORY)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::IsADirectory);
}
