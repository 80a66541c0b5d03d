//! `fedproj methods`: what `method.name` can be.

use crate::say;
use anyhow::Result;
use clap::Args;
use fedproj_core::methods::{CATALOGUE, MethodConfig};

/// Arguments of `methods`.
#[derive(Args)]
pub struct Methods {
    /// Print a JSON array of names
    #[arg(long)]
    json: bool,
}

impl Methods {
    /// Prints the catalogue.
    pub fn run(self) -> Result<()> {
        if self.json {
            let names: Vec<&str> = CATALOGUE.iter().map(|(name, _)| *name).collect();
            say!("{}", serde_json::to_string(&names)?);
            return Ok(());
        }
        for (name, about) in CATALOGUE {
            let config = MethodConfig { name: (*name).into(), ..MethodConfig::default() };
            let public = if config.build()?.needs_public() { "public" } else { "" };
            say!("{name:<10}{public:<8}{about}");
        }
        say!("\n`public`: needs an unlabelled public set (data.public). Choose one with method.name=NAME.");
        Ok(())
    }
}
