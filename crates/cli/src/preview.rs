//! `fedproj data preview`: a contact sheet of a data set's first images.

use crate::data::data_dir;
use crate::say;
use anyhow::{Context, Result};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use clap::Args;
use fedproj_core::{Config, parse_value, read_value};
use fedproj_data::files::write_atomically;
use fedproj_data::{ContactSheet, SourceConfig, load};
use fedproj_report::Svg;
use std::path::PathBuf;

/// Arguments of `data preview`.
#[derive(Args)]
pub struct Preview {
    /// A data set, or a table as `data.public` takes it: '{ name = "procedural", source = "fractal" }'
    source: String,
    /// Images to show
    #[arg(long, default_value_t = 64)]
    samples: usize,
    /// Write the sheet as a PNG, pixel by pixel
    #[arg(long, value_name = "FILE", required_unless_present = "svg")]
    png: Option<PathBuf>,
    /// Write the sheet as an SVG, four times as large
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Data directory [default: $FEDPROJ_DATA, then ./data]
    #[arg(long = "data-dir", value_name = "DIR")]
    dir: Option<PathBuf>,
}

impl Preview {
    /// Reads or draws the images, and writes the sheet.
    pub fn run(self) -> Result<()> {
        let mut config: SourceConfig = read_value(&parse_value(&self.source), "SOURCE", &Config::keys()?)?;
        if config.source.is_some() {
            // An image does not depend on how many others are drawn.
            config.samples = Some(self.samples);
        }
        let data = load(&config, data_dir(self.dir)?.as_deref())?.train;
        let sheet = ContactSheet::of(&data, self.samples)?;
        let write = |path: &PathBuf, bytes: &[u8]| {
            write_atomically(path, bytes).with_context(|| format!("cannot write `{}`", path.display()))?;
            say!("{}", path.display());
            Ok::<_, anyhow::Error>(())
        };
        if let Some(path) = &self.png {
            write(path, &sheet.png)?;
        }
        if let Some(path) = &self.svg {
            write(path, svg(&sheet, data.name()).as_bytes())?;
        }
        Ok(())
    }
}

/// The sheet as a picture in an SVG, with sharp pixels.
fn svg(sheet: &ContactSheet, name: &str) -> String {
    let (width, height) = (4.0 * sheet.width as f64, 4.0 * sheet.height as f64);
    let mut svg = Svg::new(width, height, &format!("the first images of {name}"));
    let picture = format!("data:image/png;base64,{}", BASE64_STANDARD.encode(&sheet.png));
    let image = svg.tag("image").number("width", width).number("height", height);
    image.set("style", "image-rendering:pixelated").set("href", &picture).end();
    svg.finish()
}
