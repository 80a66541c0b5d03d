//! The `[server]` table of a configuration file: what the server's owner decides beside the run itself.

use super::summing::COHORT_MIN;
use crate::error::{Error, Result};
use fedproj_core::privacy::accountant::Sampling;
use fedproj_core::{Config, NoiseFrom};
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// The `[server]` table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ServerConfig {
    /// Where nodes connect. The default is loopback: a server is public only on request.
    pub listen: SocketAddr,
    /// Host names and addresses that nodes use for the server; its certificate contains them.
    pub names: Vec<String>,
    /// Address where strangers with a token can enrol. Unset: nobody can.
    pub enrol: Option<SocketAddr>,
    /// Address of the status page and the metrics, in plain HTTP. Unset: there are none.
    pub status: Option<SocketAddr>,
    /// Allows a status page on an address that other machines can reach.
    pub status_public: bool,
    /// Share of extra clients to ask: with 0.3 and 10 needed clients, 13 are asked and the first 10 count.
    pub over_selection: f64,
    /// Min share of the needed contributions that closes a round.
    pub quorum: f64,
    /// Seconds after which a round with a quorum closes, even if clients still train.
    pub deadline_s: f64,
    /// Seconds without a sign of life after which the server no longer waits for a node.
    pub lost_after_s: f64,
    /// Which side evaluates the clients' models on the public set.
    pub ensemble: Ensemble,
    /// Max norm ‖θ_k − θ_g‖ of an update; 0 is no limit.
    pub norm_max: f64,
    /// Max samples that a node may claim: they are its weight in the average.
    pub samples_max: u64,
    /// Max connections at a time.
    pub connections_max: usize,
    /// Max requests per node and second, on average.
    pub requests_per_s: f64,
    /// Checkpoints kept, min 2: the last rounds that `fedproj rollback` can return to.
    pub checkpoints: usize,
    /// Days that a node's certificate is valid.
    pub certificate_days: i64,
    /// Secure aggregation: the server learns the sum of the nodes' contributions, and no single one. It needs
    /// `federation.sum = "fixed"` and a method that fuses sums.
    pub secure: bool,
    /// Share of a roster, above 0.5 and at most 1, that must stay until the end of a secure sum. Nodes decline less than the
    /// `threshold_min` of their policy, by default two thirds.
    pub secure_threshold: f64,
    /// File with a key of 32 random bytes. What nodes send and fetch is encrypted with it on the server's disk.
    pub key_file: Option<PathBuf>,
}

/// Which side evaluates the clients' models on the public set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ensemble {
    /// The server, from their weights.
    Server,
    /// Each client evaluates its own; the logits travel beside the weights.
    Clients,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 7443)),
            names: vec!["localhost".into(), "127.0.0.1".into()],
            enrol: None,
            status: None,
            status_public: false,
            over_selection: 0.0,
            // Half of the clients: one member that declines must not stop the others.
            quorum: 0.5,
            deadline_s: 3600.0,
            lost_after_s: 300.0,
            ensemble: Ensemble::Server,
            // ResNet-18 has 11 million weights; an update of 0.01 each has norm 33.
            norm_max: 1e4,
            samples_max: 10_000_000,
            connections_max: 4096,
            requests_per_s: 100.0,
            checkpoints: 10,
            certificate_days: 365,
            secure: false,
            // Two thirds: fewer than a third of the nodes may drop out, and fewer than a third may collude.
            secure_threshold: 2.0 / 3.0,
            key_file: None,
        }
    }
}

impl ServerConfig {
    /// Every key of the table, for the reference.
    ///
    /// # Errors
    /// Never for the defaults of this type.
    pub fn keys() -> Result<Vec<fedproj_core::Key>> {
        let defaults = toml::Value::try_from(Self::default())
            .map_err(|e| fedproj_core::Error::Internal { what: "writing [server]", problem: e.to_string() })?;
        Ok(fedproj_core::Key::all_of(&[include_str!("config.rs")], "ServerConfig", "server", &defaults))
    }

    /// Removes the `[server]` table from a configuration file, and `server.key=value` from its overrides. The rest is the
    /// run's.
    ///
    /// # Errors
    /// If a key is unknown or a value is out of range.
    pub fn take(file: &mut toml::Table, overrides: &mut Vec<String>) -> Result<Self> {
        let mut table = match file.remove("server") {
            None => toml::Table::new(),
            Some(toml::Value::Table(table)) => table,
            Some(other) => {
                return Err(Error::config(format!(
                    "server = {other}: must be a table with keys such as `server.listen`"
                )));
            }
        };
        for pair in overrides.extract_if(.., |pair| pair.starts_with("server.")) {
            let (key, text) = fedproj_core::split_pair(&pair)?;
            table.insert(key["server.".len()..].into(), fedproj_core::parse_value(text));
        }
        let config: Self = fedproj_core::read_value(&toml::Value::Table(table), "server", &Self::keys()?)?;
        config.check()?;
        Ok(config)
    }

    /// Min clients in a secure sum. Under privacy each adds its share of the noise for this number, so fewer give no sum.
    pub(super) fn fewest_in_sum(&self, config: &Config, n_clients: usize) -> usize {
        let cohort = config.federation.cohort(n_clients) as f64;
        let with_noise =
            if config.privacy.is_by_nodes() { (self.secure_threshold * cohort).ceil() as usize } else { 0 };
        with_noise.max(COHORT_MIN)
    }

    /// Min contributions that close a round that needs `needed`.
    pub fn fewest_in_round(&self, config: &Config, n_clients: usize, needed: usize) -> usize {
        let least = if self.secure { self.fewest_in_sum(config, n_clients).min(needed) } else { 1 };
        ((self.quorum * needed as f64).ceil() as usize).clamp(least, needed)
    }

    /// Checks that the privacy of a run is one that a federation with these settings can keep.
    ///
    /// # Errors
    /// Names the setting and one that would do.
    pub(super) fn check_privacy(&self, config: &Config) -> Result<()> {
        let privacy = &config.privacy;
        if !privacy.is_on() {
            return Ok(());
        }
        let refuse = |problem: &str| Err(Error::config(format!("privacy: {problem}")));
        match (privacy.noise, self.secure) {
            _ if privacy.sampling != Sampling::Public => refuse(
                "a federation's server draws clients from those that are online and draws others in the place of those that \
                 leave, so sampling hides nobody\nhint: privacy.sampling=public",
            ),
            (NoiseFrom::Seeded, _) => refuse(
                "noise from the run's public seed protects nobody\nhint: privacy.noise=system, or privacy.noise=nodes with \
                 server.secure=true",
            ),
            (NoiseFrom::System, true) => refuse(
                "under server.secure the server must not see sums without noise, so nodes add it\nhint: privacy.noise=nodes",
            ),
            (NoiseFrom::Nodes, false) => refuse(
                "a node's share of the noise protects sums, not its own contribution\nhint: server.secure=true, or \
                 privacy.noise=system",
            ),
            (NoiseFrom::System, false) | (NoiseFrom::Nodes, true) => Ok(()),
        }
    }

    /// Checks that all values are in their ranges.
    ///
    /// # Errors
    /// Names the one that is not.
    pub fn check(&self) -> Result<()> {
        let require = |ok: bool, key: &str, value: &dyn std::fmt::Display, expected: &str| {
            fedproj_core::Error::require(ok, &format!("server.{key}"), value, expected).map_err(Error::from)
        };
        require(
            (0.0..=10.0).contains(&self.over_selection),
            "over_selection",
            &self.over_selection,
            "a share, 0 to 10",
        )?;
        require(self.quorum > 0.0 && self.quorum <= 1.0, "quorum", &self.quorum, "above 0 and at most 1")?;
        let positive = "a positive number of seconds";
        require(Duration::try_from_secs_f64(self.deadline_s).is_ok(), "deadline_s", &self.deadline_s, positive)?;
        require(Duration::try_from_secs_f64(self.lost_after_s).is_ok(), "lost_after_s", &self.lost_after_s, positive)?;
        require(self.norm_max >= 0.0, "norm_max", &self.norm_max, "0 (no limit) or positive")?;
        require(self.samples_max > 0, "samples_max", &self.samples_max, "at least 1")?;
        require(self.connections_max > 0, "connections_max", &self.connections_max, "at least 1")?;
        require(self.requests_per_s > 0.0, "requests_per_s", &self.requests_per_s, "positive")?;
        require(self.checkpoints >= 2, "checkpoints", &self.checkpoints, "at least 2")?;
        require((1..=3650).contains(&self.certificate_days), "certificate_days", &self.certificate_days, "1 to 3650")?;
        let threshold = self.secure_threshold;
        let expected = "above 0.5 and at most 1";
        require(threshold > 0.5 && threshold <= 1.0, "secure_threshold", &threshold, expected)?;
        let public = self.status.filter(|a| !a.ip().is_loopback() && !self.status_public);
        match public {
            Some(address) => Err(Error::config(format!(
                "server.status = {address}: other machines can reach it, and it has no password\n\
                 hint: use a loopback address and a tunnel, or set server.status_public = true"
            ))),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(text: &str) -> Result<ServerConfig> {
        ServerConfig::take(&mut toml::from_str(text).unwrap(), &mut Vec::new())
    }

    #[test]
    fn a_server_is_closed_and_on_loopback_by_default() {
        let config = take("").unwrap();
        assert!(config.listen.ip().is_loopback());
        assert_eq!((config.enrol, config.status), (None, None));
        assert!(take("[server]\nstatus = '0.0.0.0:80'").unwrap_err().to_string().contains("status_public"));
        take("[server]\nstatus = '0.0.0.0:80'\nstatus_public = true").unwrap();
    }

    #[test]
    fn overrides_of_the_server_are_taken_and_others_left() {
        let mut pairs: Vec<String> =
            ["server.quorum=0.5", "seed=3", "server.listen=127.0.0.1:0"].map(Into::into).into();
        let mut file = toml::from_str("[server]\nquorum = 0.9\nover_selection = 0.5").unwrap();
        let config = ServerConfig::take(&mut file, &mut pairs).unwrap();
        assert!((config.quorum - 0.5).abs() < 1e-9 && (config.over_selection - 0.5).abs() < 1e-9);
        assert_eq!((config.listen.port(), pairs), (0, vec!["seed=3".to_owned()]));
        let error = ServerConfig::take(&mut toml::Table::new(), &mut vec!["server.secure".into()]).unwrap_err();
        assert_eq!(error.to_string(), "`server.secure` is not of the form key=value");
    }

    #[test]
    fn bad_values_are_named() {
        for (text, told) in [
            ("quorum = 0.0", "server.quorum = 0: must be above 0 and at most 1"),
            ("deadline_s = -1.0", "server.deadline_s = -1"),
            ("quorun = 1", "did you mean `quorum`?"),
            ("listen = 7443", "server.listen = 7443: must be an address with a port, such as \"127.0.0.1:7443\""),
            ("listen = 'here'", "server.listen = \"here\": must be an address with a port"),
            ("quorum = 'half'", "server.quorum = \"half\": must be a number"),
        ] {
            let error = take(&format!("[server]\n{text}")).unwrap_err().to_string();
            assert!(error.contains(told), "{error}");
        }
    }
}
