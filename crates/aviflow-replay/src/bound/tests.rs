//! Bounds worked out by hand, and beside the best of all packings of small clusters.

use super::*;
use crate::cluster::Topology;
use crate::rng::Rng;
use aviflow_core::time::{Span, Time};

/// Leaves of so many nodes in groups.
fn tree(groups: &[&[u32]], gpus_per_node: u32) -> Cluster {
    let mut paths = Vec::new();
    for (g, leaves) in groups.iter().enumerate() {
        for (l, nodes) in leaves.iter().enumerate() {
            paths.extend((0..*nodes).map(|_| vec![format!("{g}/{l}"), g.to_string()]));
        }
    }
    let nodes = u32::try_from(paths.len()).expect("few");
    let levels = vec!["leaf".to_owned(), "group".to_owned()];
    Cluster { topology: Some(Topology { levels, paths }), ..Cluster::new(nodes, gpus_per_node) }
}

/// A job as (nodes, GPUs on each, level).
type Shape = (u32, u32, Option<&'static str>);

fn bound(cluster: &Cluster, jobs: &[Shape]) -> u64 {
    let job = |(nodes, gpus_per_node, require): &Shape| TraceJob {
        line: 0,
        name: String::new(),
        submitted: Time(0),
        user: String::new(),
        queue: None,
        priority: 0,
        nodes: *nodes,
        gpus_per_node: *gpus_per_node,
        gpu_type: None,
        run: Span(1),
        time_limit: None,
        preemptible: true,
        require: require.map(str::to_owned),
    };
    let trace = Trace::new("by hand", jobs.iter().map(job).collect());
    let mut bound = Bound::new(&trace, cluster).expect("somebody requires a leaf");
    assert_eq!(bound.now(), 0);
    (0..jobs.len()).for_each(|job| bound.change(job, true));
    let now = bound.now();
    (0..jobs.len()).for_each(|job| bound.change(job, false));
    assert_eq!(bound.now(), 0);
    now
}

#[test]
fn by_hand() {
    let (leaf, group) = (Some("leaf"), Some("group"));
    let cluster = tree(&[&[8, 7], &[5]], 8);
    let check = |jobs: &[Shape], expected: u64| assert_eq!(bound(&cluster, jobs), expected * 8, "{jobs:?}");
    // Two jobs of 3 go into a leaf of 8 and into one of 7, and one into that of 5.
    check(&[(3, 8, leaf); 20], 6 + 6 + 3);
    // There is only one of them.
    check(&[(3, 8, leaf)], 3);
    // 4 and 4, 4 and 3, 4: one job of 3 does not fill two gaps, and one of a node only one.
    check(&[&[(4, 8, leaf); 20][..], &[(3, 8, leaf)]].concat(), 8 + 7 + 4);
    check(&[&[(4, 8, leaf); 20][..], &[(1, 8, leaf)]].concat(), 8 + 4 + 4 + 1);
    // A group of 15 and one of 5: 10 and 5 of them, or 10 and what leaves can have beside.
    check(&[&[(10, 8, group); 9][..], &[(5, 8, leaf); 9]].concat(), 20);
    check(&[&[(10, 8, group); 9][..], &[(8, 8, leaf); 9]].concat(), 10);
    // Anywhere.
    check(&[(6, 8, None), (6, 8, None), (6, 8, None), (6, 8, None), (8, 8, leaf)], 6 + 6 + 8);
    // Five of eight GPUs of a node.
    assert_eq!(bound(&cluster, &[(1, 5, leaf); 99]), 20 * 5);
    assert_eq!(bound(&tree(&[&[2]], 8), &[(1, 5, leaf), (2, 3, leaf)]), 11);
    let job = Trace::new("free", Vec::new());
    assert!(Bound::new(&job, &cluster).is_none());
}

/// The most nodes that these jobs use at once: each is left out, or put where it may be.
fn packed(jobs: &[Shape], leaves: &mut Vec<(usize, u32)>) -> u32 {
    let Some(((nodes, _, level), rest)) = jobs.split_first() else { return 0 };
    let mut best = packed(rest, leaves);
    if level == &Some("leaf") {
        for i in 0..leaves.len() {
            if leaves[i].1 >= *nodes {
                leaves[i].1 -= nodes;
                best = best.max(nodes + packed(rest, leaves));
                leaves[i].1 += nodes;
            }
        }
        return best;
    }
    // The larger jobs come last, so that any nodes of the group are as good as any others.
    for group in 0..2 {
        let free: u32 = leaves.iter().filter(|(g, _)| *g == group).map(|(_, free)| free).sum();
        if free >= *nodes {
            let before = leaves.clone();
            let mut left = *nodes;
            for (_, free) in leaves.iter_mut().filter(|(g, _)| *g == group) {
                let taken = left.min(*free);
                *free -= taken;
                left -= taken;
            }
            best = best.max(nodes + packed(rest, leaves));
            *leaves = before;
        }
    }
    best
}

#[test]
fn no_packing_is_beyond_it_and_some_reach_it() {
    let mut rng = Rng::new(1, "bound");
    let mut reached = 0;
    for _ in 0..300 {
        let sizes: Vec<u32> = (0..4).map(|_| 1 + rng.below(4) as u32).collect();
        let cluster = tree(&[&sizes[..2], &sizes[2..]], 1);
        let shape = |rng: &mut Rng| -> Shape {
            if rng.unit() < 0.6 {
                (1 + rng.below(4) as u32, 1, Some("leaf"))
            } else {
                (2 + rng.below(5) as u32, 1, Some("group"))
            }
        };
        let mut jobs: Vec<Shape> = (0..5).map(|_| shape(&mut rng)).collect();
        jobs.push((1, 1, Some("leaf")));
        jobs.sort_by_key(|job| job.2 == Some("group"));
        let mut leaves: Vec<(usize, u32)> = sizes.iter().enumerate().map(|(i, n)| (i / 2, *n)).collect();
        let best = u64::from(packed(&jobs, &mut leaves));
        let bound = bound(&cluster, &jobs);
        assert!(best <= bound, "{best} of {bound}: {sizes:?} {jobs:?}");
        reached += u32::from(best == bound);
    }
    assert!(reached > 200, "{reached}");
}
