//! Submissions, and the question what would become of one.
//!
//! Whatever the client checked is checked again: the document, the objects it
//! refers to, the hash of its environment, and that the pool can hold it. What
//! containers are to run is resolved here and never taken from a client.

use crate::access::Caller;
use crate::app::{App, blocking};
use crate::error::Failure;
use crate::jobs;
use crate::names::resolve;
use crate::params::Input;
use crate::secret::{restored, shown};
use crate::view::{Names, Waits, count, verdict};
use aviflow_api::check::{LOCAL, check_support, levels_of};
use aviflow_api::convert::to_request;
use aviflow_api::diagnostic::Diagnostic;
use aviflow_api::environment::{self, Description, check_lock};
use aviflow_api::file::check_spec;
use aviflow_api::rest::{JobDetail, PlanAnswer, Submit};
use aviflow_api::rights::Right;
use aviflow_api::spec::{JobSpec, Layer, Provenance};
use aviflow_core::explain::NodeNames;
use aviflow_core::model::{EnvironmentHash, EnvironmentState, Job, JobId, JobKey, Request, Snapshot};
use aviflow_core::schedule::{Decision, Memo, plan};
use aviflow_engine::engine::{Answer, Refusal, Submission, refusal};
use aviflow_engine::ports::JobRecord;
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use std::io;
use std::sync::Arc;

pub(crate) async fn submit(
    State(app): State<Arc<App>>,
    caller: Caller,
    Input(mut submit): Input<Submit>,
) -> Result<(StatusCode, Json<JobDetail>), Failure> {
    app.needs(&caller, &Right::use_queue(&submit.spec.queue)).await?;
    // Which object a job came from is known by who watches objects, and by no client.
    submit.provenance.object = None;
    let submission = in_parts(&app, move |app| {
        let submission = checked(app, submit, &caller)?;
        // Said before anything is uploaded; the engine decides it again.
        let (request, user) = (submission.request.clone(), submission.user.clone());
        app.view(move |view| possible(view.snapshot, &request, &user))??;
        Ok(submission)
    })
    .await?;
    blocking(move || {
        let missing = missing(&app, &submission.provenance)?;
        if !missing.is_empty() {
            return Err(Failure::missing(missing));
        }
        check_hash(&app, &submission.provenance)?;
        match app.parts.engine.submit(submission)? {
            Answer::Submitted(record) => Ok((StatusCode::CREATED, Json(jobs::detail(&app, record.id)?))),
            Answer::Refused(refusal) => Err(refusal.into()),
            Answer::Done | Answer::DoneWith(_) | Answer::Rolling { .. } => {
                Err(Failure::internal("the engine took a submission and made no job of it"))
            }
        }
    })
    .await
}

/// A submission that came as an object of the cluster.
#[derive(Clone, Debug)]
pub struct Applied {
    /// The namespace.
    pub namespace: String,
    /// Who applied it.
    pub user: String,
    /// The document.
    pub spec: JobSpec,
    /// What it was resolved to; names the object.
    pub provenance: Provenance,
}

/// Why an object was not taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct NotTaken {
    /// A stable word for programs, such as `NoSuchQueue`.
    pub reason: String,
    /// What happened and what to do, in a sentence.
    pub message: String,
}

impl From<Failure> for NotTaken {
    fn from(failure: Failure) -> NotTaken {
        // Words of the API begin with a small letter, those of conditions with a capital.
        let mut reason = failure.error.code.clone();
        if let Some(first) = reason.get_mut(..1) {
            first.make_ascii_uppercase();
        }
        NotTaken { reason, message: failure.sentence() }
    }
}

/// Submits an object, or finds the job that an earlier try has made of it.
pub(crate) async fn submit_applied(app: &Arc<App>, applied: Applied) -> Result<(JobId, JobKey), Failure> {
    let about = applied.clone();
    // Before anything is resolved: a job stays what it was, also where its tag has moved since.
    if let Some(found) = within(app, move |app| earlier(app, &about)).await? {
        return Ok(found);
    }
    let submission = in_parts(app, move |app| {
        let Applied { namespace, user, spec, provenance } = applied;
        checked(app, Submit { spec, provenance }, &Caller::admitted(user, namespace))
    })
    .await?;
    within(app, move |app| {
        let missing = missing(app, &submission.provenance)?;
        if !missing.is_empty() {
            return Err(Failure::missing(missing));
        }
        check_hash(app, &submission.provenance)?;
        match app.parts.engine.submit(submission)? {
            Answer::Submitted(record) => Ok((record.id, record.key.clone())),
            Answer::Refused(refusal) => Err(refusal.into()),
            Answer::Done | Answer::DoneWith(_) | Answer::Rolling { .. } => {
                Err(Failure::internal("the engine took a submission and made no job of it"))
            }
        }
    })
    .await
}

/// The job that was made of an object.
fn earlier(app: &App, applied: &Applied) -> Result<Option<(JobId, JobKey)>, Failure> {
    let object = applied.provenance.object.clone();
    let same = move |record: &JobRecord| object.is_some() && record.provenance.object == object;
    // A job of this object has the object's name; where there is none of that name, there is none of it.
    let Some(newest) = app.parts.reader.latest_of(&applied.namespace, &applied.spec.name, None)? else {
        return Ok(None);
    };
    let record = jobs::record(app, newest)?;
    if same(&record) {
        return Ok(Some((record.id, record.key.clone())));
    }
    app.view(move |view| view.records.values().find(|r| same(r)).map(|r| (r.id, r.key.clone())))
}

/// Does what may wait for the disk or the engine.
async fn within<T: Send + 'static>(
    app: &Arc<App>,
    work: impl FnOnce(&App) -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    let app = app.clone();
    blocking(move || work(&app)).await
}

/// Checks a submission, and then resolves what its containers run: who is refused anyway asks no registry.
async fn in_parts(
    app: &Arc<App>,
    check: impl FnOnce(&App) -> Result<Submission, Failure> + Send + 'static,
) -> Result<Submission, Failure> {
    let mut submission = within(app, check).await?;
    if submission.provenance.image.is_none() {
        submission.provenance.image = app.parts.body.resolve(&submission.namespace, &submission.spec).await?;
    }
    if let (Some(layer), Some(image)) = (&submission.provenance.layer, &submission.provenance.image) {
        let mut platform = layer.platform.clone();
        if platform.is_empty() {
            platform = app.parts.body.platform(&submission.spec).await?;
        }
        // Always taken anew: by it one job finds what was made for another.
        submission.provenance.layer = Some(Layer::new(&submission.namespace, image, &layer.lock, &platform));
    }
    Ok(submission)
}

/// The submission as the engine takes it; what depends on objects is not checked, and what containers run is not
/// resolved but for a job that is repeated, which runs what it ran.
fn checked(app: &App, submit: Submit, caller: &Caller) -> Result<Submission, Failure> {
    let Submit { mut spec, mut provenance } = submit;
    let admitted = provenance.object.is_some();
    // Of an object only who may restore one has written it.
    provenance.image = provenance.image.filter(|_| admitted);
    if let Some(layer) = &mut provenance.layer
        && !admitted
    {
        layer.platform.clear();
    }
    if let Some(name) = &provenance.rerun_of
        && let Ok(id) = resolve(app, name, caller)
    {
        let record = jobs::record(app, id)?;
        spec = restored(spec, &record.spec, record.user == caller.user)?;
        if (&spec.image, &spec.environment) == (&record.spec.image, &record.spec.environment) {
            provenance.image.clone_from(&record.provenance.image);
            let same_file = spec.requirements == record.spec.requirements;
            provenance.layer = repeated(provenance.layer.take(), record.provenance.layer.as_ref(), same_file);
        }
    }
    let body = app.parts.body.name();
    if body != LOCAL {
        // An environment of locked packages is this machine's; a cluster has images.
        provenance.environment = None;
    }
    provenance.layer = provenance.layer.filter(|_| body != LOCAL && spec.requirements.is_some());
    let problems = match check_spec(&spec, &app.parts.defaults) {
        Err(problems) => problems,
        Ok(_) => {
            // The engine is asked only by those who name levels.
            let levels = match &spec.topology {
                Some(_) => app.view(|view| levels_of(view.snapshot.pools.values().map(|p| p.levels.as_slice())))?,
                None => Vec::new(),
            };
            check_support(&spec, body, &levels)
        }
    };
    if problems.iter().any(Diagnostic::is_error) {
        let errors: Vec<_> = problems.into_iter().filter(Diagnostic::is_error).collect();
        let list: Vec<&str> = errors.iter().map(|d| d.message.as_str()).collect();
        let failure = Failure::refused("invalidSpec", list.join("; "));
        return Err(match errors.into_iter().find_map(|d| d.help) {
            Some(help) => failure.help(help),
            None => failure,
        });
    }
    check_provenance(&spec, &provenance, body)?;
    let request = to_request(&spec, &app.parts.defaults.priorities);
    let Caller { namespace, user, .. } = caller.clone();
    Ok(Submission { namespace, user, spec, provenance, request })
}

/// The layer of a job that repeats another: the recorded one, unless it brings another lock.
fn repeated(submitted: Option<Layer>, recorded: Option<&Layer>, same_file: bool) -> Option<Layer> {
    match (submitted, recorded) {
        (Some(own), Some(recorded)) if own.lock == recorded.lock => Some(recorded.clone()),
        (None, Some(recorded)) if same_file => Some(recorded.clone()),
        (own, _) => own,
    }
}

fn check_provenance(spec: &JobSpec, provenance: &Provenance, body: &str) -> Result<(), Failure> {
    let unresolved = |what: &str| {
        Failure::refused(
            "unresolved",
            format!("the document names {what}, and the submission does not say which by its content"),
        )
        .help("submit it with `aviflow run`, which resolves it")
    };
    if spec.code.is_some() && provenance.code.is_none() {
        return Err(unresolved("code"));
    }
    if spec.requirements.is_some() && provenance.layer.is_none() && body != LOCAL {
        return Err(unresolved("requirements"));
    }
    let objects = provenance.code.iter().map(|c| &c.sha256);
    if let Some(wrong) = objects.chain(provenance.locks()).find(|hash| !is_sha256(hash)) {
        return Err(Failure::bad(format!("`{wrong}` is no SHA-256 in 64 hexadecimal digits")));
    }
    match (&spec.environment, &provenance.environment) {
        (Some(_), None) if body == LOCAL => Err(unresolved("an environment")),
        (Some(wanted), Some(resolved)) => {
            let named = wanted == &resolved.name || *wanted == format!("{}@{}", resolved.name, resolved.version);
            if !named {
                let message = format!(
                    "the document names environment `{wanted}`, and the submission resolves `{}@{}`",
                    resolved.name, resolved.version
                );
                return Err(Failure::refused("environmentMismatch", message).help("submit the document again"));
            }
            Ok(())
        }
        (None, _) | (Some(_), None) => Ok(()),
    }
}

/// The cache is shared by all users and found by the hash: a wrong one would poison it.
/// Every lock must be there, and that of a layer be one.
fn check_hash(app: &App, provenance: &Provenance) -> Result<(), Failure> {
    let read = |hash: &String| {
        app.parts.objects.read(hash).map_err(|e| match e.kind() {
            io::ErrorKind::NotFound => Failure::missing(vec![hash.clone()]),
            _ => Failure::io("a lock cannot be read", &e),
        })
    };
    if let Some(layer) = &provenance.layer
        && let Some(wrong) = check_lock("requirements", &read(&layer.lock)?).into_iter().next()
    {
        let failure = Failure::refused("notLocked", format!("the lock of `requirements` is none: {}", wrong.message));
        return Err(wrong.help.into_iter().fold(failure, Failure::help));
    }
    let Some(resolved) = &provenance.environment else { return Ok(()) };
    let locks = resolved.locks.iter().map(read).collect::<Result<Vec<_>, _>>()?;
    let description = Description {
        name: resolved.name.clone(),
        version: resolved.version,
        description: String::new(),
        owner: None,
        python: resolved.python.clone(),
        requirements: String::new(),
        env: resolved.env.clone(),
    };
    let locks: Vec<&[u8]> = locks.iter().map(Vec::as_slice).collect();
    let hash = environment::hash(&description, &locks);
    if hash == resolved.hash {
        return Ok(());
    }
    let message = format!(
        "environment `{}@{}` has the content {hash}, and the submission says {}",
        resolved.name, resolved.version, resolved.hash
    );
    Err(Failure::refused("environmentMismatch", message)
        .help("update the client to the server's version and submit again"))
}

/// Objects that the submission refers to and that are not here. Those that are here
/// become young, so that they stay until the job that refers to them is durable.
fn missing(app: &App, provenance: &Provenance) -> Result<Vec<String>, Failure> {
    let code = provenance.code.iter().map(|c| &c.sha256);
    let mut missing = Vec::new();
    for hash in code.chain(provenance.locks()) {
        let there = app.parts.objects.touch(hash);
        if !there.map_err(|e| Failure::io("an object cannot be kept", &e))? {
            missing.push(hash.clone());
        }
    }
    missing.sort_unstable();
    missing.dedup();
    Ok(missing)
}

pub(crate) fn is_sha256(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

pub(crate) async fn what_if(
    State(app): State<Arc<App>>,
    caller: Caller,
    Input(submit): Input<Submit>,
) -> Result<Json<PlanAnswer>, Failure> {
    app.needs(&caller, &Right::use_queue(&submit.spec.queue)).await?;
    let submission = in_parts(&app, move |app| checked(app, submit, &caller)).await?;
    blocking(move || {
        // Objects may be missing: nothing is run, so nothing has to be uploaded.
        if missing(&app, &submission.provenance)?.is_empty() {
            check_hash(&app, &submission.provenance)?;
        }
        answer(&app, submission).map(Json)
    })
    .await
}

/// Plans a copy of the present with the job added to it.
fn answer(app: &App, submission: Submission) -> Result<PlanAnswer, Failure> {
    let (mut snapshot, now) = app.view(|view| (view.snapshot.clone(), view.now))?;
    let request = submission.request;
    // What can never start gets a verdict; that is what was asked.
    if let Some(refusal) = refusal(&snapshot, &request, &submission.user)
        && !matches!(refusal, Refusal::NeverFits(_))
    {
        return Err(refusal.into());
    }
    let environment = submission.provenance.made_first().map(|hash| EnvironmentHash(hash.to_owned()));
    let ready = environment.as_ref().is_none_or(|hash| {
        snapshot.environments.get(hash) == Some(&EnvironmentState::Ready) || app.parts.body.environment_ready(&hash.0)
    });
    if let Some(hash) = &environment {
        let state = if ready { EnvironmentState::Ready } else { EnvironmentState::Preparing };
        snapshot.environments.insert(hash.clone(), state);
    }
    let namespace = submission.namespace;
    let name = free_name(app, &namespace, &submission.spec.name)?;
    // Higher than any, as the engine's next number will be.
    let id = JobId(u64::MAX);
    let key = JobKey { namespace, name: name.clone() };
    let job = Job::submitted(id, key, submission.user, request, environment, now);
    snapshot.waiting.insert(id);
    snapshot.jobs.insert(id, job);
    let plan = plan(&snapshot, &mut Memo::default(), now);
    let placement = plan.decisions.iter().find_map(|decision| match decision {
        Decision::Start { job, placement } => (*job == id).then_some(placement),
        Decision::Claim { .. }
        | Decision::Unclaim { .. }
        | Decision::Evict { .. }
        | Decision::Spare { .. }
        | Decision::Suspend { .. }
        | Decision::Window { .. }
        | Decision::Take { .. } => None,
    });
    let names = Names::of(&snapshot);
    let waits = plan.verdict(id).map(|(constraint, place)| Waits {
        constraint: constraint.clone(),
        place,
        waiting: count(plan.waiting.len()),
    });
    Ok(PlanAnswer {
        name,
        starts_now: placement.is_some(),
        on: placement.into_iter().flat_map(|p| &p.0).map(|(node, _)| names.node_name(*node)).collect(),
        verdict: waits.map(|w| {
            let mut verdict = verdict(app, &w, now);
            crate::verdict::complete(&mut verdict, &snapshot, id, &w.constraint, now);
            verdict
        }),
        moves: crate::verdict::moves(&snapshot, &plan, id),
        environment_ready: ready,
        spec: shown(&submission.spec),
    })
}

/// Whether the engine would take it.
fn possible(snapshot: &Snapshot, request: &Request, user: &str) -> Result<(), Failure> {
    refusal(snapshot, request, user).map_or(Ok(()), |refusal| Err(refusal.into()))
}

/// The name that the engine would give.
fn free_name(app: &App, namespace: &str, name: &str) -> Result<String, Failure> {
    let mut key = JobKey { namespace: namespace.to_owned(), name: name.to_owned() };
    let mut suffix = 1u64;
    while app.parts.reader.find(&key)?.is_some() {
        suffix += 1;
        key.name = format!("{name}-{suffix}");
    }
    Ok(key.name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::support::{LOCK, World, minimal, sha256};
    use std::fs::File;
    use std::time::{Duration, SystemTime};

    #[test]
    fn a_repetition_has_its_own_lock_where_it_brings_another() {
        let layer = |lock: &str, platform: &str| {
            Some(Layer { lock: lock.to_owned(), platform: platform.to_owned(), hash: String::new() })
        };
        let recorded = layer("1", "linux/arm64");
        let check = |submitted: Option<Layer>, same_file: bool, expected: &Option<Layer>| {
            assert_eq!(repeated(submitted, recorded.as_ref(), same_file), *expected);
        };
        check(layer("1", ""), true, &recorded);
        check(layer("1", ""), false, &recorded);
        check(layer("2", ""), true, &layer("2", ""));
        check(None, true, &recorded);
        check(None, false, &None);
        assert_eq!(repeated(layer("2", ""), None, false), layer("2", ""), "the first run had none");
    }

    #[tokio::test]
    async fn a_lock_that_is_missing_when_the_hash_is_checked_is_no_lock_that_fits() {
        let world = World::new();
        let provenance = Provenance { environment: Some(minimal()), ..Provenance::default() };
        let failure = check_hash(&world.server.app, &provenance).unwrap_err();
        assert_eq!((failure.status, failure.error.code.as_str()), (StatusCode::CONFLICT, "missingObjects"));
        world.objects.put(LOCK.as_bytes()).unwrap();
        check_hash(&world.server.app, &provenance).unwrap();
    }

    #[tokio::test]
    async fn what_a_submission_refers_to_stays_until_it_is_durable() {
        let world = World::new();
        let provenance = Provenance { environment: Some(minimal()), ..Provenance::default() };
        world.objects.put(LOCK.as_bytes()).unwrap();
        let hash = sha256(LOCK.as_bytes());
        let file = world.folder.path().join("objects/sha256").join(&hash[..2]).join(&hash[2..]);
        let hour_ago = SystemTime::now() - Duration::from_secs(3600);
        File::open(file).unwrap().set_modified(hour_ago).unwrap();
        assert_eq!(missing(&world.server.app, &provenance).unwrap(), Vec::<String>::new());
        let collected = world.objects.collect(&[].into(), hour_ago + Duration::from_secs(60)).unwrap();
        assert_eq!(collected.files, 0);
    }
}
