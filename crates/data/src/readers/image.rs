//! One image: PNG or JPEG, as bytes.

use std::path::Path;

use png::{BitDepth, Limits, Transformations};
use zune_jpeg::JpegDecoder;
use zune_jpeg::zune_core::bytestream::ZCursor;
use zune_jpeg::zune_core::colorspace::ColorSpace;
use zune_jpeg::zune_core::options::DecoderOptions;

use crate::error::{Error, Result};

/// An image may not take more memory than this.
const BYTES_MAX: usize = 512 << 20;

/// Luminance of red, green and blue: BT.709's primaries with a white point of (0.31272, 0.32903).
const LUMINANCE: [f32; 3] = [0.212_647_84, 0.715_179_2, 0.072_173_04];

/// A decoded image.
pub(super) struct Image {
    pub height: usize,
    pub width: usize,
    /// Grey, grey and alpha, RGB, or RGB and alpha.
    channels: usize,
    /// Whether a value has two bytes, the larger first.
    is_wide: bool,
    bytes: Vec<u8>,
}

impl Image {
    /// Reads a file; its first bytes show which kind it is. The inner error describes what is wrong with the image.
    pub fn read(path: &Path) -> Result<std::result::Result<Self, String>> {
        let bytes = std::fs::read(path).map_err(Error::io("read", path))?;
        let image = match &bytes[..] {
            [0x89, b'P', b'N', b'G', ..] => png(&bytes),
            [0xff, 0xd8, 0xff, ..] => jpeg(&bytes),
            _ => Err("a file that begins like neither".into()),
        };
        Ok(image.map_err(|e| e.trim_end().to_owned()))
    }

    /// Whether the file has no colours.
    pub fn is_grey(&self) -> bool {
        self.channels < 3
    }

    /// One byte per pixel if `grey`, else red, green and blue. Alpha is dropped.
    pub fn into_bytes(self, grey: bool) -> Vec<u8> {
        if !self.is_wide && self.channels == if grey { 1 } else { 3 } {
            return self.bytes;
        }
        if self.is_wide {
            let values: Vec<u16> = self.bytes.as_chunks().0.iter().map(|pair| u16::from_be_bytes(*pair)).collect();
            convert(&values, self.channels, grey, f32::from(u16::MAX), |v| ((u32::from(v) + 128) / 257) as u8)
        } else {
            convert(&self.bytes, self.channels, grey, f32::from(u8::MAX), |v| v)
        }
    }
}

/// Pixels with other channels. `max` is the largest value; `narrow` scales a value to a byte.
fn convert<T: Copy + Into<f32>>(
    values: &[T],
    channels: usize,
    grey: bool,
    max: f32,
    narrow: impl Fn(T) -> u8,
) -> Vec<u8> {
    let (n_colours, factor) = (if channels < 3 { 1 } else { 3 }, 1.0 / max);
    let pixels = values.chunks_exact(channels).map(|pixel| &pixel[..n_colours]);
    let byte = |value: f32| (value * 255.0).round() as u8;
    match (n_colours, grey) {
        (1, true) | (3, false) => pixels.flatten().map(|v| narrow(*v)).collect(),
        (1, false) => pixels.flat_map(|grey| [byte(grey[0].into() * factor); 3]).collect(),
        _ => pixels
            .map(|rgb| {
                byte(rgb.iter().zip(LUMINANCE).fold(0.0, |sum, (v, weight)| sum + (*v).into() * factor * weight))
            })
            .collect(),
    }
}

fn png(bytes: &[u8]) -> std::result::Result<Image, String> {
    let mut decoder = png::Decoder::new_with_limits(bytes, Limits { bytes: BYTES_MAX });
    // Palettes become colours, and fewer than eight bits become eight; sixteen stay.
    decoder.set_transformations(Transformations::EXPAND);
    let mut reader = decoder.read_info().map_err(|e| e.to_string())?;
    let (colour, depth) = reader.output_color_type();
    let mut bytes = buffer(reader.output_buffer_size())?;
    reader.next_frame(&mut bytes).map_err(|e| e.to_string())?;
    let (width, height) = reader.info().size();
    let is_wide = depth == BitDepth::Sixteen;
    Ok(Image { height: height as usize, width: width as usize, channels: colour.samples(), is_wide, bytes })
}

fn jpeg(bytes: &[u8]) -> std::result::Result<Image, String> {
    let options = DecoderOptions::default().set_strict_mode(false).set_max_width(usize::MAX).set_max_height(usize::MAX);
    let mut decoder = JpegDecoder::new_with_options(ZCursor::new(bytes), options);
    decoder.decode_headers().map_err(|e| e.to_string())?;
    let is_grey = decoder.input_colorspace() == Some(ColorSpace::Luma);
    decoder.set_options(options.jpeg_set_out_colorspace(if is_grey { ColorSpace::Luma } else { ColorSpace::RGB }));
    let (width, height) = decoder.dimensions().unwrap_or_default();
    let channels = if is_grey { 1 } else { 3 };
    let mut bytes = buffer(width * height * channels)?;
    decoder.decode_into(&mut bytes).map_err(|e| e.to_string())?;
    Ok(Image { height, width, channels, is_wide: false, bytes })
}

fn buffer(n_bytes: usize) -> std::result::Result<Vec<u8>, String> {
    if n_bytes > BYTES_MAX {
        return Err(format!("an image of {n_bytes} bytes, more than {BYTES_MAX}"));
    }
    Ok(vec![0; n_bytes])
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// 3 × 5 pixels of (200, 30, 90).
    pub const COLOUR_JPEG: &[u8] = include_bytes!("../../tests/images/colour.jpg");
    const GREY_JPEG: &[u8] = include_bytes!("../../tests/images/grey.jpg");

    fn image(channels: usize, is_wide: bool, bytes: &[u8]) -> Image {
        Image { height: 1, width: bytes.len() / channels, channels, is_wide, bytes: bytes.to_vec() }
    }

    #[test]
    fn every_kind_of_pixel_becomes_grey_or_colour() {
        let check = |channels, is_wide, bytes: &[u8], grey: &[u8], colour: &[u8]| {
            let bytes = |grey| image(channels, is_wide, bytes).into_bytes(grey);
            assert_eq!((&bytes(true)[..], &bytes(false)[..]), (grey, colour), "{channels} channels, wide {is_wide}");
        };
        check(1, false, &[7, 255], &[7, 255], &[7, 7, 7, 255, 255, 255]);
        check(2, false, &[7, 0, 255, 9], &[7, 255], &[7, 7, 7, 255, 255, 255]);
        check(3, false, &[255, 0, 0, 0, 255, 0, 0, 0, 255], &[54, 182, 18], &[255, 0, 0, 0, 255, 0, 0, 0, 255]);
        check(4, false, &[10, 20, 30, 0], &[19], &[10, 20, 30]);
        check(1, true, &[1, 128, 255, 255], &[1, 255], &[1, 1, 1, 255, 255, 255]);
        check(4, true, &[255, 255, 0, 0, 1, 129, 0, 0], &[54], &[255, 0, 1]);
    }

    #[test]
    fn jpegs_are_grey_or_colour() {
        let colour = jpeg(COLOUR_JPEG).unwrap();
        assert_eq!((colour.height, colour.width, colour.is_grey()), (5, 3, false));
        assert_eq!(colour.into_bytes(false), [[200, 31, 90]; 15].concat());
        let grey = jpeg(GREY_JPEG).unwrap();
        assert_eq!((grey.is_grey(), grey.into_bytes(true)), (true, vec![120; 15]));
        assert!(jpeg(&COLOUR_JPEG[..100]).is_err());
    }

    #[test]
    fn an_image_larger_than_memory_allows_is_rejected() {
        let mut bytes = Vec::new();
        let encoder = png::Encoder::new(&mut bytes, 1 << 20, 1 << 20);
        encoder.write_header().unwrap().write_chunk(png::chunk::IDAT, &[0; 8]).unwrap();
        assert!(png(&bytes).is_err_and(|e| e.contains("more than")));
    }
}
