//! The REST API from the client's side: blocking calls, one for each route.

mod admin;
mod channels;
mod security;

pub use security::Security;

use crate::error::{Failure, Result, While};
use crate::output::now;
use aviflow_api::rest::{
    AgentInfo, ApiError, EnvironmentInfo, Exec, ExecFrame, JobAction, JobDetail, JobEvent, JobHistory, JobList,
    JobRanks, JobSummary, LogLine, NodeAction, NodeCheck, NodeInfo, PlanAnswer, PoolInfo, QueueInfo, ServerInfo,
    StopAnswer, Submit, Top, Usage,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Runtime;
use ureq::http::Response;
use ureq::tls::{RootCerts, TlsConfig};
use ureq::{Agent, Body, RequestBuilder, SendBody};

/// An answer as one value is at most this large.
const MAX_ANSWER: u64 = 256 << 20;

/// Speaks to one control plane.
#[derive(Clone, Debug)]
pub struct Client {
    context: String,
    url: String,
    token: Option<String>,
    namespace: Option<String>,
    agent: Agent,
    /// What carries its connections, where something does.
    _way: Option<Arc<Runtime>>,
}

/// Which jobs are asked for.
#[derive(Clone, Debug, Default)]
pub struct JobFilter {
    /// `live`, `ended`, or a phase.
    pub phase: Option<String>,
    /// A user's.
    pub user: Option<String>,
    /// A queue's.
    pub queue: Option<String>,
    /// A namespace's.
    pub namespace: Option<String>,
    /// Those that wait, in the plan's order.
    pub waiting: bool,
    /// With what their places follow from.
    pub factors: bool,
    /// At most so many.
    pub limit: Option<u32>,
}

/// Which lines are asked for.
#[derive(Clone, Debug, Default)]
pub struct LogFilter {
    /// Go on until the end.
    pub follow: bool,
    /// Of an attempt.
    pub attempt: Option<u32>,
    /// Of ranks.
    pub ranks: Vec<u32>,
    /// Since an instant in milliseconds.
    pub since: Option<i64>,
    /// With a text.
    pub grep: Option<String>,
    /// The last so many.
    pub tail: Option<usize>,
}

type Query = Vec<(&'static str, String)>;

impl Client {
    /// A client of the control plane at `url`, which the system's certificates vouch for where it speaks TLS.
    pub fn new(context: &str, url: &str, token: Option<String>) -> Client {
        Client::with(context, url, token, TlsConfig::builder().root_certs(RootCerts::PlatformVerifier).build())
    }

    /// The same, with what it trusts and shows.
    pub fn secured(context: &str, url: &str, token: Option<String>, security: &Security) -> Result<Client> {
        Ok(Client::with(context, url, token, security.config()?))
    }

    fn with(context: &str, url: &str, token: Option<String>, tls: TlsConfig) -> Client {
        let host = url.split_once("://").map_or(url, |(_, host)| host);
        let loopback = ["127.", "[::1]", "localhost"].iter().any(|p| host.starts_with(p));
        let builder = Agent::config_builder()
            .http_status_as_error(false)
            .tls_config(tls)
            .timeout_connect(Some(Duration::from_secs(10)))
            .user_agent(concat!("aviflow/", env!("CARGO_PKG_VERSION")));
        // A proxy cannot reach this machine's own addresses.
        let builder = if loopback { builder.proxy(None) } else { builder };
        let (context, url) = (context.to_owned(), url.to_owned());
        Client { context, url, token, namespace: None, agent: builder.build().new_agent(), _way: None }
    }

    /// Over connections that tasks of a runtime carry; it ends with the last clone of the client.
    pub fn through(self, way: Runtime) -> Client {
        Client { _way: Some(Arc::new(way)), ..self }
    }

    /// In a namespace; in the control plane's default if none is named.
    pub fn in_namespace(self, namespace: Option<String>) -> Client {
        Client { namespace, ..self }
    }

    /// The name of its context.
    pub fn context(&self) -> &str {
        &self.context
    }

    /// Its address.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// What serves.
    pub fn server(&self) -> Result<ServerInfo> {
        self.get("/v1/server", &[])
    }

    /// Ends the control plane; says what goes on.
    pub fn stop(&self) -> Result<StopAnswer> {
        let request = self.agent.post(self.path("/v1/server/stop", &[]));
        let response = self.send(request, "application/json", "application/json", SendBody::none())?;
        self.json(response)
    }

    /// Jobs, newest first.
    pub fn jobs(&self, filter: &JobFilter) -> Result<Vec<JobSummary>> {
        let mut query: Query = Vec::new();
        let mut put = |name, value: &Option<String>| query.extend(value.clone().map(|v| (name, v)));
        put("phase", &filter.phase);
        put("user", &filter.user);
        put("queue", &filter.queue);
        put("namespace", &filter.namespace);
        if filter.waiting {
            query.push(("waiting", "true".to_owned()));
        }
        if filter.factors {
            query.push(("factors", "true".to_owned()));
        }
        query.push(("limit", filter.limit.unwrap_or(1000).to_string()));
        let mut jobs = Vec::new();
        let mut after: Option<u64> = None;
        loop {
            let mut page = query.clone();
            page.extend(after.map(|a| ("after", a.to_string())));
            let list: JobList = self.get("/v1/jobs", &page)?;
            let empty = list.jobs.is_empty();
            jobs.extend(list.jobs);
            let enough = filter.limit.is_some_and(|limit| jobs.len() >= limit as usize);
            match list.next {
                Some(next) if !enough && !empty => after = Some(next),
                _ => return Ok(jobs),
            }
        }
    }

    /// What runs now, of a namespace or of all that are seen.
    pub fn top(&self, namespace: Option<&str>) -> Result<Top> {
        let query: Vec<_> = namespace.map(|n| ("namespace", n.to_owned())).into_iter().collect();
        self.get("/v1/top", &query)
    }

    /// The ranks of a job.
    pub fn ranks(&self, name: &str) -> Result<JobRanks> {
        self.named(name, self.get(&job_path(name, "/ranks"), &[]))
    }

    /// Everything about a job.
    pub fn job(&self, name: &str) -> Result<JobDetail> {
        self.named(name, self.get(&job_path(name, ""), &[]))
    }

    /// Submits.
    pub fn submit(&self, submit: &Submit) -> Result<JobDetail> {
        self.post("/v1/jobs", submit)
    }

    /// What would happen.
    pub fn plan(&self, submit: &Submit) -> Result<PlanAnswer> {
        self.post("/v1/plan", submit)
    }

    /// Does something to a job.
    pub fn act(&self, name: &str, action: &JobAction) -> Result<JobSummary> {
        self.named(name, self.post(&job_path(name, "/actions"), action))
    }

    /// Lines of output.
    pub fn logs(&self, name: &str, filter: &LogFilter) -> Result<Lines<LogLine>> {
        let mut query: Query = Vec::new();
        if filter.follow {
            query.push(("follow", "true".to_owned()));
        }
        query.extend(filter.attempt.map(|a| ("attempt", a.to_string())));
        if !filter.ranks.is_empty() {
            let ranks: Vec<String> = filter.ranks.iter().map(u32::to_string).collect();
            query.push(("rank", ranks.join(",")));
        }
        query.extend(filter.since.map(|s| ("since", s.to_string())));
        query.extend(filter.grep.clone().map(|g| ("grep", g)));
        query.extend(filter.tail.map(|t| ("tail", t.to_string())));
        let response = self.call(self.agent.get(self.path(&job_path(name, "/logs"), &query)), "application/x-ndjson");
        Ok(Lines::new(self.named(name, response)?, false))
    }

    /// Follows a job to its end.
    pub fn events(&self, name: &str) -> Result<Lines<JobEvent>> {
        let response = self.call(self.agent.get(self.path(&job_path(name, "/events"), &[])), "text/event-stream");
        Ok(Lines::new(self.named(name, response)?, true))
    }

    /// Runs a command beside a rank.
    pub fn exec(&self, name: &str, exec: &Exec) -> Result<Lines<ExecFrame>> {
        self.named(name, self.frames(&job_path(name, "/exec"), exec))
    }

    /// Tests a node.
    pub fn check_node(&self, name: &str, check: &NodeCheck) -> Result<Lines<ExecFrame>> {
        self.frames(&format!("/v1/nodes/{}/check", encode(name)), check)
    }

    /// Asks for something that answers with the output of a command.
    fn frames(&self, path: &str, asked: &impl Serialize) -> Result<Lines<ExecFrame>> {
        let body = serde_json::to_vec(asked).or_fail(|| "the command cannot be sent".to_owned())?;
        let response = self.send(
            self.agent.post(self.path(path, &[])),
            "application/x-ndjson",
            "application/json",
            SendBody::from_owned_reader(std::io::Cursor::new(body)),
        );
        Ok(Lines::new(response?, false))
    }

    /// A tar archive of a path below a job's volumes.
    pub fn files(&self, name: &str, path: &str) -> Result<impl Read + use<>> {
        let query = [("path", path.to_owned())];
        let response = self.call(self.agent.get(self.path(&job_path(name, "/files"), &query)), "application/x-tar");
        Ok(self.named(name, response)?.into_body().into_reader())
    }

    /// Whether an object is there.
    pub fn has_object(&self, sha256: &str) -> Result<bool> {
        let request = self.authorized(self.agent.head(self.path(&format!("/v1/objects/{sha256}"), &[])));
        let response = request.call().map_err(|e| self.unreachable(&e))?;
        match response.status().as_u16() {
            200..300 => Ok(true),
            404 => Ok(false),
            status => Err(Failure::from_server(status, refused(&self.url, status, ""))),
        }
    }

    /// Uploads an object; the server checks its hash. `allow` lifts its limit to so many bytes.
    pub fn put_object(&self, sha256: &str, path: &Path, allow: u64) -> Result<()> {
        let file = File::open(path).or_fail(|| format!("{} cannot be read", path.display()))?;
        let bytes = file.metadata().or_fail(|| format!("{} cannot be read", path.display()))?.len();
        let query = [("allowBytes", allow.max(bytes).to_string())];
        let request = self
            .agent
            .put(self.path(&format!("/v1/objects/{sha256}"), &query))
            .header("content-length", bytes.to_string());
        self.send(request, "application/json", "application/octet-stream", SendBody::from_owned_reader(file)).map(drop)
    }

    /// Nodes.
    pub fn nodes(&self) -> Result<Vec<NodeInfo>> {
        self.get("/v1/nodes", &[])
    }

    /// A node.
    pub fn node(&self, name: &str) -> Result<NodeInfo> {
        self.get(&format!("/v1/nodes/{}", encode(name)), &[])
    }

    /// Cordons or uncordons.
    pub fn act_on_node(&self, name: &str, action: &NodeAction) -> Result<NodeInfo> {
        self.post(&format!("/v1/nodes/{}/actions", encode(name)), action)
    }

    /// Queues.
    pub fn queues(&self) -> Result<Vec<QueueInfo>> {
        self.get("/v1/queues", &[])
    }

    /// Pools.
    pub fn pools(&self) -> Result<Vec<PoolInfo>> {
        self.get("/v1/pools", &[])
    }

    /// Environments.
    pub fn environments(&self) -> Result<Vec<EnvironmentInfo>> {
        self.get("/v1/environments", &[])
    }

    /// An environment with its lock, by `name` or `name@version`.
    pub fn environment(&self, name: &str) -> Result<EnvironmentInfo> {
        self.get(&format!("/v1/environments/{}", encode(name)), &[])
    }

    /// GPU time.
    pub fn usage(&self, by: &str, from: i64, to: i64) -> Result<Usage> {
        self.get("/v1/usage", &[("by", by.to_owned()), ("from", from.to_string()), ("to", to.to_string())])
    }

    /// What was submitted in a period and ran.
    pub fn history(&self, from: i64, to: i64) -> Result<JobHistory> {
        self.get("/v1/history", &[("from", from.to_string()), ("to", to.to_string())])
    }

    /// Agents.
    pub fn agents(&self) -> Result<Vec<AgentInfo>> {
        self.get("/v1/agents", &[])
    }

    fn get<T: DeserializeOwned>(&self, path: &str, query: &[(&'static str, String)]) -> Result<T> {
        let response = self.call(self.agent.get(self.path(path, query)), "application/json")?;
        self.json(response)
    }

    fn post<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> Result<T> {
        let body = serde_json::to_vec(body).or_fail(|| "the request cannot be written".to_owned())?;
        let request = self.agent.post(self.path(path, &[]));
        let body = SendBody::from_owned_reader(std::io::Cursor::new(body));
        let response = self.send(request, "application/json", "application/json", body)?;
        self.json(response)
    }

    fn path(&self, path: &str, query: &[(&'static str, String)]) -> String {
        let mut url = format!("{}{path}", self.url);
        for (i, (name, value)) in query.iter().enumerate() {
            let _ = write!(url, "{}{name}={}", if i == 0 { '?' } else { '&' }, encode(value));
        }
        url
    }

    fn authorized<B>(&self, request: RequestBuilder<B>) -> RequestBuilder<B> {
        // Who asks; a control plane that knows its users by their tokens does not read it.
        let request = match user() {
            Some(user) => request.header("x-aviflow-user", user),
            None => request,
        };
        let request = match &self.namespace {
            Some(namespace) => request.header("x-aviflow-namespace", namespace),
            None => request,
        };
        match &self.token {
            Some(token) => request.header("authorization", format!("Bearer {token}")),
            None => request,
        }
    }

    fn call(&self, request: RequestBuilder<ureq::typestate::WithoutBody>, accept: &str) -> Result<Response<Body>> {
        let response = self.authorized(request).header("accept", accept).call().map_err(|e| self.unreachable(&e))?;
        self.check(response)
    }

    fn send(
        &self,
        request: RequestBuilder<ureq::typestate::WithBody>,
        accept: &str,
        content: &str,
        body: SendBody<'_>,
    ) -> Result<Response<Body>> {
        let request = self.authorized(request).header("accept", accept).content_type(content);
        self.check(request.send(body).map_err(|e| self.unreachable(&e))?)
    }

    fn check(&self, mut response: Response<Body>) -> Result<Response<Body>> {
        let status = response.status().as_u16();
        if (200..300).contains(&status) {
            return Ok(response);
        }
        let text =
            response.body_mut().with_config().limit(1 << 20).lossy_utf8(true).read_to_string().unwrap_or_default();
        let error: ApiError = serde_json::from_str(&text).unwrap_or_else(|_| refused(&self.url, status, &text));
        let mut failure = Failure::from_server(status, error);
        if status == 401 && failure.help.is_none() {
            failure = failure.help(format!("`aviflow login {} --token-file FILE` sets the token", self.url));
        }
        Err(failure)
    }

    fn json<T: DeserializeOwned>(&self, mut response: Response<Body>) -> Result<T> {
        let reader = response.body_mut().with_config().limit(MAX_ANSWER).reader();
        serde_json::from_reader(BufReader::new(reader)).map_err(|e| {
            Failure::platform(format!("{} gave an answer that this program does not understand: {e}", self.url))
                .help("compare `aviflow version` with `aviflow server status`; use the same version on both sides")
        })
    }

    fn unreachable(&self, error: &ureq::Error) -> Failure {
        let help = if self.context == crate::context::LOCAL {
            "`aviflow server status` says whether it runs, `aviflow server start` starts it".to_owned()
        } else if security::distrusts(error) {
            format!("`aviflow context set {} … --certificate-authority FILE` names who vouches for it", self.context)
        } else {
            format!(
                "see that {} can be reached from here, or use another control plane with `aviflow context use NAME`",
                self.url
            )
        };
        Failure::platform(format!("the control plane `{}` at {} does not answer: {error}", self.context, self.url))
            .help(help)
    }

    /// Where the server does not know a job, says which names are similar.
    fn named<T>(&self, name: &str, result: Result<T>) -> Result<T> {
        result.map_err(|failure| {
            let unknown = failure.message.contains("no job") && failure.why.is_empty();
            if !unknown {
                return failure;
            }
            let jobs = self.jobs(&JobFilter { limit: Some(1000), ..JobFilter::default() }).unwrap_or_default();
            let names: Vec<String> = jobs.iter().map(crate::render::jobs::name).collect();
            let mut similar = similar(name, &names);
            // What the server suggests already is not said twice.
            similar.retain(|n| !failure.help.as_ref().is_some_and(|h| h.contains(&format!("`{n}`"))));
            let failure =
                if similar.is_empty() { failure } else { failure.why(format!("similar: {}", similar.join(", "))) };
            match failure.help {
                Some(_) => failure,
                None => failure.help("`aviflow ls --all` lists all jobs"),
            }
        })
    }
}

/// The user's name on this machine.
fn user() -> Option<String> {
    let plain = |name: &String| {
        !name.is_empty() && name.len() <= 64 && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-+@".contains(&b))
    };
    let named = ["AVIFLOW_USER", "USER", "LOGNAME"].iter().find_map(|v| std::env::var(v).ok().filter(plain));
    let uid = rustix::process::getuid().as_raw();
    let listed = || {
        let users = std::fs::read_to_string("/etc/passwd").ok()?;
        let line = users.lines().find(|l| l.split(':').nth(2) == Some(uid.to_string().as_str()))?;
        line.split(':').next().map(str::to_owned).filter(plain)
    };
    named.or_else(listed).or_else(|| Some(format!("uid-{uid}")))
}

/// What a server that is not Aviflow's says.
fn refused(url: &str, status: u16, text: &str) -> ApiError {
    let first: String = text.lines().next().unwrap_or_default().chars().take(120).collect();
    let said = if first.is_empty() { String::new() } else { format!(": {first}") };
    ApiError { code: "http".to_owned(), message: format!("{url} answered with HTTP status {status}{said}"), help: None }
}

/// Up to five names like this one.
fn similar<'a>(name: &str, names: &'a [String]) -> Vec<&'a str> {
    let mut found: Vec<&str> =
        names.iter().map(String::as_str).filter(|n| n.contains(name) || name.contains(n)).collect();
    found.extend(aviflow_api::suggest::nearest(name, names.iter().map(String::as_str)));
    let mut seen = std::collections::BTreeSet::new();
    found.retain(|n| seen.insert(*n));
    found.truncate(5);
    found
}

fn job_path(name: &str, rest: &str) -> String {
    format!("/v1/jobs/{}{rest}", encode(name))
}

/// Percent-encodes everything but unreserved characters.
fn encode(text: &str) -> String {
    let mut out = String::new();
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            out.push(char::from(byte));
        } else {
            let _ = write!(out, "%{byte:02X}");
        }
    }
    out
}

/// A stream of values, one a line or one an event.
pub struct Lines<T> {
    reader: Box<dyn BufRead + Send>,
    events: bool,
    kind: std::marker::PhantomData<T>,
}

impl<T> Lines<T> {
    fn new(response: Response<Body>, events: bool) -> Lines<T> {
        Lines {
            reader: Box::new(BufReader::new(response.into_body().into_reader())),
            events,
            kind: std::marker::PhantomData,
        }
    }

    #[cfg(test)]
    fn of(text: &'static str, events: bool) -> Lines<T> {
        Lines { reader: Box::new(text.as_bytes()), events, kind: std::marker::PhantomData }
    }

    /// The payload of the next line or event; `None` at the end.
    fn payload(&mut self) -> std::io::Result<Option<String>> {
        let mut data: Option<String> = None;
        loop {
            let mut line = Vec::new();
            if self.reader.read_until(b'\n', &mut line)? == 0 {
                // An event without its blank line was cut off: it is none.
                return Ok(None);
            }
            if !line.ends_with(b"\n") && self.events {
                return Ok(None);
            }
            let text = String::from_utf8_lossy(&line);
            let text = text.trim_end_matches(['\n', '\r']);
            if !self.events {
                if !text.is_empty() {
                    return Ok(Some(text.to_owned()));
                }
            } else if text.is_empty() {
                if data.is_some() {
                    return Ok(data);
                }
            } else if let Some(part) = text.strip_prefix("data:") {
                let data = data.get_or_insert_with(String::new);
                if !data.is_empty() {
                    data.push('\n');
                }
                data.push_str(part.strip_prefix(' ').unwrap_or(part));
            }
        }
    }
}

impl<T: DeserializeOwned> Iterator for Lines<T> {
    type Item = Result<T>;

    fn next(&mut self) -> Option<Result<T>> {
        match self.payload() {
            Ok(Some(text)) => Some(serde_json::from_str(&text).map_err(|e| {
                Failure::platform(format!("the control plane sent what this program does not understand: {e}"))
                    .help("compare `aviflow version` with `aviflow server status`; use the same version on both sides")
            })),
            Ok(None) => None,
            Err(e) => Some(Err(lost(&e.to_string()))),
        }
    }
}

/// The connection broke; the code says that it was not the job.
pub fn lost(why: &str) -> Failure {
    Failure::platform(format!("the connection to the control plane was lost: {why}"))
}

/// An instant `span` ago; `10m`, `7d`.
pub fn ago(text: &str) -> Result<i64> {
    let duration: aviflow_api::duration::Duration = text.parse().map_err(|e| {
        Failure::usage(format!("`{text}` is no duration: {e}")).help("write it with a unit, such as `10m` or `7d`")
    })?;
    Ok(now() - duration.0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn lines_and_events_are_read() {
        let lines: Vec<Value> = Lines::of("{\"a\":1}\n\n{\"a\":2}\n", false).map(|l| l.expect("line")).collect();
        assert_eq!(lines, [json!({"a": 1}), json!({"a": 2})]);
        let text = ": hello\n\nevent: job\ndata: {\"a\":\ndata: 1}\n\ndata:{\"a\":2}\r\n\r\ndata: {\"cut\":";
        let events: Vec<Value> = Lines::of(text, true).map(|l| l.expect("event")).collect();
        assert_eq!(events, [json!({"a": 1}), json!({"a": 2})]);
    }

    #[test]
    fn names_are_encoded() {
        assert_eq!(job_path("nlp/tiny", "/logs"), "/v1/jobs/nlp%2Ftiny/logs");
        assert_eq!(encode("a b&c=ü"), "a%20b%26c%3D%C3%BC");
    }

    #[test]
    fn similar_names_are_found() {
        let names: Vec<String> = ["tiny-gpt", "tiny-gpt-2", "llama"].map(String::from).to_vec();
        assert_eq!(similar("tiny", &names), ["tiny-gpt", "tiny-gpt-2"]);
        assert_eq!(similar("tiny-gtp", &names), ["tiny-gpt"]);
        assert!(similar("zzzzzz", &names).is_empty());
    }
}
