//! An in-memory file as an array of 64-bit words that outlive the process.
//!
//! Every word is an atomic: two threads that write the same word by mistake overwrite a value,
//! without undefined behaviour.
#![expect(unsafe_code, reason = "turns a mapping into a slice")]

use std::fs::File;
use std::io;
use std::ptr::NonNull;
use std::slice;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::mapping::{Mapping, READ_WRITE};
use crate::pages;

/// A mapped file, word by word.
#[derive(Debug)]
pub struct SharedWords(Mapping);

impl SharedWords {
    /// Maps a file of at least this length that no other process truncates.
    pub(crate) fn map(file: &File, bytes: usize) -> io::Result<Self> {
        let mapping = Mapping::of_file(file, bytes, READ_WRITE)?;
        // SAFETY: the mapping was just made.
        unsafe { pages::exclude_from_core_dumps(mapping.base(), bytes) }?;
        // SAFETY: as above.
        unsafe { pages::populate(mapping.base(), bytes) }?;
        Ok(Self(mapping))
    }

    /// All words.
    #[expect(clippy::missing_panics_doc, reason = "a mapping starts at a page")]
    #[inline]
    pub fn words(&self) -> &[AtomicU64] {
        let count = self.0.bytes() / size_of::<AtomicU64>();
        let first: NonNull<AtomicU64> = self.0.base().cast();
        assert!(first.is_aligned(), "a mapping starts at a page");
        // SAFETY: the mapping starts at a page, holds that many words, is initialised (the kernel
        // zeroes it) and lives as long as `self`; all access in this process is through atomics.
        unsafe { slice::from_raw_parts(first.as_ptr(), count) }
    }

    /// Sets all words to zero.
    pub(crate) fn zero(&self) {
        // Relaxed: no other thread reads a table that is being discarded.
        self.words().iter().for_each(|word| word.store(0, Ordering::Relaxed));
    }
}
