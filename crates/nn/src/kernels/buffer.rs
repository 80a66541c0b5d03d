//! Heap memory aligned to cache lines.

use std::ops::{Deref, DerefMut};

/// Floats per cache line.
const LINE: usize = 16;

/// A fixed-size slice of `f32` on a 64-byte boundary: a vector load never straddles two cache lines. The system commits
/// pages of a large slice only when they are written. So a workspace for the longest texts costs nothing while texts
/// are short.
#[derive(Default)]
pub struct Buffer {
    memory: Vec<f32>,
    start: usize,
    len: usize,
}

impl Buffer {
    /// `len` zeros.
    pub fn zeros(len: usize) -> Self {
        // The system hands out zeros of a plain type as uncommitted pages.
        let memory = vec![0.0; len + LINE - 1];
        let start = memory.as_ptr().align_offset(4 * LINE);
        Self { memory, start, len }
    }
}

impl Clone for Buffer {
    /// The copy has its own offset to the next cache line.
    fn clone(&self) -> Self {
        Self::from(&**self)
    }
}

impl From<&[f32]> for Buffer {
    fn from(values: &[f32]) -> Self {
        let mut buffer = Self::zeros(values.len());
        buffer.copy_from_slice(values);
        buffer
    }
}

impl Deref for Buffer {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.memory[self.start..self.start + self.len]
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.memory[self.start..self.start + self.len]
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        (**self).fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn starts_on_a_cache_line_and_has_the_asked_length() {
        for len in [0, 1, 15, 16, 17, 1000] {
            let buffer = Buffer::zeros(len);
            assert_eq!(buffer.len(), len);
            assert_eq!(buffer.as_ptr() as usize % 64, 0);
        }
        let buffer = Buffer::from(&[1.0, 2.0][..]);
        assert_eq!(&*buffer.clone(), &[1.0, 2.0]);
        assert_eq!(buffer.clone().as_ptr() as usize % 64, 0);
    }
}
