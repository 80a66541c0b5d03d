//! The GPU that programs see: its memory, the modules that were loaded, and what it is asked to do.

use crate::machine::block::{Kernel, Launch};
use crate::memory::Memory;
use crate::ptx::{decode, parse};
use std::collections::HashMap;
use std::io::Write;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// What the driver answers, by its numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    InvalidValue = 1,
    OutOfMemory = 2,
    InvalidDevice = 101,
    InvalidPtx = 218,
    NotFound = 500,
    IllegalAddress = 700,
    NotSupported = 801,
}

/// An answer with its reason.
pub type Failure = (Status, String);
pub type Answer<T> = Result<T, Failure>;

/// Bytes of memory that it claims to have.
pub const MEMORY_BYTES: usize = 16 << 30;
/// Shared memory that a block may have without asking for more.
const SHARED_BYTES: usize = 48 << 10;

/// The kinds of GPU that it can be.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    pub capability: (i32, i32),
    pub name: &'static str,
    pub processors: i32,
    /// Max shared memory of a block.
    pub shared_bytes: i32,
}

/// All kinds; the first is the usual one.
pub const KINDS: [Kind; 2] = [
    Kind { capability: (8, 0), name: "emulated GPU (8.0)", processors: 108, shared_bytes: 163 << 10 },
    Kind { capability: (9, 0), name: "emulated GPU (9.0)", processors: 132, shared_bytes: 227 << 10 },
];

/// A kernel's name in a module, and the kernel once it is decoded.
pub struct Function {
    module: Arc<Module>,
    name: String,
    kernel: OnceLock<Result<Kernel, String>>,
    shared_max: AtomicUsize,
}

/// A module.
pub struct Module {
    parsed: parse::Module,
    globals: HashMap<String, u64>,
}

/// A module's kernels by name.
pub type Functions = HashMap<String, Arc<Function>>;

/// Work in the order of a stream.
#[derive(Clone)]
pub enum Work {
    Launch(Arc<Function>, Launch),
    Copy { from: u64, to: u64, len: usize },
    Fill { at: u64, value: u8, len: usize },
}

/// The GPU.
pub struct Gpu {
    pub kind: Kind,
    memory: RwLock<Memory>,
    /// Modules by their text: programs that open the GPU again need not decode again.
    modules: Mutex<HashMap<String, Arc<Functions>>>,
    n_threads: usize,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The GPU of this process.
pub fn gpu() -> &'static Gpu {
    static GPU: OnceLock<Gpu> = OnceLock::new();
    GPU.get_or_init(|| {
        let wanted = std::env::var("EMULATED_GPU_CAPABILITY").unwrap_or_default();
        let kind = KINDS.iter().find(|kind| format!("{}.{}", kind.capability.0, kind.capability.1) == wanted);
        let mut kind = *kind.unwrap_or(&KINDS[0]);
        let number = |name: &str| std::env::var(name).ok().and_then(|n| n.parse::<usize>().ok());
        if let Some(processors) = number("EMULATED_GPU_PROCESSORS") {
            kind.processors = processors as i32;
        }
        let n_threads = number("EMULATED_GPU_THREADS");
        let n_threads = n_threads.or_else(|| std::thread::available_parallelism().ok().map(usize::from));
        Gpu::new(kind, n_threads.unwrap_or(1))
    })
}

impl Gpu {
    /// A GPU of its own, for tests.
    pub fn new(kind: Kind, n_threads: usize) -> Self {
        Self { kind, memory: RwLock::default(), modules: Mutex::default(), n_threads }
    }

    pub fn memory(&self) -> RwLockReadGuard<'_, Memory> {
        self.memory.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn memory_mut(&self) -> RwLockWriteGuard<'_, Memory> {
        self.memory.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// New memory.
    pub fn allocate(&self, len: usize) -> Answer<u64> {
        let mut memory = self.memory_mut();
        let fits = memory.used() + len <= MEMORY_BYTES;
        let none = || (Status::OutOfMemory, format!("there is no room for {len} bytes"));
        if fits { memory.allocate(len).ok_or_else(none) } else { Err(none()) }
    }

    /// Loads a module, or finds it among those that were loaded.
    pub fn load(&self, text: &str) -> Answer<Arc<Functions>> {
        if let Some(known) = lock(&self.modules).get(text) {
            return Ok(Arc::clone(known));
        }
        let parsed = parse::Module::parse(text).map_err(|e| (Status::InvalidPtx, e))?;
        let mut globals = HashMap::new();
        for (variable, values) in &parsed.globals {
            let address = self.allocate(variable.bytes.max(1))?;
            self.write(address, values)?;
            globals.insert(variable.name.clone(), address);
        }
        let module = Arc::new(Module { parsed, globals });
        let kernels = module.parsed.functions.values().filter(|function| function.is_kernel);
        let function = |name: &String| Function {
            module: Arc::clone(&module),
            name: name.clone(),
            kernel: OnceLock::new(),
            shared_max: SHARED_BYTES.into(),
        };
        let functions = kernels.map(|kernel| (kernel.name.clone(), Arc::new(function(&kernel.name)))).collect();
        let functions = Arc::new(functions);
        lock(&self.modules).insert(text.to_owned(), Arc::clone(&functions));
        Ok(functions)
    }

    /// Copies bytes of the host to an address.
    pub fn write(&self, to: u64, bytes: &[u8]) -> Answer<()> {
        let memory = self.memory();
        let to = memory.locate(to, bytes.len()).map_err(illegal)?;
        // SAFETY: `locate` has found as many bytes there, and the lock keeps them from being freed.
        unsafe { std::ptr::copy(bytes.as_ptr(), to, bytes.len()) };
        Ok(())
    }

    /// Copies bytes at an address to the host.
    pub fn read(&self, from: u64, bytes: &mut [u8]) -> Answer<()> {
        let memory = self.memory();
        let from = memory.locate(from, bytes.len()).map_err(illegal)?;
        // SAFETY: as in `write`.
        unsafe { std::ptr::copy(from, bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    /// Does some work.
    pub fn run(&self, work: &Work) -> Answer<()> {
        match work {
            Work::Launch(function, launch) => {
                function.note();
                function.kernel()?.launch(launch, &self.memory(), self.n_threads).map_err(illegal)
            }
            Work::Copy { from, to, len } => {
                let memory = self.memory();
                let (from, to) =
                    (memory.locate(*from, *len).map_err(illegal)?, memory.locate(*to, *len).map_err(illegal)?);
                // SAFETY: `locate` has found `len` bytes at both, and the lock keeps them from being freed.
                unsafe { std::ptr::copy(from, to, *len) };
                Ok(())
            }
            Work::Fill { at, value, len } => {
                let memory = self.memory();
                let at = memory.locate(*at, *len).map_err(illegal)?;
                // SAFETY: as above.
                unsafe { std::ptr::write_bytes(at, *value, *len) };
                Ok(())
            }
        }
    }
}

fn illegal(what: String) -> Failure {
    (Status::IllegalAddress, what)
}

impl Function {
    /// The kernel, decoded on first use.
    pub fn kernel(&self) -> Answer<&Kernel> {
        let decoded = self.kernel.get_or_init(|| {
            let function = &self.module.parsed.functions[&self.name];
            decode::decode(&self.module.parsed, function, &self.module.globals).map(Kernel::new)
        });
        decoded.as_ref().map_err(|e| (Status::InvalidPtx, e.clone()))
    }

    /// Lets launches have so much shared memory.
    pub fn allow_shared(&self, bytes: usize, kind: Kind) -> Answer<()> {
        let own = self.kernel()?.code.shared_bytes;
        if bytes + own > kind.shared_bytes as usize {
            let what = format!("kernel {} cannot have {bytes} bytes of shared memory beside {own}", self.name);
            return Err((Status::InvalidValue, what));
        }
        self.shared_max.store(bytes, Ordering::Relaxed);
        Ok(())
    }

    /// A launch, if the kernel allows it.
    pub fn launch(self: &Arc<Self>, launch: Launch) -> Answer<Work> {
        let code = &self.kernel()?.code;
        let n_threads = launch.block.iter().product::<usize>();
        let wrong = |what: String| Err((Status::InvalidValue, format!("kernel {}: {what}", self.name)));
        if n_threads == 0 || n_threads > code.threads_max || launch.grid.contains(&0) {
            return wrong(format!("{:?} blocks of {:?} threads (max {})", launch.grid, launch.block, code.threads_max));
        }
        let allowed = self.shared_max.load(Ordering::Relaxed);
        if launch.shared_bytes > allowed {
            return wrong(format!("{} bytes of shared memory, of {allowed} allowed", launch.shared_bytes));
        }
        Ok(Work::Launch(Arc::clone(self), launch))
    }

    /// Notes that the kernel is launched.
    fn note(&self) {
        static SEEN: Mutex<Option<std::collections::HashSet<String>>> = Mutex::new(None);
        let Some(path) = std::env::var_os("EMULATED_GPU_KERNELS") else { return };
        if lock(&SEEN).get_or_insert_default().insert(self.name.clone()) {
            let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
            // Only a record for people: a run does not fail for it.
            let _ = file.and_then(|mut file| writeln!(file, "{}", self.name));
        }
    }
}
