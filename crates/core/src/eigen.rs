//! Eigenvalues of small symmetric matrices: Jacobi's rotations, in double precision and in a fixed order, so that every
//! machine finds the same bytes.

/// Sweeps at most; convergence is quadratic, and ten suffice for matrices of some hundred rows.
const SWEEPS_MAX: usize = 60;

/// Eigenvalues of the symmetric matrix `a` (n, n) in decreasing order, and for each its unit eigenvector as a row.
pub fn eigen(mut a: Vec<f64>, n: usize) -> (Vec<f64>, Vec<f64>) {
    let mut v = vec![0.0; n * n];
    (0..n).for_each(|i| v[i * n + i] = 1.0);
    let total: f64 = a.iter().map(|x| x * x).sum();
    for _ in 0..SWEEPS_MAX {
        let off: f64 = (0..n).flat_map(|i| (0..i).map(move |j| (i, j))).map(|(i, j)| a[i * n + j].powi(2)).sum();
        if off <= f64::EPSILON.powi(2) * total {
            break;
        }
        for p in 0..n {
            for q in p + 1..n {
                rotate(&mut a, &mut v, n, p, q);
            }
        }
    }
    let mut order: Vec<usize> = (0..n).collect();
    order.sort_by(|&i, &j| a[j * n + j].total_cmp(&a[i * n + i]).then(i.cmp(&j)));
    let values = order.iter().map(|&i| a[i * n + i]).collect();
    (values, order.iter().flat_map(|&i| v[i * n..(i + 1) * n].to_vec()).collect())
}

/// Turns the axes p and q so that a[p, q] is 0 (Golub and Van Loan, "Matrix Computations", 8.5). Rows of v are the axes.
fn rotate(a: &mut [f64], v: &mut [f64], n: usize, p: usize, q: usize) {
    let off = a[p * n + q];
    if off == 0.0 {
        return;
    }
    let tau = (a[q * n + q] - a[p * n + p]) / (2.0 * off);
    let t = if tau >= 0.0 { 1.0 / (tau + tau.hypot(1.0)) } else { -1.0 / (-tau + tau.hypot(1.0)) };
    let c = 1.0 / t.hypot(1.0);
    let s = t * c;
    for i in 0..n {
        let (x, y) = (a[i * n + p], a[i * n + q]);
        (a[i * n + p], a[i * n + q]) = (c * x - s * y, s * x + c * y);
    }
    for i in 0..n {
        let (x, y) = (a[p * n + i], a[q * n + i]);
        (a[p * n + i], a[q * n + i]) = (c * x - s * y, s * x + c * y);
        let (x, y) = (v[p * n + i], v[q * n + i]);
        (v[p * n + i], v[q * n + i]) = (c * x - s * y, s * x + c * y);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn eigenvectors_are_orthonormal_and_rebuild_the_matrix(
            rows in (1usize..12).prop_flat_map(|n| prop::collection::vec(prop::collection::vec(-1.0f64..1.0, n), n)),
        ) {
            let n = rows.len();
            let a: Vec<f64> = (0..n * n).map(|at| rows[at / n][at % n] + rows[at % n][at / n]).collect();
            let (values, vectors) = eigen(a.clone(), n);
            let row = |i: usize| &vectors[i * n..(i + 1) * n];
            for i in 0..n {
                prop_assert!(i == 0 || values[i - 1] >= values[i]);
                for j in 0..n {
                    let dot: f64 = row(i).iter().zip(row(j)).map(|(a, b)| a * b).sum();
                    prop_assert!((dot - f64::from(u8::from(i == j))).abs() < 1e-12);
                    let rebuilt: f64 = (0..n).map(|k| values[k] * row(k)[i] * row(k)[j]).sum();
                    prop_assert!((rebuilt - a[i * n + j]).abs() < 1e-12);
                }
            }
        }
    }
}
