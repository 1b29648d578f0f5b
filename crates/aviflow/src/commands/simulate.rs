//! `simulate`: reads what was named, hands it to the replay, prints what came out.

use crate::cli::{Preemption, SimulateArgs, TraceFormat};
use crate::error::{Failure, Result, While};
use crate::output::{Output, note, print};
use crate::render::simulate as render;
use crate::render::style::Style;
use crate::submit::draw;
use aviflow_api::admin::{self, AdminDocument, ParsedAdmin, to_queue};
use aviflow_api::file::Priorities;
use aviflow_core::model::Queue;
use aviflow_replay::{Cluster, Error, Limits, Policy, Scenario, Topology, Trace, generate, perturb, queues};
use std::collections::BTreeSet;

/// `aviflow simulate`
pub fn simulate(args: &SimulateArgs, output: Output) -> Result<()> {
    let policies = policies(args)?;
    let scenario = scenario(args)?;
    let (mut report, drawing) = scenario.report(&policies, args.compare, args.svg.is_some()).map_err(failure)?;
    if let Some(traces) = args.perturb {
        report.perturbed = Some(perturb::over(&scenario, &policies, traces).map_err(failure)?);
    }
    if let (Some(file), Some(drawing)) = (&args.svg, drawing) {
        std::fs::write(file, drawing).or_fail(|| format!("{} cannot be written", file.display()))?;
        note(&format!("drew {}", file.display()));
    }
    if args.json {
        let value = serde_json::to_value(&report).unwrap_or_default();
        print(&format!("{value:#}\n"));
    } else {
        print(&render::report(&report, &scenario, output.view()));
    }
    Ok(())
}

fn policies(args: &SimulateArgs) -> Result<Vec<Policy>> {
    let mut policies = Vec::new();
    for policy in args.policy.iter().map(|p| Policy::from(*p)) {
        if policies.contains(&policy) {
            return Err(Failure::usage(format!("{} is among the policies twice", policy.name())));
        }
        policies.push(policy);
    }
    Ok(policies)
}

fn scenario(args: &SimulateArgs) -> Result<Scenario> {
    let mut cluster = cluster(args)?;
    let mut trace = trace(args, &cluster)?;
    if let Some(gpu_type) = gpu_type(&mut trace, args)? {
        cluster.gpu_type = gpu_type;
    }
    if args.whole_nodes {
        trace.whole_nodes(args.gpus_per_node);
    }
    trace.compress(args.compress);
    let own = args.format.is_none_or(|f| f == TraceFormat::Aviflow);
    let mut scenario = Scenario::new(trace, cluster);
    scenario.limits = args.limits.map_or(if own { Limits::Trace } else { Limits::Exact }, |limits| limits.0);
    scenario.preemption = args.preemption == Preemption::On;
    scenario.queues = given_queues(args)?;
    scenario.estimates = args.estimates;
    scenario.seed = args.seed;
    Ok(scenario)
}

fn cluster(args: &SimulateArgs) -> Result<Cluster> {
    let topology = args.topology.as_ref().map(|file| Topology::read(file)).transpose().map_err(failure)?;
    let of_topology = topology.as_ref().and_then(|topology| u32::try_from(topology.paths.len()).ok());
    let nodes = args.nodes.or(of_topology).unwrap_or(u32::MAX);
    let cluster = Cluster { topology, ..Cluster::new(nodes, args.gpus_per_node) };
    cluster.check().map_err(failure)?;
    Ok(cluster)
}

fn trace(args: &SimulateArgs, cluster: &Cluster) -> Result<Trace> {
    let format = args.format.unwrap_or(TraceFormat::Aviflow).into();
    match &args.trace {
        Some(file) => Trace::read(file, format, args.gpus_per_node).map_err(failure),
        None => generate::like(format, args.seed, cluster).map_err(failure)?.ok_or_else(|| {
            let help = "give --trace FILE; or --format kalos, philly or lingjun alone, for jobs that are made up";
            Failure::usage("no trace to replay").help(help)
        }),
    }
}

/// The accelerator type of the replayed nodes, with the jobs of others left out.
fn gpu_type(trace: &mut Trace, args: &SimulateArgs) -> Result<Option<String>> {
    let types: BTreeSet<String> = trace.jobs.iter().filter_map(|job| job.gpu_type.clone()).collect();
    if let Some(wanted) = &args.gpu_type {
        let without = trace.only(wanted);
        if trace.jobs.is_empty() {
            let known = types.into_iter().collect::<Vec<_>>().join(", ");
            return Err(
                Failure::usage(format!("no job of the trace runs on {wanted}")).help(format!("there are {known}"))
            );
        }
        if without > 0 {
            note(&format!("{without} jobs of other accelerator types are left out"));
        }
        return Ok(Some(wanted.clone()));
    }
    if types.len() > 1 {
        let types = types.into_iter().collect::<Vec<_>>().join(", ");
        let help = "a replay has nodes of one type: choose one with --gpu-type";
        return Err(Failure::usage(format!("the jobs of the trace run on {types}")).help(help));
    }
    Ok(types.into_iter().next())
}

fn given_queues(args: &SimulateArgs) -> Result<Vec<Queue>> {
    let Some(file) = &args.queues else { return Ok(Vec::new()) };
    let name = file.display().to_string();
    let text = std::fs::read_to_string(file)
        .map_err(|e| failure(Error::Unreadable { file: name.clone(), reason: e.to_string() }))?;
    if text.trim_start().starts_with('[') {
        return queues::from_json(&name, &text).map_err(failure);
    }
    // Documents as they are applied.
    let priorities = Priorities::default();
    let read = admin::parse_admin(&name, text.as_bytes(), &priorities)
        .map_err(|(sources, problems)| Failure::document(draw(&problems, &sources, Style::plain())))?;
    let queue = |parsed: &ParsedAdmin| match &parsed.document {
        AdminDocument::Queue(spec) => Some(to_queue(spec, &priorities)),
        AdminDocument::Pool(_) | AdminDocument::Policy(_) => None,
    };
    let given: Vec<Queue> = read.documents.iter().filter_map(queue).collect();
    queues::check(&name, &given).map_err(failure)?;
    Ok(given)
}

fn failure(error: Error) -> Failure {
    let failure =
        if error.is_fault() { Failure::platform(error.to_string()) } else { Failure::usage(error.to_string()) };
    match error.help() {
        Some(help) => failure.help(help),
        None => failure,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use crate::error::USAGE;
    use crate::render::style::Style;
    use clap::Parser as _;

    /// What a command line with a trace in `t.csv` is refused with.
    fn refused(trace: &str, options: &[&str]) -> String {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("t.csv");
        std::fs::write(&file, trace).expect("written");
        let file = file.display().to_string();
        let mut words = vec!["aviflow", "simulate", "--nodes", "2"];
        words.extend(options.iter().map(|word| if *word == "t.csv" { file.as_str() } else { word }));
        let Command::Simulate(args) = Cli::try_parse_from(words).expect("a command line").command else {
            panic!("another command")
        };
        let scenario = policies(&args).and_then(|policies| Ok((scenario(&args)?, policies)));
        let failure = match scenario {
            Err(failure) => failure,
            Ok((scenario, policies)) => failure(scenario.report(&policies, args.compare, false).expect_err("refused")),
        };
        assert_eq!(failure.code, USAGE, "{failure:?}");
        failure.render(Style::plain()).replace(&folder.path().display().to_string(), "")
    }

    #[test]
    fn what_cannot_be_replayed_is_refused_with_what_to_do() {
        let head = "submitted,queue,nodes,gpus_per_node,gpu_type,run_s\n";
        let own = |rows: &str, options: &[&str]| {
            refused(&format!("{head}{rows}"), &[&["--trace", "t.csv"], options].concat())
        };
        let said = [
            refused("", &["--trace", "nowhere.csv"]),
            refused("", &[]),
            own("0,,1,8,,sixty\n", &[]),
            own("0,,3,8,,60\n", &["--policy", "fifo"]),
            own("0,,1,8,H100,60\n0,,1,8,A100,60\n", &[]),
            own("0,,1,8,H100,60\n", &["--gpu-type", "B200"]),
            own("0,,1,8,,60\n", &[]),
            own("0,,1,8,,60\n", &["--limits", "over:5-1"]),
            own("0,,1,8,,60\n", &["--policy", "fifo,fifo"]),
            own("0,,1,8,,60\n", &["--policy", "fifo", "--topology", "t.csv"]),
            refused("submitted,nodes,gpus_per_node,run_s,require\n0,1,8,60,leaf\n", &["--trace", "t.csv"]),
            refused("", &["--format", "lingjun"]),
            refused("", &["--format", "lingjun", "--trace", "t.csv"]),
        ];
        insta::assert_snapshot!(said.join("\n"));
    }
}
