//! How long rounds wait for clients that let deadlines pass.
//!
//! A node that heartbeats and never answers would cost every round its whole deadline. So a client that missed a deadline
//! is still asked, but rounds close without it: for two rounds, then four, eight, and so on. A slow node gets a whole
//! deadline again and again, ever less often; a contribution in time halves its absence.

use std::collections::BTreeMap;

/// The clients that missed deadlines.
#[derive(Debug, Default)]
pub(crate) struct Patience {
    /// Missed deadlines, less contributions since; and the round that waits for the client again.
    missed: BTreeMap<u32, (u32, u32)>,
}

impl Patience {
    /// Whether a round waits for a client.
    pub fn waits_for(&self, client: u32, round: u32) -> bool {
        self.missed.get(&client).is_none_or(|(_, again)| round >= *again)
    }

    /// A round reached its deadline without this client.
    pub fn missed(&mut self, client: u32, round: u32) {
        let (n, again) = self.missed.entry(client).or_default();
        *n += 1;
        *again = round.saturating_add(2u32.saturating_pow(*n)).saturating_add(1);
    }

    /// A client has contributed in time.
    pub fn kept(&mut self, client: u32) {
        if let Some((n, again)) = self.missed.get_mut(&client) {
            (*n, *again) = (n.saturating_sub(1), 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_that_never_answers_costs_few_deadlines() {
        let mut patience = Patience::default();
        let mut waited = Vec::new();
        for round in 0..100 {
            if patience.waits_for(7, round) {
                waited.push(round);
                patience.missed(7, round);
            }
            assert!(patience.waits_for(8, round));
        }
        assert_eq!(waited, [0, 3, 8, 17, 34, 67]);
        patience.kept(7);
        assert!(patience.waits_for(7, 100));
    }
}
