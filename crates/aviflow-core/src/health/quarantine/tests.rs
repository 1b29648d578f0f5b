use super::*;

const POOL: Pool = Pool { nodes: 100, open: 100, gpus: 8 };
const HOUR: i64 = 3_600_000;

fn fault(node: u32, blame: Blame, hour: i64) -> Seen {
    let kind = match blame {
        Blame::Gpu => Kind::DeviceUnhealthy,
        Blame::Node => Kind::NodeLost,
        Blame::Network => Kind::LinkErrors,
        Blame::Application => Kind::Exit,
        Blame::Platform | Blame::Unknown => Kind::Cuda,
    };
    let job = Some(JobId(hour.unsigned_abs()));
    Seen { kind, blame, node: NodeId(node), gpu: None, job, at: Time(hour * HOUR), at_once: false }
}

fn note(q: &mut Quarantine, fault: Seen) -> Outcome {
    q.note(&fault, POOL, &Rules::default())
}

fn taken(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::Quarantined { .. })
}

#[test]
fn what_fails_again_within_a_day_is_kept_from_work() {
    let mut q = Quarantine::default();
    assert_eq!(note(&mut q, fault(1, Blame::Node, 0)), Outcome::Noted);
    assert_eq!(note(&mut q, fault(2, Blame::Node, 1)), Outcome::Noted, "another node");
    assert_eq!(note(&mut q, fault(1, Blame::Node, 25)), Outcome::Noted, "a day later");
    let outcome = note(&mut q, fault(1, Blame::Network, 26));
    assert_eq!(
        outcome,
        Outcome::Quarantined { reason: "2 faults within 1d, the last of them: link errors".to_owned() }
    );
    assert_eq!(note(&mut q, fault(1, Blame::Node, 27)), Outcome::Already);
    assert_eq!(q.of(NodeId(1), Slots::first(8)), Slots::first(8));
    assert_eq!(q.of(NodeId(2), Slots::first(8)), Slots::NONE);
}

#[test]
fn an_application_never_counts() {
    let mut q = Quarantine::default();
    for hour in 0..20 {
        let exit = Seen { at_once: true, ..fault(1, Blame::Application, hour) };
        assert_eq!(note(&mut q, exit), Outcome::Ignored);
    }
    assert_eq!(q, Quarantine::default());
}

#[test]
fn what_nobody_is_to_blame_for_counts_if_two_jobs_saw_it() {
    let mut q = Quarantine::default();
    let same = |hour| Seen { job: Some(JobId(1)), at_once: true, ..fault(1, Blame::Unknown, hour) };
    for hour in 0..10 {
        assert_eq!(note(&mut q, same(hour)), Outcome::Noted, "one job's faults follow the job");
    }
    assert!(taken(&note(&mut q, Seen { job: Some(JobId(2)), ..same(11) })));
}

#[test]
fn one_event_counts_once_whoever_saw_it() {
    let mut q = Quarantine::default();
    let after = |seconds: i64, fault: Seen| Seen { at: fault.at + Span::seconds(seconds), ..fault };
    // Of one event: two jobs on the node, and each of their detectors.
    for (seconds, blame, job) in [(0, Blame::Node, 1), (2, Blame::Network, 1), (9, Blame::Node, 2), (60, Blame::Gpu, 2)]
    {
        let seen = Seen { job: Some(JobId(job)), ..fault(1, blame, 0) };
        assert_eq!(note(&mut q, after(seconds, seen)), Outcome::Noted, "after {seconds} s");
    }
    assert!(taken(&note(&mut q, after(61, fault(1, Blame::Node, 0)))), "another event");
    // Jobs that fail at one time for which nobody is to blame have that in common, and not the node.
    let mut q = Quarantine::default();
    let unknown = |job, seconds| after(seconds, Seen { job: Some(JobId(job)), ..fault(1, Blame::Unknown, 0) });
    assert_eq!([note(&mut q, unknown(1, 0)), note(&mut q, unknown(2, 30))], [Outcome::Noted, Outcome::Noted]);
    assert!(taken(&note(&mut q, unknown(3, 200))));
}

#[test]
fn what_says_nothing_of_the_node_does_not_count() {
    let mut q = Quarantine::default();
    for kind in [Kind::Hang, Kind::BusyIdle, Kind::DiskFull, Kind::PeerLost] {
        for hour in 0..3 {
            assert_eq!(note(&mut q, Seen { kind, ..fault(1, Blame::Unknown, hour) }), Outcome::Ignored, "{kind}");
        }
    }
    assert_eq!(q, Quarantine::default());
}

#[test]
fn the_last_node_is_not_taken_gpu_by_gpu() {
    let pool = Pool { nodes: 2, open: 2, gpus: 4 };
    let gpu = |node, slot| Seen { gpu: Some(slot), at_once: true, ..fault(node, Blame::Gpu, 0) };
    let rules = Rules { percent: 100, ..Rules::default() };
    let mut q = Quarantine::default();
    for slot in 0..4 {
        assert!(taken(&q.note(&gpu(1, slot), pool, &rules)), "GPU {slot} of the first");
    }
    assert_eq!(q.kept().next().and_then(|(_, kept)| kept.gpus), None, "it is kept as a whole");
    for slot in 0..3 {
        assert!(taken(&q.note(&gpu(2, slot), pool, &rules)), "GPU {slot} of the last");
    }
    let Outcome::Exceeds { reason } = q.note(&gpu(2, 3), pool, &rules) else { panic!("its last GPU was taken") };
    assert!(reason.contains("the last node that works"), "{reason}");
    assert_eq!(q.of(NodeId(2), Slots::first(4)), Slots(0b111));
}

#[test]
fn a_gpu_is_kept_alone_and_its_node_goes_on() {
    let mut q = Quarantine::default();
    let gpu = |slot, hour| Seen { gpu: Some(slot), ..fault(1, Blame::Gpu, hour) };
    assert_eq!(note(&mut q, gpu(3, 0)), Outcome::Noted);
    assert!(taken(&note(&mut q, gpu(3, 1))));
    assert_eq!(q.of(NodeId(1), Slots::first(8)), Slots(0b1000));
    assert!(taken(&note(&mut q, Seen { at_once: true, ..gpu(5, 2) })), "to be reset");
    assert_eq!(q.of(NodeId(1), Slots::first(8)), Slots(0b10_1000));
    assert!(taken(&note(&mut q, Seen { at_once: true, ..fault(1, Blame::Node, 3) })), "then all of it");
    assert_eq!(q.of(NodeId(1), Slots::first(8)), Slots::first(8));
    let absurd = Seen { at_once: true, gpu: Some(4_000_000_000), ..fault(2, Blame::Gpu, 3) };
    assert!(taken(&note(&mut q, absurd)));
    assert_eq!(q.of(NodeId(2), Slots::first(8)), Slots::first(8), "which GPU is not known");
}

#[test]
fn only_a_check_brings_it_back() {
    let mut q = Quarantine::default();
    note(&mut q, Seen { at_once: true, ..fault(1, Blame::Node, 0) });
    let text = serde_json::to_string(&q).expect("writes");
    let mut q: Quarantine = serde_json::from_str(&text).expect("reads");
    note(&mut q, fault(1, Blame::Application, 1000));
    assert_eq!(q.of(NodeId(1), Slots(1)), Slots(1), "neither time nor a restart does");
    assert!(q.passed(NodeId(1)) && !q.passed(NodeId(1)));
    assert_eq!(q, Quarantine::default(), "and its faults are forgotten");
}

#[test]
fn automation_never_empties_the_cluster() {
    for (nodes, cordoned, most) in
        [(1, 0, 0), (2, 0, 1), (2, 1, 0), (9, 0, 1), (20, 0, 2), (20, 19, 0), (100, 0, 10), (1000, 0, 16)]
    {
        let pool = Pool { nodes, open: nodes - cordoned, gpus: 8 };
        let mut q = Quarantine::default();
        let (mut taken, mut told) = (0, 0);
        for node in 0..pool.open {
            match q.note(&Seen { at_once: true, ..fault(node, Blame::Node, 0) }, pool, &Rules::default()) {
                Outcome::Quarantined { .. } => taken += 1,
                Outcome::Exceeds { .. } => told += 1,
                other => panic!("{other:?}"),
            }
        }
        assert_eq!((taken, told), (most, pool.open - most), "{nodes} nodes, {cordoned} cordoned");
        assert_eq!(q.wanted().count(), told as usize);
    }
}

#[test]
fn what_exceeds_the_budget_is_done_once_it_allows() {
    let pool = Pool { nodes: 20, open: 20, gpus: 8 };
    let mut q = Quarantine::default();
    let note = |q: &mut Quarantine, node, hour| {
        q.note(&Seen { at_once: true, ..fault(node, Blame::Node, hour) }, pool, &Rules::default())
    };
    assert!(taken(&note(&mut q, 1, 0)) && taken(&note(&mut q, 2, 0)));
    let Outcome::Exceeds { reason } = note(&mut q, 9, 1) else { panic!() };
    assert_eq!(
        reason,
        "lost node; 2 of 20 nodes are quarantined, which is all that may be; check it, or cordon it yourself"
    );
    note(&mut q, 4, 2);
    assert_eq!(q.settle(pool, &Rules::default()), []);
    q.passed(NodeId(1));
    assert_eq!(q.settle(pool, &Rules::default()), [NodeId(9)], "the oldest first");
    assert_eq!(q.wanted().map(|(n, _)| n).collect::<Vec<_>>(), [NodeId(4)]);
}

#[test]
fn memory_is_bounded() {
    let mut q = Quarantine::default();
    for i in 0..10_000 {
        note(&mut q, Seen { at: Time(i), job: Some(JobId(1)), ..fault(1, Blame::Unknown, 0) });
    }
    assert!(q.seen[&NodeId(1)].len() <= KEPT);
}
