//! Layers whose weights multiply what enters them, for methods that look at layers' inputs.

use super::{Graph, NodeId};
use crate::kernels::conv::Conv;
use std::ops::Range;

/// A linear layer, or a convolution, whose weights multiply patches of its input. Its weights lie in θ output by output.
#[derive(Clone, Debug, PartialEq)]
pub struct Product {
    /// The node whose value enters; [`Graph::input`] for the samples themselves.
    pub input: NodeId,
    /// Its weights in θ: one row per output.
    pub weight: Range<usize>,
    /// Its biases in θ, one per output; empty if it has none.
    pub bias: Range<usize>,
    /// Its outputs.
    pub outputs: usize,
    geometry: Conv,
}

impl Product {
    /// Values in a row of weights, and in a patch.
    pub fn row_len(&self) -> usize {
        self.weight.len() / self.outputs
    }

    /// Patches of a sample; 1 for a linear layer.
    pub fn n_patches(&self) -> usize {
        self.geometry.ho * self.geometry.wo
    }

    /// Adds a patch of a sample's value to `out`, in the order of a row of weights. Padding adds nothing.
    ///
    /// # Panics
    /// If `value` or `out` is of another layer.
    pub fn add_patch(&self, value: &[f32], patch: usize, out: &mut [f64]) {
        let Conv { h, w, ci, wo, kernel, stride, padding, .. } = self.geometry;
        for (tap, out) in out.chunks_exact_mut(ci).enumerate() {
            // Shifted by the padding, so that no number is negative.
            let (y, x) = (patch / wo * stride + tap / kernel, patch % wo * stride + tap % kernel);
            if (padding..h + padding).contains(&y) && (padding..w + padding).contains(&x) {
                let at = ((y - padding) * w + x - padding) * ci;
                out.iter_mut().zip(&value[at..at + ci]).for_each(|(out, v)| *out += f64::from(*v));
            }
        }
    }
}

impl Graph {
    /// All products with weights, in order; none if the network has weights that are no plain product of their layer's
    /// input: embeddings, layers over tokens, standardised convolutions. Normalisations are passed over.
    pub fn products(&self) -> Option<Vec<Product>> {
        if self.nodes.iter().any(|node| node.packed || node.has_other_weights()) {
            return None;
        }
        let product = |node: &super::Node| {
            let geometry = node.convolution()?;
            let [weight, bias, _] = node.params.clone();
            Some(Product { input: NodeId(self.owner(node.inputs[0].0)), weight, bias, outputs: node.shape.c, geometry })
        };
        Some(self.nodes.iter().filter_map(product).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::Cpu;
    use crate::{Mode, Options, Shape, Window, Workspace};

    /// A row of weights times a patch is the output of that row there: for strides, paddings and flattened images.
    #[test]
    fn rows_times_patches_are_the_layers_outputs() {
        let mut g = Graph::new(Shape::image(5, 4, 3));
        let conv = g.conv2d("conv", g.input(), 6, Window::new(3, 2, 1), true).unwrap();
        let flat = g.flatten("flat", conv).unwrap();
        let last = g.linear("fc", flat, 2, false).unwrap();
        let n = 3;
        let mut ws = Workspace::new(&g, &Options { batch: n, taps: &[conv], training: false }, Cpu::new(1)).unwrap();
        let theta = g.init_params(3, crate::Init::Torch);
        let x: Vec<f32> = (0..n * 60).map(|i| ((i * 37 % 101) as f32) / 50.0 - 1.0).collect();
        ws.forward(&theta, &mut [], &x, Mode::EVAL).unwrap();
        let products = g.products().unwrap();
        let nodes = [(conv, &products[0]), (last, &products[1])];
        assert_eq!((products.len(), products[1].input), (2, conv));
        for (node, product) in nodes {
            let into = if product.input == g.input() { &x[..] } else { ws.value(product.input).unwrap() };
            let (found, len) = (ws.value(node).unwrap(), into.len() / n);
            for (sample, patch, output) in (0..n)
                .flat_map(|s| (0..product.n_patches()).flat_map(move |p| (0..product.outputs).map(move |o| (s, p, o))))
            {
                let mut row = vec![0.0; product.row_len()];
                product.add_patch(&into[sample * len..(sample + 1) * len], patch, &mut row);
                let weights = &theta[product.weight.clone()][output * row.len()..(output + 1) * row.len()];
                let bias = theta[product.bias.clone()].get(output).map_or(0.0, |b| f64::from(*b));
                let expected = bias + row.iter().zip(weights).map(|(x, w)| x * f64::from(*w)).sum::<f64>();
                let at = (sample * product.n_patches() + patch) * product.outputs + output;
                assert!((f64::from(found[at]) - expected).abs() < 1e-5, "{} {expected}", found[at]);
            }
        }
    }

    #[test]
    fn networks_of_other_products_have_none() {
        let mut g = Graph::new(Shape::image(4, 4, 2));
        g.standardized_conv2d("conv", g.input(), 4, Window::new(3, 1, 1), false).unwrap();
        assert_eq!(g.products(), None);
    }
}
