//! The `.npy` format: one array with a small header in Python syntax.
//!
//! Read are bytes, booleans, integers and floats of 16 to 64 bits (floats 32 and 64), little-endian, in C order.

use crate::error::{Error, Result};

/// An array as numbers that fit its use here.
#[derive(Debug, PartialEq)]
pub(super) struct Array {
    pub shape: Vec<usize>,
    pub values: Values,
}

/// The values of an array.
#[derive(Debug, PartialEq)]
pub(super) enum Values {
    U8(Vec<u8>),
    Int(Vec<i64>),
    F32(Vec<f32>),
}

/// Parses the bytes of a `.npy` file; `file` is its name for messages.
pub(super) fn parse(file: &str, bytes: &[u8]) -> Result<Array> {
    let malformed = |place: &str, expected: &str, found: String| {
        let hint = "save it with numpy.save(name, numpy.ascontiguousarray(a)), a being of type uint8, int64 or float32";
        Error::malformed(file, place, expected, found, hint)
    };
    let (header, data) = split_header(bytes).ok_or_else(|| {
        malformed("header", "NumPy's magic bytes and a whole header", format!("{} bytes", bytes.len()))
    })?;
    let lacks = |key: &str| malformed("header", &format!("a `{key}` entry"), header.trim().to_owned());
    if entry(header, "fortran_order").ok_or_else(|| lacks("fortran_order"))?.starts_with("True") {
        return Err(malformed("order of values", "C order", "Fortran order".into()));
    }
    let shape = entry(header, "shape").and_then(parse_shape).ok_or_else(|| lacks("shape"))?;
    let descr = entry(header, "descr").and_then(|d| d.split(['\'', '"']).nth(1)).ok_or_else(|| lacks("descr"))?;
    let value_len = match descr {
        "|u1" | "|i1" | "|b1" => 1,
        "<u2" | "<i2" => 2,
        "<u4" | "<i4" | "<f4" => 4,
        "<u8" | "<i8" | "<f8" => 8,
        _ => return Err(malformed("type of values", "integers or 32- or 64-bit floats", format!("`{descr}`"))),
    };
    let n_bytes = shape.iter().try_fold(value_len, |product: usize, &size| product.checked_mul(size));
    if n_bytes != Some(data.len()) {
        let expected = format!("values for shape {shape:?} of type {descr}");
        return Err(malformed("values", &expected, format!("{} bytes", data.len())));
    }
    let values = match descr {
        "|u1" | "|b1" => Values::U8(data.to_vec()),
        "|i1" => Values::Int(each(data, |[b]: [u8; 1]| i8::from_le_bytes([b]).into())),
        "<u2" => Values::Int(each(data, |b| u16::from_le_bytes(b).into())),
        "<i2" => Values::Int(each(data, |b| i16::from_le_bytes(b).into())),
        "<u4" => Values::Int(each(data, |b| u32::from_le_bytes(b).into())),
        "<i4" => Values::Int(each(data, |b| i32::from_le_bytes(b).into())),
        // A value that does not fit is no valid label or count; it stays out of range, so that later checks reject it.
        "<u8" => Values::Int(each(data, |b| i64::try_from(u64::from_le_bytes(b)).unwrap_or(i64::MAX))),
        "<i8" => Values::Int(each(data, i64::from_le_bytes)),
        "<f4" => Values::F32(each(data, f32::from_le_bytes)),
        _ => Values::F32(each(data, |b| f64::from_le_bytes(b) as f32)),
    };
    Ok(Array { shape, values })
}

/// Header text and data, if the magic bytes and the header's length are right.
fn split_header(bytes: &[u8]) -> Option<(&str, &[u8])> {
    let rest = bytes.strip_prefix(b"\x93NUMPY")?;
    let (version, rest) = rest.split_at_checked(2)?;
    let (n_header, rest) = if version[0] == 1 {
        let (n, rest) = rest.split_first_chunk()?;
        (usize::from(u16::from_le_bytes(*n)), rest)
    } else {
        let (n, rest) = rest.split_first_chunk()?;
        (u32::from_le_bytes(*n) as usize, rest)
    };
    let (header, data) = rest.split_at_checked(n_header)?;
    Some((std::str::from_utf8(header).ok()?, data))
}

/// What stands behind `'key':` in the header's dictionary.
fn entry<'a>(header: &'a str, key: &str) -> Option<&'a str> {
    let (_, rest) = header.split_once(&format!("'{key}'"))?;
    Some(rest.trim_start().strip_prefix(':')?.trim_start())
}

/// `(3, 32, 32)`, `(5,)` or `()`.
fn parse_shape(text: &str) -> Option<Vec<usize>> {
    let (inside, _) = text.strip_prefix('(')?.split_once(')')?;
    inside.split(',').map(str::trim).filter(|s| !s.is_empty()).map(|s| s.parse().ok()).collect()
}

fn each<const N: usize, T>(data: &[u8], convert: impl Fn([u8; N]) -> T) -> Vec<T> {
    data.as_chunks::<N>().0.iter().map(|chunk| convert(*chunk)).collect()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A version 1 file as NumPy writes it.
    pub fn file(descr: &str, shape: &str, data: &[u8]) -> Vec<u8> {
        let header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}\n");
        let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
        bytes.extend((header.len() as u16).to_le_bytes());
        bytes.extend(header.as_bytes());
        bytes.extend(data);
        bytes
    }

    #[test]
    fn all_types_are_read() {
        let values = |descr: &str, data: &[u8]| parse("t", &file(descr, "(1,)", data)).unwrap().values;
        assert_eq!(values("|u1", &[200]), Values::U8(vec![200]));
        assert_eq!(values("|i1", &[0xff]), Values::Int(vec![-1]));
        assert_eq!(values("<u2", &[1, 2]), Values::Int(vec![513]));
        assert_eq!(values("<i4", &(-7_i32).to_le_bytes()), Values::Int(vec![-7]));
        assert_eq!(values("<u8", &u64::MAX.to_le_bytes()), Values::Int(vec![i64::MAX]));
        assert_eq!(values("<f8", &1.5_f64.to_le_bytes()), Values::F32(vec![1.5]));
        assert_eq!(parse("t", &file("|u1", "(2, 3)", &[0; 6])).unwrap().shape, [2, 3]);
    }

    #[test]
    fn every_truncation_and_lie_is_an_error() {
        let whole = file("<f4", "(2,)", &[0; 8]);
        assert!(parse("t", &whole).is_ok());
        assert!((0..whole.len()).all(|n| parse("t", &whole[..n]).is_err()));
        let message = |descr: &str, shape: &str| parse("t", &file(descr, shape, &[0; 8])).unwrap_err().to_string();
        assert!(message("<f4", "(3,)").contains("values for shape [3]"));
        assert!(message("<f4", "(18446744073709551615, 9)").contains("values for shape"));
        assert!(message("<f4", "(-1,)").contains("`shape`"));
        assert!(message(">f4", "(2,)").contains("`>f4`"));
        assert!(message("|O", "(1,)").contains("`|O`"));
    }
}
