//! The table "A job's life", case by case: events in, phases and counters out.

use super::*;
use crate::gpus::Slots;
use crate::ledger::Ledger;
use crate::model::{JobKey, Node, NodeId, Request, Snapshot};

struct Case {
    snapshot: Snapshot,
    now: Time,
    seen: Vec<MomentKind>,
    actions: Vec<Action>,
    last: Option<Job>,
}

const JOB: JobId = JobId(1);

/// A job of two workers with one rank each, on two nodes.
fn case(failures_allowed: u32) -> Case {
    let mut snapshot = Snapshot { ledger: Ledger::default(), ..Snapshot::default() };
    for id in 1..=3 {
        let node = Node::new(NodeId(id), &format!("n{id}"), "p", "H100", Slots::first(8));
        snapshot.ledger.open_node(&node, Time(0));
        snapshot.nodes.insert(node.id, node);
    }
    let request = Request { time_limit: Some(Span::minutes(10)), failures_allowed, ..Request::of(2, 8) };
    let key = JobKey { namespace: "default".into(), name: "j".into() };
    let job = Job::submitted(JOB, key, "ann".into(), request, None, Time(0));
    snapshot.waiting.insert(JOB);
    snapshot.jobs.insert(JOB, job);
    Case { snapshot, now: Time(0), seen: vec![], actions: vec![], last: None }
}

impl Case {
    fn event(&mut self, event: &Event) -> &mut Case {
        self.event_ago(event, Span(0))
    }

    fn event_ago(&mut self, event: &Event, ago: Span) -> &mut Case {
        let out = advance(&mut self.snapshot, JOB, event, self.now - ago, self.now);
        self.seen.extend(out.moments.into_iter().map(|m| m.kind));
        self.actions.extend(out.actions);
        if let Some(job) = out.job {
            self.last = Some(job);
        }
        assert_eq!(crate::lint::lint(&self.snapshot), Vec::<String>::new());
        self
    }

    fn at(&mut self, seconds: i64) -> &mut Case {
        self.now = Time(seconds * 1000);
        self
    }

    fn place(&mut self) -> &mut Case {
        let placement = Placement(vec![(NodeId(1), Slots::first(8)), (NodeId(2), Slots::first(8))]);
        self.event(&Event::Place { placement })
    }

    fn worker(&mut self, worker: u32, event: WorkerEvent) -> &mut Case {
        let attempt = self.last.as_ref().map_or(1, |j| j.attempts);
        self.event(&Event::Worker { attempt, epoch: 1, worker, event })
    }

    fn ready(&mut self) -> &mut Case {
        for worker in 0..2 {
            self.worker(worker, WorkerEvent::Ready { address: Address { host: "10.0.0.1".into(), port: 9 } });
        }
        self
    }

    fn running(&mut self) -> &mut Case {
        self.place().ready().worker(0, WorkerEvent::Up).worker(1, WorkerEvent::Up)
    }

    fn exit(&mut self, worker: u32, code: i32) -> &mut Case {
        self.exit_as(worker, code, false)
    }

    fn exit_as(&mut self, worker: u32, code: i32, stopping: bool) -> &mut Case {
        let last_lines = vec![format!("last words of {worker}")];
        self.worker(
            worker,
            WorkerEvent::RankExited {
                rank: worker,
                code,
                signal: None,
                stopping,
                last_lines,
                last_step: None,
                why: None,
            },
        )
    }

    fn gone(&mut self, worker: u32) -> &mut Case {
        self.worker(
            worker,
            WorkerEvent::Gone { ranks: BTreeMap::new(), reason: None, last_step: None, next_port: None },
        )
    }

    fn phase(&self) -> &'static str {
        self.last.as_ref().map_or("Queued", |j| j.phase.name())
    }

    fn counters(&self) -> (u32, u32, u32, u32) {
        let c = self.last.as_ref().map(|j| j.counters).unwrap_or_default();
        (c.failures, c.node_failures, c.suspensions, c.unready)
    }

    fn fail_once(&mut self) -> &mut Case {
        self.running().exit(0, 1).gone(0).exit_as(1, 143, true).gone(1)
    }
}

#[test]
fn ranks_start_only_once_every_worker_is_ready() {
    let mut c = case(0);
    c.place().worker(0, WorkerEvent::Ready { address: Address { host: "a".into(), port: 1 } });
    assert!(!c.actions.iter().any(|a| matches!(a, Action::Confirm { .. })));
    c.worker(1, WorkerEvent::Ready { address: Address { host: "b".into(), port: 2 } });
    let confirm = c.actions.iter().find_map(|a| if let Action::Confirm { rank0, .. } = a { Some(rank0) } else { None });
    assert_eq!(confirm.map(|r| r.host.as_str()), Some("a"), "rank 0 is reached on its own node");
}

#[test]
fn any_rank_that_fails_ends_the_gang_and_is_named() {
    let mut c = case(0);
    c.running().at(5).exit(1, 3);
    assert_eq!(c.phase(), "Stopping");
    assert!(c.actions.iter().any(|a| matches!(a, Action::Stop { grace, .. } if *grace == FAILED_GRACE)));
    c.exit_as(0, 143, true).gone(0);
    assert_eq!(c.phase(), "Stopping", "GPUs are held until the last process is gone");
    c.gone(1);
    let Some(Phase::Failed(failure)) = c.last.as_ref().map(|j| &j.phase) else { panic!("{:?}", c.last) };
    assert_eq!(failure.exit_code, 3);
    let Cause::Rank { rank, exit, node, .. } = &failure.cause else { panic!("{failure:?}") };
    assert_eq!((*rank, *node, exit.last_lines[0].as_str()), (1, NodeId(2), "last words of 1"));
}

#[test]
fn the_rank_that_failed_first_is_named_though_it_is_heard_later() {
    let mut c = case(0);
    c.running().at(10).exit(1, 1);
    let event = WorkerEvent::RankExited {
        rank: 0,
        code: 137,
        signal: Some(9),
        stopping: false,
        last_lines: vec![],
        last_step: None,
        why: None,
    };
    c.event_ago(&Event::Worker { attempt: 1, epoch: 1, worker: 0, event }, Span(500)).gone(0).gone(1);
    let Some(Phase::Failed(failure)) = c.last.as_ref().map(|j| &j.phase) else { panic!() };
    assert!(matches!(&failure.cause, Cause::Rank { rank: 0, .. }), "{failure:?}");
}

#[test]
fn a_lost_worker_spends_no_retry_and_its_silence_is_unknown() {
    let mut c = case(0);
    c.running().at(60);
    let event = WorkerEvent::Lost { reason: "its agent was killed".into() };
    c.event_ago(&Event::Worker { attempt: 1, epoch: 1, worker: 1, event }, Span::seconds(20));
    assert_eq!(c.phase(), "Stopping");
    let unknown: Vec<Time> =
        c.snapshot.ledger.node(NodeId(2)).iter().filter(|o| o.state == GpuState::Stopping).map(|o| o.from).collect();
    assert_eq!(unknown, [Time(60_000)], "unknown from 40 to 60 s, then being stopped");
    c.exit_as(0, 143, true).gone(0);
    assert_eq!((c.phase(), c.counters()), ("Queued", (0, 1, 0, 0)));
}

#[test]
fn the_time_limit_counts_running_over_all_attempts() {
    let mut c = case(1);
    c.at(0).running().at(400).exit(0, 1).gone(0).exit_as(1, 143, true).gone(1);
    assert_eq!(c.last.as_ref().map(|j| j.ran), Some(Span::seconds(400)));
    c.at(1000).running();
    assert_eq!(c.last.as_ref().and_then(deadline), Some(Time(1_200_000)), "600 s less the 400 s it had");
    c.at(1199).event(&Event::Deadline);
    assert_eq!(c.phase(), "Running", "a deadline that has not passed changes nothing");
    c.at(1200).event(&Event::Deadline);
    c.exit_as(0, 0, true).gone(0).exit_as(1, 0, true).gone(1);
    let Some(Phase::Failed(failure)) = c.last.as_ref().map(|j| &j.phase) else { panic!() };
    assert_eq!(failure.exit_code, TIME_LIMIT_CODE);
}

#[test]
fn a_start_that_never_becomes_ready_is_given_up_without_a_retry() {
    let mut c = case(0);
    c.place().worker(0, WorkerEvent::Ready { address: Address { host: "a".into(), port: 1 } });
    c.at(600).event(&Event::Deadline);
    assert!(c.seen.contains(&MomentKind::NeverReady { missing: vec![0, 1] }));
    c.gone(0).gone(1);
    assert_eq!((c.phase(), c.counters()), ("Queued", (0, 0, 0, 1)));
    assert_eq!(c.last.as_ref().and_then(|j| j.not_before), Some(Time(601_000)));
}

fn refused(lasting: bool) -> WorkerEvent {
    WorkerEvent::Refused { reason: "no such image".into(), lasting }
}

#[test]
fn a_start_that_is_refused_takes_the_gang_back_and_spends_no_retry() {
    let mut c = case(0);
    c.place().at(1).worker(1, refused(false));
    assert_eq!(c.phase(), "Stopping");
    assert!(c.actions.iter().any(|a| matches!(a, Action::Stop { reason, .. } if reason.contains("no such image"))));
    c.gone(1);
    assert_eq!(c.phase(), "Stopping", "its GPUs are held until the rest of it is gone, too");
    c.gone(0);
    assert_eq!((c.phase(), c.counters()), ("Queued", (0, 0, 0, 1)));
    let job = c.last.clone().expect("a job");
    assert_eq!((job.submitted, job.not_before), (Time(0), Some(Time(2_000))), "in its old place, after a pause");
    assert_eq!(job.refused.map(|r| (r.node, r.reason)), Some((NodeId(2), "no such image".to_owned())));
    // Ever longer pauses, and never an end: it is not the job's doing.
    for n in 1..20 {
        c.at(1000 * i64::from(n)).place();
        assert_eq!(c.last.as_ref().and_then(|j| j.refused.clone()), None);
        c.worker(0, refused(false)).gone(0).gone(1);
        assert_eq!((c.phase(), c.counters()), ("Queued", (0, 0, 0, n + 1)));
        assert_eq!(c.last.as_ref().and_then(|j| j.not_before), Some(c.now + back_off(n)));
    }
}

#[test]
fn what_a_job_asks_for_in_vain_fails_it_after_some_starts_in_a_row() {
    let mut c = case(0);
    let once = |c: &mut Case, lasting| {
        c.at(c.now.0 / 1000 + 1000).place().worker(0, refused(lasting)).gone(0).gone(1);
    };
    for _ in 1..REFUSALS {
        once(&mut c, true);
        once(&mut c, false);
    }
    assert_eq!(c.phase(), "Queued");
    // It ran: what was not there is there. A node is lost, and it begins anew to count.
    c.at(20_000).running().gone(0).gone(1);
    for _ in 1..REFUSALS {
        once(&mut c, true);
    }
    assert_eq!(c.phase(), "Queued");
    once(&mut c, true);
    let Some(Phase::Failed(failure)) = c.last.as_ref().map(|j| &j.phase) else { panic!("{:?}", c.last) };
    let Cause::Launch { reason, worker: 0, .. } = &failure.cause else { panic!("{failure:?}") };
    assert_eq!(
        (reason.as_str(), failure.exit_code),
        ("no such image (5 starts in a row were refused so)", PLATFORM_CODE)
    );
    assert_eq!(c.counters(), (0, 1, 0, 3 * REFUSALS - 2));
}

#[test]
fn a_refusal_of_what_is_up_or_stopped_already_changes_nothing() {
    let mut c = case(0);
    c.running().worker(0, refused(true));
    assert_eq!(c.phase(), "Running");
    let mut c = case(0);
    c.place().event(&Event::Cancel { by: "ann".into() }).worker(0, refused(true)).gone(0).gone(1);
    assert_eq!((c.phase(), c.counters()), ("Cancelled", (0, 0, 0, 0)));
    let mut c = case(1);
    c.place().ready().worker(0, WorkerEvent::Up).exit(0, 3).worker(1, refused(true)).gone(0).gone(1);
    assert_eq!((c.phase(), c.counters()), ("Queued", (1, 0, 0, 0)), "the rank had failed before");
}

#[test]
fn who_is_asked_to_leave_saves_itself_and_waits_in_its_old_place() {
    for (within, grace) in [(None, 30), (Some(10), 10), (Some(600), 30)] {
        let mut c = case(0);
        c.running().at(300);
        c.worker(1, WorkerEvent::Leaving { reason: "node n2 is drained".into(), within: within.map(Span::seconds) });
        assert_eq!(c.phase(), "Suspending");
        let told = c.actions.iter().find_map(|a| if let Action::Stop { grace, .. } = a { Some(*grace) } else { None });
        assert_eq!(told, Some(Span::seconds(grace)));
        // Said again it changes nothing; what is saved in time counts.
        c.worker(1, WorkerEvent::Leaving { reason: "node n2 is drained".into(), within: None });
        c.worker(0, WorkerEvent::CheckpointComplete { step: 9, path: "/c/9".into() });
        c.exit_as(0, 143, true).gone(0).exit_as(1, 137, true).gone(1);
        assert_eq!((c.phase(), c.counters()), ("Queued", (0, 0, 1, 0)));
        let job = c.last.clone().expect("a job");
        assert_eq!((job.submitted, job.not_before, job.held.clone()), (Time(0), None, None));
        assert_eq!((job.checkpoint.map(|k| k.step), job.preempted, job.turned_out), (Some(9), 0, None));
    }
    // Who had hardly begun pauses: what asks it to leave may ask again.
    let mut c = case(0);
    c.running().at(5).worker(0, WorkerEvent::Leaving { reason: "evicted".into(), within: None }).gone(0).gone(1);
    assert_eq!(c.last.as_ref().and_then(|j| j.not_before), Some(Time(6_000)));
}

#[test]
fn a_request_to_be_queued_again_is_heeded() {
    let mut c = case(0);
    c.running().exit(1, REQUEUE_CODE).gone(1).exit_as(0, 143, true).gone(0);
    assert_eq!((c.phase(), c.counters()), ("Queued", (0, 0, 1, 0)));
}

#[test]
fn a_person_may_cancel_at_any_time() {
    let by = || Event::Cancel { by: "ann".into() };
    assert_eq!(case(0).event(&by()).phase(), "Cancelled");
    let mut c = case(0);
    c.running().event(&by());
    assert_eq!(c.phase(), "Stopping");
    assert_eq!(c.gone(0).gone(1).phase(), "Cancelled");
    let mut c = case(5);
    c.running().exit(0, 1).event(&by()).gone(0).gone(1);
    assert_eq!(c.phase(), "Cancelled", "also one that is about to be run again");
    let mut c = case(0);
    c.running().event(&Event::Suspend { by: "ops".into(), hold: false, turned_out: None }).event(&by()).gone(0).gone(1);
    assert_eq!(c.phase(), "Cancelled");
}

#[test]
fn events_of_another_attempt_change_nothing() {
    let mut c = case(3);
    c.fail_once().at(10).running();
    let before = c.last.clone();
    let event = WorkerEvent::Lost { reason: "late".into() };
    c.event(&Event::Worker { attempt: 1, epoch: 1, worker: 0, event });
    assert_eq!(c.last, before);
}

#[test]
fn time_until_the_first_step_is_starting_and_lost_work_is_repeating() {
    let mut c = case(3);
    c.running().at(5).worker(0, WorkerEvent::FirstStep { step: 1 });
    c.at(50).worker(0, WorkerEvent::CheckpointBegun { step: 100 });
    c.at(52).worker(0, WorkerEvent::CheckpointComplete { step: 100, path: "/c/100".into() });
    let exit = |worker, last_step| WorkerEvent::RankExited {
        rank: worker,
        code: 1,
        signal: None,
        stopping: false,
        last_lines: vec![],
        last_step,
        why: None,
    };
    c.at(60).worker(0, exit(0, Some(140))).gone(0).exit_as(1, 143, true).gone(1);
    c.at(70).running().at(75).worker(0, WorkerEvent::FirstStep { step: 101 });
    let state =
        |c: &Case| c.snapshot.ledger.node(NodeId(1)).iter().find(|o| o.owner.is_some()).map(|o| (o.state, o.from));
    assert_eq!(state(&c), Some((GpuState::Repeating, Time(75_000))), "it had reached 140");
    c.at(80).worker(0, WorkerEvent::CaughtUp { step: 141 });
    assert_eq!(state(&c), Some((GpuState::Productive, Time(80_000))));
}

#[test]
fn a_training_that_goes_on_beside_its_checkpoint_is_productive() {
    let mut c = case(3);
    c.running().at(5).worker(0, WorkerEvent::FirstStep { step: 1 });
    let state =
        |c: &Case| c.snapshot.ledger.node(NodeId(1)).iter().find(|o| o.owner.is_some()).map(|o| (o.state, o.from));
    c.at(50).worker(0, WorkerEvent::CheckpointBegun { step: 100 });
    assert_eq!(state(&c), Some((GpuState::Checkpointing, Time(50_000))));
    c.at(60).worker(0, WorkerEvent::CheckpointGoesOn { step: 100 });
    assert_eq!(state(&c), Some((GpuState::Productive, Time(60_000))));
}

#[test]
fn only_a_complete_checkpoint_of_the_current_attempt_counts() {
    let mut c = case(1);
    c.running().worker(0, WorkerEvent::CheckpointBegun { step: 7 });
    assert_eq!(c.snapshot.jobs[&JOB].checkpoint, None);
    c.worker(0, WorkerEvent::CheckpointComplete { step: 7, path: "/c/7".into() });
    c.worker(1, WorkerEvent::CheckpointComplete { step: 6, path: "/c/6".into() });
    assert_eq!(c.snapshot.jobs[&JOB].checkpoint.as_ref().map(|k| k.step), Some(7));
}

#[test]
fn a_training_that_its_agent_stopped_has_not_finished() {
    let mut c = case(0);
    c.running().exit_as(0, 0, true).gone(0);
    assert_eq!(c.phase(), "Stopping", "its agent was told to end, and the training saved itself with 0");
    c.exit_as(1, 0, true).gone(1);
    assert_eq!((c.phase(), c.counters()), ("Queued", (0, 1, 0, 0)));
}

#[test]
fn what_finished_before_it_could_be_stopped_has_finished() {
    let mut c = case(0);
    c.at(0)
        .running()
        .at(500)
        .exit(0, 0)
        .exit(1, 0)
        .event(&Event::Suspend { by: "ops".into(), hold: false, turned_out: None })
        .gone(0)
        .gone(1);
    assert_eq!((c.phase(), c.counters()), ("Succeeded", (0, 0, 0, 0)));
    let mut c = case(0);
    c.at(0).running().at(600).event(&Event::Deadline).exit(0, 0).exit(1, 0).gone(0).gone(1);
    assert_eq!(c.phase(), "Succeeded", "the control plane was away when it ended");
    let mut c = case(0);
    c.running().exit(0, 0).exit(1, 0).event(&Event::Cancel { by: "ann".into() }).gone(0).gone(1);
    assert_eq!(c.phase(), "Cancelled", "a person's word stands");
}

/// The control plane was away from 60 s to 8 h; the job failed at 600 s and was gone at 602 s.
#[test]
fn absence_is_not_charged_to_the_job() {
    let mut c = case(1);
    c.at(0).running().at(8 * 3600);
    let ago = |s: i64| Span::seconds(8 * 3600 - s);
    let worker = |worker, event| Event::Worker { attempt: 1, epoch: 1, worker, event };
    let exit = |stopping, code| WorkerEvent::RankExited {
        rank: u32::from(stopping),
        code,
        signal: None,
        stopping,
        last_lines: vec![],
        last_step: None,
        why: None,
    };
    let end = || WorkerEvent::Gone { ranks: BTreeMap::new(), reason: None, last_step: None, next_port: None };
    c.event_ago(&worker(0, exit(false, 1)), ago(599)).event_ago(&worker(0, end()), ago(600));
    c.event_ago(&worker(1, exit(true, 143)), ago(601)).event_ago(&worker(1, end()), ago(602));
    assert_eq!(c.phase(), "Queued");
    assert_eq!(c.last.as_ref().map(|j| j.ran), Some(Span::seconds(599)));
    let free: Vec<Time> = c.snapshot.ledger.node(NodeId(1)).iter().map(|o| o.from).collect();
    assert_eq!(free, [Time(602_000)], "its GPUs are free since its last process was gone");
}

#[test]
fn a_node_that_came_back_smaller_takes_no_work_on_what_leaves() {
    let mut c = case(0);
    c.running();
    if let Some(node) = c.snapshot.nodes.get_mut(&NodeId(1)) {
        node.leaving = Slots(0xF0);
    }
    c.at(10).exit(0, 0).gone(0).exit(1, 0).gone(1);
    let node = &c.snapshot.nodes[&NodeId(1)];
    assert_eq!((node.gpus, node.leaving, node.free()), (Slots(0x0F), Slots::NONE, Slots(0x0F)));
}
