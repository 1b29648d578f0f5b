//! What whoever tells people of their jobs needs of the server: timelines in words, ended jobs, and whether GPUs do
//! anything; and the count of how that went.

use crate::app::{App, Server};
use crate::jobs;
use crate::watched::{Gang, Holders};
use aviflow_core::lifecycle::Moment;
use aviflow_core::model::{Job, JobId};
use aviflow_engine::ports::JobRecord;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// How a notification ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    /// Its receiver took it.
    Delivered,
    /// Its receiver took it at none of the tries.
    Failed,
    /// Its address may not be posted to.
    Refused,
    /// There was no room for it, as its receiver is too slow.
    Dropped,
}

impl Outcome {
    /// All of them.
    pub const ALL: [Outcome; 4] = [Outcome::Delivered, Outcome::Failed, Outcome::Refused, Outcome::Dropped];

    /// The word for it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Outcome::Delivered => "delivered",
            Outcome::Failed => "failed",
            Outcome::Refused => "refused",
            Outcome::Dropped => "dropped",
        }
    }
}

/// How many notifications ended in which way, since this process began.
#[derive(Debug, Default)]
pub struct Outcomes([AtomicU64; Outcome::ALL.len()]);

impl Outcomes {
    /// Counts one.
    pub fn count(&self, outcome: Outcome) {
        self.0[outcome as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// How many there were.
    #[must_use]
    pub fn of(&self, outcome: Outcome) -> u64 {
        self.0[outcome as usize].load(Ordering::Relaxed)
    }
}

/// Reads of jobs what people are told. Calls wait for the disk and the engine.
#[derive(Clone)]
pub struct Looks {
    app: Arc<App>,
}

impl Looks {
    /// A job's timeline after a row of it, oldest first, each entry with its row and in words.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn timeline(&self, job: JobId, after: u64) -> Result<Vec<(u64, Moment, String)>, String> {
        jobs::told(&self.app, job, after).map_err(|failure| failure.error.message)
    }

    /// A job that is kept, ended or not, with its record.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn job(&self, job: JobId) -> Result<Option<(Job, JobRecord)>, String> {
        let found = self.app.parts.reader.job(job).map_err(|e| e.to_string())?;
        Ok(found.map(|(kept, record)| (kept.job, record)))
    }

    /// The newest job's number.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn newest(&self) -> Result<Option<JobId>, String> {
        let filter = aviflow_store::read::Filter { limit: 1, ..Default::default() };
        let jobs = self.app.parts.reader.jobs(&filter).map_err(|e| e.to_string())?;
        Ok(jobs.first().map(|kept| kept.job.id))
    }

    /// The busiest GPU of each gang whose ranks are all up, as a part of 1; only of those that report of all of theirs.
    ///
    /// # Errors
    /// If the engine cannot be asked.
    pub fn busiest(&self) -> Result<BTreeMap<(JobId, u32), f32>, String> {
        let gangs = self.app.view(|view| {
            let gangs = view.snapshot.jobs.values().filter_map(|job| Gang::of(view.snapshot, job));
            gangs.filter(|gang| gang.up.is_some()).collect::<Vec<_>>()
        });
        let gangs = gangs.map_err(|failure| failure.error.message)?;
        let holders = Holders::new(&self.app, self.app.parts.body.agents());
        let busiest = |gang: &Gang| {
            let samples = holders.gang(&self.app, gang);
            let used = samples.iter().map(|s| s.utilization.into_iter().chain(s.sm_active).reduce(f32::max));
            let used: Option<Vec<f32>> = used.collect();
            // A GPU that does not report may be the one that works.
            let used = used.filter(|used| used.len() >= gang.gpus as usize)?;
            Some(((gang.job, gang.attempt), used.into_iter().reduce(f32::max)?))
        };
        Ok(gangs.iter().filter_map(busiest).collect())
    }
}

impl Server {
    /// What reads of jobs what people are told.
    #[must_use]
    pub fn looks(&self) -> Looks {
        Looks { app: self.app.clone() }
    }
}
