//! From documents and requests to what the core decides by, and from what it knows to answers.

use crate::file::Priorities;
use crate::rest::{AfterInfo, ApiError, ClaimInfo, ConstraintInfo, EvictionInfo, JobUpdate, TurnedOutInfo, WindowInfo};
use crate::spec::{Ending, JobSpec, Processes};
use crate::suggest::{nearest, one_of};
use aviflow_core::explain::NodeNames as _;
use aviflow_core::lifecycle::Change;
use aviflow_core::model::{self as core, NodeRange, Request, Topology};
use aviflow_core::schedule::Constraint;
use aviflow_core::time::Span;
use serde_json::Value as Json;

/// Time between SIGTERM and SIGKILL; what Kubernetes gives a pod too.
pub const GRACE: Span = Span::seconds(30);

/// What the job asks for. A priority that is no longer defined counts as 0, so that a job
/// that was accepted never becomes unreadable.
#[must_use]
pub fn to_request(spec: &JobSpec, priorities: &Priorities) -> Request {
    Request {
        queue: spec.queue.clone(),
        priority: priorities.get(&spec.priority).unwrap_or(0),
        nodes: NodeRange { min: spec.nodes.min, max: spec.nodes.max },
        gpus_per_node: spec.gpus_per_node,
        gpu_types: spec.gpu_type.clone(),
        ranks_per_node: match spec.processes {
            Processes::PerNode => 1,
            Processes::PerGpu => spec.gpus_per_node,
        },
        time_limit: spec.time_limit.map(|d| d.0),
        preemptible: spec.preemptible,
        failures_allowed: spec.retry.failures,
        grace: GRACE,
        checkpoint_every: spec.checkpoint.as_ref().and_then(|c| c.every).map(|d| d.0),
        topology: spec.topology.as_ref().map_or_else(Topology::default, |t| Topology {
            require: t.require.clone(),
            prefer: t.prefer.clone(),
            max_wait: t.max_wait.map(|d| d.0),
        }),
        keep_on_failure: spec.keep_on_failure.map(|d| d.0),
    }
}

/// How a job must end, for the core.
#[must_use]
pub fn to_ending(on: Ending) -> core::Ending {
    match on {
        Ending::Succeeded => core::Ending::Succeeded,
        Ending::Failed => core::Ending::Failed,
        Ending::Ended => core::Ending::Ended,
    }
}

/// What is to be changed of a job.
///
/// # Errors
/// If there is no such priority, or nothing is to be changed.
pub fn to_change(update: &JobUpdate, priorities: &Priorities) -> Result<Change, ApiError> {
    let priority = match &update.priority {
        None => None,
        Some(name) => Some(priorities.get(name).ok_or_else(|| {
            let names = priorities.names();
            let help = match nearest(name, names.iter().copied()) {
                Some(near) => format!("write `{near}`"),
                None => format!("write {}", one_of(names.iter().copied())),
            };
            ApiError::new("noSuchPriority", format!("there is no priority `{name}`")).help(help)
        })?),
    };
    let change =
        Change { priority, time_limit: update.time_limit.map(|limit| limit.map(|d| d.0)), queue: update.queue.clone() };
    if change == Change::default() {
        let help = "give a `priority`, a `timeLimit` or a `queue`";
        return Err(ApiError::new("nothingToDo", "nothing is to be changed").help(help));
    }
    Ok(change)
}

/// A job's key as people write it: namespace/name.
#[must_use]
pub fn full_name(key: &core::JobKey) -> String {
    format!("{}/{}", key.namespace, key.name)
}

impl From<&Constraint> for ConstraintInfo {
    /// Whatever its fields are: whole numbers by their names, texts and lists of them likewise.
    fn from(constraint: &Constraint) -> ConstraintInfo {
        let mut info = ConstraintInfo::default();
        let Ok(Json::Object(fields)) = serde_json::to_value(constraint) else { return info };
        for (name, value) in fields {
            match value {
                Json::String(kind) if name == "constraint" => info.kind = kind,
                Json::Number(number) => {
                    info.numbers.insert(name, number.as_i64().unwrap_or(i64::MAX));
                }
                Json::Bool(yes) => {
                    info.numbers.insert(name, i64::from(yes));
                }
                Json::String(text) => {
                    info.names.insert(name, text);
                }
                Json::Array(list) if !list.is_empty() => {
                    let text = |item: &Json| item.as_str().map_or_else(|| item.to_string(), str::to_owned);
                    info.names.insert(name, list.iter().map(text).collect::<Vec<_>>().join(", "));
                }
                Json::Array(_) | Json::Null | Json::Object(_) => {}
            }
        }
        info
    }
}

impl From<&core::Dependency> for AfterInfo {
    fn from(dependency: &core::Dependency) -> AfterInfo {
        let on = match dependency.on {
            core::Ending::Succeeded => "succeeded",
            core::Ending::Failed => "failed",
            core::Ending::Ended => "ended",
        };
        let state = match dependency.met {
            None => "waiting",
            Some(true) => "met",
            Some(false) => "failed",
        };
        AfterInfo { job: dependency.name.clone(), on: on.to_owned(), state: state.to_owned() }
    }
}

impl From<&core::TurnedOut> for TurnedOutInfo {
    fn from(turned_out: &core::TurnedOut) -> TurnedOutInfo {
        TurnedOutInfo {
            beneficiary: turned_out.beneficiary.as_ref().map(full_name),
            cause: turned_out.cause.name().to_owned(),
            at: turned_out.at.0,
        }
    }
}

impl From<&core::Eviction> for EvictionInfo {
    fn from(eviction: &core::Eviction) -> EvictionInfo {
        EvictionInfo {
            beneficiary: eviction.beneficiary.as_ref().map(|b| full_name(&b.key)),
            cause: eviction.cause.name().to_owned(),
            since: eviction.since.0,
            deadline: eviction.deadline.0,
        }
    }
}

impl From<&core::Drain> for WindowInfo {
    fn from(drain: &core::Drain) -> WindowInfo {
        WindowInfo {
            from: drain.from.0,
            until: drain.until.map(|t| t.0),
            by: drain.by.clone(),
            reason: Some(drain.reason.clone()).filter(|reason| !reason.is_empty()),
        }
    }
}

/// GPUs that are promised to a job. Names are those of the snapshot; what left it goes by its number.
#[must_use]
pub fn claim_info(claim: &core::Claim, snapshot: &core::Snapshot) -> ClaimInfo {
    let job = |id: &core::JobId| snapshot.jobs.get(id).map_or_else(|| format!("job {}", id.0), |j| full_name(&j.key));
    ClaimInfo {
        gpus: claim.placement.gpus().count(),
        on: claim.placement.0.iter().map(|(node, _)| snapshot.node_name(*node)).collect(),
        victims: claim.victims.iter().map(|(id, _)| job(id)).collect(),
        cause: claim.cause.name().to_owned(),
        since: claim.since.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aviflow_core::model::{EvictionCause, JobId};
    use aviflow_core::time::Time;
    use std::collections::BTreeMap;

    #[test]
    fn a_constraint_is_its_kind_its_numbers_and_its_names() {
        let info = ConstraintInfo::from(&Constraint::Capacity {
            needs_nodes: 2,
            gpus_per_node: 8,
            gpu_types: vec!["H100".into(), "H200".into()],
            nodes_with_room: 1,
            free_gpus: 11,
            most_free_on_a_node: 8,
            foreign_gpus: 0,
            closed_nodes: 0,
            level: None,
        });
        assert_eq!(info.kind, "capacity");
        assert_eq!(info.numbers["nodesWithRoom"], 1);
        assert_eq!(info.names, BTreeMap::from([("gpuTypes".to_owned(), "H100, H200".to_owned())]));
        let info = ConstraintInfo::from(&Constraint::BackOff { until: Time(5), node: None, refused: None });
        assert_eq!((info.kind.as_str(), info.numbers["until"]), ("backOff", 5));
        let claimed = Constraint::Claimed { victims: vec![JobId(7)], cause: EvictionCause::Reclaim };
        let info = ConstraintInfo::from(&claimed);
        assert_eq!((info.names["victims"].as_str(), info.names["cause"].as_str()), ("7", "reclaim"));
        let on = core::Ending::Succeeded;
        let after = Constraint::After { job: JobId(7), name: "a".into(), on, impossible: true };
        assert_eq!(ConstraintInfo::from(&after).numbers["impossible"], 1);
    }

    #[test]
    fn an_update_says_something() {
        let priorities = Priorities::default();
        let update = JobUpdate { priority: Some("hihg".into()), ..JobUpdate::default() };
        assert_eq!(to_change(&update, &priorities).unwrap_err().help.as_deref(), Some("write `high`"));
        assert_eq!(to_change(&JobUpdate::default(), &priorities).unwrap_err().code, "nothingToDo");
        let update = JobUpdate { time_limit: Some(None), priority: Some("low".into()), ..JobUpdate::default() };
        let change = to_change(&update, &priorities).expect("a change");
        assert_eq!((change.priority, change.time_limit), (Some(-100), Some(None)));
    }
}
