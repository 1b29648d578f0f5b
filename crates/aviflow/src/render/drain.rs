//! Drains.

use super::View;
use super::number::{count, moment, span, until};
use super::style::Styled;
use super::table::{Align, Cell, Table};
use super::waiting::some;
use aviflow_api::admin::ranges::compress;
use aviflow_api::rest::{DrainAnswer, DrainInfo, DrainRequest, WindowInfo};

fn names(nodes: &[String]) -> String {
    compress(nodes.iter().map(String::as_str)).join(", ")
}

/// Until when a node is away.
fn away(length: Option<i64>) -> String {
    match length {
        Some(length) => format!("for {}", span(length)),
        None => "until somebody uncordons it".to_owned(),
    }
}

/// `aviflow node drain`.
pub fn answer(request: &DrainRequest, answer: &DrainAnswer, context: &str, view: View) -> String {
    let nodes = format!("{} ({})", names(&answer.nodes), count(answer.nodes.len() as u64, "node"));
    let length = away(request.length);
    let Some(number) = answer.drain else {
        let from = match request.at {
            Some(at) if at > view.now => format!("from {} ({}) on", moment(at, view.now), until(at, view.now)),
            _ => "now".to_owned(),
        };
        let each = if answer.nodes.len() == 1 { "" } else { "each " };
        return format!("draining {nodes} on {context} {from}, {each}{length}\n");
    };
    let mut how: Vec<String> = Vec::new();
    how.extend(request.max_unavailable.map(|most| format!("at most {most} at once")));
    how.extend(request.by.map(|by| format!("all by {}", moment(by, view.now))));
    how.push(format!("each {length}"));
    let off = format!("`aviflow node undrain {number}` calls it off");
    format!("drain {number} of {nodes} on {context}: {}\n{off}\n", how.join(", "))
}

/// `aviflow node undrain`.
pub fn called_off(name: &str, answer: &DrainAnswer, context: &str) -> String {
    let nodes = names(&answer.nodes);
    let of = if nodes.is_empty() || nodes == name { String::new() } else { format!(" of {nodes}") };
    format!("drain {name}{of} called off on {context}\n")
}

/// When a node is to be empty: `from 22:00 UTC until 23:00 UTC, by ada: new switch`.
pub fn window(w: &WindowInfo, now: i64) -> String {
    let until = w.until.map_or("until somebody uncordons it".to_owned(), |at| format!("until {}", moment(at, now)));
    let why = w.reason.as_ref().map_or(String::new(), |reason| format!(": {reason}"));
    format!("from {} {until}, by {}{why}", moment(w.from, now), w.by)
}

/// `aviflow node drains`.
pub fn drains(drains: &[DrainInfo], view: View) -> String {
    let mut out = String::new();
    for (i, drain) in drains.iter().enumerate() {
        if i > 0 {
            out.push('\n');
        }
        let mut said: Vec<String> = Vec::new();
        said.extend(drain.max_unavailable.map(|most| format!("at most {most} at once")));
        said.extend(drain.by.map(|by| format!("all by {}", moment(by, view.now))));
        said.extend(drain.length.map(|length| {
            let each = if drain.nodes.len() == 1 { "" } else { "each " };
            format!("{each}for {}", span(length))
        }));
        said.push(format!("ordered by {}", drain.ordered_by));
        said.extend(drain.reason.clone());
        out.push_str(&format!("{}  {}\n", drain.name.style(view.style, "1"), said.join(", ")));
        out.push_str(&nodes(drain, view));
    }
    out
}

fn nodes(drain: &DrainInfo, view: View) -> String {
    let mut table = Table::new(&[
        ("node", Align::Left),
        ("state", Align::Left),
        ("from", Align::Left),
        ("until", Align::Left),
        ("jobs", Align::Left),
    ]);
    for node in &drain.nodes {
        let colour = match node.state.as_str() {
            "empty" => "32",
            "leaving" => "33",
            _ => "2",
        };
        let at = |at: Option<i64>| at.map_or(String::new(), |at| moment(at, view.now));
        table.row([
            node.name.as_str().into(),
            Cell::coloured(&node.state, colour),
            at(node.from).into(),
            at(node.until).into(),
            some(&node.jobs).into(),
        ]);
    }
    let width = view.width.map(|w| w.saturating_sub(2));
    table.render(width, view.style).lines().map(|line| format!("  {line}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::super::samples::{NOW, view};
    use super::*;
    use aviflow_api::rest::DrainNode;

    const HOUR: i64 = 3_600_000;

    fn of(n: u32) -> Vec<String> {
        (1..=n).map(|i| format!("node-{i}")).collect()
    }

    #[test]
    fn what_was_ordered() {
        let window = DrainRequest { at: Some(NOW + 10 * HOUR), length: Some(2 * HOUR), ..DrainRequest::default() };
        let rolling =
            DrainRequest { max_unavailable: Some(2), by: Some(NOW + 48 * HOUR), length: Some(HOUR), ..window.clone() };
        let one = DrainAnswer { nodes: of(1), ..DrainAnswer::default() };
        let eight = DrainAnswer { nodes: of(8), ..DrainAnswer::default() };
        let numbered = DrainAnswer { drain: Some(7), ..eight.clone() };
        let texts = [
            answer(&DrainRequest::default(), &one, "local", view()),
            answer(&window, &eight, "local", view()),
            answer(&rolling, &numbered, "local", view()),
            called_off("7", &numbered, "local"),
            called_off("node-1", &one, "local"),
        ];
        insta::assert_snapshot!(texts.concat());
    }

    #[test]
    fn drains_that_go_on() {
        let node = |name: &str, state: &str, from: Option<i64>, jobs: &[&str]| DrainNode {
            name: name.into(),
            state: state.into(),
            from,
            until: from.map(|at| at + HOUR),
            jobs: jobs.iter().map(|j| (*j).to_owned()).collect(),
        };
        let rolling = DrainInfo {
            name: "7".into(),
            nodes: vec![
                node("node-1", "empty", Some(NOW - HOUR / 2), &[]),
                node("node-2", "leaving", Some(NOW), &["default/tiny-gpt", "nlp/big-sft"]),
                node("node-3", "waiting", None, &[]),
            ],
            max_unavailable: Some(2),
            by: Some(NOW + 48 * HOUR),
            length: Some(HOUR),
            ordered_by: "ada".into(),
            reason: Some("firmware".into()),
        };
        let single = DrainInfo {
            name: "node-9".into(),
            nodes: vec![DrainNode { until: None, ..node("node-9", "coming", Some(NOW + 10 * HOUR), &[]) }],
            max_unavailable: None,
            by: None,
            length: None,
            ordered_by: "ada".into(),
            reason: None,
        };
        insta::assert_snapshot!(drains(&[rolling, single], view()));
    }
}
