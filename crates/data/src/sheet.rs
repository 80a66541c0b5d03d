//! A contact sheet: the first images of a data set side by side, to look at.

use crate::dataset::{Dataset, Samples, Shape};
use crate::error::{Error, Result};

/// Pixels between images.
const GAP: usize = 1;

/// Images in rows on white, as a PNG.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContactSheet {
    /// Pixels per row.
    pub width: usize,
    /// Rows of pixels.
    pub height: usize,
    /// The file.
    pub png: Vec<u8>,
}

impl ContactSheet {
    /// The first `n` images of a set, as far as there are as many, in about as many columns as rows.
    ///
    /// # Errors
    /// If the samples are no images, or have neither one nor three channels.
    pub fn of(data: &Dataset, n: usize) -> Result<Self> {
        let (Shape::Image { height, width, channels }, 1 | 3) = (data.shape(), data.shape().n_channels()) else {
            let problem = format!("a contact sheet shows images of 1 or 3 channels, not samples of {}", data.shape());
            return Err(Error::inconsistent(data.name(), problem));
        };
        let n = n.clamp(1, data.n_samples());
        let columns = (1..=n).find(|columns| columns * columns >= n).unwrap_or(n);
        let (sheet_width, sheet_height) = (columns * (width + GAP) + GAP, n.div_ceil(columns) * (height + GAP) + GAP);
        let mut pixels = vec![u8::MAX; sheet_width * sheet_height * channels];
        for image in 0..n {
            let (top, left) = (GAP + image / columns * (height + GAP), GAP + image % columns * (width + GAP));
            for y in 0..height {
                let from = (image * height + y) * width * channels;
                let to = ((top + y) * sheet_width + left) * channels;
                (0..width * channels).for_each(|i| pixels[to + i] = shown(data, from + i));
            }
        }
        let png = encode(&pixels, sheet_width, sheet_height, channels)
            .map_err(|e| Error::inconsistent(data.name(), format!("cannot be written as a PNG: {e}")))?;
        Ok(Self { width: sheet_width, height: sheet_height, png })
    }
}

/// A stored value as a byte, before normalisation: 0 is black, 1 is white.
fn shown(data: &Dataset, at: usize) -> u8 {
    let value = match data.samples() {
        Samples::U8(values) => f32::from(values[at]),
        Samples::F32(values) => values[at],
        Samples::Tokens(_) => 0.0,
    };
    (value * data.normalisation().unit * 255.0).round() as u8
}

fn encode(pixels: &[u8], width: usize, height: usize, channels: usize) -> Result<Vec<u8>, png::EncodingError> {
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, width as u32, height as u32);
    encoder.set_color(if channels == 1 { png::ColorType::Grayscale } else { png::ColorType::Rgb });
    encoder.write_header()?.write_image_data(pixels)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_stand_side_by_side_on_white() {
        let shape = Shape::Image { height: 1, width: 2, channels: 1 };
        let data = Dataset::new("toy", shape, Samples::U8(vec![0, 1, 2, 3, 4, 5]), None, Vec::new()).unwrap();
        let sheet = ContactSheet::of(&data, 9).unwrap();
        assert_eq!((sheet.width, sheet.height), (7, 5));
        let mut reader = png::Decoder::new(&sheet.png[..]).read_info().unwrap();
        let mut pixels = vec![0; 35];
        reader.next_frame(&mut pixels).unwrap();
        assert_eq!(pixels[7..14], [255, 0, 1, 255, 2, 3, 255]);
        assert_eq!(pixels[21..28], [255, 4, 5, 255, 255, 255, 255]);
    }
}
