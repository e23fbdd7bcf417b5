//! A full disk behind a served store: blocks in DRAM are served as before.

use cascade_store::FilesConfig;
use cascade_tier::{BlockStore, PutOutcome};

use crate::small_disk::SmallDisk;
use crate::test_node::{NOW, TestNode, hits, keys, put, within};

#[test]
fn a_full_disk_loses_only_blocks_that_do_not_fit() {
    let Some(disk) = SmallDisk::mount(8) else { return };
    let host = TestNode::start(|config| {
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
        // Puts that do not fit may fail or wait; blocks that are served have the right bytes.
        for outcome in put(&writer, &some, 256 << 10, within(500)) {
            assert!(!matches!(outcome, PutOutcome::Conflict), "{outcome:?}");
        }
        hits(&some, &writer.view(&some, within(500)));
        let views = reader.view(&hot, NOW);
        assert_eq!(hits(&hot, &views), 4, "blocks in DRAM need no disk: {views:?}");
    }
    // Each client gets the error, not only the first that flushes.
    writer.flush(within(2000)).expect_err("most did not fit");
    reader.flush(within(2000)).expect_err("most did not fit");
    for some in keys(100..400).chunks(4) {
        hits(some, &writer.view(some, within(2000)));
    }
    drop((writer, reader));
    host.assert_nothing_leaks();
}
