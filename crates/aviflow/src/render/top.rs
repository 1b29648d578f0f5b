//! `aviflow top`: what runs now, and how it goes. What is not known is `-`, which is not 0.

use super::View;
use super::number::{ago, grouped, short, value};
use super::style::{self, Style, Styled, clean};
use super::table::{Align, Cell, Table};
use aviflow_api::rest::{GpuLoad, JobRanks, RankInfo, Top, TopJob, TopNode};

/// What is not known.
const UNKNOWN: &str = "-";

/// Which columns there is room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Room {
    /// For what matters most, on 80 columns.
    Little,
    /// And for power, and when something was heard last: from 100 columns on.
    Some,
    /// And for all: from 150 on, and where the output is no terminal.
    Much,
}

impl Room {
    fn of(view: View) -> Room {
        match view.width {
            Some(width) if width < 100 => Room::Little,
            Some(width) if width < 150 => Room::Some,
            Some(_) | None => Room::Much,
        }
    }
}

/// All jobs that hold GPUs, and the nodes below them.
pub fn top(top: &Top, view: View) -> String {
    let mut out = if top.jobs.is_empty() { "no job holds GPUs\n".to_owned() } else { jobs(&top.jobs, view) };
    if !top.nodes.is_empty() {
        out.push('\n');
        out.push_str(&nodes(&top.nodes, view));
    }
    out
}

/// One job, rank by rank.
pub fn ranks(of: &JobRanks, view: View) -> String {
    let mut out = jobs(std::slice::from_ref(&of.job), view);
    out.push('\n');
    if of.ranks.is_empty() {
        out.push_str(&format!("it is {} and holds no GPUs\n", of.job.phase));
    } else {
        out.push_str(&rank_table(&of.ranks, of.at, view));
    }
    out
}

/// Ranks, as they were at an instant.
pub fn rank_table(ranks: &[RankInfo], at: i64, view: View) -> String {
    let room = Room::of(view);
    let mut columns =
        vec![("rank", Align::Right), ("node", Align::Left), ("step", Align::Right), ("ms/step", Align::Right)];
    columns.extend(load_columns(room));
    columns.extend([("heard", Align::Right), ("last line", Align::Left)]);
    let mut table = Table::new(&columns);
    for rank in ranks {
        let mut cells: Vec<Cell> = vec![
            rank.rank.to_string().into(),
            name(&rank.node).into(),
            known(rank.step, |step| step.to_string()).into(),
            known(rank.step_ms, milliseconds).into(),
        ];
        cells.extend(load_cells(&rank.load, room));
        let heard = rank.step_at.max(rank.line_at);
        cells.push(known(heard, |heard| ago(heard, at)).into());
        cells.push(rank.line.as_ref().map_or_else(|| UNKNOWN.to_owned(), |line| name(line)).into());
        table.row(cells);
    }
    table.render(view.width, view.style)
}

fn jobs(jobs: &[TopJob], view: View) -> String {
    let room = Room::of(view);
    let mut columns = vec![("job", Align::Left), ("phase", Align::Left)];
    if room == Room::Much {
        columns.extend([("queue", Align::Left), ("attempt", Align::Right)]);
    }
    columns.extend([("gpus", Align::Right), ("step", Align::Right), ("ms/step", Align::Right)]);
    if room == Room::Much {
        columns.extend([("loss", Align::Right), ("tokens/s", Align::Right), ("mfu", Align::Right)]);
    }
    columns.extend(load_columns(room));
    if room > Room::Little {
        columns.push(("heard", Align::Right));
    }
    let mut table = Table::new(&columns);
    for job in jobs {
        let full =
            if job.namespace == "default" { job.name.clone() } else { format!("{}/{}", job.namespace, job.name) };
        let mut cells: Vec<Cell> = vec![full.into(), Cell::coloured(&job.phase, style::phase(&job.phase))];
        if room == Room::Much {
            cells.extend([job.queue.as_str().into(), job.attempt.to_string().into()]);
        }
        let step = |step: u64| job.total_steps.map_or_else(|| step.to_string(), |total| format!("{step}/{total}"));
        let ms = known(job.step_ms, milliseconds);
        cells.extend([job.gpus.to_string().into(), known(job.step, step).into(), ms.into()]);
        if room == Room::Much {
            let measured = |v: Option<f64>| Cell::from(known(v, value));
            cells.extend([measured(job.loss), measured(job.tokens_per_second), known(job.mfu, percent).into()]);
        }
        cells.extend(load_cells(&job.load, room));
        if room > Room::Little {
            cells.push(known(job.step_at, |at| ago(at, view.now)).into());
        }
        table.row(cells);
    }
    table.render(view.width, view.style)
}

fn nodes(nodes: &[TopNode], view: View) -> String {
    let room = Room::of(view);
    let mut columns = vec![("node", Align::Left), ("condition", Align::Left)];
    if room == Room::Much {
        columns.extend([("pool", Align::Left), ("type", Align::Left)]);
    }
    columns.extend([("held", Align::Right)]);
    columns.extend(load_columns(room));
    columns.push(("health", Align::Left));
    let mut table = Table::new(&columns);
    for node in nodes {
        let colour = if node.condition == "Ready" { "32" } else { "33" };
        let mut cells: Vec<Cell> = vec![name(&node.name).into(), Cell::coloured(&node.condition, colour)];
        if room == Room::Much {
            cells.extend([name(&node.pool).into(), name(&node.gpu_type).into()]);
        }
        cells.push(format!("{}/{}", node.held, node.gpus).into());
        cells.extend(load_cells(&node.load, room));
        let health = health(node);
        cells.push(if health.is_empty() { "".into() } else { Cell::coloured(health, "31") });
        table.row(cells);
    }
    table.render(view.width, view.style)
}

/// What is wrong with a node, if anything is known to be.
fn health(node: &TopNode) -> String {
    let mut parts = Vec::new();
    if node.unhealthy > 0 {
        parts.push(format!("{} broken", node.unhealthy));
    }
    if !node.xids.is_empty() {
        let xids: Vec<String> = node.xids.iter().map(u32::to_string).collect();
        parts.push(format!("last XID {}", xids.join(",")));
    }
    if node.row_remap_failures > 0 {
        parts.push(format!("row remap failed on {}", node.row_remap_failures));
    }
    parts.extend(node.trouble.as_ref().map(|why| format!("no figures: {}", name(why))));
    parts.join("; ")
}

fn load_columns(room: Room) -> Vec<(&'static str, Align)> {
    let mut columns = vec![("util", Align::Right)];
    if room == Room::Much {
        columns.extend([("sm", Align::Right), ("tensor", Align::Right)]);
    }
    columns.push(("memory", Align::Right));
    if room > Room::Little {
        columns.push(("power", Align::Right));
    }
    columns
}

fn load_cells(load: &GpuLoad, room: Room) -> Vec<Cell> {
    let mut cells = vec![known(load.utilization, percent).into()];
    if room == Room::Much {
        cells.extend([known(load.sm_active, percent).into(), known(load.tensor_active, percent).into()]);
    }
    cells.push(known(load.memory_used, gibibytes).into());
    if room > Room::Little {
        cells.push(known(load.power, watts).into());
    }
    cells
}

fn known<T>(value: Option<T>, text: impl Fn(T) -> String) -> String {
    value.map_or_else(|| UNKNOWN.to_owned(), text)
}

/// What others wrote, as it may be shown: in one line, and not on the terminal's own terms.
fn name(text: &str) -> String {
    clean(text, Style::plain()).replace('\t', " ")
}

fn percent(part: f64) -> String {
    format!("{:.0}%", part * 100.0)
}

fn milliseconds(ms: f64) -> String {
    if ms < 10.0 { format!("{ms:.1}") } else { grouped(ms.round() as i64) }
}

/// GPU memory is sold in GiB.
fn gibibytes(bytes: f64) -> String {
    format!("{:.1}Gi", bytes / 1_073_741_824.0)
}

fn watts(watts: f64) -> String {
    if watts < 10_000.0 { format!("{watts:.0}W") } else { format!("{:.1}kW", watts / 1000.0) }
}

/// The line above what is refreshed.
pub fn heading(every: i64, view: View) -> String {
    let text = format!("aviflow top, every {}; Ctrl-C ends it\n", short(every));
    text.style(view.style, "2")
}

/// As many lines as fit on a screen, with how many do not.
pub fn fit(text: &str, rows: usize) -> String {
    let lines: Vec<&str> = text.lines().collect();
    if lines.len() <= rows || rows < 2 {
        return text.to_owned();
    }
    let shown = lines[..rows - 1].join("\n");
    format!("{shown}\n… {} more lines; `aviflow top --once` shows them all\n", lines.len() - (rows - 1))
}

#[cfg(test)]
mod tests {
    use super::super::samples::{NOW, view};
    use super::*;
    use unicode_width::UnicodeWidthStr;

    fn load(gpus: u32) -> GpuLoad {
        GpuLoad {
            gpus,
            sm_active: None,
            tensor_active: Some(0.412),
            dram_active: Some(0.3),
            utilization: Some(0.978),
            memory_used: Some(f64::from(gpus) * 70e9),
            memory_total: Some(f64::from(gpus) * 85e9),
            power: Some(f64::from(gpus) * 655.4),
        }
    }

    fn job() -> TopJob {
        TopJob {
            namespace: "nlp".into(),
            name: "llama3-8b".into(),
            queue: "nlp".into(),
            phase: "Running".into(),
            attempt: 2,
            gpus: 16,
            step: Some(1200),
            total_steps: Some(40_000),
            step_at: Some(NOW - 1500),
            step_ms: Some(1234.4),
            loss: Some(2.13456),
            tokens_per_second: Some(92_192.0),
            mfu: Some(0.337),
            load: load(16),
        }
    }

    fn silent() -> TopJob {
        TopJob {
            name: "quiet".into(),
            namespace: "default".into(),
            phase: "Starting".into(),
            gpus: 1,
            ..TopJob::default()
        }
    }

    fn all() -> Top {
        let node = |name: &str| TopNode {
            name: name.into(),
            pool: "main".into(),
            gpu_type: "H100".into(),
            condition: "Ready".into(),
            gpus: 8,
            held: 8,
            load: load(8),
            ..TopNode::default()
        };
        let bad = TopNode {
            unhealthy: 1,
            xids: vec![79],
            row_remap_failures: 1,
            trouble: Some("http://10.0.0.7:9400/metrics gives no figures: \u{1b}[2Jrefused".into()),
            load: GpuLoad::default(),
            ..node("gpu-node-18")
        };
        Top { at: NOW, jobs: vec![job(), silent()], nodes: vec![node("gpu-node-17"), bad] }
    }

    fn of_ranks() -> JobRanks {
        let rank = |rank: u32, line: &str| RankInfo {
            rank,
            worker: rank / 8,
            node: format!("gpu-node-{}", 17 + rank / 8),
            step: Some(1200 + u64::from(rank)),
            step_at: Some(NOW - 1500),
            step_ms: Some(7.25),
            line: Some(line.into()),
            line_at: Some(NOW - 300),
            load: load(1),
        };
        let silent = RankInfo { rank: 9, worker: 1, node: "gpu-node-18".into(), ..RankInfo::default() };
        let hostile = "loss 2.1\u{1b}]0;owned\u{7}\u{1b}[2J\rdone\tat last";
        JobRanks { at: NOW, job: job(), ranks: vec![rank(0, "step 1200 loss: 2.1346"), rank(8, hostile), silent] }
    }

    #[test]
    fn what_runs_on_a_wide_and_on_a_narrow_terminal() {
        insta::assert_snapshot!("wide", top(&all(), View { width: Some(160), ..view() }));
        insta::assert_snapshot!("narrow", top(&all(), View { width: Some(80), ..view() }));
    }

    #[test]
    fn a_job_rank_by_rank() {
        insta::assert_snapshot!("ranks", ranks(&of_ranks(), View { width: Some(100), ..view() }));
        let over = JobRanks { at: NOW, job: TopJob { phase: "Failed".into(), gpus: 0, ..silent() }, ranks: Vec::new() };
        insta::assert_snapshot!("no-ranks", ranks(&over, view()));
    }

    #[test]
    fn nothing_that_others_write_moves_the_cursor() {
        for text in [top(&all(), view()), ranks(&of_ranks(), view())] {
            assert!(text.chars().all(|c| c == '\n' || !c.is_control()), "{text:?}");
        }
    }

    #[test]
    fn no_line_is_too_wide() {
        for width in [80, 99, 100, 149, 150, 200] {
            let view = View { width: Some(width), ..view() };
            for text in [top(&all(), view), ranks(&of_ranks(), view)] {
                assert!(text.lines().all(|line| line.width() <= width), "{width}: {text}");
            }
        }
    }

    #[test]
    fn a_screen_has_as_many_lines_as_fit() {
        assert_eq!(fit("a\nb\nc\n", 3), "a\nb\nc\n");
        assert_eq!(fit("a\nb\nc\nd\n", 3), "a\nb\n… 2 more lines; `aviflow top --once` shows them all\n");
    }
}
