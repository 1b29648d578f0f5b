//! Replays, drawn: which nodes worked on jobs of which size, how many GPUs were held, and how many
//! were waited for. All policies share the axis of time and that of waiting GPUs.
//!
//! Nothing is drawn job by job: time and nodes are cut into cells, and a cell has the colour of
//! the class that had most of it and is the paler the less of it was held. So a drawing of 320
//! nodes and 80,000 jobs is as large as one of 100 nodes, and as readable.

use crate::cluster::Cluster;
use crate::meter::Record;
use crate::report::{CLASSES, class};
use crate::sim::Played;
use crate::trace::Trace;
use aviflow_core::time::Time;
use std::fmt::Write as _;

/// The classes' colours (Okabe and Ito: distinct for everybody).
const COLOURS: [&str; 4] = ["#56b4e9", "#009e73", "#e69f00", "#d55e00"];
const LEFT: f64 = 70.0;
const WIDTH: f64 = 900.0;
const TOP: f64 = 64.0;
const NODES_HEIGHT: f64 = 160.0;
const STRIP: f64 = 44.0;
const GAP: f64 = 10.0;
const PANEL: f64 = 24.0 + NODES_HEIGHT + 2.0 * (GAP + STRIP) + 38.0;
const COLUMNS: usize = 450;
const MOST_ROWS: u32 = 80;
/// Steps of paleness.
const STEPS: usize = 5;

/// What all panels share.
struct Frame<'a> {
    trace: &'a Trace,
    cluster: &'a Cluster,
    begin: Time,
    /// Milliseconds.
    length: f64,
    rows: usize,
    most_waiting: f64,
}

/// Draws replays of one trace on one cluster. Those that kept no record are left out.
#[must_use]
pub fn draw(trace: &Trace, cluster: &Cluster, played: &[Played]) -> String {
    let begin = trace.jobs.first().map_or(Time(0), |job| job.submitted);
    let end = played.iter().flat_map(|p| p.outcomes.iter().map(|o| o.ended)).max().unwrap_or(begin);
    let recorded: Vec<(&Played, &Record)> = played.iter().filter_map(|p| Some((p, p.meter.record.as_ref()?))).collect();
    let waiting = |record: &Record| record.series.iter().map(|(_, _, waiting)| *waiting).max().unwrap_or(0);
    let frame = Frame {
        trace,
        cluster,
        begin,
        length: (end.since(begin).0 as f64).max(1.0),
        rows: cluster.nodes.min(MOST_ROWS) as usize,
        most_waiting: recorded.iter().map(|(_, record)| waiting(record)).max().unwrap_or(0).max(1) as f64,
    };
    let height = TOP + PANEL * recorded.len() as f64;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 1000 {height}\" \
         font-family=\"system-ui, sans-serif\" font-size=\"11\" fill=\"#333\">\n\
         <title>{} jobs on {} nodes of {} GPUs</title>\n<rect width=\"1000\" height=\"{height}\" fill=\"#fff\"/>\n",
        trace.jobs.len(),
        cluster.nodes,
        cluster.gpus_per_node
    );
    frame.legend(&mut out);
    for (i, (played, record)) in recorded.iter().enumerate() {
        frame.panel(played, record, TOP + PANEL * i as f64, &mut out);
    }
    out.push_str("</svg>\n");
    out
}

impl Frame<'_> {
    fn legend(&self, out: &mut String) {
        let _ = writeln!(
            out,
            "<text x=\"{LEFT}\" y=\"22\" font-size=\"14\" font-weight=\"600\">{} jobs on {} nodes of {} GPUs</text>",
            self.trace.jobs.len(),
            self.cluster.nodes,
            self.cluster.gpus_per_node
        );
        for (i, ((_, words, _), colour)) in CLASSES.iter().zip(COLOURS).enumerate() {
            let x = LEFT + 120.0 * i as f64;
            let _ = writeln!(
                out,
                "<rect x=\"{x}\" y=\"34\" width=\"11\" height=\"11\" fill=\"{colour}\"/>\
                 <text x=\"{}\" y=\"44\">{words}{}</text>",
                x + 16.0,
                if i == 0 { "" } else { " nodes" }
            );
        }
    }

    fn panel(&self, played: &Played, record: &Record, top: f64, out: &mut String) {
        let nodes_top = top + 24.0;
        let used_top = nodes_top + NODES_HEIGHT + GAP;
        let waiting_top = used_top + STRIP + GAP;
        let bottom = waiting_top + STRIP;
        let _ = writeln!(
            out,
            "<text x=\"{LEFT}\" y=\"{}\" font-size=\"13\" font-weight=\"600\">{}</text>",
            top + 16.0,
            escape(&played.policy)
        );
        self.axis(nodes_top, bottom, out);
        self.label(nodes_top, "nodes", &self.cluster.nodes.to_string(), out);
        self.label(used_top, "in use", &self.cluster.gpus().to_string(), out);
        self.label(waiting_top, "waiting", &format!("{:.0}", self.most_waiting), out);
        for (top, height) in [(nodes_top, NODES_HEIGHT), (used_top, STRIP), (waiting_top, STRIP)] {
            let _ = writeln!(
                out,
                "<rect x=\"{LEFT}\" y=\"{top}\" width=\"{WIDTH}\" height=\"{height}\" fill=\"none\" stroke=\"#ccc\"/>"
            );
        }
        self.cells(record, nodes_top, out);
        let (used, waiting) = self.means(record);
        self.area(&used, f64::from(self.cluster.gpus()), used_top, "#666", out);
        self.area(&waiting, self.most_waiting, waiting_top, "#b5479d", out);
    }

    fn label(&self, top: f64, what: &str, most: &str, out: &mut String) {
        let x = LEFT - 6.0;
        let _ = writeln!(
            out,
            "<text x=\"{x}\" y=\"{}\" text-anchor=\"end\">{most}</text>\
             <text x=\"{x}\" y=\"{}\" text-anchor=\"end\" fill=\"#777\">{what}</text>",
            top + 10.0,
            top + 23.0
        );
    }

    /// Days, or hours where there are few of them.
    fn axis(&self, top: f64, bottom: f64, out: &mut String) {
        let hours = self.length / 3_600_000.0;
        let (unit, name) = if hours > 72.0 { (24.0, "day") } else { (1.0, "hour") };
        let whole = hours / unit;
        let step = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0];
        let step = step.into_iter().find(|s| whole / s <= 14.0).unwrap_or(5000.0);
        let mut at = 0.0;
        while at <= whole {
            let x = LEFT + WIDTH * at / whole.max(f64::MIN_POSITIVE);
            let text = if at == 0.0 { format!("{name} 0") } else { format!("{at}") };
            let _ = writeln!(
                out,
                "<path d=\"M{x:.1} {top}V{bottom}\" stroke=\"#eee\"/>\
                 <text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\" fill=\"#777\">{text}</text>",
                bottom + 14.0
            );
            at += step;
        }
    }

    /// Where an instant is, in columns.
    fn column(&self, at: Time) -> f64 {
        at.since(self.begin).0 as f64 / self.length * COLUMNS as f64
    }

    /// In which row a node is; rows have several nodes, and not all as many.
    fn row(&self, node: u32) -> usize {
        (u64::from(node) * self.rows as u64 / u64::from(self.cluster.nodes)) as usize
    }

    /// Which nodes worked on what.
    fn cells(&self, record: &Record, top: f64, out: &mut String) {
        let mut held = vec![[0.0_f64; 4]; self.rows * COLUMNS];
        for stretch in &record.stretches {
            let class = class(self.trace.jobs[stretch.job as usize].nodes);
            let (from, to) = (self.column(stretch.from), self.column(stretch.to));
            for (node, gpus) in &stretch.place {
                let row = self.row(*node);
                for column in from as usize..(to.ceil() as usize).min(COLUMNS) {
                    let overlap = to.min(column as f64 + 1.0) - from.max(column as f64);
                    held[row * COLUMNS + column][class] += overlap.max(0.0) * f64::from(*gpus);
                }
            }
        }
        let mut full = vec![0.0; self.rows];
        for node in 0..self.cluster.nodes {
            full[self.row(node)] += f64::from(self.cluster.gpus_per_node);
        }
        let looks: Vec<Option<(usize, usize)>> =
            held.iter().enumerate().map(|(i, by_class)| look(by_class, full[i / COLUMNS])).collect();
        // One path for each colour and paleness, of rectangles as large as they can be.
        let mut paths = vec![String::new(); 4 * STEPS];
        let mut done = vec![false; looks.len()];
        let (width, height) = (WIDTH / COLUMNS as f64, NODES_HEIGHT / self.rows as f64);
        for row in 0..self.rows {
            for column in 0..COLUMNS {
                let here = row * COLUMNS + column;
                let (Some((class, step)), false) = (looks[here], done[here]) else { continue };
                let same = |r: usize, c: usize| looks[r * COLUMNS + c] == looks[here] && !done[r * COLUMNS + c];
                let columns = (column..COLUMNS).take_while(|c| same(row, *c)).count();
                let fits = |r: &usize| (column..column + columns).all(|c| same(*r, c));
                let rows = (row..self.rows).take_while(fits).count();
                for r in row..row + rows {
                    done[r * COLUMNS + column..r * COLUMNS + column + columns].fill(true);
                }
                let _ = write!(
                    paths[class * STEPS + step],
                    "M{:.1} {:.1}h{:.1}v{:.1}h-{:.1}z",
                    LEFT + column as f64 * width,
                    top + row as f64 * height,
                    columns as f64 * width,
                    rows as f64 * height,
                    columns as f64 * width
                );
            }
        }
        for (i, path) in paths.iter().enumerate().filter(|(_, path)| !path.is_empty()) {
            let opacity = (i % STEPS + 1) as f64 / STEPS as f64;
            let _ = writeln!(
                out,
                "<path shape-rendering=\"crispEdges\" fill=\"{}\" fill-opacity=\"{opacity}\" d=\"{path}\"/>",
                COLOURS[i / STEPS]
            );
        }
    }

    /// GPUs held and waited for, by column.
    fn means(&self, record: &Record) -> (Vec<f64>, Vec<f64>) {
        let (mut used, mut waiting) = (vec![0.0; COLUMNS], vec![0.0; COLUMNS]);
        for (i, (at, u, w)) in record.series.iter().enumerate() {
            let from = self.column(*at);
            let to = record.series.get(i + 1).map_or(COLUMNS as f64, |(next, _, _)| self.column(*next));
            for column in from as usize..(to.ceil() as usize).min(COLUMNS) {
                let overlap = (to.min(column as f64 + 1.0) - from.max(column as f64)).max(0.0);
                used[column] += overlap * *u as f64;
                waiting[column] += overlap * *w as f64;
            }
        }
        (used, waiting)
    }

    fn area(&self, values: &[f64], most: f64, top: f64, colour: &str, out: &mut String) {
        let bottom = top + STRIP;
        let mut path = format!("M{LEFT} {bottom:.1}");
        for (i, value) in values.iter().enumerate() {
            let y = bottom - STRIP * (value / most).clamp(0.0, 1.0);
            let (x, next) = (WIDTH * i as f64 / COLUMNS as f64, WIDTH * (i + 1) as f64 / COLUMNS as f64);
            let _ = write!(path, "L{:.1} {y:.1}H{:.1}", LEFT + x, LEFT + next);
        }
        let _ = writeln!(out, "<path fill=\"{colour}\" fill-opacity=\"0.75\" d=\"{path}V{bottom:.1}z\"/>");
    }
}

/// The class that has most of a cell, and in how many steps it is held; none if next to nothing is.
fn look(by_class: &[f64; 4], full: f64) -> Option<(usize, usize)> {
    let class = (0..4).max_by(|a, b| by_class[*a].total_cmp(&by_class[*b]))?;
    let share = by_class.iter().sum::<f64>() / full;
    (share > 0.02).then(|| (class, ((share * STEPS as f64).ceil() as usize).clamp(1, STEPS) - 1))
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate;
    use crate::run::{Policy, Scenario};

    #[test]
    fn a_drawing_is_small_and_has_every_policy() {
        let mut trace = generate::kalos(1);
        trace.whole_nodes(8);
        trace.compress(4.0);
        let scenario = Scenario::new(trace, Cluster::new(128, 8));
        let play = |policy| scenario.play(policy, true).expect("a replay");
        let played = [play(Policy::Fifo), play(Policy::Easy), scenario.play(Policy::Greedy, false).expect("a replay")];
        let svg = draw(&scenario.trace, &scenario.cluster, &played);
        assert!(svg.contains(">fifo<") && svg.contains(">easy<") && !svg.contains(">greedy<"));
        assert!(svg.len() < 500_000, "{} bytes", svg.len());
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "no number is missing");
        for colour in COLOURS {
            assert!(svg.contains(&format!("fill=\"{colour}\" fill-opacity")), "{colour}");
        }
    }
}
