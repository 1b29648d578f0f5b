//! All metrics that `/metrics` has. The table in `docs/admin/monitoring.md` is made of it.
//!
//! Labels are bounded: by what the administrator made (queues, pools), by words of ours, or by live jobs. Users are in
//! none.

use aviflow_metrics::exposition::Family;
use aviflow_metrics::exposition::Kind::{self, Counter, Gauge, Histogram};

const fn family(name: &'static str, kind: Kind, labels: &'static [&'static str], help: &'static str) -> Family {
    Family { name, kind, labels, help }
}

const JOB: &[&str] = &["namespace", "job", "attempt"];
const QUEUE: &[&str] = &["queue", "gpu_type"];

pub(crate) const BUILD: Family =
    family("aviflow_build_info", Gauge, &["version", "body"], "1, with the version of the control plane and its body.");
pub(crate) const ENGINE: Family =
    family("aviflow_engine_up", Gauge, &[], "Whether the engine takes turns: 0 while the store fails.");
pub(crate) const START: Family =
    family("process_start_time_seconds", Gauge, &[], "When the control plane began, in seconds since 1970.");
pub(crate) const CPU: Family =
    family("process_cpu_seconds_total", Counter, &[], "CPU time of the control plane, in user and system mode.");
pub(crate) const MEMORY: Family =
    family("process_resident_memory_bytes", Gauge, &[], "Resident memory of the control plane.");
pub(crate) const FILES: Family = family("process_open_fds", Gauge, &[], "Open file descriptors of the control plane.");

pub(crate) const TURN: Family =
    family("aviflow_turn_duration_seconds", Histogram, &[], "Time of a turn of the engine, with its commit.");
pub(crate) const PLAN: Family =
    family("aviflow_plan_duration_seconds", Histogram, &[], "Time of a plan, within a turn.");
pub(crate) const COMMITS: Family =
    family("aviflow_commits_total", Counter, &[], "Commits of the store, since it was made.");
pub(crate) const STORE_FAILURES: Family =
    family("aviflow_store_failures_total", Counter, &[], "Turns whose commit the store refused.");
pub(crate) const STORE_SIZE: Family = family("aviflow_store_size_bytes", Gauge, &[], "Size of the store's database.");
pub(crate) const PAUSED: Family =
    family("aviflow_starts_paused", Gauge, &[], "Whether a person paused all starts: 1 if so.");

pub(crate) const JOBS: Family = family("aviflow_jobs", Gauge, &["queue", "phase"], "Jobs that have not ended.");
pub(crate) const ENDED: Family = family(
    "aviflow_jobs_ended_total",
    Counter,
    &["queue", "phase"],
    "Jobs that ended: Succeeded, Failed or Cancelled.",
);
pub(crate) const WAITS: Family = family(
    "aviflow_job_wait_seconds",
    Histogram,
    &["gpus"],
    "Time from a job's submission to its first placement, by how many GPUs it got.",
);
pub(crate) const RESTARTS: Family = family(
    "aviflow_job_restarts_total",
    Counter,
    &["cause"],
    "Attempts that ended though their jobs go on; only the cause `failure` spends retries.",
);
pub(crate) const PREEMPTIONS: Family = family(
    "aviflow_job_preemptions_total",
    Counter,
    &["cause"],
    "Running jobs that were told to give their GPUs up for others or for a drain.",
);

pub(crate) const GPUS: Family =
    family("aviflow_gpus", Gauge, &["pool", "gpu_type", "state"], "GPUs by the state that the ledger has them in.");
pub(crate) const NODES: Family =
    family("aviflow_nodes", Gauge, &["pool", "gpu_type", "condition"], "Nodes that have GPUs.");
pub(crate) const GUARANTEE: Family =
    family("aviflow_queue_guarantee_gpus", Gauge, QUEUE, "GPUs that a queue is guaranteed, as its document says.");
pub(crate) const LIMIT: Family =
    family("aviflow_queue_limit_gpus", Gauge, QUEUE, "The most GPUs that a queue may use; absent where there is none.");
pub(crate) const USED: Family =
    family("aviflow_queue_used_gpus", Gauge, QUEUE, "GPUs that a queue's jobs hold, with those of queues below.");
pub(crate) const BORROWED: Family =
    family("aviflow_queue_borrowed_gpus", Gauge, QUEUE, "GPUs that a queue uses beyond its guarantee.");
pub(crate) const LENT: Family =
    family("aviflow_queue_lent_gpus", Gauge, QUEUE, "GPUs of a queue's guarantee that others use.");
pub(crate) const WAITING: Family = family(
    "aviflow_queue_waiting_gpus",
    Gauge,
    &["queue"],
    "GPUs that the jobs of a queue ask for that wait, for the smallest gang of each.",
);

pub(crate) const AGENTS: Family =
    family("aviflow_agents", Gauge, &["state"], "Agents of live attempts: connected, or silent.");
pub(crate) const DROPPED_LOGS: Family = family(
    "aviflow_log_dropped_bytes_total",
    Counter,
    &[],
    "Bytes of output that agents had no room for while the control plane was away.",
);
pub(crate) const DROPPED_NOTICES: Family = family(
    "aviflow_watch_dropped_notices_total",
    Counter,
    &[],
    "What was noticed of running gangs and could not be looked at.",
);
pub(crate) const DROPPED_POINTS: Family =
    family("aviflow_series_dropped_points_total", Counter, &[], "Points of progress that could not be kept.");
pub(crate) const NOTIFICATIONS: Family = family(
    "aviflow_notifications_total",
    Counter,
    &["outcome"],
    "Notifications of jobs: delivered, failed after three tries, refused for their address, dropped for want of room.",
);
pub(crate) const APISERVER: Family = family(
    "aviflow_apiserver_requests_total",
    Counter,
    &["code"],
    "Requests to the apiserver, by its answer: 2xx, 4xx, 5xx, error.",
);
pub(crate) const SOURCES: Family = family(
    "aviflow_gpu_sources",
    Gauge,
    &["state"],
    "Nodes whose GPUs report to this control plane: fresh, or stale if nothing came of late.",
);
pub(crate) const XIDS: Family = family(
    "aviflow_gpu_xid_errors_total",
    Counter,
    &["node", "xid"],
    "XID errors that were seen to come, by their numbers; one that comes twice in a row counts once.",
);

pub(crate) const INFO: Family = family(
    "aviflow_job_info",
    Gauge,
    &["namespace", "job", "attempt", "queue", "phase"],
    "1 for each job that holds GPUs, with its queue and phase.",
);
pub(crate) const JOB_GPUS: Family = family("aviflow_job_gpus", Gauge, JOB, "GPUs that a job holds.");
pub(crate) const RUNNING_SINCE: Family = family(
    "aviflow_job_running_since_timestamp_seconds",
    Gauge,
    JOB,
    "When all ranks of a running job were up, in seconds since 1970.",
);
pub(crate) const PROGRESS: Family = family(
    "aviflow_job_progress_timestamp_seconds",
    Gauge,
    JOB,
    "When a job's training reported progress last, in seconds since 1970.",
);
pub(crate) const CHECKPOINT: Family = family(
    "aviflow_job_checkpoint_timestamp_seconds",
    Gauge,
    JOB,
    "When a job's last checkpoint was complete, in seconds since 1970.",
);
pub(crate) const STEP: Family = family("aviflow_job_step", Gauge, JOB, "The training's step.");
pub(crate) const STEPS: Family =
    family("aviflow_job_steps_planned", Gauge, JOB, "How many steps there will be, where the training says it.");
pub(crate) const STEP_TIME: Family = family("aviflow_job_step_seconds", Gauge, JOB, "Time of a step, of late.");
pub(crate) const LOSS: Family = family("aviflow_job_loss", Gauge, JOB, "The training's loss, as it was reported last.");
pub(crate) const TOKENS: Family =
    family("aviflow_job_tokens_per_second", Gauge, JOB, "The training's speed, as it was reported last.");
pub(crate) const JOB_MFU: Family =
    family("aviflow_job_mfu_ratio", Gauge, JOB, "The part of the GPUs' peak that is used, as the training reports it.");
pub(crate) const OBSERVED: Family =
    family("aviflow_job_gpus_observed", Gauge, JOB, "GPUs of a job of which there are figures of late.");
pub(crate) const UTILIZATION: Family = family(
    "aviflow_job_gpu_utilization_ratio",
    Gauge,
    JOB,
    "Part of the time in which any kernel ran, the mean over a job's GPUs.",
);
pub(crate) const SM_ACTIVE: Family = family(
    "aviflow_job_gpu_sm_active_ratio",
    Gauge,
    JOB,
    "Part of the time in which SMs had work, the mean over a job's GPUs.",
);
pub(crate) const TENSOR_ACTIVE: Family = family(
    "aviflow_job_gpu_tensor_active_ratio",
    Gauge,
    JOB,
    "Part of the cycles in which tensor cores were active, the mean over a job's GPUs.",
);
pub(crate) const DRAM_ACTIVE: Family = family(
    "aviflow_job_gpu_dram_active_ratio",
    Gauge,
    JOB,
    "Part of the cycles in which device memory moved data, the mean over a job's GPUs.",
);
pub(crate) const JOB_MEMORY: Family =
    family("aviflow_job_gpu_memory_used_bytes", Gauge, JOB, "Device memory in use, over all of a job's GPUs.");
pub(crate) const POWER: Family =
    family("aviflow_job_gpu_power_watts", Gauge, JOB, "Power of a job's GPUs, all together.");

/// All families, as the documents have them.
#[cfg(test)]
pub(crate) const ALL: &[&Family] = &[
    &BUILD,
    &ENGINE,
    &START,
    &CPU,
    &MEMORY,
    &FILES,
    &TURN,
    &PLAN,
    &COMMITS,
    &STORE_FAILURES,
    &STORE_SIZE,
    &PAUSED,
    &JOBS,
    &ENDED,
    &WAITS,
    &RESTARTS,
    &PREEMPTIONS,
    &GPUS,
    &NODES,
    &GUARANTEE,
    &LIMIT,
    &USED,
    &BORROWED,
    &LENT,
    &WAITING,
    &AGENTS,
    &DROPPED_LOGS,
    &DROPPED_POINTS,
    &DROPPED_NOTICES,
    &NOTIFICATIONS,
    &APISERVER,
    &SOURCES,
    &XIDS,
    &INFO,
    &JOB_GPUS,
    &RUNNING_SINCE,
    &PROGRESS,
    &CHECKPOINT,
    &STEP,
    &STEPS,
    &STEP_TIME,
    &LOSS,
    &TOKENS,
    &JOB_MFU,
    &OBSERVED,
    &UTILIZATION,
    &SM_ACTIVE,
    &TENSOR_ACTIVE,
    &DRAM_ACTIVE,
    &JOB_MEMORY,
    &POWER,
];
