//! `fedproj audit`: what happened in a federation, for its owner and for others.

use crate::{give, say, tell};
use anyhow::{Context, Result, bail};
use clap::Args;
use fedproj_net::Error;
use fedproj_net::server::journal::{Entry, Journal};
use fedproj_net::server::{Statement, check_export, export};
use std::fs::File;
use std::io::{BufReader, BufWriter};
use std::path::{Path, PathBuf};

/// Arguments of `audit`.
#[derive(Args)]
pub struct Audit {
    /// Federation folder
    #[arg(value_name = "DIR", default_value = "federation")]
    dir: PathBuf,
    /// Write the entries to a file, signed with the authority's key
    #[arg(long, value_name = "FILE")]
    export: Option<PathBuf>,
    /// Check a file that `--export` has written
    #[arg(long, value_name = "FILE", conflicts_with = "export")]
    check: Option<PathBuf>,
    /// Certificate of the authority that must have signed it [default: ca.pem of the federation folder]
    #[arg(long, value_name = "FILE", requires = "check")]
    authority: Option<PathBuf>,
    /// Print one JSON object on the last line, instead of the entries
    #[arg(long)]
    json: bool,
}

impl Audit {
    /// Checks the hash chain and shows its entries up to the first broken one, or exports them.
    pub fn run(self) -> Result<()> {
        if let Some(file) = &self.check {
            return self.check(file);
        }
        if let Some(file) = &self.export {
            return self.export(file);
        }
        let print = &mut |entry: Entry| {
            if !self.json {
                say!("{}", serde_json::to_string(&entry).unwrap_or_default());
            }
            Ok(())
        };
        if !self.dir.is_dir() {
            return Err(self.no_journal().into());
        }
        let tail = Journal::read(&self.dir, print)?.ok_or_else(|| self.no_journal())?;
        give(self.json, &serde_json::json!({ "entries": tail.n_entries, "hash": tail.hash }), || {
            tell!("{} entries, unbroken; hash of the last: {}", tail.n_entries, tail.hash);
        })
    }

    fn no_journal(&self) -> Error {
        Error::Config(format!(
            "`{}` has no journal\nhint: name the federation's folder: fedproj audit DIR",
            self.dir.display()
        ))
    }

    fn export(&self, file: &Path) -> Result<()> {
        // A look first: `export` would create an authority where there is none.
        if Journal::read(&self.dir, &mut |_| Ok(()))?.is_none() {
            bail!(self.no_journal());
        }
        let out = File::create(file).with_context(|| format!("cannot write `{}`", file.display()))?;
        let statement = export(&self.dir, &mut BufWriter::new(out))?.ok_or_else(|| self.no_journal())?;
        self.tell(&statement, "signed with the authority's key")
    }

    fn check(&self, file: &Path) -> Result<()> {
        let authority = self.authority.clone().unwrap_or_else(|| self.dir.join("ca.pem"));
        let certificate = std::fs::read_to_string(&authority);
        let certificate = certificate.with_context(|| format!("cannot read `{}`", authority.display()))?;
        let export = File::open(file).with_context(|| format!("cannot read `{}`", file.display()))?;
        let statement = check_export(&certificate, &mut BufReader::new(export))?;
        self.tell(&statement, "unbroken and signed by this federation")
    }

    fn tell(&self, statement: &Statement, state: &str) -> Result<()> {
        give(self.json, statement, || {
            let Statement { entries, time, operator, .. } = statement;
            say!("{entries} entries, exported {time} by {operator}, {state}");
        })
    }
}
