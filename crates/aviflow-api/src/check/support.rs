//! What a body does not do, so that nobody relies on it: refused where the job
//! would come out otherwise than declared, warned of where it only lacks something.

use crate::diagnostic::{Diagnostic, DiagnosticCode};
use crate::spec::{JobSpec, Topology};
use crate::suggest::{nearest, one_of};
use crate::webhook;
use aviflow_core::model::NODE_LEVEL;

/// The body that runs a job, as `ServerInfo.body` names it.
pub const LOCAL: &str = "local";

/// The levels of several pools, each once; those of one pool stay in their order, smallest first.
pub fn levels_of<'a>(pools: impl IntoIterator<Item = &'a [String]>) -> Vec<String> {
    let mut levels: Vec<String> = Vec::new();
    for level in pools.into_iter().flatten() {
        if !levels.contains(level) {
            levels.push(level.clone());
        }
    }
    levels
}

/// Reports fields that this version, this body or these pools do not act on. `levels` are those of
/// [`levels_of`]; `node` is always one below them. The errors have no place; the fields are named.
#[must_use]
pub fn check_support(spec: &JobSpec, body: &str, levels: &[String]) -> Vec<Diagnostic> {
    let mut found = Vec::new();
    let error = |field: String, message: String, help: String| {
        Diagnostic::error(DiagnosticCode::NotSupported, message).field(field).help(help)
    };
    let warning = |field: &str, message: &str, help: &str| {
        Diagnostic::warning(DiagnosticCode::NotSupported, message).field(field).help(help)
    };
    for (index, notify) in spec.notify.iter().enumerate() {
        let host = webhook::host(&notify.webhook);
        if let Ok(ip) = host.parse()
            && let Some(why) = webhook::refused(ip, body == LOCAL)
        {
            found.push(error(
                format!("notify[{index}].webhook"),
                format!("nothing is posted to {host}: {why}"),
                "name a host that others reach too".to_owned(),
            ));
        }
    }
    found.extend(spec.topology.iter().flat_map(|topology| check_levels(topology, levels)));
    if body != LOCAL {
        found.extend(check_cluster(spec));
        return found;
    }
    if let Some(image) = &spec.image {
        found.push(error(
            "image".to_owned(),
            format!("this machine runs no containers, so not `{image}`"),
            "write `environment: NAME`; `aviflow env ls` lists what there is".to_owned(),
        ));
    }
    for (index, data) in spec.data.iter().enumerate() {
        if let Some((scheme, _)) = data.source.split_once("://")
            && scheme != "file"
        {
            found.push(error(
                format!("data[{index}].source"),
                format!("this machine fetches no data over `{scheme}`"),
                "fetch it first and name the file or folder".to_owned(),
            ));
        }
    }
    if spec.resources.is_some() {
        found.push(warning(
            "resources",
            "host resources are not limited on this machine",
            "leave `resources` out, or take it as a note for a cluster",
        ));
    }
    found
}

/// What a cluster does not do.
fn check_cluster(spec: &JobSpec) -> Vec<Diagnostic> {
    let mut found = Vec::new();
    let mut error = |field: String, message: String, help: &str| {
        found.push(Diagnostic::error(DiagnosticCode::NotSupported, message).field(field).help(help));
    };
    if spec.image.is_none() && spec.environment.is_none() {
        let message = "the job names neither an `image` nor an `environment`, and in a cluster it needs one".to_owned();
        error(
            "image".to_owned(),
            message,
            "add `environment: NAME`, as `aviflow env ls` lists them, or `image: NAME:TAG`",
        );
    }
    found
}

/// Levels that no pool has.
fn check_levels(topology: &Topology, levels: &[String]) -> Vec<Diagnostic> {
    let mut found = Vec::new();
    let known = || std::iter::once(NODE_LEVEL).chain(levels.iter().map(String::as_str));
    let position = |level: &Option<String>| level.as_ref().and_then(|level| known().position(|k| k == level));
    let (require, prefer) = (position(&topology.require), position(&topology.prefer));
    let help = |level: &str| match nearest(level, known()) {
        _ if levels.is_empty() => "leave `topology` out: the pool has no levels above its nodes".to_owned(),
        Some(near) => format!("write `{near}`"),
        None => format!("write {}", one_of(known())),
    };
    if let (Some(level), None) = (&topology.require, require) {
        let d = Diagnostic::error(DiagnosticCode::NotSupported, format!("the pool has no level `{level}`"));
        found.push(d.field("topology.require").help(help(level)));
    }
    if let (Some(level), None) = (&topology.prefer, prefer) {
        let message = format!("the pool has no level `{level}`, so any place is as good");
        let d = Diagnostic::warning(DiagnosticCode::NotSupported, message);
        found.push(d.field("topology.prefer").help(help(level)));
    }
    if let (Some(require), Some(prefer)) = (require, prefer)
        && prefer >= require
    {
        let d =
            Diagnostic::warning(DiagnosticCode::Conflict, "what is required is at least as near as what is preferred");
        found.push(d.field("topology.prefer").help("prefer a smaller level, or remove the line"));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::{Defaults, parse_job};

    fn check(text: &str, body: &str) -> Vec<(String, bool)> {
        let image = if body == LOCAL || text.starts_with("image") { "" } else { "image: a:1\n" };
        let text = format!("name: a\nrun: python train.py\n{image}{text}");
        let parsed = parse_job("job.yaml", text.as_bytes(), &Defaults::default()).expect("document");
        let levels = ["leaf".to_owned(), "spine".to_owned()];
        check_support(&parsed.spec, body, &levels).into_iter().map(|d| (d.field.clone(), d.is_error())).collect()
    }

    #[test]
    fn what_is_not_done_is_said() {
        let digest = "0".repeat(64);
        let cases = [
            (
                "notify: [{webhook: 'http://169.254.169.254/x', on: [failed]}]".to_owned(),
                "notify[0].webhook",
                true,
                true,
            ),
            ("topology: {require: rack}".to_owned(), "topology.require", true, true),
            ("topology: {prefer: rack}".to_owned(), "topology.prefer", false, true),
            ("topology: {require: leaf, prefer: spine}".to_owned(), "topology.prefer", false, true),
            (format!("image: example.org/a@sha256:{digest}"), "image", true, false),
            ("data: [{name: d, source: s3://b/c, mount: /d}]".to_owned(), "data[0].source", true, false),
            ("resources: {cpuPerGpu: 4}".to_owned(), "resources", false, false),
        ];
        for (text, field, is_error, everywhere) in cases {
            assert_eq!(check(&text, LOCAL), [(field.to_owned(), is_error)], "{text}");
            assert_eq!(check(&text, "kubernetes").len(), usize::from(everywhere), "{text}");
        }
        for text in [
            "data: [{name: d, source: file:///tmp/x, mount: /d}]",
            "after: [{job: b, on: succeeded}]",
            "topology: {require: spine, prefer: leaf, maxWait: 5m}",
            "topology: {require: node}",
            "notify: [{webhook: 'https://example.org/x', on: [failed]}, {webhook: 'http://127.0.0.1:80/', on: [idle]}]",
        ] {
            assert_eq!(check(text, LOCAL), [], "{text}");
        }
        let own = "notify: [{webhook: 'http://[::1]:80/', on: [idle]}]";
        assert_eq!(check(own, "kubernetes"), [("notify[0].webhook".to_owned(), true)]);
    }

    #[test]
    fn what_a_cluster_does_not_do_is_refused() {
        let check = |text: &str| {
            let text = format!("name: a\nrun: python train.py\n{text}");
            let spec = parse_job("job.yaml", text.as_bytes(), &Defaults::default()).expect("document").spec;
            check_support(&spec, "kubernetes", &[])
                .into_iter()
                .map(|d| (d.field.clone(), d.is_error()))
                .collect::<Vec<_>>()
        };
        assert_eq!(check(""), [("image".to_owned(), true)], "it has nothing to run in");
        assert_eq!(check("environment: torch\nrequirements: a.lock"), []);
        assert_eq!(check("image: a:1"), []);
    }

    #[test]
    fn a_level_that_is_not_there_is_told_with_those_that_are() {
        let topology = |require: &str| Topology { require: Some(require.to_owned()), ..Topology::default() };
        let levels = levels_of([&["leaf".to_owned(), "spine".to_owned()][..], &["leaf".to_owned()]]);
        let help = |require: &str, levels: &[String]| check_levels(&topology(require), levels)[0].help.clone();
        assert_eq!(help("rack", &levels).as_deref(), Some("write `node`, `leaf` or `spine`"));
        assert_eq!(help("leafs", &levels).as_deref(), Some("write `leaf`"));
        assert_eq!(help("leaf", &[]).as_deref(), Some("leave `topology` out: the pool has no levels above its nodes"));
    }
}
