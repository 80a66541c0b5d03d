//! Rejected handshakes, for the journal. Strangers cause them, so they are counted and written once per minute: the first
//! at once, those that follow as numbers.

use super::desk::Desk;
use super::journal::Event;
use super::lock;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::sleep;

/// The pause between two writes, and how long a burst is collected before.
const PAUSE: Duration = Duration::from_mins(1);
const BURST: Duration = Duration::from_millis(500);

/// Kinds per write; further ones are counted together.
const KINDS_MAX: usize = 32;

/// Rejected handshakes since the last write: how many, by origin and reason.
#[derive(Debug, Default)]
pub(crate) struct Refusals {
    counts: Mutex<BTreeMap<(String, String), u64>>,
    noted: Notify,
}

impl Refusals {
    pub fn note(&self, origin: IpAddr, reason: &str) {
        let mut counts = lock(&self.counts);
        let kind = (origin.to_string(), reason.chars().filter(|c| !c.is_control()).take(200).collect());
        let kind = if counts.len() < KINDS_MAX || counts.contains_key(&kind) {
            kind
        } else {
            ("others".to_owned(), "various".to_owned())
        };
        *counts.entry(kind).or_default() += 1;
        self.noted.notify_one();
    }

    /// Writes them to the journal for ever.
    pub async fn record(self: Arc<Self>, desk: Arc<Desk>) {
        loop {
            self.noted.notified().await;
            sleep(BURST).await;
            let (counts, desk) = (std::mem::take(&mut *lock(&self.counts)), Arc::clone(&desk));
            let written = tokio::task::spawn_blocking(move || {
                counts
                    .into_iter()
                    .try_for_each(|((from, reason), n)| desk.log(Event::HandshakesRejected { from, reason, n }))
            });
            if let Ok(Err(error)) = written.await {
                tracing::error!(%error, "rejected handshakes are not in the journal");
            }
            sleep(PAUSE).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_from_many_addresses_stays_a_few_lines_and_all_are_counted() {
        let refusals = Refusals::default();
        for n in 0..100_000u32 {
            refusals.note(IpAddr::from(n.to_be_bytes()), "no certificate");
        }
        let counts = lock(&refusals.counts);
        assert_eq!((counts.len(), counts.values().sum::<u64>()), (KINDS_MAX + 1, 100_000));
    }
}
