//! FedAvg. McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017,
//! arXiv:1602.05629.
//!
//! Client  w ← w − η ∇F_k(w)
//! Server  wᵗ⁺¹ ← Σ_k (n_k / n) w_k
//! State kept by a client: none.   Departures from the paper: any local optimiser; buffers are averaged too.

use crate::method::Method;
use serde::{Deserialize, Serialize};

/// FedAvg has no hyper-parameters of its own: it is the default of every hook of [`Method`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FedAvg {}

impl Method for FedAvg {}
