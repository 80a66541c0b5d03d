//! The kernels' sources, which programs they make for a GPU, and how those are compiled and kept.

#![allow(unsafe_code, reason = "calls of CUDA's run-time compiler; the block gives its reason")]

use super::gpu::{Pass, Precision};
use crate::error::{Error, Result};
use cudarc::nvrtc;
use std::ffi::CString;
use std::path::PathBuf;

const PASSES: [(Pass, &str); 3] = [(Pass::Forward, "FORWARD"), (Pass::Input, "INPUT"), (Pass::Weight, "WEIGHT")];
const COMMON: &str = include_str!("kernels/common.cu");
const CONV: &str = include_str!("kernels/conv.cu");
const STEM: &str = include_str!("kernels/stem.cu");
const HOPPER: &str = include_str!("kernels/hopper.cu");
const DENSE: &str = include_str!("kernels/dense.cu");
const REST: [&str; 7] = [
    include_str!("kernels/norm.cu"),
    include_str!("kernels/pool.cu"),
    include_str!("kernels/layers.cu"),
    include_str!("kernels/loss.cu"),
    include_str!("kernels/vector.cu"),
    include_str!("kernels/text.cu"),
    include_str!("kernels/attention.cu"),
];

/// A program of kernels.
pub(super) struct Program {
    pub name: &'static str,
    source: String,
    options: Vec<String>,
    pub kernels: &'static [&'static str],
}

/// The kernels' programs for a compute capability, as far as the compiler knows it.
pub(super) fn programs(precision: Precision, capability: (i32, i32), compiler: (i32, i32)) -> Vec<Program> {
    let architecture = |suffix: &str| format!("--gpu-architecture=sm_{}{}{suffix}", capability.0, capability.1);
    let numbers = precision.name().to_uppercase();
    let conv = |(_, name): (Pass, &'static str)| Program {
        name,
        source: format!("{COMMON}\n{CONV}"),
        options: vec![architecture(""), format!("-DPRECISION={numbers}"), format!("-DCONV_MODE={name}")],
        kernels: super::conv::KERNELS,
    };
    let mut all: Vec<_> = PASSES.into_iter().map(conv).collect();
    let rest = format!("{COMMON}\n{}", REST.join("\n"));
    all.push(Program { name: "REST", source: rest, options: vec![architecture("")], kernels: REST_KERNELS });
    if precision != Precision::Fp32 {
        let source = format!("{COMMON}\n{CONV}\n{STEM}");
        all.push(Program { name: "STEM", source, options: vec![architecture("")], kernels: super::conv::STEM_KERNELS });
    }
    if capability == HOPPER_CAPABILITY && compiler >= HOPPER_COMPILER && precision == Precision::Tf32 {
        let source = format!("{COMMON}\n{HOPPER}\n{DENSE}");
        let kernels = super::hopper::KERNELS;
        all.push(Program { name: "HOPPER", source, options: vec![architecture("a")], kernels });
    }
    all
}

/// The one whose products of warp groups `hopper.cu` uses, and the first compiler that knows them.
const HOPPER_CAPABILITY: (i32, i32) = (9, 0);
const HOPPER_COMPILER: (i32, i32) = (12, 0);

/// The kernels of the program that is alike for all.
const REST_KERNELS: &[&str] = &[
    "reduce_MOMENTS_1",
    "reduce_MOMENTS_4",
    "reduce_GRADIENT_1",
    "reduce_GRADIENT_4",
    "reduce_COLUMNS_1",
    "reduce_COLUMNS_4",
    "batch_norm_statistics",
    "normalise_1",
    "normalise_4",
    "batch_norm_gradients",
    "normalise_backward_1",
    "normalise_backward_4",
    "column_sums",
    "group_norm",
    "group_norm_backward",
    "group_norm_gradients",
    "gather",
    "gather_own",
    "gather_labels",
    "gather_range",
    "advance",
    "pool_1",
    "pool_4",
    "pool_backward_1",
    "pool_backward_4",
    "normalise_pool_1",
    "normalise_pool_4",
    "normalise_pool_backward_1",
    "normalise_pool_backward_4",
    "average_pool",
    "average_pool_backward",
    "activation",
    "activation_backward",
    "mask_negative",
    "add",
    "accumulate",
    "fill_zero",
    "dropout",
    "dropout_backward",
    "cross_entropy",
    "kl_divergence",
    "distance",
    "model_contrast",
    "pool_and_normalise",
    "similarities",
    "relaxed_contrast",
    "relaxed_contrast_gradient",
    "record_loss",
    "axpy",
    "axpy_difference",
    "weighted_sum",
    "dots",
    "projection_factor",
    "count_projected",
    "project",
    "clip_factor",
    "scale",
    "begin_update",
    "update",
    "count_tokens",
    "place_texts",
    "place_tokens",
    "embed",
    "embed_backward_words",
    "embed_backward_positions",
    "embed_backward_types",
    "sum_columns",
    "layer_norm",
    "layer_norm_sums",
    "layer_norm_backward",
    "pool_tokens",
    "pool_tokens_backward",
    "attention_1",
    "attention_4",
    "attention_backward_1",
    "attention_backward_4",
];

impl Program {
    /// The machine code, from the cache of earlier runs or from the compiler.
    pub fn cubin(&self, compiler: (i32, i32)) -> Result<Vec<u8>> {
        let compiler = format!("{}.{}", compiler.0, compiler.1);
        let key = [&self.source, &self.options.join(" "), &compiler].iter().flat_map(|s| s.bytes().chain([0])).fold(
            0xcbf2_9ce4_8422_2325_u64,
            |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3), // FNV-1a
        );
        let name = self.name.to_lowercase();
        let cached = cache_folder().map(|folder| folder.join(format!("{name}-{key:016x}.cubin")));
        if let Some(bytes) = cached.as_ref().and_then(|path| std::fs::read(path).ok()) {
            return Ok(bytes);
        }
        let bytes = self.compile()?;
        // A cache that cannot be written costs the next start a few seconds, no more.
        if let Some(path) = cached
            && let Some(folder) = path.parent()
            && std::fs::create_dir_all(folder).is_ok()
        {
            let temporary = path.with_extension(format!("{}.tmp", std::process::id()));
            if std::fs::write(&temporary, &bytes).is_ok() {
                let _ = std::fs::rename(&temporary, &path);
            }
        }
        Ok(bytes)
    }

    fn compile(&self) -> Result<Vec<u8>> {
        let error = |problem: String| Error::Gpu { what: format!("compiling the kernels ({})", self.name), problem };
        let code = |e: nvrtc::result::NvrtcError| error(format!("{e:?}"));
        let text = |s: &str| CString::new(s).map_err(|e| error(e.to_string()));
        let program = nvrtc::result::create_program(&text(&self.source)?, Some(&text(self.name)?)).map_err(code)?;
        let mut options = vec!["--std=c++17".to_owned()];
        options.extend_from_slice(&self.options);
        // SAFETY: the program was made above and is destroyed below, once.
        unsafe {
            let compiled = nvrtc::result::compile_program(program, &options);
            let bytes = if compiled.is_err() {
                let log = nvrtc::result::get_program_log(program).unwrap_or_default();
                let log: Vec<u8> = log.iter().map(|c| *c as u8).take_while(|c| *c != 0).collect();
                Err(error(String::from_utf8_lossy(&log).into_owned()))
            } else {
                let mut len = 0;
                let mut status = nvrtc::sys::nvrtcGetCUBINSize(program, &raw mut len);
                let mut bytes = vec![0u8; len];
                if status == nvrtc::sys::nvrtcResult::NVRTC_SUCCESS {
                    status = nvrtc::sys::nvrtcGetCUBIN(program, bytes.as_mut_ptr().cast());
                }
                let done = status == nvrtc::sys::nvrtcResult::NVRTC_SUCCESS;
                if done { Ok(bytes) } else { Err(error(format!("{status:?}"))) }
            };
            let _ = nvrtc::result::destroy_program(program);
            bytes
        }
    }
}

fn cache_folder() -> Option<PathBuf> {
    let base = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    base.or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache")))
        .map(|base| base.join("fedproj"))
}

#[cfg(test)]
mod tests {
    use super::super::Probe;
    use super::*;

    #[test]
    fn the_kernels_compile_in_every_precision() {
        if !Probe::new().compiler {
            eprintln!("skipped: CUDA's run-time compiler (libnvrtc) is not installed");
            return;
        }
        for (_, precision) in Precision::NAMES {
            for program in programs(precision, HOPPER_CAPABILITY, HOPPER_COMPILER) {
                let cubin = program.compile().unwrap_or_else(|e| panic!("{e}"));
                // Every kernel that the host asks for is in the machine code, by its name.
                for kernel in program.kernels {
                    let found = cubin.windows(kernel.len()).any(|w| w == kernel.as_bytes());
                    assert!(found, "{} has no kernel {kernel}", program.name);
                }
            }
        }
    }
}
