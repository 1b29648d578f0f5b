//! What a body does not do, so that nobody relies on it: refused where the job
//! would come out otherwise than declared, warned of where it only lacks something.

use crate::diagnostic::{Diagnostic, DiagnosticCode};
use crate::spec::JobSpec;

/// The body that runs a job, as `ServerInfo.body` names it.
pub const LOCAL: &str = "local";

/// Reports fields that this version, or this body, does not act on. The errors
/// have no place; the fields are named.
#[must_use]
pub fn check_support(spec: &JobSpec, body: &str) -> Vec<Diagnostic> {
    let mut found = Vec::new();
    let error = |field: String, message: String, help: String| {
        Diagnostic::error(DiagnosticCode::NotSupported, message).field(field).help(help)
    };
    let warning = |field: &str, message: &str, help: &str| {
        Diagnostic::warning(DiagnosticCode::NotSupported, message).field(field).help(help)
    };
    if let Some(after) = spec.after.first() {
        found.push(error(
            "after".to_owned(),
            "jobs do not wait for other jobs yet".to_owned(),
            format!("submit this one once `{}` has ended: `aviflow run` returns then", after.job),
        ));
    }
    if !spec.notify.is_empty() {
        found.push(warning("notify", "nobody is notified yet", "follow the job with `aviflow logs -f`"));
    }
    if let Some(level) = spec.topology.as_ref().and_then(|t| t.require.as_ref()) {
        found.push(error(
            "topology.require".to_owned(),
            format!("the pool has no level `{level}`"),
            "leave `topology` out: this pool has no levels above its nodes".to_owned(),
        ));
    } else if spec.topology.is_some() {
        found.push(warning("topology", "the pool has no levels above its nodes", "leave `topology` out"));
    }
    if body != LOCAL {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::{Defaults, parse_job};

    fn check(text: &str, body: &str) -> Vec<(String, bool)> {
        let text = format!("name: a\nrun: python train.py\n{text}");
        let parsed = parse_job("job.yaml", text.as_bytes(), &Defaults::default()).expect("document");
        check_support(&parsed.spec, body).into_iter().map(|d| (d.field.clone(), d.is_error())).collect()
    }

    #[test]
    fn what_is_not_done_is_said() {
        let digest = "0".repeat(64);
        let cases = [
            ("after: [{job: b, on: succeeded}]".to_owned(), "after", true, true),
            ("notify: [{webhook: https://example.org/x, on: [failed]}]".to_owned(), "notify", false, true),
            ("topology: {require: leaf}".to_owned(), "topology.require", true, true),
            ("topology: {prefer: leaf}".to_owned(), "topology", false, true),
            (format!("image: example.org/a@sha256:{digest}"), "image", true, false),
            ("data: [{name: d, source: s3://b/c, mount: /d}]".to_owned(), "data[0].source", true, false),
            ("resources: {cpuPerGpu: 4}".to_owned(), "resources", false, false),
        ];
        for (text, field, is_error, everywhere) in cases {
            assert_eq!(check(&text, LOCAL), [(field.to_owned(), is_error)], "{text}");
            assert_eq!(check(&text, "kubernetes").len(), usize::from(everywhere), "{text}");
        }
        assert!(check("data: [{name: d, source: file:///tmp/x, mount: /d}]", LOCAL).is_empty());
    }
}
