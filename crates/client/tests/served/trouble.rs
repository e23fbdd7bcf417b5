//! A file tier in trouble behind a served store: who does not need it does not notice.

use cascade_store::{BlockStore, FilesConfig, PutOutcome};

use crate::host::{Host, NOW, hits, keys, put, within};
use crate::small_disk::SmallDisk;

#[test]
fn a_full_disk_costs_what_does_not_fit_and_nobody_a_byte() {
    let Some(disk) = SmallDisk::mount(8) else { return };
    let host = Host::start(|config| {
        config.store.pipeline = "Dram|Files".to_owned();
        config.store.files = Some(FilesConfig {
            capacity_bytes: 64 << 20,
            segment_bytes: 1 << 20,
            ..FilesConfig::new(disk.path())
        });
    });
    let (writer, reader) = (host.connect(), host.connect());
    let hot = keys(0..4);
    put(&reader, &hot, 64 << 10, NOW);
    assert_eq!(reader.pin(&hot), [true; 4]);
    for first in (100..400).step_by(4) {
        let some = keys(first..first + 4);
        // What the disk does not take may fail or wait; what is answered is right.
        for outcome in put(&writer, &some, 256 << 10, within(500)) {
            assert!(!matches!(outcome, PutOutcome::Conflict), "{outcome:?}");
        }
        hits(&some, &writer.view(&some, within(500)));
        let views = reader.view(&hot, NOW);
        assert_eq!(hits(&hot, &views), 4, "blocks in DRAM need no disk: {views:?}");
    }
    // Each is told that some was not written, not only who asks first.
    writer.flush(within(2000)).expect_err("most did not fit");
    reader.flush(within(2000)).expect_err("most did not fit");
    for some in keys(100..400).chunks(4) {
        hits(some, &writer.view(some, within(2000)));
    }
    drop((writer, reader));
    host.assert_nothing_leaks();
}
