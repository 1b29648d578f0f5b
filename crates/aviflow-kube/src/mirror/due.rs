//! Jobs whose objects are to be written, and from when on.

use aviflow_core::model::JobId;
use std::collections::{BTreeMap, BTreeSet};
use tokio::time::Instant;

/// Each job once, in the order of time.
#[derive(Debug, Default)]
pub(super) struct Due {
    at: BTreeMap<JobId, Instant>,
    order: BTreeSet<(Instant, JobId)>,
}

impl Due {
    /// A job is due at an instant; where it was due earlier, it stays so.
    pub(super) fn at(&mut self, job: JobId, at: Instant) {
        if let Some(before) = self.at.get(&job).copied() {
            if before <= at {
                return;
            }
            self.order.remove(&(before, job));
        }
        self.at.insert(job, at);
        self.order.insert((at, job));
    }

    /// When the first is due.
    pub(super) fn first(&self) -> Option<Instant> {
        self.order.first().map(|(at, _)| *at)
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.order.len()
    }

    /// Takes those that are due by now, so many at most, the longest due first.
    pub(super) fn take(&mut self, now: Instant, most: usize) -> Vec<JobId> {
        let mut taken = Vec::new();
        while taken.len() < most
            && let Some((at, job)) = self.order.first().copied().filter(|(at, _)| *at <= now)
        {
            self.order.remove(&(at, job));
            self.at.remove(&job);
            taken.push(job);
        }
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn each_is_taken_once_and_in_time() {
        let start = Instant::now();
        let at = |s: u64| start + Duration::from_secs(s);
        let mut due = Due::default();
        due.at(JobId(1), at(5));
        due.at(JobId(2), at(3));
        due.at(JobId(1), at(9));
        assert_eq!((due.first(), due.len()), (Some(at(3)), 2));
        assert_eq!(due.take(at(2), 9), []);
        assert_eq!(due.take(at(6), 1), [JobId(2)]);
        assert_eq!(due.take(at(6), 9), [JobId(1)], "the earlier time counts");
        due.at(JobId(3), at(9));
        due.at(JobId(3), at(7));
        assert_eq!(due.take(at(8), 9), [JobId(3)], "also if it is said later");
        assert_eq!((due.first(), due.len()), (None, 0));
    }
}
