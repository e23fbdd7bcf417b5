//! The text of the kernel: that it says what the launch assumes, and that it assembles.

use std::path::PathBuf;
use std::process::Command;

use super::*;

/// Architectures of Ampere, Hopper and Blackwell.
const ARCHITECTURES: [&str; 3] = ["sm_80", "sm_90", "sm_100"];

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

/// The assembler of NVIDIA, where it is installed.
#[expect(clippy::disallowed_methods, reason = "finds a program for a test")]
fn assembler() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os("CASCADE_PTXAS") {
        return Some(named.into());
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join("ptxas")).find(|it| it.is_file())
}

#[expect(clippy::print_stderr, reason = "a test that was skipped says so")]
fn skip(reason: &str) {
    eprintln!("skipped: {reason}");
}

#[test]
fn the_text_assembles() {
    let Some(assembler) = assembler() else {
        return skip("no ptxas in PATH or CASCADE_PTXAS, so the kernel was not assembled");
    };
    let directory = tempfile::tempdir().unwrap();
    let source = directory.path().join("copy.ptx");
    std::fs::write(&source, TEXT.strip_suffix('\0').unwrap()).unwrap();
    for architecture in ARCHITECTURES {
        let output = Command::new(&assembler)
            .args([&format!("-arch={architecture}"), "--warning-as-error", "-o"])
            .arg(directory.path().join(architecture))
            .arg(&source)
            .output()
            .unwrap();
        let text = [output.stdout, output.stderr].concat();
        assert!(output.status.success(), "{architecture}: {}", String::from_utf8_lossy(&text));
    }
}
