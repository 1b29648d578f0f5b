//! Jobs for the tests of what people read.

use super::View;
use super::style::Style;
use aviflow_api::rest::{
    AfterInfo, AttemptHash, Build, CheckpointInfo, ClaimInfo, Estimate, EvictionInfo, Factors, JobCounters, JobDetail,
    JobSummary, ProgressPoint, QueueFactor, TimelineEntry, TurnedOutInfo, Verdict, WorkerInfo,
};
use aviflow_api::spec::{CodeSnapshot, JobSpec, Provenance, ResolvedEnvironment};
use aviflow_core::model::EnvironmentHash;
use aviflow_core::schedule::Constraint;
use serde_json::json;
use std::collections::BTreeMap;

/// 2026-03-01 12:00 UTC.
pub const NOW: i64 = 1_772_366_400_000;

pub fn view() -> View {
    View { now: NOW, width: None, style: Style::plain() }
}

pub fn summary() -> JobSummary {
    JobSummary {
        id: 7,
        namespace: "default".into(),
        name: "tiny-gpt-2".into(),
        user: "ada".into(),
        queue: "default".into(),
        priority: "normal".into(),
        phase: "Queued".into(),
        attempts: 0,
        nodes: 2,
        gpus_per_node: 8,
        on: vec![],
        submitted: NOW - 600_000,
        running_since: None,
        ended: None,
        ran: 0,
        verdict: None,
        progress: None,
        failure: None,
        exit_code: None,
    }
}

pub fn point(step: u64, at: i64) -> ProgressPoint {
    ProgressPoint {
        at,
        attempt: 1,
        rank: 0,
        step,
        total_steps: Some(400),
        values: BTreeMap::from([("loss".into(), 2.134_56), ("tokens_per_second".into(), 12_345.0)]),
        odd: BTreeMap::new(),
    }
}

pub fn running() -> JobSummary {
    JobSummary {
        phase: "Running".into(),
        attempts: 1,
        on: vec!["local-0".into(), "local-1".into()],
        running_since: Some(NOW - 500_000),
        ran: 500_000,
        progress: Some(point(120, NOW - 1000)),
        ..summary()
    }
}

fn capacity() -> Constraint {
    Constraint::Capacity {
        needs_nodes: 4,
        gpus_per_node: 8,
        gpu_types: vec!["H100".into()],
        nodes_with_room: 0,
        foreign_gpus: 0,
        closed_nodes: 0,
        free_gpus: 8,
        level: None,
        most_free_on_a_node: 4,
    }
}

pub fn verdict(constraint: Constraint, place: u32) -> Verdict {
    let reason = aviflow_core::explain::constraint(&constraint, aviflow_core::time::Time(NOW));
    Verdict { place, waiting: 3, constraint: (&constraint).into(), reason, ..Verdict::default() }
}

pub fn queued() -> JobSummary {
    JobSummary {
        id: 8,
        name: "big-sft".into(),
        priority: "high".into(),
        nodes: 4,
        submitted: NOW - 90_000,
        verdict: Some(verdict(capacity(), 1)),
        ..summary()
    }
}

pub fn building() -> JobSummary {
    let mut verdict = verdict(Constraint::Environment { hash: EnvironmentHash("ab".into()) }, 2);
    verdict.build =
        Some(Build { name: "jax-cpu@1".into(), step: "installing jaxlib 0.10.2".into(), done: 3, total: 7 });
    JobSummary { name: "first".into(), nodes: 1, gpus_per_node: 1, verdict: Some(verdict), ..summary() }
}

/// Behind others, with an estimate and everything that its place follows from.
pub fn behind() -> JobSummary {
    let queue = |name: &str, guarantee_used, use_over_weight| QueueFactor {
        queue: name.into(),
        guarantee_used,
        use_over_weight,
    };
    let factors = Factors {
        queues: vec![queue("research", Some(500_000), 0), queue("nlp", None, 43_200_000)],
        priority: 100,
        level: None,
        user_use: Some(7_200_000),
        submitted: NOW - 90_000,
    };
    let verdict = Verdict {
        front: (1..=7).map(|i| format!("default/front-{i}")).collect(),
        waiting: 9,
        estimate: Some(Estimate { p50: NOW + 1_200_000, p90: NOW + 5_400_000 }),
        sooner: Some("on 2 nodes it would start in 5m".into()),
        factors: Some(factors),
        ..verdict(capacity(), 8)
    };
    JobSummary { queue: "nlp".into(), verdict: Some(verdict), ..queued() }
}

/// Suspended for another, and waiting to come back; held by a person, too.
pub fn turned_out() -> JobDetail {
    let after = |job: &str, on: &str, state: &str| AfterInfo { job: job.into(), on: on.into(), state: state.into() };
    JobDetail {
        held: Some("bob".into()),
        after: vec![after("default/prepare", "succeeded", "met"), after("nlp/evaluate", "ended", "waiting")],
        claim: Some(ClaimInfo {
            gpus: 16,
            on: vec!["local-0".into(), "local-1".into()],
            victims: vec!["default/tiny-gpt".into()],
            cause: "reclaim".into(),
            since: NOW - 120_000,
        }),
        turned_out: Some(TurnedOutInfo {
            beneficiary: Some("nlp/big".into()),
            cause: "priority".into(),
            at: NOW - 300_000,
        }),
        expected_back: Some(NOW + 3_600_000),
        ..detail(behind())
    }
}

/// Running, and to leave for a drain.
pub fn leaving() -> JobDetail {
    let eviction =
        EvictionInfo { beneficiary: None, cause: "drain".into(), since: NOW - 60_000, deadline: NOW + 720_000 };
    JobDetail { eviction: Some(eviction), ..detail(running()) }
}

pub fn failed() -> JobSummary {
    JobSummary {
        phase: "Failed".into(),
        name: "broken".into(),
        attempts: 1,
        nodes: 1,
        gpus_per_node: 2,
        submitted: NOW - 7_300_000,
        ended: Some(NOW - 7_200_000),
        ran: 95_000,
        failure: Some("rank 1 (worker 0 on local-0) exited with 3 in attempt 1".into()),
        exit_code: Some(3),
        ..summary()
    }
}

pub fn spec() -> JobSpec {
    let value = json!({
        "name": "tiny-gpt", "queue": "default", "priority": "normal", "environment": "jax-cpu@1", "code": ".",
        "nodes": {"min": 2, "max": 2}, "gpusPerNode": 8, "run": ["python", "train.py", "--steps", "400"],
        "processes": "perNode", "preemptible": true, "retry": {"failures": 1}, "seed": 42, "outputs": ["/out"],
        "checkpoint": {"path": "/checkpoints"},
        "data": [{"name": "corpus", "source": "/data/corpus.bin", "readOnly": true}],
    });
    match serde_json::from_value(value) {
        Ok(spec) => spec,
        Err(error) => panic!("{error}"),
    }
}

pub fn detail(summary: JobSummary) -> JobDetail {
    let hash = |c: char| c.to_string().repeat(64);
    let entry = |ago: i64, attempt: u32, kind: &str, text: &str| TimelineEntry {
        at: NOW - ago,
        attempt,
        kind: kind.into(),
        text: text.into(),
    };
    JobDetail {
        spec: spec(),
        provenance: Provenance {
            code: Some(CodeSnapshot {
                sha256: hash('a'),
                bytes: 12_345,
                files: 7,
                commit: Some("0123456789abcdef0123456789abcdef01234567".into()),
                dirty: true,
            }),
            environment: Some(ResolvedEnvironment {
                name: "jax-cpu".into(),
                version: 1,
                hash: hash('b'),
                python: ">=3.11,<3.13".into(),
                locks: vec![hash('c')],
                env: BTreeMap::new(),
            }),
            image: None,
            layer: None,
            data: BTreeMap::from([("corpus".into(), hash('d'))]),
            client: BTreeMap::from([("os".into(), "linux".into()), ("arch".into(), "x86_64".into())]),
            rerun_of: None,
            object: None,
            file: Some("examples/tiny-gpt/job.yaml".into()),
        },
        counters: JobCounters { failures: 0, node_failures: 1, suspensions: 0, unready: 0 },
        workers: if summary.on.is_empty() {
            vec![]
        } else {
            (0..2)
                .map(|w| WorkerInfo {
                    worker: w,
                    node: format!("local-{w}"),
                    slots: (0..8).collect(),
                    state: "up".into(),
                    ranks: vec![w],
                    exits: BTreeMap::new(),
                })
                .collect()
        },
        checkpoint: Some(CheckpointInfo {
            step: 100,
            path: "/checkpoints/step-100".into(),
            at: NOW - 60_000,
            attempt: 1,
        }),
        held: None,
        after: vec![],
        claim: None,
        eviction: None,
        turned_out: None,
        expected_back: None,
        gpu_time: BTreeMap::from([
            ("productive".into(), 7_200_000),
            ("starting".into(), 480_000),
            ("checkpointing".into(), 320_000),
        ]),
        facts: BTreeMap::from([
            ("framework".into(), "jax 0.10.2".into()),
            ("result.valid_loss".into(), "2.0912".into()),
            ("result.perplexity".into(), "8.09".into()),
        ]),
        last_lines: vec![],
        timeline: vec![
            entry(600_000, 0, "submitted", "submitted by ada"),
            entry(599_000, 1, "placed", "attempt 1 got 16 GPUs on local-0, local-1"),
            entry(500_000, 1, "running", "all 2 ranks are up"),
        ],
        hash: hash('e'),
        attempt_hashes: vec![AttemptHash { attempt: 1, hash: hash('e'), differs: false }],
        summary,
    }
}
