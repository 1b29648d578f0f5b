//! Jobs as tests describe them: a name, a size, and one word for each thing that is not as usual.

use crate::model::{Ending, EnvironmentHash, Request};
use crate::time::Span;

/// A job as a test describes it, and how it behaves.
#[derive(Clone, Debug)]
pub(super) struct Spec {
    pub(super) name: String,
    pub(super) user: String,
    pub(super) request: Request,
    /// How long it trains, undisturbed.
    pub(super) runs: Span,
    /// From its placement to all ranks being up.
    pub(super) starts_in: Span,
    /// From SIGTERM to its last process.
    pub(super) stops_in: Span,
    /// Whether it saves itself when it is asked to stop.
    pub(super) saves: bool,
    pub(super) environment: Option<EnvironmentHash>,
    pub(super) after: Vec<(String, Ending)>,
}

/// A job of so many GPUs: a share of a node, or whole nodes of eight.
pub(super) fn job(name: &str, gpus: u32) -> Spec {
    if gpus <= 8 { gang(name, 1, gpus) } else { gang(name, gpus / 8, 8) }
}

/// A job of so many nodes with so many GPUs each.
pub(super) fn gang(name: &str, nodes: u32, gpus: u32) -> Spec {
    Spec {
        name: name.to_owned(),
        user: "ann".to_owned(),
        request: Request { grace: Span::seconds(10), ..Request::of(nodes, gpus) },
        runs: Span::minutes(60 * 24 * 365),
        starts_in: Span(0),
        stops_in: Span::seconds(5),
        saves: false,
        environment: None,
        after: Vec::new(),
    }
}

impl Spec {
    pub(super) fn queue(mut self, queue: &str) -> Spec {
        self.request.queue = queue.to_owned();
        self
    }

    pub(super) fn user(mut self, user: &str) -> Spec {
        self.user = user.to_owned();
        self
    }

    pub(super) fn priority(mut self, priority: i32) -> Spec {
        self.request.priority = priority;
        self
    }

    /// Trains so many minutes, and says nothing of it.
    pub(super) fn runs(mut self, minutes: i64) -> Spec {
        self.runs = Span::minutes(minutes);
        self
    }

    pub(super) fn limit(mut self, minutes: i64) -> Spec {
        self.request.time_limit = Some(Span::minutes(minutes));
        self
    }

    /// Trains exactly as long as its time limit allows.
    pub(super) fn exactly(self, minutes: i64) -> Spec {
        self.runs(minutes).limit(minutes)
    }

    pub(super) fn types(mut self, types: &[&str]) -> Spec {
        self.request.gpu_types = types.iter().map(|t| (*t).to_owned()).collect();
        self
    }

    pub(super) fn up_to(mut self, nodes: u32) -> Spec {
        self.request.nodes.max = nodes;
        self
    }

    /// Not preemptible.
    pub(super) fn fixed(mut self) -> Spec {
        self.request.preemptible = false;
        self
    }

    /// Saves itself every so many minutes.
    pub(super) fn saves_every(mut self, minutes: i64) -> Spec {
        self.request.checkpoint_every = Some(Span::minutes(minutes));
        self
    }

    /// Saves itself when it is asked to stop, which is known only once it was seen.
    pub(super) fn saves_on_request(mut self) -> Spec {
        self.saves = true;
        self
    }

    pub(super) fn grace(mut self, seconds: i64) -> Spec {
        self.request.grace = Span::seconds(seconds);
        self.stops_in = Span::seconds(seconds);
        self
    }

    pub(super) fn starts_in(mut self, seconds: i64) -> Spec {
        self.starts_in = Span::seconds(seconds);
        self
    }

    pub(super) fn require(mut self, level: &str) -> Spec {
        self.request.topology.require = Some(level.to_owned());
        self
    }

    pub(super) fn prefer(mut self, level: &str, minutes: i64) -> Spec {
        self.request.topology.prefer = Some(level.to_owned());
        self.request.topology.max_wait = Some(Span::minutes(minutes));
        self
    }

    pub(super) fn retries(mut self, failures: u32) -> Spec {
        self.request.failures_allowed = failures;
        self
    }

    pub(super) fn after(mut self, job: &str, on: Ending) -> Spec {
        self.after.push((job.to_owned(), on));
        self
    }

    pub(super) fn environment(mut self, hash: &str) -> Spec {
        self.environment = Some(EnvironmentHash(hash.to_owned()));
        self
    }
}
