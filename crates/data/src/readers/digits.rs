//! Handwritten digits at 8×8, embedded; pixels 0–16 become 0–1. Source: scikit-learn's copy (test part of the
//! UCI optical recognition set).

use std::io::Read as _;

use super::csv::Format;
use crate::dataset::{Dataset, Normalisation, Samples, Shape};
use crate::error::{Error, Result};
use crate::registry::{Origin, Read, Reader, Request};
use crate::source::Splits;

pub(crate) const READER: Reader = Reader {
    name: "digits",
    about: "handwritten digits at 8×8",
    origin: Origin::Embedded,
    options: &["resize"],
    read: Read::Numbers(read),
};

fn read(request: &Request<'_>) -> Result<Splits> {
    let mut text = String::new();
    flate2::read::GzDecoder::new(&include_bytes!("../../embedded/digits.csv.gz")[..])
        .read_to_string(&mut text)
        .map_err(Error::io("unpack", "embedded digits".as_ref()))?;
    let table = Format::plain("embedded digits").parse(&text)?.into_dataset(request.name)?;
    let Samples::F32(values) = table.samples else { unreachable!("a table holds floats") };
    let pixels = values.into_iter().map(|v| v as u8).collect();
    let shape = Shape::Image { height: 8, width: 8, channels: 1 };
    let data = Dataset::new(request.name, shape, Samples::U8(pixels), table.labels, table.class_names)?;
    Ok(Splits { train: data.with_normalisation(Normalisation::scaling(1.0 / 16.0, 1))?, test: None })
}

#[cfg(test)]
mod tests {
    use crate::{Shape, SourceConfig, load};

    #[test]
    fn pixels_span_zero_to_one() {
        let digits = load(&SourceConfig::named("digits"), None).unwrap().train;
        assert_eq!((digits.n_samples(), digits.n_classes()), (1797, 10));
        assert_eq!(digits.shape(), Shape::Image { height: 8, width: 8, channels: 1 });
        let mut all = vec![0.0; 1797 * 64];
        digits.gather(&(0..1797).collect::<Vec<_>>(), &mut all);
        assert_eq!(all.iter().copied().fold(f32::MIN, f32::max), 1.0);
        assert_eq!(all.iter().copied().fold(f32::MAX, f32::min), 0.0);
    }
}
