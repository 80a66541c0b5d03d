//! Projections against several references, and away from what acts on layers' inputs.

use super::fleet::{DOT_CHUNK, Fleet};
use super::gpu::{DeviceArray, Parameter, parameters};
use super::memory::{Rows, Vectors};
use crate::error::{Error, Result};
use crate::graph::Product;

/// References at most, as in `constraints.cu`.
const REFERENCES_MAX: usize = 16;

/// Several vectors of each lane.
#[repr(C)]
pub(super) struct References {
    at: [Rows; REFERENCES_MAX],
    n: i32,
}
parameters!(References);

impl References {
    fn new(vectors: &[Rows]) -> Result<Self> {
        let mut at = [Rows::NONE; REFERENCES_MAX];
        let Some(first) = at.get_mut(..vectors.len()) else {
            return Err(Error::Length { what: "references", expected: REFERENCES_MAX, found: vectors.len() });
        };
        first.copy_from_slice(vectors);
        Ok(Self { at, n: vectors.len() as i32 })
    }
}

/// Where a layer's weights are in a flat vector.
#[repr(C)]
pub(super) struct Layer {
    weight: i32,
    /// Negative if there are none.
    bias: i32,
    outputs: i32,
    row: i32,
}
parameters!(Layer);

impl Layer {
    fn of(product: &Product) -> Self {
        let bias = if product.bias.is_empty() { -1 } else { product.bias.start as i32 };
        let (weight, row) = (product.weight.start as i32, product.row_len() as i32);
        Self { weight, bias, outputs: product.outputs as i32, row }
    }
}

/// How the nearest vector within a cone is searched.
#[derive(Clone, Copy, Debug)]
pub struct Search {
    /// Passes over the dual's numbers at most.
    pub passes: usize,
    /// A change below this share of ‖g‖ ends it.
    pub tolerance: f64,
}

/// Memory of [`Fleet::project_to_cone`].
#[derive(Debug)]
pub struct Cone {
    sums: DeviceArray<f64>,
    dual: Vectors,
}

/// Memory of [`Fleet::project_inputs`].
#[derive(Debug)]
pub struct Inputs {
    products: Vec<Product>,
    /// Directions per layer at most.
    most: usize,
    counts: Vectors,
    trusted: Vectors,
    /// G U, W U, (W U)ᵀ G U and their product.
    along: Vectors,
    weights_along: Vectors,
    inner: Vectors,
    scaled: Vectors,
}

const fn n_pairs(n: usize) -> usize {
    (n + 1) * (n + 2) / 2
}

impl Fleet {
    /// Memory for projections against 16 references at most.
    ///
    /// # Errors
    /// If the GPU's memory is too small.
    pub fn cone(&self) -> Result<Cone> {
        let n_chunks = self.graph.params().len().div_ceil(DOT_CHUNK);
        let sums = self.gpu.zeros(self.n_lanes * n_pairs(REFERENCES_MAX) * n_chunks)?;
        Ok(Cone { sums, dual: self.vectors(REFERENCES_MAX)? })
    }

    /// Replaces g by the nearest vector that points against none of the references. Counts it.
    ///
    /// # Errors
    /// If there are more than 16 references, or the driver fails.
    pub fn project_to_cone(&self, cone: &Cone, g: Rows, references: &[Rows], search: Search) -> Result<()> {
        let (len, n, stride) = (self.graph.params().len(), references.len(), cone.sums.len() / self.n_lanes);
        let (n_chunks, lanes, dual) = (len.div_ceil(DOT_CHUNK), self.lanes.at(), cone.dual.rows());
        let r = References::new(references)?;
        let p: [&dyn Parameter; 6] = [&lanes, &(len as i32), &r, &g, &cone.sums.at(), &(stride as i64)];
        self.launch("cone_dots", [n_chunks, n_pairs(n)], [256, 1], 0, &p)?;
        let p: [&dyn Parameter; 9] = [
            &lanes,
            &(n as i32),
            &(n_chunks as i32),
            &cone.sums.at(),
            &(stride as i64),
            &(search.passes as i32),
            &search.tolerance,
            &dual,
            &self.stats.at(),
        ];
        self.launch("cone_dual", [1, 1], [256, 1], 0, &p)?;
        self.each("cone_add", len, &[&lanes, &(len as i32), &r, &dual, &g])
    }

    /// Memory for projections of these layers with 16 vectors of directions at most, and `most` directions per layer. Those beyond
    /// are not seen.
    ///
    /// # Errors
    /// If the GPU's memory is too small.
    pub fn inputs(&self, products: Vec<Product>, most: usize) -> Result<Inputs> {
        let outputs = products.iter().map(|product| product.outputs).max().unwrap_or(0);
        let most = most.min(REFERENCES_MAX * outputs);
        let rows = || self.vectors(outputs * most);
        Ok(Inputs {
            counts: self.vectors(1)?,
            trusted: self.vectors(1)?,
            along: rows()?,
            weights_along: rows()?,
            scaled: rows()?,
            inner: self.vectors(most * most)?,
            products,
            most,
        })
    }

    /// G ← G − Σ_j (G r_j) r_jᵀ per layer, whose r_j lie output by output in `directions`. With `trust` also the scaling of
    /// TRGP, G + (W U)(W U)ᵀ (G U) Uᵀ, in layers whose G lies along the r_j by that share of its length.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn project_inputs(
        &self,
        inputs: &Inputs,
        g: Rows,
        theta: Rows,
        directions: &[Rows],
        trust: Option<f32>,
    ) -> Result<()> {
        let (lanes, r) = (self.lanes.at(), References::new(directions)?);
        let Inputs { counts, trusted, along, weights_along, inner, scaled, .. } = inputs;
        let [counts, trusted, along, weights_along, inner, scaled] =
            [counts, trusted, along, weights_along, inner, scaled].map(Vectors::rows);
        for product in &inputs.products {
            let layer = Layer::of(product);
            let (outputs, width) = (product.outputs, product.row_len() + usize::from(!product.bias.is_empty()));
            let most = inputs.most.min(directions.len() * outputs);
            let stride = most as i32;
            let measure = |v: Rows, to: Rows| {
                let p: [&dyn Parameter; 7] = [&lanes, &layer, &r, &stride, &counts, &v, &to];
                self.launch("along_directions", [outputs, 1], [256, 1], 0, &p)
            };
            let add = |sign: f32, by: Rows, trusted: Rows| {
                let p: [&dyn Parameter; 9] = [&lanes, &layer, &r, &stride, &counts, &sign, &by, &trusted, &g];
                self.launch("add_directions", [outputs, width.div_ceil(256)], [256, 1], 0, &p)
            };
            let multiply = |plain: bool, a: Rows, b: Rows, to: Rows| {
                let len = most * if plain { outputs } else { most };
                let (outputs, plain) = (outputs as i32, i32::from(plain));
                self.each("multiply_directions", len, &[&lanes, &outputs, &stride, &counts, &plain, &a, &b, &to])
            };
            self.launch("count_directions", [1, 1], [256, 1], 0, &[&lanes, &layer, &r, &stride, &counts])?;
            measure(g, along)?;
            if let Some(share) = trust {
                let p: [&dyn Parameter; 8] = [&lanes, &layer, &stride, &counts, &share, &g, &along, &trusted];
                self.launch("trust_directions", [1, 1], [256, 1], 0, &p)?;
            }
            add(-1.0, along, Rows::NONE)?;
            if trust.is_some() {
                measure(theta, weights_along)?;
                multiply(false, weights_along, along, inner)?;
                multiply(true, weights_along, inner, scaled)?;
                add(1.0, scaled, trusted)?;
            }
        }
        Ok(())
    }
}
