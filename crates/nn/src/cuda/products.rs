//! Convolutions and linear layers of a fleet: which kernels compute which pass.

use super::conv::{Geometry, Launch, stem_parts, stem_pool_shared, stem_shared, stem_weight_shared};
use super::fleet::Fleet;
use super::gather;
use super::gpu::{Parameter, Pass, Precision, Queue, parameters};
use super::hopper::{AT_ONCE, Dense, Strip, shared_bytes};
use super::memory::Rows;
use crate::error::{Error, Result};
use crate::kernels::conv::Conv;
use crate::kernels::pool::MaxPool;

/// What is applied to a forward product, as in the kernels.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct After {
    pub bias: Rows,
    pub norm: Rows,
    pub residual: Rows,
    /// Where the sums of the batch-norm that follows go, and what they are about.
    pub moments: Rows,
    pub mean: Rows,
    /// The address of the lanes' counts of valid samples.
    pub valid: u64,
}
parameters!(After);

impl After {
    pub const NOTHING: Self = Self {
        bias: Rows::NONE,
        norm: Rows::NONE,
        residual: Rows::NONE,
        moments: Rows::NONE,
        mean: Rows::NONE,
        valid: 0,
    };
}

/// A linear layer of few outputs, as in `linear.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Linear {
    ci: i32,
    co: i32,
    batch: i32,
}
parameters!(Linear);

impl Linear {
    /// The layer, if these kernels support it.
    fn new(c: &Conv, pitch: usize, batch: usize, aligned: bool) -> Option<Self> {
        let is_linear = (c.h * c.w, c.kernel) == (1, 1) && pitch == c.ci;
        let serves = is_linear && aligned && c.ci.is_multiple_of(4) && c.co <= 32;
        serves.then_some(Self { ci: c.ci as i32, co: c.co as i32, batch: batch as i32 })
    }
}

/// The winners of a max-pool and their gradients, as in `stem.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Won {
    pub places: u64,
    pub stride: i64,
    pub dy: Rows,
}
parameters!(Won);

/// A pass of a layer: its image, weights and result, or their gradients. The pass computes one of the three.
#[derive(Clone, Copy)]
pub(super) struct Operands {
    pub pass: Pass,
    pub x: Rows,
    pub w: Rows,
    pub y: Rows,
    pub after: After,
    /// Whether the result overwrites what was there, or is added to it.
    pub fresh: bool,
    pub relu: bool,
}

impl Operands {
    fn flags(&self) -> i32 {
        i32::from(self.fresh) | (2 * i32::from(self.relu))
    }

    fn program(&self) -> &'static str {
        match self.pass {
            Pass::Forward => "FORWARD",
            Pass::Input => "INPUT",
            Pass::Weight => "WEIGHT",
        }
    }

    fn out(&self) -> Rows {
        match self.pass {
            Pass::Forward => self.y,
            Pass::Input => self.x,
            Pass::Weight => self.w,
        }
    }
}

impl Fleet {
    /// The convolution of a node, a linear layer being one of 1×1; its input's pitch, and whether its weights are aligned.
    fn convolution(&self, node: usize) -> Option<(Conv, usize, bool)> {
        let n = &self.graph.nodes[node];
        let conv = n.convolution()?;
        let pitch = if n.inputs[0] == self.graph.input() { self.input_pitch } else { conv.ci };
        Some((conv, pitch, n.params[0].start.is_multiple_of(4)))
    }

    /// The chunks of rows whose moments the forward pass of a convolution sums; `None` if its kernel does not.
    pub(super) fn moment_chunks(&self, node: usize) -> Option<usize> {
        let (c, pitch, aligned) = self.convolution(node).filter(|_| self.gpu.has_hopper())?;
        if let Some(strip) = Strip::new(&c, self.batch, aligned) {
            return Some(strip.chunks());
        }
        if stem_shared(&c, pitch).is_some() {
            return Some(self.batch * stem_parts(&c));
        }
        let is_whole =
            || gather::product(Pass::Forward, &c, self.batch, self.n_active(), self.gpu.processors()).splits == 1;
        let serves = gather::serves(Pass::Forward, &c, pitch, aligned) && is_whole();
        serves.then(|| (self.batch * c.ho * c.wo).div_ceil(gather::PIXELS))
    }

    /// Computes a pass of a convolution or a linear layer, together with the max-pool that a forward pass fuses.
    pub(super) fn product(&self, node: usize, o: &Operands, pool: Option<&MaxPool>) -> Result<()> {
        let Some((c, pitch, aligned)) = self.convolution(node) else { return Ok(()) };
        if self.gpu.has_hopper()
            && let Some(strip) = Strip::new(&c, self.batch, aligned)
        {
            return self.shifted_product(strip, o);
        }
        let is_exact = self.gpu.precision() == Precision::Fp32;
        let (tokens, shape) = (self.tokens_of(node), self.graph.nodes[node].shape);
        if tokens == 0
            && let Some(linear) = Linear::new(&c, pitch, self.batch, aligned)
        {
            return self.linear_product(linear, &c, o);
        }
        // Of texts each token is a row. How sums are split depends on the tokens a batch could have.
        let batch = if tokens == 0 { self.batch } else { self.batch * shape.pixels() };
        if self.gpu.has_hopper()
            && let Some(dense) = Dense::new(c.ci, c.co, batch, aligned, tokens)
            && (o.pass != Pass::Weight || dense.weight().is_some())
        {
            return self.dense_product(dense, (c.ci, c.co), o);
        }
        if self.gpu.has_hopper() && tokens == 0 && gather::serves(o.pass, &c, pitch, aligned) {
            return self.gathered_product(&c, o);
        }
        let (geometry, lanes) = (Geometry::new(&c, pitch, batch, tokens), self.lanes.at());
        if o.pass == Pass::Forward
            && !is_exact
            && let Some(shared) = stem_shared(&c, pitch)
        {
            // Only as many blocks as run at once; each loops over images. One more would begin when the others have ended.
            let strips = c.co / 64;
            let p: [&dyn Parameter; 7] = [&geometry, &lanes, &o.x, &o.w, &o.y, &o.after, &o.flags()];
            let (kernel, shared, parts) = match pool.and_then(|pool| stem_pool_shared(&c, pitch, pool)) {
                Some(shared) => ("STEM.stem_pool", shared, 1),
                None => ("STEM.stem", shared, stem_parts(&c)),
            };
            let at_once = 2 * self.gpu.processors() / (strips * self.n_active());
            let blocks = at_once.clamp(1, parts * self.batch);
            return self.launch(kernel, [blocks, strips], [256, 1], shared, &p);
        }
        if pool.is_some() {
            return Err(Error::gpu(&self.graph.nodes[node].name, "no kernel computes it together with its max-pool"));
        }
        let launch = Launch::new(o.pass, &c, pitch, batch, aligned, self.n_active(), is_exact, self.further);
        let kernel = format!("{}.{}", o.program(), launch.kernel);
        let (parts, flags) = (launch.splits as i32, o.flags());
        let p: [&dyn Parameter; 9] = [&geometry, &lanes, &o.x, &o.w, &o.y, &o.after, &flags, &parts, &self.parts()];
        self.launch(&kernel, [launch.tiles, launch.splits], [128, 1], launch.shared, &p)?;
        let (len, columns) = match o.pass {
            Pass::Forward => (batch * c.ho * c.wo * c.co, c.co),
            Pass::Input => (batch * c.h * c.w * c.ci, c.ci),
            Pass::Weight => (c.kernel * c.kernel * c.ci * c.co, c.co),
        };
        self.sum_parts(o, len, columns, launch.splits)
    }

    /// Whether `stem_weight` computes the gradient of a first layer's weights from that of the max-pool behind its batch-norm.
    pub(super) fn serves_first_layer(&self, node: usize, pool: &MaxPool) -> bool {
        self.gpu.precision() == Precision::Tf32
            && self.gpu.has_stem_weight()
            && self
                .convolution(node)
                .is_some_and(|(c, pitch, _)| c.w >= 8 && stem_pool_shared(&c, pitch, pool).is_some())
    }

    /// The gradient `w` of a first layer's weights, from its result `y` and the max-pool behind its batch-norm.
    pub(super) fn stem_weight(&self, node: usize, y: Rows, won: Won, w: Rows) -> Result<()> {
        let Some((c, pitch, aligned)) = self.convolution(node) else { return Ok(()) };
        // The sum is split as in the kernel without the max-pool.
        let Launch { splits, .. } =
            Launch::new(Pass::Weight, &c, pitch, self.batch, aligned, self.n_active(), false, self.further);
        let (geometry, x) = (Geometry::new(&c, pitch, self.batch, 0), self.value(0));
        let p: [&dyn Parameter; 10] = [
            &geometry,
            &self.lanes.at(),
            &self.valid.at(),
            &x,
            &y,
            &self.coefficients.rows(),
            &won,
            &w,
            &(splits as i32),
            &self.parts(),
        ];
        self.launch("STEM.stem_weight", [c.co / 64, splits], [256, 1], stem_weight_shared(&c), &p)?;
        let operands = Operands { pass: Pass::Weight, x, w, y, after: After::NOTHING, fresh: true, relu: false };
        self.sum_parts(&operands, 9 * c.ci * c.co, c.co, splits)
    }

    /// Adds up the parts of a split sum.
    fn sum_parts(&self, o: &Operands, len: usize, columns: usize, parts: usize) -> Result<()> {
        if parts == 1 {
            return Ok(());
        }
        let (len_i, columns, parts, flags) = (len as i32, columns as i32, parts as i32, o.flags());
        let p: [&dyn Parameter; 8] =
            [&self.lanes.at(), &o.out(), &o.after, &len_i, &columns, &parts, &flags, &self.parts()];
        self.each(&format!("{}.sum_splits", o.program()), len.div_ceil(4), &p)
    }

    /// By the kernels of `linear.cu`.
    fn linear_product(&self, linear: Linear, c: &Conv, o: &Operands) -> Result<()> {
        let grid = match o.pass {
            Pass::Forward => [self.batch.div_ceil(8), 1],
            Pass::Input => [(self.batch * c.ci / 4).div_ceil(256), 1],
            Pass::Weight => [c.ci.div_ceil(128), c.co],
        };
        let p: [&dyn Parameter; 7] = [&linear, &self.lanes.at(), &o.x, &o.w, &o.y, &o.after, &o.flags()];
        self.launch(&format!("linear_{}", o.program()), grid, [256, 1], 0, &p)
    }

    /// By the kernels of `dense.cu`.
    fn dense_product(&self, dense: Dense, (ci, co): (usize, usize), o: &Operands) -> Result<()> {
        let (lanes, flags) = (self.lanes.at(), o.flags());
        let product = |dense: Dense, from: Rows, w: Rows, to: Rows| {
            let (kernel, blocks, threads) = dense.launch(self.n_active(), self.gpu.processors());
            let p: [&dyn Parameter; 7] = [&dense, &lanes, &from, &w, &to, &o.after, &flags];
            self.launch(&format!("HOPPER.{kernel}"), [blocks, 1], [threads, 1], shared_bytes(kernel).unwrap_or(0), &p)
        };
        match o.pass {
            Pass::Forward => product(dense, o.x, o.w, o.y),
            Pass::Input => product(dense.turned(), o.y, self.turned_weights(ci, co, 1, o.w)?, o.x),
            Pass::Weight => {
                let (tiles, splits) = dense.weight().unwrap_or((0, 1));
                let p: [&dyn Parameter; 8] =
                    [&dense, &lanes, &o.x, &o.w, &o.y, &flags, &(splits as i32), &self.parts()];
                let shared = shared_bytes("dense_weight").unwrap_or(0);
                self.launch("HOPPER.dense_weight", [tiles, splits], [256, 1], shared, &p)?;
                self.sum_parts(o, ci * co, co, splits)
            }
        }
    }

    /// By the kernels of `gather.cu`.
    fn gathered_product(&self, c: &Conv, o: &Operands) -> Result<()> {
        let (geometry, lanes, flags) = (Geometry::new(c, c.ci, self.batch, 0), self.lanes.at(), o.flags());
        let parts = self.parts();
        let (from, w, to, len, columns) = match o.pass {
            Pass::Forward => (o.x, o.w, o.y, c.ho * c.wo * c.co, c.co),
            Pass::Input => {
                let turned = self.turned_weights(c.ci, c.co, c.kernel * c.kernel, o.w)?;
                (o.y, turned, o.x, c.h * c.w * c.ci, c.ci)
            }
            Pass::Weight => {
                let (tiles, splits, shared) = gather::weight(c, self.batch, self.further);
                let p: [&dyn Parameter; 8] = [&geometry, &lanes, &o.x, &o.w, &o.y, &flags, &(splits as i32), &parts];
                self.launch("HOPPER.gathered_weight", [tiles, splits], [384, 1], shared, &p)?;
                return self.sum_parts(o, 9 * c.ci * c.co, c.co, splits);
            }
        };
        let launch = gather::product(o.pass, c, self.batch, self.n_active(), self.gpu.processors());
        let p: [&dyn Parameter; 9] =
            [&geometry, &lanes, &from, &w, &to, &o.after, &flags, &(launch.splits as i32), &parts];
        let shared = gather::shared_bytes(launch.kernel).unwrap_or(0);
        let kernel = format!("HOPPER.{}", launch.kernel);
        self.launch(&kernel, [launch.tiles, launch.splits], [launch.threads, 1], shared, &p)?;
        self.sum_parts(o, self.batch * len, columns, launch.splits)
    }

    /// Weights with input and output swapped, and with taps reversed.
    fn turned_weights(&self, ci: usize, co: usize, taps: usize, w: Rows) -> Result<Rows> {
        let Some(turned) = &self.turned else {
            return Err(Error::gpu("the gradient of an input", "a fleet without training has no gradients"));
        };
        let (ci_i, co_i, taps_i) = (ci as i32, co as i32, taps as i32);
        let p: [&dyn Parameter; 6] = [&self.lanes.at(), &ci_i, &co_i, &taps_i, &w, &turned.rows()];
        self.launch("HOPPER.turn_weights", [ci / 32 * (co / 32), taps], [32, 8], 0, &p)?;
        Ok(turned.rows())
    }

    /// By the kernels of `hopper.cu`.
    fn shifted_product(&self, strip: Strip, o: &Operands) -> Result<()> {
        let (lanes, n_lanes, flags) = (self.lanes.at(), self.n_active() as i32, o.flags());
        let (ci, co) = strip.channels();
        let product = |strip: Strip, from: Rows, w: Rows, to: Rows| {
            // Only as many blocks as run at once; each loops over tiles.
            let (kernel, tiles) = strip.product(self.n_active(), self.gpu.processors());
            let blocks = (tiles * self.n_active()).min(AT_ONCE * self.gpu.processors());
            let p: [&dyn Parameter; 8] = [&strip, &n_lanes, &lanes, &from, &w, &to, &o.after, &flags];
            let shared = shared_bytes(kernel).unwrap_or(0);
            self.gpu.launch(Queue::Main, &format!("HOPPER.{kernel}"), [blocks, 1, 1], [256, 1], shared, &p)
        };
        match o.pass {
            Pass::Forward => product(strip, o.x, o.w, o.y),
            Pass::Input => product(strip.turned(), o.y, self.turned_weights(ci, co, 9, o.w)?, o.x),
            Pass::Weight => {
                let (tiles, splits) = strip.weight(self.further);
                let p: [&dyn Parameter; 8] =
                    [&strip, &lanes, &o.x, &o.w, &o.y, &flags, &(splits as i32), &self.parts()];
                let shared = shared_bytes("shifted_weight").unwrap_or(0);
                self.launch("HOPPER.shifted_weight", [tiles, splits], [384, 1], shared, &p)?;
                self.sum_parts(o, 9 * ci * co, co, splits)
            }
        }
    }
}
