//! Figures, tables and pages, from plain numbers.
//!
//! This crate knows nothing of federated learning: a caller fills in [`Charts`], [`Dots`], [`Heat`], [`ClassMap`],
//! [`RegionGrid`], [`Sketch`], [`Table`] and [`Page`], and gets text back. All pictures are SVG by [`Svg`]; [`png()`] renders them with a font of its own. It reads
//! no file and opens no connection, and a page it makes never does either.
//!
//! ```
//! use fedproj_report::{Block, Page, Section, Sketch, png};
//!
//! let svg = Sketch { cosine: -0.6, subtitle: "an example".into() }.draw();
//! let bytes = png(&svg, 1.0)?;
//! let figure = Block::Figure { svg, narrow: None, caption: "what projection does".into() };
//! let page = Page {
//!     title: "An example".into(),
//!     sections: vec![Section { heading: "One picture".into(), blocks: vec![figure] }],
//!     ..Page::default()
//! };
//! assert!(bytes.starts_with(b"\x89PNG") && page.to_html().contains("<figcaption>what projection does"));
//! # Ok::<(), fedproj_report::PngError>(())
//! ```

mod axis;
mod class_map;
mod curves;
mod dots;
mod heat;
mod live;
mod mesh;
mod outline;
mod page;
mod palette;
mod png;
mod regions;
mod shades;
mod sketch;
mod svg;
mod table;
mod units;

pub use axis::{axis, ticks};
pub use class_map::ClassMap;
pub use curves::{Chart, ChartSize, Charts, Series, Spread};
pub use dots::{DotRow, Dots};
pub use heat::Heat;
pub use live::{Live, Pace};
pub use mesh::{Extent, Mesh, Outline};
pub use page::{Block, Page, Section};
pub use palette::{CLASSES, Look, Mark, SERIES};
pub use png::{Error as PngError, png};
pub use regions::{Panel, Point, RegionGrid};
pub use sketch::Sketch;
pub use svg::{Anchor, Style, Svg, Tag, wrap};
pub use table::Table;
pub use units::{Measure, duration};
