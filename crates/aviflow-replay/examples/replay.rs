//! A replay without the rest of the binary, for work on the plan: it compiles in seconds.
//!
//! ```console
//! $ cargo run --release -p aviflow-replay --example replay -- kalos ../shared/traces/kalos-2023.csv 128 on aviflow,easy
//! ```
//!
//! Format, file (`-SEED` for a generated trace), nodes, preemption, policies, and how many perturbed
//! traces. Kalos is replayed four times as dense and on whole nodes, as the known answers are. For lingjun
//! the file is the topology, and the nodes are its nodes.

use aviflow_replay::{Cluster, Figures, Format, Policy, Report, Scenario, Topology, Trace, generate, perturb};
use std::path::Path;
use std::time::Instant;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let arg = |i: usize, default: &str| args.get(i).cloned().unwrap_or_else(|| default.to_owned());
    let format = match arg(0, "kalos").as_str() {
        "kalos" => Format::Kalos,
        "lingjun" => Format::Lingjun,
        _ => Format::Philly,
    };
    let file = arg(1, "-0");
    let mut cluster = Cluster::new(arg(2, "128").parse()?, 8);
    let mut trace = match (file.strip_prefix('-'), format) {
        (Some(seed), _) => generate::like(format, seed.parse()?, &cluster)?.ok_or("no such trace")?,
        (None, Format::Lingjun) => {
            let topology = Topology::read(Path::new(&file))?;
            cluster = Cluster { nodes: u32::try_from(topology.paths.len())?, topology: Some(topology), ..cluster };
            generate::lingjun(0, &cluster)?
        }
        (None, _) => Trace::read(Path::new(&file), format, 8)?,
    };
    if format == Format::Kalos {
        trace.whole_nodes(8);
        trace.compress(4.0);
    }
    let mut scenario = Scenario::new(trace, cluster);
    scenario.preemption = arg(3, "off") == "on";
    if let Some(estimates) = std::env::var_os("ESTIMATES") {
        scenario.estimates = estimates.to_string_lossy().parse()?;
    }
    scenario.check = std::env::var_os("CHECK").is_some();
    let names = arg(4, "easy,aviflow");
    let policies: Vec<Policy> = Policy::ALL.into_iter().filter(|p| names.split(',').any(|n| n == p.name())).collect();
    let mut report = Report { policies: Vec::new(), compare: None, perturbed: None };
    for policy in &policies {
        let begun = Instant::now();
        let played = scenario.play(*policy, false)?;
        let passes = played.passes.iter().map(|nanos| f64::from(*nanos) / 1e9);
        let (n, planned) = (passes.len(), passes.sum::<f64>());
        eprintln!("{}: {:.2} s, of which {n} passes {planned:.2} s", policy.name(), begun.elapsed().as_secs_f64());
        let figures = Figures::of(&scenario.trace, &played, scenario.cluster.gpus());
        report.policies.push((policy.name().to_owned(), figures));
    }
    let traces: u64 = arg(5, "0").parse()?;
    if traces > 0 {
        report.perturbed = Some(perturb::over(&scenario, &policies, traces)?);
    }
    println!("{}", serde_json::to_string_pretty(&report)?);
    Ok(())
}
