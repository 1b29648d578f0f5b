//! What is old goes, from time to time: ended jobs with their logs, series and
//! folders, journal rows, and objects that no kept job refers to.
//!
//! The ledger stays: the account outlives the jobs.

use crate::error::{Result, While};
use crate::output::{note, now};
use aviflow_core::model::JobId;
use aviflow_core::time::{Span, Time};
use aviflow_local::LocalHandle;
use aviflow_store::{FileTelemetry, Keeper, Objects, Reader};
use std::io::ErrorKind;
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
    pub keeper: Keeper,
    pub reader: Reader,
    pub objects: Arc<Objects>,
    pub telemetry: Arc<FileTelemetry>,
    pub local: LocalHandle,
}

impl Housekeeping {
    /// Starts the thread; it ends with the process.
    pub fn start(mut self) -> Result<()> {
        let work = move || {
            loop {
                std::thread::sleep(EVERY);
                if let Err(error) = self.round() {
                    note(&format!("old jobs and objects could not be removed: {error}"));
                }
            }
        };
        let spawned = std::thread::Builder::new().name("housekeeping".to_owned()).spawn(work);
        spawned.map(drop).or_fail(|| "threads cannot be started".to_owned())
    }

    fn round(&mut self) -> std::result::Result<(), String> {
        let now = Time(now());
        loop {
            let retained = self.keeper.retain(now - JOBS, now - JOURNAL).map_err(|e| e.to_string())?;
            for job in &retained.jobs {
                self.remove(*job).map_err(|e| format!("the folders of job {}: {e}", job.0))?;
            }
            if !retained.more {
                break;
            }
        }
        let live = self.reader.objects().map_err(|e| e.to_string())?;
        let gone = self.objects.collect(&live, SystemTime::now() - OBJECTS).map_err(|e| e.to_string())?;
        if gone.files > 0 {
            note(&format!("removed {} objects that no job refers to ({} bytes)", gone.files, gone.bytes));
        }
        Ok(())
    }

    fn remove(&self, job: JobId) -> std::io::Result<()> {
        self.telemetry.remove_job(job)?;
        let volumes = self.local.volumes(job);
        match std::fs::remove_dir_all(volumes.parent().unwrap_or(&volumes)) {
            Err(e) if e.kind() != ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        }
    }
}
