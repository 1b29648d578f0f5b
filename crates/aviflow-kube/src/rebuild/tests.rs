//! What comes of objects, pods and nodes, without a cluster.

use super::*;
use crate::names;
use crate::pod::{self, Owner as PodOwner, Share};
use crate::profile::Profile;
use aviflow_api::crd::to_object;
use aviflow_api::file::{Defaults, parse_job};
use aviflow_api::spec::{CodeSnapshot, Provenance};
use aviflow_core::lint::lint;
use aviflow_core::model::{Intent, WorkerState};
use aviflow_engine::engine::Engine;
use aviflow_engine::memory::MemoryStore;
use aviflow_engine::ports::{Order, Store};
use aviflow_engine::telemetry::StreamKey;
use serde_json::{Value, json};

const NOW: Time = Time(1_800_000_000_000);
const DAY: &str = "2027-01-14T10:00:00Z";

fn record(id: u64, name: &str, text: &str) -> JobRecord {
    let file = format!("name: {name}\nimage: i@sha256:{}\nrun: train\n{text}", "0".repeat(64));
    let spec = parse_job("job.yaml", file.as_bytes(), &Defaults::default()).unwrap().spec;
    let key = JobKey { namespace: "nlp".into(), name: name.into() };
    JobRecord { id: JobId(id), key, user: "ann".into(), submitted: Time(0), spec, provenance: Provenance::default() }
}

/// The object of a job that somebody applied, with a status.
fn applied(record: &JobRecord, status: Value) -> DynamicObject {
    let whole = to_object("nlp", &record.key.name, &record.spec, &Provenance::default());
    let mut object = DynamicObject::new(&record.key.name, &object::resource()).within("nlp");
    object.metadata.uid = Some(format!("uid-{}", record.id.0));
    object.metadata.annotations = Some([(names::SUBMITTER.to_owned(), "ann".to_owned())].into());
    let mut spec = whole["spec"].clone();
    spec.as_object_mut().unwrap().remove("provenance");
    object.data = json!({"spec": spec, "status": status});
    object
}

fn status(id: u64, phase: &str, more: Value) -> Value {
    let mut status = json!({"jobId": id, "jobName": null, "phase": phase, "submitted": DAY, "attempt": 0});
    status.as_object_mut().unwrap().remove("jobName");
    status.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    status
}

fn node(name: &str, gpus: u32) -> NodeObject {
    let amounts = json!({"nvidia.com/gpu": gpus.to_string()});
    serde_json::from_value(json!({
        "metadata": {"name": name, "labels": {}},
        "status": {"capacity": amounts, "allocatable": amounts, "conditions": [{"type": "Ready", "status": "True"}]},
    }))
    .unwrap()
}

/// The pods of an attempt, as the control plane makes them.
fn pods(record: &JobRecord, attempt: u32, nodes: &[&str]) -> Vec<Pod> {
    let site = pod::Site {
        agents: "10.0.0.1:8081".into(),
        depot: "http://10.0.0.1:8082".into(),
        authority: None,
        image: "aviflow".into(),
        priority_class: "aviflow-jobs".into(),
        log_buffer: 1,
        fence_after: Span::seconds(60),
    };
    let workers = u32::try_from(nodes.len()).unwrap();
    let one = |(worker, node): (u32, &&str)| {
        let key = StreamKey { job: record.id, attempt, worker };
        let share =
            Share { key, workers, node: (*node).to_owned(), slots: vec![0], node_gpus: 8, grace: Span::seconds(30) };
        let owner = PodOwner { name: record.key.name.clone(), uid: "u".into() };
        pod::pod(record, &share, &Profile::nvidia(DEFAULT_POOL), &site, &owner).unwrap()
    };
    (0..).zip(nodes).map(one).collect()
}

fn rebuilt(found: &Found) -> Rebuilt {
    rebuild(found, Term(1), NOW, "default", &Defaults::default().priorities)
}

/// The engine that goes on with what was rebuilt, and its first orders.
fn opened(found: &Found) -> (Engine<MemoryStore>, Vec<Order>, MemoryStore) {
    let mut store = MemoryStore::new();
    let loaded = store.acquire().unwrap();
    store.commit(&rebuild(found, loaded.term, NOW, "default", &Defaults::default().priorities).batch).unwrap();
    let (engine, orders) = Engine::open(store.handle(), NOW).unwrap();
    assert_eq!(lint(engine.snapshot()), Vec::<String>::new());
    (engine, orders.into_iter().map(|o| o.order).collect(), store)
}

fn running(id: u64, nodes: &[&str]) -> (JobRecord, Found) {
    let record = record(id, "runs", &format!("nodes: {}\ngpusPerNode: 4\n", nodes.len()));
    let conditions = json!([{"type": "Running", "status": "True", "reason": "Running", "message": "",
        "lastTransitionTime": "2027-01-15T07:00:00Z"}]);
    let more = json!({"attempt": 2, "step": 700, "on": nodes, "conditions": conditions,
        "counters": {"failures": 0, "nodeFailures": 1, "suspensions": 0, "unready": 0}});
    let found = Found {
        jobs: vec![applied(&record, status(id, "Running", more))],
        nodes: vec![node("a", 8), node("b", 8)],
        pods: pods(&record, 2, nodes),
        ..Found::default()
    };
    (record, found)
}

#[test]
fn a_gang_that_runs_is_adopted_as_it_is() {
    let (_, found) = running(41, &["a", "b"]);
    let (engine, orders, store) = opened(&found);
    let job = &engine.snapshot().jobs[&JobId(41)];
    let Phase::Running(gang) = &job.phase else { panic!("{:?}", job.phase) };
    assert_eq!((gang.attempt, gang.epoch, job.attempts, job.counters.node_failures), (2, 1, 2, 1));
    assert_eq!((gang.up, job.best_step), (read::instant("2027-01-15T07:00:00Z"), Some(700)));
    let live = vec![(JobId(41), 2)];
    assert!(matches!(&orders[0], Order::Reconcile { live: l } if *l == live), "{orders:?}");
    let launched = orders.iter().find_map(|order| match order {
        Order::Launch { nodes, heard, attempt: 2, .. } => Some((nodes.clone(), heard.clone())),
        _ => None,
    });
    let names = ["a", "b"].map(str::to_owned).to_vec();
    assert_eq!(launched, Some((names, BTreeSet::from([0, 1]))), "no pod of it is made a second time");
    // Its time begins now, and all GPUs are accounted for from then on.
    let ledger = &engine.snapshot().ledger;
    assert!(ledger.iter().all(|(_, open)| open.from == NOW));
    assert_eq!(ledger.iter().map(|(_, open)| open.slots.count()).sum::<u32>(), 16);
    assert_eq!(store.moments(JobId(41)).iter().filter(|m| m.kind == MomentKind::Rebuilt).count(), 1);
}

#[test]
fn terms_and_numbers_go_on_beyond_those_before() {
    let (_, found) = running(41, &["a"]);
    let (engine, ..) = opened(&found);
    assert_eq!(engine.term(), Term(1_800_000_001), "an agent obeys no lower term than it has seen");
    let mut store = engine.into_store();
    let loaded = store.acquire().unwrap();
    assert_eq!((loaded.last_job, loaded.generation), (41 + NUMBERS, 1));
}

#[test]
fn a_job_that_waits_keeps_its_place_and_all_that_was_said_of_it() {
    let waits = record(7, "waits", "timeLimit: 2h\n");
    let more = json!({"queue": "nlp", "priority": 5, "timeLimit": "3h", "held": "ben", "attempt": 1, "ran": 60_000,
        "jobName": "waits-2", "image": {"reference": "r/train:v1", "pinned": "r/train@sha256:ab"}});
    // One that came through the API has its number at itself, and may have another name than its document.
    let mut record = record(9, "train", "");
    record.provenance.code = Some(CodeSnapshot { sha256: "ab".into(), bytes: 1, files: 1, commit: None, dirty: false });
    let mut made = object::of_job(&record, "train-2");
    made.data["status"] = status(9, "Queued", json!({"jobName": "train-2"}));
    let found = Found { jobs: vec![applied(&waits, status(7, "Queued", more)), made], ..Found::default() };
    let (engine, _, store) = opened(&found);
    let snapshot = engine.snapshot();
    let job = &snapshot.jobs[&JobId(7)];
    assert_eq!((job.key.name.as_str(), job.request.queue.as_str(), job.request.priority), ("waits-2", "nlp", 5));
    assert_eq!((job.request.time_limit, job.held.as_deref()), (Some(Span::seconds(3 * 3600)), Some("ben")));
    assert_eq!((job.ran, job.attempts, Some(job.submitted)), (Span(60_000), 1, read::instant(DAY)));
    let record = &engine.records()[&JobId(7)];
    assert_eq!(record.provenance.object.as_ref().map(|o| o.uid.as_str()), Some("uid-7"));
    let pinned = record.provenance.image.as_ref().map(|image| image.pinned.as_str());
    assert_eq!(pinned, Some("r/train@sha256:ab"), "what its tag means by now is another question");
    let (job, record) = store.job(JobId(9)).unwrap();
    assert_eq!((job.key.name.as_str(), record.spec.name.as_str()), ("train-2", "train"));
    assert!(record.provenance.object.is_none() && record.provenance.code.is_some());
}

#[test]
fn a_job_that_has_ended_is_kept_as_its_object_tells() {
    let ended = |id, name: &str, phase: &str, reason: &str| {
        let more = json!({"ended": "2027-01-14T11:00:00Z", "reason": reason, "attempt": 1});
        applied(&record(id, name, ""), status(id, phase, more))
    };
    let jobs = vec![
        ended(1, "good", "Succeeded", ""),
        ended(2, "bad", "Failed", "rank 0 ended with exit code 3"),
        ended(3, "gone", "Cancelled", "cancelled by ben"),
    ];
    let found = Found { jobs, ..Found::default() };
    assert_eq!(rebuilt(&found).counts, [0, 0, 3]);
    let (engine, _, store) = opened(&found);
    assert!(engine.snapshot().jobs.is_empty());
    for id in 1..=3 {
        assert_eq!(store.ended(JobId(id)), read::instant("2027-01-14T11:00:00Z"), "{id}");
    }
    let phase = |id| store.job(JobId(id)).unwrap().0.phase;
    assert_eq!(phase(1), Phase::Succeeded);
    let Phase::Failed(failure) = phase(2) else { panic!("{:?}", phase(2)) };
    assert_eq!(aviflow_core::explain::failure_short(&failure), "rank 0 ended with exit code 3");
    assert_eq!(phase(3), Phase::Cancelled { by: "ben".into() });
}

#[test]
fn what_cannot_be_taken_over_whole_waits_until_nothing_of_it_runs() {
    let check = |change: &dyn Fn(&mut Found), why: &str| {
        let (_, mut found) = running(41, &["a", "b"]);
        change(&mut found);
        let rebuilt = rebuilt(&found);
        assert!(rebuilt.lost.iter().any(|l| l.contains(why)), "{why}: {:?}", rebuilt.lost);
        assert_eq!(rebuilt.counts, [0, 1, 0], "{why}");
        assert_eq!(rebuilt.batch.jobs[0].not_before, Some(NOW + SETTLE), "{why}");
        let (engine, orders, _) = opened(&found);
        assert!(matches!(&orders[0], Order::Reconcile { live } if live.is_empty()), "its pods end");
        assert!(engine.next_wake().is_some());
    };
    check(&|f| f.pods.clear(), "has no pod any more");
    check(&|f| drop(f.nodes.pop()), "was on b, which is not in the cluster any more");
    check(&|f| f.nodes[1] = node("b", 2), "has not its GPUs on b any more");
    let starting = |f: &mut Found| {
        f.jobs[0].data["status"]["phase"] = json!("Starting");
        f.pods.pop();
    };
    check(&starting, "lacks the pod of worker 1");
    // One that ran is a worker whose end the cluster tells.
    let (_, mut found) = running(41, &["a", "b"]);
    found.pods.pop();
    assert_eq!(rebuilt(&found).counts, [1, 0, 0]);
}

#[test]
fn what_was_going_on_goes_on() {
    let phase = |word: &str, reason: Option<&str>| {
        let (_, mut found) = running(41, &["a"]);
        found.jobs[0].data["status"]["phase"] = json!(word);
        found.jobs[0].data["status"]["reason"] = json!(reason);
        let (engine, ..) = opened(&found);
        engine.snapshot().jobs[&JobId(41)].phase.clone()
    };
    let Phase::Starting(gang) = phase("Starting", None) else { panic!("it starts") };
    assert_eq!((gang.workers[0].state, &gang.workers[0].address), (WorkerState::Ready, &None));
    assert!(matches!(phase("Suspending", None), Phase::Suspending(_)));
    let Phase::Stopping(stopping) = phase("Stopping", Some("cancelled by ben")) else { panic!("it stops") };
    assert_eq!(stopping.intent, Intent::Cancel { by: "ben".into() });
    let Phase::Stopping(stopping) = phase("Stopping", None) else { panic!("it stops") };
    assert_eq!(stopping.intent, Intent::Requeue, "why is not known, so it runs again");
}

#[test]
fn a_job_waits_for_the_same_jobs_as_before_or_is_held() {
    let jobs = |first: &str, second: Option<&str>| {
        let after = record(5, "after", "after: [{job: first, on: succeeded}]\n");
        let mut jobs = vec![applied(&after, status(5, "Queued", json!({})))];
        let mut add = |id, name: &str, phase: &str| {
            let more = json!({"jobName": name});
            jobs.push(applied(&record(id, name, ""), status(id, phase, more)));
        };
        add(1, "first", first);
        if let Some(second) = second {
            add(2, "first-2", second);
        }
        add(9, "first-3", "Queued");
        let (engine, ..) = opened(&Found { jobs, ..Found::default() });
        let job = &engine.snapshot().jobs[&JobId(5)];
        let after = job.after.first().map(|d| (d.job.0, d.met));
        (after, job.held.is_some())
    };
    assert_eq!(jobs("Queued", None), (Some((1, None)), false));
    assert_eq!(jobs("Succeeded", None), (Some((1, Some(true))), false));
    assert_eq!(jobs("Succeeded", Some("Queued")), (Some((2, None)), false), "the latest before it");
    assert_eq!(jobs("Failed", None), (None, true), "somebody has to say what becomes of it");
}

#[test]
fn only_what_the_control_plane_decided_by_is_taken_of_queues() {
    let queue = |name: &str, parent: Option<&str>, generation: i64| {
        let mut object = DynamicObject::new(name, &Kind::Queue.resource());
        object.metadata.generation = Some(generation);
        let accepted = json!([{"type": "Accepted", "status": "True", "observedGeneration": 1}]);
        object.data = json!({"spec": {"quotas": {}}, "status": {"conditions": accepted}});
        if let Some(parent) = parent {
            object.data["spec"]["parent"] = json!(parent);
        }
        object
    };
    let queues = vec![
        queue("research", None, 1),
        queue("nlp", Some("research"), 1),
        queue("changed", None, 2),
        queue("below", Some("changed"), 1),
        queue("round", Some("about"), 1),
        queue("about", Some("round"), 1),
    ];
    let jobs = vec![applied(&record(1, "a", ""), status(1, "Queued", json!({})))];
    let found = Found { jobs, queues, ..Found::default() };
    let batch = rebuilt(&found).batch;
    let names: Vec<&str> = batch.queues.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["default", "nlp", "research"]);
    opened(&found);
}

#[test]
fn objects_that_are_no_jobs_yet_or_none_are_left_alone() {
    let mut new = applied(&record(1, "new", ""), Value::Null);
    new.data.as_object_mut().unwrap().remove("status");
    assert!(!Found { jobs: vec![new.clone()], ..Found::default() }.has_jobs());
    let mut twice = applied(&record(1, "twice", ""), status(1, "Queued", json!({})));
    twice.metadata.name = Some("copy".into());
    let mut nobody = applied(&record(3, "nobody", ""), status(3, "Queued", json!({})));
    nobody.metadata.annotations = None;
    let jobs = vec![new, applied(&record(1, "one", ""), status(1, "Queued", json!({}))), twice, nobody];
    let rebuilt = rebuilt(&Found { jobs, ..Found::default() });
    assert_eq!(rebuilt.batch.jobs.len(), 1);
    assert!(rebuilt.lost.iter().any(|l| l.contains("nlp/copy says that it is a job that another object is")));
    assert!(rebuilt.lost.iter().any(|l| l.contains("nlp/nobody was left out: nobody stamped")), "{:?}", rebuilt.lost);
}
