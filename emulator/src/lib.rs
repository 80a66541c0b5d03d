//! An emulated GPU: the parts of CUDA's driver and run-time compiler that fedproj calls, on the CPU.
//!
//! It runs the GPU's real kernels, so that machines without a GPU test them, and it watches them. The program is not
//! changed: this library goes under the names `libcuda.so` and `libnvrtc.so` into a folder at the front of
//! `LD_LIBRARY_PATH` (`emulator/check` does that).
//!
//! - [`nvrtc`] passes sources on to the real compiler, but hands out its PTX instead of machine code.
//! - [`driver`] keeps memory, streams and recorded graphs. Everything runs at once, in the calling thread's time.
//! - [`ptx`] reads PTX and turns each instruction into a closure, once per kernel.
//! - [`machine`] runs blocks on the threads of this machine, warp by warp, 32 lanes at a time.
//! - [`tensor`] has the products of the tensor cores.
//!
//! It is a sanitizer too. A fault ends the launch with an error that names kernel, block, thread and line of the PTX:
//!
//! - an access of global, shared or local memory that is out of bounds or not aligned, or to memory that was freed;
//! - a read of shared memory that nobody has written;
//! - two warps at the same word of shared memory without a barrier between them, one of them writing;
//! - a use of shared memory to which an asynchronous copy is in flight, or whose copy nobody has waited for;
//! - an instruction for all lanes of a warp that some of them never reach.
//!
//! What it cannot show: speed, races in global memory, races between lanes of one warp, and the last bits of numbers.
//! The compiler's last step, from PTX to machine code, is not run either; it may fuse products and sums.
//!
//! Environment variables: `EMULATED_GPU_NVRTC` is the real compiler's path, `EMULATED_GPU_CAPABILITY` the compute
//! capability (`8.0`), `EMULATED_GPU_PROCESSORS` the number of multiprocessors, `EMULATED_GPU_THREADS` the number of
//! threads. In the file `EMULATED_GPU_KERNELS`, each kernel gets a line when it is first launched.

pub mod driver;
pub mod gpu;
pub mod machine;
pub mod memory;
pub mod nvrtc;
pub mod ptx;
pub mod tensor;

#[cfg(test)]
mod tests;
