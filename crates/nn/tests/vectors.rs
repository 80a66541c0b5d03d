//! The vector operations against double precision, over lengths and magnitudes of every kind, and the properties that a
//! projection must have.

#![allow(clippy::float_cmp, reason = "where numbers are compared, they must be equal")]

use fedproj_nn::vector::{self, Bounds, Conflict};
use fedproj_nn::{Cpu, Isa};
use proptest::prelude::*;

/// Elements whose squares and sums stay within single precision: zeros, ordinary and subnormal numbers, ±1e±15.
fn element() -> impl Strategy<Value = f32> {
    prop_oneof![
        8 => -10.0f32..10.0,
        2 => Just(0.0),
        1 => prop::num::f32::SUBNORMAL,
        1 => (-15..15, -1.0f32..1.0).prop_map(|(power, v)| v * 10f32.powi(power)),
    ]
}

/// Lengths around those at which chunks (64, 4096, 16384) begin and end, and any others.
fn length() -> impl Strategy<Value = usize> {
    prop_oneof![0usize..200, 4000usize..4200, 16_300usize..16_500, 0usize..20_000]
}

fn vectors<const N: usize>() -> impl Strategy<Value = [Vec<f32>; N]> {
    length().prop_flat_map(|n| std::array::from_fn(|_| prop::collection::vec(element(), n)))
}

/// What was measured, and whether g was projected.
fn project(cpu: &mut Cpu, g: &mut [f32], r: &[f32], eps: f64) -> (Conflict, bool) {
    let conflict = Conflict::between(cpu, g, r);
    (conflict, conflict.resolve(cpu, g, r, &Bounds { eps, ..Bounds::default() }))
}

fn config() -> ProptestConfig {
    ProptestConfig { cases: 48, failure_persistence: None, max_shrink_iters: 2000, ..ProptestConfig::default() }
}

fn exact_dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

/// The most that a sum of products may be off: a chunk's 64 partial sums take 64 terms each and meet in 6 additions,
/// which is 71 roundings of 2⁻²⁴ of the sum of magnitudes; a product that underflows loses at most the smallest number.
fn dot_bound(a: &[f32], b: &[f32]) -> f64 {
    let magnitudes: f64 = a.iter().zip(b).map(|(a, b)| (f64::from(*a) * f64::from(*b)).abs()).sum();
    72.0 * 2f64.powi(-24) * magnitudes + a.len() as f64 * 2f64.powi(-149)
}

fn bits(v: &[f32]) -> Vec<u32> {
    v.iter().map(|v| v.to_bits()).collect()
}

/// Every instruction set, on one thread and on three.
fn cpus() -> Vec<Cpu> {
    Isa::available().into_iter().flat_map(|isa| [Cpu::with_isa(1, isa), Cpu::with_isa(3, isa)]).collect()
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn dot_and_squared_norm_are_within_rounding_of_exact([a, b] in vectors::<2>()) {
        for cpu in cpus() {
            let (found, exact, bound) = (vector::dot(&cpu, &a, &b), exact_dot(&a, &b), dot_bound(&a, &b));
            prop_assert!((found - exact).abs() <= bound, "{cpu:?}: {found} ≠ {exact} ± {bound}");
            let (found, exact, bound) = (vector::squared_norm(&cpu, &a), exact_dot(&a, &a), dot_bound(&a, &a));
            prop_assert!((found - exact).abs() <= bound, "{cpu:?}: {found} ≠ {exact} ± {bound}");
        }
    }

    #[test]
    fn axpy_and_scale_round_each_element_once_or_twice([x, y] in vectors::<2>(), a in element()) {
        for mut cpu in cpus() {
            let (mut sum, mut scaled) = (y.clone(), y.clone());
            vector::axpy(&mut cpu, a, &x, &mut sum);
            vector::scale(&mut cpu, a, &mut scaled);
            for i in 0..x.len() {
                let (product, y) = (f64::from(a) * f64::from(x[i]), f64::from(y[i]));
                // The product and the sum are rounded (once together where there is a fused multiply-add).
                let bound = 2f64.powi(-24) * (2.0 * product.abs() + y.abs()) + 2f64.powi(-149);
                prop_assert!((f64::from(sum[i]) - (y + product)).abs() <= bound);
                prop_assert_eq!(scaled[i], (f64::from(a) * y) as f32);
            }
        }
    }

    #[test]
    fn ascent_goes_the_radius_along_the_gradient([x, g] in vectors::<2>(), radius in 0.0f32..10.0) {
        let norm = exact_dot(&g, &g).sqrt();
        // A smaller gradient's squares underflow: its direction is lost, as is that of 0.
        prop_assume!(norm > 1e-10);
        for mut cpu in cpus() {
            let mut out = vec![f32::NAN; x.len()];
            vector::ascend(&mut cpu, &x, radius, &g, &mut out);
            for i in 0..x.len() {
                let (x, step) = (f64::from(x[i]), f64::from(radius) / norm * f64::from(g[i]));
                prop_assert!((f64::from(out[i]) - (x + step)).abs() <= 1e-5 * step.abs() + 1e-7 * x.abs() + 1e-44);
            }
            vector::ascend(&mut cpu, &x, radius, &vec![0.0; x.len()], &mut out);
            prop_assert_eq!(bits(&out), bits(&x));
        }
    }

    #[test]
    fn threads_change_no_bit([a, b, c] in vectors::<3>(), w in element()) {
        for isa in Isa::available() {
            let (mut one, mut three) = (Cpu::with_isa(1, isa), Cpu::with_isa(3, isa));
            let run = |cpu: &mut Cpu| {
                let (mut sum, mut projected) = (a.clone(), a.clone());
                vector::axpy(cpu, w, &b, &mut sum);
                let (found, _) = project(cpu, &mut projected, &b, 1e-9);
                let scalars = [vector::dot(cpu, &a, &b), vector::squared_norm(cpu, &c), found.dot, found.squared_norm];
                (bits(&sum), bits(&projected), scalars.map(f64::to_bits))
            };
            prop_assert_eq!(run(&mut one), run(&mut three));
        }
    }

    #[test]
    fn projection_with_an_agreeing_gradient_changes_no_bit([g, r] in vectors::<2>(), eps in 0.0f64..1e-3) {
        let mut cpu = Cpu::new(1);
        // The reference is turned round where it disagrees.
        let sign = if vector::dot(&cpu, &g, &r) < 0.0 { -1.0 } else { 1.0 };
        let r: Vec<f32> = r.iter().map(|r| sign * r).collect();
        let mut projected = g.clone();
        let (found, active) = project(&mut cpu, &mut projected, &r, eps);
        prop_assert!(!active && found.dot >= 0.0);
        prop_assert_eq!(bits(&projected), bits(&g));
    }
}

/// Gradients as they occur: a scale each, and elements around it.
fn gradients() -> impl Strategy<Value = (Vec<f32>, Vec<f32>)> {
    (1usize..20_000, -6..6, -6..6).prop_flat_map(|(n, p, q)| {
        let scaled = move |power: i32| {
            prop::collection::vec(prop_oneof![4 => -1.0f32..1.0, 1 => Just(0.0)], n)
                .prop_map(move |v| v.into_iter().map(|v| v * 10f32.powi(power)).collect::<Vec<f32>>())
        };
        (scaled(p), scaled(q))
    })
}

fn norm(v: &[f32]) -> f64 {
    exact_dot(v, v).sqrt()
}

/// A rounding of every element and one of the coefficient, which the sums of `dot` leave with at most 72 roundings
/// each.
const PROJECTION_ERROR: f64 = 160.0 * 5.97e-8;

proptest! {
    #![proptest_config(config())]

    #[test]
    fn projection_never_increases_the_norm((mut g, r) in gradients(), eps in 0.0f64..1e-3) {
        let before = norm(&g);
        project(&mut Cpu::new(1), &mut g, &r, eps);
        prop_assert!(norm(&g) <= before * (1.0 + 2f64.powi(-22)), "{} > {before}", norm(&g));
    }

    #[test]
    fn projection_leaves_the_share_of_eps_in_the_inner_product((g, r) in gradients(), power in -12..3) {
        let eps = 10f64.powi(power);
        let mut projected = g.clone();
        let (found, active) = project(&mut Cpu::new(1), &mut projected, &r, eps);
        prop_assert_eq!(active, found.dot < 0.0);
        if active {
            let expected = exact_dot(&g, &r) * eps / (exact_dot(&r, &r) + eps);
            let error = (exact_dot(&projected, &r) - expected).abs();
            prop_assert!(error <= PROJECTION_ERROR * norm(&g) * norm(&r), "{error:e}");
        }
    }

    #[test]
    fn projecting_twice_is_projecting_once((mut g, r) in gradients()) {
        let mut cpu = Cpu::new(1);
        let before = norm(&g);
        project(&mut cpu, &mut g, &r, 0.0);
        let once = g.clone();
        project(&mut cpu, &mut g, &r, 0.0);
        let change: Vec<f32> = once.iter().zip(&g).map(|(a, b)| a - b).collect();
        prop_assert!(norm(&change) <= PROJECTION_ERROR * before);
    }

    #[test]
    fn the_length_of_the_reference_does_not_matter(
        (g, r) in gradients(), factor in prop_oneof![0.01f32..0.9, 1.1f32..100.0],
    ) {
        let mut cpu = Cpu::new(1);
        let scaled: Vec<f32> = r.iter().map(|r| factor * r).collect();
        // Where g and r are nearly orthogonal, rounding decides which side they are on.
        prop_assume!(exact_dot(&g, &r).abs() > 1e-5 * norm(&g) * norm(&r));
        let (mut by_r, mut by_scaled) = (g.clone(), g.clone());
        let (_, first) = project(&mut cpu, &mut by_r, &r, 0.0);
        let (_, second) = project(&mut cpu, &mut by_scaled, &scaled, 0.0);
        prop_assert_eq!(first, second);
        let change: Vec<f32> = by_r.iter().zip(&by_scaled).map(|(a, b)| a - b).collect();
        prop_assert!(norm(&change) <= PROJECTION_ERROR * norm(&g));
    }
}

#[test]
fn a_reference_too_small_to_square_changes_nothing() {
    // ⟨g, r⟩ = −1e-5 is a number, ‖r‖² = 1e-50 is 0 in single precision: there is nothing to divide by.
    for eps in [0.0, 1e-12] {
        let mut g = [1e20, 2.0];
        project(&mut Cpu::new(1), &mut g, &[-1e-25, 0.0], eps);
        assert_eq!(bits(&g), bits(&[1e20, 2.0]), "{g:?}");
    }
}

#[test]
fn an_orthogonal_or_empty_reference_changes_nothing() {
    for reference in [[0.0, 0.0, 0.0], [1.0, 1.0, 5.0]] {
        let mut g = [1.0, -1.0, -0.0];
        let (_, active) = project(&mut Cpu::new(1), &mut g, &reference, 0.0);
        assert!(!active, "{reference:?}");
        assert_eq!(bits(&g), bits(&[1.0, -1.0, -0.0]));
    }
}
