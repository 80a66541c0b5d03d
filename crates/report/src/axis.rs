//! Axes that end at round numbers.

/// Round numbers around a range: the axis' least value, its greatest and the distance of at most seven ticks.
pub fn axis(least: f64, most: f64) -> (f64, f64, f64) {
    let width = if most - least > 1e-12 { most - least } else { least.abs().max(1.0) * 0.1 };
    let power = 10f64.powf((width / 6.0).log10().floor());
    let steps = [1.0, 2.0, 2.5, 5.0, 10.0, 20.0].map(|m| m * power);
    let ends = |step: f64| ((least / step + 1e-9).floor() * step, (most / step - 1e-9).ceil() * step);
    let fits = |step: &f64| ((ends(*step).1 - ends(*step).0) / step).round() <= 6.0;
    // What has steps of this size may be counted, and rounds have no halves.
    let is_whole = |step: &f64| (step - 2.5).abs() > 1e-9;
    let step = steps.into_iter().filter(is_whole).find(fits).unwrap_or(20.0 * power);
    let (from, to) = ends(step);
    (from, to.max(from + step), step)
}

/// The ticks of an axis: its least value, its greatest and all between that are a step apart.
pub fn ticks((least, most, step): (f64, f64, f64)) -> Vec<f64> {
    (0..=((most - least) / step).round() as usize).map(|i| least + step * i as f64).collect()
}

/// Decimals by which multiples of a step differ.
pub(crate) fn decimals(step: f64) -> usize {
    (0..6).find(|&d| (step * 10f64.powi(d)).fract().abs() < 1e-9).unwrap_or(6) as usize
}

/// The power of ten by which an axis' labels are divided, and its text for the title. Ordinary numbers stay as they are.
pub(crate) fn power_of_ten((least, most, _): (f64, f64, f64)) -> (f64, String) {
    let size = least.abs().max(most.abs());
    if (0.01..1e5).contains(&size) {
        return (1.0, String::new());
    }
    let power = (size.log10() + 1e-9).floor() as i32;
    let digit = |c: char| match c {
        '-' => '⁻',
        _ => ['⁰', '¹', '²', '³', '⁴', '⁵', '⁶', '⁷', '⁸', '⁹'][c as usize - '0' as usize],
    };
    (10f64.powi(power), format!(", 10{}", power.to_string().chars().map(digit).collect::<String>()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_end_at_round_numbers_around_the_data() {
        let cases = [
            ((0.0, 31.4), (0.0, 40.0, 10.0)),
            ((0.0, 1.0), (0.0, 1.0, 0.2)),
            ((61.2, 69.9), (60.0, 70.0, 2.0)),
            ((0.0, 100.0), (0.0, 100.0, 20.0)),
            ((0.0, 15.0), (0.0, 15.0, 5.0)),
            ((0.0, 0.015), (0.0, 0.015, 0.0025)),
            ((-0.03, 0.011), (-0.03, 0.02, 0.01)),
        ];
        for ((least, most), expected) in cases {
            let found = axis(least, most);
            let near = |a: f64, b: f64| (a - b).abs() < 1e-9;
            assert!(
                near(found.0, expected.0) && near(found.1, expected.1) && near(found.2, expected.2),
                "{least} to {most}: {found:?}"
            );
        }
        let flat = axis(5.0, 5.0);
        assert!(flat.0 <= 5.0 && flat.1 >= 5.0 && flat.1 > flat.0);
    }

    #[test]
    fn small_and_large_numbers_are_labelled_by_a_power_of_ten() {
        assert_eq!(power_of_ten((0.0, 100.0, 20.0)), (1.0, String::new()));
        let (unit, text) = power_of_ten((0.0, 2e-5, 5e-6));
        assert!((unit / 1e-5 - 1.0).abs() < 1e-9 && text == ", 10⁻⁵", "{unit} {text}");
        assert_eq!(power_of_ten((-2e6, 0.0, 1e6)).1, ", 10⁶");
    }
}
