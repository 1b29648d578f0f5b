//! An empty store beside jobs: it was lost, and is rebuilt before anything is decided.
//!
//! A control plane that began on the empty store would take what runs for strays and end it.

use super::store_failure;
use crate::error::{Failure, Result};
use crate::output::{note, now};
use aviflow_api::file::Defaults;
use aviflow_core::time::Time;
use aviflow_engine::ports::{Batch, Store};
use aviflow_kube::Client;
use aviflow_kube::rebuild::{Rebuilt, collect, rebuild};
use aviflow_store::{Objects, Reader};
use tokio::runtime::Runtime;

/// Rebuilds the store if nothing was ever written to it and the cluster has jobs, in one commit.
pub fn where_lost(
    store: &mut dyn Store,
    reader: &dyn Reader,
    client: &Client,
    default_queue: &str,
    objects: &Objects,
    runtime: &Runtime,
) -> Result<()> {
    // One that is not there yet cannot be read.
    let empty = reader.nodes().map_or(true, |n| n.is_empty()) && reader.phases().map_or(true, |p| p.is_empty());
    if !empty {
        return Ok(());
    }
    let loaded = store.acquire().map_err(store_failure)?;
    if loaded.generation > 0 {
        return Ok(());
    }
    let found = runtime.block_on(collect(client)).map_err(|why| {
        Failure::new(format!("the store is empty, and whether the cluster has jobs cannot be seen: {why}"))
            .help("`aviflow doctor --kube` shows what is missing; it is not begun anew, as what runs would be ended")
    })?;
    if !found.has_jobs() {
        return Ok(());
    }
    let rebuilt = rebuild(&found, loaded.term, Time(now()), default_queue, &Defaults::default().priorities);
    store.commit(&rebuilt.batch).map_err(store_failure)?;
    say(&rebuilt, objects);
    Ok(())
}

/// What was recovered, and what was not.
fn say(rebuilt: &Rebuilt, objects: &Objects) {
    let [running, waiting, ended] = rebuilt.counts;
    note(&format!(
        "the store is empty and the cluster has jobs: it was rebuilt from their objects, {running} that hold GPUs, \
         {waiting} that wait and {ended} that have ended"
    ));
    let next = rebuilt.batch.beyond.map_or(0, |beyond| beyond.job + 1);
    note(&format!(
        "not recovered: the ledger and all use until now, timelines, what people did, drains and the policy; retries \
         of jobs that an earlier version wrote; logs and code that this home folder does not have. New jobs have \
         numbers from {next}"
    ));
    for lost in &rebuilt.lost {
        note(&format!("not recovered: {lost}"));
    }
    for name in without_code(&rebuilt.batch, objects) {
        note(&format!("not recovered: the code of {name}, which cannot start without; submit it again"));
    }
}

/// Jobs that wait for GPUs and whose code snapshots are gone.
fn without_code(batch: &Batch, objects: &Objects) -> Vec<String> {
    let waits = |id| batch.jobs.iter().any(|job| job.id == id && !job.phase.is_terminal());
    let gone = |hash: &str| objects.get(hash).is_err();
    let records = batch.records.iter().filter(|record| waits(record.id));
    let lost = records.filter(|r| r.provenance.code.as_ref().is_some_and(|code| gone(&code.sha256)));
    lost.map(|record| format!("{}/{}", record.key.namespace, record.key.name)).collect()
}
