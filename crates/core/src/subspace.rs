//! Subspaces of layers' inputs on public samples, and the projection of gradients away from them: the rules `owm`, `gpm`, `sgp`
//! and `trgp` of [`crate::projection`].
//!
//! A layer computes W x (a bias is a column of W whose input is 1; a convolution multiplies patches). A change of W shows on
//! an input x only through ΔW x. So gradients G of W lose what acts on the inputs X of the memory, with singular values σ_j and
//! left singular vectors u_j of X, d inputs by m samples:
//!
//! G ← G − Σ_j λ_j (G u_j) u_jᵀ
//!
//! - OWM (Zeng et al. 2019): λ_j = σ_j² / (σ_j² + α). That is G P with P = I − X (XᵀX + αI)⁻¹ Xᵀ, the limit of its recursion
//!   P ← P − k kᵀ / (α + xᵀk), k = P x, over the columns x: means of the inputs over a batch.
//! - GPM (Saha et al. 2021): λ_j = 1 for the fewest j whose σ_j² hold a share ε of all, else 0.
//! - SGP (Saha and Roy 2023): of those, λ_j = (a + 1) σ_j / (a σ_j + σ_1).
//! - TRGP (Lin et al. 2022): as GPM; where the u_j hold half of ‖G‖ or more, the layer may change within their span by a
//!   scaling W_eff = W + W U (Q − I) Uᵀ. A gradient step on Q, taken into W at once, is G + (W U)(W U)ᵀ (G U) Uᵀ.
//!
//! The server sends r_j = √λ_j u_j. A vector as long as θ has room for one r_j per output of each layer: in the place of
//! that output's weights and bias.

use crate::cone::REFERENCES_MAX;
use crate::eigen::eigen;
use crate::error::{Error, Result};
use crate::evaluate::Model;
use crate::memory::{self, Cursor, MemoryConfig};
use crate::projection::{Projection, Rule};
use fedproj_data::Dataset;
use fedproj_nn::{Buffer, Cpu, Graph, Mode, NodeId, Options, Product, Workspace, vector};
use std::ops::Deref;

/// Columns of X, and directions of a layer, at most; GPM's code takes about as many.
pub(crate) const COLUMNS_MAX: usize = 125;

/// Directions with a smaller share of the largest σ² are rounding.
const RELATIVE_MIN: f64 = 1e-10;

/// a of SGP's importance.
const IMPORTANCE: f64 = 10.0;

/// Share of ‖G‖ from which TRGP trusts a layer.
pub(crate) const TRUST: f32 = 0.5;

/// The name of the i-th vector that is sent.
pub(crate) fn name(i: usize) -> String {
    format!("inputs.{i:02}")
}

/// The products of a network, or why it cannot be used.
pub(crate) fn products(graph: &Graph) -> Result<Vec<Product>> {
    graph.products().ok_or_else(|| {
        Error::config(
            "projection.rule: subspaces of inputs are known for linear layers and convolutions of images or numbers, not for \
             texts or standardised convolutions\nhint: projection.rule=fedproj, or another model",
        )
    })
}

/// What the server sends for the next round: `how.references` vectors.
pub(crate) fn vectors(
    how: &Projection,
    of: &MemoryConfig,
    (seed, round): (u64, u32),
    graph: &Graph,
    model: Model<'_>,
    public: &Dataset,
) -> Result<Vec<Vec<f32>>> {
    let products = products(graph)?;
    let indices = memory::draw(of, seed, round, public.n_samples());
    let group = if how.rule == Rule::Owm { of.batch.min(indices.len()) } else { 1 };
    let most = products.iter().map(Product::n_patches).max().unwrap_or(1) * indices.len();
    let n_columns = (if group > 1 { indices.len() / group } else { most }).clamp(1, COLUMNS_MAX);
    // No client has this number.
    let mut cursor = Cursor::new(seed, round, u32::MAX, indices.len(), group);
    let mut samples = Vec::new();
    (0..n_columns).for_each(|_| cursor.next(&indices, &mut samples));
    let inputs = inputs(graph, &products, model, public, &samples, group)?;
    let mut out = vec![vec![0.0; model.weights.len()]; how.references];
    for (product, columns) in products.iter().zip(inputs) {
        let rows = directions(how, &columns, product.row_len() + usize::from(!product.bias.is_empty()));
        for (j, row) in rows.iter().take(how.references * product.outputs).enumerate() {
            let (to, output) = (&mut out[j / product.outputs], j % product.outputs);
            let (weights, bias) = row.split_at(product.row_len());
            let at = product.weight.start + output * weights.len();
            to[at..at + weights.len()].copy_from_slice(weights);
            if let [b] = bias {
                to[product.bias.start + output] = *b;
            }
        }
    }
    Ok(out)
}

/// Per product the columns of X, one after another: a patch of the mean input over each group of samples.
fn inputs(
    graph: &Graph,
    products: &[Product],
    model: Model<'_>,
    public: &Dataset,
    samples: &[u32],
    group: usize,
) -> Result<Vec<Vec<f64>>> {
    let taps: Vec<NodeId> = products.iter().map(|p| p.input).filter(|node| *node != graph.input()).collect();
    let options = Options { batch: group, taps: &taps, training: false };
    let mut ws = Workspace::new(graph, &options, Cpu::new(1))?;
    let (mut x, mut buffers) = (vec![0.0; group * public.sample_len()], model.buffers.to_vec());
    let mut all = vec![Vec::new(); products.len()];
    for (column, samples) in samples.chunks(group).enumerate() {
        public.gather(samples, &mut x);
        ws.forward(model.weights, &mut buffers, &x, Mode::EVAL)?;
        for (product, columns) in products.iter().zip(&mut all) {
            let value = if product.input == graph.input() { &x[..] } else { ws.value(product.input)? };
            let (from, d) = (columns.len(), product.row_len());
            columns.resize(from + d, 0.0);
            for sample in value.chunks_exact(value.len() / group) {
                product.add_patch(sample, spread(column, product.n_patches()), &mut columns[from..]);
            }
            columns[from..].iter_mut().for_each(|v| *v /= group as f64);
            columns.extend((!product.bias.is_empty()).then_some(1.0));
        }
    }
    Ok(all)
}

/// The patch of a column: fractions of the golden ratio cover all of them evenly.
fn spread(column: usize, n_patches: usize) -> usize {
    let turn = (column as u32 + 1).wrapping_mul(0x9E37_79B9);
    ((u64::from(turn) * n_patches as u64) >> 32) as usize
}

/// The rows √λ_j u_j of a layer with d inputs, most important first.
fn directions(how: &Projection, columns: &[f64], d: usize) -> Vec<Vec<f32>> {
    let m = columns.len() / d;
    let column = |i: usize| &columns[i * d..(i + 1) * d];
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    // XᵀX is the smaller product: X v_j = σ_j u_j.
    let gram = (0..m * m).map(|at| dot(column(at / m), column(at % m))).collect();
    let (squares, v) = eigen(gram, m);
    let total: f64 = squares.iter().sum();
    let rank = squares.iter().take_while(|s| **s > RELATIVE_MIN * squares[0]).count();
    let weights = importances(how, &squares[..rank], total);
    let row = |(j, weight): (usize, f64)| {
        let mut u = vec![0.0; d];
        for i in 0..m {
            u.iter_mut().zip(column(i)).for_each(|(u, x)| *u += v[j * m + i] * x);
        }
        let scale = (weight / dot(&u, &u)).sqrt();
        u.into_iter().map(|u| (scale * u) as f32).collect()
    };
    weights.into_iter().enumerate().map(row).collect()
}

/// λ_j, given σ_j² in decreasing order and the sum of all.
fn importances(how: &Projection, squares: &[f64], total: f64) -> Vec<f64> {
    let damping = (1.0 - how.energy) * total;
    if how.rule == Rule::Owm {
        return squares.iter().map(|s| s / (s + damping)).collect();
    }
    let mut held = 0.0;
    // Fewer do not hold the share yet.
    let kept = squares.iter().take_while(|s| {
        let is_needed = held < how.energy * total;
        held += **s;
        is_needed
    });
    let importance = |s: &f64| match how.rule {
        Rule::Sgp => (IMPORTANCE + 1.0) * s.sqrt() / (IMPORTANCE * s.sqrt() + squares[0].sqrt()),
        _ => 1.0,
    };
    kept.map(importance).collect()
}

/// Projects gradients on the CPU; reused memory.
#[derive(Debug, Default)]
pub(crate) struct Projector {
    products: Vec<Product>,
    /// G U, W U and (W U)ᵀ G U, where they are used.
    along: Vec<f32>,
    weights_along: Vec<f32>,
    inner: Vec<f32>,
}

impl Projector {
    /// G ← G − Σ_j (G r_j) r_jᵀ in each product; with `scales` also TRGP's part. `vectors` are what the server sent.
    pub fn project(
        &mut self,
        ws: &mut Workspace,
        (g, theta): (&mut [f32], &[f32]),
        vectors: &[Buffer],
        scales: bool,
    ) -> Result<()> {
        if self.products.is_empty() {
            self.products = products(ws.graph())?;
        }
        let cpu = ws.cpu();
        let Self { products, along, weights_along, inner } = self;
        for product in products {
            let outputs = product.outputs;
            let n = n_rows(product, vectors);
            along.clear();
            along.extend(pairs(outputs, n).map(|(o, j)| times(cpu, product, g, o, vectors, j)));
            let is_trusted = scales && squares(along) >= f64::from(TRUST * TRUST) * norm(cpu, product, g);
            for (at, (o, j)) in pairs(outputs, n).enumerate() {
                add_row(cpu, product, (g, o), -along[at], (vectors, j));
            }
            if !is_trusted {
                continue;
            }
            weights_along.clear();
            weights_along.extend(pairs(outputs, n).map(|(o, j)| times(cpu, product, theta, o, vectors, j)));
            inner.clear();
            inner.extend(pairs(n, n).map(|(i, j)| over(outputs, |o| weights_along[o * n + i] * along[o * n + j])));
            for (o, j) in pairs(outputs, n) {
                let scaled = over(n, |i| weights_along[o * n + i] * inner[i * n + j]);
                add_row(cpu, product, (g, o), scaled, (vectors, j));
            }
        }
        Ok(())
    }
}

fn pairs(rows: usize, columns: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..rows).flat_map(move |row| (0..columns).map(move |column| (row, column)))
}

fn over(n: usize, of: impl Fn(usize) -> f32) -> f32 {
    (0..n).map(|i| f64::from(of(i))).sum::<f64>() as f32
}

fn squares(values: &[f32]) -> f64 {
    values.iter().map(|v| f64::from(*v).powi(2)).sum()
}

/// The weights of an output, and its bias.
fn row<'a>(product: &Product, v: &'a [f32], output: usize) -> (&'a [f32], &'a [f32]) {
    let d = product.row_len();
    let bias = if product.bias.is_empty() { &[][..] } else { &v[product.bias.start + output..][..1] };
    (&v[product.weight.start + output * d..][..d], bias)
}

/// The j-th r of a layer.
fn sent<'a, V: Deref<Target = [f32]>>(product: &Product, vectors: &'a [V], j: usize) -> (&'a [f32], &'a [f32]) {
    row(product, &vectors[j / product.outputs], j % product.outputs)
}

/// Rejects vectors with more r_j than a GPU has room for. The rules here send fewer, but a method from outside may not.
pub(crate) fn check_on_gpu(graph: &Graph, vectors: &[&[f32]]) -> Result<()> {
    let most = products(graph)?.iter().map(|product| n_rows(product, vectors)).max().unwrap_or(0);
    if most <= COLUMNS_MAX && vectors.len() <= REFERENCES_MAX {
        return Ok(());
    }
    Err(Error::config(format!(
        "project_inputs: a layer has {most} directions in {} vectors, and on a GPU {COLUMNS_MAX} in {REFERENCES_MAX} at most\n\
         hint: --device cpu",
        vectors.len()
    )))
}

/// How many r_j a layer has: they come without gaps.
fn n_rows<V: Deref<Target = [f32]>>(product: &Product, vectors: &[V]) -> usize {
    let is_there = |&j: &usize| {
        let (weights, bias) = sent(product, vectors, j);
        weights.iter().chain(bias).any(|v| *v != 0.0)
    };
    (0..vectors.len() * product.outputs).take_while(is_there).count()
}

/// ⟨row of v, r_j⟩
fn times(cpu: &Cpu, product: &Product, v: &[f32], output: usize, vectors: &[Buffer], j: usize) -> f32 {
    let ((v, b), (r, s)) = (row(product, v, output), sent(product, vectors, j));
    (vector::dot(cpu, v, r) + b.iter().zip(s).map(|(b, s)| f64::from(b * s)).sum::<f64>()) as f32
}

/// Row of g ← row + a r_j
fn add_row(
    cpu: &mut Cpu,
    product: &Product,
    (g, output): (&mut [f32], usize),
    a: f32,
    (vectors, j): (&[Buffer], usize),
) {
    let ((r, s), d) = (sent(product, vectors, j), product.row_len());
    vector::axpy(cpu, a, r, &mut g[product.weight.start + output * d..][..d]);
    if let [s] = s {
        g[product.bias.start + output] += a * s;
    }
}

/// ‖G‖² of a layer.
fn norm(cpu: &Cpu, product: &Product, g: &[f32]) -> f64 {
    [&product.weight, &product.bias].map(|range| vector::squared_norm(cpu, &g[range.clone()])).iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use fedproj_data::{Samples, Shape};
    use fedproj_nn::models::{self, Variant};
    use fedproj_nn::{Init, Shape as Input};
    use fedproj_rng::{Purpose, Stream};

    const N: usize = 40;

    /// A perceptron whose first layer has more inputs than the memory has directions, a memory, and a gradient.
    struct Case {
        graph: Graph,
        theta: Vec<f32>,
        public: Dataset,
        how: Projection,
        g: Vec<f32>,
    }

    impl Case {
        fn new(rule: Rule, energy: f64) -> Self {
            let graph = models::mlp(Input::vector(9), &[8], 5, Variant::default()).unwrap();
            let mut stream = Stream::new(4, Purpose::Synthetic, [0, 0, 0]);
            let mut normals = |n: usize| (0..n).map(|_| stream.normal() as f32).collect::<Vec<_>>();
            // Four directions of decreasing weight, of nine.
            let (along, parts) = (normals(4 * 9), normals(4 * N));
            let value = |at: usize| -> f32 {
                (0..4).map(|j| parts[at / 9 * 4 + j] * along[j * 9 + at % 9] / (1 + 2 * j) as f32).sum()
            };
            let samples = Samples::F32((0..9 * N).map(value).collect());
            let public = Dataset::new("memory", Shape::Vector { features: 9 }, samples, None, Vec::new()).unwrap();
            let (theta, g) = (graph.init_params(1, Init::Torch), normals(graph.params().len()));
            Self { how: Projection { rule, energy, ..Projection::default() }, graph, theta, public, g }
        }

        fn vectors(&self) -> Vec<Buffer> {
            let (model, of) =
                (Model { weights: &self.theta, buffers: &[] }, MemoryConfig { batch: 8, ..Default::default() });
            let all = vectors(&self.how, &of, (3, 1), &self.graph, model, &self.public).unwrap();
            all.iter().map(|v| Buffer::from(&v[..])).collect()
        }

        fn projected(&self, vectors: &[Buffer]) -> Vec<f32> {
            let mut ws = Workspace::new(&self.graph, &Options::training(1), Cpu::new(1)).unwrap();
            let (mut g, scales) = (self.g.clone(), self.how.rule == Rule::Trgp);
            Projector::default().project(&mut ws, (&mut g, &self.theta), vectors, scales).unwrap();
            g
        }

        /// Per layer the r_j, and the rows of a vector.
        fn layers(&self, vectors: &[Buffer], v: &[f32]) -> Vec<[Vec<Vec<f64>>; 2]> {
            let doubles = |(w, b): (&[f32], &[f32])| w.iter().chain(b).map(|x| f64::from(*x)).collect::<Vec<_>>();
            let of = |p: &Product| {
                let r = (0..n_rows(p, vectors)).map(|j| doubles(sent(p, vectors, j))).collect();
                [r, (0..p.outputs).map(|o| doubles(row(p, v, o))).collect()]
            };
            products(&self.graph).unwrap().iter().map(of).collect()
        }
    }

    fn dot(a: &[f64], b: &[f64]) -> f64 {
        a.iter().zip(b).map(|(a, b)| a * b).sum()
    }

    fn size(a: &[f64]) -> f64 {
        dot(a, a).sqrt()
    }

    #[test]
    fn gpm_leaves_nothing_that_acts_on_the_main_directions() {
        let case = Case::new(Rule::Gpm, 0.97);
        let vectors = case.vectors();
        for ([r, rows], [_, before]) in
            case.layers(&vectors, &case.projected(&vectors)).iter().zip(case.layers(&vectors, &case.g))
        {
            assert!((2..=5).contains(&r.len()), "{} directions", r.len());
            for (r, (row, before)) in r.iter().flat_map(|r| rows.iter().zip(&before).map(move |pair| (r, pair))) {
                assert!((size(r) - 1.0).abs() < 1e-6 && dot(r, row).abs() < 1e-5, "{} {}", size(r), dot(r, row));
                assert!(size(row) <= size(before));
            }
        }
    }

    /// All directions of few inputs: whatever is left of G does nothing to them.
    #[test]
    fn with_all_energy_no_output_of_the_first_layer_changes() {
        let case = Case::new(Rule::Gpm, 1.0);
        let vectors = case.vectors();
        let [_, rows] = &case.layers(&vectors, &case.projected(&vectors))[0];
        let [_, before] = &case.layers(&vectors, &case.g)[0];
        for sample in case.public.gather_all().chunks(9) {
            let x: Vec<f64> = sample.iter().map(|v| f64::from(*v)).chain([1.0]).collect();
            for (row, before) in rows.iter().zip(before) {
                assert!(dot(row, &x).abs() < 1e-4 * size(before) * size(&x), "{}", dot(row, &x));
            }
        }
        assert!(rows.iter().any(|row| size(row) > 0.1), "five directions of ten are free");
    }

    #[test]
    fn sgp_takes_the_first_direction_whole_and_of_the_others_a_share() {
        let case = Case::new(Rule::Sgp, 0.97);
        let vectors = case.vectors();
        let (before, after) = (case.layers(&vectors, &case.g), case.layers(&vectors, &case.projected(&vectors)));
        for ([r, rows], [_, before]) in after.iter().zip(&before) {
            let shares: Vec<f64> = r.iter().map(|r| dot(r, r)).collect();
            assert!(
                (shares[0] - 1.0).abs() < 1e-6 && shares.is_sorted_by(|a, b| a > b) && shares[1] > 0.1,
                "{shares:?}"
            );
            for ((r, share), (row, before)) in
                r.iter().zip(&shares).flat_map(|pair| rows.iter().zip(before).map(move |rows| (pair, rows)))
            {
                assert!((dot(r, row) - (1.0 - share) * dot(r, before)).abs() < 1e-5);
            }
        }
    }

    #[test]
    fn more_directions_than_a_gpu_holds_are_rejected_there() {
        let graph = models::mlp(Input::vector(9), &[100], 5, Variant::default()).unwrap();
        let n = graph.params().len();
        let (ones, zeros) = (vec![1.0; n], vec![0.0; n]);
        let mut some = zeros.clone();
        let first = &products(&graph).unwrap()[0];
        some[first.weight.start..][..25 * 9].fill(1.0);
        assert_eq!(n_rows(first, &[&ones[..], &some[..]]), COLUMNS_MAX);
        assert!(check_on_gpu(&graph, &[&ones, &some]).is_ok());
        let error = check_on_gpu(&graph, &[&ones, &ones]).unwrap_err().to_string();
        assert!(error.contains("200 directions in 2 vectors"), "{error}");
        assert!(check_on_gpu(&graph, &[&zeros[..]; 17]).unwrap_err().to_string().contains("in 17 vectors"));
    }

    #[test]
    fn owm_is_the_projector_of_its_recursion() {
        let mut stream = Stream::new(6, Purpose::Synthetic, [0, 0, 0]);
        let (d, m) = (7, 5);
        let columns: Vec<f64> = (0..d * m).map(|_| stream.normal()).collect();
        let how = Projection { rule: Rule::Owm, energy: 0.9, ..Projection::default() };
        let alpha = 0.1 * columns.iter().map(|x| x * x).sum::<f64>();
        let rows = directions(&how, &columns, d);
        let mut p: Vec<Vec<f64>> = (0..d).map(|i| (0..d).map(|j| f64::from(u8::from(i == j))).collect()).collect();
        for x in columns.chunks(d) {
            let k: Vec<f64> = p.iter().map(|row| dot(row, x)).collect();
            let scale = alpha + dot(x, &k);
            for (row, ki) in p.iter_mut().zip(&k) {
                row.iter_mut().zip(&k).for_each(|(p, kj)| *p -= ki * kj / scale);
            }
        }
        for (i, j) in pairs(d, d) {
            let found = f64::from(u8::from(i == j)) - rows.iter().map(|r| f64::from(r[i] * r[j])).sum::<f64>();
            assert!((found - p[i][j]).abs() < 1e-6, "{found} {}", p[i][j]);
        }
    }

    #[test]
    fn trgp_is_gpm_but_for_trusted_layers_whose_change_stays_among_scalings() {
        let (gpm, mut case) = (Case::new(Rule::Gpm, 0.97), Case::new(Rule::Trgp, 0.97));
        let vectors = case.vectors();
        assert!(vectors.iter().zip(gpm.vectors()).all(|(a, b)| a[..] == b[..]), "the same directions");
        // The first layer's gradient lies along one direction, the second's where nothing enters.
        let [first, second] = [0, 1].map(|layer| products(&case.graph).unwrap().swap_remove(layer));
        let free = gpm.projected(&vectors);
        case.g[second.weight.clone()].copy_from_slice(&free[second.weight.clone()]);
        case.g[second.bias.clone()].copy_from_slice(&free[second.bias.clone()]);
        for o in 0..first.outputs {
            let (r, b) = sent(&first, &vectors, 1);
            case.g[first.weight.start + o * 9..][..9].copy_from_slice(r);
            case.g[first.bias.start + o] = b[0];
        }
        let after = case.projected(&vectors);
        let [trusted, untrusted] = &case.layers(&vectors, &after)[..] else { unreachable!("two layers") };
        let [_, weights] = &case.layers(&vectors, &case.theta)[0];
        for r in &untrusted[0] {
            assert!(untrusted[1].iter().all(|row| dot(r, row).abs() < 1e-5), "as GPM");
        }
        // (W U)(W U)ᵀ G U, with G U the unit vector of r_1 in every row.
        for (j, r) in trusted[0].iter().enumerate() {
            for (o, row) in trusted[1].iter().enumerate() {
                let wu = |o: usize, j: usize| dot(&weights[o], &trusted[0][j]);
                let expected: f64 = (0..trusted[0].len())
                    .map(|i| wu(o, i) * (0..first.outputs).map(|p| wu(p, i) * f64::from(u8::from(j == 1))).sum::<f64>())
                    .sum();
                assert!((dot(r, row) - expected).abs() < 1e-4, "{o} {j}: {} {expected}", dot(r, row));
            }
        }
    }
}
