//! What the next pass may reuse: the waiting jobs in their order, and who holds
//! how much. It only saves work: an empty one gives the same plan.
//!
//! Whoever changes a job says so with [`Memo::touch`]; nodes are compared.

use super::grid::Grid;
use crate::model::{Job, JobId, NodeRange, Phase, Snapshot, Topology};
use crate::time::{Span, Time};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// What is reused from pass to pass.
#[derive(Debug, Default)]
pub struct Memo {
    pub(super) grid: Grid,
    pub(super) index: Index,
    touched: BTreeSet<JobId>,
    built: bool,
}

impl Memo {
    /// A job changed, came or ended.
    pub fn touch(&mut self, job: JobId) {
        self.touched.insert(job);
    }

    /// Everything may have changed.
    pub fn reset(&mut self) {
        *self = Memo::default();
    }

    /// Brings it up to date.
    pub(super) fn refresh(&mut self, snapshot: &Snapshot) {
        let same = self.built && self.grid.describes(snapshot);
        if !same {
            self.grid = Grid::new(snapshot);
        }
        let touched = std::mem::take(&mut self.touched);
        if same {
            for id in &touched {
                self.index.remove(*id);
                if let Some(job) = snapshot.jobs.get(id) {
                    self.index.add(&self.grid, job);
                }
            }
        }
        // Whoever forgot to say that a job came or went is found out here.
        // Classes that nobody is in any more are only forgotten when it is made anew.
        let stale = self.index.classes.len() > 10_000 + 4 * self.index.waiting.len();
        if !same
            || stale
            || self.index.waiting.len() != snapshot.waiting.len()
            || self.index.len() != snapshot.jobs.len()
        {
            self.index = Index::default();
            for job in snapshot.jobs.values() {
                self.index.add(&self.grid, job);
            }
        }
        self.built = true;
    }
}

/// What jobs have in common that start or wait for the same reason.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Class {
    pub(super) queue: u32,
    pub(super) priority: i32,
    pub(super) preemptible: bool,
    pub(super) gpus_per_node: u32,
    pub(super) nodes: NodeRange,
    pub(super) gpu_types: Vec<String>,
    pub(super) topology: Topology,
}

/// What jobs have in common that find a place on the same free GPUs, in whichever queue they are.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Shape {
    gpus_per_node: u32,
    nodes: NodeRange,
    gpu_types: Vec<String>,
    topology: Topology,
}

impl Class {
    fn shape(&self) -> Shape {
        Shape {
            gpus_per_node: self.gpus_per_node,
            nodes: self.nodes,
            gpu_types: self.gpu_types.clone(),
            topology: self.topology.clone(),
        }
    }

    pub(super) fn gpus(&self) -> u32 {
        self.nodes.min.saturating_mul(self.gpus_per_node)
    }
}

/// A waiting job, as far as the order and the pass need it.
#[derive(Clone, Debug)]
pub(super) struct Waiter {
    pub(super) class: u32,
    pub(super) queue: u32,
    /// The accelerator type that it would rather have, by its index in the grid.
    pub(super) gpu_type: Option<usize>,
    pub(super) user: u32,
    pub(super) submitted: Time,
    /// The longest that it can still run, if it says so.
    pub(super) left: Option<Span>,
    pub(super) had: Span,
    pub(super) not_before: Option<Time>,
    /// Whether something beside GPUs and quota may keep it.
    pub(super) gated: bool,
    pub(super) claims: bool,
}

/// A job that holds GPUs.
#[derive(Clone, Debug)]
pub(super) struct Holder {
    pub(super) queue: u32,
    /// The accelerator type, by its index in the grid.
    pub(super) gpu_type: usize,
    pub(super) segment: usize,
    pub(super) gpus: u32,
    pub(super) preemptible: bool,
    pub(super) leaving: bool,
    pub(super) evicting: bool,
    pub(super) priority: i32,
    pub(super) placed: Time,
}

/// The waiting jobs of one queue: by priority and user, in the order of their submission.
#[derive(Debug, Default)]
pub(super) struct Line {
    pub(super) by_user: BTreeMap<(Reverse<i32>, u32), OfUser>,
}

/// The waiting jobs of one user and priority, in the order of their submission.
pub(super) type OfUser = BTreeMap<(Time, JobId), Waiter>;

/// Where in its line a waiting job is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Spot {
    queue: u32,
    priority: i32,
    user: u32,
    submitted: Time,
}

/// The jobs by what the pass asks of them.
#[derive(Debug, Default)]
pub(super) struct Index {
    waiting: BTreeMap<JobId, Spot>,
    pub(super) holders: BTreeMap<JobId, Holder>,
    /// Waiting jobs that were promised GPUs.
    pub(super) claimers: BTreeSet<JobId>,
    pub(super) classes: Vec<Class>,
    /// The shape of each class.
    pub(super) shapes: Vec<u32>,
    /// By queue.
    pub(super) lines: Vec<Line>,
    pub(super) queues: Vec<String>,
    pub(super) users: Vec<String>,
    class_ids: BTreeMap<Class, u32>,
    shape_ids: BTreeMap<Shape, u32>,
    queue_ids: BTreeMap<String, u32>,
    user_ids: BTreeMap<String, u32>,
}

fn intern<K: Ord + Clone>(ids: &mut BTreeMap<K, u32>, list: &mut Vec<K>, key: &K) -> u32 {
    if let Some(id) = ids.get(key) {
        return *id;
    }
    let id = u32::try_from(list.len()).unwrap_or(u32::MAX);
    ids.insert(key.clone(), id);
    list.push(key.clone());
    id
}

impl Index {
    fn len(&self) -> usize {
        self.waiting.len() + self.holders.len()
    }

    fn remove(&mut self, id: JobId) {
        self.holders.remove(&id);
        self.claimers.remove(&id);
        let Some(spot) = self.waiting.remove(&id) else { return };
        let by_user = &mut self.lines[spot.queue as usize].by_user;
        let key = (Reverse(spot.priority), spot.user);
        if let Some(list) = by_user.get_mut(&key) {
            list.remove(&(spot.submitted, id));
            if list.is_empty() {
                by_user.remove(&key);
            }
        }
    }

    /// What is known of a waiting job.
    pub(super) fn waiter(&self, id: JobId) -> Option<&Waiter> {
        let spot = self.waiting.get(&id)?;
        let line = self.lines[spot.queue as usize].by_user.get(&(Reverse(spot.priority), spot.user))?;
        line.get(&(spot.submitted, id))
    }

    fn add(&mut self, grid: &Grid, job: &Job) {
        let queue = intern(&mut self.queue_ids, &mut self.queues, &job.request.queue);
        match &job.phase {
            Phase::Queued => {}
            Phase::Starting(gang) | Phase::Running(gang) => return self.hold(grid, job, queue, gang, false),
            Phase::Suspending(s) => return self.hold(grid, job, queue, &s.gang, true),
            Phase::Stopping(s) => return self.hold(grid, job, queue, &s.gang, true),
            Phase::Succeeded | Phase::Failed(_) | Phase::Cancelled { .. } => return,
        }
        let user = intern(&mut self.user_ids, &mut self.users, &job.user);
        let request = &job.request;
        let class = Class {
            queue,
            priority: request.priority,
            preemptible: request.preemptible,
            gpus_per_node: request.gpus_per_node,
            nodes: request.nodes,
            gpu_types: request.gpu_types.clone(),
            topology: request.topology.clone(),
        };
        let class = intern(&mut self.class_ids, &mut self.classes, &class);
        while let Some(new) = self.classes.get(self.shapes.len()) {
            let next = u32::try_from(self.shape_ids.len()).unwrap_or(u32::MAX);
            self.shapes.push(*self.shape_ids.entry(new.shape()).or_insert(next));
        }
        let gpu_type = request.gpu_types.first().and_then(|t| grid.types.binary_search(t).ok());
        if self.lines.len() <= queue as usize {
            self.lines.resize_with(queue as usize + 1, Line::default);
        }
        let priority = request.priority;
        let gated = job.held.is_some()
            || job.not_before.is_some()
            || job.environment.is_some()
            || job.after.iter().any(|d| d.met != Some(true));
        let left = request.time_limit.map(|limit| Span((limit.0 - job.ran.0).max(0)));
        let waiter = Waiter {
            class,
            queue,
            gpu_type,
            user,
            submitted: job.submitted,
            left,
            had: job.gpu_time,
            not_before: job.not_before,
            gated,
            claims: job.claim.is_some(),
        };
        if waiter.claims {
            self.claimers.insert(job.id);
        }
        let line = self.lines[queue as usize].by_user.entry((Reverse(priority), user)).or_default();
        line.insert((job.submitted, job.id), waiter);
        self.waiting.insert(job.id, Spot { queue, priority, user, submitted: job.submitted });
    }

    fn hold(&mut self, grid: &Grid, job: &Job, queue: u32, gang: &crate::model::Gang, leaving: bool) {
        let first = gang.workers.first().and_then(|w| grid.index.get(&w.node));
        let segment = first.map_or(0, |n| grid.segment_of[*n]);
        let holder = Holder {
            queue,
            gpu_type: grid.segments.get(segment).map_or(0, |s| s.gpu_type),
            segment,
            gpus: gang.gpu_count(),
            preemptible: job.request.preemptible,
            leaving,
            evicting: job.eviction.is_some(),
            priority: job.request.priority,
            placed: gang.placed,
        };
        self.holders.insert(job.id, holder);
    }
}
