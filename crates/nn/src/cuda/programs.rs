//! The kernels' sources, the programs made from them for a GPU, and how those are compiled and cached.

#![allow(unsafe_code, reason = "calls of CUDA's run-time compiler; the block gives its reason")]

use super::batches::{Image, Table};
use super::constraints::{Layer, References};
use super::conv::Geometry;
use super::gpu::{Pass, Precision};
use super::hopper::{Dense, Strip};
use super::layers::{Drop, Pool};
use super::losses::LossArgs;
use super::memory::{Extent, Rows};
use super::optimizer::DeviceRule;
use super::products::{After, Linear, Won};
use super::signatures::{Signature, signatures};
use super::text::DeviceTexts;
use super::vectors::DeviceBounds;
use crate::error::{Error, Result};
use cudarc::nvrtc;
use std::ffi::CString;
use std::path::Path;

const PASSES: [(Pass, &str); 3] = [(Pass::Forward, "FORWARD"), (Pass::Input, "INPUT"), (Pass::Weight, "WEIGHT")];
const COMMON: &str = include_str!("kernels/common.cu");
const CONV: &str = include_str!("kernels/conv.cu");
const STEM: &str = include_str!("kernels/stem.cu");
const HOPPER: &str = include_str!("kernels/hopper.cu");
const DENSE: &str = include_str!("kernels/dense.cu");
const GATHER: &str = include_str!("kernels/gather.cu");
const REST: [&str; 9] = [
    include_str!("kernels/norm.cu"),
    include_str!("kernels/pool.cu"),
    include_str!("kernels/layers.cu"),
    include_str!("kernels/linear.cu"),
    include_str!("kernels/loss.cu"),
    include_str!("kernels/vector.cu"),
    include_str!("kernels/constraints.cu"),
    include_str!("kernels/text.cu"),
    include_str!("kernels/attention.cu"),
];

/// A program of kernels.
pub(super) struct Program {
    pub name: &'static str,
    source: String,
    options: Vec<String>,
    /// The kernels that the host launches.
    pub kernels: Vec<Signature>,
}

impl Program {
    /// The program of the source `kernels`, which needs the sources `before`. It compiles only if the structures that its
    /// kernels take are as long as the host's.
    fn new(name: &'static str, before: &[&str], kernels: &str, options: Vec<String>) -> Self {
        let kernels_of = signatures(kernels);
        let takes = |ty: &str| kernels_of.iter().any(|kernel| kernel.parameters.iter().any(|p| p == ty));
        let lengths = STRUCTURES.iter().filter(|(ty, _)| takes(ty));
        let lengths = lengths.map(|(ty, len)| format!("static_assert(sizeof({ty}) == {len}, \"{ty}\");\n"));
        let source = format!("{}\n{kernels}\n{}", before.join("\n"), lengths.collect::<String>());
        Self { name, source, options, kernels: kernels_of }
    }
}

/// The structures that kernels take: their names there and their lengths here.
const STRUCTURES: [(&str, usize); 18] = [
    ("After", size_of::<After>()),
    ("Bounds", size_of::<DeviceBounds>()),
    ("Conv", size_of::<Geometry>()),
    ("Dense", size_of::<Dense>()),
    ("Drop", size_of::<Drop>()),
    ("Extent", size_of::<Extent>()),
    ("Image", size_of::<Image>()),
    ("Layer", size_of::<Layer>()),
    ("Linear", size_of::<Linear>()),
    ("LossArgs", size_of::<LossArgs>()),
    ("Pool", size_of::<Pool>()),
    ("References", size_of::<References>()),
    ("Rows", size_of::<Rows>()),
    ("Rule", size_of::<DeviceRule>()),
    ("Strip", size_of::<Strip>()),
    ("Table", size_of::<Table>()),
    ("Texts", size_of::<DeviceTexts>()),
    ("Won", size_of::<Won>()),
];

/// The programs for a compute capability. Without a compiler that knows Hopper, its kernels are left out.
pub(super) fn programs(precision: Precision, capability: (i32, i32), compiler: (i32, i32)) -> Vec<Program> {
    let architecture = |suffix: &str| format!("--gpu-architecture=sm_{}{}{suffix}", capability.0, capability.1);
    let numbers = precision.name().to_uppercase();
    let conv = |(_, name): (Pass, &'static str)| {
        let options = vec![architecture(""), format!("-DPRECISION={numbers}"), format!("-DCONV_MODE={name}")];
        Program::new(name, &[COMMON], CONV, options)
    };
    let mut all: Vec<_> = PASSES.into_iter().map(conv).collect();
    all.push(Program::new("REST", &[COMMON], &REST.join("\n"), vec![architecture("")]));
    if precision != Precision::Fp32 {
        all.push(Program::new("STEM", &[COMMON, CONV], STEM, vec![architecture("")]));
    }
    if capability == HOPPER_CAPABILITY && compiler >= HOPPER_COMPILER && precision == Precision::Tf32 {
        let kernels = [HOPPER, DENSE, GATHER].join("\n");
        all.push(Program::new("HOPPER", &[COMMON, CONV], &kernels, vec![architecture("a")]));
    }
    all
}

/// The capability that `hopper.cu` is for, and the first compiler that knows its warp-group products.
const HOPPER_CAPABILITY: (i32, i32) = (9, 0);
const HOPPER_COMPILER: (i32, i32) = (12, 0);

impl Program {
    /// The machine code, from what earlier runs left in the folder `cache` or from the compiler.
    pub fn cubin(&self, compiler: (i32, i32), cache: Option<&Path>) -> Result<Vec<u8>> {
        let compiler = format!("{}.{}", compiler.0, compiler.1);
        let key = [&self.source, &self.options.join(" "), &compiler].iter().flat_map(|s| s.bytes().chain([0])).fold(
            0xcbf2_9ce4_8422_2325_u64,
            |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3), // FNV-1a
        );
        let name = self.name.to_lowercase();
        let cached = cache.map(|folder| folder.join(format!("{name}-{key:016x}.cubin")));
        if let Some(bytes) = cached.as_ref().and_then(|path| std::fs::read(path).ok()) {
            return Ok(bytes);
        }
        let bytes = self.compile()?;
        // If the cache cannot be written, the next start takes a few seconds longer.
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
        let error = |problem: String| Error::gpu(format!("compiling the kernels ({})", self.name), problem);
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
                // Every kernel that the sources declare is in the machine code, by its name.
                for Signature { name, .. } in program.kernels {
                    let found = cubin.windows(name.len()).any(|w| w == name.as_bytes());
                    assert!(found, "{} has no kernel {name}", program.name);
                }
            }
        }
    }

    fn all_kernels() -> Vec<Signature> {
        programs(Precision::Tf32, HOPPER_CAPABILITY, HOPPER_COMPILER).into_iter().flat_map(|p| p.kernels).collect()
    }

    #[test]
    fn the_length_of_every_structure_that_a_kernel_takes_is_checked() {
        let scalars = ["*", "int", "u32", "long long", "float", "double"];
        for Signature { name, parameters } in all_kernels() {
            let is_known =
                |ty: &String| scalars.contains(&ty.as_str()) || STRUCTURES.iter().any(|(known, _)| known == ty);
            assert!(!parameters.is_empty() && parameters.iter().all(is_known), "{name}: {parameters:?}");
        }
    }

    #[test]
    fn every_kernel_that_the_host_names_is_declared() {
        let kernels = all_kernels();
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src/cuda");
        let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        let mut n_named = 0;
        for file in files.filter(|path| path.extension().is_some_and(|e| e == "rs") && !path.ends_with("programs.rs")) {
            let text: String = std::fs::read_to_string(&file).unwrap().split_whitespace().collect();
            for call in ["launch(", "each(", "each_of(", "each_row(", "sum_rows("] {
                for rest in text.split(call).skip(1) {
                    let rest = rest.strip_prefix("&format!(").unwrap_or(rest);
                    let Some((name, _)) = rest.strip_prefix('"').and_then(|rest| rest.split_once('"')) else {
                        continue;
                    };
                    let (start, end) = name.split_once('{').unwrap_or((name, ""));
                    let start = start.rsplit('.').next().unwrap_or(start);
                    let is_whole = end.is_empty();
                    let fits = |k: &Signature| if is_whole { k.name == start } else { k.name.starts_with(start) };
                    assert!(kernels.iter().any(fits), "{}: no kernel {name}", file.display());
                    n_named += usize::from(!start.is_empty());
                }
            }
        }
        assert!(n_named > 50, "{n_named}");
    }
}
