//! A cluster as it is.

use super::View;
use super::number::{count, gpu_time, short};
use super::style::Styled;
use super::table::{Align, Cell, Table};
use aviflow_api::rest::{Observed, ObservedNode};

/// Pods that a line of a node names.
const NAMED: usize = 3;

/// `aviflow observed`.
pub fn observed(o: &Observed, view: View) -> String {
    let mut out = String::new();
    if o.observing {
        out.push_str("The control plane only observes: it schedules nothing.\n\n");
    }
    out.push_str(&section("Namespaces", &namespaces(o, view), view));
    out.push_str(&section("Nodes", &nodes(o, view), view));
    if o.pending.is_empty() {
        out.push_str("Nothing waits for GPUs.\n\n");
    } else {
        out.push_str(&section("Waiting", &pending(o, view), view));
    }
    out.push_str(&section("Free", &free(o, view), view));
    if !o.metrics {
        out.push_str("There are no metrics: whether a GPU that is held is busy is not known.\n");
    }
    out
}

fn section(title: &str, table: &str, view: View) -> String {
    format!("{}\n{table}\n", title.style(view.style, "1"))
}

/// Nothing where there is nothing.
fn some(n: u32) -> Cell {
    if n == 0 { "".into() } else { n.to_string().into() }
}

fn namespaces(o: &Observed, view: View) -> String {
    let mut table = Table::new(&[
        ("namespace", Align::Left),
        ("gpus", Align::Right),
        ("pods", Align::Right),
        ("nodes", Align::Right),
        ("longest", Align::Right),
        ("held", Align::Right),
        ("waiting", Align::Right),
    ]);
    for n in &o.namespaces {
        table.row([
            n.namespace.as_str().into(),
            n.gpus.to_string().into(),
            n.pods.to_string().into(),
            n.nodes.to_string().into(),
            n.since.map_or(String::new(), |since| short(o.at - since)).into(),
            gpu_time(n.gpu_ms).into(),
            some(n.pending),
        ]);
    }
    table.render(view.width, view.style)
}

/// `nlp/train-0 (8, 3d)`: who holds how many, and how long.
fn holders(node: &ObservedNode, now: i64) -> String {
    let one =
        |p: &aviflow_api::rest::HoldingPod| format!("{}/{} ({}, {})", p.namespace, p.pod, p.gpus, short(now - p.since));
    let mut names: Vec<String> = node.pods.iter().take(NAMED).map(one).collect();
    if let Some(more) = node.pods.len().checked_sub(NAMED).filter(|n| *n > 0) {
        names.push(format!("{more} more"));
    }
    names.join(", ")
}

fn nodes(o: &Observed, view: View) -> String {
    let mut table = Table::new(&[
        ("node", Align::Left),
        ("type", Align::Left),
        ("gpus", Align::Right),
        ("free", Align::Right),
        ("broken", Align::Right),
        ("closed", Align::Left),
        ("held by", Align::Left),
    ]);
    for node in &o.nodes {
        let closed = match (&node.closed, node.ready) {
            (_, false) => "silent".to_owned(),
            (Some(why), true) => why.clone(),
            (None, true) => String::new(),
        };
        table.row([
            node.name.as_str().into(),
            node.gpu_type.as_str().into(),
            node.gpus.to_string().into(),
            node.free.to_string().into(),
            if node.broken == 0 { "".into() } else { Cell::coloured(node.broken.to_string(), "31") },
            Cell::coloured(closed, "33"),
            holders(node, o.at).into(),
        ]);
    }
    table.render(view.width, view.style)
}

fn pending(o: &Observed, view: View) -> String {
    let mut table = Table::new(&[
        ("pod", Align::Left),
        ("of", Align::Left),
        ("gpus", Align::Right),
        ("since", Align::Right),
        ("why", Align::Left),
    ]);
    for p in &o.pending {
        table.row([
            format!("{}/{}", p.namespace, p.pod).into(),
            p.owner.clone().unwrap_or_default().into(),
            p.gpus.to_string().into(),
            short(o.at - p.since).into(),
            p.reason.as_str().into(),
        ]);
    }
    table.render(view.width, view.style)
}

fn free(o: &Observed, view: View) -> String {
    let mut table =
        Table::new(&[("type", Align::Left), ("gpus", Align::Right), ("free", Align::Right), ("as", Align::Left)]);
    for f in &o.free {
        let whole = count(f.whole_nodes.into(), "whole node");
        let rest = match f.scattered {
            0 => whole,
            n => format!("{whole} and {n} on nodes that are partly held; at most {} on one node", f.largest),
        };
        table.row([f.gpu_type.as_str().into(), f.gpus.to_string().into(), f.free.to_string().into(), rest.into()]);
    }
    table.render(view.width, view.style)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::samples::view;
    use aviflow_api::rest::{FreeGpus, HoldingPod, ObservedNamespace, PendingPod};

    #[test]
    fn who_holds_what_is_seen_at_once() {
        const HOUR: i64 = 3_600_000;
        let at = 100 * HOUR;
        let pod = |namespace: &str, pod: &str, gpus, hours: i64| HoldingPod {
            namespace: namespace.into(),
            pod: pod.into(),
            owner: None,
            gpus,
            since: at - hours * HOUR,
        };
        let node = |name: &str, free, pods| ObservedNode {
            name: name.into(),
            pool: "main".into(),
            gpu_type: "H100".into(),
            gpus: 8,
            free,
            ready: true,
            pods,
            ..ObservedNode::default()
        };
        let observed = Observed {
            at,
            observing: true,
            nodes: vec![
                node("hgx0", 5, vec![pod("nlp", "notebook", 2, 70), pod("vision", "train-0", 1, 3)]),
                ObservedNode { closed: Some("cordoned".into()), ..node("hgx1", 8, vec![]) },
            ],
            namespaces: vec![ObservedNamespace {
                namespace: "nlp".into(),
                gpus: 2,
                pods: 1,
                nodes: 1,
                since: Some(at - 70 * HOUR),
                gpu_ms: 140 * HOUR,
                pending: 8,
            }],
            pending: vec![PendingPod {
                namespace: "nlp".into(),
                pod: "train-1".into(),
                owner: Some("Job/train".into()),
                gpus: 8,
                since: at - HOUR,
                reason: "2 Insufficient nvidia.com/gpu".into(),
            }],
            free: vec![FreeGpus {
                gpu_type: "H100".into(),
                gpus: 16,
                free: 5,
                whole_nodes: 0,
                scattered: 5,
                largest: 5,
            }],
            metrics: false,
        };
        insta::assert_snapshot!(super::observed(&observed, view()));
    }
}
