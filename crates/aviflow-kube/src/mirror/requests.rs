//! The mirror's requests: each is sent until it is answered, and reads of the answer what is needed.

use super::{Name, status};
use crate::api::{Refused, insist, persist};
use crate::names;
use crate::object;
use crate::pod::Owner;
use aviflow_api::crd::TrainingJobStatus;
use aviflow_api::spec::ObjectRef;
use aviflow_engine::ports::JobRecord;
use kube::api::{Patch, PatchParams, PostParams};
use kube::core::{DynamicObject, Request};
use kube::{Api, Client, Resource as _};
use serde::Deserialize;
use serde_json::json;
use tokio::sync::Semaphore;

/// Puts the finalizer on an object that lacks it; admission has put it there already, as a rule.
pub(super) async fn mark(api: &Api<DynamicObject>, object: &DynamicObject, writes: &Semaphore) -> Result<(), Refused> {
    if object.metadata.finalizers.iter().flatten().any(|f| f == names::FINALIZER) {
        return Ok(());
    }
    let _turn = writes.acquire().await;
    let name = object.metadata.name.as_deref().unwrap_or_default();
    let finalizers = json!({"metadata": {"finalizers": [names::FINALIZER]}});
    let patch = Patch::Merge(&finalizers);
    persist(|| async { api.patch(name, &PatchParams::default(), &patch).await.map(|_| ()) }).await
}

/// A status that is to be written.
pub(super) struct Write {
    pub(super) status: TrainingJobStatus,
    /// The version of an object that gets its first: there is nothing to be merged with, which saves the apiserver the
    /// merging.
    pub(super) first: Option<u64>,
}

/// Writes a status and returns the version that the object has by it. Of the answer only that is read.
///
/// # Errors
/// If the object is gone.
pub(super) async fn write_status(client: &Client, name: &Name, write: &Write) -> Result<u64, Refused> {
    let request = || Request::new(DynamicObject::url_path(&object::resource(), Some(&name.0)));
    if let Some(version) = write.first {
        let metadata = json!({"namespace": name.0, "name": name.1, "resourceVersion": version.to_string()});
        let types = object::resource();
        let whole = json!({
            "apiVersion": types.api_version, "kind": types.kind, "metadata": metadata, "status": write.status,
        });
        let put = request().replace_subresource("status", &name.1, &PostParams::default(), whole.to_string().into());
        // One that is another by now gets what is written over anything.
        if let Ok(version) = send(client, put).await {
            return Ok(version);
        }
    }
    let (how, patch) = (PatchParams::default(), Patch::Merge(status::patch(&write.status)));
    insist(|| send(client, request().patch_subresource("status", &name.1, &how, &patch))).await
}

async fn send(
    client: &Client,
    request: Result<http::Request<Vec<u8>>, kube::core::request::Error>,
) -> kube::Result<u64> {
    #[derive(Deserialize)]
    struct Answer {
        metadata: Metadata,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Metadata {
        resource_version: Option<String>,
    }
    let mut request = request.map_err(kube::Error::BuildRequest)?;
    let small = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1";
    request.headers_mut().insert(http::header::ACCEPT, http::HeaderValue::from_static(small));
    let answer: Answer = client.request(request).await?;
    Ok(version(answer.metadata.resource_version.as_deref()))
}

/// A version as a number, by which one is known to be older.
pub(super) fn version(text: Option<&str>) -> u64 {
    text.and_then(|v| v.parse().ok()).unwrap_or_default()
}

/// The object that owns the pods of a job; made where it is missing.
///
/// # Errors
/// If it cannot be made, with the reason.
pub async fn ensure(client: &Client, record: &JobRecord) -> Result<Owner, String> {
    if let Some(ObjectRef { name, uid }) = &record.provenance.object {
        return Ok(Owner { name: name.clone(), uid: uid.clone() });
    }
    let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), &record.key.namespace, &object::resource());
    let plain = record.key.name.clone();
    for name in [plain.clone(), format!("{plain}-{}", record.id.0)] {
        let wanted = object::of_job(record, &name);
        let made = match persist(|| async { api.create(&PostParams::default(), &wanted).await }).await {
            Err(refused) if refused.is_conflict() => persist(|| async { api.get(&name).await }).await,
            other => other,
        };
        let object = made.map_err(|e| format!("its object {name} could not be made: {}", e.message))?;
        if object::made_for(&object) == Some(record.id.0) {
            let uid = object.metadata.uid.ok_or_else(|| format!("its object {name} has no uid"))?;
            return Ok(Owner { name, uid });
        }
    }
    Err(format!("there are objects {plain} and {plain}-{} of other jobs already; delete one", record.id.0))
}
