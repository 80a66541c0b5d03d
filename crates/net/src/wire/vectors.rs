//! Vectors as bytes, little-endian, and back with every size checked.

use crate::error::{Error, Result};

/// Values as bytes.
pub fn encode_f32(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// Values as bytes.
pub fn encode_u32(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// Values as bytes.
pub fn encode_u64(values: &[u64]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// Values of bytes; what is left behind whole ones is dropped.
pub fn decode_u64(bytes: &[u8]) -> Vec<u64> {
    bytes.as_chunks().0.iter().map(|b| u64::from_le_bytes(*b)).collect()
}

/// Exactly `n` finite values.
///
/// # Errors
/// If their number differs, or one is not finite.
pub fn decode_f32(bytes: &[u8], n: usize, what: &str) -> Result<Vec<f32>> {
    let values: Vec<f32> = quads(bytes, n, what)?.iter().map(|b| f32::from_le_bytes(*b)).collect();
    match values.iter().find(|v| !v.is_finite()) {
        Some(v) => Err(Error::protocol(format!("{what}: contains the value {v}"))),
        None => Ok(values),
    }
}

/// Exactly `n` whole numbers below `limit`.
///
/// # Errors
/// If their number differs, or one is too large.
pub fn decode_u32(bytes: &[u8], n: usize, limit: u32, what: &str) -> Result<Vec<u32>> {
    let values: Vec<u32> = quads(bytes, n, what)?.iter().map(|b| u32::from_le_bytes(*b)).collect();
    match values.iter().find(|&&v| v >= limit) {
        Some(v) => Err(Error::protocol(format!("{what}: {v} is not below {limit}"))),
        None => Ok(values),
    }
}

fn quads<'a>(bytes: &'a [u8], n: usize, what: &str) -> Result<&'a [[u8; 4]]> {
    let (quads, rest) = bytes.as_chunks::<4>();
    if quads.len() == n && rest.is_empty() {
        return Ok(quads);
    }
    Err(Error::protocol(format!("{what}: {} bytes; expected {n} values of 4 bytes", bytes.len())))
}

/// The inverse of [`gather_rows`](fedproj_data::gather_rows): a (n, ·) matrix with these rows, zero elsewhere.
///
/// # Panics
/// If an index is not below `n`.
pub fn place_rows(rows: &[f32], indices: &[u32], n: usize) -> Vec<f32> {
    let width = rows.len() / indices.len().max(1);
    let mut out = vec![0.0; n * width];
    for (&i, row) in indices.iter().zip(rows.chunks_exact(width.max(1))) {
        out[i as usize * width..][..width].copy_from_slice(row);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_of_the_wrong_length_or_with_nan_are_rejected() {
        let bytes = encode_f32(&[1.0, 2.0]);
        assert_eq!(decode_f32(&bytes, 2, "w").unwrap(), [1.0, 2.0]);
        for (bytes, n) in [(&bytes[..], 3), (&bytes[..7], 2), (&encode_f32(&[f32::NAN])[..], 1)] {
            assert!(decode_f32(bytes, n, "w").is_err());
        }
        assert!(decode_u32(&encode_u32(&[1, 9]), 2, 9, "i").unwrap_err().to_string().contains("9 is not below 9"));
    }

    #[test]
    fn rows_travel_to_their_places() {
        let values: Vec<f32> = (0..10u8).map(f32::from).collect();
        let mut rows = Vec::new();
        fedproj_data::gather_rows(&values, 5, &[1, 4], &mut rows);
        assert_eq!(place_rows(&rows, &[1, 4], 5), [0.0, 0.0, 2.0, 3.0, 0.0, 0.0, 0.0, 0.0, 8.0, 9.0]);
        assert!(place_rows(&[], &[1, 4], 5).is_empty());
    }
}
