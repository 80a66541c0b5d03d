//! The `fedproj` command: arguments, progress and exit codes. Results go to stdout, everything else to stderr.
//!
//! It is a library so that the Python package can be the same command, and read settings as it does.

// Both panic where the reader has gone; `say!` and `tell!` do not.
#![warn(clippy::print_stdout, clippy::print_stderr)]

mod bench;
mod compare;
mod config;
mod data;
mod device;
mod doctor;
mod export;
mod federation;
mod interrupt;
mod making;
mod methods;
mod models;
mod new;
mod partition;
mod preview;
mod privacy;
mod program;
mod progress;
mod report;
mod reproduce;
mod run;
mod sbom;
mod selftest;
mod settings;
mod shard;
mod status;
mod verify;
mod watch;

pub use data::data_dir;
pub use device::{DeviceArgs, default_threads};
pub use run::default_dir;
pub use settings::Settings;

use clap::Parser;
use std::ffi::OsString;

/// Federated learning that does not forget: simulator, federation and reproduction of FedProj.
#[derive(Parser)]
#[command(name = "fedproj", version, propagate_version = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// Subcommands: each has one type of arguments, with a method `run`.
macro_rules! commands {
    ($(#[$about:meta])* $vis:vis enum $name:ident { $($(#[$meta:meta])* $command:ident($args:ty),)* }) => {
        $(#[$about])*
        #[derive(clap::Subcommand)]
        $vis enum $name {
            $($(#[$meta])* $command($args),)*
        }

        impl $name {
            /// Does what was asked for.
            $vis fn run(self) -> anyhow::Result<()> {
                match self {
                    $(Self::$command(args) => args.run(),)*
                }
            }
        }
    };
}
use commands;

commands! {
    /// What the program can do.
    enum Command {
        /// Run an experiment; without arguments, FedProj on the embedded digits
        Run(run::RunArgs),
        /// Reproduce a study of the paper, with tables and figures
        #[command(subcommand)]
        Reproduce(reproduce::Reproduce),
        /// Compare finished runs: mean ± standard deviation over seeds, paired differences
        Compare(compare::CompareArgs),
        /// Write a report of finished runs: tables, curves, partition, costs, differences from the paper
        Report(report::ReportArgs),
        /// Write stored runs in the formats of other programs
        #[command(subcommand)]
        Export(export::Export),
        /// Show how far the runs of a sweep are, and who makes them
        Status(status::StatusArgs),
        /// Follow a run in a browser while it is made
        Watch(watch::WatchArgs),
        /// Repeat a stored run and compare it bit for bit
        Verify(verify::VerifyArgs),
        /// Run a federation's server
        Serve(federation::serve::Serve),
        /// Run a node, which trains on its own data for a server
        Join(federation::join::Join),
        /// Exchange a one-time token for a node's certificate
        Enrol(federation::join::Enrol),
        /// List, invite and revoke a federation's nodes
        Nodes(federation::nodes::NodesArgs),
        /// Check a federation's journal; show it, or export it with a signature
        Audit(federation::audit::Audit),
        /// Return a stopped federation to an earlier round, after a member has spoiled the model
        Rollback(federation::rollback::Rollback),
        /// Run a whole federation on this machine and compare it with the simulator
        Demo(federation::demo::Demo),
        /// Write a commented configuration file
        New(new::New),
        /// Show the effective configuration of a run, and explain its keys
        #[command(subcommand)]
        Config(config::ConfigCommand),
        /// Show which client holds which data, before a run
        Partition(partition::Partition),
        /// Plan a run's differential privacy: how much noise an ε takes
        #[command(subcommand)]
        Privacy(privacy::PrivacyCommand),
        /// List data sets: which are here, and how to get the others; `data get` unpacks downloads
        Data(data::Data),
        /// List methods by what they need, with what a client keeps, receives and sends
        Methods(methods::Methods),
        /// List networks
        Models(models::Models),
        /// Report what this machine has: instruction set, memory, GPUs and their libraries, data sets
        Doctor(doctor::Doctor),
        /// Print what the program was built from, as a software bill of materials (CycloneDX)
        Sbom(sbom::Sbom),
        /// Test a GPU: compare layers, losses, networks and methods with the CPU and with golden numbers
        Selftest(selftest::SelfTest),
        /// Measure the engine's speed
        #[command(subcommand)]
        Bench(bench::Bench),
    }
}

/// As `println!`, but ends quietly where the reader has gone (`fedproj methods | head -1`).
macro_rules! say {
    ($($text:tt)*) => {
        crate::print_line(format_args!($($text)*))
    };
}
use say;

/// As `eprintln!`, but where the reader has gone (`fedproj run 2>&1 | head -1`) the work goes on.
macro_rules! tell {
    ($($text:tt)*) => {
        crate::tell_line(format_args!($($text)*))
    };
}
use tell;

fn tell_line(text: std::fmt::Arguments<'_>) {
    use std::io::Write;
    // A message that nobody reads is no reason to lose a round.
    let _ = writeln!(std::io::stderr(), "{text}");
}

fn print_line(text: std::fmt::Arguments<'_>) {
    use std::io::Write;
    if let Err(error) = writeln!(std::io::stdout(), "{text}") {
        std::process::exit(i32::from(error.kind() != std::io::ErrorKind::BrokenPipe));
    }
}

/// Prints a result: one line of JSON, or what `text` prints.
fn give(json: bool, result: &impl serde::Serialize, text: impl FnOnce()) -> anyhow::Result<()> {
    if json {
        say!("{}", serde_json::to_string(result)?);
    } else {
        text();
    }
    Ok(())
}

/// Runs the command; its exit code. `args` begin with the program's name. `host` are the words that start the program if it
/// is no binary of its own, such as `python -m fedproj`.
pub fn main(args: Vec<OsString>, host: Vec<OsString>) -> u8 {
    let cli = match Cli::try_parse_from(&args) {
        Ok(cli) => cli,
        Err(error) => {
            // Nothing can be done if the terminal is gone.
            let _ = error.print();
            if let Some(setting) = setting_of(&error) {
                tell!("\nhint: settings have no dashes: {setting}=…");
            }
            return error.exit_code() as u8;
        }
    };
    program::remember(args, host);
    match cli.command.run() {
        Ok(()) => 0,
        Err(error) if error.is::<fedproj_study::Stopped>() => {
            tell!("{error}\nto resume: {}", interrupt::resume());
            interrupt::EXIT_CODE
        }
        Err(error) => {
            tell!("error: {}", message(&error));
            exit_code(&error)
        }
    }
}

/// The setting that an unknown flag probably means: `--rounds` is `federation.rounds`.
fn setting_of(error: &clap::Error) -> Option<String> {
    use clap::error::{ContextKind, ContextValue, ErrorKind};
    let flag = match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(flag)) if error.kind() == ErrorKind::UnknownArgument => flag,
        _ => return None,
    };
    if !error.to_string().contains("KEY=VALUE") {
        return None;
    }
    let word = flag.strip_prefix("--")?.split('=').next()?.replace('-', "_");
    fedproj_core::Key::meant_by(&word)
}

/// The error with its causes, each once: some of our errors name their cause themselves.
pub fn message(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

/// 2 where what was asked for is wrong, 1 where the run failed.
pub fn exit_code(error: &anyhow::Error) -> u8 {
    let is_usage = (error.downcast_ref().map(fedproj_net::Error::is_usage))
        .or_else(|| error.downcast_ref().map(fedproj_core::Error::is_usage))
        .or_else(|| error.downcast_ref().map(fedproj_data::Error::is_usage))
        .or_else(|| error.downcast_ref().map(fedproj_nn::Error::is_usage));
    if is_usage == Some(true) { 2 } else { 1 }
}
