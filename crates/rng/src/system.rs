//! Bits that nobody can repeat.

use crate::Bits;

/// Bytes that are asked for at a time: a call into the kernel costs more than they do.
const BUFFER_BYTES: usize = 4096;

/// Bits of the operating system's generator. Not a [`Clone`]: a copy would draw the same again.
#[derive(Debug)]
pub struct System {
    buffer: [u8; BUFFER_BYTES],
    used: usize,
}

impl Default for System {
    fn default() -> Self {
        Self { buffer: [0; BUFFER_BYTES], used: BUFFER_BYTES }
    }
}

impl Bits for System {
    /// # Panics
    /// If the operating system has no generator.
    fn next_u32(&mut self) -> u32 {
        if self.used == BUFFER_BYTES {
            getrandom::fill(&mut self.buffer).expect("the operating system has a generator");
            self.used = 0;
        }
        let (words, _) = self.buffer[self.used..].as_chunks::<4>();
        self.used += 4;
        u32::from_le_bytes(words[0])
    }
}
