//! The backward pass of a cohort: the steps of the plan from the last one back, launched for all lanes.

use super::cohort::{Cohort, Keys};
use super::gpu::{self, Parameter};
use super::layers::{Pool, activation, chunks, norm_mode, vec_of};
use super::memory::{Extent, Rows};
use super::products::{After, Operands, Won};
use crate::error::{Error, Result};
use crate::graph::{NodeId, Op};
use crate::plan::works_in_place;

/// A gradient that a step adds to.
#[derive(Clone, Copy)]
pub(super) struct Sum {
    pub rows: Rows,
    pub fresh: bool,
}

impl Cohort {
    /// Writes the gradient of all losses since the last forward pass to `grad`.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn backward(&mut self, params: Rows, grad: Rows) -> Result<()> {
        for i in (0..self.plan.steps.len()).rev() {
            if self.has_grad[self.plan.steps[i].out] {
                self.run_step_backward(i, params, grad)?;
            } else {
                self.zero_params(i, grad)?;
            }
        }
        Ok(())
    }

    fn zero_params(&self, i: usize, grad: Rows) -> Result<()> {
        let node = &self.graph.nodes[self.plan.steps[i].node];
        let whole = |span: usize| (span, self.graph.params().spans()[span].len());
        let spans = match node.op {
            Op::Conv { weight, bias, .. } => [Some(whole(weight)), bias.map(whole), None],
            // Weights and biases of joined layers are several spans.
            Op::Linear { weight, bias } => {
                let outputs = node.shape.c;
                [Some((weight, self.graph.linear_inputs(node) * outputs)), bias.map(|bias| (bias, outputs)), None]
            }
            Op::BatchNorm { weight, bias, .. }
            | Op::GroupNorm { weight, bias, .. }
            | Op::LayerNorm { weight, bias, .. } => [Some(whole(weight)), Some(whole(bias)), None],
            Op::Embedding { word, position, kind } => [word, position, kind].map(|span| Some(whole(span))),
            _ => [None; 3],
        };
        spans.into_iter().flatten().try_for_each(|(span, len)| self.clear(self.param(grad, span), len))
    }

    /// A node's gradient, where it needs one; what is added there counts from now on.
    fn take_grad(&mut self, node: usize) -> Option<Sum> {
        let slot = self.plan.grad_slot[node]?;
        let owner = self.owner(node);
        let fresh = !std::mem::replace(&mut self.has_grad[owner], true);
        Some(Sum { rows: self.grad(slot), fresh })
    }

    pub(super) fn accumulate(&self, extent: Extent, from: Rows, to: Sum) -> Result<()> {
        let p: [&dyn Parameter; 5] = [&self.lanes.at(), &extent, &from, &to.rows, &i32::from(to.fresh)];
        self.each_of("accumulate", extent, &p)
    }

    fn run_step_backward(&mut self, i: usize, params: Rows, grad: Rows) -> Result<()> {
        let step = self.plan.steps[i];
        let Some(mut out_slot) = self.plan.grad_slot[step.out] else { return Ok(()) };
        let extent = self.extent(step.out);
        if let Some(work) = self.plan.work_slot[i] {
            self.accumulate(extent, self.grad(out_slot), Sum { rows: self.grad(work), fresh: true })?;
            out_slot = work;
        }
        let dy = self.grad(out_slot);
        let node = &self.graph.nodes[step.node];
        let (input, second) = (node.inputs[0].0, node.inputs.get(1).map(|id| id.0));
        if works_in_place(&node.op) {
            let residual = step.residual.and_then(|r| self.take_grad(r));
            if self.plan.grad_slot[input] == Some(out_slot) {
                // In place: dy's memory then holds the input's gradient.
                let owner = self.owner(input);
                self.has_grad[owner] = true;
                return self.norm_backward(i, params, dy, Sum { rows: dy, fresh: true }, residual, grad);
            }
            let dx = self.take_grad(input).unwrap_or(Sum { rows: dy, fresh: true });
            return self.norm_backward(i, params, dy, dx, residual, grad);
        }
        let is_add = node.op == Op::Add;
        let dropout = if let Op::Dropout { rate } = node.op { Some(rate) } else { None };
        let dx = self.take_grad(input);
        if let Some(rate) = dropout {
            let residual = step.residual.and_then(|r| self.take_grad(r));
            return self.dropout_backward(i, rate, dy, dx, residual);
        }
        self.layer_backward(i, params, dy, dx, grad)?;
        if let Some(second) = second.filter(|_| is_add)
            && let Some(dx) = self.take_grad(second)
        {
            self.accumulate(extent, dy, dx)?;
        }
        Ok(())
    }

    fn norm_backward(
        &self,
        i: usize,
        params: Rows,
        dz: Rows,
        dx: Sum,
        residual: Option<Sum>,
        grad: Rows,
    ) -> Result<()> {
        let step = self.plan.steps[i];
        let node = &self.graph.nodes[step.node];
        let (x, z) = (self.value(node.inputs[0].0), if step.relu { self.value(step.out) } else { Rows::NONE });
        let (len, sample, c, pixels) =
            (self.len_of(step.out), node.shape.len(), node.shape.c, node.shape.pixels() as i32);
        let (len_i, c_i, lanes, valid) = (len as i32, c as i32, self.lanes.at(), self.valid.at());
        let Some(saved) = self.saved[i].as_ref().map(super::memory::Vectors::rows) else { return Ok(()) };
        let (partial, coefficients) = (self.partial.rows(), self.coefficients.rows());
        let residual_rows = residual.map_or(Rows::NONE, |r| r.rows);
        let flags = i32::from(dx.fresh) | (2 * i32::from(residual.is_none_or(|r| r.fresh)));
        match node.op {
            Op::BatchNorm { weight, bias, .. } => {
                // Of a pooled image only the winners have a gradient.
                let summed = self.winners[i].as_ref().map_or(x, super::memory::Vectors::rows);
                let summed_pixels = self.graph.nodes[step.out].shape.pixels();
                let (chunk_rows, n_chunks) = chunks(self.batch * summed_pixels);
                let (vec, suffix) = vec_of(c);
                let p: [&dyn Parameter; 10] = [
                    &lanes,
                    &valid,
                    &(summed_pixels as i32),
                    &c_i,
                    &(chunk_rows as i32),
                    &summed,
                    &dz,
                    &z,
                    &saved,
                    &partial,
                ];
                self.launch(&format!("reduce_GRADIENT_{suffix}"), [n_chunks, 1], [256, 1], 0, &p)?;
                let p: [&dyn Parameter; 12] = [
                    &lanes,
                    &valid,
                    &pixels,
                    &c_i,
                    &(n_chunks as i32),
                    &norm_mode(self.pass.norm),
                    &self.param(params, weight),
                    &saved,
                    &partial,
                    &coefficients,
                    &self.param(grad, weight),
                    &self.param(grad, bias),
                ];
                self.launch("batch_norm_gradients", [c.div_ceil(32), 1], [32, 8], 0, &p)?;
                if self.first_layer_before(i).is_some() {
                    // The gradient of its weights takes in the rest.
                    return Ok(());
                }
                if step.pool.is_some() {
                    return self.pool_backward(i, "normalise_pool", x, dz, dx);
                }
                let p: [&dyn Parameter; 12] = [
                    &lanes,
                    &valid,
                    &len_i,
                    &(sample as i32),
                    &c_i,
                    &x,
                    &z,
                    &coefficients,
                    &dz,
                    &dx.rows,
                    &residual_rows,
                    &flags,
                ];
                self.each(&format!("normalise_backward_{suffix}"), len / vec, &p)
            }
            Op::GroupNorm { weight, bias, groups } => {
                let p: [&dyn Parameter; 13] = [
                    &lanes,
                    &pixels,
                    &c_i,
                    &(groups as i32),
                    &x,
                    &self.param(params, weight),
                    &saved,
                    &z,
                    &dz,
                    &dx.rows,
                    &residual_rows,
                    &partial,
                    &flags,
                ];
                self.launch("group_norm_backward", [groups, self.batch], [256, 1], 0, &p)?;
                let p: [&dyn Parameter; 6] =
                    [&lanes, &c_i, &(self.batch as i32), &partial, &self.param(grad, weight), &self.param(grad, bias)];
                self.launch("group_norm_gradients", [c.div_ceil(32), 1], [32, 8], 0, &p)
            }
            _ => self.layer_norm_backward(i, params, dz, dx, grad),
        }
    }

    /// The first layer in front of a batch-norm with its max-pool, step `i`, if it computes the gradient of its weights from that of
    /// the pool: nobody then asks for the gradient between them, nor for that of the images.
    fn first_layer_before(&self, i: usize) -> Option<usize> {
        let (before, step) = (self.plan.steps.get(i.checked_sub(1)?)?, self.plan.steps.get(i)?);
        let node = &self.graph.nodes[before.node];
        let Op::Conv { bias: None, .. } = node.op else { return None };
        let is_norm = matches!(self.graph.nodes[step.node].op, Op::BatchNorm { .. });
        let reads = |other: &crate::graph::Node| other.inputs.iter().any(|id| id.0 == before.out);
        let is_between = self.graph.nodes.iter().filter(|other| reads(other)).count() == 1
            && reads(&self.graph.nodes[step.node])
            && before.out == before.node
            && !self.is_tap[before.out];
        let is_first = node.inputs[0] == self.graph.input() && self.plan.grad_slot[node.inputs[0].0].is_none();
        let serves = self.serves_first_layer(before.node, self.pool_of(i)?);
        (is_norm && step.pool.is_some() && is_between && is_first && serves).then_some(i - 1)
    }

    /// The gradient of a first layer's weights, step `i`, from that of the max-pool of the step behind it, whose coefficients have just
    /// been computed.
    fn first_layer_backward(&self, i: usize, w: Rows) -> Result<()> {
        let (step, behind) = (self.plan.steps[i], self.plan.steps[i + 1]);
        let (Some(slot), Some((places, stride))) =
            (self.plan.work_slot[i + 1].or(self.plan.grad_slot[behind.out]), &self.saved_bytes[i + 1])
        else {
            let problem = "the max-pool behind it kept nothing".into();
            return Err(Error::Gpu { what: self.graph.nodes[step.node].name.clone(), problem });
        };
        let won = Won { places: places.at(), stride: *stride as i64, dy: self.grad(slot) };
        self.stem_weight(step.node, self.value(step.out), won, w)
    }

    /// Every other operation: adds to the gradient of the first input, where one is needed.
    fn layer_backward(&self, i: usize, params: Rows, dy: Rows, dx: Option<Sum>, grad: Rows) -> Result<()> {
        let step = self.plan.steps[i];
        let node = &self.graph.nodes[step.node];
        let input = node.inputs[0].0;
        let (x, y) = (self.value(input), self.value(step.out));
        let (len, in_len, c) = (self.len_of(step.out), self.len_of(input), node.shape.c);
        let (extent, in_len_i, lanes) = (self.extent(step.out), in_len as i32, self.lanes.at());
        if step.relu {
            self.each_of("mask_negative", extent, &[&lanes, &extent, &y, &dy])?;
        }
        if let Op::Conv { bias: Some(bias), .. } | Op::Linear { bias: Some(bias), .. } = node.op {
            let bias = self.param(grad, bias);
            if self.tokens_of(step.node) == 0 {
                let (chunk_rows, n_chunks) = chunks(len / c);
                let (pixels, none) = (node.shape.pixels() as i32, Rows::NONE);
                let (valid, partial) = (self.valid.at(), self.partial.rows());
                let p: [&dyn Parameter; 10] =
                    [&lanes, &valid, &pixels, &(c as i32), &(chunk_rows as i32), &none, &dy, &none, &none, &partial];
                self.launch(&format!("reduce_COLUMNS_{}", vec_of(c).1), [n_chunks, 1], [256, 1], 0, &p)?;
                let p: [&dyn Parameter; 5] = [&lanes, &(c as i32), &(n_chunks as i32), &partial, &bias];
                self.launch("column_sums", [c.div_ceil(32), 1], [32, 8], 0, &p)?;
            } else {
                self.bias_backward(extent, c, dy, bias)?;
            }
        }
        match (&node.op, dx) {
            (Op::Conv { weight, .. }, _) if self.first_layer_before(i + 1) == Some(i) => {
                self.first_layer_backward(i, self.param(grad, *weight))
            }
            (Op::Conv { weight, .. } | Op::Linear { weight, .. }, dx) => {
                let w = self.param(grad, *weight);
                let pass = gpu::Pass::Weight;
                let operands = Operands { pass, x, w, y: dy, after: After::NOTHING, fresh: true, relu: false };
                self.product(step.node, &operands, None)?;
                let Some(Sum { rows: x, fresh }) = dx else { return Ok(()) };
                let w = self.param(params, *weight);
                self.product(step.node, &Operands { pass: gpu::Pass::Input, x, w, fresh, ..operands }, None)
            }
            (Op::Activation(f), Some(dx)) => {
                let p: [&dyn Parameter; 8] =
                    [&lanes, &activation(*f), &extent, &x, &y, &dy, &dx.rows, &i32::from(dx.fresh)];
                self.each_of("activation_backward", extent.packs(), &p)
            }
            (Op::MaxPool(_), Some(dx)) => self.pool_backward(i, "pool", Rows::NONE, dy, dx),
            (Op::GlobalAveragePool, Some(dx)) => {
                let pixels = self.graph.nodes[input].shape.pixels() as i32;
                let p: [&dyn Parameter; 7] =
                    [&lanes, &in_len_i, &pixels, &(c as i32), &dy, &dx.rows, &i32::from(dx.fresh)];
                self.each("average_pool_backward", in_len, &p)
            }
            (Op::Add, Some(dx)) => self.accumulate(extent, dy, dx),
            (Op::Embedding { .. }, dx) => self.embedding_backward(i, dy, dx, grad),
            (Op::Attention { .. }, Some(dx)) => self.attention_backward(i, dy, dx),
            (Op::FirstToken | Op::MeanOfTokens, Some(dx)) => self.pool_tokens_backward(i, dy, dx),
            // Dropout and normalisations have been served elsewhere.
            (_, None)
            | (
                Op::Input
                | Op::Flatten
                | Op::Dropout { .. }
                | Op::BatchNorm { .. }
                | Op::GroupNorm { .. }
                | Op::LayerNorm { .. },
                Some(_),
            ) => Ok(()),
        }
    }

    /// The gradients of what was dropped in part, and of what was added to the rest.
    fn dropout_backward(&self, i: usize, rate: f32, dy: Rows, dx: Option<Sum>, residual: Option<Sum>) -> Result<()> {
        let extent = self.extent(self.plan.steps[i].out);
        let is_on = self.pass.dropout == Keys::OfStep && rate > 0.0;
        if is_on && let (Some(dx), Some((kept, stride))) = (dx, &self.saved_bytes[i]) {
            let residual = residual.unwrap_or(Sum { rows: Rows::NONE, fresh: true });
            let p: [&dyn Parameter; 10] = [
                &self.lanes.at(),
                &extent,
                &rate,
                &kept.at(),
                &(*stride as i64),
                &dy,
                &dx.rows,
                &i32::from(dx.fresh),
                &residual.rows,
                &i32::from(residual.fresh),
            ];
            return self.each_of("dropout_backward", extent, &p);
        }
        let dx = dx.filter(|_| !is_on);
        [dx, residual].into_iter().flatten().try_for_each(|sum| self.accumulate(extent, dy, sum))
    }

    /// The gradient that the last backward pass left at a tap of a lane.
    ///
    /// # Errors
    /// If the node is no tap.
    pub fn read_gradient(&self, node: NodeId, lane: usize, samples: usize) -> Result<Vec<f32>> {
        self.check_tap(node)?;
        match self.plan.grad_slot[node.0] {
            Some(slot) if self.has_grad[self.owner(node.0)] => {
                self.read_grad_slot(slot, lane, self.len_read(node, lane, samples)?)
            }
            _ => Ok(vec![0.0; self.len_read(node, lane, samples)?]),
        }
    }

    fn pool_backward(&self, i: usize, kernel: &str, x: Rows, dy: Rows, dx: Sum) -> Result<()> {
        let (Some(pool), Some((places, stride))) = (self.pool_of(i), &self.saved_bytes[i]) else { return Ok(()) };
        let (vec, suffix) = vec_of(pool.c);
        let packs = self.batch * pool.h * pool.w * pool.c / vec;
        let p: [&dyn Parameter; 11] = [
            &self.lanes.at(),
            &self.valid.at(),
            &Pool::new(pool, vec),
            &(packs as i32),
            &places.at(),
            &(*stride as i64),
            &x,
            &self.coefficients.rows(),
            &dy,
            &dx.rows,
            &i32::from(dx.fresh),
        ];
        self.each(&format!("{kernel}_backward_{suffix}"), packs, &p)
    }
}
