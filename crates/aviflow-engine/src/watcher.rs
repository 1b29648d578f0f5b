//! The watch over all running gangs: which run where, what is noticed of them, and what is wrong.
//!
//! One [`Watch`] for each job with a gang, which keeps over epochs and attempts what it has learned of the job's steps;
//! what repeats on GPUs and ports of nodes is counted for all jobs together. What it finds goes to the engine as an
//! observation like any other: nothing here decides, and no transaction waits for it.
//!
//! Pure: time is handed in, and whoever drives it asks again at [`Watcher::next_deadline`]. Everything is in memory. A
//! control plane that starts anew has forgotten how long steps take, which XIDs came and how often a port went down; it
//! waits longer for the next steps, and counts from what it sees.
//!
//! What is not of the epoch that runs is passed over: by its number where that is told, and by its time.

mod facts;
#[cfg(test)]
mod tests;

pub use facts::{of_observation, of_point};

use crate::telemetry::{Sign, StreamKey};
use aviflow_core::gpus::Slots;
use aviflow_core::health::links::Links;
use aviflow_core::health::xid::{Asks, Judged, Xid, Xids};
use aviflow_core::health::{Fact, News, Settings, Watch};
use aviflow_core::model::{JobId, NodeId};
use aviflow_core::time::Time;
use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet};

/// A worker's share of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// The node.
    pub node: NodeId,
    /// Its GPUs there.
    pub slots: Slots,
    /// Whether these are all GPUs of the node.
    pub whole: bool,
}

/// A gang whose ranks are up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// The attempt.
    pub attempt: u32,
    /// The epoch.
    pub epoch: u32,
    /// The workers, by their numbers.
    pub workers: Vec<Share>,
    /// Ranks of each.
    pub per_worker: u32,
    /// Since when every rank is up.
    pub since: Time,
    /// Whether the job ever told a step.
    pub tells_steps: bool,
    /// Whether it ran before this control plane looked, and whether it had made steps then.
    pub resumed: Option<bool>,
}

/// Something that was noticed.
#[derive(Clone, Debug, PartialEq)]
pub enum Notice {
    /// A fact of a gang.
    Fact {
        /// The job.
        job: JobId,
        /// The attempt.
        attempt: u32,
        /// The epoch, where it is told.
        epoch: Option<u32>,
        /// What.
        fact: Fact,
    },
    /// What an agent noticed.
    Sign {
        /// Its worker.
        key: StreamKey,
        /// The epoch.
        epoch: u32,
        /// What.
        sign: Sign,
    },
    /// Whether an agent is heard.
    Heard {
        /// Its worker.
        key: StreamKey,
        /// Whether it is.
        heard: bool,
    },
    /// GPUs of a node are reported as broken.
    Broken {
        /// The node.
        node: NodeId,
        /// Their slots.
        slots: Vec<u32>,
    },
}

/// What is to be said of an epoch of a job's attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Said {
    /// The job.
    pub job: JobId,
    /// The attempt.
    pub attempt: u32,
    /// The epoch.
    pub epoch: u32,
    /// How many workers the gang has.
    pub workers: u32,
    /// What.
    pub news: News,
}

#[derive(Debug, Default)]
struct Watched {
    watch: Watch,
    run: Option<Run>,
    /// The GPUs of the gang, once somebody asked.
    gpus: OnceCell<BTreeSet<(NodeId, u32)>>,
    /// When it is asked again.
    due: Option<Time>,
}

/// The watch over all running gangs.
#[derive(Debug)]
pub struct Watcher {
    settings: Settings,
    /// Whether the slots of nodes are the numbers of the devices there.
    numbered: bool,
    xids: Xids,
    links: Links,
    jobs: BTreeMap<JobId, Watched>,
    /// The jobs that run on a node.
    nodes: BTreeMap<NodeId, BTreeSet<JobId>>,
    deadlines: BTreeSet<(Time, JobId)>,
    /// Jobs whose deadline may be another than it is noted as.
    touched: BTreeSet<JobId>,
}

impl Watcher {
    /// Nothing runs yet. `numbered` is whether the slots of nodes are the numbers of the devices there.
    #[must_use]
    pub fn new(settings: Settings, numbered: bool) -> Watcher {
        Watcher {
            settings,
            numbered,
            xids: Xids::default(),
            links: Links::default(),
            jobs: BTreeMap::new(),
            nodes: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            touched: BTreeSet::new(),
        }
    }

    /// A gang's ranks are up.
    pub fn runs(&mut self, job: JobId, run: Run, now: Time) {
        self.leave_nodes(job);
        for share in &run.workers {
            self.nodes.entry(share.node).or_default().insert(job);
        }
        let watched = self.jobs.entry(job).or_default();
        let nodes = run.workers.iter().map(|share| share.node).collect();
        // What happened while nobody looked is not known: the wait begins now.
        let since = if run.resumed.is_some() { now } else { run.since };
        watched.watch.started(nodes, run.per_worker, run.tells_steps, since);
        if let Some(stepped) = run.resumed {
            if stepped {
                watched.watch.resumed(now);
            }
            // Agents come again one by one.
            for worker in (0u32..).zip(&run.workers).map(|(worker, _)| worker) {
                watched.watch.fact(&Fact::Heard { worker, heard: false }, now, now, &self.settings);
            }
        }
        (watched.run, watched.gpus) = (Some(run), OnceCell::new());
        self.touched.insert(job);
    }

    /// A gang's ranks are being stopped, or are gone. What is learned of the job is kept.
    pub fn stops(&mut self, job: JobId) {
        self.leave_nodes(job);
        if let Some(watched) = self.jobs.get_mut(&job) {
            watched.watch.stopped();
            (watched.run, watched.gpus) = (None, OnceCell::new());
            self.touched.insert(job);
        }
    }

    /// A job has ended.
    pub fn forget(&mut self, job: JobId) {
        self.leave_nodes(job);
        if let Some(due) = self.jobs.remove(&job).and_then(|watched| watched.due) {
            self.deadlines.remove(&(due, job));
        }
        self.touched.remove(&job);
    }

    /// How many gangs run.
    #[must_use]
    pub fn running(&self) -> usize {
        self.jobs.values().filter(|watched| watched.run.is_some()).count()
    }

    /// Takes in what was noticed, which happened at `at`.
    pub fn notice(&mut self, notice: Notice, at: Time, now: Time) -> Vec<Said> {
        match notice {
            Notice::Fact { job, attempt, epoch, fact } => self.fact(job, (attempt, epoch), &fact, at, now),
            Notice::Heard { key, heard } => {
                let fact = Fact::Heard { worker: key.worker, heard };
                self.fact(key.job, (key.attempt, None), &fact, now, now)
            }
            Notice::Sign { key, epoch, sign } => self.sign(key, epoch, sign, at, now),
            Notice::Broken { node, slots } => {
                let mut said = Vec::new();
                for slot in slots {
                    let fact = Fact::DeviceUnhealthy { node, gpu: Some(slot) };
                    for job in self.holders(node, slot) {
                        said.extend(self.told(job, &fact, at, now));
                    }
                }
                said
            }
        }
    }

    /// What has become true by the passing of time.
    pub fn tick(&mut self, now: Time) -> Vec<Said> {
        let mut said = Vec::new();
        while let Some((_, job)) = self.first_due().filter(|(due, _)| *due <= now) {
            let Some(watched) = self.jobs.get_mut(&job) else { continue };
            let news = watched.watch.tick(now, &self.settings);
            said.extend(watched.run.as_ref().map(|run| each(job, run, news)).into_iter().flatten());
            self.touched.insert(job);
        }
        said
    }

    /// When [`Watcher::tick`] may have something to say.
    #[must_use]
    pub fn next_deadline(&mut self) -> Option<Time> {
        self.first_due().map(|(due, _)| due)
    }

    fn first_due(&mut self) -> Option<(Time, JobId)> {
        for job in std::mem::take(&mut self.touched) {
            let Some(watched) = self.jobs.get_mut(&job) else { continue };
            let due = watched.watch.next_deadline(&self.settings).filter(|_| watched.run.is_some());
            if due != watched.due {
                if let Some(before) = std::mem::replace(&mut watched.due, due) {
                    self.deadlines.remove(&(before, job));
                }
                self.deadlines.extend(due.map(|due| (due, job)));
            }
        }
        self.deadlines.first().copied()
    }

    fn leave_nodes(&mut self, job: JobId) {
        let Some(run) = self.jobs.get(&job).and_then(|watched| watched.run.as_ref()) else { return };
        for share in &run.workers {
            if let Some(jobs) = self.nodes.get_mut(&share.node) {
                jobs.remove(&job);
                if jobs.is_empty() {
                    self.nodes.remove(&share.node);
                }
            }
        }
    }

    /// A fact of an epoch, if that is the one that runs.
    fn fact(
        &mut self,
        job: JobId,
        (attempt, epoch): (u32, Option<u32>),
        fact: &Fact,
        at: Time,
        now: Time,
    ) -> Vec<Said> {
        let run = self.jobs.get(&job).and_then(|watched| watched.run.as_ref());
        let present = run.is_some_and(|run| run.attempt == attempt && epoch.is_none_or(|epoch| epoch == run.epoch));
        if present { self.told(job, fact, at, now) } else { Vec::new() }
    }

    /// A fact of the gang that runs.
    fn told(&mut self, job: JobId, fact: &Fact, at: Time, now: Time) -> Vec<Said> {
        let Some(watched) = self.jobs.get_mut(&job) else { return Vec::new() };
        let Some(run) = watched.run.as_ref().filter(|run| at >= run.since) else { return Vec::new() };
        let news = watched.watch.fact(fact, at, now, &self.settings);
        self.touched.insert(job);
        each(job, run, news).collect()
    }

    fn sign(&mut self, key: StreamKey, epoch: u32, sign: Sign, at: Time, now: Time) -> Vec<Said> {
        let StreamKey { job, attempt, worker } = key;
        let run = self.jobs.get(&job).and_then(|watched| watched.run.as_ref());
        let Some(run) = run.filter(|run| run.attempt == attempt && run.epoch == epoch && at >= run.since) else {
            return Vec::new();
        };
        let Some(share) = run.workers.get(worker as usize).copied() else { return Vec::new() };
        match sign {
            Sign::Active => self.told(job, &Fact::Active, at, now),
            Sign::Role { rank, role } => self.told(job, &Fact::Role { rank, role }, at, now),
            Sign::Collective { rank, number } => self.told(job, &Fact::Collective { rank, number }, at, now),
            Sign::DiskFull => self.told(job, &Fact::DiskFull { worker }, at, now),
            Sign::Xid { number, gpu, verdict } => {
                let xid = Xid { number, node: share.node, gpu, verdict };
                self.xid(xid, job, share.whole, at, now)
            }
            Sign::Port { port, downed, symbol_errors } => {
                let Some(kind) = self.links.read(share.node, &port, downed, symbol_errors, at) else {
                    return Vec::new();
                };
                let fact = Fact::Link { node: share.node, kind };
                // Within one node, NVLink is used.
                let across = |job: &JobId| {
                    let run = self.jobs.get(job).and_then(|watched| watched.run.as_ref());
                    run.is_some_and(|run| run.workers.len() > 1)
                };
                let jobs: Vec<JobId> = self.nodes.get(&share.node).into_iter().flatten().copied().collect();
                let jobs: Vec<JobId> = jobs.into_iter().filter(across).collect();
                jobs.into_iter().flat_map(|job| self.told(job, &fact, at, now)).collect()
            }
        }
    }

    /// An XID goes to the gang that holds its GPU. Where it is not certain which that is, whoever told it is shown it,
    /// and nothing is asked for: all agents of a node read the same log.
    fn xid(&mut self, xid: Xid, by: JobId, whole: bool, at: Time, now: Time) -> Vec<Said> {
        let holder = match xid.gpu {
            _ if whole => Some(by),
            Some(slot) if self.numbered => self.holders(xid.node, slot).first().copied(),
            Some(_) | None => None,
        };
        let known = whole || (self.numbered && xid.gpu.is_some());
        let none = BTreeSet::new();
        let gpus = holder.and_then(|job| self.jobs.get(&job)).map_or(&none, Watched::gpus);
        let judged = self.xids.judge(&xid, at, gpus);
        match holder {
            Some(job) => self.told(job, &Fact::Xid { xid, judged }, at, now),
            // It is of a GPU of others.
            None if known => Vec::new(),
            None => {
                let (xid, judged) = (Xid { gpu: None, ..xid }, Judged { asks: Asks::Watch, ..judged });
                self.told(by, &Fact::Xid { xid, judged }, at, now)
            }
        }
    }

    /// The jobs that hold a GPU: one at most.
    fn holders(&self, node: NodeId, slot: u32) -> Vec<JobId> {
        let holds = |job: &&JobId| {
            let run = self.jobs.get(job).and_then(|watched| watched.run.as_ref());
            run.is_some_and(|run| run.workers.iter().any(|s| s.node == node && s.slots.iter().any(|n| n == slot)))
        };
        self.nodes.get(&node).into_iter().flatten().filter(holds).copied().collect()
    }
}

impl Watched {
    fn gpus(&self) -> &BTreeSet<(NodeId, u32)> {
        self.gpus.get_or_init(|| {
            let workers = self.run.iter().flat_map(|run| &run.workers);
            workers.flat_map(|share| share.slots.iter().map(|slot| (share.node, slot))).collect()
        })
    }
}

fn each(job: JobId, run: &Run, news: Vec<News>) -> impl Iterator<Item = Said> + use<> {
    let (attempt, epoch) = (run.attempt, run.epoch);
    let workers = u32::try_from(run.workers.len()).unwrap_or(u32::MAX);
    news.into_iter().map(move |news| Said { job, attempt, epoch, workers, news })
}
