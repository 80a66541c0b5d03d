//! All methods, and the table that names them. Each has one file; FedProj and FedGKT have a folder beside theirs.
//!
//! CONTRIBUTING.md lists what a new one needs: its file, its name and its line below, a golden trace, a page.
//! The configuration's tables, `fedproj methods` and error messages come from the table.

// Plain `mod` lines: rustfmt does not find modules that a macro declares.
mod afedpd;
mod ditto;
mod external;
mod fedacg;
mod fedadam;
mod fedavg;
mod fedavgm;
mod fedbn;
mod feddc;
mod feddf;
mod feddyn;
mod fedet;
mod fedgems;
mod fedgen;
mod fedgkt;
mod fedkd;
mod fedlc;
mod fedmd;
mod fednova;
mod fedntd;
mod fedproj;
mod fedprox;
mod fedrcl;
mod fedsam;
mod fedspeed;
mod moon;
mod pfedhn;
mod scaffold;

pub use external::{External, Maker};

use crate::error::{Error, Result};
use crate::method::Method;
use fedproj_data::spelling::did_you_mean;
use serde::{Deserialize, Serialize};

/// One line per method: the name that users type, its type and its description.
macro_rules! registry {
    ($($name:ident: $type:ident, $title:literal, $about:literal;)*) => {
        $(pub use $name::$type;)*

        /// The methods' files, for the reference of their settings.
        pub(crate) const SOURCES: &[&str] = &[$(include_str!(concat!(stringify!($name), ".rs")),)*];

        /// The selected method, and the hyper-parameters of each.
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct MethodConfig {
            /// Which method runs.
            pub name: String,
            $(#[doc = $about] pub $name: $type,)*
            /// The selected method, if it comes from outside this program.
            #[serde(skip_serializing_if = "Option::is_none")]
            pub external: Option<External>,
        }

        impl Default for MethodConfig {
            fn default() -> Self {
                Self { name: "fedproj".into(), $($name: $type::default(),)* external: None }
            }
        }

        /// Name and description of every method.
        pub const CATALOGUE: &[(&str, &str)] = &[$((stringify!($name), $about),)*];

        /// A method's name as papers write it; an unknown name as it is.
        pub fn title(name: &str) -> &str {
            match name {
                $(stringify!($name) => $title,)*
                name => name,
            }
        }

        impl MethodConfig {
            /// The selected method.
            ///
            /// # Errors
            /// If no method has that name, or it comes from outside and is not here.
            pub fn build(&self) -> Result<Box<dyn Method>> {
                if let Some(external) = &self.external {
                    return external.build(&self.name);
                }
                match self.name.as_str() {
                    $(stringify!($name) => Ok(Box::new(self.$name.clone())),)*
                    name => Err(unknown(name)),
                }
            }
        }
    };
}

registry! {
    fedavg: FedAvg, "FedAvg", "weighted averaging of local models (McMahan et al. 2017)";
    fedprox: FedProx, "FedProx", "local steps held to the global model by a proximal term (Li et al. 2020)";
    fednova: FedNova, "FedNova", "averaging of updates normalised by their local steps (Wang et al. 2020)";
    feddyn: FedDyn, "FedDyn", "dynamic regularisation that aligns local optima (Acar et al. 2021)";
    moon: Moon, "MOON", "model-contrastive learning on representations (Li et al. 2021)";
    fedrcl: FedRcl, "FedRCL", "relaxed contrastive learning against collapse (Seo et al. 2024)";
    feddf: FedDf, "FedDF", "ensemble distillation on public data (Lin et al. 2020)";
    fedet: FedEt, "FedET", "variance-weighted consensus with diversity (Cho et al. 2022)";
    fedproj: FedProj, "FedProj", "gradients projected so that nothing global is unlearned (arXiv 2505.20485)";
    scaffold: Scaffold, "SCAFFOLD", "control variates against client drift (Karimireddy et al. 2020)";
    fedavgm: FedAvgM, "FedAvgM", "averaging with server momentum (Hsu et al. 2019)";
    fedadam: FedAdam, "FedAdam", "averaging with Adam on the server (Reddi et al. 2021)";
    fedsam: FedSam, "FedSAM", "local steps along gradients uphill of the weights (Qu et al. 2022)";
    fedspeed: FedSpeed, "FedSpeed", "FedDyn's correction of gradients uphill of the weights (Sun et al. 2023)";
    fedlc: FedLc, "FedLC", "cross-entropy with a larger margin for a client's rarer classes (Zhang et al. 2022)";
    fedntd: FedNtd, "FedNTD", "local distillation of what the global model knows beyond the label (Lee et al. 2022)";
    feddc: FedDc, "FedDC", "FedDyn's correction with SCAFFOLD's control variates (Gao et al. 2022)";
    afedpd: AFedPd, "A-FedPD", "FedDyn whose absent clients' corrections move, too (Sun et al. 2024)";
    ditto: Ditto, "Ditto", "a model of its own per client, held to the global one (Li et al. 2021)";
    fedacg: FedAcg, "FedACG", "clients that start ahead along the server's momentum (Kim et al. 2024)";
    fedmd: FedMd, "FedMD", "models of the clients' own choice that learn from the mean of all scores (Li & Wang 2019)";
    fedbn: FedBn, "FedBN", "averaging of all but batch-norm, which stays with each client (Li et al. 2021)";
    fedkd: FedKd, "FedKD", "distillation of quantised, noised logits on cross-domain data (Gong et al. 2022)";
    fedgems: FedGems, "FedGEMS", "selective distillation both ways on a labelled public set (Cheng et al. 2021)";
    pfedhn: PFedHn, "pFedHN", "a hypernetwork on the server makes each client's weights (Shamsian et al. 2021)";
    fedgen: FedGen, "FedGen", "a generator of features that the server learns from the clients (Zhu et al. 2021)";
    fedgkt: FedGkt, "FedGKT", "clients with the first layers, taught by a server with the rest (He et al. 2020)";
}

impl MethodConfig {
    /// Writes shares of the rounds as rounds, in a run of `n_rounds`. FedProj's warm-up is the only one.
    pub(crate) fn write_rounds(&mut self, n_rounds: u32) {
        if self.name == "fedproj" {
            let projection = &mut self.fedproj.projection;
            projection.warmup = projection.warmup_rounds(n_rounds);
        }
    }
}

fn unknown(name: &str) -> Error {
    let names: Vec<&str> = CATALOGUE.iter().map(|(name, _)| *name).collect();
    let hint = if name.contains(',') {
        format!("\nhint: several methods are a sweep: sweep.method.name={name}")
    } else {
        did_you_mean(name, names.iter().copied())
    };
    Error::config(format!("unknown method `{name}`; known methods: {}{hint}", names.join(", ")))
}
