//! Nodes, environments, the control plane.

use super::View;
use super::drain::window;
use super::job::{Pairs, ranges};
use super::number::{ago, moment};
use super::style::Styled;
use super::table::{Align, Cell, Table};
use aviflow_api::rest::{EnvironmentInfo, NodeInfo, ServerInfo, WindowInfo};
use std::collections::BTreeMap;

fn condition(word: &str) -> Cell {
    let colour = match word {
        "Ready" => "32",
        "Cordoned" | "Closed" => "33",
        _ => "31",
    };
    Cell::coloured(word, colour)
}

/// `aviflow node ls`.
pub fn nodes(nodes: &[NodeInfo], view: View) -> String {
    let mut table = Table::new(&[
        ("node", Align::Left),
        ("condition", Align::Left),
        ("pool", Align::Left),
        ("type", Align::Left),
        ("gpus", Align::Right),
        ("free", Align::Right),
        ("others", Align::Right),
        ("broken", Align::Right),
        ("drain", Align::Left),
        ("closed", Align::Left),
        ("jobs", Align::Left),
    ]);
    for node in nodes {
        let free = node.gpus.iter().filter(|g| g.job.is_none() && g.state == "free").count();
        let others = node.gpus.iter().filter(|g| g.state == "foreign").count();
        let broken = node.gpus.iter().filter(|g| g.unhealthy).count();
        let mut held: BTreeMap<&str, u32> = BTreeMap::new();
        for job in node.gpus.iter().filter_map(|g| g.job.as_deref()) {
            *held.entry(job).or_default() += 1;
        }
        let jobs: Vec<String> = held.iter().map(|(job, n)| format!("{job} ({n})")).collect();
        table.row([
            node.name.as_str().into(),
            condition(&node.condition),
            node.pool.as_str().into(),
            node.gpu_type.as_str().into(),
            node.gpus.len().to_string().into(),
            free.to_string().into(),
            if others == 0 { "".into() } else { others.to_string().into() },
            if broken == 0 { "".into() } else { Cell::coloured(broken.to_string(), "31") },
            node.drain.as_ref().map_or(String::new(), |w| drain(w, view.now)).into(),
            node.closed.clone().unwrap_or_default().into(),
            jobs.join(", ").into(),
        ]);
    }
    table.render(view.width, view.style)
}

/// `from 22:00 UTC`, or `until 23:00 UTC` of a drain that has begun.
fn drain(w: &WindowInfo, now: i64) -> String {
    match w.until {
        _ if w.from > now => format!("from {}", moment(w.from, now)),
        Some(until) => format!("until {}", moment(until, now)),
        None => "now".to_owned(),
    }
}

/// `aviflow node show`.
pub fn node(node: &NodeInfo, view: View) -> String {
    let mut out = format!("{}  {}\n", node.name.style(view.style, "1"), node.condition);
    let mut pairs = Pairs::default();
    pairs.put("pool", node.pool.clone());
    pairs.put("GPUs", format!("{} of type {}", node.gpus.len(), node.gpu_type));
    let domains: Vec<String> = node.domains.iter().map(|(level, name)| format!("{level} {name}")).collect();
    pairs.put("within", domains.join(", "));
    let others = node.gpus.iter().filter(|g| g.state == "foreign").count();
    pairs.put("others", if others == 0 { String::new() } else { format!("use {others} of them") });
    let closed = node.closed.as_ref().map(|why| format!("to new work, by the cluster: {why}; what runs goes on"));
    pairs.put("closed", closed.unwrap_or_default());
    let slots = || node.quarantined.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
    let kept = node
        .quarantine
        .as_ref()
        .map(|why| format!("GPU {} since they failed ({why}); `aviflow node check {}` ends it", slots(), node.name));
    pairs.put("quarantine", kept.unwrap_or_default());
    pairs.put("drain", node.drain.as_ref().map_or(String::new(), |w| window(w, view.now)));
    out.push_str(&pairs.render(view));
    out.push('\n');
    let mut table = Table::new(&[
        ("gpu", Align::Left),
        ("state", Align::Left),
        ("since", Align::Right),
        ("job", Align::Left),
        ("user", Align::Left),
        ("health", Align::Left),
    ]);
    // Neighbours in the same state are one line.
    let mut i = 0;
    while let Some(first) = node.gpus.get(i) {
        let alike = node.gpus[i..].iter().take_while(|g| {
            (&g.state, &g.job, g.since, g.unhealthy) == (&first.state, &first.job, first.since, first.unhealthy)
        });
        let slots: Vec<u32> = alike.map(|g| g.slot).collect();
        i += slots.len();
        table.row([
            ranges(&slots).into(),
            first.state.as_str().into(),
            ago(first.since, view.now).into(),
            first.job.clone().unwrap_or_default().into(),
            first.user.clone().unwrap_or_default().into(),
            if first.unhealthy { Cell::coloured("broken", "31") } else { "".into() },
        ]);
    }
    out.push_str(&table.render(view.width, view.style));
    out
}

/// `aviflow env ls`.
pub fn environments(environments: &[EnvironmentInfo], view: View) -> String {
    let mut table = Table::new(&[
        ("environment", Align::Left),
        ("ready", Align::Left),
        ("python", Align::Left),
        ("description", Align::Left),
        ("deprecated", Align::Left),
    ]);
    for e in environments {
        table.row([
            format!("{}@{}", e.name, e.version).into(),
            if e.ready { Cell::coloured("yes", "32") } else { "on first use".into() },
            e.python.as_str().into(),
            e.description.as_str().into(),
            e.deprecated.as_deref().map_or_else(|| "".into(), |why| Cell::coloured(why, "33")),
        ]);
    }
    table.render(view.width, view.style)
}

/// `aviflow env show`.
pub fn environment(e: &EnvironmentInfo, view: View) -> String {
    let mut out = format!("{}\n", format!("{}@{}", e.name, e.version).style(view.style, "1"));
    let mut pairs = Pairs::default();
    pairs.put("for", e.description.clone());
    pairs.put("deprecated", e.deprecated.clone().unwrap_or_default());
    pairs.put("python", e.python.clone());
    pairs.put("image", e.image.clone().unwrap_or_default());
    pairs.put("launcher", e.prefix.join(" "));
    pairs.put("hash", e.hash.clone());
    pairs.put("ready", if e.ready { "yes" } else { "built on first use" });
    let env: Vec<String> = e.env.iter().map(|(k, v)| format!("{k}={v}")).collect();
    pairs.put("variables", env.join("\n"));
    let packages: Vec<&str> = e.lock.as_deref().unwrap_or_default().lines().filter_map(package).collect();
    pairs.put("packages", packages.join("\n"));
    out.push_str(&pairs.render(view));
    out
}

/// `numpy==2.4.6` of a line of a lock that begins a requirement.
fn package(line: &str) -> Option<&str> {
    let begins = line.starts_with(|c: char| c.is_ascii_alphanumeric());
    begins.then(|| line.split([' ', ';', '\\']).next()).flatten().filter(|p| p.contains("=="))
}

/// `aviflow server status`.
pub fn server(info: &ServerInfo, url: &str, view: View) -> String {
    let mut pairs = Pairs::default();
    pairs.put("version", info.version.clone());
    pairs.put("address", url);
    pairs.put("body", info.body.clone());
    pairs.put("process", format!("{}, started {}", info.pid, ago(info.started, view.now)));
    pairs.put("home", info.home.clone());
    pairs.put("pool", format!("{} nodes, {} GPUs", info.nodes, info.gpus));
    let jobs: Vec<String> =
        info.jobs.iter().filter(|(_, n)| **n > 0).map(|(phase, n)| format!("{n} {phase}")).collect();
    pairs.put("jobs", if jobs.is_empty() { "none".to_owned() } else { jobs.join(", ") });
    let paused = info.paused.as_ref().map(|by| format!("all starts, by {by}; `aviflow unpause` ends this"));
    pairs.put("paused", paused.unwrap_or_default());
    pairs.put("store", format!("term {}, commit {}", info.term, info.generation));
    format!("{}\n{}", "the control plane runs".style(view.style, "32"), pairs.render(view))
}

#[cfg(test)]
mod tests {
    use super::super::samples::{NOW, view};
    use super::*;
    use aviflow_api::rest::GpuInfo;

    fn sample_node() -> NodeInfo {
        let gpu = |slot: u32| {
            let held = slot < 3;
            GpuInfo {
                slot,
                state: if held { "productive" } else { "free" }.into(),
                job: held.then(|| "tiny-gpt".to_owned()),
                user: held.then(|| "ada".to_owned()),
                since: NOW - 60_000,
                unhealthy: slot == 7,
            }
        };
        NodeInfo {
            name: "local-0".into(),
            pool: "local".into(),
            gpu_type: "virtual".into(),
            condition: "Ready".into(),
            domains: BTreeMap::new(),
            drain: None,
            closed: None,
            quarantine: None,
            quarantined: Vec::new(),
            gpus: (0..8).map(gpu).collect(),
        }
    }

    #[test]
    fn nodes_and_their_gpus() {
        let mut drained = sample_node();
        drained.name = "local-1".into();
        drained.condition = "Cordoned".into();
        drained.domains = BTreeMap::from([("leaf".into(), "leaf-1".into()), ("spine".into(), "spine-1".into())]);
        drained.drain = Some(WindowInfo {
            from: NOW + 36_000_000,
            until: Some(NOW + 43_200_000),
            by: "ada".into(),
            reason: Some("new switch".into()),
        });
        let mut shared = sample_node();
        (shared.name, shared.condition) = ("local-2".into(), "Closed".into());
        shared.closed = Some("cordoned by kubectl".into());
        shared.gpus.iter_mut().filter(|g| g.slot >= 4).for_each(|g| g.state = "foreign".into());
        let one = sample_node();
        let text = format!(
            "{}\n{}\n{}\n{}",
            nodes(&[one.clone(), drained.clone(), shared.clone()], view()),
            node(&one, view()),
            node(&drained, view()),
            node(&shared, view())
        );
        insta::assert_snapshot!(text);
    }

    #[test]
    fn environments_and_their_packages() {
        let environment = EnvironmentInfo {
            name: "jax-cpu".into(),
            version: 1,
            hash: "ab".repeat(32),
            description: "JAX on processors".into(),
            python: ">=3.11,<3.13".into(),
            env: BTreeMap::from([("JAX_PLATFORMS".into(), "cpu".into())]),
            image: None,
            prefix: Vec::new(),
            deprecated: None,
            lock: Some("# comment\njax==0.10.2 \\\n    --hash=sha256:aa\nnumpy==2.4.6 ; python_version < '3.13' \\\n    --hash=sha256:bb\n".into()),
            ready: false,
        };
        let torch = EnvironmentInfo {
            name: "torch-2.9".into(),
            version: 3,
            description: "PyTorch 2.9".into(),
            python: String::new(),
            image: Some(format!("registry.example/torch@sha256:{}", "cd".repeat(32))),
            prefix: vec!["/opt/entrypoint.sh".into()],
            deprecated: Some("use torch-2.10".into()),
            lock: None,
            ready: true,
            ..environment.clone()
        };
        let text = format!(
            "{}\n{}\n{}",
            environments(&[environment.clone(), torch.clone()], view()),
            super::environment(&environment, view()),
            super::environment(&torch, view())
        );
        insta::assert_snapshot!(text);
    }
}
