//! Passes the commit to the build, so that figures can be traced to the source.

use std::process::Command;

fn main() {
    let commit = git(&["rev-parse", "HEAD"]).unwrap_or_else(|| "unknown".to_owned());
    let changes = git(&["status", "--porcelain", "--untracked-files=no"]).unwrap_or_default();
    let mark = if changes.is_empty() { "" } else { " with local changes" };
    println!("cargo::rustc-env=CASCADE_COMMIT={commit}{mark}");
    println!("cargo::rerun-if-changed=build.rs");
    // All crates: a change in any of them changes this program.
    println!("cargo::rerun-if-changed=..");
    // The log of HEAD grows with every commit. Git knows its path, which differs in a worktree.
    if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"]) {
        println!("cargo::rerun-if-changed={log}");
    }
}

fn git(args: &[&str]) -> Option<String> {
    let output = Command::new("git").args(args).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}
