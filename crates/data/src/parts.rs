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
        self.add(&values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>());
    }

    pub fn add_ids(&mut self, values: &[u32]) {
        self.add(&values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>());
    }

    pub fn hex(&self) -> String {
        self.0.finalize().to_hex().to_string()
    }
}
