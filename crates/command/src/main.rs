//! The command `cascade` as a program without Python.

use std::process::ExitCode;

fn main() -> ExitCode {
    let code = cascade_command::main(std::env::args_os(), None);
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}
