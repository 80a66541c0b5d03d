//! SVG to PNG, in the font that comes with the program: the same bytes on every machine, whatever fonts it has.

use resvg::{tiny_skia, usvg};
use std::sync::{Arc, LazyLock};

/// Why a picture could not be rendered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The SVG cannot be read.
    #[error("cannot read the SVG: {0}")]
    Svg(#[from] usvg::Error),
    /// There is no memory for a picture of that size.
    #[error("no picture of {width} × {height} pixels can be made")]
    Size {
        /// Pixels.
        width: u32,
        /// Pixels.
        height: u32,
    },
    /// The encoder failed.
    #[error("cannot encode the PNG: {0}")]
    Encode(String),
}

static FONTS: LazyLock<Arc<usvg::fontdb::Database>> = LazyLock::new(|| {
    let mut fonts = usvg::fontdb::Database::new();
    fonts.load_font_data(dejavu::sans::regular().to_vec());
    fonts.load_font_data(dejavu::sans::bold().to_vec());
    fonts.set_sans_serif_family("DejaVu Sans");
    Arc::new(fonts)
});

/// The picture as a PNG, enlarged by `scale`.
///
/// # Errors
/// If the SVG cannot be read, or the picture is too large.
pub fn png(svg: &str, scale: f32) -> Result<Vec<u8>, Error> {
    let options =
        usvg::Options { fontdb: Arc::clone(&FONTS), font_family: "DejaVu Sans".into(), ..usvg::Options::default() };
    let tree = usvg::Tree::from_str(svg, &options)?;
    let size = tree.size();
    let (width, height) = ((size.width() * scale).ceil() as u32, (size.height() * scale).ceil() as u32);
    let mut pixels = tiny_skia::Pixmap::new(width, height).ok_or(Error::Size { width, height })?;
    resvg::render(&tree, tiny_skia::Transform::from_scale(scale, scale), &mut pixels.as_mut());
    pixels.encode_png().map_err(|e| Error::Encode(e.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::svg::{Style, Svg};

    #[test]
    fn a_picture_has_the_asked_size_and_its_text_is_drawn() {
        let picture = |text: &str| {
            let mut svg = Svg::new(60.0, 20.0, "t");
            svg.text(4.0, 15.0, text, Style::new(12.0));
            png(&svg.finish(), 2.0).unwrap()
        };
        let bytes = picture("⟨g, r⟩");
        assert_eq!(&bytes[..8], b"\x89PNG\r\n\x1a\n");
        assert_eq!(bytes[16..24], [0, 0, 0, 120, 0, 0, 0, 40]);
        assert_ne!(bytes, picture(""));
    }

    #[test]
    fn what_is_no_svg_is_an_error() {
        assert!(matches!(png("<svg", 1.0), Err(Error::Svg(_))));
    }
}
