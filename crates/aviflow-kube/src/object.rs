//! The TrainingJob object: the intent of a job, and a mirror of its state.

use crate::names;
use crate::profile::Profile;
use aviflow_api::admin::kubernetes::KubernetesSpec;
use aviflow_api::crd::{Condition, ConditionStatus, ConditionType, from_object, to_object};
use aviflow_api::spec::{JobSpec, Provenance};
use aviflow_engine::ports::JobRecord;
use kube::core::{ApiResource, DynamicObject, GroupVersionKind};
use serde_json::json;

/// How the reason of a job begins that somebody cancelled; his name follows.
pub const CANCELLED_BY: &str = "cancelled by ";

/// Where TrainingJobs are.
#[must_use]
pub fn resource() -> ApiResource {
    let kind = GroupVersionKind::gvk(names::GROUP, names::VERSION, "TrainingJob");
    ApiResource::from_gvk_with_plural(&kind, "trainingjobs")
}

/// How a pool appears in the cluster, by its object; none where its document cannot be read.
#[must_use]
pub fn profile(pool: &DynamicObject) -> Option<Profile> {
    let kubernetes = match pool.data.pointer("/spec/kubernetes") {
        Some(part) => serde_json::from_value(part.clone()).ok()?,
        None => KubernetesSpec::default(),
    };
    Some(Profile { pool: pool.metadata.name.clone()?, kubernetes })
}

/// The document of an object, with `queue` where it names none.
///
/// # Errors
/// With what is wrong, where the schema could not say it.
pub fn document(object: &DynamicObject, queue: &str) -> Result<(JobSpec, Provenance), String> {
    let whole = json!({"metadata": {"name": object.metadata.name}, "spec": object.data.get("spec")});
    let (spec, provenance) = from_object(&whole, queue).map_err(|e| e.to_string())?;
    Ok((spec, provenance.unwrap_or_default()))
}

/// The object of a job that came through the API, under a name.
#[must_use]
pub fn of_job(record: &JobRecord, name: &str) -> DynamicObject {
    let whole = to_object(&record.key.namespace, name, &record.spec, &record.provenance);
    let mut object = DynamicObject::new(name, &resource()).within(&record.key.namespace);
    let mut annotations = vec![(names::FOR_JOB, record.id.0.to_string()), (names::SUBMITTER, record.user.clone())];
    if record.spec.name != name {
        annotations.push((names::WORK, record.spec.name.clone()));
    }
    object.metadata.annotations = Some(annotations.into_iter().map(|(key, value)| (key.to_owned(), value)).collect());
    object.metadata.finalizers = Some(vec![names::FINALIZER.to_owned()]);
    object.data = json!({"spec": whole["spec"]});
    object
}

/// The number of the job that an object was made for, if it was.
#[must_use]
pub fn made_for(object: &DynamicObject) -> Option<u64> {
    object.metadata.annotations.as_ref()?.get(names::FOR_JOB)?.parse().ok()
}

/// The name in the document of the job that an object was made for, where the object has another.
#[must_use]
pub fn work(object: &DynamicObject) -> Option<&str> {
    object.metadata.annotations.as_ref()?.get(names::WORK).map(String::as_str)
}

/// Who submitted an object, as stamped at admission.
#[must_use]
pub fn submitter(object: &DynamicObject) -> Option<&str> {
    object.metadata.annotations.as_ref()?.get(names::SUBMITTER).map(String::as_str)
}

/// Conditions as they are now: one that holds as before keeps the time since when.
#[must_use]
pub fn conditions(before: &[Condition], now: Vec<Condition>) -> Vec<Condition> {
    let since = |c: &Condition| before.iter().find(|b| b.kind == c.kind && b.status == c.status);
    let kept = |mut c: Condition| {
        if let Some(before) = since(&c) {
            c.last_transition_time.clone_from(&before.last_transition_time);
        }
        c
    };
    now.into_iter().map(kept).collect()
}

/// A condition that holds, or not, since `now`.
#[must_use]
pub fn condition(kind: ConditionType, holds: bool, reason: &str, message: &str, now: &str) -> Condition {
    Condition {
        kind: format!("{kind:?}"),
        status: if holds { ConditionStatus::True } else { ConditionStatus::False },
        reason: reason.to_owned(),
        message: message.to_owned(),
        last_transition_time: now.to_owned(),
        observed_generation: None,
    }
}
