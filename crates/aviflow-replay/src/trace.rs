//! Traces: jobs as they were submitted, with the run times they turned out to have.
//!
//! A trace is read in one of three [formats](Format), or made by [`generate`](crate::generate).
//! What is done to it before a replay is here too: denser arrivals, whole nodes, time limits.
//!
//! Invariant: the jobs of a trace are in the order of their submission, and each runs for at least
//! a millisecond on at least one GPU.

mod csv;
mod foreign;
mod own;
mod values;

pub(crate) use foreign::spread;
pub use own::{COLUMNS, write_csv, write_jsonl};

use crate::cluster::Cluster;
use crate::error::{Error, Result};
use crate::rng::Rng;
use aviflow_core::time::{Span, Time};
use std::collections::BTreeMap;
use std::path::Path;

/// How a trace is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// The Acme trace of Kalos as AcmeTrace converts it: LLM jobs on whole nodes.
    Kalos,
    /// Microsoft's Philly trace as the Sia simulator has it: jobs of 1 to 128 GPUs.
    Philly,
    /// Jobs that each need one leaf or one group of leaves; only ever [made up](crate::generate::lingjun).
    Lingjun,
    /// Aviflow's own: one job a line, CSV or JSON, see [`COLUMNS`].
    Aviflow,
}

/// Jobs in the order of their submission.
#[derive(Clone, Debug, PartialEq)]
pub struct Trace {
    /// Where it is from: a file, or words for a generated one.
    pub origin: String,
    /// The jobs.
    pub jobs: Vec<TraceJob>,
}

/// One job of a trace.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceJob {
    /// Its line in the file, from 1.
    pub line: u32,
    /// Its name.
    pub name: String,
    /// When it was submitted.
    pub submitted: Time,
    /// Who submitted it.
    pub user: String,
    /// Its queue, if the trace says it.
    pub queue: Option<String>,
    /// Its priority; higher goes first.
    pub priority: i32,
    /// Nodes.
    pub nodes: u32,
    /// GPUs on each of them.
    pub gpus_per_node: u32,
    /// The accelerator type, if the trace says it.
    pub gpu_type: Option<String>,
    /// How long it runs.
    pub run: Span,
    /// The time limit it was given.
    pub time_limit: Option<Span>,
    /// Whether it may be suspended.
    pub preemptible: bool,
    /// The level of the topology of which one domain must hold it.
    pub require: Option<String>,
}

impl TraceJob {
    /// The GPUs that it holds while it runs.
    #[must_use]
    pub fn gpus(&self) -> u32 {
        self.nodes.saturating_mul(self.gpus_per_node)
    }
}

/// Which time limits the jobs have.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Limits {
    /// Their own, as the trace has them.
    Trace,
    /// Exactly their run times.
    Exact,
    /// Their run times, times a factor of the job's own, uniform between the two.
    Over(f64, f64),
    /// None.
    None,
}

impl Trace {
    /// Reads a file for a cluster whose nodes have so many GPUs, which says how a number of GPUs is spread over nodes.
    ///
    /// # Errors
    /// If the file cannot be read, or is not what the format says.
    pub fn read(path: &Path, format: Format, gpus_per_node: u32) -> Result<Trace> {
        let file = path.display().to_string();
        let text = std::fs::read_to_string(path)
            .map_err(|e| Error::Unreadable { file: file.clone(), reason: e.to_string() })?;
        Trace::parse(&file, &text, format, gpus_per_node)
    }

    /// The same for a text; `file` is what errors call it.
    ///
    /// # Errors
    /// If the text is not what the format says.
    pub fn parse(file: &str, text: &str, format: Format, gpus_per_node: u32) -> Result<Trace> {
        let jobs = match format {
            Format::Kalos => foreign::kalos(file, text)?,
            Format::Philly => foreign::philly(file, text, gpus_per_node)?,
            Format::Lingjun => {
                let what = "the jobs of the format `lingjun` are made up, and read from no file".to_owned();
                let help = "leave --trace out, or leave --format out for a trace of one's own".to_owned();
                return Err(Error::File { file: file.to_owned(), what, help });
            }
            Format::Aviflow => own::read(file, text)?,
        };
        if jobs.is_empty() {
            let help = "a trace has one job a line below its header".to_owned();
            return Err(Error::File { file: file.to_owned(), what: "the trace has no jobs".to_owned(), help });
        }
        Ok(Trace::new(file, jobs))
    }

    /// A trace of these jobs, put into order.
    #[must_use]
    pub fn new(origin: &str, mut jobs: Vec<TraceJob>) -> Trace {
        // Stable: what was submitted in the same instant stays in the file's order.
        jobs.sort_by_key(|job| job.submitted);
        Trace { origin: origin.to_owned(), jobs }
    }

    /// Submits the jobs so many times faster, counted from the first.
    pub fn compress(&mut self, factor: f64) {
        let Some(first) = self.jobs.first().map(|job| job.submitted) else { return };
        for job in &mut self.jobs {
            job.submitted = first + Span((job.submitted.since(first).0 as f64 / factor).round() as i64);
        }
    }

    /// Gives every job whole nodes.
    pub fn whole_nodes(&mut self, gpus_per_node: u32) {
        for job in &mut self.jobs {
            job.gpus_per_node = gpus_per_node;
        }
    }

    /// Gives the jobs time limits. No limit is shorter than the run: whoever ran longer than allowed would
    /// have been ended, and the trace says that it was not.
    pub fn limit(&mut self, limits: Limits, seed: u64) {
        let mut rng = Rng::new(seed, "limits");
        for job in &mut self.jobs {
            job.time_limit = match limits {
                Limits::Trace => job.time_limit,
                Limits::Exact => Some(job.run),
                Limits::Over(low, high) => Some(Span((job.run.0 as f64 * rng.between(low, high)).ceil() as i64)),
                Limits::None => None,
            };
            job.time_limit = job.time_limit.map(|limit| limit.max(job.run));
        }
    }

    /// Leaves out the jobs that want another accelerator type, and says how many they are.
    pub fn only(&mut self, gpu_type: &str) -> usize {
        let before = self.jobs.len();
        self.jobs.retain(|job| job.gpu_type.as_deref().is_none_or(|t| t == gpu_type));
        before - self.jobs.len()
    }

    /// Checks that the cluster, empty, holds each job, inside one domain where the job requires it.
    ///
    /// # Errors
    /// Names the first job that it does not hold, and the cluster that would hold all of them.
    pub fn check(&self, cluster: &Cluster) -> Result<()> {
        let (nodes, gpus) = (cluster.nodes, cluster.gpus_per_node);
        let Some(job) = self.jobs.iter().find(|j| j.nodes > nodes || j.gpus_per_node > gpus) else {
            return self.check_levels(cluster);
        };
        let what = format!(
            "{} asks for {} of {} GPUs, and the cluster has {} of {gpus}",
            job.name,
            plural(job.nodes, "node"),
            job.gpus_per_node,
            plural(nodes, "node"),
        );
        let most = |f: fn(&TraceJob) -> u32| self.jobs.iter().map(f).max().unwrap_or(0);
        let most = (most(|j| j.nodes).max(nodes), most(|j| j.gpus_per_node).max(gpus));
        let help = format!("every job fits with `--nodes {} --gpus-per-node {}`", most.0, most.1);
        Err(self.wrong(job, what, help))
    }

    /// Checks that each job that must be inside one domain of a level has one that is large enough.
    fn check_levels(&self, cluster: &Cluster) -> Result<()> {
        let mut largest: BTreeMap<&str, Option<u32>> = BTreeMap::new();
        for job in &self.jobs {
            let Some(level) = job.require.as_deref() else { continue };
            let most = *largest.entry(level).or_insert_with(|| cluster.largest(level));
            let what = match most {
                Some(most) if job.nodes <= most => continue,
                Some(most) => {
                    let asked = plural(job.nodes, "node");
                    format!(
                        "{} asks for {asked} in one {level}, and the largest has {}",
                        job.name,
                        plural(most, "node")
                    )
                }
                None => format!("{} requires one {level}, and no such level is known", job.name),
            };
            let help = match &cluster.topology {
                Some(topology) => format!("the levels of the topology are {}", topology.levels.join(", ")),
                None => "give the switches with --topology FILE, or take the column `require` out".to_owned(),
            };
            return Err(self.wrong(job, what, help));
        }
        Ok(())
    }

    /// A job that cannot be replayed, with its line if it has one.
    fn wrong(&self, job: &TraceJob, what: String, help: String) -> Error {
        match job.line {
            0 => Error::options(what, help),
            line => Error::Line { file: self.origin.clone(), line, what, help },
        }
    }

    /// GPU-hours that the jobs run for.
    #[must_use]
    pub fn gpu_hours(&self) -> f64 {
        self.jobs.iter().map(|job| f64::from(job.gpus()) * hours(job.run)).sum()
    }

    /// Between the first submission and the last.
    #[must_use]
    pub fn span(&self) -> Span {
        match (self.jobs.first(), self.jobs.last()) {
            (Some(first), Some(last)) => last.submitted.since(first.submitted),
            (None, _) | (_, None) => Span(0),
        }
    }
}

/// A span in hours.
pub(crate) fn hours(span: Span) -> f64 {
    span.0 as f64 / 3_600_000.0
}

fn plural(n: u32, one: &str) -> String {
    format!("{n} {one}{}", if n == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests;
