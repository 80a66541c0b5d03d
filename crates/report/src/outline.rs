//! Outlines of paths and of text.

use crate::png::{Error, Result, numbers};
use std::sync::LazyLock;
use tiny_skia::{Path, PathBuilder};
use ttf_parser::{Face, GlyphId, OutlineBuilder};

/// How a line of text is set.
#[derive(Clone, Copy)]
pub(crate) struct Text {
    pub(crate) size: f32,
    pub(crate) is_bold: bool,
    /// The share of the text that is left of its point.
    pub(crate) anchor: f32,
}

static FACES: LazyLock<[Face<'static>; 2]> = LazyLock::new(|| {
    [dejavu::sans::regular(), dejavu::sans::bold()].map(|font| Face::parse(font, 0).expect("our own font is sound"))
});

/// A line of text at a point of its base line; nothing if it has no ink.
pub(crate) fn text(text: &str, (x, y): (f32, f32), style: Text) -> Option<Path> {
    let face = &FACES[usize::from(style.is_bold)];
    let scale = style.size / f32::from(face.units_per_em());
    let glyphs: Vec<GlyphId> = text.chars().map(|c| face.glyph_index(c).unwrap_or_default()).collect();
    let advance = |i: usize| {
        let next = glyphs.get(i + 1).map_or(0, |&next| kerning(face, glyphs[i], next));
        scale * f32::from(face.glyph_hor_advance(glyphs[i]).unwrap_or(0).cast_signed() + next)
    };
    let width: f32 = (0..glyphs.len()).map(advance).sum();
    let mut pen = Pen { path: PathBuilder::new(), x: x - style.anchor * width, y, scale };
    for (i, &glyph) in glyphs.iter().enumerate() {
        face.outline_glyph(glyph, &mut pen);
        pen.x += advance(i);
    }
    pen.path.finish()
}

/// How far a pair of glyphs moves apart, in the font's units.
fn kerning(face: &Face, left: GlyphId, right: GlyphId) -> i16 {
    let tables = face.tables().kern.into_iter().flat_map(|kern| kern.subtables);
    tables.filter(|t| t.horizontal && !t.has_cross_stream).find_map(|t| t.glyphs_kerning(left, right)).unwrap_or(0)
}

/// Draws glyphs of a font, whose y axis points upwards.
struct Pen {
    path: PathBuilder,
    x: f32,
    y: f32,
    scale: f32,
}

impl Pen {
    fn at(&self, x: f32, y: f32) -> (f32, f32) {
        (self.x + self.scale * x, self.y - self.scale * y)
    }
}

impl OutlineBuilder for Pen {
    fn move_to(&mut self, x: f32, y: f32) {
        let (x, y) = self.at(x, y);
        self.path.move_to(x, y);
    }

    fn line_to(&mut self, x: f32, y: f32) {
        let (x, y) = self.at(x, y);
        self.path.line_to(x, y);
    }

    fn quad_to(&mut self, x1: f32, y1: f32, x: f32, y: f32) {
        let ((x1, y1), (x, y)) = (self.at(x1, y1), self.at(x, y));
        self.path.quad_to(x1, y1, x, y);
    }

    fn curve_to(&mut self, x1: f32, y1: f32, x2: f32, y2: f32, x: f32, y: f32) {
        let ((x1, y1), (x2, y2), (x, y)) = (self.at(x1, y1), self.at(x2, y2), self.at(x, y));
        self.path.cubic_to(x1, y1, x2, y2, x, y);
    }

    fn close(&mut self) {
        self.path.close();
    }
}

/// A path of straight lines and half circles; nothing if it is empty.
pub(crate) fn path(data: &str) -> Result<Option<Path>> {
    let (mut path, mut x, mut y) = (PathBuilder::new(), 0.0, 0.0);
    let mut rest = data;
    while let Some(command) = rest.chars().next() {
        let end = rest[1..].find(|c: char| c.is_ascii_alphabetic()).map_or(rest.len(), |i| i + 1);
        let unknown = || Error::Unknown(rest[..end].into());
        let arguments = numbers(&rest[1..end]).ok_or_else(unknown)?;
        match (command, arguments.as_slice()) {
            ('M', &[to_x, to_y]) => {
                (x, y) = (to_x, to_y);
                path.move_to(x, y);
            }
            ('z', []) => path.close(),
            ('a', &[rx, ry, _, _, 0.0, dx, dy]) if (rx - ry).abs() < 1e-6 && dx.hypot(dy) > 1.99 * rx => {
                half_circle(&mut path, (x, y), (dx / 2.0, dy / 2.0));
                (x, y) = (x + dx, y + dy);
            }
            (command, arguments) => {
                (x, y) = match (command, arguments) {
                    ('L', &[to_x, to_y]) => (to_x, to_y),
                    ('H', &[to_x]) => (to_x, y),
                    ('l', &[dx, dy]) => (x + dx, y + dy),
                    ('h', &[dx]) => (x + dx, y),
                    ('v', &[dy]) => (x, y + dy),
                    _ => return Err(unknown()),
                };
                path.line_to(x, y);
            }
        }
        rest = &rest[end..];
    }
    Ok(path.finish())
}

/// From a point to the one opposite, against the clock; `(u, v)` leads to the centre.
fn half_circle(path: &mut PathBuilder, (x, y): (f32, f32), (u, v): (f32, f32)) {
    /// Control points of a quarter circle of radius 1 (the usual cubic approximation).
    const K: f32 = 0.552_284_8;
    // The point halfway lies at a right angle to the way to the centre.
    let (top_x, top_y) = (x + u + v, y + v - u);
    path.cubic_to(x + K * v, y - K * u, top_x - K * u, top_y - K * v, top_x, top_y);
    let (x, y) = (x + 2.0 * u, y + 2.0 * v);
    path.cubic_to(top_x + K * u, top_y + K * v, x + K * v, y - K * u, x, y);
}
