//! The idea in one picture: a gradient g, the memory's gradient r, and g projected.

use crate::svg::{Anchor, Style, Svg, number};

/// Pixels.
const LENGTH: f64 = 150.0;
const CELL: (f64, f64) = (470.0, 330.0);
/// Colours of g, r and the projected g.
const COLOURS: [&str; 3] = ["#D55E00", "#0072B2", "#009E73"];

/// What the sketch shows.
#[derive(Clone, Debug, PartialEq)]
pub struct Sketch {
    /// Cosine of g and r where they are in conflict; decides the angle that is drawn.
    pub cosine: f64,
    /// A line below the title, which says where the cosine comes from.
    pub subtitle: String,
}

impl Sketch {
    /// The picture: a conflict at the left, none at the right.
    pub fn draw(&self) -> String {
        let mut svg = Svg::new(2.0 * CELL.0, CELL.1 + 56.0, "The projection of a gradient");
        svg.headings("What the projection does to a gradient", &self.subtitle);
        let conflict = self.cosine.clamp(-0.95, -0.1);
        panel(&mut svg, 0.0, conflict, ["in conflict: ⟨g, r⟩ < 0", "the part of g against r is taken away"]);
        panel(&mut svg, CELL.0, 0.55, ["no conflict: ⟨g, r⟩ ≥ 0", "g stays as it is, bit for bit"]);
        svg.finish()
    }
}

/// Gradients as unit vectors from one origin, r to the right.
fn panel(svg: &mut Svg, left: f64, cosine: f64, [title, text]: [&str; 2]) {
    let (x, y) = (left + CELL.0 / 2.0, 296.0);
    let sine = (1.0 - cosine * cosine).sqrt();
    svg.text(left + 24.0, 82.0, title, Style::new(14.0).bold());
    svg.text(left + 24.0, 101.0, text, Style::new(12.0).soft());
    // The half plane in which a step does not raise the memory loss.
    let helpful = svg.rect((x, 118.0), (CELL.0 / 2.0 - 24.0, 204.0));
    helpful.set("fill", COLOURS[1]).set("fill-opacity", "0.10").end();
    svg.text(left + CELL.0 - 32.0, 136.0, "nothing global is unlearned", Style::new(11.0).soft().anchor(Anchor::End));
    svg.rule((x, 118.0), (x, 322.0));
    let (tip, top) = ((x + cosine * LENGTH, y - sine * LENGTH), (x, y - sine * LENGTH));
    if cosine < 0.0 {
        svg.line(tip, top).set("stroke", "#777777").set("class", "frame").set("stroke-dasharray", "5 4").end();
        svg.text(
            f64::midpoint(tip.0, x),
            top.1 - 9.0,
            "⟨g, r⟩ r / ‖r‖²",
            Style::new(12.0).soft().anchor(Anchor::Middle),
        );
        arrow(svg, (x, y), top, COLOURS[2], 4.0);
        svg.text(x + 10.0, top.1 + 16.0, "g projected", Style::new(13.0).bold());
    }
    arrow(svg, (x, y), tip, COLOURS[0], 3.0);
    let (side, shift) = if cosine < 0.0 { (Anchor::End, -8.0) } else { (Anchor::Start, 8.0) };
    svg.text(tip.0 + shift, tip.1 + 4.0, "g", Style::new(15.0).bold().anchor(side));
    arrow(svg, (x, y), (x + LENGTH, y), COLOURS[1], 3.0);
    svg.text(x + LENGTH + 9.0, y + 5.0, "r", Style::new(15.0).bold());
    let below = ["g: gradient of the client's own loss", "r: gradient of the loss on the memory"];
    svg.text(left + 24.0, 348.0, below[0], Style::new(12.0).soft());
    svg.text(left + 24.0, 366.0, below[1], Style::new(12.0).soft());
}

/// A line with a head of its own: markers of SVG do not take a line's colour everywhere.
fn arrow(svg: &mut Svg, from: (f64, f64), to: (f64, f64), colour: &str, width: f64) {
    let (dx, dy) = (to.0 - from.0, to.1 - from.1);
    let length = dx.hypot(dy);
    let (ux, uy) = (dx / length, dy / length);
    let (head, half) = (13.0, 5.5);
    let neck = (to.0 - head * ux, to.1 - head * uy);
    svg.line(from, neck).set("stroke", colour).number("stroke-width", width).end();
    let corner = |side: f64| format!("{} {}", number(neck.0 - side * half * uy), number(neck.1 + side * half * ux));
    let d = format!("M{} {}L{}L{}z", number(to.0), number(to.1), corner(1.0), corner(-1.0));
    svg.tag("path").set("d", &d).set("fill", colour).end();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_projected_gradient_stands_on_the_border_at_any_angle() {
        for cosine in [-1.0, -0.7, -0.01, 0.4] {
            let text = Sketch { cosine, subtitle: "<measured>".into() }.draw();
            let read = roxmltree::Document::parse(&text).unwrap();
            let mut lines = read.descendants().filter(|n| n.has_tag_name("line"));
            let projected = lines.find(|n| n.attribute("stroke") == Some(COLOURS[2])).unwrap();
            assert_eq!(projected.attribute("x1"), projected.attribute("x2"));
        }
    }
}
