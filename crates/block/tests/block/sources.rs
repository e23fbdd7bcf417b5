//! The sources of all crates, parsed once for all rules about their structure.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::fs;
use std::path::{Path, PathBuf};

use syn::Item;

use crate::{circles, methods};

/// A file of a crate.
pub(crate) struct SourceFile {
    pub(crate) crate_name: String,
    /// Its path below `src`.
    pub(crate) below: PathBuf,
    pub(crate) items: Vec<Item>,
}

/// No files depend on each other in circles, and no type has too many methods.
#[test]
fn sources_keep_the_rules_of_their_structure() {
    let files = parse_all();
    let mut violations = circles::violations(&files);
    violations.extend(methods::violations(&files));
    assert!(violations.is_empty(), "\n{}", violations.join("\n"));
}

fn parse_all() -> Vec<SourceFile> {
    let mut files = Vec::new();
    for entry in fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("..")).unwrap() {
        let directory = entry.unwrap().path();
        let crate_name = directory.file_name().unwrap().to_str().unwrap();
        let root = directory.join("src");
        add_directory(&mut files, crate_name, &root, &root);
    }
    files
}

fn add_directory(files: &mut Vec<SourceFile>, crate_name: &str, root: &Path, directory: &Path) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            add_directory(files, crate_name, root, &path);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let items = syn::parse_file(&fs::read_to_string(&path).unwrap()).unwrap().items;
            let below = path.strip_prefix(root).unwrap().to_owned();
            files.push(SourceFile { crate_name: crate_name.to_owned(), below, items });
        }
    }
}
