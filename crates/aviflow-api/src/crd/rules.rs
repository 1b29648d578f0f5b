//! What cannot be, as rules in CEL with messages that say what to write instead.
//!
//! A rule about one text comes from the same pattern as the check of files; a rule about several keys
//! repeats one of [`crate::check`], with its words. Rules that only warn are left to the control plane:
//! the API server refuses or is silent.

use crate::check::{PREFIXES, RESERVED};
use crate::file::BASH;
use crate::file::formats as f;
use crate::file::shape::{Object, Text};
use aviflow_core::model::NODE_LEVEL;
use serde_json::{Value as Json, json};

/// A rule.
pub(super) struct Rule {
    rule: String,
    /// Text in which `«expression»` stands for the expression's value.
    message: String,
    /// The key that is told, if it is not the whole.
    path: Option<&'static str>,
}

/// A rule and its message.
pub(super) fn rule(rule: impl Into<String>, message: impl Into<String>) -> Rule {
    Rule { rule: rule.into(), message: message.into(), path: None }
}

impl Rule {
    /// About one key, such as `.min`.
    pub(super) fn at(mut self, path: &'static str) -> Rule {
        self.path = Some(path);
        self
    }
}

/// Adds rules to a schema.
pub(super) fn add(schema: &mut Json, rules: Vec<Rule>) {
    let Some(schema) = schema.as_object_mut().filter(|_| !rules.is_empty()) else { return };
    let list = schema.entry("x-kubernetes-validations").or_insert_with(|| json!([]));
    for rule in rules {
        let mut entry = json!({"rule": rule.rule});
        match says(&rule.message) {
            (text, false) => entry["message"] = json!(text),
            (expression, true) => entry["messageExpression"] = json!(expression),
        }
        if let Some(path) = rule.path {
            entry["fieldPath"] = json!(path);
        }
        list.as_array_mut().into_iter().for_each(|list| list.push(entry.clone()));
    }
}

/// Lets rules be looked at when an object is made and never again, where what they are about never changes: each write
/// of a status would look at all of them, and that is most of what it costs the API server to judge it. It also lets
/// a job end that was taken before a rule was there.
pub(super) fn once(schema: &mut Json) {
    let rules = schema.get_mut("x-kubernetes-validations").and_then(Json::as_array_mut);
    for rule in rules.into_iter().flatten() {
        let text = rule["rule"].as_str().unwrap_or_default();
        rule["rule"] = json!(format!("oldSelf.hasValue() || ({text})"));
        rule["optionalOldSelf"] = json!(true);
    }
    // The API server does not know which element of a list was which.
    let properties = schema.get_mut("properties").and_then(Json::as_object_mut);
    properties.into_iter().flat_map(|all| all.values_mut()).for_each(once);
}

/// A text of CEL.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\\', "\\\\").replace('\'', "\\'"))
}

/// A message as it is, or as an expression if there is one in it.
fn says(message: &str) -> (String, bool) {
    let (mut text, mut values) = (String::new(), Vec::new());
    let mut rest = message;
    while let Some((before, (inside, after))) =
        rest.split_once('«').and_then(|(before, tail)| Some((before, tail.split_once('»')?)))
    {
        text.push_str(&before.replace('%', "%%"));
        text.push_str("%s");
        values.push(inside);
        rest = after;
    }
    if values.is_empty() {
        return (message.to_owned(), false);
    }
    text.push_str(&rest.replace('%', "%%"));
    (format!("{}.format([{}])", quoted(&text), values.join(", ")), true)
}

/// Whether a text has the form, as CEL.
fn has_form(pattern: &str) -> String {
    format!("self.matches({})", quoted(pattern))
}

/// What a text must be. The API server says which text it is, so the message does not.
pub(super) fn of_text(text: &Text, example: Option<&str>) -> Vec<Rule> {
    let Some(pattern) = text.pattern else { return Vec::new() };
    let form = has_form(pattern);
    let eg = example.map_or_else(|| format!("write {}", text.what), |e| format!("write for example `{e}`"));
    if is_amount(text) {
        let units = if text.what == f::DURATION.what { "`m` or `h`" } else { "`Gi`" };
        let number = "(type(self) != string || string(self).matches('^[0-9.]+$'))";
        return vec![
            rule(format!("!{number}"), format!("has no unit; write one behind the number, such as {units}")),
            rule(
                format!("{number} || {form} && self.matches('[1-9]')"),
                format!("is not {}, or is zero; {eg}", text.what),
            ),
        ];
    }
    if text.what == f::IMAGE.what {
        return vec![
            rule(
                format!("self.contains('@') || {form}"),
                "is no name of an image; write for example `registry.example/team/train:v1`",
            ),
            rule(
                format!("!self.contains('@') || {form}"),
                "has no whole digest, which is `sha256:` and 64 of 0-9 and a-f; copy all of it",
            ),
        ];
    }
    if text.what == f::PINNED_IMAGE.what {
        return vec![
            rule(
                "self.contains('@')",
                "has no digest, and a tag may be another image tomorrow; write `NAME@sha256:…`, as `docker buildx imagetools inspect` shows it",
            ),
            rule(
                format!("!self.contains('@') || {form}"),
                "has no whole digest, which is `sha256:` and 64 of 0-9 and a-f; copy all of it",
            ),
        ];
    }
    if text.what == f::ABSOLUTE.what {
        return vec![
            rule("self.startsWith('/')", format!("is no absolute path; {eg}")),
            rule(
                "!self.matches('(^|/)[.][.]?(/|$)|:|^/+$|^/+(proc|sys|dev)(/|$)')",
                format!("is no folder that a job can have: without `.`, `..` and `:`, and not the system's; {eg}"),
            ),
        ];
    }
    let message = match text.what {
        what if what == f::SECRET.what => format!("a secret is referred to as `secret/key`, never by its value; {eg}"),
        what if what == f::ANY.what => "is empty; write a text, or remove the line".to_owned(),
        what if what == f::QUEUE.what => "is no name of a queue; `kubectl get queues` lists them".to_owned(),
        what => format!("is not {what}; {eg}"),
    };
    vec![rule(form, message)]
}

/// That no text of a list is there again.
pub(super) fn none_twice() -> Rule {
    let again = "!self.exists_one(other, other == one)";
    rule(
        format!("!self.exists(one, {again})"),
        format!("`«self.filter(one, {again})[0]»` is in this list twice; keep one of them"),
    )
}

/// Whether a text is a number with a unit, of which people forget the unit.
pub(super) fn is_amount(text: &Text) -> bool {
    text.what == f::DURATION.what || text.what == f::QUANTITY.what
}

/// What the keys of a mapping must be.
pub(super) fn of_keys(keys: &Text) -> Vec<Rule> {
    let variables = keys.what == f::VARIABLE.what;
    let mut rules = Vec::new();
    if let Some(pattern) = keys.pattern {
        let bad = format!("!k.matches({})", quoted(pattern));
        let form = if variables { ": it has letters, digits and `_`, and begins with no digit" } else { "" };
        rules.push(rule(
            format!("!self.exists(k, {bad})"),
            format!("`«self.filter(k, {bad})[0]»` is not {}{form}; write it anew", keys.what),
        ));
    }
    if variables {
        let names: Vec<String> = RESERVED.iter().map(|name| quoted(name)).collect();
        let names = format!("[{}]", names.join(", "));
        rules.push(rule(
            format!("!{names}.exists(name, name in self)"),
            format!("`«{names}.filter(name, name in self)[0]»` is set by the platform, from where the job is placed; remove it"),
        ));
        let ours: Vec<String> = PREFIXES.iter().map(|prefix| format!("k.startsWith('{prefix}')")).collect();
        let ours = ours.join(" || ");
        rules.push(rule(
            format!("!self.exists(k, {ours})"),
            format!(
                "`«self.filter(k, {ours})[0]»` is set by the platform; remove it, or choose a name that does not begin with `{}`",
                PREFIXES.join("` or `")
            ),
        ));
    }
    rules
}

/// What the keys of an object must be together.
pub(super) fn of_object(of: &Object) -> Vec<Rule> {
    match of.what {
        "a job" => of_job(),
        "a number of nodes" => vec![
            rule("self.min <= self.max", "the least number of nodes, «self.min», is above the greatest, «self.max»; write them the other way round")
                .at(".min"),
        ],
        "a place in the network" => vec![
            rule("!has(self.maxWait) || has(self.prefer)", "`maxWait` is how long to wait for what is preferred, and nothing is; add `prefer: leaf`, or another level")
                .at(".maxWait"),
        ],
        "a quota" => vec![
            rule("!has(self.limit) || self.limit >= self.guarantee", "the limit of «self.limit» is below the guarantee of «self.guarantee»; write `limit: «self.guarantee»` or more, or lower `guarantee`")
                .at(".limit"),
        ],
        "a pool" => vec![
            rule(
                "!has(self.kubernetes) || !has(self.kubernetes.topologyKeys) || (has(self.topology) ? self.topology.levels.size() : 0) == self.kubernetes.topologyKeys.size()",
                "«self.kubernetes.topologyKeys.size()» labels for «has(self.topology) ? self.topology.levels.size() : 0» levels; write one for each of `spec.topology.levels`, the smallest first",
            )
            .at(".kubernetes.topologyKeys"),
            rule(
                "!has(self.topology) || has(self.topology.domains) != (has(self.kubernetes) && has(self.kubernetes.topologyKeys))",
                "the domains of a topology come from `spec.topology.domains` or from `spec.kubernetes.topologyKeys`; write one of them",
            )
            .at(".topology"),
        ],
        "a topology" => vec![
            rule(format!("!self.levels.exists(l, l == '{NODE_LEVEL}')"), "`node` is a level of every pool, and is not named; name what is above it, such as `leaf`")
                .at(".levels"),
        ],
        "a pool's part for Kubernetes" => vec![
            rule(
                "!has(self.gpuTypes) || self.gpuTypes.all(t, self.gpuTypes[t].all(v, self.gpuTypes.all(o, o == t || !(v in self.gpuTypes[o]))))",
                "a value of `gpuTypeLabel` is in two types; keep it at one of them",
            )
            .at(".gpuTypes"),
        ],
        "a toleration" => vec![
            rule("self.operator != 'Exists' || !has(self.value)", "`Exists` takes any value, and one is given; remove `value`, or write `operator: Equal`")
                .at(".value"),
            rule("self.operator == 'Exists' || has(self.key)", "a toleration without a key is one of every taint; add `key`, or write `operator: Exists`"),
        ],
        "a place for what jobs keep" => vec![rule(
            "has(self.claim) != has(self.hostPath)",
            "storage is a claim or a folder of the nodes, one of them; write `storage: {claim: NAME}` or `storage: {hostPath: /FOLDER}`",
        )],
        _ => Vec::new(),
    }
}

fn of_job() -> Vec<Rule> {
    let optional = |key: &str, list: &str| format!("(has(self.{key}) ? {list} : [])");
    let paths = format!(
        "{} + {} + {}",
        optional("outputs", "self.outputs"),
        optional("data", "self.data.filter(d, has(d.mount)).map(d, d.mount)"),
        optional("checkpoint", "[self.checkpoint.path]")
    );
    let apart = "paths.all(p, paths.exists_one(q, (p + '/').startsWith(q + '/')))";
    let launchers = "self.run[0].matches('(^|/)(torchrun|deepspeed)$') \
        || self.run.size() > 1 && self.run[0].matches('(^|/)accelerate$') && self.run[1] == 'launch' \
        || self.run.size() > 2 && self.run[1] == '-m' && self.run[2] in \
        ['torch.distributed.run', 'torch.distributed.launch', 'accelerate.commands.launch']";
    let bash: Vec<String> = BASH.iter().map(|word| quoted(word)).collect();
    let bash = bash.first().cloned().unwrap_or_default();
    vec![
        rule("!has(self.image) || !has(self.environment)", "a job runs in an image or in an environment, not in both; remove `spec.image` or `spec.environment`")
            .at(".image"),
        rule("!has(self.requirements) || !has(self.image)", "requirements are layered onto an environment; an image is complete: install them when it is built")
            .at(".requirements"),
        rule("!has(self.requirements) || has(self.environment) || has(self.image)", "requirements are layered onto an environment, and none is named; add `environment: minimal`, or another")
            .at(".requirements"),
        rule("!has(self.requirements) || has(self.provenance) && has(self.provenance.layer)", "`«self.requirements»` is a file on your machine, which the cluster cannot read; submit with `aviflow submit FILE`, which takes it along")
            .at(".requirements"),
        rule("!has(self.code) || !has(self.code.folder) || has(self.provenance) && has(self.provenance.code)", "`«self.code.folder»` is a folder on your machine, which the cluster cannot read; submit with `aviflow submit FILE`, which takes a snapshot of it along, or write `code: {git: ADDRESS, ref: COMMIT}`")
            .at(".code"),
        rule(format!("self.nodes.min < 2 || !has(self.topology) || !has(self.topology.require) || self.topology.require != '{NODE_LEVEL}'"), "«self.nodes.min» nodes are never in one node; name a level above it, or write `nodes: {min: 1, max: 1}`")
            .at(".topology.require"),
        rule("!has(self.env) || !has(self.secrets) || !self.env.exists(k, k in self.secrets)", "`«self.env.filter(k, k in self.secrets)[0]»` is in `spec.env` and in `spec.secrets`; keep one of them")
            .at(".env"),
        rule(format!("[{paths}].all(paths, {apart})"), "two of `outputs`, `data[].mount` and `checkpoint.path` are one folder or lie in each other; give each a folder of its own, side by side"),
        rule(
            "!has(self.resources) || !has(self.resources.shm) || !has(self.resources.memoryPerGpu) \
             || !isQuantity(string(self.resources.shm)) || !isQuantity(string(self.resources.memoryPerGpu)) \
             || quantity(string(self.resources.shm)).asApproximateFloat() < quantity(string(self.resources.memoryPerGpu)).asApproximateFloat() * double(self.gpusPerNode)",
            "shared memory counts as memory, and a node's share has only «self.gpusPerNode» × «self.resources.memoryPerGpu»; lower `shm`, or raise `memoryPerGpu`",
        )
        .at(".resources.shm"),
        rule(format!("self.processes != 'perGpu' || self.run[0] == {bash} || !({launchers})"), "`«self.run[0]»` starts a process for each GPU, and `processes: perGpu` would start it «self.gpusPerNode» times on each node; remove `spec.processes`, or run the script itself")
            .at(".processes"),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_with_values_is_an_expression() {
        assert_eq!(says("plain, with {braces}"), ("plain, with {braces}".to_owned(), false));
        let expected = r"'%s is 100%% of it\'s \\ %s'.format([self.a, self.b])";
        assert_eq!(says(r"«self.a» is 100% of it's \ «self.b»"), (expected.to_owned(), true));
    }
}
