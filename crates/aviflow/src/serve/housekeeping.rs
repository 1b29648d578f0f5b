//! What is old goes, from time to time: ended jobs with their logs, series and
//! folders, journal rows, and objects that no kept job refers to.
//!
//! The ledger stays: the account outlives the jobs.
//!
//! A job's row goes last, as without it nobody would find what else is kept of the
//! job. What cannot be removed holds up nothing else and is tried again next time.

use crate::error::{Result, While};
use crate::output::{note, now};
use aviflow_core::model::JobId;
use aviflow_core::time::{Span, Time};
use aviflow_store::{FileTelemetry, Keeper, Objects, Reader};
use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// How often.
const EVERY: Duration = Duration::from_secs(3600);
/// How long a job is kept after its end.
const JOBS: Span = Span::minutes(90 * 24 * 60);
/// How long the journal is kept.
const JOURNAL: Span = Span::minutes(30 * 24 * 60);
/// How old an object must be, as a submission uploads before it submits.
const OBJECTS: Duration = Duration::from_secs(24 * 3600);

/// What is kept where.
pub struct Housekeeping {
    pub keeper: Box<dyn Keeper>,
    pub reader: Arc<dyn Reader>,
    pub objects: Arc<Objects>,
    pub telemetry: Arc<FileTelemetry>,
    /// The folder of everything that a job keeps.
    pub folder: Box<dyn Fn(JobId) -> PathBuf + Send>,
}

/// What a round left behind, to be tried again.
#[derive(Debug, Default, PartialEq, Eq)]
struct Left {
    jobs: Vec<JobId>,
    /// Why, of the first of them.
    why: String,
}

impl Housekeeping {
    /// Starts the thread; it ends with the process.
    pub fn start(mut self) -> Result<()> {
        let work = move || {
            loop {
                std::thread::sleep(EVERY);
                match self.round(Time(now())) {
                    Ok(left) if left.jobs.is_empty() => {}
                    Ok(left) => note(&format!(
                        "{} old jobs could not be removed ({}); they are tried again every hour",
                        left.jobs.len(),
                        left.why
                    )),
                    Err(error) => note(&format!("old jobs and objects could not be removed: {error}")),
                }
            }
        };
        let spawned = std::thread::Builder::new().name("housekeeping".to_owned()).spawn(work);
        spawned.map(drop).or_fail(|| "threads cannot be started".to_owned())
    }

    fn round(&mut self, now: Time) -> std::result::Result<Left, String> {
        let mut left = Left::default();
        let mut after = None;
        loop {
            let old = self.keeper.ended_before(now - JOBS, after).map_err(|e| e.to_string())?;
            let Some(last) = old.last() else { break };
            after = Some(*last);
            let mut gone = Vec::new();
            for job in old {
                match self.remove(job) {
                    Ok(()) => gone.push(job),
                    Err(error) => {
                        if left.jobs.is_empty() {
                            left.why = error;
                        }
                        left.jobs.push(job);
                    }
                }
            }
            self.keeper.forget(&gone).map_err(|e| e.to_string())?;
        }
        self.keeper.trim_journal(now - JOURNAL).map_err(|e| e.to_string())?;
        let live = self.reader.objects().map_err(|e| e.to_string())?;
        let gone = self.objects.collect(&live, SystemTime::now() - OBJECTS).map_err(|e| e.to_string())?;
        if gone.files > 0 {
            note(&format!("removed {} objects that no job refers to ({} bytes)", gone.files, gone.bytes));
        }
        Ok(left)
    }

    /// Removes what is kept of a job beside its row; what is gone already is no error.
    fn remove(&self, job: JobId) -> std::result::Result<(), String> {
        self.telemetry.remove_job(job).map_err(|e| format!("the logs of job {}: {e}", job.0))?;
        let folder = (self.folder)(job);
        match std::fs::remove_dir_all(&folder) {
            Err(e) if e.kind() != ErrorKind::NotFound => Err(format!("{}: {e}", folder.display())),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aviflow_engine::driver::{Handle, Starter};
    use aviflow_engine::engine::{Answer, Input, Submission};
    use aviflow_engine::ports::{Cluster, Observation, Stamped};
    use aviflow_engine::telemetry::{StreamKey, Telemetry};
    use aviflow_store::{Reader, SqliteStore};
    use std::fs;

    struct Idle;

    impl Cluster for Idle {
        fn apply(&mut self, _: &[Stamped]) {}
    }

    /// A job that ended at once.
    fn ended(engine: &Handle) -> JobId {
        let defaults = aviflow_api::file::Defaults::default();
        let spec =
            aviflow_api::file::parse_job("job.yaml", b"name: old\ngpusPerNode: 1\nrun: python train.py\n", &defaults);
        let spec = spec.expect("a job").spec;
        let request = aviflow_api::convert::to_request(&spec, &defaults.priorities);
        let (namespace, user) = ("default".to_owned(), "ada".to_owned());
        let submission = Submission { namespace, user, spec, provenance: Default::default(), request };
        let Answer::Submitted(record) = engine.submit(submission).expect("it runs") else { panic!("refused") };
        engine.ask(Input::Cancel { job: record.id, by: "ada".into() }).expect("it runs");
        record.id
    }

    #[test]
    fn what_cannot_be_removed_is_kept_whole_and_found_again() {
        let home = tempfile::TempDir::new().unwrap();
        let store = SqliteStore::open(home.path()).unwrap();
        let (keeper, reader) = (Box::new(store.keeper().unwrap()), Arc::new(store.reader().unwrap()));
        let (engine, thread) = Starter::default().start(store, Idle, |_| {}).unwrap();
        let (name, pool, gpu_type) = ("local-0".into(), "local".into(), "none".into());
        engine.observe(Observation::NodeSeen { name, pool, gpu_type, gpus: 1, path: Vec::new() }, None);
        let pause = Input::Pause { on: true, by: "ada".into(), reason: None };
        engine.ask(pause).unwrap();
        let jobs = [ended(&engine), ended(&engine), ended(&engine)];
        let telemetry = Arc::new(FileTelemetry::open(home.path()).unwrap());
        let folders = home.path().join("jobs");
        let folder = move |job: JobId| folders.join(job.0.to_string());
        for job in jobs {
            fs::create_dir_all(folder(job).join("volumes/ckpt")).unwrap();
            telemetry.log_append(StreamKey { job, attempt: 1, worker: 0 }, 0, "1 0 o line\n").unwrap();
        }
        // No folder, so it cannot be removed as one.
        fs::remove_dir_all(folder(jobs[0])).unwrap();
        fs::write(folder(jobs[0]), "in the way").unwrap();
        let mut house = Housekeeping {
            keeper,
            reader: reader.clone(),
            objects: Arc::new(Objects::open(home.path()).unwrap()),
            telemetry: telemetry.clone(),
            folder: Box::new(folder.clone()),
        };
        let there = || jobs.map(|job| reader.job(job).unwrap().is_some());
        assert_eq!(house.round(Time(now())).unwrap(), Left::default());
        assert_eq!(there(), [true; 3], "they are young");
        let later = Time(now()) + JOBS + Span::minutes(1);
        let left = house.round(later).unwrap();
        assert_eq!(left.jobs, [jobs[0]]);
        assert!(left.why.starts_with(&format!("{}: ", folder(jobs[0]).display())), "{}", left.why);
        assert_eq!(there(), [true, false, false]);
        assert_eq!(jobs.map(|job| folder(job).exists()), [true, false, false]);
        assert_eq!(telemetry.disk_usage().unwrap().logs, 0);
        fs::remove_file(folder(jobs[0])).unwrap();
        // Nothing is left of it but its row, as after a crash in between.
        assert_eq!(house.round(later).unwrap(), Left::default());
        assert_eq!(there(), [false; 3]);
        engine.stop();
        thread.join().unwrap();
    }
}
