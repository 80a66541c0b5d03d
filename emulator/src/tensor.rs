//! Products of the tensor cores, and how their matrices lie in registers and in shared memory.
//!
//! Factors of tf32 have 10 bits after the point: the rest of a number is ignored, as the hardware does. Their products
//! are exact in single precision. Sums are of single precision, one product after another; the hardware's order is its
//! own.

use crate::machine::registers::{LANES, Row};
use crate::machine::shared::Shared;

/// A number as tf32.
fn tf32(bits: u32) -> f32 {
    f32::from_bits(bits & !0x1fff)
}

/// The lower or upper half of a word as bf16.
fn bf16(word: u32, upper: bool) -> f32 {
    f32::from_bits(if upper { word & 0xffff_0000 } else { word << 16 })
}

/// c += a·b of 16 × K and K × 8 numbers. c in registers: lane 4g + t has columns 2t and 2t + 1 of rows g and g + 8.
fn multiply<const K: usize>(a: &[[f32; K]; 16], b: &[[f32; 8]; K], c: &mut [Row<f32>; 4]) {
    for (line, a) in a.iter().enumerate() {
        let (g, low) = (line % 8, line / 8 * 2);
        let mut sums: [f32; 8] = std::array::from_fn(|n| c[low + n % 2][4 * g + n / 2]);
        for (a, b) in a.iter().zip(b) {
            for (sum, b) in sums.iter_mut().zip(b) {
                *sum = a.mul_add(*b, *sum);
            }
        }
        for (n, sum) in sums.iter().enumerate() {
            c[low + n % 2][4 * g + n / 2] = *sum;
        }
    }
}

/// `mma.m16n8k8`: lane 4g + t has columns t and t + 4 of a's rows g and g + 8, and rows t and t + 4 of b's column g.
pub fn multiply_tf32(a: &[Row<u32>; 4], b: &[Row<u32>; 2], c: &mut [Row<f32>; 4]) {
    let (mut left, mut right) = ([[0.0; 8]; 16], [[0.0; 8]; 8]);
    for lane in 0..LANES {
        let (g, t) = (lane / 4, lane % 4);
        for (i, row) in a.iter().enumerate() {
            left[g + i % 2 * 8][t + i / 2 * 4] = tf32(row[lane]);
        }
        for (i, row) in b.iter().enumerate() {
            right[t + 4 * i][g] = tf32(row[lane]);
        }
    }
    multiply(&left, &right, c);
}

/// `mma.m16n8k16`: as above, each word with two neighbours of a row of a, or of a column of b.
pub fn multiply_bf16(a: &[Row<u32>; 4], b: &[Row<u32>; 2], c: &mut [Row<f32>; 4]) {
    let (mut left, mut right) = ([[0.0; 16]; 16], [[0.0; 8]; 16]);
    for lane in 0..LANES {
        let (g, t) = (lane / 4, lane % 4);
        for half in 0..2 {
            for (i, row) in a.iter().enumerate() {
                left[g + i % 2 * 8][2 * t + half + i / 2 * 8] = bf16(row[lane], half == 1);
            }
            for (i, row) in b.iter().enumerate() {
                right[2 * t + half + 8 * i][g] = bf16(row[lane], half == 1);
            }
        }
    }
    multiply(&left, &right, c);
}

/// Rows of a factor of a warp group's product, of eight numbers each.
pub type Lines = Vec<[f32; 8]>;

/// A warp's 16 rows of the left factor, from registers as in [`multiply_tf32`].
pub fn fragments(a: &[Row<u32>; 4]) -> Lines {
    let mut lines = vec![[0.0; 8]; 16];
    for (i, row) in a.iter().enumerate() {
        for (lane, word) in row.iter().enumerate() {
            lines[lane / 4 + i % 2 * 8][lane % 4 + i / 2 * 4] = tf32(*word);
        }
    }
    lines
}

/// Rows `first..first + n` of a factor in shared memory, by its descriptor: bits 0–13 where it begins, 16–29 and 32–45
/// its two strides, in units of 16 bytes; 62–63 how parts of 16 bytes are permuted.
pub fn matrix(shared: &mut Shared, descriptor: u64, n: usize, first: usize, warp: u32) -> Result<Lines, String> {
    let field = |at: u32| (descriptor >> at & 0x3fff) * 16;
    let (start, leading, stride) = (field(0), field(16), field(32));
    let permuted = match descriptor >> 62 {
        0 => false,
        1 => true,
        _ => return Err("the emulator knows no permutation but that of 128 bytes".into()),
    };
    let mut lines = vec![[0.0; 8]; n];
    for (i, line) in lines.iter_mut().enumerate() {
        let row = (first + i) as u64;
        for half in 0..2 {
            // Eight rows of 16 bytes are a unit. Within a permuted row, parts follow each other; otherwise they are
            // `leading` apart. The permutation acts on addresses: bits 4–6 by bits 7–9.
            let at = if permuted {
                let plain = start + row / 8 * stride + row % 8 * 128 + half * 16;
                plain ^ (plain >> 7 & 7) << 4
            } else {
                start + row / 8 * stride + row % 8 * 16 + half * leading
            };
            let bytes = shared.read(at, 16, warp)?;
            for (number, bytes) in line[half as usize * 4..].iter_mut().zip(bytes.as_chunks::<4>().0) {
                *number = tf32(u32::from_le_bytes(*bytes));
            }
        }
    }
    Ok(lines)
}

/// A warp's 16 rows of a group's product. Register 4j + 2h + i has column 8j + 2t + i of row g + 8h; `visit` reads and
/// writes it around the sum.
pub fn multiply_rows(a: &Lines, b: &Lines, mut visit: impl FnMut(usize, &mut Row<f32>, &dyn Fn(&mut Row<f32>))) {
    for register in 0..b.len() / 2 {
        let (j, h, i) = (register / 4, register / 2 % 2, register % 2);
        let mut row = [0.0; LANES];
        visit(register, &mut row, &|row| {
            for (lane, sum) in row.iter_mut().enumerate() {
                let (a, b) = (&a[lane / 4 + 8 * h], &b[8 * j + 2 * (lane % 4) + i]);
                *sum = a.iter().zip(b).fold(*sum, |sum, (a, b)| a.mul_add(*b, sum));
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers that tf32 and bf16 hold exactly.
    fn number(i: usize) -> f32 {
        ((i * 7919 + 13) % 31) as f32 - 15.0
    }

    fn bits(values: impl Fn(usize) -> u32) -> Row<u32> {
        std::array::from_fn(values)
    }

    /// c + a·b of a 16 × depth and a depth × 8 matrix, by the definition.
    fn expected(depth: usize, i: usize, j: usize) -> f32 {
        number(1000 + 8 * i + j) + (0..depth).map(|k| number(i * depth + k) * number(500 + k * 8 + j)).sum::<f32>()
    }

    fn check(depth: usize, product: impl Fn(&mut [Row<f32>; 4])) {
        // Register 2h + i of lane 4g + t: row g + 8h, column 2t + i.
        let place = |register: usize, lane: usize| (lane / 4 + register / 2 * 8, lane % 4 * 2 + register % 2);
        let mut c: [Row<f32>; 4] = std::array::from_fn(|register| {
            std::array::from_fn(|lane| number(1000 + 8 * place(register, lane).0 + place(register, lane).1))
        });
        product(&mut c);
        for (register, row) in c.iter().enumerate() {
            for (lane, found) in row.iter().enumerate() {
                let (i, j) = place(register, lane);
                assert_eq!(*found, expected(depth, i, j), "row {i}, column {j}");
            }
        }
    }

    #[test]
    fn products_of_a_warp_equal_a_plain_loop() {
        check(8, |c| {
            let a = |i: usize, k: usize| number(i * 8 + k).to_bits();
            let b = |k: usize, j: usize| number(500 + k * 8 + j).to_bits();
            let a = [0, 1, 2, 3].map(|r| bits(|lane| a(lane / 4 + r % 2 * 8, lane % 4 + r / 2 * 4)));
            let b = [0, 1].map(|r| bits(|lane| b(lane % 4 + 4 * r, lane / 4)));
            multiply_tf32(&a, &b, c);
        });
        check(16, |c| {
            let pack = |low: f32, high: f32| low.to_bits() >> 16 | high.to_bits() & 0xffff_0000;
            let a = |i: usize, k: usize| pack(number(i * 16 + k), number(i * 16 + k + 1));
            let b = |k: usize, j: usize| pack(number(500 + k * 8 + j), number(500 + (k + 1) * 8 + j));
            let a = [0, 1, 2, 3].map(|r| bits(|lane| a(lane / 4 + r % 2 * 8, lane % 4 * 2 + r / 2 * 8)));
            let b = [0, 1].map(|r| bits(|lane| b(lane % 4 * 2 + 8 * r, lane / 4)));
            multiply_bf16(&a, &b, c);
        });
    }

    #[test]
    fn bits_below_tf32_are_ignored() {
        assert_eq!(tf32(0x3f80_1fff), 1.0);
        assert_eq!(bf16(0x3f80_4000, true), 1.0);
        assert_eq!(bf16(0x3f80_4000, false), 2.0);
    }

    #[test]
    fn matrices_are_found_in_both_layouts() {
        let mut shared = Shared::default();
        shared.reset(8192);
        let mut put = |at: usize, value: f32| {
            shared.write(at as u64, 4, 0).unwrap().copy_from_slice(&value.to_le_bytes());
        };
        for (row, k) in (0..32).flat_map(|row| (0..8).map(move |k| (row, k))) {
            // Rows of 128 bytes from byte 1024, of which the number's row permutes the parts of 16 bytes.
            put(1024 + 128 * row + ((k / 4) ^ (row & 7)) * 16 + k % 4 * 4, number(row * 8 + k));
            // Blocks of eight rows of 16 bytes, 128 bytes apart; the other half of the sum 1040 bytes on.
            put(0x1770 + row / 8 * 128 + row % 8 * 16 + k / 4 * 1040 + k % 4 * 4, number(row * 8 + k));
        }
        for descriptor in [64 | (1 << 16) | (64 << 32) | (1 << 62), 0x177 | (65 << 16) | (8 << 32)] {
            let lines = matrix(&mut shared, descriptor, 16, 16, 0).unwrap();
            for (i, line) in lines.iter().enumerate() {
                assert_eq!(*line, std::array::from_fn(|k| number((16 + i) * 8 + k)), "row {i} of {descriptor:x}");
            }
        }
        assert!(matrix(&mut shared, 2 << 62, 8, 0, 0).is_err());
    }

    #[test]
    fn a_warp_computes_its_rows_of_a_groups_product() {
        let a: Lines = (0..16).map(|i| std::array::from_fn(|k| number(8 * i + k))).collect();
        let b: Lines = (0..64).map(|j| std::array::from_fn(|k| number(500 + 8 * j + k))).collect();
        let mut sums = vec![[1.0; LANES]; 32];
        multiply_rows(&a, &b, |register, row, update| {
            *row = sums[register];
            update(row);
            sums[register] = *row;
        });
        for (i, j) in (0..16).flat_map(|i| (0..64).map(move |j| (i, j))) {
            let (register, lane) = (j / 8 * 4 + i / 8 * 2 + j % 2, i % 8 * 4 + j % 8 / 2);
            let sum: f32 = (0..8).map(|k| number(8 * i + k) * number(500 + 8 * j + k)).sum();
            assert_eq!(sums[register][lane], 1.0 + sum, "row {i}, column {j}");
        }
    }
}
