//! Reading, what is refused and with which words, and that what is written is read.

use super::*;
use crate::cluster::{Cluster, Topology};

const OWN: &str = "\
submitted,name,user,queue,priority,nodes,gpus_per_node,gpu_type,run_s,time_limit_s,preemptible,require
1700000000,a,ada,nlp,10,4,8,H100,3600,7200,true,leaf
2023-11-14T22:15:00Z,\"b, again\",,,,1,2,,0.5,,false,
";

fn own(text: &str) -> Result<Trace> {
    Trace::parse("t.csv", text, Format::Aviflow, 8)
}

#[test]
fn own_traces_are_read_as_they_were_written() {
    let trace = own(OWN).expect("a trace");
    assert_eq!(trace.jobs.len(), 2);
    let (a, b) = (&trace.jobs[0], &trace.jobs[1]);
    assert_eq!((a.priority, a.queue.as_deref(), a.time_limit), (10, Some("nlp"), Some(Span::seconds(7200))));
    assert_eq!((a.require.as_deref(), &b.require), (Some("leaf"), &None));
    assert_eq!((b.name.as_str(), b.run, b.preemptible, b.queue.as_deref()), ("b, again", Span(500), false, None));
    assert_eq!(b.submitted, Time(1_700_000_100_000));
    assert_eq!(own(&write_csv(&trace)).expect("a trace"), trace);
    let mut again = own(&write_jsonl(&trace)).expect("a trace");
    again.jobs.iter_mut().zip(&trace.jobs).for_each(|(job, old)| job.line = old.line);
    assert_eq!(again, trace);
}

#[test]
fn foreign_traces_are_spread_over_nodes() {
    let kalos = "job_id,arrival_time,num_iteration,gpu_workers,gpu_per_worker\n7,313.0,156,8,8.0\n";
    let trace = Trace::parse("k.csv", kalos, Format::Kalos, 8).expect("a trace");
    let job = &trace.jobs[0];
    assert_eq!((job.name.as_str(), job.nodes, job.gpus_per_node, job.run), ("kalos-7", 8, 8, Span::seconds(78)));
    assert_eq!(job.submitted, Time(313_000));

    let philly = "timestamp,duration,num_gpus,gpu_time,cluster\n\
        2017-10-09 07:01:55,66.0,2,132.0,b\n2017-10-09 07:01:54,66.0,12,1.0,a\n\n";
    let trace = Trace::parse("p.csv", philly, Format::Philly, 8).expect("a trace");
    let shapes: Vec<(&str, u32, u32)> =
        trace.jobs.iter().map(|j| (j.user.as_str(), j.nodes, j.gpus_per_node)).collect();
    assert_eq!(shapes, [("a", 2, 8), ("b", 1, 2)], "by submission, and 12 GPUs are two whole nodes");
}

#[test]
fn what_is_wrong_is_said_with_its_place_and_what_to_do() {
    let check = |text: &str, format: Format, expected: &str, help: &str| {
        let error = Trace::parse("t.csv", text, format, 8).expect_err(text);
        assert_eq!(error.to_string(), expected);
        assert_eq!(error.help().unwrap_or_default(), help);
    };
    check(
        "",
        Format::Philly,
        "t.csv: the file is empty",
        "a trace begins with a header and has one job a line below it",
    );
    check(
        "a,b\n",
        Format::Philly,
        "t.csv:1: the header lacks timestamp, duration, num_gpus, cluster of the format `philly`",
        "it has a, b; `--format` says how a trace is written: kalos, philly or aviflow",
    );
    check(
        "submitted,nodes,gpus_per_node,run_s\n",
        Format::Aviflow,
        "t.csv: the trace has no jobs",
        "a trace has one job a line below its header",
    );
    check(
        "submitted,nodes,gpus_per_node,run_s\n0,1,8,60\n5,x,8,60\n",
        Format::Aviflow,
        "t.csv:3: `x` in the column nodes is not a whole number from 1 to 1000000",
        "write a whole number from 1 to 1000000 there, or take the line out",
    );
    check(
        "submitted,nodes,gpus_per_node,run_s,usr\n0,1,8,60,a\n",
        Format::Aviflow,
        "t.csv:1: `usr` is no column",
        "the format `aviflow` has submitted, name, user, queue, priority, nodes, gpus_per_node, gpu_type, run_s, \
         time_limit_s, preemptible, require",
    );
    check(
        "submitted,nodes,gpus_per_node,run_s\n0,1,8\n",
        Format::Aviflow,
        "t.csv:2: 3 cells where the header has 4",
        "cells are apart by commas; a cell with a comma stands in \"…\"",
    );
    check(
        "{\"submitted\": 0}\n",
        Format::Aviflow,
        "t.csv:1: the column nodes is empty",
        "write a whole number from 1 to 1000000 there, or take the line out",
    );
    let error = Trace::read(Path::new("/nowhere.csv"), Format::Kalos, 8).expect_err("no file").to_string();
    assert!(error.starts_with("/nowhere.csv cannot be read: "), "{error}");
}

#[test]
fn a_job_that_is_too_large_is_named() {
    let mut trace = own(OWN).expect("a trace");
    trace.jobs[0].require = None;
    assert_eq!(trace.check(&Cluster::new(4, 8)), Ok(()));
    let error = trace.check(&Cluster::new(3, 8)).expect_err("too small");
    assert_eq!(error.to_string(), "t.csv:2: a asks for 4 nodes of 8 GPUs, and the cluster has 3 nodes of 8");
    assert_eq!(error.help().expect("help"), "every job fits with `--nodes 4 --gpus-per-node 8`");
}

#[test]
fn a_job_that_no_domain_holds_is_named() {
    let mut trace = own(OWN).expect("a trace");
    let tree = Topology::parse("t.csv", "node,spine,leaf\na,1,1\nb,1,1\nc,1,1\nd,1,2\ne,1,2\n").expect("a topology");
    let mut cluster = Cluster::new(5, 8);
    let mut check = |topology: Option<&Topology>, level: &str, expected: &str, help: &str| {
        trace.jobs[0].require = Some(level.to_owned());
        cluster.topology = topology.cloned();
        let error = trace.check(&cluster).expect_err("no such place");
        assert_eq!((error.to_string().as_str(), error.help().unwrap_or_default().as_str()), (expected, help));
    };
    let levels = "the levels of the topology are leaf, spine";
    check(Some(&tree), "leaf", "t.csv:2: a asks for 4 nodes in one leaf, and the largest has 3 nodes", levels);
    check(Some(&tree), "rack", "t.csv:2: a requires one rack, and no such level is known", levels);
    check(Some(&tree), "node", "t.csv:2: a asks for 4 nodes in one node, and the largest has 1 node", levels);
    let help = "give the switches with --topology FILE, or take the column `require` out";
    check(None, "leaf", "t.csv:2: a requires one leaf, and no such level is known", help);
    trace.jobs[0].require = Some("spine".to_owned());
    cluster.topology = Some(tree);
    assert_eq!(trace.check(&cluster), Ok(()));
    trace.jobs[1].require = Some("node".to_owned());
    assert_eq!(trace.check(&cluster), Ok(()));
}

#[test]
fn a_trace_is_made_denser_and_gets_limits() {
    let mut trace = own(OWN).expect("a trace");
    trace.compress(4.0);
    assert_eq!(trace.span(), Span::seconds(25));
    trace.limit(Limits::Trace, 1);
    assert_eq!(trace.jobs[0].time_limit, Some(Span::seconds(7200)));
    trace.limit(Limits::Over(2.0, 3.0), 1);
    for job in &trace.jobs {
        let limit = job.time_limit.expect("a limit").0;
        assert!((2 * job.run.0..=3 * job.run.0 + 1).contains(&limit), "{job:?}");
    }
    trace.limit(Limits::None, 1);
    assert_eq!(trace.jobs[0].time_limit, None);
    trace.whole_nodes(8);
    assert_eq!(trace.jobs[1].gpus_per_node, 8);
    assert_eq!(trace.only("A100"), 1);
}
