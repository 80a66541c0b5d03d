//! CUDA's driver: those of its functions that fedproj calls, as `cuda.h` declares them.
//!
//! Handles are pointers to what the driver keeps, or numbers. A stream does work at the call, or records it while it is
//! captured. A stream that has waited for another one does its work as late as it may: when others wait for it. So a wait
//! that is missing gives wrong numbers.

use crate::gpu::{Answer, Function, Functions, MEMORY_BYTES, Status, Work, gpu};
use crate::machine::block::Launch;
use std::collections::{HashMap, VecDeque};
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Only its address counts.
const CONTEXT: *mut c_void = 0x1000 as *mut c_void;
const POOL: *mut c_void = 0x2000 as *mut c_void;

#[derive(Default)]
struct Stream {
    /// What it has recorded, while it is captured.
    record: Mutex<Option<Graph>>,
    late: Mutex<Option<Late>>,
}
type Graph = Vec<Work>;

/// The work that a stream has not done yet, and how much it has done.
#[derive(Default)]
struct Late {
    work: VecDeque<Work>,
    n_done: usize,
}

/// A stream, and how much work it had when the event was recorded.
type Event = Mutex<Option<(*const Stream, usize)>>;

/// The latest message of each kind of error.
static MESSAGES: Mutex<Option<HashMap<c_int, CString>>> = Mutex::new(None);

/// An answer as a number; its reason is what `cuGetErrorString` then says.
fn status(answer: Answer<()>) -> c_int {
    let Err((status, what)) = answer else { return 0 };
    let code = status as c_int;
    let text = CString::new(what.replace('\0', " ")).unwrap_or_default();
    let mut messages = lock(&MESSAGES);
    // Callers may hold the old text for ever.
    if let Some(old) = messages.get_or_insert_default().insert(code, text) {
        let _ = old.into_raw();
    }
    code
}

fn invalid(what: &str) -> Answer<()> {
    Err((Status::InvalidValue, what.into()))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Stream {
    /// Does work, records it, or leaves it for later.
    fn submit(&self, work: Work) -> Answer<()> {
        if let Some(late) = lock(&self.late).as_mut() {
            late.work.push_back(work);
            return Ok(());
        }
        match lock(&self.record).as_mut() {
            Some(record) => record.push(work),
            None => return gpu().run(&work),
        }
        Ok(())
    }

    /// Lets the work of the event's stream go before what follows on this one. If that stream does its work at once, this
    /// one is late from now on.
    fn wait(&self, other: &Self, n: usize) -> Answer<()> {
        let Some(late) = &mut *lock(&other.late) else {
            lock(&self.late).get_or_insert_default();
            return Ok(());
        };
        let due: Vec<Work> = late.work.drain(..n.saturating_sub(late.n_done)).collect();
        late.n_done += due.len();
        due.into_iter().try_for_each(|work| self.submit(work))
    }
}

/// Does work, records it, or leaves it for later.
unsafe fn submit(stream: *mut c_void, work: Answer<Work>) -> c_int {
    // SAFETY: handles of streams come from `cuStreamCreate`.
    let stream = unsafe { stream.cast::<Stream>().as_ref() };
    status(work.and_then(|work| stream.map_or_else(|| gpu().run(&work), |stream| stream.submit(work.clone()))))
}

/// What the host waits for cannot be recorded, or be late.
unsafe fn is_idle(stream: *mut c_void) -> Answer<()> {
    // SAFETY: as in `submit`.
    let Some(stream) = (unsafe { stream.cast::<Stream>().as_ref() }) else { return Ok(()) };
    let waits = lock(&stream.late).as_ref().is_some_and(|late| !late.work.is_empty());
    let is_busy = waits || lock(&stream.record).is_some();
    if is_busy { Err((Status::NotSupported, "the stream is captured, or nobody waits for it".into())) } else { Ok(()) }
}

/// Declares functions that the driver exports.
macro_rules! exported {
    ($($name:ident($($arg:ident: $ty:ty),* $(,)?) $body:block)*) => {
        $(
            /// As the function of this name in `cuda.h`.
            ///
            /// # Safety
            /// As there.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($arg: $ty),*) -> c_int {
                // SAFETY: the caller answers for pointers to its values, and handles come from this driver.
                #[allow(unused_unsafe, reason = "some bodies need none")]
                unsafe { $body }
            }
        )*
    };
}

exported! {
    cuInit(_flags: c_uint) { 0 }
    cuDriverGetVersion(to: *mut c_int) { *to = 13_000; 0 }
    cuDeviceGetCount(to: *mut c_int) { *to = 1; 0 }
    cuDeviceGet(to: *mut c_int, ordinal: c_int) {
        *to = 0;
        status(if ordinal == 0 { Ok(()) } else { Err((Status::InvalidDevice, "there is one GPU".into())) })
    }
    cuDeviceGetName(to: *mut c_char, len: c_int, _device: c_int) {
        let name = gpu().kind.name;
        let n = name.len().min(len.max(1) as usize - 1);
        std::ptr::copy_nonoverlapping(name.as_ptr().cast(), to, n);
        *to.add(n) = 0;
        0
    }
    cuDeviceGetAttribute(to: *mut c_int, attribute: c_int, _device: c_int) {
        let kind = gpu().kind;
        *to = match attribute {
            16 => kind.processors,
            75 => kind.capability.0,
            76 => kind.capability.1,
            97 => kind.shared_bytes,
            115 => 1, // memory pools
            _ => return status(invalid("the emulated GPU has no such attribute")),
        };
        0
    }
    cuDevicePrimaryCtxRetain(to: *mut *mut c_void, _device: c_int) { *to = CONTEXT; 0 }
    cuDevicePrimaryCtxRelease_v2(_device: c_int) { 0 }
    cuDeviceGetDefaultMemPool(to: *mut *mut c_void, _device: c_int) { *to = POOL; 0 }
    cuMemPoolSetAttribute(_pool: *mut c_void, _attribute: c_int, _value: *mut c_void) { 0 }
    cuCtxGetCurrent(to: *mut *mut c_void) { *to = CONTEXT; 0 }
    cuCtxSetCurrent(_context: *mut c_void) { 0 }
    cuCtxSynchronize() { 0 }
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        *total = MEMORY_BYTES;
        *free = MEMORY_BYTES - gpu().memory().used();
        0
    }
    cuGetErrorString(error: c_int, to: *mut *const c_char) {
        let messages = lock(&MESSAGES);
        let text = messages.as_ref().and_then(|all| all.get(&error));
        *to = text.map_or(c"an error of the emulated GPU".as_ptr(), |text| text.as_ptr());
        0
    }
    cuGetErrorName(_error: c_int, to: *mut *const c_char) { *to = c"EMULATED_GPU".as_ptr(); 0 }

    cuMemAllocAsync(to: *mut u64, len: usize, stream: *mut c_void) {
        status(is_idle(stream).and_then(|()| gpu().allocate(len)).map(|address| *to = address))
    }
    cuMemFreeAsync(at: u64, stream: *mut c_void) {
        let freed = || if gpu().memory_mut().free(at) { Ok(()) } else { invalid("no memory to free") };
        status(is_idle(stream).and_then(|()| freed()))
    }
    cuMemsetD8Async(at: u64, value: u8, len: usize, stream: *mut c_void) {
        submit(stream, Ok(Work::Fill { at, value, len }))
    }
    cuMemcpyDtoDAsync_v2(to: u64, from: u64, len: usize, stream: *mut c_void) {
        submit(stream, Ok(Work::Copy { from, to, len }))
    }
    cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, len: usize, stream: *mut c_void) {
        let bytes = std::slice::from_raw_parts(from.cast::<u8>(), len);
        status(is_idle(stream).and_then(|()| gpu().write(to, bytes)))
    }
    cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, len: usize, stream: *mut c_void) {
        let bytes = std::slice::from_raw_parts_mut(to.cast::<u8>(), len);
        status(is_idle(stream).and_then(|()| gpu().read(from, bytes)))
    }

    cuModuleLoadData(to: *mut *mut c_void, image: *const c_void) {
        let text = CStr::from_ptr(image.cast()).to_string_lossy();
        status(gpu().load(&text).map(|functions| *to = Arc::into_raw(functions).cast_mut().cast()))
    }
    cuModuleUnload(module: *mut c_void) { drop(Arc::from_raw(module.cast::<Functions>())); 0 }
    cuModuleGetFunction(to: *mut *mut c_void, module: *mut c_void, name: *const c_char) {
        let name = CStr::from_ptr(name).to_string_lossy();
        let found = (*module.cast::<Functions>()).get(name.as_ref());
        // Modules are kept for ever, and so are their functions.
        let found = found.ok_or_else(|| (Status::NotFound, format!("no kernel {name}")));
        status(found.map(|function| *to = std::ptr::from_ref::<Arc<Function>>(function).cast_mut().cast()))
    }
    cuFuncSetAttribute(function: *mut c_void, attribute: c_int, value: c_int) {
        let function = &*function.cast::<Arc<Function>>();
        match attribute {
            8 => status(function.allow_shared(value as usize, gpu().kind)),
            _ => status(invalid("the emulated GPU knows no such attribute of kernels")),
        }
    }
    cuLaunchKernel(
        function: *mut c_void,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared_bytes: c_uint,
        stream: *mut c_void,
        parameters: *mut *mut c_void,
        _extra: *mut *mut c_void,
    ) {
        let function = &*function.cast::<Arc<Function>>();
        let work = function.kernel().and_then(|kernel| {
            let mut buffer = Vec::new();
            for (i, (at, len)) in kernel.code.parameters.iter().enumerate() {
                buffer.resize(*at, 0);
                buffer.extend_from_slice(std::slice::from_raw_parts((*parameters.add(i)).cast::<u8>(), *len));
            }
            let dimensions = |x: c_uint, y: c_uint, z: c_uint| [x as usize, y as usize, z as usize];
            let (grid, block) = (dimensions(grid_x, grid_y, grid_z), dimensions(block_x, block_y, block_z));
            function.launch(Launch { grid, block, shared_bytes: shared_bytes as usize, parameters: buffer })
        });
        submit(stream, work)
    }

    cuStreamCreate(to: *mut *mut c_void, _flags: c_uint) {
        *to = Box::into_raw(Box::new(Stream::default())).cast();
        0
    }
    cuStreamDestroy_v2(stream: *mut c_void) { drop(Box::from_raw(stream.cast::<Stream>())); 0 }
    cuStreamSynchronize(stream: *mut c_void) { status(is_idle(stream)) }
    cuStreamWaitEvent(stream: *mut c_void, event: *mut c_void, _flags: c_uint) {
        let recorded = *lock(&*event.cast::<Event>());
        status(recorded.map_or(Ok(()), |(other, n)| (*stream.cast::<Stream>()).wait(&*other, n)))
    }
    cuEventCreate(to: *mut *mut c_void, _flags: c_uint) {
        *to = Box::into_raw(Box::new(Event::default())).cast();
        0
    }
    cuEventRecord(event: *mut c_void, stream: *mut c_void) {
        let late = lock(&(*stream.cast::<Stream>()).late);
        let n = late.as_ref().map_or(0, |late| late.n_done + late.work.len());
        *lock(&*event.cast::<Event>()) = Some((stream.cast(), n));
        0
    }
    cuEventDestroy_v2(event: *mut c_void) { drop(Box::from_raw(event.cast::<Event>())); 0 }
    cuStreamBeginCapture_v2(stream: *mut c_void, _mode: c_int) {
        *lock(&(*stream.cast::<Stream>()).record) = Some(Graph::new());
        0
    }
    cuStreamEndCapture(stream: *mut c_void, to: *mut *mut c_void) {
        match lock(&(*stream.cast::<Stream>()).record).take() {
            Some(graph) => { *to = Box::into_raw(Box::new(graph)).cast(); 0 }
            None => status(invalid("the stream is not captured")),
        }
    }
    cuGraphInstantiateWithFlags(to: *mut *mut c_void, graph: *mut c_void, _flags: u64) {
        *to = Box::into_raw(Box::new((*graph.cast::<Graph>()).clone())).cast();
        0
    }
    cuGraphLaunch(graph: *mut c_void, stream: *mut c_void) {
        let graph = &*graph.cast::<Graph>();
        status(is_idle(stream).and_then(|()| graph.iter().try_for_each(|work| gpu().run(work))))
    }
    cuGraphDestroy(graph: *mut c_void) { drop(Box::from_raw(graph.cast::<Graph>())); 0 }
    cuGraphExecDestroy(graph: *mut c_void) { drop(Box::from_raw(graph.cast::<Graph>())); 0 }
}
