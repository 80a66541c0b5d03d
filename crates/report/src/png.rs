//! SVG to PNG, in the font that comes with the program: the same bytes on every machine, whatever fonts it has.
//!
//! It reads the part of SVG that [`Svg`](crate::Svg) is used for, and rejects everything else.

use crate::outline;
use roxmltree::{Document, Node};
use std::rc::Rc;
use tiny_skia::{
    Color, FillRule, LineJoin, Mask, Paint, Path, PathBuilder, Pixmap, Rect, Stroke, StrokeDash, Transform,
};

/// Why a picture could not be rendered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The SVG cannot be read.
    #[error("cannot read the SVG: {0}")]
    Svg(#[from] roxmltree::Error),
    /// It contains what no picture of ours contains.
    #[error("cannot draw `{0}`")]
    Unknown(String),
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

pub(crate) type Result<T> = std::result::Result<T, Error>;

/// The picture as a PNG, enlarged by `scale`.
///
/// # Errors
/// If the SVG cannot be read or drawn, or the picture is too large.
pub fn png(svg: &str, scale: f32) -> Result<Vec<u8>> {
    let document = Document::parse(svg)?;
    let root = document.root_element();
    let size = (length(root, "width", 0.0)?, length(root, "height", 0.0)?);
    let (width, height) = ((size.0 * scale).ceil() as u32, (size.1 * scale).ceil() as u32);
    let pixels = Pixmap::new(width, height).ok_or(Error::Size { width, height })?;
    let mut canvas = Canvas { document: &document, size, pixels };
    canvas.draw(root, &Look { at: Transform::from_scale(scale, scale), ..Look::default() })?;
    canvas.pixels.encode_png().map_err(|e| Error::Encode(e.to_string()))
}

struct Canvas<'a> {
    document: &'a Document<'a>,
    size: (f32, f32),
    pixels: Pixmap,
}

/// What an element inherits from those around it.
#[derive(Clone)]
struct Look<'a> {
    /// From the element to the pixels.
    at: Transform,
    clip: Option<Rc<Mask>>,
    fill: &'a str,
    fill_opacity: f32,
    stroke: &'a str,
    stroke_opacity: f32,
    stroke_width: f32,
    dashes: Vec<f32>,
    join: LineJoin,
    text: outline::Text,
}

impl Default for Look<'_> {
    fn default() -> Self {
        Self {
            at: Transform::identity(),
            clip: None,
            fill: "#000000",
            fill_opacity: 1.0,
            stroke: "none",
            stroke_opacity: 1.0,
            stroke_width: 1.0,
            dashes: Vec::new(),
            join: LineJoin::Miter,
            text: outline::Text { size: 16.0, is_bold: false, anchor: 0.0 },
        }
    }
}

impl<'a> Canvas<'a> {
    fn draw(&mut self, node: Node<'a, 'a>, around: &Look<'a>) -> Result<()> {
        let look = self.look(node, around)?;
        match node.tag_name().name() {
            "svg" | "g" => node.children().filter(Node::is_element).try_for_each(|child| self.draw(child, &look)),
            "defs" | "title" => Ok(()),
            "use" => self.draw(self.find(node.attribute("href").unwrap_or_default())?, &look),
            "text" => {
                let at = (length(node, "x", 0.0)?, length(node, "y", 0.0)?);
                let path = outline::text(node.text().unwrap_or_default(), at, look.text);
                self.paint(path, &look)
            }
            _ => self.paint(self.shape(node)?, &look),
        }
    }

    /// The outline of an element; none if it is empty.
    fn shape(&self, node: Node) -> Result<Option<Path>> {
        let number = |name| length(node, name, 0.0);
        match node.tag_name().name() {
            "path" => outline::path(node.attribute("d").unwrap_or_default()),
            "line" => {
                let mut path = PathBuilder::new();
                path.move_to(number("x1")?, number("y1")?);
                path.line_to(number("x2")?, number("y2")?);
                Ok(path.finish())
            }
            "rect" => {
                let (width, height) = (length(node, "width", self.size.0)?, length(node, "height", self.size.1)?);
                let rect = Rect::from_xywh(number("x")?, number("y")?, width, height);
                Ok(rect.map(PathBuilder::from_rect))
            }
            name => Err(Error::Unknown(format!("<{name}>"))),
        }
    }

    fn paint(&mut self, path: Option<Path>, look: &Look) -> Result<()> {
        let Some(path) = path else { return Ok(()) };
        let paint = |colour, opacity| -> Result<Option<Paint>> {
            let mut paint = Paint::default();
            Ok(colour_of(colour, opacity)?.map(|colour| {
                paint.set_color(colour);
                paint
            }))
        };
        let clip = look.clip.as_deref();
        if let Some(fill) = paint(look.fill, look.fill_opacity)? {
            self.pixels.fill_path(&path, &fill, FillRule::Winding, look.at, clip);
        }
        if let Some(line) = paint(look.stroke, look.stroke_opacity)? {
            let dash = StrokeDash::new(look.dashes.clone(), 0.0);
            let stroke = Stroke { width: look.stroke_width, line_join: look.join, dash, ..Stroke::default() };
            self.pixels.stroke_path(&path, &line, &stroke, look.at, clip);
        }
        Ok(())
    }

    fn look(&self, node: Node<'a, 'a>, around: &Look<'a>) -> Result<Look<'a>> {
        let mut look = around.clone();
        for attribute in node.attributes() {
            let (name, value) = (attribute.name(), attribute.value());
            let unknown = || Error::Unknown(format!("{name}=\"{value}\""));
            let number = || value.parse::<f32>().map_err(|_| unknown());
            match name {
                "fill" => look.fill = value,
                "fill-opacity" => look.fill_opacity = number()?,
                "stroke" => look.stroke = value,
                "stroke-opacity" => look.stroke_opacity = number()?,
                "stroke-width" => look.stroke_width = number()?,
                "stroke-dasharray" => look.dashes = numbers(value).ok_or_else(unknown)?,
                "stroke-linejoin" if value == "round" => look.join = LineJoin::Round,
                "font-size" => look.text.size = number()?,
                "font-weight" => look.text.is_bold = value == "bold",
                "text-anchor" => look.text.anchor = if value == "middle" { 0.5 } else { 1.0 },
                "transform" => look.at = look.at.pre_concat(transform(value).ok_or_else(unknown)?),
                // Read elsewhere, or for browsers only.
                "x" | "y" | "x1" | "y1" | "x2" | "y2" | "width" | "height" | "d" | "id" | "href" | "clip-path"
                | "class" | "font-family" | "pointer-events" | "role" | "viewBox" => {}
                _ if name.starts_with("data-") => {}
                _ => return Err(unknown()),
            }
        }
        if let Some(path) = node.attribute("clip-path") {
            let id = path.trim_start_matches("url(").trim_end_matches(')');
            let frame = self.find(id)?.first_element_child().ok_or_else(|| Error::Unknown(path.into()))?;
            let (width, height) = (self.pixels.width(), self.pixels.height());
            let mut mask = Mask::new(width, height).ok_or(Error::Size { width, height })?;
            if let Some(path) = self.shape(frame)? {
                mask.fill_path(&path, FillRule::Winding, true, look.at);
            }
            look.clip = Some(Rc::new(mask));
        }
        Ok(look)
    }

    /// The element that `#id` names.
    fn find(&self, name: &str) -> Result<Node<'a, 'a>> {
        let found = self.document.descendants().find(|n| n.attribute("id") == name.strip_prefix('#'));
        found.filter(|_| name.starts_with('#')).ok_or_else(|| Error::Unknown(name.into()))
    }
}

/// A length in pixels, or in per cent of `whole`.
fn length(node: Node, name: &str, whole: f32) -> Result<f32> {
    let value = node.attribute(name).unwrap_or("0");
    let read = match value.strip_suffix('%') {
        Some(share) => share.parse::<f32>().map(|share| share / 100.0 * whole),
        None => value.parse(),
    };
    read.map_err(|_| Error::Unknown(format!("{name}=\"{value}\"")))
}

/// Numbers with spaces between them.
pub(crate) fn numbers(text: &str) -> Option<Vec<f32>> {
    text.split_whitespace().map(|n| n.parse().ok()).collect()
}

fn transform(text: &str) -> Option<Transform> {
    let (name, arguments) = text.strip_suffix(')')?.split_once('(')?;
    match (name, numbers(arguments)?.as_slice()) {
        ("translate", &[x, y]) => Some(Transform::from_translate(x, y)),
        ("rotate", &[degrees, x, y]) => Some(Transform::from_rotate_at(degrees, x, y)),
        _ => None,
    }
}

/// `#rgb` or `#rrggbb`; `none` is no colour.
fn colour_of(text: &str, opacity: f32) -> Result<Option<Color>> {
    if text == "none" {
        return Ok(None);
    }
    let hex = text.strip_prefix('#').and_then(|hex| Some((hex.len(), u32::from_str_radix(hex, 16).ok()?)));
    let [red, green, blue] = match hex {
        Some((6, n)) => [n >> 16, n >> 8 & 0xff, n & 0xff],
        Some((3, n)) => [n >> 8, n >> 4 & 0xf, n & 0xf].map(|c| 17 * c),
        _ => return Err(Error::Unknown(text.into())),
    };
    let share = |c: u32| c as f32 / 255.0;
    Ok(Color::from_rgba(share(red), share(green), share(blue), opacity.clamp(0.0, 1.0)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::svg::{Anchor, Style, Svg};

    fn pixels(svg: Svg) -> Pixmap {
        Pixmap::decode_png(&png(&svg.finish(), 2.0).unwrap()).unwrap()
    }

    fn at(pixels: &Pixmap, x: u32, y: u32) -> [u8; 3] {
        let colour = pixels.pixel(2 * x, 2 * y).unwrap();
        [colour.red(), colour.green(), colour.blue()]
    }

    #[test]
    fn shapes_colours_clips_and_turns_are_where_they_belong() {
        let mut svg = Svg::new(40.0, 20.0, "t");
        svg.tag("defs").open();
        svg.tag("clipPath").set("id", "c").open();
        svg.tag("rect").number("width", 5.0).number("height", 5.0).end();
        svg.close();
        svg.tag("path").set("id", "disc").set("d", "M12 15a3 3 0 1 0 6 0a3 3 0 1 0 -6 0z").end();
        svg.close();
        svg.tag("g").set("transform", "translate(20 10)").set("clip-path", "url(#c)").set("fill", "#f00").open();
        svg.tag("rect").number("x", -9.0).number("width", 20.0).number("height", 9.0).end();
        svg.close();
        svg.tag("use").set("href", "#disc").set("fill", "#0072B2").end();
        svg.line((1.0, 1.0), (1.0, 19.0)).set("stroke", "#00f").set("stroke-opacity", "0.5").end();
        let picture = pixels(svg);
        assert_eq!((picture.width(), picture.height()), (80, 40));
        let white = [255; 3];
        let expected = [
            ((22, 12), [255, 0, 0]),
            ((26, 12), white),
            ((18, 12), white),
            ((15, 15), [0, 0x72, 0xb2]),
            ((13, 16), [0, 0x72, 0xb2]),
            ((11, 15), white),
            ((1, 9), [127, 127, 255]),
        ];
        for ((x, y), colour) in expected {
            assert_eq!(at(&picture, x, y), colour, "{x} {y}");
        }
    }

    /// Columns of the picture that are not white.
    fn inked(svg: Svg) -> Vec<u32> {
        let picture = pixels(svg);
        let white = |x| (0..picture.height()).all(|y| picture.pixel(x, y).unwrap().red() == 255);
        (0..picture.width()).filter(|&x| !white(x)).collect()
    }

    #[test]
    fn text_is_drawn_where_it_is_anchored() {
        let line = |text: &str, style: Style| {
            let mut svg = Svg::new(100.0, 20.0, "t");
            svg.text(50.0, 15.0, text, style);
            inked(svg)
        };
        let (start, end) = (line("⟨g, r⟩", Style::new(12.0)), line("⟨g, r⟩", Style::new(12.0).anchor(Anchor::End)));
        assert!(start[0] >= 100 && end.last().unwrap() <= &100, "{start:?} {end:?}");
        let middle = line("HH", Style::new(12.0).anchor(Anchor::Middle));
        assert!((middle[0] + middle.last().unwrap()).abs_diff(200) <= 2, "{middle:?}");
        assert!(line("HH", Style::new(12.0).bold()).len() > middle.len());
        assert_eq!(line("", Style::new(12.0)), []);
        // Kerning: an A under a V.
        let width = |text: &str| line(text, Style::new(40.0)).last().unwrap() - 100;
        assert!(width("AV") < width("A") + width("V"));
    }

    #[test]
    fn what_cannot_be_drawn_is_an_error() {
        assert!(matches!(png("<svg", 1.0), Err(Error::Svg(_))));
        let inner = |inner: &str| png(&format!("<svg width=\"9\" height=\"9\">{inner}</svg>"), 1.0);
        inner("<g fill=\"#123\"/>").unwrap();
        for unknown in [
            "<ellipse/>",
            "<rect opacity=\"0.5\"/>",
            "<rect width=\"1\" height=\"1\" fill=\"red\"/>",
            "<path d=\"M0 0Q1 1 2 2\"/>",
            "<path d=\"M0\"/>",
            "<path d=\"M0 0a3 4 0 1 0 6 0\"/>",
            "<use href=\"#x\"/>",
            "<g transform=\"scale(2)\"/>",
        ] {
            assert!(matches!(inner(unknown), Err(Error::Unknown(_))), "{unknown}");
        }
        assert!(matches!(png("<svg width=\"9\"/>", 1.0), Err(Error::Size { .. })));
    }
}
