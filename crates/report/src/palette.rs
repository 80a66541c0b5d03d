//! Colours that people with any kind of colour vision can distinguish (Okabe and Ito 2008), with dashes and marks, so that
//! nothing depends on colour alone.

/// How a series of a chart looks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Look {
    /// Its colour.
    pub colour: &'static str,
    /// Lengths of dashes and gaps; empty for an unbroken line.
    pub dashes: &'static str,
    /// Width of the line.
    pub width: f64,
    /// The mark at its points.
    pub mark: Mark,
}

/// A small shape around a point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    /// A disc.
    Circle,
    /// A triangle.
    Triangle,
    /// A square.
    Square,
    /// A square on its corner.
    Diamond,
}

impl Mark {
    /// A path of the mark around a point; `r` is about its half width.
    pub(crate) fn path(self, x: f64, y: f64, r: f64) -> String {
        use crate::svg::number as n;
        let (left, top, two) = (n(x - r), n(y - r), n(2.0 * r));
        match self {
            Self::Circle => {
                let (r, back) = (n(r), n(-2.0 * r));
                format!("M{left} {}a{r} {r} 0 1 0 {two} 0a{r} {r} 0 1 0 {back} 0z", n(y))
            }
            Self::Square => format!("M{left} {top}h{two}v{two}h-{two}z"),
            Self::Diamond => {
                let r = 1.3 * r;
                format!("M{} {}l{r} {r}l-{r} {r}l-{r} -{r}z", n(x), n(y - r), r = n(r))
            }
            Self::Triangle => {
                let (side, height) = (1.15 * r, 2.1 * r);
                format!("M{} {}l{} {}h{}z", n(x), n(y - 1.25 * r), n(side), n(height), n(-2.0 * side))
            }
        }
    }
}

/// Looks of the series of a chart, in order: solid blue, dashed orange over it, thick green, and so on. A colour that repeats
/// has other dashes, for lines, and another mark, for dots.
pub const SERIES: [Look; 28] = [
    Look { colour: "#0072B2", dashes: "", width: 2.6, mark: Mark::Circle },
    Look { colour: "#E69F00", dashes: "6 6", width: 2.6, mark: Mark::Square },
    Look { colour: "#009E73", dashes: "", width: 2.8, mark: Mark::Triangle },
    Look { colour: "#D55E00", dashes: "", width: 1.8, mark: Mark::Diamond },
    Look { colour: "#CC79A7", dashes: "", width: 1.8, mark: Mark::Square },
    Look { colour: "#56B4E9", dashes: "", width: 1.8, mark: Mark::Triangle },
    Look { colour: "#777777", dashes: "", width: 1.8, mark: Mark::Circle },
    Look { colour: "#D55E00", dashes: "2 3", width: 1.8, mark: Mark::Circle },
    Look { colour: "#CC79A7", dashes: "7 3", width: 1.8, mark: Mark::Diamond },
    Look { colour: "#56B4E9", dashes: "2 3", width: 1.8, mark: Mark::Square },
    Look { colour: "#777777", dashes: "7 3", width: 1.8, mark: Mark::Triangle },
    Look { colour: "#0072B2", dashes: "2 3", width: 1.8, mark: Mark::Diamond },
    Look { colour: "#009E73", dashes: "7 3", width: 1.8, mark: Mark::Circle },
    Look { colour: "#E69F00", dashes: "2 3", width: 1.8, mark: Mark::Triangle },
    Look { colour: "#D55E00", dashes: "7 3", width: 1.8, mark: Mark::Square },
    Look { colour: "#56B4E9", dashes: "7 3", width: 1.8, mark: Mark::Diamond },
    Look { colour: "#CC79A7", dashes: "2 3", width: 1.8, mark: Mark::Triangle },
    Look { colour: "#0072B2", dashes: "7 3", width: 1.8, mark: Mark::Triangle },
    Look { colour: "#777777", dashes: "2 3", width: 1.8, mark: Mark::Square },
    Look { colour: "#009E73", dashes: "2 3", width: 1.8, mark: Mark::Square },
    Look { colour: "#E69F00", dashes: "9 3 2 3", width: 1.8, mark: Mark::Circle },
    Look { colour: "#D55E00", dashes: "9 3 2 3", width: 1.8, mark: Mark::Triangle },
    Look { colour: "#0072B2", dashes: "9 3 2 3", width: 1.8, mark: Mark::Square },
    Look { colour: "#009E73", dashes: "9 3 2 3", width: 1.8, mark: Mark::Diamond },
    Look { colour: "#CC79A7", dashes: "9 3 2 3", width: 1.8, mark: Mark::Circle },
    Look { colour: "#56B4E9", dashes: "9 3 2 3", width: 1.8, mark: Mark::Circle },
    Look { colour: "#777777", dashes: "9 3 2 3", width: 1.8, mark: Mark::Diamond },
    Look { colour: "#E69F00", dashes: "7 3", width: 1.8, mark: Mark::Diamond },
];

/// Colours and marks of classes: red, yellow and blue as in the paper.
pub const CLASSES: [(&str, Mark); 3] =
    [("#D55E00", Mark::Circle), ("#F0E442", Mark::Triangle), ("#0072B2", Mark::Square)];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_looks_are_alike_as_lines_or_as_dots() {
        for (i, a) in SERIES.iter().enumerate() {
            for b in &SERIES[..i] {
                assert_ne!((a.colour, a.dashes), (b.colour, b.dashes), "lines");
                assert!(a.colour != b.colour || a.mark != b.mark, "dots: {a:?} {b:?}");
            }
        }
    }
}
