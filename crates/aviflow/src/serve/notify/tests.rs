use super::send::tests::{Answer, receiver};
use super::*;
use aviflow_core::explain;
use aviflow_core::lifecycle::Change;
use aviflow_core::model::NodeId;
use aviflow_engine::driver::Starter;
use aviflow_engine::engine::{Answer as Told, Input, Submission};
use aviflow_engine::ports::{Cluster, Observation, Stamped};
use aviflow_store::{Reader, SqliteStore};
use serde_json::Value;

struct Idling;

impl Cluster for Idling {
    fn apply(&mut self, _: &[Stamped]) {}
}

struct Nodes;

impl explain::NodeNames for Nodes {
    fn node_name(&self, _: NodeId) -> String {
        "n".to_owned()
    }
}

/// A store, and GPUs that do nothing.
struct Seen(Arc<dyn Reader>, Arc<Mutex<BTreeMap<(JobId, u32), f32>>>);

impl Sight for Seen {
    fn timeline(&self, job: JobId, after: u64) -> Sighted<Vec<(u64, Moment, String)>> {
        let rows = self.0.moments(job, after, 1000).map_err(|e| e.to_string())?;
        Ok(rows.into_iter().map(|r| (r.row, r.moment.clone(), explain::moment(&r.moment, &Nodes))).collect())
    }

    fn job(&self, job: JobId) -> Sighted<Option<(Job, JobRecord)>> {
        Ok(self.0.job(job).map_err(|e| e.to_string())?.map(|(kept, record)| (kept.job, record)))
    }

    fn newest(&self) -> Sighted<Option<JobId>> {
        Ok(self.0.jobs(&Default::default()).map_err(|e| e.to_string())?.first().map(|kept| kept.job.id))
    }

    fn busiest(&self) -> Sighted<BTreeMap<(JobId, u32), f32>> {
        Ok(self.1.lock().unwrap().clone())
    }
}

fn submit(engine: &Handle, name: &str, more: &str) -> JobId {
    let defaults = aviflow_api::file::Defaults::default();
    let text = format!("name: {name}\ngpusPerNode: 1\ntimeLimit: 1h\nrun: python train.py\n{more}");
    let spec = aviflow_api::file::parse_job("job.yaml", text.as_bytes(), &defaults).expect("a job").spec;
    let request = aviflow_api::convert::to_request(&spec, &defaults.priorities);
    let (namespace, user) = ("default".to_owned(), "ada".to_owned());
    let submission = Submission { namespace, user, spec, provenance: Default::default(), request };
    let Told::Submitted(record) = engine.submit(submission).expect("it runs") else { panic!("refused") };
    record.id
}

#[test]
fn what_no_moment_says_is_told_once() {
    let folder = tempfile::tempdir().unwrap();
    let home = Home::at(folder.path()).unwrap();
    let store = SqliteStore::open(folder.path()).unwrap();
    let reader = Arc::new(store.reader().unwrap());
    let (engine, thread) = Starter::default().start(store, Idling, |_| {}).unwrap();
    let (name, pool, gpu_type) = ("local-0".into(), "local".into(), "none".into());
    engine.observe(Observation::NodeSeen { name, pool, gpu_type, gpus: 1, path: Vec::new() }, None);
    let used = Arc::new(Mutex::new(BTreeMap::new()));
    let (wake, rules) = (Arc::new(Wake::new()), Rules { hosts: Vec::new(), loopback: true });
    let post = |way: &OnTheWay| Post::new(rules, Patience::default(), Arc::default(), done(way.clone(), wake.clone()));
    let mut teller = Teller::new(&home, &engine, Box::new(Seen(reader, used.clone())), post).unwrap();

    let (address, said) = receiver(vec![Answer::Status(200)]);
    let told = || serde_json::from_str::<Value>(&said.recv().unwrap()).unwrap();
    let first = submit(&engine, "first", "");
    let on = format!("notify: [{{webhook: '{address}', on: [estimateSlipped, idle]}}]\n");
    let second = submit(&engine, "second", &on);
    teller.changed(Changes { all: true, ..Changes::default() });
    teller.estimates();
    let change = Change { time_limit: Some(Some(Span::minutes(600))), ..Change::default() };
    engine.ask(Input::Update { job: first, change, by: "ada".into(), reason: None }).unwrap();
    teller.estimates();
    teller.estimates();
    let slipped = told();
    assert_eq!((&slipped["event"], &slipped["job"]), (&"estimateSlipped".into(), &"second".into()), "{slipped}");
    let what = slipped["what"].as_str().unwrap();
    assert!(what.starts_with("it will probably start in ") && what.ends_with(" later than was expected"), "{what}");
    assert!(slipped["reason"].as_str().is_some_and(|why| why.contains("GPU")), "{slipped}");

    used.lock().unwrap().insert((second, 1), 0.0);
    let now = engine.read(|view| view.now).unwrap();
    for minutes in [0, 29, 30, 31] {
        teller.idleness(now + Span::minutes(minutes));
    }
    // What was told twice would come before it.
    let idle = told();
    assert_eq!((&idle["event"], &idle["attempt"], &idle["phase"]), (&"idle".into(), &1.into(), &"Running".into()));
    engine.stop();
    thread.join().unwrap();
}
