//! The `fedproj` command: arguments, progress and exit codes. Results go to stdout, everything else to stderr.

mod bench;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// Federated learning that does not forget: simulator, federation and reproduction of FedProj.
#[derive(Parser)]
#[command(name = "fedproj", version, propagate_version = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Measures the engine's speed
    #[command(subcommand)]
    Bench(bench::Bench),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Bench(bench) => bench.run(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
