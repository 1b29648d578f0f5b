//! `simulate`.

use aviflow_replay::{Format, Limits, Policy};
use clap::{Args, ValueEnum};
use std::path::PathBuf;

/// `simulate`
#[derive(Args, Debug)]
#[command(after_help = "\
Needs no control plane. Waits are completion − submission − run time. The columns of a trace of
one's own, and what each figure means: docs/admin/simulate.md.

Examples:
  aviflow simulate --trace jobs.csv --nodes 64
  aviflow simulate --trace jobs.csv --nodes 64 --compare 16 --policy easy,aviflow
  aviflow simulate --format kalos --compress 4 --whole-nodes --nodes 128 --preemption on --json
  aviflow simulate --format lingjun --topology switches.csv")]
pub struct SimulateArgs {
    /// The jobs [default: made up, fitted to the statistics of the format's usual trace]
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,

    /// How the trace is written: kalos, philly or aviflow; or lingjun, which is always made up [default: aviflow]
    #[arg(long, value_name = "FORMAT", hide_possible_values = true)]
    pub format: Option<TraceFormat>,

    /// Nodes of the cluster [default: those of the topology]
    #[arg(
        long,
        value_name = "N",
        value_parser = clap::value_parser!(u32).range(1..=100_000),
        required_unless_present = "topology"
    )]
    pub nodes: Option<u32>,

    /// GPUs on each of them
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub gpus_per_node: u32,

    /// Their accelerator type; jobs of the trace that want another are left out
    #[arg(long, value_name = "TYPE")]
    pub gpu_type: Option<String>,

    /// Give every job whole nodes
    #[arg(long)]
    pub whole_nodes: bool,

    /// The switches above the nodes: a header, then for each node its name and domains, largest first
    #[arg(long, value_name = "FILE")]
    pub topology: Option<PathBuf>,

    /// Submit the jobs so many times faster
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0, value_parser = factor)]
    pub compress: f64,

    /// The queues of the policy aviflow, the documents that are applied, or a list as JSON [default: the trace's queues, without quotas]
    #[arg(long, value_name = "FILE")]
    pub queues: Option<PathBuf>,

    /// Time limits: exact, over:LOW-HIGH (times the run time), none, or trace [default: exact; of aviflow's own
    /// traces: trace]
    #[arg(long, value_name = "LIMITS", value_parser = limits)]
    pub limits: Option<LimitsArg>,

    /// Whether the policy aviflow suspends jobs and shares time; it then knows no time limits
    #[arg(long, value_name = "ON|OFF", default_value = "off", hide_possible_values = true)]
    pub preemption: Preemption,

    /// Policies: fifo, greedy, easy, aviflow
    #[arg(
        long,
        value_name = "POLICIES",
        value_delimiter = ',',
        default_value = "fifo,greedy,easy,aviflow",
        hide_possible_values = true
    )]
    pub policy: Vec<PolicyArg>,

    /// About how many waits the policy aviflow estimates; they decide nothing and cost time
    #[arg(long, value_name = "N", default_value_t = 500)]
    pub estimates: u32,

    /// The seed of everything random
    #[arg(long, value_name = "SEED", default_value_t = 0)]
    pub seed: u64,

    /// Replay the same also with so many more nodes
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub compare: Option<u32>,

    /// Replay so many traces that differ a little, and give means and spreads
    #[arg(long, value_name = "TRACES", value_parser = clap::value_parser!(u64).range(1..=10_000))]
    pub perturb: Option<u64>,

    /// Draw the schedules into a file
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,

    /// For programs: JSON
    #[arg(long)]
    pub json: bool,
}

/// How a trace is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TraceFormat {
    Kalos,
    Philly,
    Lingjun,
    Aviflow,
}

impl From<TraceFormat> for Format {
    fn from(format: TraceFormat) -> Format {
        match format {
            TraceFormat::Kalos => Format::Kalos,
            TraceFormat::Philly => Format::Philly,
            TraceFormat::Lingjun => Format::Lingjun,
            TraceFormat::Aviflow => Format::Aviflow,
        }
    }
}

/// Whether jobs may be suspended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Preemption {
    On,
    Off,
}

/// Who decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PolicyArg {
    Fifo,
    Greedy,
    Easy,
    Aviflow,
}

impl From<PolicyArg> for Policy {
    fn from(policy: PolicyArg) -> Policy {
        match policy {
            PolicyArg::Fifo => Policy::Fifo,
            PolicyArg::Greedy => Policy::Greedy,
            PolicyArg::Easy => Policy::Easy,
            PolicyArg::Aviflow => Policy::Aviflow,
        }
    }
}

/// Time limits, as typed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LimitsArg(pub Limits);

fn factor(text: &str) -> Result<f64, String> {
    let factor: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    if (1e-3..=1e6).contains(&factor) { Ok(factor) } else { Err("give a factor from 0.001 to 1000000".to_owned()) }
}

fn limits(text: &str) -> Result<LimitsArg, String> {
    let range = |text: &str| -> Option<Limits> {
        let (low, high) = text.strip_prefix("over:")?.split_once('-')?;
        Some(Limits::Over(low.parse().ok()?, high.parse().ok()?))
    };
    match text {
        "exact" => Ok(LimitsArg(Limits::Exact)),
        "none" => Ok(LimitsArg(Limits::None)),
        "trace" => Ok(LimitsArg(Limits::Trace)),
        _ => {
            range(text).map(LimitsArg).ok_or_else(|| "give exact, none, trace or over:LOW-HIGH, as over:1-5".to_owned())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_read() {
        let cases = [
            ("exact", Some(Limits::Exact)),
            ("over:1-5", Some(Limits::Over(1.0, 5.0))),
            ("over:1.5-2", Some(Limits::Over(1.5, 2.0))),
            ("over:5", None),
            ("roughly", None),
        ];
        for (text, expected) in cases {
            assert_eq!(limits(text).ok().map(|l| l.0), expected, "{text}");
        }
        assert!(factor("0").is_err() && factor("NaN").is_err() && factor("4").is_ok());
    }
}
