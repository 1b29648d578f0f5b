//! The order of the waiting jobs: queues whose next job is within their guarantee by what they lack, then the
//! others by decayed use over weight; inside a queue by priority, then the users' decayed use, then
//! submission; where jobs take turns, by level instead of use.
//!
//! The order follows what the pass itself starts: after each start the queues
//! and users concerned are compared again.

use super::memo::Waiter;
use super::pass::Pass;
use super::quota::PRESENT;
use super::turns;
use crate::model::{JobId, TimeSharing};
use crate::time::Time;
use std::cmp::Reverse;
use std::collections::binary_heap::PeekMut;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

type QueueKey = Vec<(bool, u64, usize)>;

/// What a line is sorted by: priority, level, decayed use, submission.
type JobKey = (Reverse<i32>, i64, u64, Time, JobId);

type Jobs<'a> = std::collections::btree_map::Iter<'a, (Time, JobId), Waiter>;

/// The next job of a user, with the rest of his jobs of this priority.
struct Head<'a> {
    user: u32,
    waiter: &'a Waiter,
    rest: Option<Jobs<'a>>,
}

/// A walk over all waiting jobs.
pub(super) struct Walk<'a> {
    lines: Vec<Line<'a>>,
    /// Lines that are not at their end, by the key of their queue for the type that their next job wants.
    queues: BTreeSet<(QueueKey, usize)>,
    current: Option<(usize, u32)>,
}

struct Line<'a> {
    /// The index of the queue's jobs.
    jobs: usize,
    queue: usize,
    /// Its present key.
    key: QueueKey,
    /// What the next job wants, and at which levels it would be within the guarantee with it.
    gpu_type: Option<usize>,
    within: u64,
    /// The next job of each user and priority, or all jobs where they take turns.
    heads: Vec<Head<'a>>,
    /// Where each of them is, the first on top.
    next: BinaryHeap<Reverse<(JobKey, usize)>>,
    /// Decayed use of the users with what they hold, by user.
    had: BTreeMap<u32, u64>,
}

impl<'a> Walk<'a> {
    pub(super) fn new(pass: &Pass<'a>) -> Walk<'a> {
        let mut walk = Walk { lines: Vec::new(), queues: BTreeSet::new(), current: None };
        for (jobs, line) in pass.index.lines.iter().enumerate() {
            if line.by_user.is_empty() {
                continue;
            }
            let queue = pass.branch[jobs];
            let mut new = Line {
                jobs,
                queue,
                key: Vec::new(),
                gpu_type: None,
                within: 0,
                heads: Vec::new(),
                next: BinaryHeap::new(),
                had: BTreeMap::new(),
            };
            match pass.shares(queue) {
                Some(sharing) => new.levels(pass, &sharing),
                None => new.users(pass),
            }
            walk.lines.push(new);
            walk.place(pass, walk.lines.len() - 1);
        }
        walk
    }

    /// Puts a line where its next job belongs.
    fn place(&mut self, pass: &Pass<'a>, at: usize) {
        let line = &mut self.lines[at];
        let Some(waiter) = line.first() else { return };
        line.gpu_type = waiter.gpu_type;
        line.within = within(pass, line.queue, waiter);
        line.key = pass.quotas.key(line.queue, line.gpu_type, line.within);
        self.queues.insert((line.key.clone(), at));
    }

    /// The next job. [`Walk::done`] must follow if it got something.
    pub(super) fn next(&mut self, pass: &Pass<'a>) -> Option<(JobId, &'a Waiter)> {
        loop {
            let at = self.queues.first()?.1;
            let line = &mut self.lines[at];
            let Some(mut top) = line.next.peek_mut() else {
                self.queues.pop_first();
                continue;
            };
            let Reverse((key, head)) = *top;
            let head = &mut line.heads[head];
            let waiter = head.waiter;
            self.current = Some((at, head.user));
            let follows = head.rest.as_mut().and_then(|rest| rest.find(|((_, id), _)| waits(pass, *id)));
            if let Some(((submitted, next), waiter)) = follows {
                head.waiter = waiter;
                let had = line.had.get(&head.user).copied().unwrap_or(0);
                top.0.0 = (key.0, 0, had, *submitted, *next);
                drop(top);
            } else {
                PeekMut::pop(top);
            }
            let follows = line.first();
            let alike = |w: &Waiter| w.gpu_type == line.gpu_type && within(pass, line.queue, w) == line.within;
            if !follows.is_some_and(alike) {
                self.queues.pop_first();
                self.place(pass, at);
            }
            return Some((key.4, waiter));
        }
    }

    /// The job got so many GPUs, or none: another line may stand first now.
    pub(super) fn done(&mut self, pass: &Pass<'a>, gpus: u32) {
        let Some((at, user)) = self.current.take().filter(|_| gpus > 0) else { return };
        let present = u64::from(gpus).saturating_mul(PRESENT.0.unsigned_abs());
        let root = pass.quotas.branches[self.lines[at].queue].path[0];
        let line = &mut self.lines[at];
        if let Some(had) = line.had.get_mut(&user) {
            *had = had.saturating_add(present);
            let (had, heads) = (*had, &line.heads);
            let key = |Reverse((key, head)): Reverse<(JobKey, usize)>| {
                let mine = heads[head].user == user;
                Reverse((if mine { (key.0, key.1, had, key.3, key.4) } else { key }, head))
            };
            line.next = std::mem::take(&mut line.next).into_vec().into_iter().map(key).collect();
        }
        for l in 0..self.lines.len() {
            let line = &self.lines[l];
            if pass.quotas.branches[line.queue].path[0] == root && self.queues.remove(&(line.key.clone(), l)) {
                self.place(pass, l);
            }
        }
    }
}

/// Whether an earlier round of the pass has not started it.
fn waits(pass: &Pass<'_>, job: JobId) -> bool {
    pass.started.is_empty() || !pass.started.contains_key(&job)
}

/// The levels, a bit for each from the root on, at which a queue is within its guarantee with the job.
fn within(pass: &Pass<'_>, queue: usize, waiter: &Waiter) -> u64 {
    let gpus = pass.index.classes[waiter.class as usize].gpus();
    pass.quotas.within(queue, waiter.gpu_type, gpus)
}

impl<'a> Line<'a> {
    /// The next job.
    fn first(&self) -> Option<&'a Waiter> {
        self.next.peek().map(|Reverse((_, head))| self.heads[*head].waiter)
    }

    fn push(&mut self, key: JobKey, head: Head<'a>) {
        self.next.push(Reverse((key, self.heads.len())));
        self.heads.push(head);
    }

    fn users(&mut self, pass: &Pass<'a>) {
        let queue = &pass.quotas.branches[self.queue].name;
        for ((priority, user), list) in &pass.index.lines[self.jobs].by_user {
            let had = *self.had.entry(*user).or_insert_with(|| {
                let started = pass.charged.get(&(self.jobs, *user)).copied().unwrap_or(0);
                let started = u64::from(started).saturating_mul(PRESENT.0.unsigned_abs());
                let key = (queue.clone(), pass.index.users[*user as usize].clone());
                started
                    + pass.snapshot.usage.get(&key).map_or(0, |u| {
                        let present = u64::from(u.gpus).saturating_mul(PRESENT.0.unsigned_abs());
                        u.at(pass.now, pass.snapshot.policy.half_life).saturating_add(present)
                    })
            });
            let mut rest = list.iter();
            if let Some(((submitted, id), waiter)) = rest.find(|((_, id), _)| waits(pass, *id)) {
                self.push((*priority, 0, had, *submitted, *id), Head { user: *user, waiter, rest: Some(rest) });
            }
        }
    }

    fn levels(&mut self, pass: &Pass<'a>, sharing: &TimeSharing) {
        for ((priority, user), list) in &pass.index.lines[self.jobs].by_user {
            for ((submitted, id), waiter) in list.iter().filter(|((_, id), _)| waits(pass, *id)) {
                let gpus = pass.index.classes[waiter.class as usize].gpus();
                let level = turns::level(pass, sharing, waiter.had, gpus, *submitted);
                self.push((*priority, level, 0, *submitted, *id), Head { user: *user, waiter, rest: None });
            }
        }
    }
}
