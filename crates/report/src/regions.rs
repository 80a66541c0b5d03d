//! Decision regions: a grid of panels over the same part of the plane, rows by method, columns by model.

use crate::mesh::{Extent, Mesh, Outline};
use crate::palette::CLASSES;
use crate::svg::{Anchor, Style, Svg, number, path};

/// Pixels.
const PANEL_WIDTH: f64 = 200.0;
const GAP: f64 = 14.0;
const LEFT: f64 = 92.0;
const TOP: f64 = 94.0;
const TITLE: f64 = 20.0;
const LEGEND: f64 = 44.0;

/// A grid of decision regions.
#[derive(Clone, Debug)]
pub struct RegionGrid {
    /// Short and without spaces: the prefix of the ids inside the picture, which several pictures on a page must not share.
    pub id: String,
    /// Title.
    pub title: String,
    /// Second line.
    pub subtitle: String,
    /// The part of the plane.
    pub extent: Extent,
    /// Names of the classes.
    pub classes: Vec<String>,
    /// Points to overlay.
    pub points: Vec<Point>,
    /// Heads of the columns: a name and a line below it.
    pub columns: Vec<(String, String)>,
    /// Rows: a name and one panel a column.
    pub rows: Vec<(String, Vec<Panel>)>,
}

/// A labelled point of the plane.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// x
    pub x: f64,
    /// y
    pub y: f64,
    /// Its class.
    pub class: usize,
    /// Who trains on it, if anybody does.
    pub owner: Option<usize>,
}

/// One model.
#[derive(Clone, Debug)]
pub struct Panel {
    /// Stands above the panel.
    pub title: String,
    /// Whose points are drawn solid: one owner's, or those of all owners.
    pub owner: Option<usize>,
    /// Scores over the extent.
    pub mesh: Mesh,
}

impl RegionGrid {
    /// The picture.
    pub fn draw(&self) -> String {
        let height = self.panel_height();
        let n_rows = self.rows.len() as f64;
        let width = LEFT + self.columns.len() as f64 * (PANEL_WIDTH + GAP);
        let mut svg = Svg::new(width, TOP + n_rows * (height + TITLE + GAP) + LEGEND, &self.title);
        svg.headings(&self.title, &self.subtitle);
        self.define(&mut svg);
        for (c, (name, below)) in self.columns.iter().enumerate() {
            let x = column_x(c) + PANEL_WIDTH / 2.0;
            svg.text(x, 67.0, name, Style::new(13.0).bold().anchor(Anchor::Middle));
            svg.text(x, 82.0, below, Style::new(11.0).soft().anchor(Anchor::Middle));
        }
        for (r, (name, panels)) in self.rows.iter().enumerate() {
            let y = TOP + r as f64 * (height + TITLE + GAP) + TITLE;
            svg.text(16.0, y + height / 2.0 + 5.0, name, Style::new(15.0).bold());
            for (c, panel) in panels.iter().enumerate() {
                svg.text(column_x(c), y - 5.0, &panel.title, Style::new(12.0));
                self.panel(&mut svg, panel, column_x(c), y);
            }
        }
        self.legend(&mut svg, TOP + n_rows * (height + TITLE + GAP) + 14.0);
        svg.finish()
    }

    /// Pixels per unit of the plane, the same along both axes.
    fn scale(&self) -> f64 {
        PANEL_WIDTH / (self.extent.x.1 - self.extent.x.0)
    }

    /// The plane's own proportions, unless it is so flat that nothing could be seen.
    fn panel_height(&self) -> f64 {
        (self.scale() * (self.extent.y.1 - self.extent.y.0)).max(0.6 * PANEL_WIDTH)
    }

    /// From the plane to a panel.
    fn place(&self, x: f64, y: f64) -> (f64, f64) {
        let (e, height) = (&self.extent, self.panel_height());
        (self.scale() * (x - e.x.0), height * (e.y.1 - y) / (e.y.1 - e.y.0))
    }

    /// The panel's frame for clipping, and the points once for all panels: one path for each class and owner.
    fn define(&self, svg: &mut Svg) {
        svg.tag("defs").open();
        svg.tag("clipPath").set("id", &format!("{}-clip", self.id)).open();
        svg.tag("rect").number("width", PANEL_WIDTH).number("height", self.panel_height()).end();
        svg.close();
        for (class, owner) in self.groups() {
            let mut d = String::new();
            for p in self.points.iter().filter(|p| (p.class, p.owner) == (class, owner)) {
                let (x, y) = self.place(p.x, p.y);
                d.push_str(&CLASSES[class % CLASSES.len()].1.path(x, y, 2.6));
            }
            svg.tag("path").set("id", &self.group_id(class, owner)).set("d", &d).end();
        }
        svg.close();
    }

    /// Classes and owners that occur together; points without an owner first, so that they are drawn below.
    fn groups(&self) -> Vec<(usize, Option<usize>)> {
        let mut groups: Vec<_> = self.points.iter().map(|p| (p.class, p.owner)).collect();
        groups.sort_by_key(|&(class, owner)| (owner.is_some(), class, owner));
        groups.dedup();
        groups
    }

    fn group_id(&self, class: usize, owner: Option<usize>) -> String {
        format!("{}-{class}-{}", self.id, owner.map_or_else(|| "none".into(), |o| o.to_string()))
    }

    fn panel(&self, svg: &mut Svg, panel: &Panel, x: f64, y: f64) {
        svg.tag("g")
            .set("transform", &format!("translate({} {})", number(x), number(y)))
            .set("clip-path", &format!("url(#{}-clip)", self.id))
            .open();
        for class in 0..panel.mesh.n_classes() {
            let d: String = panel.mesh.outlines(class).iter().map(|outline| self.path(&panel.mesh, outline)).collect();
            if !d.is_empty() {
                let colour = CLASSES[class % CLASSES.len()].0;
                svg.tag("path").set("d", &d).set("fill", colour).set("fill-opacity", "0.42").end();
            }
        }
        for (class, owner) in self.groups() {
            let is_own = owner.is_some() && (panel.owner.is_none() || panel.owner == owner);
            let colour = CLASSES[class % CLASSES.len()].0;
            let tag = svg.tag("use").set("href", &format!("#{}", self.group_id(class, owner)));
            let tag = tag.set("stroke", "#1a1a1a").set("class", "mark");
            if is_own {
                tag.set("fill", colour).set("stroke-width", "0.8").end();
            } else {
                tag.set("fill", "none").set("stroke-width", "0.6").set("stroke-opacity", "0.55").end();
            }
        }
        svg.tag("rect")
            .number("width", PANEL_WIDTH)
            .number("height", self.panel_height())
            .set("fill", "none")
            .set("stroke", "#777777")
            .set("class", "frame")
            .end();
        svg.close();
    }

    /// An outline in the panel's pixels.
    fn path(&self, mesh: &Mesh, outline: &Outline) -> String {
        let (w, h) = (PANEL_WIDTH / (mesh.n_x - 1) as f64, self.panel_height() / (mesh.n_y - 1) as f64);
        path(outline.iter().map(|(x, y)| (x * w, self.panel_height() - y * h))) + "z"
    }

    fn legend(&self, svg: &mut Svg, y: f64) {
        let mut x = LEFT;
        for (class, name) in self.classes.iter().enumerate() {
            let (colour, mark) = CLASSES[class % CLASSES.len()];
            svg.rect((x, y - 11.0), (26.0, 15.0)).set("fill", colour).set("fill-opacity", "0.42").end();
            svg.tag("path")
                .set("d", &mark.path(x + 13.0, y - 3.5, 3.4))
                .set("fill", colour)
                .set("stroke", "#1a1a1a")
                .set("class", "mark")
                .end();
            svg.text(x + 33.0, y, name, Style::new(12.0));
            x += 50.0 + 8.0 * name.chars().count() as f64;
        }
        let note = "area: what the model says · solid: points it (or its clients) trained on · hollow: other points";
        svg.text(x + 10.0, y, note, Style::new(12.0).soft());
    }
}

/// The left edge of a column's panels.
fn column_x(column: usize) -> f64 {
    LEFT + column as f64 * (PANEL_WIDTH + GAP)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_are_drawn_solid_for_their_owner_and_hollow_for_others() {
        let extent = Extent { x: (-1.0, 1.0), y: (-1.0, 1.0) };
        let scores = extent.mesh_points(9, 9).into_iter().flat_map(|(x, y)| [x as f32, y as f32, 0.0]).collect();
        let mesh = Mesh { n_x: 9, n_y: 9, scores };
        let panel = |owner| Panel { title: "50 %".into(), owner, mesh: mesh.clone() };
        let point = |class, owner| Point { x: 0.1, y: 0.2, class, owner };
        let grid = RegionGrid {
            id: "test".into(),
            title: "a & b".into(),
            subtitle: String::new(),
            extent,
            classes: ["one", "two", "three"].map(str::to_owned).to_vec(),
            points: vec![point(0, Some(0)), point(1, Some(1)), point(2, None)],
            columns: vec![("all".into(), String::new()), ("first".into(), String::new())],
            rows: vec![("m".into(), vec![panel(None), panel(Some(0))])],
        };
        let text = grid.draw();
        let read = roxmltree::Document::parse(&text).unwrap();
        let uses: Vec<_> = read.descendants().filter(|n| n.has_tag_name("use")).collect();
        let solid = |n: &&roxmltree::Node<'_, '_>| n.attribute("fill") != Some("none");
        assert_eq!((uses.len(), uses.iter().filter(solid).count()), (6, 3));
        let areas = read.descendants().filter(|n| n.has_tag_name("path") && n.attribute("fill-opacity").is_some());
        assert_eq!(areas.count(), 2 * 3);
    }
}
