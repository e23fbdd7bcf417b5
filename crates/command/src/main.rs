//! The program `cascade`.

use std::process::ExitCode;

/// What `make` and the build backend of the wheel pass: a hash, perhaps with ` with local changes`.
/// Not passed for tests, so that a commit compiles nothing again.
const COMMIT: Option<&str> = option_env!("CASCADE_COMMIT");

fn main() -> ExitCode {
    let code = cascade_command::main(std::env::args_os(), COMMIT);
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}
