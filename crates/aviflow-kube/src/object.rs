//! The TrainingJob object: the intent of a job, and a mirror of its state.

use crate::names;
use crate::profile::Profile;
use aviflow_api::admin::kubernetes::KubernetesSpec;
use aviflow_api::spec::{JobSpec, Provenance};
use aviflow_engine::ports::JobRecord;
use kube::core::{ApiResource, DynamicObject, GroupVersionKind};
use serde_json::{Map, Value, json};

/// Where TrainingJobs are.
#[must_use]
pub fn resource() -> ApiResource {
    let kind = GroupVersionKind::gvk(names::GROUP, names::VERSION, "TrainingJob");
    ApiResource::from_gvk_with_plural(&kind, "trainingjobs")
}

/// Where Pools are.
#[must_use]
pub fn pools() -> ApiResource {
    ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(names::GROUP, names::VERSION, "Pool"), "pools")
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

/// The document of an object.
///
/// # Errors
/// With what is wrong, where the schema could not say it.
pub fn document(object: &DynamicObject) -> Result<(JobSpec, Provenance), String> {
    let name = object.metadata.name.clone().unwrap_or_default();
    let mut spec = match object.data.get("spec") {
        Some(Value::Object(spec)) => spec.clone(),
        _ => return Err("the object has no spec".to_owned()),
    };
    let provenance = match spec.remove("provenance") {
        Some(provenance) => {
            serde_json::from_value(provenance).map_err(|e| format!("spec.provenance: {e}; leave it out"))?
        }
        None => Provenance::default(),
    };
    spec.insert("name".to_owned(), json!(name));
    let spec: JobSpec = serde_json::from_value(Value::Object(spec)).map_err(|e| format!("spec: {e}"))?;
    Ok((spec, provenance))
}

/// The object of a job that came through the API.
#[must_use]
pub fn of_job(record: &JobRecord) -> DynamicObject {
    let mut spec = json!(record.spec);
    if let Some(fields) = spec.as_object_mut() {
        fields.remove("name");
        fields.insert("provenance".to_owned(), json!(record.provenance));
    }
    let mut object = DynamicObject::new(&record.key.name, &resource()).within(&record.key.namespace);
    object.metadata.annotations = Some(
        [(names::FOR_JOB.to_owned(), record.id.0.to_string()), (names::SUBMITTER.to_owned(), record.user.clone())]
            .into(),
    );
    object.metadata.finalizers = Some(vec![names::FINALIZER.to_owned()]);
    object.data = json!({"spec": spec});
    object
}

/// The number of the job that an object was made for, if it was.
#[must_use]
pub fn made_for(object: &DynamicObject) -> Option<u64> {
    object.metadata.annotations.as_ref()?.get(names::FOR_JOB)?.parse().ok()
}

/// Who submitted an object, as stamped at admission.
#[must_use]
pub fn submitter(object: &DynamicObject) -> Option<&str> {
    object.metadata.annotations.as_ref()?.get(names::SUBMITTER).map(String::as_str)
}

/// A condition in the standard form.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Condition {
    /// Its type.
    pub kind: &'static str,
    /// Whether it holds.
    pub holds: bool,
    /// One word for why.
    pub reason: String,
    /// A sentence.
    pub message: String,
}

/// Puts conditions into a status: one that holds as before keeps the time since when.
pub fn put_conditions(status: &mut Map<String, Value>, before: Option<&Value>, conditions: &[Condition], now: &str) {
    let old = before.and_then(|s| s.get("conditions")).and_then(Value::as_array).cloned().unwrap_or_default();
    let list = conditions.iter().map(|c| {
        let was = old.iter().find(|o| o["type"] == c.kind);
        let holds = if c.holds { "True" } else { "False" };
        let since = was.filter(|o| o["status"] == holds).and_then(|o| o["lastTransitionTime"].as_str()).unwrap_or(now);
        json!({
            "type": c.kind,
            "status": holds,
            "reason": c.reason,
            "message": c.message,
            "lastTransitionTime": since,
        })
    });
    status.insert("conditions".to_owned(), list.collect());
}
