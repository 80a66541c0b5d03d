//! `fedproj enrol` and `fedproj join`: the node's side.

use super::{Logging, block_on};
use crate::{say, tell};
use anyhow::{Context, Result, bail};
use clap::Args;
use fedproj_data::SourceConfig;
use fedproj_net::{Error, Node, NodeData, Policy, Setup, Vault};
use std::io::IsTerminal;
use std::path::PathBuf;

/// Arguments of `enrol`.
#[derive(Args)]
pub struct Enrol {
    /// Enrolment address of the server, https://host:port
    server: String,
    /// Tokens stood here once; other users of the machine can read a process's arguments
    #[arg(hide = true)]
    token: Option<String>,
    /// File with the token of `fedproj nodes invite` [default: $FEDPROJ_TOKEN, then standard input]
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Node folder
    #[arg(long, value_name = "DIR", default_value = "node")]
    node: PathBuf,
    #[command(flatten)]
    logging: Logging,
}

impl Enrol {
    /// Enrols.
    pub fn run(self) -> Result<()> {
        let token = self.read_token()?;
        self.logging.start();
        let name = block_on(async { Ok(fedproj_net::enrol(&self.node, &self.server, &token).await?) })?;
        say!("enrolled as {name}; its key and certificate are in {}", self.node.display());
        Ok(())
    }

    fn read_token(&self) -> Result<String> {
        if self.token.is_some() {
            bail!(Error::Config(
                "a token on the command line is visible to other users of this machine\n\
                 hint: give it in a file (--token-file), in $FEDPROJ_TOKEN, or on standard input"
                    .into()
            ));
        }
        if let Some(path) = &self.token_file {
            return std::fs::read_to_string(path).with_context(|| format!("cannot read `{}`", path.display()));
        }
        if let Ok(token) = std::env::var("FEDPROJ_TOKEN") {
            return Ok(token);
        }
        if std::io::stdin().is_terminal() {
            tell!("paste the token and press Enter:");
        }
        let mut token = String::new();
        std::io::stdin().read_line(&mut token)?;
        Ok(token)
    }
}

/// Arguments of `join`.
#[derive(Args)]
pub struct Join {
    /// Address of the server, https://host:port
    server: String,
    /// Data of the node: a name such as digits, a table such as '{ name = "csv", path = "mine.csv" }', or `run` for its part
    /// of the run's data set
    #[arg(long)]
    data: String,
    /// Data directory [default: $FEDPROJ_DATA, then ./data]
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// Node folder: key, certificate, policy.toml, client state
    #[arg(long, value_name = "DIR", default_value = "node")]
    node: PathBuf,
    /// File with a key of 32 random bytes: client state, tasks and contributions are encrypted with it on disk
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,
    /// Exit when the run is over, instead of waiting for the next
    #[arg(long)]
    until_done: bool,
    /// Exit when standard input closes, so that the node ends with its parent process
    #[arg(long)]
    with_stdin: bool,
    #[command(flatten)]
    logging: Logging,
}

impl Join {
    /// Works for the server.
    pub fn run(self) -> Result<()> {
        let setup = Setup {
            data: parse_data(&self.data)?,
            data_dir: crate::data::data_dir(self.data_dir)?,
            policy: Policy::read(&self.node)?,
        };
        self.logging.start();
        if self.with_stdin {
            std::thread::spawn(|| {
                let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
                std::process::exit(1);
            });
        }
        let node = Node::open(&self.node, &self.server, setup)?.sealed(Vault::open(self.key_file.as_deref())?)?;
        let hash = block_on(async { Ok(node.run(self.until_done).await?) })?;
        say!("the run is over; model {hash}");
        Ok(())
    }
}

fn parse_data(text: &str) -> Result<NodeData> {
    if text == "run" {
        return Ok(NodeData::OfRun);
    }
    if !text.trim_start().starts_with('{') {
        return Ok(NodeData::Own(SourceConfig::named(text).into()));
    }
    let parsed = toml::from_str::<toml::Table>(&format!("data = {text}")).and_then(|mut table| {
        let value = table.remove("data").unwrap_or(toml::Value::Boolean(false));
        value.try_into::<SourceConfig>()
    });
    match parsed {
        Ok(source) => Ok(NodeData::Own(Box::new(source))),
        Err(e) => bail!(Error::Config(format!("--data {text}: {}", e.to_string().trim_end()))),
    }
}
