//! From the documents to what the core decides by, and back.

use super::ranges::{compress, expand};
use super::spec::{Domain, PolicySpec, PoolSpec, QueueDefaults, QueueSpec, QuotaSpec, TopologySpec};
use crate::duration::Duration;
use crate::file::Priorities;
use aviflow_core::model::{self as core, Policy, Pool, Queue, Quota};
use std::collections::BTreeMap;

/// The queue that a document declares. A highest priority that is not defined any more is none.
#[must_use]
pub fn to_queue(spec: &QueueSpec, priorities: &Priorities) -> Queue {
    let quota = |q: &QuotaSpec| Quota { guarantee: q.guarantee, limit: q.limit, weight: q.weight };
    Queue {
        name: spec.name.clone(),
        parent: spec.parent.clone(),
        team: spec.team.clone(),
        state: spec.state.into(),
        quotas: spec.quotas.iter().map(|(gpu_type, q)| (gpu_type.clone(), quota(q))).collect(),
        lend: spec.lend,
        borrow: spec.borrow,
        reclaim: spec.reclaim,
        defaults: core::QueueDefaults {
            time_limit: spec.defaults.time_limit.map(|d| d.0),
            priority: spec.defaults.priority.clone(),
            preemptible: spec.defaults.preemptible,
        },
        highest_priority: spec.highest_priority.as_ref().and_then(|name| priorities.get(name)),
        submitters: spec.submitters.iter().cloned().collect(),
        time_sharing: spec.time_sharing.map(Into::into),
    }
}

/// The document of a queue. Its team is not part of what decisions need, and is given beside it.
#[must_use]
pub fn from_queue(queue: &Queue, team: Option<&str>, priorities: &Priorities) -> QueueSpec {
    let quota = |q: &Quota| QuotaSpec { guarantee: q.guarantee, limit: q.limit, weight: q.weight };
    // A number that has no name any more is the nearest below it.
    let named = |number: i32| {
        let below = priorities.0.iter().filter(|(_, n)| **n <= number);
        below.max_by_key(|(_, n)| **n).map(|(name, _)| name.clone())
    };
    QueueSpec {
        name: queue.name.clone(),
        parent: queue.parent.clone(),
        team: team.map(str::to_owned),
        state: queue.state.into(),
        quotas: queue.quotas.iter().map(|(gpu_type, q)| (gpu_type.clone(), quota(q))).collect(),
        lend: queue.lend,
        borrow: queue.borrow,
        reclaim: queue.reclaim,
        defaults: QueueDefaults::from(&queue.defaults),
        highest_priority: queue.highest_priority.and_then(named),
        submitters: queue.submitters.iter().cloned().collect(),
        time_sharing: queue.time_sharing.map(Into::into),
    }
}

/// The pool that a document declares. [`Pool::path`] has the domains of each node.
#[must_use]
pub fn to_pool(spec: &PoolSpec) -> Pool {
    let topology = spec.topology.as_ref();
    let mut domains = BTreeMap::new();
    for (name, domain) in topology.iter().flat_map(|t| &t.domains) {
        nodes_of(domain, &mut vec![name.clone()], &mut domains);
    }
    Pool {
        name: spec.name.clone(),
        levels: topology.map(|t| t.levels.clone()).unwrap_or_default(),
        time_sharing: spec.time_sharing.map(Into::into),
        domains,
    }
}

/// `above` is from the greatest domain down to this one.
fn nodes_of(domain: &Domain, above: &mut Vec<String>, paths: &mut BTreeMap<String, Vec<String>>) {
    match domain {
        Domain::Nodes(texts) => {
            // What is no range was refused when the document was read.
            let names = texts.iter().flat_map(|text| expand(text).unwrap_or_default());
            paths.extend(names.map(|name| (name, above.iter().rev().cloned().collect())));
        }
        Domain::Domains(inner) => {
            for (name, domain) in inner {
                above.push(name.clone());
                nodes_of(domain, above, paths);
                above.pop();
            }
        }
    }
}

/// The document of a pool. Its part for Kubernetes is not part of what decisions need.
#[must_use]
pub fn from_pool(pool: &Pool) -> PoolSpec {
    let mut leaves: BTreeMap<Vec<&str>, Vec<&str>> = BTreeMap::new();
    for (node, path) in &pool.domains {
        leaves.entry(path.iter().rev().map(String::as_str).collect()).or_default().push(node);
    }
    let mut domains = BTreeMap::new();
    for (path, nodes) in leaves {
        put(&mut domains, &path, compress(nodes));
    }
    let topology = (!pool.levels.is_empty()).then(|| TopologySpec { levels: pool.levels.clone(), domains });
    PoolSpec { name: pool.name.clone(), topology, time_sharing: pool.time_sharing.map(Into::into), kubernetes: None }
}

fn put(domains: &mut BTreeMap<String, Domain>, path: &[&str], nodes: Vec<String>) {
    match path {
        [] => {}
        [last] => {
            domains.insert((*last).to_owned(), Domain::Nodes(nodes));
        }
        [first, rest @ ..] => {
            let inner = domains.entry((*first).to_owned()).or_insert_with(|| Domain::Domains(BTreeMap::new()));
            if let Domain::Domains(inner) = inner {
                put(inner, rest, nodes);
            }
        }
    }
}

/// The policy that a document declares.
#[must_use]
pub fn to_policy(spec: &PolicySpec) -> Policy {
    Policy {
        half_life: spec.half_life.0,
        reservations: spec.reservations,
        preemption: spec.preemption,
        minimum_run: spec.minimum_run.0,
        patience: spec.patience.0,
        restart: spec.restart.0,
    }
}

/// The document of the policy.
#[must_use]
pub fn from_policy(policy: &Policy) -> PolicySpec {
    PolicySpec {
        half_life: Duration(policy.half_life),
        reservations: policy.reservations,
        preemption: policy.preemption,
        minimum_run: Duration(policy.minimum_run),
        patience: Duration(policy.patience),
        restart: Duration(policy.restart),
    }
}
