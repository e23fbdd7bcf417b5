//! The reference page `docs/cli.md` equals the output of the program.

use std::fs;
use std::path::Path;

#[test]
fn the_reference_page_is_current() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/cli.md");
    let expected = cascade_command::reference();
    if fs::read_to_string(&page).is_ok_and(|found| found == expected) {
        return;
    }
    let fresh = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cli.md");
    fs::write(&fresh, expected).unwrap();
    panic!("docs/cli.md is out of date; replace it with {}", fresh.display());
}
