//! From the document to what the core decides by.

use crate::file::Priorities;
use crate::spec::{JobSpec, Processes};
use aviflow_core::model::{NodeRange, Request, Topology};
use aviflow_core::time::Span;

/// Time between SIGTERM and SIGKILL; what Kubernetes gives a pod too.
pub const GRACE: Span = Span::seconds(30);

/// What the job asks for. A priority that is no longer defined counts as 0, so that a job
/// that was accepted never becomes unreadable.
#[must_use]
pub fn to_request(spec: &JobSpec, priorities: &Priorities) -> Request {
    Request {
        queue: spec.queue.clone(),
        priority: priorities.get(&spec.priority).unwrap_or(0),
        nodes: NodeRange { min: spec.nodes.min, max: spec.nodes.max },
        gpus_per_node: spec.gpus_per_node,
        gpu_types: spec.gpu_type.clone(),
        ranks_per_node: match spec.processes {
            Processes::PerNode => 1,
            Processes::PerGpu => spec.gpus_per_node,
        },
        time_limit: spec.time_limit.map(|d| d.0),
        preemptible: spec.preemptible,
        failures_allowed: spec.retry.failures,
        grace: GRACE,
        checkpoint_every: spec.checkpoint.as_ref().and_then(|c| c.every).map(|d| d.0),
        topology: spec.topology.as_ref().map_or_else(Topology::default, |t| Topology {
            require: t.require.clone(),
            prefer: t.prefer.clone(),
            max_wait: t.max_wait.map(|d| d.0),
        }),
    }
}
