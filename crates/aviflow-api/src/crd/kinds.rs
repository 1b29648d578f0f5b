//! The four kinds: how each is called, what its schema adds to the description, what `kubectl get` shows.

use super::rules::{add, once, rule};
use super::schema::{field, object, of_type};
use super::status::{EnvironmentStatus, PoolStatus, QueueStatus, TrainingJobStatus};
use super::{GROUP, VERSION};
use crate::admin::QueueSpec;
use crate::admin::fields::{POOL, QUEUE};
use crate::file::fields::{ENVIRONMENT, JOB, field as key};
use crate::file::formats::{self as f, NAME_LIMIT};
use crate::file::shape::Shape::{List, Map, Object as Keys, Text};
use crate::file::shape::{Object, Shape};
use crate::file::{Defaults, parse_job};
use crate::spec::Provenance;
use serde_json::{Value as Json, json};

/// How a kind is called.
struct Names {
    kind: &'static str,
    plural: &'static str,
    singular: &'static str,
    short: &'static [&'static str],
    namespaced: bool,
}

/// A column of `kubectl get`: its name, type, path, and what it says. Wide ones have `-o wide` only.
struct Column(&'static str, &'static str, &'static str, &'static str, bool);

const AGE: Column = Column("Age", "date", ".metadata.creationTimestamp", "How long it has been there.", false);

fn definition(names: &Names, doc: &str, schema: &Json, columns: &[Column]) -> Json {
    let columns: Vec<Json> = columns
        .iter()
        .map(|Column(name, kind, path, doc, wide)| {
            json!({"name": name, "type": kind, "jsonPath": path, "description": doc, "priority": i32::from(*wide)})
        })
        .collect();
    let mut schema = schema.clone();
    // Named so that rules about the name can say where it stands.
    schema["properties"]["metadata"] = json!({"type": "object", "properties": {"name": {"type": "string"}}});
    schema["type"] = json!("object");
    schema["description"] = json!(doc);
    json!({
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": format!("{}.{GROUP}", names.plural),
            // Without its definition every object of a kind is gone: an uninstalled chart leaves it.
            "annotations": {"helm.sh/resource-policy": "keep"},
            "labels": {"app.kubernetes.io/part-of": "aviflow"},
        },
        "spec": {
            "group": GROUP,
            "scope": if names.namespaced { "Namespaced" } else { "Cluster" },
            "names": {
                "kind": names.kind,
                "listKind": format!("{}List", names.kind),
                "plural": names.plural,
                "singular": names.singular,
                "shortNames": names.short,
                "categories": ["aviflow"],
            },
            "versions": [{
                "name": VERSION,
                "served": true,
                "storage": true,
                "subresources": {"status": {}},
                "additionalPrinterColumns": columns,
                "schema": {"openAPIV3Schema": schema},
            }],
        },
    })
}

/// A training.
#[must_use]
pub fn training_job() -> Json {
    let mut spec = object(&JOB, &["name"]);
    spec["description"] = json!(
        "What is trained, as in a job's file, in its canonical form: `nodes: {min, max}`, `run` and `gpuType` as lists. It never changes."
    );
    spec["required"] = json!(["run"]);
    // What a document has that says no more than its name and command; its queue is the configuration's.
    let minimal = parse_job("", b"{name: x, run: [x]}", &Defaults::default()).map(|parsed| parsed.spec);
    let minimal = minimal.ok().and_then(|spec| serde_json::to_value(spec).ok()).unwrap_or_default();
    for (key, value) in
        minimal.as_object().into_iter().flatten().filter(|(key, _)| !["name", "run", "queue"].contains(&key.as_str()))
    {
        spec["properties"][key]["default"] = value.clone();
    }
    let mut code = spec["properties"]["code"].take();
    code["description"] = json!(
        "Where the code comes from: a commit of a git repository, or the snapshot of a folder, which only a submission through Aviflow's API can bring. Without it, the job needs no code."
    );
    code["properties"]["folder"] = json!({
        "type": "string",
        "maxLength": f::FOLDER.most,
        "description": "The folder that was submitted; its content is the snapshot of `spec.provenance.code`.",
    });
    code.as_object_mut().into_iter().for_each(|code| {
        code.remove("required");
    });
    add(
        &mut code,
        vec![rule(
            "has(self.git) && has(self.ref) && !has(self.folder) || has(self.folder) && !has(self.git) && !has(self.ref)",
            "code is a commit of a git repository; write `code: {git: ADDRESS, ref: COMMIT}`",
        )],
    );
    spec["properties"]["code"] = code;
    spec["properties"]["provenance"] = of_type::<Provenance>();
    spec["properties"]["provenance"]["description"] = json!(
        "What was submitted, resolved by content: all that is needed to run the job again. Written by Aviflow's API alone."
    );
    let mut schema = json!({
        "required": ["spec"],
        "properties": {"spec": spec, "status": of_type::<TrainingJobStatus>()},
    });
    let form = f::NAME.pattern.unwrap_or_default();
    add(
        &mut schema,
        vec![
            // A submission that finds its name taken gets a number behind it, which may make it longer.
            rule(
                format!("has(self.spec.provenance) || self.metadata.name.size() <= {NAME_LIMIT}"),
                format!("`«self.metadata.name»` has «self.metadata.name.size()» characters, and {NAME_LIMIT} is the most: numbers are added to it, and Kubernetes allows 63 in all; write a shorter one"),
            )
            .at(".metadata.name"),
            rule(
                format!("self.metadata.name.size() > {NAME_LIMIT} || self.metadata.name.matches('{form}')"),
                "`«self.metadata.name»` is no name of a job: it has lowercase letters, digits and `-`, and begins and ends with a letter or digit; write for example `llama3-8b-sft`",
            )
            .at(".metadata.name"),
            rule(
                "!has(self.spec.after) || !self.spec.after.exists(a, a.job == self.metadata.name)",
                "the job would wait for itself, without end; name the job that must end before",
            )
            .at(".spec.after"),
        ],
    );
    // The admission policy refuses a changed spec.
    once(&mut schema);
    let names = Names {
        kind: "TrainingJob",
        plural: "trainingjobs",
        singular: "trainingjob",
        short: &["tj", "tjob"],
        namespaced: true,
    };
    let columns = [
        Column("Phase", "string", ".status.phase", "Where it is in its life.", false),
        Column("Queue", "string", ".status.queue", "The queue it is in now.", false),
        Column("Nodes", "integer", ".spec.nodes.min", "How many nodes it needs at least.", false),
        Column("GPUs/Node", "integer", ".spec.gpusPerNode", "GPUs on each node.", false),
        Column("Attempt", "integer", ".status.attempt", "How many attempts have begun.", false),
        Column("Reason", "string", ".status.reason", "Why it waits, or how it ended.", false),
        AGE,
        Column("User", "string", ".status.submittedBy", "Who submitted it.", true),
        Column("On", "string", ".status.on", "The nodes that it holds.", true),
        Column("Job", "string", ".status.jobName", "Its name in Aviflow, where it is another.", true),
    ];
    definition(&names, "A training: one gang of workers that start, restart and stop together.", &schema, &columns)
}

/// A node of the quota tree.
#[must_use]
pub fn queue() -> Json {
    let mut spec = object(&QUEUE, &["kind", "name"]);
    spec["description"] = json!("What the queue has and who may use it, as in an administrator's file.");
    spec["default"] = json!({});
    let open = serde_json::to_value(QueueSpec::open("")).unwrap_or_default();
    for (key, value) in open.as_object().into_iter().flatten().filter(|(key, _)| *key != "name") {
        spec["properties"][key]["default"] = value.clone();
    }
    let mut schema = json!({"properties": {"spec": spec, "status": of_type::<QueueStatus>()}});
    add(
        &mut schema,
        vec![
            label("queue"),
            rule(
                "!has(self.spec.parent) || self.spec.parent != self.metadata.name",
                "a queue cannot be its own parent; name the queue above it, or remove the line for a root",
            )
            .at(".spec.parent"),
        ],
    );
    let names = Names { kind: "Queue", plural: "queues", singular: "queue", short: &["avq"], namespaced: false };
    let columns = [
        Column("Parent", "string", ".spec.parent", "The queue above it.", false),
        Column("State", "string", ".spec.state", "Whether it takes and starts jobs.", false),
        Column("Waiting", "integer", ".status.waiting", "Jobs that wait in it.", false),
        Column("Running", "integer", ".status.running", "Jobs in it that hold GPUs.", false),
        Column("GPUs", "string", ".status.summary", "GPUs in use, of those guaranteed, by type.", false),
        AGE,
        Column("Team", "string", ".spec.team", "The team it belongs to.", true),
    ];
    definition(
        &names,
        "A node of the quota tree: what a team's jobs may count on, and how much they may use.",
        &schema,
        &columns,
    )
}

/// Nodes of one kind.
#[must_use]
pub fn pool() -> Json {
    let mut spec = object(&POOL, &["kind", "name"]);
    spec["description"] = json!("Which nodes the pool has, how they are joined, and what pods get there.");
    spec["default"] = json!({});
    let mut schema = json!({"properties": {"spec": spec, "status": of_type::<PoolStatus>()}});
    add(&mut schema, vec![label("pool")]);
    let names = Names { kind: "Pool", plural: "pools", singular: "pool", short: &["avp"], namespaced: false };
    let columns = [
        Column("Nodes", "integer", ".status.nodes", "Nodes that it has.", false),
        Column("GPUs", "integer", ".status.gpus", "GPUs that it has.", false),
        Column("Free", "integer", ".status.free", "GPUs that nobody holds.", false),
        Column("Levels", "string", ".spec.topology.levels", "The levels of its topology.", false),
        AGE,
    ];
    definition(&names, "Nodes of one kind with their topology, and what pods get there.", &schema, &columns)
}

fn label(what: &str) -> super::rules::Rule {
    rule(
        format!("self.metadata.name.matches('{}')", f::QUEUE.pattern.unwrap_or_default()),
        format!("`«self.metadata.name»` is no name of a {what}; write lowercase letters, digits and `-`, at most 63"),
    )
    .at(".metadata.name")
}

/// What an environment is on Kubernetes: an image, where a machine of its own has a lock.
static IN_CLUSTER: Object = Object {
    what: "an environment of a cluster",
    fields: &[
        key("image", Text(&f::PINNED_IMAGE), "The container image by its digest.").required(),
        key("env", VARIABLES, "Default variables; what a job declares wins.").eg(&["{\"PYTHONUNBUFFERED\": \"1\"}"]),
        key("launcher", Keys(&LAUNCHER), "How a job's command is started in the image."),
        key("deprecated", Text(&f::ANY), "That it is not to be used any more, and what instead. A name without a version then means an older one that is not deprecated; who names this version is warned.")
            .eg(&["\"use torch-2.10\""]),
    ],
    synonyms: &[],
};

const VARIABLES: Shape = Map(&f::VARIABLE, &Text(&f::FREE));

static LAUNCHER: Object = Object {
    what: "a launcher",
    fields: &[key("prefix", List(&Text(&f::FREE), 0), "Words before `run`. The agent stands in the place of the image's ENTRYPOINT; an image that needs its own has it here.").most(32)],
    synonyms: &[],
};

/// A place to run in.
#[must_use]
pub fn environment() -> Json {
    let mut spec = object(&IN_CLUSTER, &[]);
    spec["description"] = json!(
        "The content. It never changes, apart from `description`, `owner` and `deprecated`; a change is the next version."
    );
    for shared in ENVIRONMENT.fields.iter().filter(|f| matches!(f.key, "name" | "version" | "description" | "owner")) {
        spec["properties"][shared.key] = field(shared);
    }
    spec["properties"]["name"]["description"] = json!("The name, by which jobs ask for it.");
    spec["required"] = json!(["name", "version", "image"]);
    let same = |key: &str| {
        format!("has(self.{key}) == has(oldSelf.{key}) && (!has(self.{key}) || self.{key} == oldSelf.{key})")
    };
    for key in ["image", "env", "launcher"] {
        let what = format!(
            "what an environment contains never changes; create version «oldSelf.version + 1» with another `{key}`"
        );
        add(&mut spec, vec![rule(same(key), what)]);
    }
    let mut schema = json!({
        "required": ["spec"],
        "properties": {"spec": spec, "status": of_type::<EnvironmentStatus>()},
    });
    add(
        &mut schema,
        vec![rule(
            "self.metadata.name == '%s-%d'.format([self.spec.name, self.spec.version])",
            "the environment's name and version are `«self.spec.name»` and «self.spec.version», and the object is called `«self.metadata.name»`; write `«self.spec.name»-«self.spec.version»`",
        )
        .at(".metadata.name")],
    );
    let names = Names {
        kind: "Environment",
        plural: "environments",
        singular: "environment",
        short: &["avenv"],
        namespaced: false,
    };
    let columns = [
        Column("Environment", "string", ".spec.name", "The name, by which jobs ask for it.", false),
        Column("Version", "integer", ".spec.version", "The version.", false),
        Column("Description", "string", ".spec.description", "What it is for.", false),
        Column(
            "Deprecated",
            "string",
            ".spec.deprecated",
            "What to use instead, where it is not to be used any more.",
            false,
        ),
        AGE,
        Column("Image", "string", ".spec.image", "The container image.", true),
    ];
    definition(
        &names,
        "A named, numbered, unchangeable place to run in: an image with its defaults.",
        &schema,
        &columns,
    )
}
