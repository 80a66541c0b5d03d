//! The `.npy` format: one array with a small header in Python syntax.
//!
//! Read are bytes, booleans, integers and floats of 16 to 64 bits (floats 32 and 64), little-endian, in C order.

use crate::error::{Error, Result};
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::Path;

/// Bytes that are read at once; a multiple of each value's length.
const CHUNK: usize = 1 << 16;

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

/// Reads a `.npy` file value by value, so that memory holds the values only; `name` is its name for messages.
pub(super) fn read(name: &str, path: &Path) -> Result<Array> {
    let failed = |error| Error::io("read", path)(error);
    let file = File::open(path).map_err(failed)?;
    let n_bytes = file.metadata().map_err(failed)?.len();
    let n_bytes = usize::try_from(n_bytes).unwrap_or(usize::MAX);
    from(name, BufReader::with_capacity(CHUNK, file), n_bytes).map_err(|error| match error {
        Failed::Reading(error) => failed(error),
        Failed::Malformed(error) => error,
    })
}

/// Parses the bytes of a `.npy` file; `name` is its name for messages.
pub(super) fn parse(name: &str, bytes: &[u8]) -> Result<Array> {
    from(name, bytes, bytes.len()).map_err(|error| match error {
        Failed::Reading(error) => Error::io("read", Path::new(name))(error),
        Failed::Malformed(error) => error,
    })
}

/// What ends reading: the file, or what it says.
enum Failed {
    Reading(io::Error),
    Malformed(Error),
}

impl From<io::Error> for Failed {
    fn from(error: io::Error) -> Self {
        Self::Reading(error)
    }
}

/// Reads an array from a source of `n_bytes`.
fn from(name: &str, mut source: impl Read, n_bytes: usize) -> std::result::Result<Array, Failed> {
    let malformed = |place: &str, expected: &str, found: String| {
        let hint = "save it with numpy.save(name, numpy.ascontiguousarray(a)), a being of type uint8, int64 or float32";
        Failed::Malformed(Error::malformed(name, place, expected, found, hint))
    };
    let header = read_header(&mut source, n_bytes)?;
    let (header, n_before) = header
        .ok_or_else(|| malformed("header", "NumPy's magic bytes and a whole header", format!("{n_bytes} bytes")))?;
    let lacks = |key: &str| malformed("header", &format!("a `{key}` entry"), header.trim().to_owned());
    if entry(&header, "fortran_order").ok_or_else(|| lacks("fortran_order"))?.starts_with("True") {
        return Err(malformed("order of values", "C order", "Fortran order".into()));
    }
    let shape = entry(&header, "shape").and_then(parse_shape).ok_or_else(|| lacks("shape"))?;
    let descr = entry(&header, "descr").and_then(|d| d.split(['\'', '"']).nth(1)).ok_or_else(|| lacks("descr"))?;
    let value_len = match descr {
        "|u1" | "|i1" | "|b1" => 1,
        "<u2" | "<i2" => 2,
        "<u4" | "<i4" | "<f4" => 4,
        "<u8" | "<i8" | "<f8" => 8,
        _ => return Err(malformed("type of values", "integers or 32- or 64-bit floats", format!("`{descr}`"))),
    };
    let n_data = n_bytes - n_before;
    // No header makes room for more than the source has.
    if shape.iter().try_fold(value_len, |product: usize, &size| product.checked_mul(size)) != Some(n_data) {
        let expected = format!("values for shape {shape:?} of type {descr}");
        return Err(malformed("values", &expected, format!("{n_data} bytes")));
    }
    let (n, from) = (n_data / value_len, &mut source);
    let values = match descr {
        "|u1" | "|b1" => Values::U8(each(from, n, |[b]: [u8; 1]| b)?),
        "|i1" => Values::Int(each(from, n, |[b]: [u8; 1]| i8::from_le_bytes([b]).into())?),
        "<u2" => Values::Int(each(from, n, |b| u16::from_le_bytes(b).into())?),
        "<i2" => Values::Int(each(from, n, |b| i16::from_le_bytes(b).into())?),
        "<u4" => Values::Int(each(from, n, |b| u32::from_le_bytes(b).into())?),
        "<i4" => Values::Int(each(from, n, |b| i32::from_le_bytes(b).into())?),
        // A value that does not fit is no valid label or count; it stays out of range, so that later checks reject it.
        "<u8" => Values::Int(each(from, n, |b| i64::try_from(u64::from_le_bytes(b)).unwrap_or(i64::MAX))?),
        "<i8" => Values::Int(each(from, n, i64::from_le_bytes)?),
        "<f4" => Values::F32(each(from, n, f32::from_le_bytes)?),
        _ => Values::F32(each(from, n, |b| f64::from_le_bytes(b) as f32)?),
    };
    Ok(Array { shape, values })
}

/// Header text and the number of bytes up to the data, if the magic bytes and the header's length are right.
fn read_header(source: &mut impl Read, n_bytes: usize) -> io::Result<Option<(String, usize)>> {
    // Magic, version, and the length: two bytes in version 1, then four.
    let mut start = [0; 8];
    if n_bytes < 12 {
        return Ok(None);
    }
    source.read_exact(&mut start)?;
    let is_short = start[6] == 1;
    let (mut n_header, n_length) = ([0; 4], if is_short { 2 } else { 4 });
    source.read_exact(&mut n_header[..n_length])?;
    let (n_header, n_before) = (u32::from_le_bytes(n_header) as usize, start.len() + n_length);
    if !start.starts_with(b"\x93NUMPY") || n_header > n_bytes - n_before {
        return Ok(None);
    }
    let mut header = vec![0; n_header];
    source.read_exact(&mut header)?;
    Ok(String::from_utf8(header).ok().map(|text| (text, n_before + n_header)))
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

/// The next `n` values.
fn each<const N: usize, T>(source: &mut impl Read, n: usize, convert: impl Fn([u8; N]) -> T) -> io::Result<Vec<T>> {
    let (mut values, mut chunk) = (Vec::with_capacity(n), vec![0; CHUNK]);
    while values.len() < n {
        let part = &mut chunk[..CHUNK.min(N * (n - values.len()))];
        source.read_exact(part)?;
        values.extend(part.as_chunks::<N>().0.iter().map(|bytes| convert(*bytes)));
    }
    Ok(values)
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
    fn a_file_of_many_chunks_is_read_as_its_bytes_say() {
        let n = CHUNK / 4 + 3;
        let data: Vec<u8> = (0..n).flat_map(|i| (i as f32).to_le_bytes()).collect();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.npy");
        std::fs::write(&path, file("<f4", &format!("({n},)"), &data)).unwrap();
        let expected = Values::F32((0..n).map(|i| i as f32).collect());
        assert_eq!(read("x", &path).unwrap(), Array { shape: vec![n], values: expected });
        dir.close().unwrap();
        assert!(read("x", &path).unwrap_err().to_string().contains("x.npy"));
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
