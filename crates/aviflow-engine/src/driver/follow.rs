//! What changed since somebody looked last, for who keeps a copy of the engine's state elsewhere.
//!
//! A follower is told which jobs changed, and gets those that ended, which the engine forgets. Nobody waits for a
//! follower: what it does not take is kept for it, once for each job.
//!
//! Invariant: after it has taken everything, a follower that reads the jobs it was told of has seen their last state.

use super::Handle;
use crate::engine::Turn;
use aviflow_core::model::{Job, JobId};
use aviflow_core::time::Time;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use tokio::sync::watch;

/// What changed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Changes {
    /// Whether anything may have changed, as for one who begins: then all is to be looked at.
    pub all: bool,
    /// Jobs that changed, and live.
    pub live: BTreeSet<JobId>,
    /// Jobs that ended, with when.
    pub ended: BTreeMap<JobId, (Job, Time)>,
}

impl Changes {
    fn add(&mut self, turn: &Turn, now: Time) {
        self.live.extend(&turn.changed);
        for job in &turn.ended {
            self.live.remove(&job.id);
            self.ended.insert(job.id, (job.clone(), now));
        }
    }
}

/// Who keeps a copy. What happens while it is not dropped is kept for it.
pub struct Follower {
    changes: Arc<Mutex<Changes>>,
    generation: watch::Receiver<u64>,
}

impl Follower {
    /// Waits for a commit. False once the engine has ended.
    pub async fn changed(&mut self) -> bool {
        self.generation.changed().await.is_ok()
    }

    /// Takes what changed since this was called before.
    #[must_use]
    pub fn take(&self) -> Changes {
        std::mem::take(&mut *self.changes.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Those who follow.
#[derive(Clone, Default)]
pub(super) struct Followers(Arc<Mutex<Vec<Weak<Mutex<Changes>>>>>);

impl Followers {
    /// Tells each something. Who is gone is forgotten.
    fn tell(&self, tell: impl Fn(&mut Changes)) {
        let mut followers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        followers.retain(|follower| match follower.upgrade() {
            Some(changes) => {
                tell(&mut changes.lock().unwrap_or_else(PoisonError::into_inner));
                true
            }
            None => false,
        });
    }

    /// What a turn has made durable.
    pub(super) fn turned(&self, turn: &Turn, now: Time) {
        if !turn.changed.is_empty() {
            self.tell(|changes| changes.add(turn, now));
        }
    }

    /// The store was read anew: what was told before may not have come to be.
    pub(super) fn reopened(&self) {
        self.tell(|changes| changes.all = true);
    }
}

impl Handle {
    /// Follows the jobs from now on.
    #[must_use]
    pub fn follow(&self) -> Follower {
        let changes = Arc::new(Mutex::new(Changes { all: true, ..Changes::default() }));
        let mut generation = self.changed.clone();
        // It has not seen what there is.
        generation.mark_changed();
        self.followers.0.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::downgrade(&changes));
        Follower { changes, generation }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aviflow_core::model::{JobKey, NodeRange, Phase, Request};
    use aviflow_core::time::Span;

    fn ended(id: u64) -> Job {
        let request = Request {
            queue: "q".into(),
            priority: 0,
            nodes: NodeRange { min: 1, max: 1 },
            gpus_per_node: 1,
            gpu_types: Vec::new(),
            ranks_per_node: 1,
            time_limit: None,
            preemptible: true,
            failures_allowed: 0,
            grace: Span(0),
            checkpoint_every: None,
            topology: Default::default(),
            keep_on_failure: None,
        };
        let key = JobKey { namespace: "default".into(), name: id.to_string() };
        let mut job = Job::submitted(JobId(id), key, "ada".into(), request, None, Time(0));
        job.phase = Phase::Succeeded;
        job
    }

    fn turn(changed: &[u64], over: &[u64]) -> Turn {
        let ids = changed.iter().chain(over).map(|id| JobId(*id));
        Turn { changed: ids.collect(), ended: over.iter().map(|id| ended(*id)).collect(), ..Turn::default() }
    }

    #[test]
    fn each_change_is_taken_once_and_ends_are_kept() {
        let (sender, _messages) = std::sync::mpsc::channel();
        let (_commits, changed) = watch::channel(0);
        let followers = Followers::default();
        let handle = Handle {
            sender,
            changed,
            followers: followers.clone(),
            meter: Default::default(),
            feed: Default::default(),
        };
        followers.turned(&turn(&[1], &[]), Time(5));
        let follower = handle.follow();
        assert!(follower.generation.has_changed().unwrap_or(false), "who begins has not seen what there is");
        assert_eq!(follower.take(), Changes { all: true, ..Changes::default() });

        followers.turned(&turn(&[1, 2], &[]), Time(6));
        followers.turned(&turn(&[3], &[1]), Time(7));
        let changes = follower.take();
        assert_eq!((changes.all, changes.live), (false, [JobId(2), JobId(3)].into()));
        assert_eq!(changes.ended, [(JobId(1), (ended(1), Time(7)))].into());
        assert_eq!(follower.take(), Changes::default());

        followers.reopened();
        assert!(follower.take().all, "what was told before may not have come to be");
        drop(follower);
        followers.turned(&turn(&[4], &[]), Time(8));
        assert_eq!(followers.0.lock().map(|f| f.len()).ok(), Some(0), "who is gone is forgotten");
    }
}
