//! A GPU: its context, the compiled kernels, memory and launches. Only this module calls the driver.

#![allow(unsafe_code, reason = "calls of the CUDA driver and compiler; each block gives its reason")]

use super::programs::programs;
use super::signatures::Signature;
use crate::error::{Error, Result};
use cudarc::driver::{
    CudaContext, CudaEvent, CudaFunction, CudaGraph, CudaSlice, CudaStream, DevicePtr, DriverError, result, sys,
};
use cudarc::nvrtc;
use std::collections::HashMap;
use std::ffi::c_void;
use std::path::Path;
use std::sync::Arc;

/// The precision of matrix products. Everything else is single precision.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Precision {
    /// As exact as single precision: each product is three of tf32.
    Fp32,
    /// Factors rounded to 10 bits, sums in single precision. (Linear layers of few outputs stay single.)
    #[default]
    Tf32,
    /// Factors rounded to 7 bits (of a first layer of few channels to 10), sums in single precision.
    Bf16,
}

impl Precision {
    /// What users type.
    pub const NAMES: [(&'static str, Self); 3] = [("fp32", Self::Fp32), ("tf32", Self::Tf32), ("bf16", Self::Bf16)];

    /// The name in [`Precision::NAMES`].
    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize].0
    }
}

/// The three passes of a convolution, each a program of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pass {
    Forward,
    Input,
    Weight,
}

/// Where launches wait for earlier ones. Work beside the main queue starts after what [`Gpu::fork`] saw there, and the main
/// queue goes on until it waits for an [`Event`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Queue {
    Main,
    Beside,
}

/// A point in the queue beside the main one.
pub(super) struct Event(CudaEvent);

impl std::fmt::Debug for Event {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Event")
    }
}

/// The first compute capability whose tensor cores have tf32.
const CAPABILITY_MIN: i32 = 8;

/// What this machine has for the CUDA back end.
#[derive(Clone, Debug, Default)]
pub struct Probe {
    /// Whether the driver's library (libcuda) was found.
    pub driver: bool,
    /// The CUDA version that the driver supports, as 1000·major + 10·minor.
    pub driver_version: Option<i32>,
    /// Whether the run-time compiler (libnvrtc) was found.
    pub compiler: bool,
    /// Its version.
    pub compiler_version: Option<(i32, i32)>,
    /// Name, compute capability, free and total memory of each GPU.
    pub gpus: Vec<(String, (i32, i32), usize, usize)>,
    /// Why GPUs could not be counted.
    pub problem: Option<String>,
}

impl Probe {
    /// Probes this machine.
    pub fn new() -> Self {
        // SAFETY: both only try to open a library.
        let (driver, compiler) = unsafe { (sys::is_culib_present(), nvrtc::sys::is_culib_present()) };
        let mut probe = Self { driver, compiler, ..Self::default() };
        if compiler {
            let (mut major, mut minor) = (0, 0);
            // SAFETY: the library is there, and the two numbers are ours to write.
            let status = unsafe { nvrtc::sys::nvrtcVersion(&raw mut major, &raw mut minor) };
            probe.compiler_version = (status == nvrtc::sys::nvrtcResult::NVRTC_SUCCESS).then_some((major, minor));
        }
        if !driver {
            return probe;
        }
        let mut version = 0;
        // SAFETY: the library is there, and the number is ours to write.
        let status = unsafe { sys::cuDriverGetVersion(&raw mut version) };
        probe.driver_version = (status == sys::CUresult::CUDA_SUCCESS).then_some(version);
        match CudaContext::device_count() {
            Err(e) => probe.problem = Some(describe(e)),
            Ok(count) => {
                for ordinal in 0..count.max(0) as usize {
                    match CudaContext::new(ordinal).and_then(|c| {
                        let (free, total) = c.mem_get_info()?;
                        Ok((c.name()?, c.compute_capability()?, free, total))
                    }) {
                        Ok(gpu) => probe.gpus.push(gpu),
                        Err(e) => probe.problem = Some(describe(e)),
                    }
                }
            }
        }
        probe
    }

    /// What is missing, in a sentence; `None` if a GPU can be used.
    pub fn missing(&self) -> Option<String> {
        if !self.driver {
            return Some("the NVIDIA driver's library (libcuda.so) was not found; install the NVIDIA driver".into());
        }
        if let Some(problem) = &self.problem {
            return Some(format!("the driver does not work: {problem}"));
        }
        if self.gpus.is_empty() {
            return Some("the driver is there, but it finds no GPU".into());
        }
        if let (Some((name, (major, minor), ..)), true) =
            (self.gpus.first(), self.gpus.iter().all(|gpu| gpu.1.0 < CAPABILITY_MIN))
        {
            let needed = format!("{CAPABILITY_MIN}.0 is needed (2020 and later: A100, RTX 30)");
            return Some(format!("the {name} has compute capability {major}.{minor}, and {needed}"));
        }
        if !self.compiler {
            return Some("CUDA's run-time compiler (libnvrtc.so) was not found; install the CUDA toolkit, or the package nvidia-cuda-nvrtc and put its folder on LD_LIBRARY_PATH".into());
        }
        None
    }
}

fn describe(error: DriverError) -> String {
    let text = error.error_string().ok().map(|s| s.to_string_lossy().into_owned());
    text.unwrap_or_else(|| format!("{error:?}"))
}

/// Lets the driver keep freed memory: the same amounts are allocated again and again.
fn keep_freed_memory(context: &CudaContext) {
    let attribute = sys::CUmemPool_attribute_enum::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    let mut pool = std::ptr::null_mut();
    let mut threshold = u64::MAX;
    // SAFETY: the device is the context's, and the driver reads the threshold before it returns. A driver without pools
    // refuses the first call, and nothing is lost.
    unsafe {
        if sys::cuDeviceGetDefaultMemPool(&raw mut pool, context.cu_device()) == sys::CUresult::CUDA_SUCCESS {
            let _ = sys::cuMemPoolSetAttribute(pool, attribute, (&raw mut threshold).cast());
        }
    }
}

/// An error of the driver, with what was tried.
pub(super) fn failed(what: &str) -> impl FnOnce(DriverError) -> Error + '_ {
    move |e| Error::gpu(what, describe(e))
}

pub(super) fn failed_lane(lane: usize, n_lanes: usize) -> Error {
    Error::gpu(format!("lane {lane}"), format!("there are only {n_lanes}"))
}

/// A GPU with the kernels loaded.
pub struct Gpu {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    beside: Arc<CudaStream>,
    forked: Event,
    kernels: HashMap<String, Kernel>,
    precision: Precision,
    name: String,
    processors: usize,
}

/// A kernel that is loaded, and the types of its parameters.
struct Kernel {
    function: CudaFunction,
    parameters: Vec<String>,
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} in {}", self.name, self.precision.name())
    }
}

impl Gpu {
    /// Opens a GPU and compiles the kernels for it, or takes them from `cache`, a folder that keeps them for later runs.
    ///
    /// # Errors
    /// If there is no such GPU, or the driver or the compiler is missing or too old.
    pub fn open(ordinal: usize, precision: Precision, cache: Option<&Path>) -> Result<Arc<Self>> {
        let probe = Probe::new();
        if let Some(problem) = probe.missing() {
            return Err(Error::gpu("using a GPU", problem));
        }
        if ordinal >= probe.gpus.len() {
            let problem = format!("there are only {} (counted from 0)", probe.gpus.len());
            return Err(Error::gpu(format!("using GPU {ordinal}"), problem));
        }
        let context = CudaContext::new(ordinal).map_err(failed("opening the GPU"))?;
        let (major, minor) = context.compute_capability().map_err(failed("asking the GPU what it can do"))?;
        if major < CAPABILITY_MIN {
            let problem = format!("its compute capability is {major}.{minor}, and tf32 needs {CAPABILITY_MIN}.0");
            return Err(Error::gpu(format!("using the {}", probe.gpus[ordinal].0), problem));
        }
        // SAFETY: memory is taken, copied and freed on one stream. That one and the other wait for each other by our own
        // events.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().map_err(failed("opening a stream"))?;
        let beside = context.new_stream().map_err(failed("opening a stream"))?;
        let forked = Event(context.new_event(None).map_err(failed("making an event"))?);
        keep_freed_memory(&context);
        let compiler = probe.compiler_version.unwrap_or_default();
        let compiled = std::thread::scope(|scope| {
            let handles: Vec<_> = programs(precision, (major, minor), compiler)
                .into_iter()
                .map(|program| scope.spawn(move || program.cubin(compiler, cache).map(|cubin| (program, cubin))))
                .collect();
            let join = |handle: std::thread::ScopedJoinHandle<'_, _>| {
                handle.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            handles.into_iter().map(join).collect::<Result<Vec<_>>>()
        })?;
        let shared_max = sys::CUdevice_attribute_enum::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
        let shared_max = context.attribute(shared_max).map_err(failed("asking for the GPU's shared memory"))? as u32;
        let mut kernels = HashMap::new();
        for (program, cubin) in compiled {
            let module = context.load_module(nvrtc::Ptx::from_binary(cubin)).map_err(failed("loading the kernels"))?;
            let prefix = if program.name == "REST" { String::new() } else { format!("{}.", program.name) };
            for Signature { name, parameters } in program.kernels {
                let function = module.load_function(&name).map_err(failed(&name))?;
                let shared = match name.as_str() {
                    _ if name.starts_with("conv_") => Some(super::conv::SHARED_MAX),
                    "stem" => Some(super::conv::STEM_SHARED_MAX),
                    "stem_pool" => Some(super::conv::STEM_POOL_SHARED_MAX),
                    "stem_weight" => Some(super::conv::STEM_WEIGHT_SHARED_MAX),
                    _ if name.starts_with("attention") => Some(super::text::SHARED_MAX),
                    _ => super::hopper::shared_bytes(&name).or_else(|| super::gather::shared_bytes(&name)),
                };
                // A GPU with less shared memory computes the stages that this kernel fuses one by one.
                if name == "stem_weight" && shared > Some(shared_max) {
                    continue;
                }
                if let Some(bytes) = shared {
                    let most = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
                    function.set_attribute(most, bytes as i32).map_err(failed("asking for shared memory"))?;
                }
                kernels.insert(format!("{prefix}{name}"), Kernel { function, parameters });
            }
        }
        let name = context.name().map_err(failed("asking the GPU's name"))?;
        let processors = sys::CUdevice_attribute_enum::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        let processors =
            context.attribute(processors).map_err(failed("counting the GPU's processors"))?.max(1) as usize;
        Ok(Arc::new(Self { context, stream, beside, forked, kernels, precision, name, processors }))
    }

    /// The GPU's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How products are computed.
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// Number of multiprocessors.
    pub(super) fn processors(&self) -> usize {
        self.processors
    }

    /// Whether it has the kernels of `hopper.cu`.
    pub(super) fn has_hopper(&self) -> bool {
        self.kernels.contains_key("HOPPER.turn_weights")
    }

    /// Whether it has `stem_weight`.
    pub(super) fn has_stem_weight(&self) -> bool {
        self.kernels.contains_key("STEM.stem_weight")
    }

    /// Bytes that are free on it.
    ///
    /// # Errors
    /// If the driver does not answer.
    pub fn free_bytes(&self) -> Result<usize> {
        self.context.mem_get_info().map(|(free, _)| free).map_err(failed("asking for free memory"))
    }

    /// Waits until all work is done.
    ///
    /// # Errors
    /// If any of it has failed.
    pub fn synchronize(&self) -> Result<()> {
        self.stream.synchronize().map_err(failed("computing"))
    }

    /// Zeroed memory.
    pub(super) fn zeros<T: Element>(&self, len: usize) -> Result<DeviceArray<T>> {
        let slice =
            self.stream.alloc_zeros::<T>(len.max(1)).map_err(|e| self.out_of_memory(e, len * size_of::<T>()))?;
        let at = slice.device_ptr(&self.stream).0;
        Ok(DeviceArray { slice, at, len })
    }

    /// Memory with a copy of `values`.
    pub(super) fn upload<T: Element>(&self, values: &[T]) -> Result<DeviceArray<T>> {
        let mut memory = self.zeros(values.len())?;
        self.write(&mut memory, 0, values)?;
        Ok(memory)
    }

    fn out_of_memory(&self, error: DriverError, bytes: usize) -> Error {
        if error.0 != sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            return failed("taking memory")(error);
        }
        Error::GpuMemory { needed: bytes, free: self.free_bytes().unwrap_or(0) }
    }

    /// Copies `values` to the place `at`.
    pub(super) fn write<T: Element>(&self, memory: &mut DeviceArray<T>, at: usize, values: &[T]) -> Result<()> {
        if values.is_empty() {
            return Ok(());
        }
        let mut to = memory.slice.slice_mut(at..at + values.len());
        self.stream.memcpy_htod(values, &mut to).map_err(failed("copying to the GPU"))?;
        // The copy may still read `values` when the call returns.
        self.synchronize()
    }

    /// Copies `out.len()` values from the place `at`.
    pub(super) fn read<T: Element>(&self, memory: &DeviceArray<T>, at: usize, out: &mut [T]) -> Result<()> {
        if out.is_empty() {
            return Ok(());
        }
        let from = memory.slice.slice(at..at + out.len());
        self.stream.memcpy_dtoh(&from, out).map_err(failed("copying from the GPU"))?;
        self.synchronize()
    }

    /// Copies between two places of the GPU's memory.
    pub(super) fn copy<T: Element>(
        &self,
        from: &DeviceArray<T>,
        at: usize,
        len: usize,
        to: &mut DeviceArray<T>,
        to_at: usize,
    ) -> Result<()> {
        if len == 0 {
            return Ok(());
        }
        let source = from.slice.slice(at..at + len);
        let mut target = to.slice.slice_mut(to_at..to_at + len);
        self.stream.memcpy_dtod(&source, &mut target).map_err(failed("copying on the GPU"))
    }

    /// Starts a kernel on `grid` blocks. Name, number and types of the parameters are checked against the kernel's source.
    /// The caller answers for addresses and extents, and the kernel for its indices: a wrong one ends in an error of the
    /// driver or in wrong numbers.
    pub(super) fn launch(
        &self,
        queue: Queue,
        kernel: &str,
        grid: [usize; 3],
        block: [u32; 2],
        shared: u32,
        parameters: &[&dyn Parameter],
    ) -> Result<()> {
        let wrong = |problem: String| Error::gpu(format!("starting `{kernel}`"), problem);
        let Some(declared) = self.kernels.get(kernel) else { return Err(wrong("no such kernel".into())) };
        if !parameters.iter().map(|p| p.type_name()).eq(declared.parameters.iter().map(String::as_str)) {
            let given: Vec<_> = parameters.iter().map(|p| p.type_name()).collect();
            return Err(wrong(format!("it takes {:?}, but was given {given:?}", declared.parameters)));
        }
        if grid.contains(&0) {
            return Ok(());
        }
        let mut pointers: Vec<*mut c_void> = parameters.iter().map(|p| p.pointer()).collect();
        let grid = (grid[0] as u32, grid[1] as u32, grid[2] as u32);
        let stream = if queue == Queue::Main { &self.stream } else { &self.beside };
        let (function, stream) = (declared.function.cu_function(), stream.cu_stream());
        self.context.bind_to_thread().map_err(failed(kernel))?;
        // SAFETY: before it returns, the driver reads one value per parameter of the kernel, as long as the parameter's type.
        // Number and names of the types were compared above. Equal names mean equal lengths: the programs assert those of
        // the structures. Addresses come from `DeviceArray`; what the kernel does with them, it does to memory of the device.
        unsafe { result::launch_kernel(function, grid, (block[0], block[1], 1), shared, stream, &mut pointers) }
            .map_err(failed(kernel))
    }

    /// Lets later work of the queue beside the main one start after what the main one has now.
    pub(super) fn fork(&self) -> Result<()> {
        let forked = &self.forked.0;
        forked.record(&self.stream).and_then(|()| self.beside.wait(forked)).map_err(failed("forking a queue"))
    }

    pub(super) fn event(&self) -> Result<Event> {
        self.context.new_event(None).map(Event).map_err(failed("making an event"))
    }

    /// Sets an event behind all work of the queue beside the main one.
    pub(super) fn mark(&self, event: &Event) -> Result<()> {
        event.0.record(&self.beside).map_err(failed("marking a queue"))
    }

    /// Lets later work of the main queue start after what was before the event.
    pub(super) fn wait(&self, event: &Event) -> Result<()> {
        self.stream.wait(&event.0).map_err(failed("joining a queue"))
    }

    /// From now on launches are recorded instead of run.
    pub(super) fn begin_capture(&self) -> Result<()> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        self.stream.begin_capture(mode).map_err(failed("recording a step"))
    }

    pub(super) fn end_capture(&self) -> Result<Captured> {
        let graph = self.stream.end_capture(sys::CUgraphInstantiate_flags(0)).map_err(failed("recording a step"))?;
        let nothing = || Error::gpu("recording a step", "nothing was recorded");
        graph.map(Captured).ok_or_else(nothing)
    }
}

/// Recorded launches.
pub(super) struct Captured(CudaGraph);

// SAFETY: the driver's handles belong to no thread, and replaying binds the context to the calling thread.
unsafe impl Send for Captured {}
// SAFETY: a shared reference does nothing but print; replaying takes `&mut`.
unsafe impl Sync for Captured {}

impl std::fmt::Debug for Captured {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Captured")
    }
}

impl Captured {
    pub fn replay(&mut self) -> Result<()> {
        self.0.launch().map_err(failed("replaying a step"))
    }
}

/// Numbers on the GPU.
pub(super) trait Element: cudarc::driver::DeviceRepr + cudarc::driver::ValidAsZeroBits + Copy {}
impl Element for f32 {}
impl Element for f64 {}
impl Element for i32 {}
impl Element for i64 {}
impl Element for u32 {}
impl Element for u8 {}

/// Memory on the GPU.
#[derive(Debug)]
pub(super) struct DeviceArray<T> {
    slice: CudaSlice<T>,
    at: u64,
    len: usize,
}

impl<T> DeviceArray<T> {
    /// The address, for kernels.
    pub fn at(&self) -> u64 {
        self.at
    }

    pub fn len(&self) -> usize {
        self.len
    }
}

/// A value that a kernel takes.
pub(super) trait Parameter {
    /// Its type's name in the kernels' sources; `*` is any pointer.
    fn type_name(&self) -> &'static str;
    fn pointer(&self) -> *mut c_void;
}

/// Plain values whose layout is that of the kernels' sources, by the same name or another.
macro_rules! parameters {
    ($ty:ty) => {
        $crate::cuda::gpu::parameters!($ty = stringify!($ty));
    };
    ($($ty:ty = $name:expr),+) => {
        $(impl $crate::cuda::gpu::Parameter for $ty {
            fn type_name(&self) -> &'static str {
                $name
            }

            fn pointer(&self) -> *mut std::ffi::c_void {
                std::ptr::from_ref(self).cast_mut().cast()
            }
        })+
    };
}
pub(super) use parameters;
parameters!(i32 = "int", u64 = "*", i64 = "long long", f32 = "float", f64 = "double");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_a_gpu_says_what_is_missing() {
        let none = Probe::default();
        assert!(none.missing().is_some_and(|m| m.contains("libcuda")));
        let gpu = ("GPU".to_owned(), (9, 0), 1, 1);
        let no_compiler = Probe { driver: true, gpus: vec![gpu.clone()], ..Probe::default() };
        assert!(no_compiler.missing().is_some_and(|m| m.contains("libnvrtc")));
        let all = Probe { driver: true, compiler: true, gpus: vec![gpu.clone()], ..Probe::default() };
        assert_eq!(all.missing(), None);
        let old = ("Old".to_owned(), (7, 5), 1, 1);
        let too_old = Probe { gpus: vec![old.clone()], ..all.clone() };
        assert!(too_old.missing().is_some_and(|m| m.contains("7.5")), "`auto` then takes the CPU");
        assert_eq!(Probe { gpus: vec![old, gpu], ..all }.missing(), None);
    }
}
