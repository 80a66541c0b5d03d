//! The `fedproj` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(fedproj::main(std::env::args_os().collect(), Vec::new()))
}
