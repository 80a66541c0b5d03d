//! `fedproj verify`: repeats a stored run and compares everything that it publishes.

use crate::device::DeviceArgs;
use crate::{say, tell};
use anyhow::{Result, bail};
use clap::Args;
use fedproj_core::{Error, VerifyPart};
use std::path::PathBuf;

/// Arguments of `verify`.
#[derive(Args)]
pub struct VerifyArgs {
    /// Run directory
    #[arg(value_name = "RUN")]
    run: PathBuf,
    /// Start from the oldest checkpoint instead of the first round
    #[arg(long)]
    from_checkpoint: bool,
    /// Repeat only N rounds
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    rounds: Option<u32>,
    /// Data directory [default: $FEDPROJ_DATA, then ./data]
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
    #[command(flatten)]
    device: DeviceArgs,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl VerifyArgs {
    /// Verifies and prints.
    pub fn run(self) -> Result<()> {
        let data_dir = crate::data::data_dir(self.data_dir)?;
        let runs = fedproj_study::find_runs(std::slice::from_ref(&self.run))?;
        let [run] = &runs[..] else {
            bail!(Error::config(format!(
                "`{}` holds {} runs\nhint: verify one at a time, such as `{}`",
                self.run.display(),
                runs.len(),
                runs[0].display()
            )));
        };
        let bar = indicatif::ProgressBar::new_spinner();
        let verified = fedproj_core::verify(
            run,
            data_dir.as_deref(),
            self.device.open()?,
            VerifyPart { from_checkpoint: self.from_checkpoint, rounds: self.rounds },
            &|round| bar.set_message(format!("round {round} is repeated")),
        )?;
        bar.finish_and_clear();
        if self.json {
            say!("{}", serde_json::to_string(&verified)?);
        } else {
            verified.notes.iter().for_each(|note| tell!("note: {note}"));
            if verified.n_rounds == 0 {
                say!("no round was repeated; {} agree", verified.compared.join(", "));
                return Ok(());
            }
            say!(
                "{} rounds from round {} on are identical, bit for bit ({}; times are not compared)",
                verified.n_rounds,
                verified.from,
                verified.compared.join(", ")
            );
        }
        Ok(())
    }
}
