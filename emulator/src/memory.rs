//! Global memory: each allocation has a window of addresses of its own, so that a wrong address hits nothing.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::VecDeque;

/// An address is the number of an allocation, and below it this many bits of a place.
const PLACE_BITS: u32 = 36;
/// Freed windows that wait before they are used again, so that old addresses are noticed.
const RESTING: usize = 1 << 14;
/// As the driver aligns memory.
const ALIGN: usize = 256;

/// One allocation; `len` 0 where there is none.
#[derive(Clone, Copy, Debug)]
struct Allocation {
    at: *mut u8,
    len: usize,
}

/// All allocations of a GPU.
#[derive(Debug, Default)]
pub struct Memory {
    allocations: Vec<Allocation>,
    freed: VecDeque<usize>,
    used: usize,
}

// SAFETY: the pointers are to memory that only this type frees, and `free` needs `&mut`. That threads which write the
// same place at the same time may lose either value is what kernels expect of a GPU.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

fn layout(len: usize) -> Option<Layout> {
    Layout::from_size_align(len, ALIGN).ok()
}

impl Memory {
    /// Bytes that are allocated.
    pub fn used(&self) -> usize {
        self.used
    }

    /// New memory, at an address of a window that has rested. `None` if the host has no more.
    pub fn allocate(&mut self, len: usize) -> Option<u64> {
        if len == 0 || len >= 1 << PLACE_BITS {
            return None;
        }
        // SAFETY: the length is not 0.
        let at = unsafe { alloc_zeroed(layout(len)?) };
        if at.is_null() {
            return None;
        }
        let rested = if self.freed.len() > RESTING { self.freed.pop_front() } else { None };
        let window = rested.unwrap_or_else(|| {
            self.allocations.push(Allocation { at: std::ptr::null_mut(), len: 0 });
            self.allocations.len() - 1
        });
        self.allocations[window] = Allocation { at, len };
        self.used += len;
        Some((window as u64 + 1) << PLACE_BITS)
    }

    /// Frees an allocation. False if there is none at the address.
    pub fn free(&mut self, address: u64) -> bool {
        let window = (address >> PLACE_BITS).wrapping_sub(1) as usize;
        let is_start = address.trailing_zeros() >= PLACE_BITS;
        let Some(allocation) = self.allocations.get_mut(window).filter(|a| a.len > 0 && is_start) else { return false };
        if let Some(layout) = layout(allocation.len) {
            // SAFETY: it was allocated with this layout and is not freed yet, since its length is not 0.
            unsafe { dealloc(allocation.at, layout) };
        }
        self.used -= allocation.len;
        allocation.len = 0;
        self.freed.push_back(window);
        true
    }

    /// The host's address of `len` bytes, which are all within one allocation.
    #[inline]
    pub fn locate(&self, address: u64, len: usize) -> Result<*mut u8, String> {
        let window = (address >> PLACE_BITS).wrapping_sub(1) as usize;
        let place = (address & ((1 << PLACE_BITS) - 1)) as usize;
        if let Some(allocation) = self.allocations.get(window)
            && place + len <= allocation.len
        {
            // SAFETY: the place is within the allocation.
            return Ok(unsafe { allocation.at.add(place) });
        }
        Err(self.outside(address, len))
    }

    /// The same, for one access of a kernel.
    #[inline]
    pub fn access(&self, address: u64, len: usize) -> Result<*mut u8, String> {
        if address & (len as u64 - 1) != 0 {
            return Err(format!("{len} bytes at {address:#x} are not aligned"));
        }
        self.locate(address, len)
    }

    #[cold]
    fn outside(&self, address: u64, len: usize) -> String {
        let window = (address >> PLACE_BITS).wrapping_sub(1) as usize;
        let place = address & ((1 << PLACE_BITS) - 1);
        let room = |window: usize| self.allocations.get(window).map(|a| a.len);
        // The upper half of a window belongs to what comes after it.
        let before = (1u64 << PLACE_BITS) - place;
        match (room(window), room(window.wrapping_add(1))) {
            (_, Some(room)) if room > 0 && before < place => {
                format!("{len} bytes, {before} before an allocation of {room} bytes")
            }
            (Some(0), _) => format!("{len} bytes at {place} of memory that was freed"),
            (Some(room), _) => format!("{len} bytes at {place} of an allocation of {room} bytes"),
            _ => format!("{len} bytes at {address:#x}, which is no address of global memory"),
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        for window in 0..self.allocations.len() as u64 {
            self.free((window + 1) << PLACE_BITS);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_access_must_lie_within_one_allocation() {
        let mut memory = Memory::default();
        let (a, b) = (memory.allocate(100).unwrap(), memory.allocate(8).unwrap());
        assert!(memory.access(a + 96, 4).is_ok() && memory.access(b, 8).is_ok());
        assert!(memory.access(a + 100, 4).unwrap_err().contains("at 100 of an allocation of 100 bytes"));
        assert!(memory.access(a + 96, 8).is_err());
        assert!(memory.access(a + 2, 4).unwrap_err().contains("not aligned"));
        assert!(memory.access(b - 4, 4).unwrap_err().contains("4 before an allocation of 8 bytes"));
        assert!(memory.access(0, 4).unwrap_err().contains("no address"));
        assert!(memory.access(u64::MAX - 3, 4).is_err());
        assert!(memory.free(a) && !memory.free(a) && !memory.free(b + 4));
        assert!(memory.access(a, 4).unwrap_err().contains("freed"));
        assert_ne!(memory.allocate(100), Some(a), "an old address hits nothing new");
        assert_eq!(memory.used(), 108);
    }
}
