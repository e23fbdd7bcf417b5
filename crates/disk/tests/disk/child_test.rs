//! Runs a test of this program in a process of its own.

use std::process::Command;

/// The command for an ignored test of a module, which is the caller's `module_path!()`.
pub(crate) fn command(module: &str, test: &str) -> Command {
    // The names of tests are without the name of their program.
    let (_, module) = module.split_once("::").expect("the module is not the root");
    let mut command = Command::new(std::env::current_exe().expect("this program has a path"));
    command.args(["--exact", &format!("{module}::{test}"), "--ignored", "--nocapture"]);
    command
}
