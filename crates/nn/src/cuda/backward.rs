//! The backward pass of a fleet: the stages of the schedule from the last one back, launched for all lanes.

use super::fleet::Fleet;
use super::gpu::{self, Parameter};
use super::layers::{Pool, SHARES, activation, chunks, norm_mode, vec_of};
use super::memory::{Extent, Rows, Vectors};
use super::products::{After, Operands, Won};
use crate::error::{Error, Result};
use crate::graph::{NodeId, Norm, Op, Shape};
use crate::mode::Dropout;

/// A gradient that a stage adds to.
#[derive(Clone, Copy)]
pub(super) struct Sum {
    pub rows: Rows,
    pub fresh: bool,
}

/// Where the gradient of a fused residual goes.
fn rows_of(residual: Option<Sum>) -> Rows {
    residual.map_or(Rows::NONE, |r| r.rows)
}

/// Which gradients a normalisation overwrites: 1 its input's, 2 its residual's.
fn flags(dx: Sum, residual: Option<Sum>) -> i32 {
    i32::from(dx.fresh) | (2 * i32::from(residual.is_none_or(|r| r.fresh)))
}

impl Fleet {
    /// Writes the gradient of all losses since the last forward pass to `grad`: 0 for parameters that it did not use.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn backward(&mut self, params: Rows, grad: Rows) -> Result<()> {
        let done = self.run_backward(params, grad);
        // After an error too: what runs beside must not outlive its memory.
        let joined = self.join();
        done.and(joined)
    }

    fn run_backward(&mut self, params: Rows, grad: Rows) -> Result<()> {
        if self.first_stage > 0 {
            // One launch for all parameters before the pass, where one per tensor would do.
            self.clear(grad, self.graph.params().len())?;
        }
        for i in (self.first_stage..self.schedule.stages.len()).rev() {
            if self.has_grad[self.schedule.stages[i].out] {
                self.run_stage_backward(i, params, grad)?;
            } else {
                let params = &self.graph.nodes[self.schedule.stages[i].node].params;
                let mut spans = params.iter().filter(|span| !span.is_empty());
                spans.try_for_each(|span| self.clear(grad.from(span.start), span.len()))?;
            }
        }
        Ok(())
    }

    /// A node's gradient to write to, if the node needs one; marks it as present.
    fn take_grad(&mut self, node: usize) -> Result<Option<Sum>> {
        let Some(slot) = self.schedule.grad_slot[node] else { return Ok(None) };
        self.before_write(slot)?;
        let owner = self.graph.owner(node);
        let fresh = !std::mem::replace(&mut self.has_grad[owner], true);
        Ok(Some(Sum { rows: self.grad(slot), fresh }))
    }

    pub(super) fn accumulate(&self, extent: Extent, from: Rows, to: Sum) -> Result<()> {
        let p: [&dyn Parameter; 5] = [&self.lanes.at(), &extent, &from, &to.rows, &i32::from(to.fresh)];
        self.each_of("accumulate", extent, &p)
    }

    fn run_stage_backward(&mut self, i: usize, params: Rows, grad: Rows) -> Result<()> {
        let stage = self.schedule.stages[i];
        let Some(mut out_slot) = self.schedule.grad_slot[stage.out] else { return Ok(()) };
        let extent = self.extent(stage.out);
        if let Some(work) = self.schedule.work_slot[i] {
            self.before_write(work)?;
            self.accumulate(extent, self.grad(out_slot), Sum { rows: self.grad(work), fresh: true })?;
            out_slot = work;
        }
        let dy = self.grad(out_slot);
        let node = &self.graph.nodes[stage.node];
        let (input, second) = (node.inputs[0].0, node.inputs.get(1).map(|id| id.0));
        if let Some(norm) = node.op.norm() {
            let residual = stage.residual.map_or(Ok(None), |r| self.take_grad(r))?;
            if self.schedule.grad_slot[input] == Some(out_slot) {
                // In place: dy's memory then holds the input's gradient.
                let owner = self.graph.owner(input);
                self.has_grad[owner] = true;
                return self.norm_backward((i, norm), params, dy, Sum { rows: dy, fresh: true }, residual, grad);
            }
            let dx = self.take_grad(input)?.unwrap_or(Sum { rows: dy, fresh: true });
            return self.norm_backward((i, norm), params, dy, dx, residual, grad);
        }
        let is_add = node.op == Op::Add;
        let dropout = if let Op::Dropout { rate } = node.op { Some(rate) } else { None };
        let dx = self.take_grad(input)?;
        if let Some(rate) = dropout {
            let residual = stage.residual.map_or(Ok(None), |r| self.take_grad(r))?;
            return self.dropout_backward(i, rate, dy, dx, residual);
        }
        self.layer_backward(i, params, out_slot, dx, grad)?;
        if let Some(second) = second.filter(|_| is_add)
            && let Some(dx) = self.take_grad(second)?
        {
            self.accumulate(extent, dy, dx)?;
        }
        Ok(())
    }

    fn norm_backward(
        &self,
        (i, norm): (usize, Norm),
        params: Rows,
        dz: Rows,
        dx: Sum,
        residual: Option<Sum>,
        grad: Rows,
    ) -> Result<()> {
        match norm {
            Norm::Batch => self.batch_norm_backward(i, params, dz, dx, residual, grad),
            Norm::Group { groups } => self.group_norm_backward(i, groups, params, dz, dx, residual, grad),
            Norm::Layer { .. } => self.layer_norm_backward(i, params, dz, dx, grad),
        }
    }

    /// The output of a normalisation that a ReLU was fused into.
    fn relu_mask(&self, i: usize) -> Rows {
        let stage = self.schedule.stages[i];
        if stage.relu { self.value(stage.out) } else { Rows::NONE }
    }

    fn batch_norm_backward(
        &self,
        i: usize,
        params: Rows,
        dz: Rows,
        dx: Sum,
        residual: Option<Sum>,
        grad: Rows,
    ) -> Result<()> {
        let stage = self.schedule.stages[i];
        let node = &self.graph.nodes[stage.node];
        let (x, z, saved, partial) =
            (self.value(node.inputs[0].0), self.relu_mask(i), self.saved_rows(i), self.partial.rows());
        let (lanes, valid, c, factors) =
            (self.lanes.at(), self.valid.at(), node.shape.c as i32, self.coefficients.rows());
        // Of a pooled image only the winners have a gradient.
        let summed = self.kept[i].winners.as_ref().map_or(x, Vectors::rows);
        let out_pixels = self.graph.nodes[stage.out].shape.pixels();
        let (chunk_rows, n_chunks) = chunks(self.batch * out_pixels);
        let (pixels, rows, n_parts) = (out_pixels as i32, chunk_rows as i32, n_chunks as i32);
        let (vec, suffix) = vec_of(node.shape.c);
        // Where nothing but the norm is under the ReLU, its mask is computed from the norm's input.
        let masked = match (stage.relu, stage.residual) {
            (false, _) => 0,
            (true, Some(_)) => 1,
            (true, None) => 2,
        };
        let p: [&dyn Parameter; 11] = [&lanes, &valid, &pixels, &c, &rows, &summed, &dz, &z, &saved, &masked, &partial];
        self.launch(&format!("reduce_GRADIENT_{suffix}"), [n_chunks, 1], [256, 1], 0, &p)?;
        let (mode, [w, ..]) = (norm_mode(self.mode.norm), self.params_of(stage.node, params));
        let ([dw, db, _], pixels) = (self.params_of(stage.node, grad), node.shape.pixels() as i32);
        let p: [&dyn Parameter; 12] =
            [&lanes, &valid, &pixels, &c, &n_parts, &mode, &w, &saved, &partial, &factors, &dw, &db];
        self.launch("batch_norm_gradients", [node.shape.c.div_ceil(32), 1], [32, SHARES], 0, &p)?;
        if self.first_layer_before(i).is_some() {
            // The gradient of its weights fuses the rest.
            return Ok(());
        }
        if stage.pool.is_some() {
            return self.pool_backward(i, "normalise_pool", x, dz, dx);
        }
        let (len, sample) = (self.len_of(stage.out), node.shape.len() as i32);
        let (len_i, to, dr, flags) = (len as i32, dx.rows, rows_of(residual), flags(dx, residual));
        let p: [&dyn Parameter; 14] =
            [&lanes, &valid, &len_i, &sample, &c, &x, &z, &saved, &masked, &factors, &dz, &to, &dr, &flags];
        self.each(&format!("normalise_backward_{suffix}"), len / vec, &p)
    }

    #[allow(clippy::too_many_arguments, reason = "a layer, its operands and where their gradients go")]
    fn group_norm_backward(
        &self,
        i: usize,
        groups: usize,
        params: Rows,
        dz: Rows,
        dx: Sum,
        residual: Option<Sum>,
        grad: Rows,
    ) -> Result<()> {
        let node = self.schedule.stages[i].node;
        let shape = self.graph.nodes[node].shape;
        let (x, z) = (self.value(self.graph.nodes[node].inputs[0].0), self.relu_mask(i));
        let (lanes, pixels, c, n) = (self.lanes.at(), shape.pixels() as i32, shape.c as i32, groups as i32);
        let ([w, ..], [dw, db, _]) = (self.params_of(node, params), self.params_of(node, grad));
        let (saved, partial) = (self.saved_rows(i), self.partial.rows());
        let (to, dr, flags) = (dx.rows, rows_of(residual), flags(dx, residual));
        let p: [&dyn Parameter; 13] = [&lanes, &pixels, &c, &n, &x, &w, &saved, &z, &dz, &to, &dr, &partial, &flags];
        self.launch("group_norm_backward", [groups, self.batch], [256, 1], 0, &p)?;
        let p: [&dyn Parameter; 6] = [&lanes, &c, &(self.batch as i32), &partial, &dw, &db];
        self.launch("group_norm_gradients", [shape.c.div_ceil(32), 1], [32, SHARES], 0, &p)
    }

    /// The first layer before stage `i`, a batch-norm with its max-pool, if it computes the gradient of its weights from that
    /// of the pool. The gradients between the two and of the images are then not needed.
    fn first_layer_before(&self, i: usize) -> Option<usize> {
        let (before, stage) = (self.schedule.stages.get(i.checked_sub(1)?)?, self.schedule.stages.get(i)?);
        let node = &self.graph.nodes[before.node];
        if !matches!(node.op, Op::Conv(_)) || node.has_bias() {
            return None;
        }
        let is_norm = self.graph.nodes[stage.node].op == Op::BatchNorm;
        let reads = |other: &crate::graph::Node| other.inputs.iter().any(|id| id.0 == before.out);
        let is_between = self.graph.nodes.iter().filter(|other| reads(other)).count() == 1
            && reads(&self.graph.nodes[stage.node])
            && before.out == before.node
            && !self.schedule.is_tap[before.out];
        let is_first = node.inputs[0] == self.graph.input() && self.schedule.grad_slot[node.inputs[0].0].is_none();
        let serves = self.serves_first_layer(before.node, self.pool_of(i)?);
        (is_norm && stage.pool.is_some() && is_between && is_first && serves).then_some(i - 1)
    }

    /// The gradient of the weights of stage `i`, a first layer, from that of the max-pool of the next stage. The coefficients
    /// of that stage have just been computed.
    fn first_layer_backward(&self, i: usize, w: Rows) -> Result<()> {
        let (stage, behind) = (self.schedule.stages[i], self.schedule.stages[i + 1]);
        let (Some(slot), Some((places, stride))) =
            (self.schedule.work_slot[i + 1].or(self.schedule.grad_slot[behind.out]), &self.kept[i + 1].bytes)
        else {
            return Err(Error::gpu(&self.graph.nodes[stage.node].name, "the max-pool behind it saved nothing"));
        };
        let won = Won { places: places.at(), stride: *stride as i64, dy: self.grad(slot) };
        self.stem_weight(stage.node, self.value(stage.out), won, w)
    }

    /// Every other operation: adds to the gradient of the first input, where one is needed.
    fn layer_backward(&mut self, i: usize, params: Rows, slot: usize, dx: Option<Sum>, grad: Rows) -> Result<()> {
        let (stage, dy) = (self.schedule.stages[i], self.grad(slot));
        let node = &self.graph.nodes[stage.node];
        let input = node.inputs[0].0;
        let (x, y) = (self.value(input), self.value(stage.out));
        let (len, c) = (self.len_of(stage.out), node.shape.c);
        let (extent, lanes) = (self.extent(stage.out), self.lanes.at());
        if stage.relu {
            self.each_of("mask_negative", extent, &[&lanes, &extent, &y, &dy])?;
        }
        let [dw, bias, _] = self.params_of(stage.node, grad);
        if node.has_bias() {
            if self.tokens_of(stage.node) == 0 {
                self.sum_columns(node.shape, len, dy, bias)?;
            } else {
                self.bias_backward(extent, c, dy, bias)?;
            }
        }
        match (&node.op, dx) {
            (Op::Conv(_), _) if self.first_layer_before(i + 1) == Some(i) => self.first_layer_backward(i, dw),
            (Op::Conv(_) | Op::StandardizedConv(_) | Op::Linear, dx) => {
                self.product_backward(i, params, slot, dx, grad)
            }
            (Op::Activation(f), Some(dx)) => {
                let p: [&dyn Parameter; 8] =
                    [&lanes, &activation(*f), &extent, &x, &y, &dy, &dx.rows, &i32::from(dx.fresh)];
                self.each_of("activation_backward", extent.packs(), &p)
            }
            (Op::MaxPool(_), Some(dx)) => self.pool_backward(i, "pool", Rows::NONE, dy, dx),
            (Op::GlobalAveragePool, Some(dx)) => self.average_pool_backward(input, dy, dx),
            (Op::Add, Some(dx)) => self.accumulate(extent, dy, dx),
            (Op::Embedding, dx) => self.embedding_backward(i, dy, dx, grad),
            (Op::Attention { .. }, Some(dx)) => self.attention_backward(i, dy, dx),
            (Op::FirstToken | Op::MeanOfTokens, Some(dx)) => self.pool_tokens_backward(i, dy, dx),
            // Dropout and normalisations are handled elsewhere.
            (
                Op::Input
                | Op::Flatten
                | Op::Dropout { .. }
                | Op::BatchNorm
                | Op::GroupNorm { .. }
                | Op::LayerNorm { .. },
                _,
            )
            // No parameters, and nobody wants the input's gradient.
            | (
                Op::Activation(_)
                | Op::MaxPool(_)
                | Op::GlobalAveragePool
                | Op::Add
                | Op::Attention { .. }
                | Op::FirstToken
                | Op::MeanOfTokens,
                None,
            ) => Ok(()),
        }
    }

    /// A convolution or a linear layer: the gradient of its weights beside the main queue, and that of its input.
    fn product_backward(&mut self, i: usize, params: Rows, slot: usize, dx: Option<Sum>, grad: Rows) -> Result<()> {
        let node = self.schedule.stages[i].node;
        let standardized = matches!(self.graph.nodes[node].op, Op::StandardizedConv(_));
        let w = if standardized { self.saved_rows(i) } else { self.params_of(node, params)[0] };
        let ([dw, ..], x) = (self.params_of(node, grad), self.value(self.graph.nodes[node].inputs[0].0));
        let (pass, after) = (gpu::Pass::Weight, After::NOTHING);
        let operands = Operands { pass, x, w: dw, y: self.grad(slot), after, fresh: true, relu: false };
        self.beside(slot, |fleet| {
            fleet.product(node, &operands, None)?;
            if !standardized {
                return Ok(());
            }
            let (co, len) = fleet.weight_rows(i);
            let p: [&dyn Parameter; 4] = [&fleet.lanes.at(), &(len as i32), &w, &dw];
            fleet.launch("standardize_backward", [co, 1], [256, 1], 0, &p)
        })?;
        let Some(Sum { rows: x, fresh }) = dx else { return Ok(()) };
        self.product(node, &Operands { pass: gpu::Pass::Input, x, w, fresh, ..operands }, None)
    }

    fn average_pool_backward(&self, input: usize, dy: Rows, dx: Sum) -> Result<()> {
        let (shape, len) = (self.graph.nodes[input].shape, self.len_of(input));
        let (lanes, len_i, pixels, c) = (self.lanes.at(), len as i32, shape.pixels() as i32, shape.c as i32);
        let p: [&dyn Parameter; 7] = [&lanes, &len_i, &pixels, &c, &dy, &dx.rows, &i32::from(dx.fresh)];
        let (vec, suffix) = vec_of(shape.c);
        self.each(&format!("average_pool_backward_{suffix}"), len / vec, &p)
    }

    /// The gradient of a bias: the sum of dy over samples and pixels, per channel.
    fn sum_columns(&self, shape: Shape, len: usize, dy: Rows, sums: Rows) -> Result<()> {
        let (lanes, valid, partial) = (self.lanes.at(), self.valid.at(), self.partial.rows());
        let (c, pixels, none) = (shape.c as i32, shape.pixels() as i32, Rows::NONE);
        let (chunk_rows, n_chunks) = chunks(len / shape.c);
        let p: [&dyn Parameter; 11] =
            [&lanes, &valid, &pixels, &c, &(chunk_rows as i32), &none, &dy, &none, &none, &0i32, &partial];
        self.launch(&format!("reduce_COLUMNS_{}", vec_of(shape.c).1), [n_chunks, 1], [256, 1], 0, &p)?;
        let p: [&dyn Parameter; 5] = [&lanes, &c, &(n_chunks as i32), &partial, &sums];
        self.launch("column_sums", [shape.c.div_ceil(32), 1], [32, SHARES], 0, &p)
    }

    /// The gradients of a dropout's input and of the residual added to its result.
    fn dropout_backward(&self, i: usize, rate: f32, dy: Rows, dx: Option<Sum>, residual: Option<Sum>) -> Result<()> {
        let extent = self.extent(self.schedule.stages[i].out);
        let is_on = self.mode.dropout == Dropout::OfStep && rate > 0.0;
        if is_on && let (Some(dx), Some((kept, stride))) = (dx, &self.kept[i].bytes) {
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
        self.schedule.check_tap(&self.graph, node)?;
        match self.schedule.grad_slot[node.0] {
            Some(slot) if self.has_grad[self.graph.owner(node.0)] => {
                self.read_grad_slot(slot, lane, self.len_read(node, lane, samples)?)
            }
            _ => Ok(vec![0.0; self.len_read(node, lane, samples)?]),
        }
    }

    fn pool_backward(&self, i: usize, kernel: &str, x: Rows, dy: Rows, dx: Sum) -> Result<()> {
        let (Some(pool), Some((places, stride))) = (self.pool_of(i), &self.kept[i].bytes) else { return Ok(()) };
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
