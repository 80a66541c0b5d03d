//! How this program was started, and how it starts itself again: as a binary, or inside a Python interpreter.

use std::ffi::OsString;
use std::process::Command;
use std::sync::OnceLock;

/// Its arguments, and the words that start it again.
static STARTED: OnceLock<(Vec<OsString>, Vec<OsString>)> = OnceLock::new();

/// Remembers how the program was started. `host` are the words before its arguments; empty for a binary.
pub fn remember(args: Vec<OsString>, host: Vec<OsString>) {
    STARTED.get_or_init(|| (args, host));
}

/// Its arguments, its name first.
pub fn args() -> Vec<OsString> {
    STARTED.get().map_or_else(|| std::env::args_os().collect(), |(args, _)| args.clone())
}

/// A command that starts it again, without arguments.
pub fn again() -> std::io::Result<Command> {
    match STARTED.get().map(|(_, host)| &host[..]) {
        Some([program, words @ ..]) => {
            let mut command = Command::new(program);
            command.args(words);
            Ok(command)
        }
        _ => std::env::current_exe().map(Command::new),
    }
}
