//! `fedproj models`: what `model.name` can be.

use crate::{give, say};
use anyhow::Result;
use clap::Args;
use fedproj_nn::Shape;
use fedproj_nn::models::{self, CATALOGUE, Entry, Variant};
use serde::Serialize;

/// Arguments of `models`.
#[derive(Args)]
pub struct Models {
    /// Print a JSON array of objects
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Row {
    name: &'static str,
    input: &'static str,
    classes: usize,
    parameters: usize,
    /// Of one sample.
    mflop_forward: f64,
    about: &'static str,
}

impl Models {
    /// Prints the catalogue.
    pub fn run(self) -> Result<()> {
        let rows = CATALOGUE.iter().map(row).collect::<Result<Vec<_>>>()?;
        give(self.json, &rows, || {
            say!("{:<14}{:>8}{:>12}{:>9}  about", "name", "input", "parameters", "MFLOP");
            for Row { name, input, parameters, mflop_forward, about, .. } in &rows {
                say!("{name:<14}{input:>8}{parameters:>12}{mflop_forward:>9.2}  {about}");
            }
            say!("\nFor 10 classes; MFLOP: one sample's forward pass. Choose one with model.name=NAME.");
        })
    }
}

fn row(entry: &Entry) -> Result<Row> {
    // A perceptron is for tables and small images: the embedded digits have 8×8 pixels.
    let (input, shape) = match entry.name {
        "mlp" => ("64", Shape::vector(64)),
        _ if entry.reads_text => ("64 words", Shape::tokens(64)),
        _ => ("32×32×3", Shape::image(32, 32, 3)),
    };
    let graph = models::build(entry.name, shape, 10, Variant::default())?;
    let mflop_forward = graph.flops_forward() as f64 / 1e6;
    let (name, about) = (entry.name, entry.about);
    Ok(Row { name, input, classes: 10, parameters: graph.params().len(), mflop_forward, about })
}
