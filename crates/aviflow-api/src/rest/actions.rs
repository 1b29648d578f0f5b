//! What people do, and what is remembered of it.

use crate::admin::{AdminDocument, PolicySpec, PoolSpec, QueueSpec};
use crate::duration::Duration;
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};

/// Why somebody does something, in their own words; kept with what was done.
pub type Reason = Option<String>;

/// What a person does to the whole control plane.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", tag = "action")]
pub enum ServerAction {
    /// No job starts; what runs goes on.
    Pause {
        /// Why.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Reason,
    },
    /// Jobs start again.
    Resume {
        /// Why.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Reason,
    },
}

/// What a person does to a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", tag = "action")]
pub enum JobAction {
    /// End it.
    Cancel,
    /// Send it back to the queue after it has saved itself.
    Suspend {
        /// Why.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Reason,
    },
    /// Let a suspended job start again.
    Resume {
        /// Why.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Reason,
    },
    /// Keep a job that waits from starting.
    Hold {
        /// Why.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Reason,
    },
    /// Let a held job start.
    Release {
        /// Why.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Reason,
    },
    /// Change what may be changed after the submission.
    Update(JobUpdate),
}

/// What of a job may be changed after its submission; the document stays as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct JobUpdate {
    /// The priority, by its name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority: Option<String>,
    /// The time limit; `null` takes it away.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    pub time_limit: Option<Option<Duration>>,
    /// The queue.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue: Option<String>,
    /// Why.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Reason,
}

/// Tells `null` from a field that is not there.
fn present<'de, D: Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<Option<Option<T>>, D::Error> {
    Option::<T>::deserialize(deserializer).map(Some)
}

/// What a person does to a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", tag = "action")]
pub enum NodeAction {
    /// No new work.
    Cordon {
        /// Why.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Reason,
    },
    /// New work again.
    Uncordon {
        /// Why.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Reason,
    },
}

/// A queue as it is to be: the whole document; what it does not say is at its default.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct QueueApply {
    /// The document.
    pub queue: QueueSpec,
    /// Why.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Reason,
}

/// A pool's document as it is to be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PoolApply {
    /// The document.
    pub pool: PoolSpec,
    /// Why.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Reason,
}

/// The policy as it is to be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PolicyApply {
    /// The document.
    pub policy: PolicySpec,
    /// Why.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Reason,
}

/// What a person does to a queue, beside changing its document.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", tag = "action")]
pub enum QueueAction {
    /// It takes and starts jobs.
    Open {
        /// Why.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Reason,
    },
    /// It takes jobs and starts none.
    Hold {
        /// Why.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Reason,
    },
    /// It takes no jobs; those it has may start.
    Drain {
        /// Why.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Reason,
    },
    /// It is no more.
    Delete(QueueDelete),
}

/// How a queue is deleted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct QueueDelete {
    /// What becomes of its jobs that have not ended.
    #[serde(default)]
    pub jobs: QueueJobs,
    /// Why.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Reason,
}

/// What becomes of the jobs of a queue that is deleted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum QueueJobs {
    /// There must be none.
    #[default]
    Refuse,
    /// They go to another queue.
    Move {
        /// Its name.
        to: String,
    },
    /// They stay: what runs goes on; what waits starts nothing until it is moved.
    Leave,
}

/// What a person does to a pool, beside changing its document.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", tag = "action")]
pub enum PoolAction {
    /// Take its document away; its nodes stay.
    Delete {
        /// Why.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Reason,
    },
}

/// What became of a document.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Applied {
    /// `created`, `changed`, `unchanged` or `deleted`.
    pub what: String,
    /// The document as it is now; none where it was deleted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub document: Option<AdminDocument>,
    /// What the person should know of it, a sentence each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// Something that a person changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Act {
    /// Its number; give it as `before` for what is older.
    pub number: u64,
    /// When.
    pub at: i64,
    /// Who.
    pub by: String,
    /// What, as a sentence without a subject.
    pub what: String,
    /// What kind of thing it was done to: `queue`, `pool`, `policy`, `starts`, `node`, `drain` or `job`.
    pub kind: String,
    /// Its name: of a job namespace/name, of a drain its number; none where there is only one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Why, as the person said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Reason,
}

#[cfg(test)]
mod tests {
    use super::*;
    use aviflow_core::time::Span;
    use serde_json::json;

    #[test]
    fn null_is_not_absent() {
        let update = |value| match serde_json::from_value::<JobAction>(value) {
            Ok(JobAction::Update(update)) => update,
            other => panic!("{other:?}"),
        };
        assert_eq!(update(json!({"action": "update"})).time_limit, None);
        assert_eq!(update(json!({"action": "update", "timeLimit": null})).time_limit, Some(None));
        let hour = update(json!({"action": "update", "timeLimit": "1h", "priority": "low", "reason": "x"}));
        assert_eq!(hour.time_limit, Some(Some(Duration(Span::minutes(60)))));
        let value =
            serde_json::to_value(JobAction::Update(JobUpdate { time_limit: Some(None), ..JobUpdate::default() }));
        assert_eq!(value.expect("json"), json!({"action": "update", "timeLimit": null}));
        assert!(serde_json::from_value::<JobAction>(json!({"action": "update", "nodes": 4})).is_err());
    }

    #[test]
    fn actions_need_no_reason() {
        for action in ["cancel", "suspend", "resume", "hold", "release", "update"] {
            assert!(serde_json::from_value::<JobAction>(json!({"action": action})).is_ok(), "{action}");
        }
        let delete: QueueAction = serde_json::from_value(json!({"action": "delete"})).expect("delete");
        assert_eq!(delete, QueueAction::Delete(QueueDelete::default()));
        let text = json!({"action": "delete", "jobs": {"move": {"to": "b"}}, "reason": "merged"});
        let jobs = QueueJobs::Move { to: "b".into() };
        let moved = QueueAction::Delete(QueueDelete { jobs, reason: Some("merged".into()) });
        assert_eq!(serde_json::from_value::<QueueAction>(text).expect("delete"), moved);
    }
}
