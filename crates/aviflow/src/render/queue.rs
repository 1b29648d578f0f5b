//! Queues, pools and the policy.

use super::View;
use super::job::Pairs;
use super::number::{count, gpu_time};
use super::style::Styled;
use super::table::{Align, Cell, Table};
use aviflow_api::admin::{PolicySpec, TimeSharingSpec};
use aviflow_api::duration::Duration;
use aviflow_api::rest::{PoolInfo, QueueInfo, QuotaInfo};

fn state(word: &str) -> Cell {
    Cell::coloured(word, if word == "open" { "" } else { "33" })
}

/// Nothing where there is nothing.
fn some(n: u32) -> Cell {
    if n == 0 { "".into() } else { n.to_string().into() }
}

/// `aviflow queue ls`: the tree, a line for each GPU type that a queue has a quota of.
pub fn queues(queues: &[QueueInfo], view: View) -> String {
    let mut table = Table::new(&[
        ("queue", Align::Left),
        ("state", Align::Left),
        ("running", Align::Right),
        ("waiting", Align::Right),
        ("gpus", Align::Right),
        ("type", Align::Left),
        ("used", Align::Right),
        ("guarantee", Align::Right),
        ("limit", Align::Right),
        ("borrowed", Align::Right),
        ("lent", Align::Right),
    ]);
    let mut sorted: Vec<&QueueInfo> = queues.iter().collect();
    sorted.sort_by(|a, b| a.path.split('/').cmp(b.path.split('/')));
    for q in sorted {
        let depth = q.path.matches('/').count();
        let mut first = vec![
            format!("{}{}", "  ".repeat(depth), q.name).into(),
            state(&q.state),
            q.running.to_string().into(),
            q.waiting.to_string().into(),
            q.gpus.to_string().into(),
        ];
        if q.quotas.is_empty() {
            first.extend((0..6).map(|_| Cell::from("")));
            table.row(first);
            continue;
        }
        for (gpu_type, quota) in &q.quotas {
            let begin = std::mem::replace(&mut first, (0..5).map(|_| Cell::from("")).collect());
            let rest = [
                gpu_type.as_str().into(),
                quota.used.to_string().into(),
                guarantee(quota).into(),
                quota.limit.map_or(String::new(), |l| l.to_string()).into(),
                some(quota.borrowed),
                some(quota.lent),
            ];
            table.row(begin.into_iter().chain(rest));
        }
    }
    table.render(view.width, view.style)
}

/// `32`, or `28 of 32` where not all of it can be had.
fn guarantee(quota: &QuotaInfo) -> String {
    if quota.effective_guarantee == quota.guarantee {
        quota.guarantee.to_string()
    } else {
        format!("{} of {}", quota.effective_guarantee, quota.guarantee)
    }
}

/// `aviflow queue show`.
pub fn queue(q: &QueueInfo, view: View) -> String {
    let document = &q.document;
    let mut out = format!("{}  {}\n", q.name.style(view.style, "1"), q.state);
    let mut pairs = Pairs::default();
    pairs.put("path", if q.path == q.name { String::new() } else { q.path.clone() });
    pairs.put("team", q.team.clone().unwrap_or_default());
    let (jobs, gpus) = (count(q.running.into(), "job"), count(q.gpus.into(), "GPU"));
    pairs.put("running", format!("{jobs} on {gpus}"));
    let (jobs, gpus) = (count(q.waiting.into(), "job"), count(q.waiting_gpus.into(), "GPU"));
    pairs.put("waiting", if q.waiting == 0 { "none".to_owned() } else { format!("{jobs} for {gpus}") });
    pairs.put("use", format!("{} of GPU time, older use counts less", gpu_time(q.decayed_use)));
    let does = [
        if document.lend { "lends" } else { "does not lend" },
        if document.borrow { "borrows" } else { "does not borrow" },
        if document.reclaim { "takes back what it lent" } else { "does not take back what it lent" },
    ];
    pairs.put("quota", does.join(", "));
    pairs.put("turns", q.time_sharing.as_ref().map(turns).unwrap_or_default());
    let defaults = &document.defaults;
    let mut said: Vec<String> = Vec::new();
    said.extend(defaults.time_limit.map(|limit| format!("time limit {limit}")));
    said.extend(defaults.priority.as_ref().map(|priority| format!("priority {priority}")));
    said.extend(defaults.preemptible.map(|yes| (if yes { "preemptible" } else { "not preemptible" }).to_owned()));
    pairs.put("defaults", said.join(", "));
    pairs.put("up to", document.highest_priority.as_ref().map(|p| format!("priority {p}")).unwrap_or_default());
    pairs.put("submitters", document.submitters.join(", "));
    out.push_str(&pairs.render(view));
    if !q.quotas.is_empty() {
        out.push('\n');
        out.push_str(&quotas(q, view));
    }
    out
}

fn quotas(q: &QueueInfo, view: View) -> String {
    let mut table = Table::new(&[
        ("type", Align::Left),
        ("guarantee", Align::Right),
        ("limit", Align::Right),
        ("weight", Align::Right),
        ("used", Align::Right),
        ("borrowed", Align::Right),
        ("lent", Align::Right),
        ("may still use", Align::Right),
    ]);
    for (gpu_type, quota) in &q.quotas {
        table.row([
            gpu_type.as_str().into(),
            guarantee(quota).into(),
            quota.limit.map_or("none".to_owned(), |l| l.to_string()).into(),
            quota.weight.to_string().into(),
            quota.used.to_string().into(),
            quota.borrowed.to_string().into(),
            quota.lent.to_string().into(),
            quota.headroom.to_string().into(),
        ]);
    }
    table.render(view.width, view.style)
}

/// How jobs take turns.
fn turns(t: &TimeSharingSpec) -> String {
    if !t.enabled {
        return "off".to_owned();
    }
    format!("of {} at least, first level {}, {} of waiting take one level off", t.minimum_run, t.level, t.ageing)
}

/// `aviflow pool ls`.
pub fn pools(pools: &[PoolInfo], view: View) -> String {
    let mut table = Table::new(&[
        ("pool", Align::Left),
        ("types", Align::Left),
        ("nodes", Align::Right),
        ("gpus", Align::Right),
        ("free", Align::Right),
        ("others", Align::Right),
        ("most free on a node", Align::Right),
        ("levels", Align::Left),
    ]);
    for p in pools {
        table.row([
            p.name.as_str().into(),
            p.gpu_types.join(", ").into(),
            p.nodes.to_string().into(),
            p.gpus.to_string().into(),
            p.free.to_string().into(),
            if p.foreign == 0 { "".into() } else { p.foreign.to_string().into() },
            p.most_free_on_a_node.to_string().into(),
            p.levels.join(", ").into(),
        ]);
    }
    table.render(view.width, view.style)
}

/// `aviflow pool show`.
pub fn pool(p: &PoolInfo, view: View) -> String {
    let mut out = format!("{}\n", p.name.style(view.style, "1"));
    let mut pairs = Pairs::default();
    pairs.put("nodes", p.nodes.to_string());
    let types = if p.gpu_types.is_empty() { String::new() } else { format!(" of {}", p.gpu_types.join(", ")) };
    pairs.put("GPUs", format!("{}{types}", p.gpus));
    pairs.put("free", format!("{}, at most {} on one node", p.free, p.most_free_on_a_node));
    pairs.put("others", if p.foreign == 0 { String::new() } else { format!("use {} GPUs", p.foreign) });
    pairs.put("levels", if p.levels.is_empty() { "node".to_owned() } else { format!("node, {}", p.levels.join(", ")) });
    let sharing = p.document.as_ref().and_then(|d| d.time_sharing.as_ref());
    pairs.put("turns", sharing.map(turns).unwrap_or_default());
    pairs.put("document", if p.document.is_none() { "none; `aviflow apply -f FILE` gives it one" } else { "" });
    out.push_str(&pairs.render(view));
    if p.domains.is_empty() {
        return out;
    }
    let mut table = Table::new(&[
        ("level", Align::Left),
        ("domain", Align::Left),
        ("within", Align::Left),
        ("nodes", Align::Right),
        ("free nodes", Align::Right),
        ("gpus", Align::Right),
        ("free", Align::Right),
    ]);
    for d in &p.domains {
        table.row([
            d.level.as_str().into(),
            d.name.as_str().into(),
            d.within.clone().unwrap_or_default().into(),
            d.nodes.to_string().into(),
            d.free_nodes.to_string().into(),
            d.gpus.to_string().into(),
            d.free.to_string().into(),
        ]);
    }
    out.push('\n');
    out.push_str(&table.render(view.width, view.style));
    out
}

/// `aviflow policy show`.
pub fn policy(p: &PolicySpec, view: View) -> String {
    let span = |d: Duration| d.to_string();
    let mut pairs = Pairs::default();
    pairs.put("half life", format!("{}: then used GPU-time counts half", span(p.half_life)));
    pairs.put("reservations", format!("{} for each GPU type of a pool", p.reservations));
    pairs.put(
        "preemption",
        if p.preemption { "jobs may be suspended for others" } else { "no job is suspended for another" },
    );
    pairs.put("minimum run", format!("{}: so long a job is left alone", span(p.minimum_run)));
    pairs.put("patience", format!("{}: so long a victim may take for its next checkpoint", span(p.patience)));
    pairs.put("restart", format!("{}: what one costs where none was observed", span(p.restart)));
    format!("{}\n{}", "the policy".style(view.style, "1"), pairs.render(view))
}

#[cfg(test)]
mod tests {
    use super::super::samples::view;
    use super::*;
    use aviflow_api::admin::{PoolSpec, QueueDefaults, QueueSpec, from_policy};
    use aviflow_api::rest::DomainInfo;
    use aviflow_core::model::{Policy, TimeSharing};
    use std::collections::BTreeMap;

    fn nlp() -> QueueInfo {
        let defaults =
            QueueDefaults { priority: Some("low".into()), preemptible: Some(true), ..QueueDefaults::default() };
        let document = QueueSpec {
            parent: Some("research".into()),
            team: Some("language".into()),
            defaults,
            reclaim: false,
            submitters: vec!["ada".into(), "bob".into()],
            ..QueueSpec::open("nlp")
        };
        let quota = QuotaInfo {
            guarantee: 32,
            effective_guarantee: 28,
            limit: Some(48),
            weight: 2,
            used: 40,
            borrowed: 12,
            lent: 0,
            headroom: 8,
        };
        let other = QuotaInfo { weight: 1, lent: 4, guarantee: 8, effective_guarantee: 8, ..QuotaInfo::default() };
        QueueInfo {
            path: "research/nlp".into(),
            waiting: 2,
            waiting_gpus: 32,
            running: 5,
            gpus: 40,
            quotas: BTreeMap::from([("A100".into(), other), ("H100".into(), quota)]),
            decayed_use: 5_400_000_000,
            time_sharing: Some(TimeSharing::on().into()),
            ..QueueInfo::of(document)
        }
    }

    #[test]
    fn queues_in_their_tree() {
        let research = QueueInfo { state: "held".into(), ..QueueInfo::of(QueueSpec::open("research")) };
        let default = QueueInfo { waiting: 3, running: 12, gpus: 96, ..QueueInfo::of(QueueSpec::open("default")) };
        let text = format!(
            "{}\n{}\n{}",
            queues(&[nlp(), default.clone(), research], view()),
            queue(&nlp(), view()),
            queue(&default, view())
        );
        insta::assert_snapshot!(text);
    }

    #[test]
    fn pools_and_their_domains() {
        let domain = |name: &str, within: Option<&str>| DomainInfo {
            level: if within.is_some() { "leaf" } else { "spine" }.into(),
            name: name.into(),
            within: within.map(str::to_owned),
            nodes: 8,
            gpus: 64,
            free: 20,
            free_nodes: 1,
        };
        let main = PoolInfo {
            name: "main".into(),
            gpu_types: vec!["H100".into()],
            nodes: 16,
            gpus: 128,
            free: 40,
            foreign: 12,
            most_free_on_a_node: 8,
            levels: vec!["leaf".into(), "spine".into()],
            domains: vec![domain("leaf-1", Some("spine-1")), domain("spine-1", None)],
            document: Some(PoolSpec { name: "main".into(), topology: None, time_sharing: None, kubernetes: None }),
        };
        let local = PoolInfo { name: "local".into(), nodes: 2, gpus: 16, free: 16, ..PoolInfo::default() };
        let text = format!(
            "{}\n{}\n{}",
            pools(&[main.clone(), local.clone()], view()),
            pool(&main, view()),
            pool(&local, view())
        );
        insta::assert_snapshot!(text);
    }

    #[test]
    fn the_policy() {
        insta::assert_snapshot!(policy(&from_policy(&Policy::default()), view()));
    }
}
