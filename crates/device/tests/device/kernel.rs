//! The text of the kernel assembles for the GPUs that it is for, where NVIDIA's `ptxas` is there.

use std::path::PathBuf;
use std::process::Command;

const TEXT: &str = include_str!("../../src/kernels/copy.ptx");
/// Architectures of Ampere, Hopper and Blackwell.
const ARCHITECTURES: [&str; 3] = ["sm_80", "sm_90", "sm_100"];

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
    std::fs::write(&source, TEXT).unwrap();
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
