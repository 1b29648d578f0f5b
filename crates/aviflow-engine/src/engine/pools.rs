//! Pools and the policy, as people set them.

use super::jobs::Whose;
use super::queues::{bad_sharing, sharing_words};
use super::{Answer, Engine, Refusal, Work};
use crate::ports::{ActKind, Store};
use aviflow_core::model::{NODE_LEVEL, NodeId, Policy, Pool, Snapshot};
use std::collections::BTreeSet;

/// Nodes that a warning names.
const NAMED: usize = 5;

impl<S: Store> Engine<S> {
    pub(super) fn apply_pool(&mut self, pool: &Pool, whose: Whose<'_>, work: &mut Work) -> Answer {
        if let Some(why) = nonsense(pool) {
            return Answer::Refused(Refusal::BadDocument { object: format!("pool {}", pool.name), why });
        }
        let before = self.snapshot.pools.get(&pool.name).cloned();
        if before.as_ref() != Some(pool) {
            self.snapshot.pools.insert(pool.name.clone(), pool.clone());
            work.pools.insert(pool.name.clone());
            self.set_paths(&pool.name, work);
            let what = match &before {
                None => format!("described pool {}: {}", pool.name, description(pool)),
                Some(before) => format!("changed pool {}: {}", pool.name, difference(before, pool)),
            };
            self.act(ActKind::Pool, &pool.name, what, whose, work);
        }
        Answer::done(warnings(&self.snapshot, pool))
    }

    pub(super) fn delete_pool(&mut self, name: &str, whose: Whose<'_>, work: &mut Work) -> Answer {
        if self.snapshot.pools.remove(name).is_none() {
            return Answer::Refused(Refusal::NoSuchPool(name.to_owned()));
        }
        work.pools.insert(name.to_owned());
        self.set_paths(name, work);
        self.act(ActKind::Pool, name, format!("took away the description of pool {name}"), whose, work);
        Answer::Done
    }

    /// Puts the nodes of a pool where its document says that they are.
    fn set_paths(&mut self, pool: &str, work: &mut Work) {
        let document = self.snapshot.pools.get(pool).cloned();
        let of_pool = self.snapshot.nodes.values().filter(|n| n.pool == pool);
        let nodes: Vec<(NodeId, Vec<String>)> = of_pool
            .map(|n| (n.id, document.as_ref().map(|d| d.path(&n.name, &n.reported)).unwrap_or_default()))
            .collect();
        for (node, path) in nodes {
            self.change_node(node, |n| n.path = path, work);
        }
    }

    pub(super) fn set_policy(&mut self, policy: &Policy, whose: Whose<'_>, work: &mut Work) -> Answer {
        if let Some(why) = bad_policy(policy) {
            return Answer::Refused(Refusal::BadDocument { object: "the policy".to_owned(), why });
        }
        if self.snapshot.policy != *policy {
            let what = format!("changed the policy: {}", policy_difference(&self.snapshot.policy, policy));
            if self.snapshot.policy.half_life != policy.half_life {
                // What was used decayed by the old half-life until now.
                let old = self.snapshot.policy.half_life;
                for (key, usage) in &mut self.snapshot.usage {
                    *usage = usage.hold(usage.gpus, self.now, old);
                    work.usage.insert(key.clone());
                }
            }
            self.snapshot.policy = policy.clone();
            work.policy = true;
            self.act(ActKind::Policy, "", what, whose, work);
        }
        Answer::Done
    }
}

/// What a pool must not say by itself.
fn nonsense(pool: &Pool) -> Option<String> {
    if pool.name.is_empty() {
        return Some("a pool needs a name".to_owned());
    }
    if pool.levels.iter().any(|l| l.is_empty() || l == NODE_LEVEL) {
        return Some(format!("a level has no name, or that of the node; `{NODE_LEVEL}` is there without being named"));
    }
    if pool.levels.iter().collect::<BTreeSet<_>>().len() < pool.levels.len() {
        return Some("two levels have one name; give each its own".to_owned());
    }
    let bad = |path: &Vec<String>| path.len() != pool.levels.len() || path.iter().any(String::is_empty);
    if let Some((node, path)) = pool.domains.iter().find(|(_, path)| bad(path)) {
        let (has, levels) = (path.len(), pool.levels.len());
        return Some(format!("node {node} has {has} domains for {levels} levels; name one for each, smallest first"));
    }
    pool.time_sharing.as_ref().and_then(bad_sharing)
}

fn bad_policy(policy: &Policy) -> Option<String> {
    if policy.half_life.0 <= 0 {
        return Some("the half-life is not positive; a week is usual".to_owned());
    }
    let spans = [("minimum run", policy.minimum_run), ("patience", policy.patience), ("restart", policy.restart)];
    let (name, _) = spans.into_iter().find(|(_, span)| span.0 < 0)?;
    Some(format!("the {name} is negative; say 0 for none"))
}

fn warnings(snapshot: &Snapshot, pool: &Pool) -> Vec<String> {
    let mut out = Vec::new();
    let here: BTreeSet<&str> =
        snapshot.nodes.values().filter(|n| n.pool == pool.name).map(|n| n.name.as_str()).collect();
    let some = |names: Vec<&str>| {
        let more = names.len().saturating_sub(NAMED);
        let list = names.into_iter().take(NAMED).collect::<Vec<_>>().join(", ");
        if more == 0 { list } else { format!("{list} and {more} more") }
    };
    let unknown: Vec<&str> = pool.domains.keys().map(String::as_str).filter(|n| !here.contains(n)).collect();
    if !unknown.is_empty() && !here.is_empty() {
        out.push(format!("not in the pool, or not yet: {}", some(unknown)));
    }
    let unlisted: Vec<&str> = here.into_iter().filter(|n| !pool.domains.contains_key(*n)).collect();
    if !unlisted.is_empty() && !pool.levels.is_empty() {
        out.push(format!("no domain is named for {}; each counts as far from every other node", some(unlisted)));
    }
    let mut lost: BTreeSet<&str> = BTreeSet::new();
    for id in &snapshot.waiting {
        let Some(level) = snapshot.jobs.get(id).and_then(|j| j.request.topology.require.as_deref()) else { continue };
        if level != NODE_LEVEL && !snapshot.pools.values().any(|p| p.levels.iter().any(|l| l == level)) {
            lost.insert(level);
        }
    }
    for level in lost {
        out.push(format!("jobs that wait require one {level}, and no pool has such a level: they can never start"));
    }
    out
}

fn levels(pool: &Pool) -> String {
    if pool.levels.is_empty() { "no levels".to_owned() } else { format!("levels {}", pool.levels.join(", ")) }
}

fn description(pool: &Pool) -> String {
    let sharing = pool.time_sharing.map(|s| format!(", time sharing {}", sharing_words(Some(s)))).unwrap_or_default();
    format!("{}, domains of {} nodes{sharing}", levels(pool), pool.domains.len())
}

fn difference(before: &Pool, after: &Pool) -> String {
    let mut out = Vec::new();
    if before.levels != after.levels {
        out.push(format!("{} → {}", levels(before), levels(after)));
    }
    let names: BTreeSet<&String> = before.domains.keys().chain(after.domains.keys()).collect();
    match names.into_iter().filter(|n| before.domains.get(*n) != after.domains.get(*n)).count() {
        0 => {}
        1 => out.push("1 node has other domains".to_owned()),
        n => out.push(format!("{n} nodes have other domains")),
    }
    if before.time_sharing != after.time_sharing {
        let (a, b) = (sharing_words(before.time_sharing), sharing_words(after.time_sharing));
        out.push(format!("time sharing {a} → {b}"));
    }
    out.join(", ")
}

fn policy_difference(before: &Policy, after: &Policy) -> String {
    let mut out = Vec::new();
    let mut note = |what: &str, a: String, b: String| {
        if a != b {
            out.push(format!("{what} {a} → {b}"));
        }
    };
    let on = |on: bool| if on { "on" } else { "off" }.to_owned();
    note("half-life", before.half_life.to_string(), after.half_life.to_string());
    note("reservations", before.reservations.to_string(), after.reservations.to_string());
    note("preemption", on(before.preemption), on(after.preemption));
    note("minimum run", before.minimum_run.to_string(), after.minimum_run.to_string());
    note("patience", before.patience.to_string(), after.patience.to_string());
    note("restart", before.restart.to_string(), after.restart.to_string());
    out.join(", ")
}
