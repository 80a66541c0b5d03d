//! Times and sizes in units that people read.

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measure {
    /// Seconds.
    Time,
    /// Bytes.
    Size,
}

impl Measure {
    /// The unit in which numbers up to `most` read well: its size in seconds or bytes, and its name.
    ///
    /// ```
    /// use fedproj_report::Measure;
    ///
    /// assert_eq!(Measure::Time.unit(5400.0), (60.0, "min"));
    /// assert_eq!(Measure::Size.unit(3.4e6), (1e6, "MB"));
    /// ```
    pub fn unit(self, most: f64) -> (f64, &'static str) {
        // Each with the largest number that is shown in it.
        let units: &[(f64, f64, &str)] = match self {
            Self::Time => &[
                (0.5, 1e-3, "ms"),
                (100.0, 1.0, "s"),
                (6000.0, 60.0, "min"),
                (172_800.0, 3600.0, "h"),
                (f64::INFINITY, 86_400.0, "days"),
            ],
            Self::Size => {
                &[(1e3, 1.0, "B"), (1e6, 1e3, "kB"), (1e9, 1e6, "MB"), (1e12, 1e9, "GB"), (f64::INFINITY, 1e12, "TB")]
            }
        };
        let (_, unit, name) = units.iter().find(|(end, ..)| most < *end).unwrap_or(&units[1]);
        (*unit, name)
    }

    /// A value with its unit and three digits: `1.24 GB`.
    pub fn text(self, value: f64) -> String {
        let (unit, name) = self.unit(value);
        let value = value / unit;
        let decimals = match value {
            _ if matches!(name, "B" | "ms") => 0,
            ..10.0 => 2,
            ..100.0 => 1,
            _ => 0,
        };
        format!("{value:.decimals$} {name}")
    }
}

/// Seconds as people say them: `5 s`, `2 min`, `2.0 h`.
pub fn duration(seconds: f64) -> String {
    match seconds.round() as u64 {
        s @ ..=99 => format!("{s} s"),
        s @ ..=5999 => format!("{} min", (s + 30) / 60),
        s => format!("{:.1} h", s as f64 / 3600.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_read_naturally() {
        assert_eq!([5.0, 100.0, 3000.0, 7200.0].map(duration), ["5 s", "2 min", "50 min", "2.0 h"]);
    }

    #[test]
    fn sizes_and_times_have_three_digits_and_their_unit() {
        let sizes = [(0.0, "0 B"), (999.0, "999 B"), (52_340.0, "52.3 kB"), (1.239e9, "1.24 GB"), (4e13, "40.0 TB")];
        for (value, text) in sizes {
            assert_eq!(Measure::Size.text(value), text);
        }
        assert_eq!([0.123, 1.5, 90.0].map(|s| Measure::Time.text(s)), ["123 ms", "1.50 s", "90.0 s"]);
        let units = [(0.02, "ms"), (3.0, "s"), (600.0, "min"), (8000.0, "h"), (1e6, "days")];
        for (most, name) in units {
            assert_eq!(Measure::Time.unit(most).1, name, "{most} s");
        }
    }
}
