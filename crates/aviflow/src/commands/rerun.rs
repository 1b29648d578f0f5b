//! `rerun`: the submitted document and everything it was resolved to, once more.

use super::{App, run};
use crate::cli::RerunArgs;
use crate::client::Client;
use crate::error::{Failure, Result};
use crate::output::note;
use crate::render::jobs::name;
use crate::submit::data::fingerprint;
use crate::submit::{defaults, draw};
use aviflow_api::file::Document;
use aviflow_api::rest::{JobDetail, Submit};
use aviflow_api::spec::JobSpec;
use std::path::Path;
use std::process::ExitCode;

/// `aviflow rerun`
pub fn rerun(app: &App, args: &RerunArgs) -> Result<ExitCode> {
    let client = app.client()?;
    let job = client.job(&args.job)?;
    let missing = missing_objects(&client, &job)?;
    if !missing.is_empty() {
        return Err(differs(&job, &missing).help("submit its document again with `aviflow run`"));
    }
    let differences = differences(&job);
    if args.exact {
        if !differences.is_empty() {
            return Err(differs(&job, &differences).help(format!(
                "restore what changed, or run it without --exact: `aviflow rerun {}`",
                name(&job.summary)
            )));
        }
        note("exact: code, environment, data and seed are those of the first run");
    } else {
        differences.iter().for_each(|d| note(&format!("differs from the first run: {d}")));
    }
    let mut provenance = job.provenance.clone();
    provenance.rerun_of = Some(format!("{}/{}", job.summary.namespace, job.summary.name));
    let mut spec = job.spec.clone();
    if !args.set.is_empty() {
        spec = changed(&job.spec, &args.set, app)?;
    }
    if !args.exact {
        // The record is of this run: data that changed is recorded as it is now.
        for data in &spec.data {
            let now = provenance.data.get_mut(&data.name).zip(fingerprint(Path::new(&data.source)).ok());
            if let Some((recorded, now)) = now {
                *recorded = now;
            }
        }
    }
    let again = client.submit(&Submit { spec, provenance })?;
    if args.exact && again.hash != job.hash {
        note(&format!("warning: the control plane gave it another hash ({}); please report this", again.hash));
    }
    run::submitted(app, &client, &again, args.detach)
}

fn differs(job: &JobDetail, differences: &[String]) -> Failure {
    let mut failure = Failure::new(format!("{} cannot be run again exactly as it was:", name(&job.summary)));
    for difference in differences {
        failure = failure.why(difference.clone());
    }
    failure
}

/// Content that the store no longer has.
fn missing_objects(client: &Client, job: &JobDetail) -> Result<Vec<String>> {
    let mut missing = Vec::new();
    let code = job.provenance.code.iter().map(|c| ("code snapshot", &c.sha256));
    let locks = job.provenance.locks().map(|lock| ("packages' lock", lock));
    for (what, sha256) in code.chain(locks) {
        if !client.has_object(sha256)? {
            missing.push(format!("its {what} {} is no longer kept", short(sha256)));
        }
    }
    Ok(missing)
}

/// What would be different from the first run, as far as it can be seen from here.
fn differences(job: &JobDetail) -> Vec<String> {
    let mut found = Vec::new();
    if job.spec.seed.is_none() {
        found.push("no seed was recorded, so the training draws another one".to_owned());
    }
    for data in &job.spec.data {
        let Some(recorded) = job.provenance.data.get(&data.name) else {
            found.push(format!("data `{}` at {} has no fingerprint, so it may have changed", data.name, data.source));
            continue;
        };
        match fingerprint(Path::new(&data.source)) {
            Ok(now) if now == *recorded => {}
            Ok(now) => found.push(format!(
                "data `{}` at {} has changed: {} was {}",
                data.name,
                data.source,
                short(&now),
                short(recorded)
            )),
            Err(failure) => found.push(format!("data `{}`: {}", data.name, failure.message)),
        }
    }
    let here = [("os", std::env::consts::OS), ("arch", std::env::consts::ARCH), ("aviflow", env!("CARGO_PKG_VERSION"))];
    for (fact, now) in here {
        match job.provenance.client.get(fact) {
            Some(before) if before != now => found.push(format!("{fact} is {now}, it was {before}")),
            _ => {}
        }
    }
    found
}

/// The first digits of a hash, with the mark in front of it.
fn short(hash: &str) -> String {
    let digits = hash.len().saturating_sub(64) + 12;
    hash.get(..digits).unwrap_or(hash).to_owned()
}

/// The document with fields set. What was resolved by content cannot be set: it would be resolved anew.
fn changed(spec: &JobSpec, set: &[String], app: &App) -> Result<JobSpec> {
    let style = app.output.error_style;
    let text = serde_json::to_string_pretty(spec)
        .map_err(|e| Failure::platform(format!("the document cannot be written: {e}")))?;
    let mut document = Document::parse("the submitted document", text.as_bytes())
        .map_err(|(sources, d)| Failure::document(draw(&d, &sources, style)))?;
    for field in set {
        let applied = document.apply_set(field);
        applied.map_err(|d| Failure::document(draw(&d, document.sources(), style)))?;
    }
    let parsed =
        document.read(&defaults(&app.config)).map_err(|d| Failure::document(draw(&d, document.sources(), style)))?;
    let new = parsed.spec;
    let kept = [
        ("environment", new.environment == spec.environment),
        ("image", new.image == spec.image),
        ("requirements", new.requirements == spec.requirements),
        ("code", new.code == spec.code),
        ("data", new.data == spec.data),
    ];
    match kept.iter().find(|(_, same)| !same) {
        None => Ok(new),
        Some((field, _)) => Err(Failure::usage(format!(
            "`{field}` of a rerun cannot be set: it was resolved when the job was submitted"
        ))
        .help("submit the document again with `aviflow run`")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::samples;

    fn sample(data: &Path) -> JobDetail {
        let mut detail = samples::detail(samples::running());
        detail.provenance.client.insert("arch".into(), std::env::consts::ARCH.into());
        detail.spec.data[0].source = data.display().to_string();
        detail.provenance.data.insert("corpus".into(), fingerprint(data).expect("print"));
        detail
    }

    #[test]
    fn what_changed_is_listed() {
        let file = tempfile::NamedTempFile::new().expect("file");
        let mut detail = sample(file.path());
        assert_eq!(differences(&detail), Vec::<String>::new());
        std::fs::write(file.path(), "changed").expect("write");
        detail.spec.seed = None;
        detail.provenance.client.insert("arch".into(), "pdp11".into());
        let found = differences(&detail);
        assert_eq!(found.len(), 3, "{found:?}");
        assert!(found[1].contains("has changed: ") && found[1].contains(" was e3b0c44298fc"), "{}", found[1]);
        assert!(found[2].ends_with("it was pdp11"), "{}", found[2]);
        let text = differs(&detail, &found[..1]).render(crate::render::style::Style::plain());
        insta::assert_snapshot!(text, @r"
        error: tiny-gpt-2 cannot be run again exactly as it was:
          no seed was recorded, so the training draws another one
        ");
    }
}
