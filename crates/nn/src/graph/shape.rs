//! Shapes of samples, and of windows on them.

use std::fmt;

/// The shape of one sample: an image (height, width, channels), or a vector as an image of one pixel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Height.
    pub h: usize,
    /// Width.
    pub w: usize,
    /// Channels, or the length of a vector.
    pub c: usize,
}

impl Shape {
    /// An image with its channels last.
    pub fn image(h: usize, w: usize, c: usize) -> Self {
        Self { h, w, c }
    }

    /// A vector.
    pub fn vector(len: usize) -> Self {
        Self { h: 1, w: 1, c: len }
    }

    /// A text of up to `len` tokens: a row of slots (see [`crate::Graph::embedding`]).
    pub fn tokens(len: usize) -> Self {
        Self { h: 1, w: len, c: 1 }
    }

    /// Number of elements.
    pub fn len(self) -> usize {
        self.h * self.w * self.c
    }

    /// Whether there are no elements.
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// Number of pixels.
    pub fn pixels(self) -> usize {
        self.h * self.w
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.pixels() == 1 { write!(f, "{}", self.c) } else { write!(f, "{}×{}×{}", self.h, self.w, self.c) }
    }
}

/// Sizes of a convolution or pooling window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Side of the square window.
    pub kernel: usize,
    /// Distance between windows.
    pub stride: usize,
    /// Zeros around the image; max-pools ignore them.
    pub padding: usize,
}

impl Window {
    /// A window.
    pub fn new(kernel: usize, stride: usize, padding: usize) -> Self {
        Self { kernel, stride, padding }
    }
}
