//! Workers say by a hash what they run, taken of what they have unpacked.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on ends")]

mod common;

use aviflow_api::identity::{HASH_FACT, job_hash};
use aviflow_core::model::JobId;
use aviflow_engine::ports::{Observation, Order, WorkerEvent};
use aviflow_local::archive::{Archive, Entry};
use common::{Body, real, record_with, wait_until};
use serde_json::json;
use std::fs::{self, File};
use std::path::Path;

const JOB: JobId = JobId(7);

/// Archives code of one file; gives its hash and its bytes.
fn archive(text: &str, to: &Path) -> (String, u64) {
    let code = tempfile::tempdir().unwrap();
    fs::write(code.path().join("train.sh"), text).unwrap();
    let mut archive = Archive::new(File::create(to).unwrap());
    let entry = Entry::File { size: text.len() as u64, executable: false };
    archive.add(code.path(), Path::new("train.sh"), &entry).unwrap();
    archive.finish().unwrap()
}

/// What the two workers of a gang report, whose submitted code is `submitted` and whose unpacked code is `stored`.
fn check(submitted: &str, stored: &str, expected: &[u32]) {
    let home = tempfile::tempdir().unwrap();
    let objects = home.path().join("objects");
    fs::create_dir(&objects).unwrap();
    let (sha256, bytes) = archive(submitted, &objects.join("new"));
    let (found, _) = archive(stored, &objects.join(&sha256));
    let code = json!({"code": {"sha256": sha256, "bytes": bytes, "files": 1}});
    let job = record_with(7, json!({"run": ["sh", "train.sh"], "nodes": {"min": 2, "max": 2}}), code);
    let mut body = Body::start(real(home.path()), 1);
    body.reconcile(&[]);
    body.launch(&job, &["n0", "n1"]);
    let wait = |body: &Body, what: &str, is: fn(&WorkerEvent) -> bool| {
        body.reports.wait(what, |reports| {
            let these = |o: &&Observation| matches!(o, Observation::Worker { event, .. } if is(event));
            (reports.seen.iter().filter(these).count() == 2).then_some(())
        });
    };
    wait(&body, "both ready", |e| matches!(e, WorkerEvent::Ready { .. }));
    body.confirm(JOB, 1);
    wait(&body, "both gone", |e| matches!(e, WorkerEvent::Gone { .. }));
    let mut told = body.reports.change(|reports| {
        let facts = |o: &Observation| match o {
            Observation::Worker { worker, event: WorkerEvent::Facts { values }, .. } => {
                Some((*worker, values[HASH_FACT].clone()))
            }
            _ => None,
        };
        reports.seen.iter().filter_map(facts).collect::<Vec<_>>()
    });
    told.sort();
    let mut provenance = job.provenance.clone();
    provenance.code.as_mut().unwrap().sha256 = found;
    let hash = job_hash(&job.spec, &provenance);
    assert_eq!(hash == job_hash(&job.spec, &job.provenance), submitted == stored);
    let expected: Vec<_> = expected.iter().map(|worker| (*worker, hash.clone())).collect();
    assert_eq!(told, expected);
    body.order(Order::Remove { job: JOB, attempt: 1 });
    for worker in [0, 1] {
        let folder = body.folder(JOB, worker);
        wait_until("the folder is removed", || !folder.exists());
    }
}

#[test]
fn worker_0_speaks_for_all_that_found_what_was_submitted() {
    check("true", "true", &[0]);
}

#[test]
fn whoever_found_something_else_says_so() {
    check("true", "false", &[0, 1]);
}
