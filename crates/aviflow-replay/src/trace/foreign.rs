//! Traces of others: Kalos (Acme) and Philly, as `shared/traces` describes them.

use super::TraceJob;
use super::csv::Rows;
use super::values::{Place, millis};
use crate::error::Result;
use aviflow_core::time::{Span, Time};

/// Seconds that one iteration of the Kalos conversion stands for.
const KALOS_ITERATION: f64 = 0.5;

/// Kalos: the run is `num_iteration` half-seconds, on `gpu_workers` nodes of `gpu_per_worker` GPUs.
pub(super) fn kalos(file: &str, text: &str) -> Result<Vec<TraceJob>> {
    let rows = Rows::new(file, text)?;
    let names = ["job_id", "arrival_time", "num_iteration", "gpu_workers", "gpu_per_worker"];
    let [id, arrival, iterations, workers, gpus] = rows.columns(names, "kalos")?;
    let mut jobs = Vec::new();
    for row in rows {
        let row = row?;
        let at = |column| Place { file: row.file, line: row.line, column };
        let run = at("num_iteration").seconds(&row.cells[iterations])? * KALOS_ITERATION;
        jobs.push(TraceJob {
            line: row.line,
            name: format!("kalos-{}", row.cells[id]),
            submitted: Time(millis(at("arrival_time").seconds(&row.cells[arrival])?)),
            user: "kalos".to_owned(),
            queue: None,
            priority: 0,
            nodes: at("gpu_workers").count(&row.cells[workers])?,
            gpus_per_node: at("gpu_per_worker").count(&row.cells[gpus])?,
            gpu_type: None,
            run: Span(millis(run).max(1)),
            time_limit: None,
            preemptible: true,
            require: None,
        });
    }
    Ok(jobs)
}

/// Philly: up to a node's GPUs a job is on one node, else on as many whole nodes as it needs. The virtual
/// cluster stands for the user, since the trace has none: it is among virtual clusters that shares are fair.
pub(super) fn philly(file: &str, text: &str, gpus_per_node: u32) -> Result<Vec<TraceJob>> {
    let rows = Rows::new(file, text)?;
    let [stamp, duration, gpus, cluster] = rows.columns(["timestamp", "duration", "num_gpus", "cluster"], "philly")?;
    let mut jobs = Vec::new();
    for row in rows {
        let row = row?;
        let at = |column| Place { file: row.file, line: row.line, column };
        let wanted = at("num_gpus").count(&row.cells[gpus])?;
        let (nodes, each) = spread(wanted, gpus_per_node);
        jobs.push(TraceJob {
            line: row.line,
            name: format!("philly-{}", row.line),
            submitted: at("timestamp").instant(&row.cells[stamp])?,
            user: row.cells[cluster].clone(),
            queue: None,
            priority: 0,
            nodes,
            gpus_per_node: each,
            gpu_type: None,
            run: at("duration").run(&row.cells[duration])?,
            time_limit: None,
            preemptible: true,
            require: None,
        });
    }
    Ok(jobs)
}

/// So many GPUs as nodes and GPUs on each: part of a node, or whole nodes.
pub(crate) fn spread(gpus: u32, gpus_per_node: u32) -> (u32, u32) {
    if gpus <= gpus_per_node { (1, gpus) } else { (gpus.div_ceil(gpus_per_node), gpus_per_node) }
}
