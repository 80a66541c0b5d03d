//! Token embeddings: vectors are looked up in tables and summed. Pooling turns them into one vector per text.

use super::elementwise::add_chunk as add_row;
use super::team::Shards;
use super::{Cpu, Sum};
use crate::tokens::Tokens;

/// Rows of a table per unit of work.
const UNIT_ROWS: usize = 2048;
/// Tokens per chunk: the gradients of their types are summed in single precision.
const CHUNK: usize = 64;

/// y (tokens, C) = word + position + type, each table with rows of `width`.
pub(crate) fn forward(cpu: &mut Cpu, tokens: &Tokens, tables: [&[f32]; 3], width: usize, y: &mut [f32]) {
    let (c, isa) = (width, cpu.isa);
    let [words, positions, types] = tables;
    let y = Shards::new(y);
    cpu.team.run(tokens.n_texts(), &|text, _| {
        let range = tokens.of(text);
        // SAFETY: each unit owns its text.
        let y = unsafe { y.part(range.start * c..range.end * c) };
        for ((y, t), position) in y.chunks_exact_mut(c).zip(range).zip(positions.chunks_exact(c)) {
            let (word, kind) = (tokens.ids[t] as usize * c, tokens.types_of[t] as usize * c);
            y.copy_from_slice(position);
            add_row(isa, y, &words[word..word + c]);
            add_row(isa, y, &types[kind..kind + c]);
        }
    });
}

/// Floats of scratch for the gradient of `n_tokens` tokens with up to two types.
pub(crate) fn scratch_len(n_tokens: usize, width: usize) -> usize {
    n_tokens.div_ceil(CHUNK) * 2 * width
}

/// The gradients of the three tables. The gradient of the words is dense although mostly zeros: the flat parameter
/// vector has no holes.
pub(crate) fn backward(
    cpu: &mut Cpu,
    tokens: &Tokens,
    dy: &[f32],
    width: usize,
    tables: [&mut [f32]; 3],
    scratch: &mut [f32],
) {
    let (c, isa) = (width, cpu.isa);
    let [words, positions, types] = tables;
    cpu.team.parts(words, UNIT_ROWS * c, &|unit, words| {
        let rows = unit * UNIT_ROWS..unit * UNIT_ROWS + words.len() / c;
        words.fill(0.0);
        for (&id, dy) in tokens.ids.iter().zip(dy.chunks_exact(c)) {
            if rows.contains(&(id as usize)) {
                add_row(isa, &mut words[(id as usize - rows.start) * c..][..c], dy);
            }
        }
    });
    cpu.team.parts(positions, c, &|position, row| {
        row.fill(0.0);
        for text in 0..tokens.n_texts() {
            let range = tokens.of(text);
            if position < range.len() {
                add_row(isa, row, &dy[(range.start + position) * c..][..c]);
            }
        }
    });
    // Many tokens share each of the few types. Sums run in chunks, then in double precision, to lose no digits.
    let n_chunks = tokens.len().div_ceil(CHUNK);
    let (len, partial) = (types.len(), &mut scratch[..n_chunks * types.len()]);
    cpu.team.parts(partial, len, &|chunk, sums| {
        sums.fill(0.0);
        let first = chunk * CHUNK;
        for (&kind, dy) in tokens.types_of[first..].iter().zip(dy[first * c..].chunks_exact(c)).take(CHUNK) {
            add_row(isa, &mut sums[kind as usize * c..][..c], dy);
        }
    });
    for (i, sum) in types.iter_mut().enumerate() {
        *sum = partial.iter().skip(i).step_by(len).map(|&v| f64::from(v)).sum::<f64>() as f32;
    }
}

/// y (texts, C) = the mean of each text's tokens, or its first token; 0 for a text without tokens.
pub(crate) fn pool(cpu: &mut Cpu, tokens: &Tokens, mean: bool, x: &[f32], width: usize, y: &mut [f32]) {
    let (c, isa) = (width, cpu.isa);
    cpu.team.parts(&mut y[..tokens.n_texts() * c], c, &|text, y| {
        let range = tokens.of(text);
        y.fill(0.0);
        let n = if mean { range.len() } else { range.len().min(1) };
        x[range.start * c..].chunks_exact(c).take(n).for_each(|x| add_row(isa, y, x));
        let share = share(n);
        for v in y {
            *v *= share;
        }
    });
}

/// dx += the gradient of [`pool`].
pub(crate) fn pool_backward(cpu: &mut Cpu, tokens: &Tokens, mean: bool, dy: &[f32], width: usize, dx: Sum<'_>) {
    let c = width;
    let dx = dx.shards();
    cpu.team.run(tokens.n_texts(), &|text, _| {
        let range = tokens.of(text);
        // SAFETY: each unit owns its text.
        let dx = unsafe { dx.part(range.start * c..range.end * c) };
        let n = if mean { range.len() } else { range.len().min(1) };
        let share = share(n);
        for dx in dx.chunks_exact_mut(c).take(n) {
            dx.iter_mut().zip(&dy[text * c..]).for_each(|(dx, dy)| *dx += share * dy);
        }
    });
}

/// Weight of one of `n` tokens.
fn share(n: usize) -> f32 {
    1.0 / n.max(1) as f32
}
