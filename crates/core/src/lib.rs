//! Federated learning on top of [`fedproj_nn`] and [`fedproj_data`]: methods, the round loop, run directories.
//!
//! Start with [`Method`], then [`methods::FedProj`]. [`Simulation`] is the round loop, [`Run`] a run directory. Methods
//! know nothing of sockets, files or clocks, so a simulator and a server run the same code.

mod augment;
mod authors;
mod averages;
mod bytes;
mod checkpoint;
mod cone;
mod config;
mod contributions;
mod control;
mod coordinator;
mod correction;
mod device;
mod distill;
mod eigen;
mod error;
mod evaluate;
mod exit;
mod experiment;
mod files;
pub mod fixed;
mod fusion;
mod generator;
mod gpu;
mod groups;
mod halves;
mod loading;
mod lookahead;
mod machine;
mod memory;
mod method;
pub mod methods;
mod needs;
mod own;
mod partial;
mod plan;
mod presets;
pub mod privacy;
mod projection;
mod pull;
mod record;
mod robust;
mod run;
mod simulate;
mod step;
mod subspace;
mod trainer;

pub use authors::Authors;
pub use averages::Averages;
pub use bytes::{client_state_from_bytes, client_state_to_bytes};
pub use config::{
    Config, DataConfig, Draw, FederationConfig, Key, LocalConfig, ModelConfig, OptimizerConfig, OptimizerKind,
    ScheduleConfig, SumKind, WHOLE_TABLES, parse_value, read_value, split_pair,
};
pub use contributions::{ClientSummary, Contributions, Measured, Part};
pub use coordinator::{Coordinator, Opening, model_hash};
pub use correction::Correction;
pub use device::Device;
pub use distill::{Anchor, Distill, DistillTargets, EnsembleWeights, StudentNorm};
pub use eigen::eigen;
pub use error::{Error, Result};
pub use evaluate::{Evaluator, Model, Outputs, Score};
pub use exit::{EXIT, check_exit, with_exit};
pub use experiment::{Experiment, draw_cohort};
pub use fedproj_data::spelling::did_you_mean;
pub use fedproj_nn::Loss;
pub use files::{read_if_exists, remove_if_exists, write_atomically, write_private};
pub use fusion::{Fusion, GlobalModel, ServerState};
pub use generator::{GENERATOR, GeneratorConfig};
pub use groups::ClientGroup;
pub use halves::{LocalTraining, Stop};
pub use machine::machine_memory;
pub use memory::{MemoryConfig, MemoryTarget, Resample, Round0, Targets};
pub use method::{LOGITS, Method};
pub use needs::Needs;
pub use partial::{Mean, Partial};
pub use presets::Preset;
pub use privacy::{NoiseFrom, PrivacyConfig, PrivacySpent};
pub use projection::{DropoutUnit, Projection, ProjectionMode, Reference, Rule, Space};
pub use pull::{Pull, hold_back};
pub use record::{RoundRecord, Seconds, Summary};
pub use robust::{RobustConfig, RobustRule};
pub use run::{Extended, Manifest, Run, RunDir, StoredRun, Verified, VerifyPart, check_rollback, rollback, verify};
pub use simulate::{Progress, Simulation};
pub use step::{At, Batch, Finish, Place, ProjectionRule, Scope, Step, Term, Vector};
pub use trainer::{ClientResult, ClientState, ClientStates, Download, LocalStats};
