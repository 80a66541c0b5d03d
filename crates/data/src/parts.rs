//! The hash of a data set, part by part.

/// BLAKE3 of several parts, each preceded by its length, so that no two different sets feed the same bytes.
#[derive(Default)]
pub(crate) struct Parts(blake3::Hasher);

impl Parts {
    pub fn add(&mut self, bytes: &[u8]) {
        self.0.update(&(bytes.len() as u64).to_le_bytes());
        self.0.update(bytes);
    }

    pub fn add_floats(&mut self, values: &[f32]) {
        self.add_values(values, f32::to_le_bytes);
    }

    pub fn add_ids(&mut self, values: &[u32]) {
        self.add_values(values, u32::to_le_bytes);
    }

    /// Chunk by chunk, so that the bytes of a large set are not in memory beside it.
    fn add_values<T: Copy>(&mut self, values: &[T], to_bytes: impl Fn(T) -> [u8; 4]) {
        self.0.update(&(4 * values.len() as u64).to_le_bytes());
        let mut bytes = vec![0; 1 << 16];
        for part in values.chunks(bytes.len() / 4) {
            let of_part = &mut bytes[..4 * part.len()];
            of_part.as_chunks_mut().0.iter_mut().zip(part).for_each(|(place, value)| *place = to_bytes(*value));
            self.0.update(of_part);
        }
    }

    pub fn hex(&self) -> String {
        self.0.finalize().to_hex().to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_hashed_as_their_bytes_are() {
        for n in [0, 1, 1 << 14, (1 << 15) + 5] {
            let values: Vec<f32> = (0..n).map(|i| i as f32).collect();
            let (mut by_value, mut whole) = (Parts::default(), Parts::default());
            by_value.add_floats(&values);
            whole.add(&values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>());
            assert_eq!(by_value.hex(), whole.hex());
        }
    }
}
