//! A directory with a file for each block is refused, unchanged.

use std::fs;
use std::sync::Arc;

use cascade_disk::conformance::{deadline, key, open, pool};
use cascade_disk::{DiskError, FilesConfig};
use cascade_runtime::SystemClock;

/// The node would start with an empty tier beside files that nothing ever removes.
#[test]
fn a_directory_with_a_file_for_each_block_is_refused() {
    let name = key(1).to_string();
    for digits in 0..=4 {
        let (pool, directory) = (pool(), tempfile::tempdir().unwrap());
        let blocks = directory.path().join("blocks");
        let file = blocks.join(&name[..digits]).join(format!("{name}.block"));
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(&file, "a block").unwrap();
        let open = || {
            let config = FilesConfig::new(directory.path());
            open(config, Arc::new(SystemClock), &pool, deadline())
        };
        let error = open().expect_err("an old layout");
        assert!(matches!(error, DiskError::OldLayout { .. }), "{error}");
        let text = error.to_string();
        assert!(text.starts_with(&format!("{} has", blocks.display())), "{text}");
        assert!(text.contains("remove it"), "{text}");
        assert_eq!(fs::read(&file).unwrap(), b"a block");
        // Empty directories have no block.
        fs::remove_file(&file).unwrap();
        drop(open().unwrap());
        fs::remove_dir_all(&blocks).unwrap();
        fs::write(&blocks, "a file with the name of the directory").unwrap();
        drop(open().unwrap());
    }
}
