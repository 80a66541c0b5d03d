//! Secure aggregation: the server learns the sum of the nodes' vectors and no single one of them. Nothing here knows
//! sockets, files or clocks.
//!
//! It is SecAgg+ (Bell et al. 2020, doi:10.1145/3372297.3417885): the protocol of Bonawitz et al. 2017
//! (doi:10.1145/3133956.3133982) on a graph of neighbours, which is complete below [`COMPLETE_BELOW`] nodes. A node sends
//! five messages:
//!
//! 1. Keys ([`Party::member`]): two public keys of X25519, signed with the key of its certificate. The server makes the
//!    [`Roster`] of them.
//! 2. Shares ([`Party::shares`]): Shamir shares of the secret behind its masks with others and of the seed of its own
//!    mask, encrypted for each neighbour. The hash of the roster goes into every key, so nodes with different rosters
//!    cannot read each other.
//! 3. Its vector ([`Party::mask`]) under its own mask and one mask per neighbour, which that neighbour takes away.
//! 4. A signature over two lists ([`Party::sign`]): who has shared, and whose vectors have arrived.
//! 5. Shares of others' secrets ([`Party::reveal`]): of the own mask of those whose vectors have arrived, of the mask key
//!    of those who dropped out. Never both: either alone shows nothing of a vector. So a node reveals only if a threshold of
//!    its neighbourhood has signed the lists that it was given itself (Bonawitz et al., Fig. 4, round 3).
//!
//! The server rebuilds these secrets, takes the masks away (`Unmasking::unmask`) and has the sum. Each rebuilt secret is
//! compared with what its node has published, and a check word shows whether all masks have cancelled, so a wrong share, key
//! or mask never gives a wrong sum.
//!
//! All of a node's messages follow from one random seed and from what it has received. So a node that was killed sends the
//! same ones again.

mod layout;
mod masks;
mod party;
mod roster;
mod shamir;
#[cfg(test)]
mod tests;
mod unmask;

pub use layout::{MaskedLayout, Sums};
pub use party::{Party, SEALED_BYTES, are_usable};
pub use roster::{COMPLETE_BELOW, Roster, is_signed, shared_for};
pub use unmask::{Failed, Unmasking, is_enough};
