//! Another process truncates the file of a pool that is in use.
//!
//! The next access to the truncated part ended the process by SIGBUS without a message.

mod blocks;
mod named_pool;

use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use blocks::{bytes_of, check, keys, put};
use cascade_store::{CallOptions, Store, ViewOutcome};
use named_pool::{config, directory, pool, warm};

const BLOCK: usize = 48 << 10;
const DIRECTORY: &str = "CASCADE_TRUNCATED_DIRECTORY";

#[expect(clippy::disallowed_methods, reason = "the child is configured by variables")]
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// The child: puts and reads until its pool is truncated. A wrong byte would be a panic, with
/// another exit status.
#[test]
#[ignore = "runs as the child of the test below"]
fn put_and_read_until_the_pool_is_truncated() {
    let Some(directory) = variable(DIRECTORY) else { return };
    let store = Store::open(config(Path::new(&directory), 8)).unwrap();
    put(&store, &keys(0..100), BLOCK);
    writeln!(std::io::stdout(), "\nready").unwrap();
    for round in 1.. {
        put(&store, &keys(round * 100..(round + 1) * 100), BLOCK);
        for key in keys(0..(round + 1) * 100) {
            if let ViewOutcome::Hit { slab, .. } = &store.view(&[key], CallOptions::default())[0] {
                assert!(slab.host() == Some(&bytes_of(&key, BLOCK)[..]), "a wrong byte");
            }
        }
    }
}

#[test]
fn a_process_whose_pool_is_truncated_ends_with_a_message() {
    for keep_bytes in [0, 1 << 20] {
        let directory = directory();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "put_and_read_until_the_pool_is_truncated",
                "--ignored",
                "--nocapture",
            ])
            .env(DIRECTORY, directory.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.map_while(Result::ok).any(|line| line == "ready"), "it came up");
        let file = std::fs::File::options().write(true).open(pool(directory.path())).unwrap();
        file.set_len(keep_bytes).unwrap();
        let mut message = String::new();
        child.stderr.take().unwrap().read_to_string(&mut message).unwrap();
        let status = child.wait().unwrap();
        assert_eq!(status.code(), Some(74), "{status}: {message}");
        assert!(message.contains("truncated the file of the memory pool"), "{message}");

        let store = Store::open(config(directory.path(), 8)).unwrap();
        assert_eq!(warm(&store).recovered_blocks, 0);
        assert!(store.stats().notes.iter().any(|note| note.contains("discarded")));
        check(&store, &keys(0..200));
    }
}
