//! `fedproj serve`: the server's side.

use super::{Logging, block_on};
use crate::device::default_threads;
use crate::settings::Settings;
use crate::{give, say, tell};
use anyhow::Result;
use clap::Args;
use fedproj_net::{ServeSetup, serve};
use std::path::PathBuf;

/// Arguments of `serve`.
#[derive(Args)]
pub struct Serve {
    #[command(flatten)]
    settings: Settings,
    /// Federation folder: authority, nodes, journal, runs
    #[arg(long, value_name = "DIR", default_value = "federation")]
    dir: PathBuf,
    /// Threads that fuse and evaluate
    #[arg(long, value_name = "N", default_value_t = default_threads(), value_parser = clap::value_parser!(u16).range(1..))]
    threads: u16,
    /// Print one JSON object on the last line
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    logging: Logging,
}

impl Serve {
    /// Serves until the run is over.
    pub fn run(self) -> Result<()> {
        let (config, earlier, server) = self.settings.federation()?;
        return_large_blocks()?;
        self.logging.start();
        let path = self.dir.join("addresses.json");
        let setup = ServeSetup {
            dir: self.dir,
            config,
            earlier,
            server,
            data_dir: self.settings.data_dir()?,
            n_threads: usize::from(self.threads),
        };
        let served = block_on(async {
            let mut written = Ok(());
            let served = serve(setup, |addresses, _| {
                tell!("nodes connect to https://{}", addresses.listen);
                if let Some(enrol) = addresses.enrol {
                    tell!("nodes enrol at https://{enrol}");
                }
                if let Some(status) = addresses.status {
                    tell!("status page http://{status}");
                }
                // For scripts: the system may have chosen the port.
                let text = serde_json::to_string(addresses).unwrap_or_default();
                written = fedproj_core::write_atomically(&path, text.as_bytes());
            });
            tokio::select! {
                served = served => {
                    let served = served?;
                    written?;
                    Ok(served)
                }
                _ = tokio::signal::ctrl_c() => Err(fedproj_net::Error::Stopped.into()),
            }
        })?;
        give(self.json, &served, || {
            let summary = &served.summary;
            let epsilon = summary.privacy.as_ref().map_or_else(String::new, |spent| format!("ε = {}, ", spent.shown()));
            let (accuracy, run) = (100.0 * summary.last, served.run.display());
            say!("{}: last accuracy {accuracy:.2} %, {epsilon}{run}", summary.method);
        })
    }
}

/// Restarts the program in the same process, with glibc set to return large blocks to the system at once.
///
/// By default glibc stops doing so once the first model was freed. Then it keeps more and more holes between the small blocks
/// of many connections: we measured 390 MB with 40 MB in use. Only the environment can change this.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn return_large_blocks() -> Result<()> {
    use std::os::unix::process::CommandExt;
    const VARIABLE: &str = "MALLOC_MMAP_THRESHOLD_";
    if std::env::var_os(VARIABLE).is_some() {
        return Ok(());
    }
    let mut again = crate::program::again()?;
    Err(again.args(crate::program::args().iter().skip(1)).env(VARIABLE, "131072").exec().into())
}

#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
#[allow(clippy::unnecessary_wraps, reason = "it can fail on other systems")]
fn return_large_blocks() -> Result<()> {
    Ok(())
}
