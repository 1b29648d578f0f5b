//! Workers without pods, to measure what the control plane itself costs.
//!
//! With `aviflow serve --kube --pretend-workers`, a hidden flag for benchmarks, everything is as it always is but
//! that no pod is made: a worker is ready at once, and ends with 0 when the time of its job is over, whose command is
//! `sleep SECONDS`. So a benchmark measures the program that is shipped, and no other that is built for it.
//!
//! It cannot be reached by accident: no variable of the environment sets it, and [`check`] refuses a cluster in which
//! there is a kubelet.

use aviflow_core::lifecycle::{RankEnd, WorkerEvent};
use aviflow_core::model::{Address, JobId};
use aviflow_core::time::Span;
use aviflow_engine::ports::{Cluster, JobRecord, Observation, Order, Stamped};
use k8s_openapi::api::core::v1::Node;
use kube::api::ListParams;
use kube::{Api, Client};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::task::AbortHandle;

/// Takes observations; does not block.
pub type Report = Arc<dyn Fn(Observation) + Send + Sync>;

/// Refuses a cluster that has a node with a kubelet.
///
/// # Errors
/// With the name of such a node, or if the nodes cannot be read.
pub async fn check(client: &Client) -> Result<(), String> {
    let nodes = Api::<Node>::all(client.clone()).list(&ListParams::default()).await;
    let nodes = nodes.map_err(|e| format!("the cluster's nodes cannot be read: {e}"))?;
    let kubelet = |node: &Node| {
        let info = node.status.as_ref().and_then(|status| status.node_info.as_ref());
        info.is_some_and(|info| !info.kubelet_version.is_empty())
    };
    match nodes.items.iter().find(|node| kubelet(node)) {
        None => Ok(()),
        Some(node) => {
            let name = node.metadata.name.as_deref().unwrap_or_default();
            Err(format!("node `{name}` has a kubelet, and no job would run on it"))
        }
    }
}

/// An attempt: its workers, its time, and what ends it.
struct Attempt {
    workers: u32,
    time: Duration,
    end: Option<AbortHandle>,
}

type Attempts = Arc<Mutex<BTreeMap<(JobId, u32), Attempt>>>;

/// A cluster whose workers are pretended.
pub struct Pretended<C> {
    cluster: C,
    report: Report,
    runtime: tokio::runtime::Handle,
    attempts: Attempts,
}

impl<C> Pretended<C> {
    /// What the cluster sees of its nodes is as before.
    pub fn new(cluster: C, report: Report, runtime: tokio::runtime::Handle) -> Pretended<C> {
        Pretended { cluster, report, runtime, attempts: Attempts::default() }
    }

    fn launch(&self, record: &JobRecord, attempt: u32, workers: u32) {
        let key = (record.id, attempt);
        let new = Attempt { workers, time: time(record), end: None };
        let known = lock(&self.attempts).insert(key, new);
        if let Some(end) = known.and_then(|k| k.end) {
            end.abort();
        }
        let address = Address { host: "127.0.0.1".to_owned(), port: 1 };
        self.say(key, 0, workers, |_| WorkerEvent::Ready { address: address.clone() });
    }

    fn start(&self, key: (JobId, u32), epoch: u32) {
        let mut attempts = lock(&self.attempts);
        let Some(attempt) = attempts.get_mut(&key).filter(|a| a.end.is_none()) else { return };
        let (report, known, time, workers) =
            (self.report.clone(), self.attempts.clone(), attempt.time, attempt.workers);
        let task = self.runtime.spawn(async move {
            tokio::time::sleep(time).await;
            lock(&known).remove(&key);
            say(&report, key, epoch, workers, |worker| gone(worker, 0));
        });
        attempt.end = Some(task.abort_handle());
        self.say(key, epoch, workers, |_| WorkerEvent::Up);
    }

    fn stop(&self, key: (JobId, u32)) {
        if let Some(attempt) = lock(&self.attempts).remove(&key) {
            if let Some(end) = attempt.end {
                end.abort();
            }
            self.say(key, 0, attempt.workers, |worker| gone(worker, 143));
        }
    }

    fn say(&self, key: (JobId, u32), epoch: u32, workers: u32, event: impl Fn(u32) -> WorkerEvent) {
        say(&self.report, key, epoch, workers, event);
    }
}

impl<C: Cluster> Cluster for Pretended<C> {
    fn apply(&mut self, orders: &[Stamped]) {
        let mut others = Vec::new();
        for stamped in orders {
            match &stamped.order {
                Order::Launch { record, attempt, placement, .. } => {
                    self.launch(record, *attempt, u32::try_from(placement.0.len()).unwrap_or(u32::MAX));
                }
                Order::Confirm { job, attempt, epoch, .. } => self.start((*job, *attempt), *epoch),
                Order::Stop { job, attempt, .. } => self.stop((*job, *attempt)),
                Order::Remove { .. } => {}
                Order::Reconcile { .. } | Order::Prepare { .. } | Order::Abandon { .. } | Order::Keep { .. } => {
                    others.push(stamped.clone());
                }
            }
        }
        self.cluster.apply(&others);
    }
}

/// The time of a job: what `sleep` is told, else none.
fn time(record: &JobRecord) -> Duration {
    let seconds = match record.spec.run.as_slice() {
        [sleep, seconds] if sleep == "sleep" => seconds.parse().ok(),
        _ => None,
    };
    seconds.and_then(|s| Duration::try_from_secs_f64(s).ok()).unwrap_or_default()
}

fn gone(worker: u32, code: i32) -> WorkerEvent {
    let end = RankEnd { code, signal: None, stopping: code != 0, before: Span(0), last_lines: Vec::new(), why: None };
    WorkerEvent::Gone { ranks: [(worker, end)].into(), reason: None, last_step: None, next_port: None }
}

fn say(report: &Report, (job, attempt): (JobId, u32), epoch: u32, workers: u32, event: impl Fn(u32) -> WorkerEvent) {
    for worker in 0..workers {
        report(Observation::Worker { job, attempt, epoch, worker, ago: Span(0), event: event(worker) });
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use aviflow_core::model::Term;
    use std::sync::mpsc::channel;

    /// What is not pretended.
    struct Others(Arc<Mutex<usize>>);

    impl Cluster for Others {
        fn apply(&mut self, orders: &[Stamped]) {
            *lock(&self.0) += orders.len();
        }
    }

    #[tokio::test]
    async fn a_worker_that_is_stopped_ends_once_and_the_rest_goes_to_the_cluster() {
        let (sender, said) = channel();
        let others = Arc::<Mutex<usize>>::default();
        let report: Report = Arc::new(move |observation| drop(sender.send(observation)));
        let mut cluster = Pretended::new(Others(others.clone()), report, tokio::runtime::Handle::current());
        let key = (JobId(1), 1);
        lock(&cluster.attempts).insert(key, Attempt { workers: 2, time: Duration::from_secs(3600), end: None });
        let order = |order| Stamped { term: Term(1), generation: 1, order };
        let rank0 = Address { host: "127.0.0.1".into(), port: 1 };
        let stop = Order::Stop { job: key.0, attempt: key.1, epoch: 1, grace: Span(0), reason: String::new() };
        cluster.apply(&[
            order(Order::Confirm { job: key.0, attempt: key.1, epoch: 1, rank0, best_step: None }),
            order(Order::Keep { node: "a".into(), gpus: 1, whole: false }),
            order(stop.clone()),
            order(stop),
        ]);
        let events: Vec<WorkerEvent> = said
            .try_iter()
            .filter_map(|o| match o {
                Observation::Worker { event, .. } => Some(event),
                _ => None,
            })
            .collect();
        assert_eq!(events, [WorkerEvent::Up, WorkerEvent::Up, gone(0, 143), gone(1, 143)]);
        assert_eq!(*lock(&others), 1);
        assert!(lock(&cluster.attempts).is_empty());
    }
}
