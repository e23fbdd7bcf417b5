//! The program `cascade`.

use std::process::ExitCode;

fn main() -> ExitCode {
    let code = cascade_command::main(std::env::args_os());
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}
