//! Data sets, public sets, splits and partitions.
//!
//! A [`Dataset`] holds samples in one buffer and hands out normalised batches. [`load`] reads one by name from the
//! table in [`registry`]: adding a data set is one file under `readers/` and one line there. A [`PartitionConfig`]
//! partitions the samples among clients; [`Holdings`] counts who holds what. [`load_texts`] reads texts, and a [`Tokenizer`]
//! makes a [`Dataset`] of word pieces of them; [`load_with`] does both.
//!
//! This crate knows nothing of models or methods, opens no connection, and draws random numbers only from
//! [`fedproj_rng`] streams. Foreign bytes never make it panic: they end in an [`Error`] that names file and place.
//!
//! ```
//! use fedproj_data::{PartitionConfig, SourceConfig, load};
//!
//! let digits = load(&SourceConfig::named("digits"), None)?.train;
//! let config = PartitionConfig::Dirichlet { beta: 0.3, clients: 10, min_samples: 15 };
//! let partition = config.build(&digits, 0)?;
//! assert_eq!(partition.n_clients(), 10);
//! let mut batch = vec![0.0; 2 * digits.sample_len()];
//! digits.gather(&partition.indices(3)[..2], &mut batch);
//! # Ok::<(), fedproj_data::Error>(())
//! ```

#![cfg_attr(test, expect(clippy::float_cmp, reason = "the tests' numbers are exact"))]

pub mod cache;
pub mod catalogue;
mod dataset;
mod error;
pub mod files;
mod holdings;
mod overlap;
pub mod packages;
pub mod partition;
mod parts;
mod readers;
pub mod registry;
mod sheet;
mod source;
pub mod spelling;
mod split;
mod text;
mod tokens;
mod transform;

pub use dataset::{Dataset, Normalisation, Samples, Shape, gather_rows};
pub use error::{Error, Result};
pub use holdings::{Holdings, holdings_text};
pub use partition::{Partition, PartitionConfig};
pub use readers::procedural::procedural_like;
pub use registry::{load, load_texts, load_with};
pub use sheet::ContactSheet;
pub use source::{Column, ImageLayout, LabelSet, ProceduralSource, SourceConfig, Splits, TextColumns};
pub use split::{SplitConfig, SplitFor, balanced, split};
pub use text::{Text, TextConfig, Texts, Tokenizer};
pub use tokens::{Tokens, WORDS_PER_TEXT};

/// The files that define what a configuration says about data, from which the reference of its keys is made.
pub const CONFIG_SOURCES: &[&str] =
    &[include_str!("partition/config.rs"), include_str!("source.rs"), include_str!("text/tokenizer.rs")];
