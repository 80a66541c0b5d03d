//! Many runs: which to make, how to make them, and what they show.
//!
//! [`expand`] turns a configuration with lists into runs, and [`Driver`] makes them. [`Study`] declares the paper's tables and
//! ablations, [`pilot`] is its study on Iris. [`load`] reads stored runs, [`labels`] names
//! their arms, [`compare()`] and [`write_report`] analyse them.
//!
//! Nothing here parses a command line, draws a progress bar or prints.

mod arms;
mod clients;
mod compare;
mod drive;
mod networks;
mod page;
mod paper;
pub mod pilot;
mod progress;
mod queue;
mod runs;
mod setups;
mod studies;
mod study;
mod sweep;
mod tensorboard;

pub use arms::{ComparedGroup, compare_runs, labels};
pub use clients::ClientSpread;
pub use compare::{ComparedRow, Comparison, Difference, compare, mean, standard_deviation};
pub use drive::{Driver, Job, Stopped, Watch};
pub use networks::NetworkAccuracy;
pub use page::{ArmResult, GroupResult, ReportOptions, Written, accuracy_curves, write_report};
pub use progress::{RunProgress, RunState, progress_in, progress_of};
pub use runs::{Loaded, find_runs, load};
pub use setups::{PRESETS, SETUPS, Setup};
pub use studies::{LEADING, PROJECTION_DROPOUT, TABLE1, TABLE2, WEIGHT_DIVERGENCE};
pub use study::{BetaTable, Prepared, Study, StudyOptions, StudyResult, Variant};
pub use sweep::{SweepRun, expand};
pub use tensorboard::export_tensorboard;
