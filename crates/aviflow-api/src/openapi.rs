//! The routes of the API as one table, and the OpenAPI document that follows from it.
//!
//! The server's router is tested against the table, so a route that is not
//! documented does not exist, and the other way round.

use crate::admin::PolicySpec;
use crate::rest;
use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde_json::{Map, Value, json};

/// One route.
#[derive(Clone, Copy, Debug)]
pub struct Route {
    /// The method, in capitals.
    pub method: &'static str,
    /// The path, with parameters as `{name}`.
    pub path: &'static str,
    /// What it does, as a short sentence without its full stop.
    pub summary: &'static str,
    /// Parameters in the query or in headers.
    pub parameters: &'static [Parameter],
    /// What the request carries.
    pub request: Content,
    /// The status of success.
    pub status: u16,
    /// What the answer carries.
    pub response: Content,
    /// Whether it is answered without a token.
    pub open: bool,
}

/// A parameter of a route.
#[derive(Clone, Copy, Debug)]
pub struct Parameter {
    /// Its name.
    pub name: &'static str,
    /// `query` or `header`.
    pub place: &'static str,
    /// A type of JSON Schema.
    pub kind: &'static str,
    /// What it does.
    pub text: &'static str,
}

/// The body of a request or an answer.
#[derive(Clone, Copy, Debug)]
pub enum Content {
    /// Nothing.
    Nothing,
    /// One JSON value.
    Json(fn(&mut SchemaGenerator) -> Schema),
    /// One JSON value a line.
    Lines(fn(&mut SchemaGenerator) -> Schema),
    /// Server-sent events with one JSON value each.
    Events(fn(&mut SchemaGenerator) -> Schema),
    /// Bytes of a media type.
    Bytes(&'static str),
}

fn of<T: JsonSchema>(generator: &mut SchemaGenerator) -> Schema {
    generator.subschema_for::<T>()
}

const fn query(name: &'static str, kind: &'static str, text: &'static str) -> Parameter {
    Parameter { name, place: "query", kind, text }
}

const fn get(path: &'static str, summary: &'static str, response: Content) -> Route {
    let (parameters, request) = (&[], Content::Nothing);
    Route { method: "GET", path, summary, parameters, request, status: 200, response, open: false }
}

const fn post(path: &'static str, summary: &'static str, request: Content, response: Content) -> Route {
    Route { method: "POST", path, summary, parameters: &[], request, status: 200, response, open: false }
}

impl Route {
    const fn with(self, parameters: &'static [Parameter]) -> Route {
        Route { parameters, ..self }
    }

    const fn open(self) -> Route {
        Route { open: true, ..self }
    }

    const fn status(self, status: u16) -> Route {
        Route { status, ..self }
    }

    const fn method(self, method: &'static str) -> Route {
        Route { method, ..self }
    }
}

const RANK: Parameter = query("rank", "string", "only these ranks, such as `0,3-5`");
const TAIL: Parameter = query("tail", "integer", "begin with the last so many lines; 0 means only what is new");

/// Every route.
pub const ROUTES: &[Route] = &[
    get("/v1/server", "what serves here", Content::Json(of::<rest::ServerInfo>)),
    post(
        "/v1/server/stop",
        "end the control plane; trainings go on (only from this machine)",
        Content::Nothing,
        Content::Json(of::<rest::StopAnswer>),
    ),
    post(
        "/v1/server/actions",
        "pause all starts, or let them go on",
        Content::Json(of::<rest::ServerAction>),
        Content::Json(of::<rest::ServerInfo>),
    ),
    get("/v1/jobs", "list jobs, newest first", Content::Json(of::<rest::JobList>)).with(&[
        query("phase", "string", "`live`, `ended`, or the name of a phase"),
        query("user", "string", "only jobs of this user"),
        query("queue", "string", "only jobs of this queue"),
        query("namespace", "string", "only jobs of this namespace; of all that may be seen if it is not said"),
        query("waiting", "boolean", "only jobs that wait, in the order of the plan, with their verdicts"),
        query("limit", "integer", "at most so many; 100 if it is not said, 1000 at most"),
        query("after", "integer", "the `next` of the page before"),
    ]),
    post("/v1/jobs", "submit a job", Content::Json(of::<rest::Submit>), Content::Json(of::<rest::JobDetail>))
        .status(201),
    post(
        "/v1/plan",
        "what would happen to a submission; changes nothing",
        Content::Json(of::<rest::Submit>),
        Content::Json(of::<rest::PlanAnswer>),
    ),
    get("/v1/jobs/{name}", "everything about a job", Content::Json(of::<rest::JobDetail>)),
    get("/v1/jobs/{name}/logs", "output of a job", Content::Lines(of::<rest::LogLine>)).with(&[
        query("follow", "boolean", "go on until the job has ended and its output is complete"),
        query("attempt", "integer", "only this attempt"),
        RANK,
        query("since", "string", "only lines since an instant in milliseconds, or for a duration such as `10m`"),
        query("grep", "string", "only lines that contain this text"),
        TAIL,
    ]),
    get("/v1/jobs/{name}/series", "points of progress, oldest first", Content::Json(of::<Vec<rest::NumberedPoint>>))
        .with(&[
            query("after", "integer", "only points after the one of this number"),
            query("max", "integer", "at most so many, spread over the whole; 1000 if it is not said"),
        ]),
    get("/v1/jobs/{name}/timeline", "what happened to a job", Content::Json(of::<Vec<rest::TimelineEntry>>)),
    get("/v1/jobs/{name}/events", "follow a job to its end", Content::Events(of::<rest::JobEvent>)).with(&[
        query("logs", "boolean", "with the lines of output; true if it is not said"),
        RANK,
        TAIL,
    ]),
    get(
        "/v1/jobs/{name}/files",
        "a tar archive of a path below the job's volumes",
        Content::Bytes("application/x-tar"),
    )
    .with(&[query("path", "string", "such as `/out/model.bin`; everything if it is not said")]),
    post(
        "/v1/jobs/{name}/actions",
        "cancel, suspend, resume, hold, release or change a job",
        Content::Json(of::<rest::JobAction>),
        Content::Json(of::<rest::JobSummary>),
    ),
    post(
        "/v1/jobs/{name}/exec",
        "run a command inside a worker",
        Content::Json(of::<rest::Exec>),
        Content::Lines(of::<rest::ExecFrame>),
    ),
    post(
        "/v1/jobs/{name}/channels",
        "open a terminal or a connection into a worker",
        Content::Json(of::<rest::OpenChannel>),
        Content::Lines(of::<rest::ChannelFrame>),
    ),
    post(
        "/v1/jobs/{name}/channels/{channel}",
        "put something into a channel",
        Content::Json(of::<rest::ChannelInput>),
        Content::Nothing,
    )
    .status(204),
    post(
        "/v1/jobs/{name}/stacks",
        "what the processes of a job are doing",
        Content::Json(of::<rest::AskStacks>),
        Content::Json(of::<rest::Stacks>),
    ),
    get(
        "/v1/jobs/{name}/stacks",
        "what the processes of a job were doing when it last stood still",
        Content::Json(of::<rest::TakenStacks>),
    ),
    get("/v1/objects/{sha256}", "whether an object is there", Content::Nothing).method("HEAD"),
    Route {
        request: Content::Bytes("application/octet-stream"),
        ..get("/v1/objects/{sha256}", "upload an object, named by its content", Content::Json(of::<rest::ObjectInfo>))
            .method("PUT")
            .status(201)
            .with(&[query("allowBytes", "integer", "allow an object of up to so many bytes, beyond the limit")])
    },
    get("/v1/jobs/{name}/ranks", "the ranks of a job's present attempt", Content::Json(of::<rest::JobRanks>)),
    get("/v1/top", "what runs now, with what GPUs do", Content::Json(of::<rest::Top>)).with(&[query(
        "namespace",
        "string",
        "only its jobs",
    )]),
    get(
        "/v1/observed",
        "who holds the GPUs of a cluster, whoever it is, and what waits",
        Content::Json(of::<rest::Observed>),
    ),
    get("/v1/nodes", "list nodes", Content::Json(of::<Vec<rest::NodeInfo>>)),
    get("/v1/nodes/{name}", "one node", Content::Json(of::<rest::NodeInfo>)),
    post(
        "/v1/nodes/{name}/actions",
        "cordon or uncordon a node",
        Content::Json(of::<rest::NodeAction>),
        Content::Json(of::<rest::NodeInfo>),
    ),
    post(
        "/v1/nodes/{name}/check",
        "test an empty node, and let it take work again if it passes",
        Content::Json(of::<rest::NodeCheck>),
        Content::Lines(of::<rest::ExecFrame>),
    ),
    get("/v1/queues", "list queues", Content::Json(of::<Vec<rest::QueueInfo>>)),
    get("/v1/pools", "list pools", Content::Json(of::<Vec<rest::PoolInfo>>)),
    get("/v1/environments", "list environments", Content::Json(of::<Vec<rest::EnvironmentInfo>>)),
    get(
        "/v1/environments/{name}",
        "one environment with its lock; `name@version`, or the newest version of a name",
        Content::Json(of::<rest::EnvironmentInfo>),
    ),
    get("/v1/usage", "GPU time over a period; the rows sum to the capacity", Content::Json(of::<rest::Usage>)).with(&[
        query(
            "from",
            "string",
            "the first instant in milliseconds, or a duration ago such as `7d`; 24h if it is not said",
        ),
        query("to", "string", "the end, likewise; now if it is not said"),
        query("by", "string", "`user`, `queue`, `job` or `state`; `user` if it is not said"),
    ]),
    get("/v1/history", "jobs that were submitted in a period and ran", Content::Json(of::<rest::JobHistory>)).with(&[
        query("from", "string", "the first instant, as for usage; 24h ago if it is not said"),
        query("to", "string", "the end, likewise; now if it is not said"),
    ]),
    get("/v1/events", "everything that changes, coarse", Content::Events(of::<rest::ChangeEvent>)),
    get("/v1/agents", "list agents", Content::Json(of::<Vec<rest::AgentInfo>>)),
    get("/openapi.json", "this document", Content::Bytes("application/json")).open(),
    get("/healthz", "whether the control plane answers", Content::Bytes("text/plain")).open(),
    get("/readyz", "whether the control plane decides; 503 with what it waits for", Content::Bytes("text/plain"))
        .open(),
    get("/metrics", "metrics in the Prometheus text format", Content::Bytes("text/plain")),
    get("/v1/queues/{name}", "one queue", Content::Json(of::<rest::QueueInfo>)),
    post(
        "/v1/queues/{name}",
        "make or change a queue",
        Content::Json(of::<rest::QueueApply>),
        Content::Json(of::<rest::Applied>),
    )
    .method("PUT"),
    post(
        "/v1/queues/{name}/actions",
        "open, hold, drain or delete a queue",
        Content::Json(of::<rest::QueueAction>),
        Content::Json(of::<rest::Applied>),
    ),
    get("/v1/pools/{name}", "one pool", Content::Json(of::<rest::PoolInfo>)),
    post(
        "/v1/pools/{name}",
        "say how the nodes of a pool are joined",
        Content::Json(of::<rest::PoolApply>),
        Content::Json(of::<rest::Applied>),
    )
    .method("PUT"),
    post(
        "/v1/pools/{name}/actions",
        "take the document of a pool away",
        Content::Json(of::<rest::PoolAction>),
        Content::Json(of::<rest::Applied>),
    ),
    get("/v1/policy", "how the platform decides where no document says so", Content::Json(of::<PolicySpec>)),
    post("/v1/policy", "change the policy", Content::Json(of::<rest::PolicyApply>), Content::Json(of::<rest::Applied>))
        .method("PUT"),
    get("/v1/drains", "list drains that go on or are to come", Content::Json(of::<Vec<rest::DrainInfo>>)),
    post(
        "/v1/drains",
        "empty nodes, at once or a few at a time",
        Content::Json(of::<rest::DrainRequest>),
        Content::Json(of::<rest::DrainAnswer>),
    ),
    post(
        "/v1/drains/{name}/actions",
        "call a drain off: a rolling one by its number, that of a node by the node",
        Content::Json(of::<rest::DrainAction>),
        Content::Json(of::<rest::DrainAnswer>),
    ),
    get("/v1/acts", "what people changed, newest first", Content::Json(of::<Vec<rest::Act>>)).with(&[
        query("kind", "string", "only what was done to things of this kind, such as `queue`"),
        query("name", "string", "only what was done to the thing of this name"),
        query("by", "string", "only what this user did"),
        query("before", "integer", "only what is older than the act of this number"),
        query("limit", "integer", "at most so many; 100 if it is not said"),
    ]),
];

/// The OpenAPI document.
#[must_use]
pub fn document() -> Value {
    document_of(ROUTES.iter())
}

fn document_of<'r>(routes: impl Iterator<Item = &'r Route>) -> Value {
    let settings = SchemaSettings::draft2020_12().with(|s| {
        s.definitions_path = "/components/schemas".into();
        s.meta_schema = None;
    });
    let mut generator = settings.into_generator();
    let error = json!({
        "description": "what went wrong, and what to do next",
        "content": { "application/json": { "schema": of::<rest::ApiError>(&mut generator) } },
    });
    let missing = json!({
        "description": "objects that the submission refers to are not there",
        "content": { "application/json": { "schema": of::<rest::MissingObjects>(&mut generator) } },
    });
    let mut paths: Map<String, Value> = Map::new();
    for route in routes {
        let operation = operation(route, &mut generator);
        let methods = paths.entry(route.path).or_insert_with(|| Value::Object(Map::new()));
        if let Value::Object(methods) = methods {
            methods.insert(route.method.to_ascii_lowercase(), operation);
        }
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Aviflow",
            "version": "1",
            "description": "A job is named `name` (one's own latest submitted under it) or `namespace%2Fname`. \
                            Instants are milliseconds since the Unix epoch, spans are milliseconds, \
                            GPU time is GPU-milliseconds; all are integers.",
        },
        "paths": paths,
        "components": {
            "schemas": generator.take_definitions(true),
            "responses": { "Error": error, "MissingObjects": missing },
            "securitySchemes": { "token": { "type": "http", "scheme": "bearer" } },
        },
        "security": [{ "token": [] }],
    })
}

fn operation(route: &Route, generator: &mut SchemaGenerator) -> Value {
    let mut parameters: Vec<Value> = path_parameters(route.path)
        .map(|name| json!({ "name": name, "in": "path", "required": true, "schema": { "type": "string" } }))
        .collect();
    parameters.extend(
        route
            .parameters
            .iter()
            .map(|p| json!({ "name": p.name, "in": p.place, "description": p.text, "schema": { "type": p.kind } })),
    );
    let mut answer = json!({ "description": "success" });
    if let Some(content) = content(route.response, generator) {
        answer["content"] = content;
    }
    let mut operation = json!({ "summary": route.summary, "responses": { route.status.to_string(): answer } });
    operation["responses"]["default"] = json!({ "$ref": "#/components/responses/Error" });
    if route.path == "/v1/jobs" && route.method == "POST" {
        operation["responses"]["409"] = json!({ "$ref": "#/components/responses/MissingObjects" });
    }
    if !parameters.is_empty() {
        operation["parameters"] = Value::Array(parameters);
    }
    if let Some(content) = content(route.request, generator) {
        operation["requestBody"] = json!({ "required": true, "content": content });
    }
    if route.open {
        operation["security"] = json!([]);
    }
    operation
}

fn path_parameters(path: &str) -> impl Iterator<Item = &str> {
    path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'))
}

fn content(content: Content, generator: &mut SchemaGenerator) -> Option<Value> {
    let (media, schema) = match content {
        Content::Nothing => return None,
        Content::Json(schema) => ("application/json", schema(generator).into()),
        // OpenAPI 3.1 has no word for streams: the schema is that of one line or event.
        Content::Lines(schema) => ("application/x-ndjson", schema(generator).into()),
        Content::Events(schema) => ("text/event-stream", schema(generator).into()),
        Content::Bytes(media) => (media, json!({})),
    };
    let schema: Value = schema;
    Some(json!({ media: { "schema": schema } }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn the_committed_document_is_the_one_of_the_table() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("schemas/openapi.json");
        let text = format!("{}\n", serde_json::to_string_pretty(&document()).unwrap());
        if std::env::var_os("UPDATE_SCHEMA").is_some() {
            std::fs::write(&path, &text).unwrap();
        }
        let committed = std::fs::read_to_string(&path).unwrap();
        assert!(committed == text, "schemas/openapi.json is old; run the tests once with UPDATE_SCHEMA=1");
    }

    #[test]
    fn every_reference_leads_somewhere_and_every_route_is_there_once() {
        let all = || ROUTES.iter();
        let document = document_of(all());
        let text = document.to_string();
        let mut references = 0;
        for part in text.split("\"$ref\":\"#").skip(1) {
            let pointer = &part[..part.find('"').unwrap()];
            assert!(document.pointer(pointer).is_some(), "{pointer}");
            references += 1;
        }
        assert!(references > 20);
        let mut keys: Vec<(&str, &str)> = all().map(|r| (r.path, r.method)).collect();
        keys.sort_unstable();
        keys.dedup();
        assert_eq!(keys.len(), all().count());
    }
}
