//! CUDA's run-time compiler: the real one, whose PTX takes the place of machine code.

use libloading::{Library, Symbol};
use std::ffi::{c_char, c_int, c_void};
use std::sync::OnceLock;

type Program = *mut c_void;
type Strings = *const *const c_char;

/// `NVRTC_ERROR_INTERNAL_ERROR`: there is no real compiler.
const MISSING: c_int = 11;
/// Added to the minor version, so that PTX never gets into the place of machine code in a cache that is shared with a
/// GPU.
const VERSION_OFFSET: c_int = 1000;

fn compiler() -> Option<&'static Library> {
    static COMPILER: OnceLock<Option<Library>> = OnceLock::new();
    let open = || {
        let path = std::env::var_os("EMULATED_GPU_NVRTC")?;
        // SAFETY: the compiler's library does nothing harmful when it is opened.
        let opened = unsafe { Library::new(&path) };
        opened.inspect_err(|e| eprintln!("emulated GPU: EMULATED_GPU_NVRTC={}: {e}", path.display())).ok()
    };
    COMPILER.get_or_init(open).as_ref()
}

/// Passes calls on to the real compiler.
macro_rules! passed_on {
    ($($name:ident = $real:literal ($($arg:ident: $ty:ty),*);)*) => {
        $(
            /// As the function of this name in `nvrtc.h`.
            ///
            /// # Safety
            /// As there.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($arg: $ty),*) -> c_int {
                let Some(compiler) = compiler() else { return MISSING };
                // SAFETY: the type is that of the function in `nvrtc.h`, and the caller answers for the arguments.
                unsafe {
                    let real: Result<Symbol<'_, unsafe extern "C" fn($($ty),*) -> c_int>, _> = compiler.get($real);
                    real.map_or(MISSING, |real| real($($arg),*))
                }
            }
        )*
    };
}

passed_on! {
    nvrtcCreateProgram = b"nvrtcCreateProgram" (
        to: *mut Program, source: *const c_char, name: *const c_char, n_headers: c_int, headers: Strings, names: Strings
    );
    nvrtcDestroyProgram = b"nvrtcDestroyProgram" (program: *mut Program);
    nvrtcCompileProgram = b"nvrtcCompileProgram" (program: Program, n_options: c_int, options: Strings);
    nvrtcGetProgramLogSize = b"nvrtcGetProgramLogSize" (program: Program, to: *mut usize);
    nvrtcGetProgramLog = b"nvrtcGetProgramLog" (program: Program, to: *mut c_char);
    nvrtcGetCUBINSize = b"nvrtcGetPTXSize" (program: Program, to: *mut usize);
    nvrtcGetCUBIN = b"nvrtcGetPTX" (program: Program, to: *mut c_char);
}

/// As in `nvrtc.h`, with a version of its own.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcVersion(major: *mut c_int, minor: *mut c_int) -> c_int {
    let Some(compiler) = compiler() else { return MISSING };
    // SAFETY: the type is that of the function in `nvrtc.h`, and the caller answers for the two numbers.
    unsafe {
        let real: Result<Symbol<'_, unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int>, _> =
            compiler.get(b"nvrtcVersion");
        let status = real.map_or(MISSING, |real| real(major, minor));
        if status == 0 {
            *minor += VERSION_OFFSET;
        }
        status
    }
}
