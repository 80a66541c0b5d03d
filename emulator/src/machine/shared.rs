//! The shared memory of a block, which watches how it is used.
//!
//! Each word remembers who wrote and who read it since which barrier. So these are faults: reading what nobody wrote,
//! touching what a copy in flight will write, and two warps that meet at a word without a barrier between them, one of
//! them writing. Lanes of one warp are not told apart, nor are the bytes of a word.

/// Bytes that are watched together.
const WORD: usize = 4;
/// In `written`: an asynchronous copy to this word has begun, and nobody has waited for it.
const IN_FLIGHT: u32 = 1 << 31;
/// In `read`: by more than one warp.
const MANY: u32 = 1 << 5;

/// The last uses of a word: epoch and warp, 0 if there was none.
#[derive(Clone, Copy, Debug, Default)]
struct Uses {
    written: u32,
    read: u32,
}

/// Shared memory.
#[derive(Debug, Default)]
pub struct Shared {
    bytes: Vec<u8>,
    /// Per word.
    uses: Vec<Uses>,
    /// Counts barriers.
    epoch: u32,
}

fn tag(epoch: u32, warp: u32) -> u32 {
    epoch << 6 | warp
}

impl Shared {
    /// Begins a block with so many bytes, all of them unwritten.
    pub fn reset(&mut self, len: usize) {
        let words = len.div_ceil(WORD);
        self.bytes.resize(words * WORD, 0);
        self.uses.clear();
        self.uses.resize(words, Uses::default());
        self.epoch = 1;
    }

    /// All warps have met.
    pub fn barrier(&mut self) {
        self.epoch += 1;
    }

    #[inline(always)]
    fn words(&self, at: u64, len: usize) -> Result<std::ops::Range<usize>, String> {
        let start = at as usize;
        if at & (len as u64 - 1) != 0 {
            return Err(format!("{len} bytes at {at} of shared memory are not aligned"));
        }
        if at >= self.bytes.len() as u64 || start + len > self.bytes.len() {
            return Err(format!("{len} bytes at {at} are outside the {} bytes of shared memory", self.bytes.len()));
        }
        Ok(start / WORD..(start + len).div_ceil(WORD))
    }

    /// The bytes at a place, for a warp that reads them.
    #[inline]
    pub fn read(&mut self, at: u64, len: usize, warp: u32) -> Result<&[u8], String> {
        let (mine, now) = (tag(self.epoch, warp), tag(self.epoch, 0));
        let words = self.words(at, len)?;
        let first = words.start;
        for (i, uses) in self.uses[words].iter_mut().enumerate() {
            // Written before the last barrier, and not in flight.
            let is_old = uses.written.wrapping_sub(1) < now - 1;
            if !is_old && uses.written != mine {
                return Err(self.bad_read(first + i));
            }
            if uses.read != mine {
                uses.read = if uses.read < now { mine } else { mine | MANY };
            }
        }
        Ok(&self.bytes[at as usize..at as usize + len])
    }

    /// The bytes at a place, for a warp that writes them.
    pub fn write(&mut self, at: u64, len: usize, warp: u32) -> Result<&mut [u8], String> {
        self.touch(at, len, warp, tag(self.epoch, warp))?;
        Ok(&mut self.bytes[at as usize..at as usize + len])
    }

    /// A warp begins a copy to a place.
    pub fn begin_copy(&mut self, at: u64, len: usize, warp: u32) -> Result<(), String> {
        self.touch(at, len, warp, tag(self.epoch, warp) | IN_FLIGHT)
    }

    /// The copy is complete.
    pub fn end_copy(&mut self, at: u64, values: &[u8], warp: u32) {
        let start = at as usize;
        self.bytes[start..start + values.len()].copy_from_slice(values);
        let written = tag(self.epoch, warp);
        self.uses[start / WORD..(start + values.len()).div_ceil(WORD)]
            .iter_mut()
            .for_each(|uses| uses.written = written);
    }

    #[inline]
    fn touch(&mut self, at: u64, len: usize, warp: u32, new: u32) -> Result<(), String> {
        let (mine, now) = (tag(self.epoch, warp), tag(self.epoch, 0));
        let words = self.words(at, len)?;
        let first = words.start;
        for (i, uses) in self.uses[words].iter_mut().enumerate() {
            // What is in flight is later than now.
            let clash = |tag: u32| tag >= now && tag != mine;
            if clash(uses.written) || clash(uses.read) {
                return Err(self.bad_write(first + i));
            }
            uses.written = new;
        }
        Ok(())
    }

    #[cold]
    fn bad_read(&self, word: usize) -> String {
        let (at, tag) = (word * WORD, self.uses[word].written);
        match tag {
            0 => format!("it reads shared memory at {at}, which nobody has written"),
            _ if tag & IN_FLIGHT != 0 => format!("it reads shared memory at {at}, whose copy nobody has waited for"),
            _ => format!("race: it reads shared memory at {at}, which warp {} writes without a barrier", tag % 32),
        }
    }

    #[cold]
    fn bad_write(&self, word: usize) -> String {
        let (at, Uses { written, read }) = (word * WORD, self.uses[word]);
        if written & IN_FLIGHT != 0 {
            return format!("it writes shared memory at {at}, to which a copy is in flight");
        }
        if read >> 6 == self.epoch {
            return format!("race: it writes shared memory at {at}, which warp {} reads without a barrier", read % 32);
        }
        format!("race: it writes shared memory at {at}, as warp {} does without a barrier", written % 32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(len: usize) -> Shared {
        let mut shared = Shared::default();
        shared.reset(len);
        shared
    }

    #[test]
    fn places_are_checked() {
        let mut shared = block(16);
        assert!(shared.write(8, 8, 0).is_ok());
        assert!(shared.write(12, 8, 0).unwrap_err().contains("not aligned"));
        assert!(shared.write(16, 4, 0).unwrap_err().contains("outside"));
        assert!(shared.read(u64::MAX - 3, 4, 0).is_err());
        assert!(shared.read(0, 4, 0).unwrap_err().contains("nobody has written"));
        assert!(shared.read(8, 4, 0).is_ok());
        shared.reset(16);
        assert!(shared.read(8, 4, 0).is_err(), "a block does not see what the one before it has left");
    }

    #[test]
    fn warps_need_a_barrier_between_them() {
        let mut shared = block(4);
        shared.write(0, 4, 3).unwrap().fill(7);
        assert!(shared.read(0, 4, 3).is_ok());
        assert!(shared.read(0, 4, 4).unwrap_err().contains("warp 3 writes"));
        assert!(shared.write(0, 4, 4).unwrap_err().contains("race"));
        shared.barrier();
        assert_eq!(shared.read(0, 4, 4).unwrap(), [7; 4]);
        assert!(shared.read(0, 4, 3).is_ok());
        assert!(shared.write(0, 4, 3).unwrap_err().contains("reads without a barrier"), "warp 4 has read too");
        shared.barrier();
        assert!(shared.write(0, 4, 3).is_ok());
    }

    #[test]
    fn a_copy_is_seen_after_it_is_waited_for() {
        let mut shared = block(4);
        shared.begin_copy(0, 4, 0).unwrap();
        assert!(shared.read(0, 4, 0).unwrap_err().contains("waited"));
        assert!(shared.write(0, 4, 0).unwrap_err().contains("in flight"));
        shared.barrier();
        assert!(shared.read(0, 4, 1).is_err(), "a barrier does not wait for copies");
        shared.end_copy(0, &[1, 2, 3, 4], 0);
        assert!(shared.read(0, 4, 1).unwrap_err().contains("race"));
        shared.barrier();
        assert_eq!(shared.read(0, 4, 1).unwrap(), [1, 2, 3, 4]);
    }
}
