//! The account of GPU time.

use super::View;
use super::number::{gpu_time, instant, percent, span};
use super::table::{Align, Cell, Table};
use aviflow_api::rest::Usage;

/// Time that was paid for and brought nothing: the training stood, repeated or started.
const OVERHEAD: [&str; 6] = ["starting", "checkpointing", "repeating", "hung", "idle", "stopping"];

/// `aviflow usage`.
pub fn usage(usage: &Usage, view: View) -> String {
    let header = format!(
        "{} to {} UTC ({}), {} of GPU time\n\n",
        instant(usage.from),
        instant(usage.to),
        span(usage.to - usage.from),
        gpu_time(usage.capacity)
    );
    let text = if usage.by == "state" { by_state(usage, view) } else { by_key(usage, view) };
    let sum: i64 = usage.rows.iter().map(|r| r.total).sum();
    // The platform promises that the rows sum to the capacity; a difference must be seen.
    let check = if sum == usage.capacity {
        String::new()
    } else {
        format!("\nthe rows differ from the capacity by {} ms; please report this\n", sum - usage.capacity)
    };
    format!("{header}{text}{check}")
}

fn by_state(usage: &Usage, view: View) -> String {
    let mut table = Table::new(&[("state", Align::Left), ("gpu time", Align::Right), ("share", Align::Right)]);
    for row in &usage.rows {
        table.row([row.key.as_str().into(), gpu_time(row.total).into(), percent(row.total, usage.capacity).into()]);
    }
    table.row(["in all".into(), gpu_time(usage.capacity).into(), percent(usage.capacity, usage.capacity).into()]);
    table.render(view.width, view.style)
}

fn by_key(usage: &Usage, view: View) -> String {
    let by: &'static str = match usage.by.as_str() {
        "queue" => "queue",
        "job" => "job",
        _ => "user",
    };
    let mut table = Table::new(&[
        (by, Align::Left),
        ("gpu time", Align::Right),
        ("share", Align::Right),
        ("productive", Align::Right),
        ("overhead", Align::Right),
        ("other", Align::Right),
    ]);
    let mut put = |key: &str, total: i64, productive: i64, overhead: i64| {
        let other = total - productive - overhead;
        let cell = |t: i64| -> Cell { if t == 0 { "".into() } else { gpu_time(t).into() } };
        let key = if key == "-" { "(nobody)" } else { key };
        table.row([
            key.into(),
            gpu_time(total).into(),
            percent(total, usage.capacity).into(),
            cell(productive),
            cell(overhead),
            cell(other),
        ]);
    };
    let state = |states: &std::collections::BTreeMap<String, i64>, names: &[&str]| -> i64 {
        names.iter().filter_map(|n| states.get(*n)).sum()
    };
    let (mut total, mut productive, mut overhead) = (0, 0, 0);
    for row in &usage.rows {
        let (p, o) = (state(&row.states, &["productive"]), state(&row.states, &OVERHEAD));
        put(&row.key, row.total, p, o);
        total += row.total;
        productive += p;
        overhead += o;
    }
    put("in all", total, productive, overhead);
    table.render(view.width, view.style)
}

#[cfg(test)]
mod tests {
    use super::super::samples::{NOW, view};
    use super::*;
    use aviflow_api::rest::UsageRow;
    use std::collections::BTreeMap;

    fn row(key: &str, states: &[(&str, i64)]) -> UsageRow {
        let states: BTreeMap<String, i64> = states.iter().map(|(k, v)| ((*k).to_owned(), *v)).collect();
        UsageRow { key: key.into(), total: states.values().sum(), states }
    }

    #[test]
    fn rows_sum_to_the_capacity() {
        let rows = vec![
            row("ada", &[("productive", 3_600_000_000), ("starting", 40_000_000), ("idle", 5_000_000)]),
            row("-", &[("free", 6_030_800_000)]),
        ];
        let capacity = rows.iter().map(|r| r.total).sum();
        let mut sample = Usage { from: NOW - 604_800_000, to: NOW, by: "user".into(), capacity, rows };
        let users = usage(&sample, view());
        sample.by = "state".into();
        sample.rows = vec![
            row("productive", &[("productive", 3_600_000_000)]),
            row("starting", &[("starting", 40_000_000)]),
            row("idle", &[("idle", 5_000_000)]),
            row("free", &[("free", 6_030_800_000)]),
        ];
        insta::assert_snapshot!(format!("{users}\n{}", usage(&sample, view())));
    }
}
