//! Where the figures of GPUs come from: dcgm-exporter on a cluster, `nvidia-smi` on one machine.

use crate::cli::ServeArgs;
use crate::error::{Result, While};
use crate::output::note;
use aviflow_engine::driver::wall_clock;
use aviflow_kube::exporters::Exporters;
use aviflow_metrics::board::Board;
use aviflow_metrics::scrape::{self, Target};
use aviflow_metrics::smi;
use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::sync::Arc;
use std::time::Duration;

/// How often GPUs are asked, where the configuration does not say: as often as Prometheus does by default.
const EVERY: Duration = Duration::from_secs(15);

/// Exporters that are asked at once.
const AT_ONCE: usize = 16;

/// Intervals without a figure after which one is not shown any more.
const STALE: i64 = 4;

/// Asks from now on whomever the configuration names. `nodes` are those of the local pool: each of them has all GPUs
/// of the machine, and its slots are their numbers.
pub fn ask(args: &ServeArgs, nodes: Option<&BTreeSet<String>>, exporters: Option<Exporters>) -> Result<Arc<Board>> {
    let every = args.gpu_metrics_every.map_or(EVERY, |seconds| Duration::from_secs(seconds.into()));
    let board = board(every);
    match (nodes, &args.gpu_metrics_url, exporters) {
        (Some(nodes), Some(url), _) => {
            let targets = nodes.iter().map(|node| Target { node: node.clone(), url: url.clone() });
            let targets: BTreeSet<Target> = targets.collect();
            ask_exporters(move || targets.clone(), every, board.clone())?;
        }
        (Some(nodes), None, _) => ask_driver(nodes.iter().cloned().collect(), every, board.clone())?,
        (None, _, Some(exporters)) => {
            let target = |(node, url)| Target { node, url };
            ask_exporters(move || exporters.all().into_iter().map(target).collect(), every, board.clone())?;
        }
        (None, _, None) => {}
    }
    Ok(board)
}

/// The board of what GPUs report, if they are asked that often.
fn board(every: Duration) -> Arc<Board> {
    Arc::new(Board::new(i64::try_from(every.as_millis()).unwrap_or(i64::MAX).saturating_mul(STALE)))
}

fn ask_exporters(
    targets: impl Fn() -> BTreeSet<Target> + Send + Sync + 'static,
    every: Duration,
    board: Arc<Board>,
) -> Result<()> {
    scrape::start(targets, scrape::http(), (every, AT_ONCE), || wall_clock().0, board)
        .or_fail(|| "threads cannot be started".to_owned())
}

/// Asks this machine's driver, if it has one.
fn ask_driver(nodes: Vec<String>, every: Duration, board: Arc<Board>) -> Result<()> {
    let ask = move || {
        let mut well = true;
        loop {
            match smi::ask() {
                Ok(readings) => {
                    nodes.iter().for_each(|node| board.read(node, wall_clock().0, readings.clone()));
                    well = true;
                }
                // Most machines that this is tried on have none.
                Err(smi::Error::Start(e)) if e.kind() == ErrorKind::NotFound => return,
                Err(error) => {
                    if std::mem::replace(&mut well, false) {
                        note(&format!("there are no figures of this machine's GPUs: {error}"));
                    }
                    nodes.iter().for_each(|node| board.failed(node, error.to_string()));
                }
            }
            std::thread::sleep(every);
        }
    };
    let thread = std::thread::Builder::new().name("gpu-metrics".to_owned()).spawn(ask);
    thread.map(drop).or_fail(|| "threads cannot be started".to_owned())
}
