//! Ctrl-C, and the signal by which clusters and services end a program. The first one stops a run after its current round, a
//! second one stops it at once.

use crate::tell;
use anyhow::{Context, Result};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// As shells report a program that Ctrl-C ended.
pub const EXIT_CODE: u8 = 130;

static ASKED: AtomicBool = AtomicBool::new(false);
static RESUME: OnceLock<String> = OnceLock::new();

/// `timeout` and some terminals send a signal twice, to a program and to its group. Nobody presses a key again so soon.
const SAME: Duration = Duration::from_millis(300);

/// From now on [`is_asked`] notices Ctrl-C. `resume` is the command that continues the work.
pub fn watch(resume: String) -> Result<()> {
    let resume = RESUME.get_or_init(|| resume);
    let mut first: Option<Instant> = None;
    let handler = move || {
        if first.get_or_insert_with(Instant::now).elapsed() < SAME && ASKED.load(Ordering::SeqCst) {
            return;
        }
        if ASKED.swap(true, Ordering::SeqCst) {
            tell!("\nstopped at once; the current round is lost, all earlier rounds are on disk\nto resume: {resume}");
            std::process::exit(i32::from(EXIT_CODE));
        }
        tell!("\nstopping after this round; Ctrl-C again stops at once and loses it");
    };
    ctrlc::set_handler(handler).context("cannot listen for Ctrl-C")
}

/// The command given to [`watch`].
pub fn resume() -> &'static str {
    RESUME.get().map_or("", |command| command)
}

/// Whether somebody pressed Ctrl-C.
pub fn is_asked() -> bool {
    ASKED.load(Ordering::SeqCst)
}

/// The command line of this program with `flag` added unless it is there, ready to be pasted into a shell.
pub fn command_line_with(flag: Option<&str>) -> String {
    let mut args: Vec<String> = crate::program::args().iter().map(|arg| arg.to_string_lossy().into_owned()).collect();
    args.extend(flag.filter(|flag| !args.iter().any(|arg| arg == flag)).map(str::to_owned));
    args.iter().map(|arg| quoted(arg)).collect::<Vec<_>>().join(" ")
}

fn quoted(arg: &str) -> String {
    let is_plain = |c: char| c.is_alphanumeric() || "_-./=,:+@%".contains(c);
    if !arg.is_empty() && arg.chars().all(is_plain) {
        return arg.to_owned();
    }
    format!("'{}'", arg.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_that_a_shell_would_read_otherwise_are_quoted() {
        assert_eq!(quoted("method.name=fedavg"), "method.name=fedavg");
        assert_eq!(quoted("model.hidden=[16]"), "'model.hidden=[16]'");
        assert_eq!(quoted("my runs/o'neil"), r"'my runs/o'\''neil'");
        assert_eq!(quoted(""), "''");
    }
}
