//! Arithmetic on the lanes' flat vectors.

use super::fleet::{DOT_CHUNK, Fleet};
use super::gpu::{Parameter, Queue, parameters};
use super::memory::{Extent, Rows, Vectors};
use crate::error::Result;
use crate::vector::Bounds;

/// The bounds of a projection, as in `vector.cu`.
#[repr(C)]
pub(super) struct DeviceBounds {
    eps: f64,
    norm_guard: f64,
    coefficient_max: f64,
    always: i32,
    above_reference: i32,
    count: i32,
}
parameters!(DeviceBounds = "Bounds");

impl Fleet {
    fn n_params(&self) -> usize {
        self.graph.params().len()
    }

    /// y ← y + a·x
    ///
    /// # Errors
    /// If the driver fails.
    pub fn axpy(&self, a: f32, x: Rows, y: Rows) -> Result<()> {
        let len = self.n_params();
        self.each("axpy", len, &[&self.lanes.at(), &(len as i32), &a, &x, &y])
    }

    /// out ← out + a·(x − y)
    ///
    /// # Errors
    /// If the driver fails.
    pub fn axpy_difference(&self, a: f32, x: Rows, y: Rows, out: Rows) -> Result<()> {
        let len = self.n_params();
        self.each("axpy_difference", len, &[&self.lanes.at(), &(len as i32), &a, &x, &y, &out])
    }

    /// to ← from, for vectors of `len` floats.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn assign(&self, from: Rows, to: Rows, len: usize) -> Result<()> {
        let all = Extent::all(len);
        self.each_of("accumulate", all, &[&self.lanes.at(), &all, &from, &to, &1i32])
    }

    /// to ← 0, for vectors of `len` floats.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn clear(&self, to: Rows, len: usize) -> Result<()> {
        let all = Extent::all(len);
        // Threads loop over elements: a table of words has too many for one thread per element.
        self.launch("fill_zero", [self.blocks(len.div_ceil(256)), 1], [256, 1], 0, &[&self.lanes.at(), &all, &to])
    }

    /// Σ_k weights_k·(vector of lane order_k), in that order.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn weighted_sum(&self, vectors: &Vectors, order: &[u32], weights: &[f32]) -> Result<Vec<f32>> {
        let len = vectors.len;
        let order: Vec<i32> = order.iter().map(|lane| *lane as i32).collect();
        let (order, weights) = (self.gpu.upload(&order)?, self.gpu.upload(weights)?);
        let out = self.gpu.zeros::<f32>(len)?;
        let p: [&dyn Parameter; 6] =
            [&(len as i32), &(order.len() as i32), &order.at(), &weights.at(), &vectors.rows(), &out.at()];
        self.gpu.launch(Queue::Main, "weighted_sum", [len.div_ceil(256), 1, 1], [256, 1], 0, &p)?;
        let mut sum = vec![0.0; len];
        self.gpu.read(&out, 0, &mut sum)?;
        Ok(sum)
    }

    /// Σ_k round(factors_k·(vector of lane order_k)) in integers, `None` if a product is not below `limit`. `rounder` plus any
    /// such product has the integer in its lowest bits.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn fixed_sum(
        &self,
        vectors: &Vectors,
        order: &[u32],
        factors: &[f64],
        rounder: f64,
        limit: f64,
    ) -> Result<Option<Vec<i64>>> {
        let len = vectors.len;
        let order: Vec<i32> = order.iter().map(|lane| *lane as i32).collect();
        let (order, factors) = (self.gpu.upload(&order)?, self.gpu.upload(factors)?);
        let (out, misfits) = (self.gpu.zeros::<i64>(len)?, self.gpu.zeros::<i32>(1)?);
        let (n, count, rows) = (len as i32, order.len() as i32, vectors.rows());
        let p: [&dyn Parameter; 9] =
            [&n, &count, &order.at(), &factors.at(), &rounder, &limit, &rows, &out.at(), &misfits.at()];
        self.gpu.launch(Queue::Main, "fixed_sum", [len.div_ceil(256), 1, 1], [256, 1], 0, &p)?;
        let (mut sum, mut found) = (vec![0; len], [0]);
        self.gpu.read(&misfits, 0, &mut found)?;
        self.gpu.read(&out, 0, &mut sum)?;
        Ok((found == [0]).then_some(sum))
    }

    fn dots(&self, range: std::ops::Range<usize>, g: Rows, r: Rows) -> Result<i32> {
        let n_chunks = range.len().div_ceil(DOT_CHUNK);
        let stride = (self.sums.len() / self.n_lanes) as i64;
        let p: [&dyn Parameter; 7] =
            [&self.lanes.at(), &(range.start as i32), &(range.end as i32), &g, &r, &self.sums.at(), &stride];
        self.launch("dots", [n_chunks, 1], [256, 1], 0, &p)?;
        Ok(n_chunks as i32)
    }

    /// Scales g to a norm of at most `norm_max`.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn clip(&self, g: Rows, norm_max: f32) -> Result<()> {
        let len = self.n_params();
        let n_chunks = self.dots(0..len, g, g)?;
        let stride = (self.sums.len() / self.n_lanes) as i64;
        let p: [&dyn Parameter; 6] =
            [&self.lanes.at(), &n_chunks, &self.sums.at(), &stride, &f64::from(norm_max), &self.factors.at()];
        self.launch("clip_factor", [1, 1], [256, 1], 0, &p)?;
        self.each("scale", len, &[&self.lanes.at(), &(len as i32), &self.factors.at(), &g])
    }

    /// out ← x + radius·g/‖g‖, or x where g is 0.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn ascend(&self, x: Rows, radius: f32, g: Rows, out: Rows) -> Result<()> {
        let len = self.n_params();
        let n_chunks = self.dots(0..len, g, g)?;
        let stride = (self.sums.len() / self.n_lanes) as i64;
        let (lanes, factors) = (self.lanes.at(), self.factors.at());
        let p: [&dyn Parameter; 6] = [&lanes, &n_chunks, &self.sums.at(), &stride, &f64::from(radius), &factors];
        self.launch("length_factor", [1, 1], [256, 1], 0, &p)?;
        self.assign(x, out, len)?;
        self.each("project", len, &[&lanes, &0i32, &(len as i32), &factors, &1f32, &g, &out])
    }

    /// Measures g against r, as a whole or tensor by tensor. Adds what projects g within the bounds, times `sign`, to `to`: to
    /// g itself (1), or to the weights that a step −g has reached (−1). Counts it. With `above_reference` it does so only
    /// while the last replayed loss is not below the one recorded as [`super::LossOf::Reference`].
    ///
    /// # Errors
    /// If the driver fails.
    #[allow(clippy::too_many_arguments, reason = "the projection's rule and its operands")]
    pub fn project(
        &self,
        g: Rows,
        r: Rows,
        bounds: &Bounds,
        by_tensor: bool,
        above_reference: bool,
        to: Rows,
        sign: f32,
    ) -> Result<()> {
        let all = 0..self.n_params();
        let factor = |range: std::ops::Range<usize>, count: bool, first: bool, decide: bool| {
            let n_chunks = self.dots(range, g, r)?;
            let stride = (self.sums.len() / self.n_lanes) as i64;
            let bounds = DeviceBounds {
                eps: bounds.eps,
                norm_guard: bounds.norm_guard,
                coefficient_max: bounds.coefficient_max,
                always: i32::from(bounds.always),
                above_reference: i32::from(above_reference),
                count: i32::from(count),
            };
            let (first, decide) = (i32::from(first), i32::from(decide));
            let p: [&dyn Parameter; 9] = [
                &self.lanes.at(),
                &n_chunks,
                &self.sums.at(),
                &stride,
                &bounds,
                &self.stats.at(),
                &self.factors.at(),
                &first,
                &decide,
            ];
            self.launch("projection_factor", [1, 1], [256, 1], 0, &p)
        };
        let apply = |range: std::ops::Range<usize>| {
            let p: [&dyn Parameter; 7] =
                [&self.lanes.at(), &(range.start as i32), &(range.end as i32), &self.factors.at(), &sign, &r, &to];
            self.each("project", range.len(), &p)
        };
        factor(all.clone(), true, true, !by_tensor)?;
        if by_tensor {
            for span in self.graph.params().spans() {
                factor(span.range(), false, false, true)?;
                apply(span.range())?;
            }
        } else {
            apply(all)?;
        }
        self.launch("count_projected", [1, 1], [1, 1], 0, &[&self.lanes.at(), &self.stats.at()])
    }
}
