//! Arithmetic on flat vectors: the optimisers' steps, sums, clipping and the projection.

use crate::Suite;
use crate::backends::random;
use crate::compare::{Group, difference};
use anyhow::Result;
use fedproj_nn::cuda::{Batches, Fleet, Gpu, Vectors};
use fedproj_nn::vector::{self, Bounds, Conflict};
use fedproj_nn::{Cpu, Graph, Optimizer, Options, Rule, Shape, clip_norm};
use std::sync::Arc;

const TOLERANCE: f64 = 1e-5;
/// The difference of two nearly equal vectors is less exact.
const TOLERANCE_MOVEMENT: f64 = 1e-4;
const LANES: usize = 3;
const STEPS: usize = 5;

/// More parameters than one block of an inner product, and tensors at odd offsets.
fn graph() -> Result<Graph> {
    let mut g = Graph::new(Shape::vector(133));
    let x = g.linear("fc1", g.input(), 75, true)?;
    g.linear("fc2", x, 6, true)?;
    Ok(g)
}

struct Bench {
    fleet: Fleet,
    n: usize,
}

impl Bench {
    fn new(gpu: &Arc<Gpu>, graph: &Graph) -> Result<Self> {
        let options = Options { batch: 1, taps: &[], training: false };
        Ok(Self { fleet: Fleet::new(gpu, graph, LANES, &options)?, n: graph.params().len() })
    }

    /// One vector per lane, made by `of`.
    fn vectors(&self, of: impl Fn(usize) -> Vec<f32>) -> Result<Vectors> {
        let mut all = self.fleet.vectors(self.n)?;
        (0..LANES).try_for_each(|lane| self.fleet.write(&mut all, lane, &of(lane)))?;
        Ok(all)
    }
}

pub fn check_optimisers(suite: &Suite, group: &mut Group) -> Result<()> {
    let graph = graph()?;
    let sgd = |momentum, nesterov, weight_decay| Rule::Sgd { lr: 0.1, momentum, nesterov, weight_decay };
    let adam =
        |weight_decay, decoupled| Rule::Adam { lr: 0.02, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay, decoupled };
    for (name, rule, clip) in [
        ("SGD", sgd(0.0, false, 0.0), None),
        ("SGD with weight decay", sgd(0.0, false, 0.1), None),
        ("SGD with momentum", sgd(0.9, false, 0.0), None),
        ("SGD with Nesterov's momentum and weight decay", sgd(0.9, true, 0.05), None),
        ("SGD with clipping", sgd(0.0, false, 0.0), Some(3.0)),
        ("SGD with a limit that is not reached", sgd(0.0, false, 0.0), Some(1e6)),
        ("Adam", adam(0.0, false), None),
        ("Adam with weight decay", adam(0.1, false), None),
        ("AdamW", adam(0.1, true), None),
        ("Adam with clipping", adam(0.0, false), Some(3.0)),
    ] {
        let mut bench = Bench::new(suite.gpu()?, &graph)?;
        let n = bench.n;
        let start = |lane: usize| random(30 + lane as u32, n);
        let gradient = |lane: usize, step: usize| random(40 + (lane * STEPS + step) as u32, n);
        let factor = |lane: usize, step: usize| 1.0 / (1.0 + lane as f32 + 0.5 * step as f32);
        let moments = bench.fleet.moments(&rule)?;
        // Twice, because the second run must not see the moments of the first.
        for run in ["", " once more"] {
            bench.fleet.reset_lanes()?;
            bench.fleet.reset_moments(&moments)?;
            let theta = bench.vectors(start)?;
            let factors = |lane| (0..STEPS).map(|step| factor(lane, step).to_bits()).collect();
            bench.fleet.set_table(Batches::LrFactors, &(0..LANES).map(factors).collect::<Vec<_>>(), 1)?;
            for step in 0..STEPS {
                let g = bench.vectors(|lane| gradient(lane, step))?;
                if let Some(norm_max) = clip {
                    bench.fleet.clip(g.rows(), norm_max)?;
                }
                bench.fleet.update(&rule, &moments, theta.rows(), g.rows())?;
                bench.fleet.advance(1, 0)?;
                suite.gpu()?.synchronize()?;
            }
            for lane in 0..LANES {
                let (mut cpu, mut expected, mut optimizer) = (Cpu::new(1), start(lane), Optimizer::new(rule, n)?);
                for step in 0..STEPS {
                    let mut g = gradient(lane, step);
                    if let Some(norm_max) = clip {
                        clip_norm(&mut cpu, &mut g, norm_max);
                    }
                    optimizer.step(&mut cpu, &mut expected, &g, factor(lane, step));
                }
                let found = bench.fleet.read(&theta, lane)?;
                let what = format!("{name}{run}, lane {lane}");
                group.compare(&what, &found, &expected, TOLERANCE);
                let moved = |to: &[f32]| difference(to, &start(lane));
                group.compare(&format!("{what}: movement"), &moved(&found), &moved(&expected), TOLERANCE_MOVEMENT);
            }
        }
    }
    Ok(())
}

pub fn check_vectors(suite: &Suite, group: &mut Group) -> Result<()> {
    let graph = graph()?;
    let mut bench = Bench::new(suite.gpu()?, &graph)?;
    sums(&mut bench, group)?;
    for (name, bounds) in [
        ("plain", Bounds::default()),
        ("always", Bounds { always: true, ..Bounds::default() }),
        ("with ε", Bounds { eps: 5e3, ..Bounds::default() }),
        ("guarded", Bounds { norm_guard: 1e9, ..Bounds::default() }),
        ("bounded", Bounds { coefficient_max: 0.01, ..Bounds::default() }),
    ] {
        for by_tensor in [false, true] {
            let scope = if by_tensor { "tensor by tensor" } else { "as a whole" };
            projection(&mut bench, group, &graph, &format!("projection {name}, {scope}"), &bounds, by_tensor)?;
        }
    }
    Ok(())
}

fn sums(bench: &mut Bench, group: &mut Group) -> Result<()> {
    let n = bench.n;
    let (x, y) = (|lane: usize| random(60 + lane as u32, n), |lane: usize| random(70 + lane as u32, n));
    let (on_x, on_y) = (bench.vectors(x)?, bench.vectors(y)?);
    let mut cpu = Cpu::new(1);
    // The lane in the middle is inactive and must keep its bytes.
    let active = [2, 0];
    for (name, difference_to) in [("y + a·x", false), ("y + a·(x − y)", true)] {
        let out = bench.vectors(y)?;
        bench.fleet.set_lanes(&active)?;
        if difference_to {
            bench.fleet.axpy_difference(0.3, on_x.rows(), on_y.rows(), out.rows())?;
        } else {
            bench.fleet.axpy(0.3, on_x.rows(), out.rows())?;
        }
        for lane in 0..LANES {
            let mut expected = y(lane);
            if active.contains(&(lane as u32)) && difference_to {
                vector::axpy_difference(&mut cpu, 0.3, &x(lane), &y(lane), &mut expected);
            } else if active.contains(&(lane as u32)) {
                vector::axpy(&mut cpu, 0.3, &x(lane), &mut expected);
            }
            group.compare(&format!("{name}, lane {lane}"), &bench.fleet.read(&out, lane)?, &expected, TOLERANCE);
        }
    }
    let out = bench.vectors(y)?;
    bench.fleet.assign(on_x.rows(), out.rows(), n)?;
    group.require(bench.fleet.read(&out, 2)? == x(2) && bench.fleet.read(&out, 1)? == y(1), "assignment to two lanes");
    let zeros = |lane: usize| if lane == 2 { vec![0.0; n] } else { y(lane) };
    bench.fleet.ascend(on_x.rows(), 0.7, bench.vectors(zeros)?.rows(), out.rows())?;
    for lane in active.map(|lane| lane as usize) {
        let (found, mut expected) = (bench.fleet.read(&out, lane)?, vec![0.0; n]);
        vector::ascend(&mut cpu, &x(lane), 0.7, &zeros(lane), &mut expected);
        let moved = |to: &[f32]| difference(to, &x(lane));
        group.compare(&format!("x + ρ·g/‖g‖, lane {lane}"), &moved(&found), &moved(&expected), TOLERANCE_MOVEMENT);
    }
    bench.fleet.clear(out.rows(), n)?;
    group.require(bench.fleet.read(&out, 0)? == vec![0.0; n] && bench.fleet.read(&out, 1)? == y(1), "zeros");
    bench.fleet.set_lanes(&[0, 1, 2])?;
    let (order, weights) = ([1, 2, 0], [0.5f32, 0.3, -0.2]);
    let mut expected = vec![0.0; n];
    for (&lane, weight) in order.iter().zip(weights) {
        vector::axpy(&mut cpu, weight, &x(lane as usize), &mut expected);
    }
    let found = bench.fleet.weighted_sum(&on_x, &order, &weights)?;
    group.compare("weighted sum", &found, &expected, TOLERANCE);
    fixed_sum(bench, group)
}

/// Sums in integers are exact, so they have the host's bits.
fn fixed_sum(bench: &mut Bench, group: &mut Group) -> Result<()> {
    const ROUNDER: f64 = 6_755_399_441_055_744.0;
    let x = |lane: usize| random(60 + lane as u32, bench.n);
    let on_x = bench.vectors(x)?;
    // The last factor makes halves, which are rounded to even, where x has few digits.
    let (order, factors) = ([2, 0, 1], [3e9, -70_000.7, 8.5]);
    let mut expected = vec![0i64; bench.n];
    for (&lane, factor) in order.iter().zip(factors) {
        for (sum, x) in expected.iter_mut().zip(x(lane as usize)) {
            *sum += (f64::from(x) * factor).round_ties_even() as i64;
        }
    }
    let found = bench.fleet.fixed_sum(&on_x, &order, &factors, ROUNDER, 2f64.powi(51))?;
    group.require(found == Some(expected), "a sum in integers");
    let found = bench.fleet.fixed_sum(&on_x, &order, &factors, ROUNDER, 1e9)?;
    group.require(found.is_none(), "a value out of the range of integers");
    Ok(())
}

/// Lane 0 agrees with its reference and lane 1 conflicts with it. In lane 2 this alternates from tensor to tensor.
fn projection(
    bench: &mut Bench,
    group: &mut Group,
    graph: &Graph,
    what: &str,
    bounds: &Bounds,
    by_tensor: bool,
) -> Result<()> {
    let n = bench.n;
    let r = |lane: usize| random(80 + lane as u32, n);
    let g = |lane: usize| {
        let (mut g, r) = (random(90 + lane as u32, n), r(lane));
        for (i, span) in graph.params().spans().iter().enumerate() {
            let towards = [0.5, -0.5, if i % 2 == 0 { -0.5 } else { 0.5 }][lane];
            span.range().for_each(|at| g[at] += towards * r[at]);
        }
        g
    };
    let (on_g, on_r) = (bench.vectors(g)?, bench.vectors(r)?);
    // The weights after the step −g: what the projection adds to g, it subtracts from them.
    let on_theta = bench.vectors(g)?;
    bench.fleet.reset_lanes()?;
    bench.fleet.project(on_g.rows(), on_r.rows(), bounds, by_tensor, false, on_theta.rows(), -1.0)?;
    bench.fleet.project(on_g.rows(), on_r.rows(), bounds, by_tensor, false, on_g.rows(), 1.0)?;
    let stats = bench.fleet.stats()?;
    for (lane, s) in stats.iter().enumerate() {
        let (mut cpu, before, r) = (Cpu::new(1), g(lane), r(lane));
        let mut expected = before.clone();
        let whole = 0..n;
        let tensors: Vec<_> = graph.params().spans().iter().map(fedproj_nn::Span::range).collect();
        let mut active = false;
        for range in if by_tensor { tensors } else { vec![whole] } {
            let (g, r) = (&mut expected[range.clone()], &r[range]);
            active |= Conflict::between(&cpu, g, r).resolve(&mut cpu, g, r, bounds);
        }
        let found = bench.fleet.read(&on_g, lane)?;
        group.compare(&format!("{what}, lane {lane}"), &found, &expected, TOLERANCE);
        let mirrored: Vec<f32> = before.iter().zip(&expected).map(|(b, e)| 2.0 * b - e).collect();
        let found_theta = bench.fleet.read(&on_theta, lane)?;
        group.compare(&format!("{what}, lane {lane}, of a step"), &found_theta, &mirrored, TOLERANCE);
        if !active {
            group.require(found == before, &format!("{what}, lane {lane}: nothing projected, every bit kept,"));
        }
        let (norm_g, norm_r) = (vector::squared_norm(&cpu, &before), vector::squared_norm(&cpu, &r));
        let cosine = vector::dot(&cpu, &before, &r) / (norm_g * norm_r).sqrt();
        // Two comparisons; the first left g unchanged.
        let counted = s.n_compared == 2 && s.n_projected == 2 * u32::from(active);
        group.require(counted, &format!("{what}, lane {lane}: its counts,"));
        group.compare_numbers(
            &format!("{what}, lane {lane}: cosine"),
            s.cosine_total / 2.0,
            cosine,
            TOLERANCE_MOVEMENT,
        );
    }
    Ok(())
}
