//! The `fedproj` command: arguments, progress and exit codes. Results go to stdout, everything else to stderr.

mod bench;
mod compare;
mod data;
mod run;
mod settings;
mod verify;

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
    /// Runs an experiment; without arguments FedProj on the embedded digits set
    Run(run::RunArgs),
    /// Compares finished runs: mean ± deviation over seeds, paired differences
    Compare(compare::CompareArgs),
    /// Runs a recorded run again and compares it bit for bit
    Verify(verify::VerifyArgs),
    /// Measures the engine's speed
    #[command(subcommand)]
    Bench(bench::Bench),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Run(args) => args.run(),
        Command::Compare(args) => args.run(),
        Command::Verify(args) => args.run(),
        Command::Bench(bench) => bench.run(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(exit_code(&error))
        }
    }
}

/// 2 for what the user asked, 1 for what went wrong on the way.
fn exit_code(error: &anyhow::Error) -> u8 {
    let asked = error.chain().any(|cause| {
        matches!(cause.downcast_ref(), Some(fedproj_core::Error::Config(_)))
            || matches!(cause.downcast_ref(), Some(fedproj_nn::Error::UnknownModel { .. }))
    });
    if asked { 2 } else { 1 }
}
