//! Between an object and the document in it.

use crate::names;
use aviflow_api::admin::{AdminDocument, PoolSpec, from_pool, from_queue, parse_admin, to_pool, to_queue};
use aviflow_api::file::Priorities;
use aviflow_core::model::{Pool, Queue};
use kube::core::{ApiResource, DynamicObject, GroupVersionKind};
use serde_json::{Value, json};

/// The kinds that are documents of administrators.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// A node of the quota tree.
    Queue,
    /// Nodes with their topology.
    Pool,
}

impl Kind {
    /// As it stands in documents.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Kind::Queue => "Queue",
            Kind::Pool => "Pool",
        }
    }

    /// Where its objects are.
    #[must_use]
    pub fn resource(self) -> ApiResource {
        let plural = match self {
            Kind::Queue => "queues",
            Kind::Pool => "pools",
        };
        ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(names::GROUP, names::VERSION, self.name()), plural)
    }
}

/// What decisions need of a document. A pool's part for Kubernetes is not in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Document {
    /// A queue.
    Queue(Queue),
    /// A pool.
    Pool(Pool),
}

/// What an object says, read by the rules of files.
///
/// # Errors
/// Everything that is wrong with it, in a sentence.
pub fn document(kind: Kind, object: &DynamicObject, priorities: &Priorities) -> Result<Document, String> {
    let mut flat = object.data.get("spec").cloned().unwrap_or_else(|| json!({}));
    if let Some(flat) = flat.as_object_mut() {
        flat.insert("kind".to_owned(), json!(kind.name()));
        flat.insert("name".to_owned(), json!(object.metadata.name));
    }
    let file = parse_admin("object", flat.to_string().as_bytes(), priorities).map_err(|(_, problems)| {
        let line = |d: &aviflow_api::diagnostic::Diagnostic| {
            let help = d.help.as_ref().map_or(String::new(), |help| format!(" ({help})"));
            let field = if d.field.is_empty() { "spec".to_owned() } else { format!("spec.{}", d.field) };
            format!("`{field}`: {}{help}", d.message)
        };
        problems.iter().filter(|d| d.is_error()).map(line).collect::<Vec<_>>().join("; ")
    })?;
    match file.documents.into_iter().next().map(|d| d.document) {
        Some(AdminDocument::Queue(queue)) => Ok(Document::Queue(to_queue(&queue, priorities))),
        Some(AdminDocument::Pool(pool)) => Ok(Document::Pool(to_pool(&pool))),
        Some(AdminDocument::Policy(_)) | None => Err("it says neither a queue nor a pool".to_owned()),
    }
}

/// The spec that says a document. What decisions do not need stays as it was.
#[must_use]
pub fn spec(document: &Document, before: &Value, priorities: &Priorities) -> Value {
    match document {
        Document::Queue(queue) => nameless(&from_queue(queue, queue.team.as_deref(), priorities)),
        Document::Pool(pool) => {
            let mut spec = nameless(&from_pool(pool));
            if let Some(part) = before.get("kubernetes") {
                spec["kubernetes"] = part.clone();
            }
            spec
        }
    }
}

/// A document without its name, which is the object's.
pub(super) fn nameless(document: &impl serde::Serialize) -> Value {
    let mut spec = serde_json::to_value(document).unwrap_or_default();
    if let Some(spec) = spec.as_object_mut() {
        spec.remove("name");
    }
    spec
}

/// An object of a pool, as its document says.
pub(super) fn pool_object(pool: &PoolSpec) -> DynamicObject {
    let mut object = DynamicObject::new(&pool.name, &Kind::Pool.resource());
    object.metadata.finalizers = Some(vec![names::DOCUMENT_FINALIZER.to_owned()]);
    object.data = json!({"spec": nameless(pool)});
    object
}

/// Who wrote an object's spec last: the name of his program, as he says it.
#[must_use]
pub fn writer(object: &DynamicObject) -> String {
    let entries = object.metadata.managed_fields.iter().flatten();
    let wrote = |e: &&k8s_openapi::apimachinery::pkg::apis::meta::v1::ManagedFieldsEntry| {
        let spec = e.fields_v1.as_ref().is_some_and(|fields| fields.0.get("f:spec").is_some());
        spec && e.subresource.as_deref().unwrap_or_default().is_empty()
    };
    let last = entries.filter(wrote).max_by(|a, b| a.time.cmp(&b.time));
    last.and_then(|e| e.manager.clone()).unwrap_or_else(|| "kubectl".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(kind: Kind, spec: Value) -> DynamicObject {
        let mut object = DynamicObject::new("nlp", &kind.resource());
        object.data = json!({"spec": spec});
        object
    }

    #[test]
    fn an_object_says_what_its_file_says() {
        let priorities = Priorities::default();
        let queue = object(Kind::Queue, json!({"parent": "research", "quotas": {"H100": {"guarantee": 32}}}));
        let Ok(Document::Queue(read)) = document(Kind::Queue, &queue, &priorities) else { panic!("a queue") };
        assert_eq!((read.name.as_str(), read.parent.as_deref()), ("nlp", Some("research")));
        assert_eq!((read.quotas["H100"].guarantee, read.quotas["H100"].weight), (32, 1));
        let pool = object(
            Kind::Pool,
            json!({
                "topology": {"levels": ["leaf"], "domains": {"leaf-1": "node-[1-2]"}},
                "kubernetes": {"nodeSelector": {"a": "b"}},
            }),
        );
        let Ok(Document::Pool(read)) = document(Kind::Pool, &pool, &priorities) else { panic!("a pool") };
        assert_eq!(read.domains["node-2"], ["leaf-1"]);
        let bad = object(Kind::Queue, json!({"quotas": {"H100": {"guarantee": 3, "limit": 2}}, "colour": "red"}));
        let Err(why) = document(Kind::Queue, &bad, &priorities) else { panic!("no queue") };
        assert!(why.contains("`spec.colour`") && why.contains("below the guarantee"), "{why}");
    }

    #[test]
    fn what_is_written_is_read_again() {
        let priorities = Priorities::default();
        let before = json!({
            "parent": "research", "state": "held", "quotas": {"H100": {"guarantee": 8, "limit": 16, "weight": 2}},
            "highestPriority": "high", "submitters": ["ann"], "timeSharing": {"enabled": false},
        });
        let read = document(Kind::Queue, &object(Kind::Queue, before.clone()), &priorities).expect("a queue");
        let written = object(Kind::Queue, spec(&read, &before, &priorities));
        assert_eq!(document(Kind::Queue, &written, &priorities), Ok(read));
        let before = json!({"topology": {"levels": ["leaf"]}, "kubernetes": {"topologyKeys": ["example.com/leaf"]}});
        let read = document(Kind::Pool, &object(Kind::Pool, before.clone()), &priorities).expect("a pool");
        let written = spec(&read, &before, &priorities);
        assert_eq!(written["kubernetes"], before["kubernetes"], "what decisions do not need stays");
        assert_eq!(document(Kind::Pool, &object(Kind::Pool, written), &priorities), Ok(read));
    }

    #[test]
    fn the_last_writer_of_the_spec_is_named() {
        let entry = |manager: &str, time: &str, fields: Value, subresource: &str| {
            json!({"manager": manager, "operation": "Update", "apiVersion": "aviflow.dev/v1alpha1", "time": time,
                "fieldsType": "FieldsV1", "fieldsV1": fields, "subresource": subresource})
        };
        let mut queue = object(Kind::Queue, json!({}));
        assert_eq!(writer(&queue), "kubectl");
        let entries = json!([
            entry("kubectl-edit", "2026-03-01T10:00:00Z", json!({"f:spec": {"f:state": {}}}), ""),
            entry("argocd", "2026-03-01T11:00:00Z", json!({"f:spec": {"f:quotas": {}}}), ""),
            entry("aviflow", "2026-03-01T12:00:00Z", json!({"f:metadata": {}}), ""),
            entry("aviflow", "2026-03-01T12:00:00Z", json!({"f:status": {}}), "status"),
        ]);
        queue.metadata.managed_fields = serde_json::from_value(entries).expect("entries");
        assert_eq!(writer(&queue), "argocd");
    }
}
