//! What is read beside the writer, and what is deleted: the same for every store.
//!
//! The server and the housekeeping know no store but by these. Every call may
//! block on the disk or the network.
//!
//! Invariants:
//! - a reader sees the state of the last commit before its call began, and never
//!   waits for the writer;
//! - a keeper touches only what has ended, so it needs no term: one that was fenced
//!   does what its successor would do.

use crate::usage::{By, Usage};
use aviflow_core::ledger::{Entry, GpuState};
use aviflow_core::lifecycle::Moment;
use aviflow_core::model::{Job, JobId, JobKey, Node, Term};
use aviflow_core::time::Time;
use aviflow_engine::ports::{Act, ActKind, JobRecord, StoreError};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;

/// Reads a store beside its writer.
pub trait Reader: Debug + Send + Sync {
    /// The term under which the store is held now: who has a lower one writes no more.
    ///
    /// # Errors
    /// If the store cannot be read.
    fn term(&self) -> Result<Term, StoreError>;

    /// The size of the database in bytes.
    ///
    /// # Errors
    /// If the store cannot be read.
    fn size(&self) -> Result<u64, StoreError>;

    /// Jobs, newest first.
    ///
    /// # Errors
    /// If the store cannot be read.
    fn jobs(&self, filter: &Filter) -> Result<Vec<Kept>, StoreError>;

    /// How many jobs there are in each phase, by the phase's name.
    ///
    /// # Errors
    /// If the store cannot be read.
    fn phases(&self) -> Result<BTreeMap<String, u64>, StoreError>;

    /// The namespaces that have jobs, sorted.
    ///
    /// # Errors
    /// If the store cannot be read.
    fn namespaces(&self) -> Result<Vec<String>, StoreError>;

    /// The job of exactly this name.
    ///
    /// # Errors
    /// If the store cannot be read.
    fn find(&self, key: &JobKey) -> Result<Option<JobId>, StoreError>;

    /// The newest job whose document has the name `work`, of `user` if one is given.
    ///
    /// # Errors
    /// If the store cannot be read.
    fn latest_of(&self, namespace: &str, work: &str, user: Option<&str>) -> Result<Option<JobId>, StoreError>;

    /// A job with its document, ended or not.
    ///
    /// # Errors
    /// If the store cannot be read.
    fn job(&self, id: JobId) -> Result<Option<(Kept, JobRecord)>, StoreError>;

    /// Moments of a job in their order, beginning after a row (0 for all), at most `limit`.
    ///
    /// # Errors
    /// If the store cannot be read.
    fn moments(&self, job: JobId, after: u64, limit: u32) -> Result<Vec<MomentRow>, StoreError>;

    /// What people did, newest first.
    ///
    /// # Errors
    /// If the store cannot be read.
    fn acts(&self, filter: &ActFilter) -> Result<Vec<ActRow>, StoreError>;

    /// The closed ledger entries of a job, oldest first.
    ///
    /// # Errors
    /// If the store cannot be read.
    fn entries(&self, job: JobId) -> Result<Vec<Entry>, StoreError>;

    /// GPU-milliseconds of a job by state, over its closed entries. The open
    /// ones are in the snapshot of whoever asks.
    ///
    /// # Errors
    /// If the store cannot be read.
    fn job_time(&self, job: JobId) -> Result<BTreeMap<GpuState, i128>, StoreError>;

    /// Adds up GPU time over `[from, to)`, open intervals included up to `now`.
    ///
    /// # Errors
    /// If the store cannot be read.
    fn usage(&self, from: Time, to: Time, now: Time, by: By) -> Result<Usage, StoreError>;

    /// The nodes, by number.
    ///
    /// # Errors
    /// If the store cannot be read.
    fn nodes(&self) -> Result<Vec<Node>, StoreError>;

    /// The journal from a commit on: its number, the engine's time, the text; at most `limit` rows.
    ///
    /// # Errors
    /// If the store cannot be read.
    fn journal(&self, from: u64, limit: u32) -> Result<Vec<(u64, Time, String)>, StoreError>;

    /// Hashes of what kept jobs refer to: the objects of code and locks, and layers.
    ///
    /// # Errors
    /// If the store cannot be read.
    fn objects(&self) -> Result<BTreeSet<String>, StoreError>;
}

/// Deletes what is old, in short transactions, while the engine has the store.
pub trait Keeper: Debug + Send {
    /// Jobs that ended before `before`, a few at a time: those after `after`, by
    /// number. Nothing is deleted: what else is kept of them goes first, as
    /// nobody could find it without them.
    ///
    /// # Errors
    /// If the store cannot be read.
    fn ended_before(&mut self, before: Time, after: Option<JobId>) -> Result<Vec<JobId>, StoreError>;

    /// Deletes jobs that have ended, with their moments. Ledger entries stay: the
    /// account outlives the jobs. One call is one transaction.
    ///
    /// # Errors
    /// If the store cannot be written.
    fn forget(&mut self, jobs: &[JobId]) -> Result<(), StoreError>;

    /// Deletes what people did before `before`; returns how many acts.
    ///
    /// # Errors
    /// If the store cannot be written.
    fn trim_acts(&mut self, before: Time) -> Result<u64, StoreError>;

    /// Deletes journal rows of before `before`; returns how many.
    ///
    /// # Errors
    /// If the store cannot be written.
    fn trim_journal(&mut self, before: Time) -> Result<u64, StoreError>;
}

/// Which jobs, by whether they ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Which {
    /// All.
    #[default]
    All,
    /// Those that have not ended.
    Live,
    /// Those that have.
    Ended,
}

/// The namespaces that have jobs, by steps through the index of their names and not through all jobs.
pub(crate) const NAMESPACES: &str = "
    WITH RECURSIVE step(namespace) AS (
        SELECT min(namespace) FROM jobs
        UNION ALL
        SELECT (SELECT min(namespace) FROM jobs WHERE namespace > step.namespace) FROM step
        WHERE step.namespace IS NOT NULL)
    SELECT namespace FROM step WHERE namespace IS NOT NULL";

/// Which jobs a list has. What is not set does not restrict.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    /// By whether they ended.
    pub which: Which,
    /// Phases by name, as [`aviflow_core::model::Phase::name`] has them; empty means any.
    pub phases: Vec<String>,
    /// Namespaces; an empty list has no jobs.
    pub namespaces: Option<Vec<String>>,
    /// Who submitted them.
    pub user: Option<String>,
    /// The queue.
    pub queue: Option<String>,
    /// What the name begins with.
    pub name_prefix: Option<String>,
    /// Only jobs older than this one: the last of the page before.
    pub after: Option<JobId>,
    /// At most so many; 0 means 100.
    pub limit: u32,
}

/// A job as it is kept.
#[derive(Clone, Debug, PartialEq)]
pub struct Kept {
    /// The state; the last one if the job ended.
    pub job: Job,
    /// When it ended.
    pub ended: Option<Time>,
}

/// A moment with its place in the timeline.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MomentRow {
    /// The row; give it back to get what follows.
    pub row: u64,
    /// The moment.
    pub moment: Moment,
}

/// Which acts a list has. What is not set does not restrict.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ActFilter {
    /// What kind of thing they were done to.
    pub kind: Option<ActKind>,
    /// Its name, as [`Act::name`] has it.
    pub name: Option<String>,
    /// Who did them.
    pub by: Option<String>,
    /// Only those before this row: the last of the page before.
    pub before: Option<u64>,
    /// At most so many; 0 means 100.
    pub limit: u32,
}

/// An act with its place among all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ActRow {
    /// The row; give it back to get what is older.
    pub row: u64,
    /// The act.
    pub act: Act,
}

/// Rows of a list that names no limit.
pub(crate) const PAGE: u32 = 100;

/// Jobs that a keeper deletes in one transaction, so that no commit waits long for it.
pub(crate) const CHUNK: i64 = 200;
