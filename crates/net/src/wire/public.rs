//! A public set as bytes: `FEDPROJP`, the length of the header (u32), the header ([`PublicHeader`]), the samples, and the
//! labels if there are any. Decoding checks every size.

use super::{decode_f32, decode_u32, encode_f32, encode_u32};
use crate::error::{Error, Result};
use fedproj_data::{Dataset, Normalisation, Samples, Shape, Tokens, WORDS_PER_TEXT};
use prost::Message;

const MAGIC: &[u8; 8] = b"FEDPROJP";

/// The header of a public set.
#[derive(Clone, PartialEq, Message)]
struct PublicHeader {
    /// Height, width and channels of an image; features of a row; or slots per text and tokens of all texts.
    #[prost(uint64, repeated, tag = "1")]
    shape: Vec<u64>,
    /// Samples.
    #[prost(uint64, tag = "2")]
    n_samples: u64,
    /// Values are bytes, not floats.
    #[prost(bool, tag = "3")]
    bytes: bool,
    /// See [`Normalisation`].
    #[prost(float, tag = "4")]
    unit: f32,
    /// See [`Normalisation`].
    #[prost(float, repeated, tag = "5")]
    mean: Vec<f32>,
    /// See [`Normalisation`].
    #[prost(float, repeated, tag = "6")]
    std: Vec<f32>,
    /// Names of the classes, if labels follow.
    #[prost(string, repeated, tag = "7")]
    class_names: Vec<String>,
}

/// A public set as bytes.
pub fn encode_public(data: &Dataset) -> Vec<u8> {
    let shape = match data.shape() {
        Shape::Image { height, width, channels } => vec![height as u64, width as u64, channels as u64],
        Shape::Vector { features } => vec![features as u64],
        // Texts are ragged: the second number is the number of tokens.
        Shape::Tokens { len } => {
            let n_tokens = if let Samples::Tokens(texts) = data.samples() { texts.n_tokens() } else { 0 };
            vec![len as u64, n_tokens as u64]
        }
    };
    let Normalisation { unit, mean, std } = data.normalisation().clone();
    let class_names = data.labels().map(|_| data.class_names().to_vec()).unwrap_or_default();
    let is_bytes = matches!(data.samples(), Samples::U8(_));
    let n_samples = data.n_samples() as u64;
    let header = PublicHeader { shape, n_samples, bytes: is_bytes, unit, mean, std, class_names }.encode_to_vec();
    let mut out = MAGIC.to_vec();
    out.extend((header.len() as u32).to_le_bytes());
    out.extend(header);
    match data.samples() {
        Samples::U8(values) => out.extend_from_slice(values),
        Samples::F32(values) => out.extend(encode_f32(values)),
        Samples::Tokens(texts) => out.extend(encode_u32(&texts.to_words())),
    }
    out.extend(encode_u32(data.labels().unwrap_or(&[])));
    out
}

/// Reads what [`encode_public`] wrote.
///
/// # Errors
/// If a size contradicts the header, or a value is not finite.
pub fn decode_public(bytes: &[u8]) -> Result<Dataset> {
    let cut = || Error::protocol("public set: truncated");
    let rest = bytes.strip_prefix(MAGIC).ok_or_else(|| Error::protocol("not a public set"))?;
    let (len, rest) = rest.split_first_chunk::<4>().ok_or_else(cut)?;
    let header_len = u32::from_le_bytes(*len) as usize;
    let (header, rest) = rest.split_at_checked(header_len).ok_or_else(cut)?;
    let header = PublicHeader::decode(header).map_err(|e| Error::protocol(format!("public set: {e}")))?;
    let size = |v: u64| usize::try_from(v).map_err(|_| cut());
    let shape = match header.shape[..] {
        [height, width, channels] => {
            Shape::Image { height: size(height)?, width: size(width)?, channels: size(channels)? }
        }
        [len, _] => Shape::Tokens { len: size(len)? },
        [features] => Shape::Vector { features: size(features)? },
        _ => return Err(Error::protocol("public set: neither images, texts nor rows")),
    };
    // The product may overflow. Sizes are checked against the bytes before anything is allocated.
    let n_samples = size(header.n_samples)?;
    let n_values = match header.shape[..] {
        [_, n_tokens] => n_samples.checked_mul(WORDS_PER_TEXT).and_then(|n| n.checked_add(size(n_tokens).ok()?)),
        _ => header.shape.iter().try_fold(n_samples, |n, &side| n.checked_mul(size(side).ok()?)),
    };
    let n_values = n_values.ok_or_else(cut)?;
    let n_bytes = if header.bytes { Some(n_values) } else { n_values.checked_mul(4) };
    let (samples, labels) = rest.split_at_checked(n_bytes.ok_or_else(cut)?).ok_or_else(cut)?;
    let samples = if matches!(shape, Shape::Tokens { .. }) {
        let words = decode_u32(samples, n_values, u32::MAX, "texts of the public set")?;
        Samples::Tokens(Tokens::from_words(&words, n_samples)?)
    } else if header.bytes {
        Samples::U8(samples.to_vec())
    } else {
        Samples::F32(decode_f32(samples, n_values, "public set")?)
    };
    let n_classes = header.class_names.len() as u32;
    let n_labels = if n_classes > 0 { n_samples } else { 0 };
    let labels = decode_u32(labels, n_labels, n_classes, "labels of the public set")?;
    let labels = (n_classes > 0).then_some(labels);
    let normalisation = Normalisation { unit: header.unit, mean: header.mean, std: header.std };
    Ok(Dataset::new("public", shape, samples, labels, header.class_names)?.with_normalisation(normalisation)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn images() -> Dataset {
        let shape = Shape::Image { height: 2, width: 3, channels: 1 };
        let names = vec!["a".into(), "b".into()];
        let data = Dataset::new("x", shape, Samples::U8((0..18).collect()), Some(vec![0, 1, 1]), names).unwrap();
        data.with_normalisation(Normalisation::bytes(&[0.3], &[0.7])).unwrap()
    }

    fn texts() -> Dataset {
        let mut texts = Tokens::default();
        texts.push(&[101, 7, 102], 3, true).unwrap();
        texts.push(&[101, 102, 9, 102], 2, false).unwrap();
        Dataset::new("z", Shape::Tokens { len: 6 }, Samples::Tokens(texts), None, vec![]).unwrap()
    }

    #[test]
    fn a_public_set_comes_back_as_it_was() {
        let rows =
            Dataset::new("y", Shape::Vector { features: 2 }, Samples::F32(vec![1.0, -0.5, 3.0, 4.0]), None, vec![]);
        for data in [images(), images().without_labels(), rows.unwrap(), texts()] {
            let back = decode_public(&encode_public(&data)).unwrap();
            assert_eq!(back.hash(), data.hash());
        }
    }

    /// Found by fuzzing: protobuf omits a unit of −0. It came back as 0, and the set's hash changed.
    #[test]
    fn a_unit_that_makes_all_inputs_equal_is_rejected() {
        for unit in [0.0, -0.0, -1.0, f32::NAN] {
            let mut bytes = encode_public(&images());
            let at = bytes.windows(4).position(|four| four == (1.0f32 / 255.0).to_le_bytes()).unwrap();
            bytes[at..at + 4].copy_from_slice(&f32::to_le_bytes(unit));
            assert!(decode_public(&bytes).unwrap_err().to_string().contains("cannot be normalised"), "unit {unit}");
        }
    }

    proptest! {
        #[test]
        fn damaged_public_sets_are_errors_or_sets_never_panics(
            flips in proptest::collection::vec((0usize..200, any::<u8>()), 0..6), cut in 0usize..200,
        ) {
            let mut bytes = encode_public(&if cut % 3 == 0 { texts() } else { images() });
            for (at, to) in flips {
                let at = at % bytes.len();
                bytes[at] = to;
            }
            bytes.truncate(bytes.len() - cut.min(bytes.len()) * (cut % 2));
            if let Ok(data) = decode_public(&bytes) {
                prop_assert_eq!(decode_public(&encode_public(&data)).unwrap().hash(), data.hash());
            }
        }
    }
}
