//! The text of the kernel: that it says what the launch assumes.

use super::*;

/// The statements of the text, without comments.
fn statements() -> Vec<&'static str> {
    let text = TEXT.strip_suffix('\0').unwrap();
    let lines = text.lines().map(|line| line.split("//").next().unwrap_or_default().trim());
    lines.filter(|line| !line.is_empty()).collect()
}

fn directive(name: &str) -> &'static str {
    let mut found = statements().into_iter().filter_map(|line| line.strip_prefix(name));
    let value = found.next().unwrap().trim();
    assert_eq!(found.next(), None, "{name} is there once");
    value
}

#[test]
fn the_text_and_the_launch_agree() {
    assert_eq!(TEXT.find('\0'), Some(TEXT.len() - 1), "it ends with the only zero");
    assert!(TEXT.is_ascii());
    // The oldest driver that we accept loads 7.0, and every later device runs code for 8.0.
    assert_eq!(statements()[0], ".version 7.0");
    assert_eq!(directive(".target"), "sm_80");
    assert_eq!(directive(".address_size"), "64");
    let entry = ENTRY.to_str().unwrap();
    assert_eq!(directive(".visible .entry"), format!("{entry}("));
    let parameters: Vec<&str> =
        statements().into_iter().filter(|line| line.starts_with(".param")).collect();
    let names = ["targets", "sources", "lengths", "count"];
    let expected = names.map(|name| format!(".param .u64 {entry}_{name}"));
    assert_eq!(parameters.join(" "), expected.join(", "), "as `List::arguments` gives them");
    assert_eq!(directive(".maxntid"), format!("{THREADS}, 1, 1"));
    assert!(THREADS.is_multiple_of(32), "the kernel waits for whole warps");
}
