//! `fedproj nodes`: on the server's machine, with or without a running server.

use crate::{give, say, tell};
use anyhow::Result;
use clap::{Args, Subcommand};
use fedproj_net::identity::operator;
use fedproj_net::server::journal::{Event, Journal};
use fedproj_net::server::{Authority, INVITATION_LASTS, Registry};
use std::path::PathBuf;
use std::time::Duration;

/// Arguments of `nodes`.
#[derive(Args)]
pub struct NodesArgs {
    #[command(subcommand)]
    action: Option<Action>,
    /// Federation folder
    #[arg(long, value_name = "DIR", default_value = "federation", global = true)]
    dir: PathBuf,
    /// Print one JSON object on the last line
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Subcommand)]
enum Action {
    /// Lists nodes and open invitations
    List,
    /// Makes a one-time token for a node
    Invite {
        /// Name of the node
        name: String,
        /// Client of the node [default: the first free one]
        #[arg(long)]
        client: Option<u32>,
        /// Hours until the token expires
        #[arg(long, default_value_t = INVITATION_LASTS.as_secs() / 3600, value_parser = clap::value_parser!(u64).range(1..=8760))]
        hours: u64,
    },
    /// Replaces the federation's authority, while the server is stopped
    RotateCa {
        /// Forget the old authority, once all nodes have renewed their certificates
        #[arg(long)]
        finish: bool,
    },
    /// Revokes a node's certificate
    Revoke {
        /// Name of the node
        name: String,
    },
}

impl NodesArgs {
    /// Lists, invites or revokes.
    pub fn run(self) -> Result<()> {
        // Created here if missing, so that nodes can be invited before the server's first start.
        let authority = Authority::open(&self.dir)?;
        let registry = Registry::open(&self.dir)?;
        match &self.action {
            None | Some(Action::List) => self::list(&registry, self.json)?,
            Some(Action::Invite { name, client, hours }) => {
                let lasts = Duration::from_hours(*hours);
                let (token, invitation) = registry.invite(&authority, name, *client, lasts)?;
                let client = invitation.client;
                self.note(Event::Invited { node: name.clone(), client })?;
                let result = serde_json::json!({ "node": name, "client": client, "token": token.to_string() });
                give(self.json, &result, || {
                    tell!("{name} gets client {client}; the token works once, within {hours} hours:");
                    say!("{token}");
                })?;
            }
            Some(Action::RotateCa { finish }) => {
                let fingerprint = fedproj_net::server::rotate_authority(&self.dir, *finish)?;
                if *finish {
                    say!("the old authority is gone; nodes trust {}", &fingerprint[..16]);
                } else {
                    say!("start the server; its nodes renew their certificates by themselves");
                    tell!("then stop it and run `fedproj nodes rotate-ca --finish`");
                }
            }
            Some(Action::Revoke { name }) => {
                registry.revoke(name)?;
                self.note(Event::Revoked { node: name.clone() })?;
                say!("{name} is revoked; its next request is rejected");
            }
        }
        Ok(())
    }

    /// Enters what an operator did in the journal.
    fn note(&self, event: Event) -> Result<()> {
        Ok(Journal::open(&self.dir, &mut |_| ())?.append_as(Some(operator()), event)?)
    }
}

fn list(registry: &Registry, json: bool) -> Result<()> {
    let (nodes, invitations) = (registry.nodes()?, registry.invitations()?);
    give(json, &serde_json::json!({ "nodes": nodes, "invitations": invitations }), || {
        for node in &nodes {
            let state = match (node.revoked, node.is_expired()) {
                (true, _) => "revoked",
                (_, true) => "expired",
                _ => "enrolled",
            };
            say!("{:<24} client {:<6} {state:<9} certificate {}", node.name, node.client, &node.fingerprint[..16]);
        }
        for invitation in &invitations {
            let state = if invitation.is_expired() { "token expired" } else { "invited" };
            say!("{:<24} client {:<6} {state}", invitation.name, invitation.client);
        }
        if nodes.is_empty() && invitations.is_empty() {
            tell!("no nodes; `fedproj nodes invite NAME` makes a token");
        }
    })
}
