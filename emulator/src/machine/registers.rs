//! The registers of a warp: a row of 32 numbers each, one per lane.

/// Threads of a warp.
pub const LANES: usize = 32;

/// One number per lane.
pub type Row<T> = [T; LANES];

/// Which lanes take part, a bit each.
pub type Mask = u32;

/// The lanes of a mask, in order.
pub fn lanes(mask: Mask) -> impl Iterator<Item = usize> {
    let mut rest = mask;
    std::iter::from_fn(move || {
        let lane = rest.trailing_zeros();
        rest &= rest.wrapping_sub(1);
        (lane < 32).then_some(lane as usize)
    })
}

/// A register file. Constants and special registers are rows too, so every operand of an instruction is a row.
#[derive(Clone, Debug, Default)]
pub struct Registers {
    /// Of up to 32 bits.
    pub narrow: Vec<Row<u32>>,
    /// Of 64 bits.
    pub wide: Vec<Row<u64>>,
    /// Predicates, a bit per lane.
    pub predicates: Vec<Mask>,
}

impl Registers {
    /// Writes a predicate where the mask is set.
    pub fn set_predicate(&mut self, at: u32, value: Mask, mask: Mask) {
        let old = &mut self.predicates[at as usize];
        *old = *old & !mask | value & mask;
    }
}

/// A type of numbers in registers.
pub trait Value: Copy + Send + Sync + PartialEq + PartialOrd + 'static {
    /// Whether it needs a wide register.
    const WIDE: bool;

    /// Reads a row.
    fn read(registers: &Registers, at: u32) -> Row<Self>;

    /// Writes the lanes of a mask.
    fn write(registers: &mut Registers, at: u32, values: &Row<Self>, mask: Mask);
}

macro_rules! value {
    ($wide:literal, $file:ident, $ty:ty, $from:expr, $to:expr) => {
        impl Value for $ty {
            const WIDE: bool = $wide;

            #[inline(always)]
            fn read(registers: &Registers, at: u32) -> Row<Self> {
                let from = &registers.$file[at as usize];
                let mut row = [Self::default(); LANES];
                for lane in 0..LANES {
                    row[lane] = $from(from[lane]);
                }
                row
            }

            #[inline(always)]
            fn write(registers: &mut Registers, at: u32, values: &Row<Self>, mask: Mask) {
                let to = &mut registers.$file[at as usize];
                if mask == !0 {
                    for lane in 0..LANES {
                        to[lane] = $to(values[lane]);
                    }
                } else {
                    for lane in 0..LANES {
                        to[lane] = if mask >> lane & 1 == 1 { $to(values[lane]) } else { to[lane] };
                    }
                }
            }
        }
    };
}

value!(false, narrow, u32, |v| v, |v| v);
value!(false, narrow, i32, |v| v as i32, |v| v as u32);
value!(false, narrow, u16, |v| v as u16, u32::from);
value!(false, narrow, i16, |v| v as i16, |v| u32::from(v as u16));
value!(false, narrow, f32, f32::from_bits, f32::to_bits);
value!(true, wide, u64, |v| v, |v| v);
value!(true, wide, i64, |v| v as i64, |v| v as u64);
value!(true, wide, f64, f64::from_bits, f64::to_bits);
