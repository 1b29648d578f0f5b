//! What a replay came to.

use super::View;
use super::number::{count, grouped};
use super::table::{Align, Cell, Table};
use aviflow_replay::perturb::Perturbed;
use aviflow_replay::{Figures, Report, Scenario};

/// `aviflow simulate`.
pub fn report(report: &Report, scenario: &Scenario, view: View) -> String {
    let mut rows: Vec<(String, &Figures)> = Vec::new();
    for (i, (policy, figures)) in report.policies.iter().enumerate() {
        rows.push((policy.clone(), figures));
        if let Some(compare) = &report.compare {
            rows.push((format!("{policy}, {} nodes", grouped(i64::from(compare.nodes))), &compare.policies[i].1));
        }
    }
    let mut out = header(scenario);
    out.push_str(&waits(&rows, view));
    out.push('\n');
    out.push_str(&rest(&rows, view));
    if let Some(perturbed) = &report.perturbed {
        out.push('\n');
        out.push_str(&spread(perturbed, view));
    }
    out
}

fn header(scenario: &Scenario) -> String {
    let (trace, cluster) = (&scenario.trace, &scenario.cluster);
    let days = trace.span().0 as f64 / 86_400_000.0;
    let load = trace.gpu_hours() / (f64::from(cluster.gpus()) * days * 24.0);
    // Where jobs run for longer than others are submitted, the load of that time says nothing.
    let longest = trace.jobs.iter().map(|job| job.run).max().unwrap_or_default();
    let load = if trace.span() > longest { format!(", loaded to {:.0}%", load * 100.0) } else { String::new() };
    let origin =
        if trace.jobs.iter().all(|job| job.line == 0) { format!(" ({})", trace.origin) } else { String::new() };
    format!(
        "{}{origin}, {} GPU-hours, submitted over {days:.1} days\n\
         {} of {} GPUs{load}; waits in hours: completion − submission − run time\n\n",
        count(trace.jobs.len() as u64, "job"),
        grouped(trace.gpu_hours().round() as i64),
        count(u64::from(cluster.nodes), "node"),
        cluster.gpus_per_node,
    )
}

fn waits(rows: &[(String, &Figures)], view: View) -> String {
    let mut table = Table::new(&[
        ("policy", Align::Left),
        ("nodes of the job", Align::Left),
        ("jobs", Align::Right),
        ("mean", Align::Right),
        ("p50", Align::Right),
        ("p90", Align::Right),
        ("p99", Align::Right),
        ("max", Align::Right),
    ]);
    for (policy, figures) in rows {
        let classes = figures.wait_hours.classes();
        for (i, (_, words, stats)) in classes.into_iter().filter(|(_, _, stats)| stats.n > 0).enumerate() {
            let name: Cell = if i == 0 { policy.as_str().into() } else { "".into() };
            let jobs = grouped(i64::try_from(stats.n).unwrap_or(i64::MAX));
            let values = [stats.mean, stats.p50, stats.p90, stats.p99, stats.max].map(|v| hours(v).into());
            table.row([name, words.into(), jobs.into()].into_iter().chain(values));
        }
    }
    table.render(view.width, view.style)
}

fn rest(rows: &[(String, &Figures)], view: View) -> String {
    // Where no job must be inside one domain of the topology, there is no bound to speak of.
    let bounded = rows.iter().any(|(_, f)| f.use_bound.is_some());
    let mut columns = vec![("policy", Align::Left), ("in use", Align::Right)];
    if bounded {
        columns.extend([("bound", Align::Right), ("of it", Align::Right)]);
    }
    columns.extend([
        ("broken", Align::Right),
        ("makespan", Align::Right),
        ("preempted", Align::Right),
        ("turns", Align::Right),
        ("lost", Align::Right),
        ("in p90", Align::Right),
        ("p50 off", Align::Right),
        ("plan p50", Align::Right),
        ("p99", Align::Right),
        ("max", Align::Right),
    ]);
    let mut table = Table::new(&columns);
    for (policy, f) in rows {
        let number = |n: u64| if n == 0 { String::new() } else { grouped(i64::try_from(n).unwrap_or(i64::MAX)) };
        let mut cells: Vec<Cell> = vec![policy.as_str().into(), percent(f.gpu_use_while_waiting).into()];
        if bounded {
            cells.extend([f.use_bound, f.use_of_bound].map(|share| percent(share).into()));
        }
        cells.extend([
            percent(f.fragmentation).into(),
            format!("{}h", grouped(f.makespan_hours.round() as i64)).into(),
            number(f.preemptions).into(),
            number(f.turns).into(),
            if f.lost_gpu_hours > 0.0 { format!("{:.2}%", f.lost_share * 100.0).into() } else { "".into() },
            f.eta.p90_coverage.map(|c| percent(Some(c))).unwrap_or_default().into(),
            f.eta.p50_median_relative_error.map(|e| percent(Some(e))).unwrap_or_default().into(),
            millis(f.plan_ms.p50).into(),
            millis(f.plan_ms.p99).into(),
            millis(f.plan_ms.max).into(),
        ]);
        table.row(cells);
    }
    let mut notes = vec![
        "in use: GPUs held while jobs wait",
        "broken: GPUs free on partly held nodes while jobs wait for whole ones",
    ];
    if bounded {
        notes.insert(
            1,
            "bound, of it: the most that could be held at once by the jobs that are there, and the use in parts of it",
        );
    }
    if rows.iter().any(|(_, f)| f.lost_gpu_hours > 0.0) {
        notes.push("lost: GPU-hours held by restarts");
    }
    if rows.iter().any(|(_, f)| f.eta.n > 0) {
        notes.push("in p90, p50 off: started by the p90 they were told; median error of the p50");
    }
    format!("{}{}\n", table.render(view.width, view.style), notes.join("\n"))
}

/// The figures that are told with their spread, and their words.
const SPREAD: [(&str, &str); 7] = [
    ("wait_hours.all.mean", "mean wait, all"),
    ("wait_hours.lt8.mean", "mean wait, under 8 nodes"),
    ("wait_hours.n8_63.mean", "mean wait, 8 to 63"),
    ("wait_hours.n64_127.mean", "mean wait, 64 to 127"),
    ("wait_hours.ge128.mean", "mean wait, 128 and more"),
    ("wait_hours.all.max", "longest wait"),
    ("lost_share", "share lost"),
];

fn spread(perturbed: &Perturbed, view: View) -> String {
    let mut table = Table::new(&[
        ("policy", Align::Left),
        ("figure", Align::Left),
        ("mean", Align::Right),
        ("±", Align::Right),
        ("to easy", Align::Right),
        ("±", Align::Right),
        ("at most", Align::Right),
    ]);
    for (policy, figures) in &perturbed.policies {
        let known = SPREAD.iter().filter_map(|(path, words)| Some((*path, *words, figures.get(*path)?)));
        let told = known.filter(|(path, _, over)| *path != "lost_share" || over.mean > 0.0);
        for (i, (path, words, over)) in told.enumerate() {
            let show = |v: f64| if path == "lost_share" { format!("{:.2}%", v * 100.0) } else { hours(Some(v)) };
            let ratio = |v: Option<f64>| v.map(|v| format!("{v:.2}")).unwrap_or_default();
            let easy = over.to_easy.as_ref();
            table.row([
                if i == 0 { policy.as_str().into() } else { "".into() },
                words.into(),
                show(over.mean).into(),
                show(over.deviation).into(),
                ratio(easy.map(|r| r.mean)).into(),
                ratio(easy.map(|r| r.deviation)).into(),
                ratio(easy.map(|r| r.max)).into(),
            ]);
        }
    }
    let traces = count(perturbed.traces, "perturbed trace");
    format!(
        "over {traces}: mean and deviation, and the ratio to EASY on the same trace\n\n{}",
        table.render(view.width, view.style)
    )
}

/// Hours: two decimals while they are few.
fn hours(value: Option<f64>) -> String {
    match value {
        None => "-".to_owned(),
        Some(v) if v < 9.995 => format!("{v:.2}"),
        Some(v) if v < 999.95 => format!("{v:.1}"),
        Some(v) => grouped(v.round() as i64),
    }
}

fn percent(share: Option<f64>) -> String {
    share.map_or("-".to_owned(), |share| format!("{:.1}%", share * 100.0))
}

fn millis(ms: f64) -> String {
    match ms {
        _ if ms < 0.001 => "<1us".to_owned(),
        _ if ms < 0.1 => format!("{:.0}us", ms * 1000.0),
        _ if ms < 10.0 => format!("{ms:.1}ms"),
        _ => format!("{ms:.0}ms"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::samples::view;
    use super::*;
    use aviflow_replay::perturb::{Over, Ratio};
    use aviflow_replay::report::{Compare, Eta, PlanMs, Stats, Waits};
    use aviflow_replay::{Cluster, generate};

    fn figures(scale: f64) -> Figures {
        let stats = |n: usize, mean: f64| {
            let some = |v: f64| (n > 0).then_some(v * scale);
            Stats {
                n,
                mean: some(mean),
                p50: some(mean / 2.0),
                p90: some(2.0 * mean),
                p99: some(3.0 * mean),
                max: some(4.0 * mean),
            }
        };
        Figures {
            wait_hours: Waits {
                all: stats(319, 30.0),
                lt8: stats(114, 0.125),
                n8_63: stats(82, 11.7),
                n64_127: stats(85, 31.4),
                ge128: stats(38, 400.0),
            },
            gpu_use_while_waiting: Some(0.8836),
            use_bound: None,
            use_of_bound: None,
            makespan_hours: 1598.2,
            preemptions: 0,
            turns: 0,
            lost_gpu_hours: 0.0,
            lost_share: 0.0,
            fragmentation: Some(0.0),
            eta: Eta::default(),
            plan_ms: PlanMs { p50: 0.0004, p99: 0.71, max: 14.2 },
        }
    }

    fn shared() -> Figures {
        let eta = Eta { n: 40, p90_coverage: Some(0.9), p50_median_relative_error: Some(0.312) };
        Figures { preemptions: 3, turns: 1234, lost_gpu_hours: 4400.0, lost_share: 0.0097, eta, ..figures(0.1) }
    }

    #[test]
    fn waits_and_what_they_cost() {
        let mut trace = generate::kalos(1);
        trace.compress(4.0);
        let scenario = Scenario::new(trace, Cluster::new(128, 8));
        let policies = vec![("easy".to_owned(), figures(1.0)), ("aviflow".to_owned(), shared())];
        let mut sample = Report { policies, compare: None, perturbed: None };
        let plain = report(&sample, &scenario, view());
        sample.compare = Some(Compare { nodes: 144, policies: sample.policies.clone() });
        sample.policies[0].1.wait_hours.ge128 = Stats::default();
        let ratio = |mean| Some(Ratio { mean, deviation: 0.021, max: mean + 0.1 });
        let over = |mean, easy| Over { mean, deviation: mean / 10.0, to_easy: ratio(easy) };
        let of = |scale: f64| {
            [("wait_hours.all.mean", 30.0 * scale), ("wait_hours.ge128.mean", 120.0 * scale), ("lost_share", 0.0097)]
                .into_iter()
                .map(|(name, mean)| (name.to_owned(), over(mean, scale)))
                .collect()
        };
        let policies = vec![("easy".to_owned(), of(1.0)), ("aviflow".to_owned(), of(0.1))];
        sample.perturbed = Some(Perturbed { traces: 20, policies });
        insta::assert_snapshot!(format!("{plain}\n---\n{}", report(&sample, &scenario, view())));
    }
}
