//! What a cluster says that others use, too: their GPUs, closed nodes, labels, refused starts; and what is kept from them.

use super::*;
use aviflow_core::explain;
use aviflow_core::gpus::Slots;
use aviflow_core::ledger::GpuState;
use aviflow_core::model::{NodeCondition, Pool};

impl World {
    fn observe(&mut self, observation: Observation) -> Turn {
        self.turn(&[Input::Observe(observation)])
    }

    fn others(&mut self, node: &str, gpus: u32) -> Turn {
        self.observe(Observation::NodeForeign { name: node.into(), gpus })
    }

    fn close(&mut self, node: &str, reason: Option<&str>) -> Turn {
        self.observe(Observation::NodeClosed { name: node.into(), reason: reason.map(str::to_owned), vacate: false })
    }

    fn label(&mut self, node: &str, pool: &str, gpus: u32, path: &[&str]) -> Turn {
        let path = path.iter().map(|p| (*p).to_owned()).collect();
        let gpu_type = if gpus == 4 { "L40" } else { "H100" }.to_owned();
        self.observe(Observation::NodeSeen { name: node.into(), pool: pool.into(), gpu_type, gpus, path })
    }

    fn happens(&mut self, job: JobId, worker: u32, event: WorkerEvent) -> Turn {
        let attempt = self.workers(job).0;
        self.observe(Observation::Worker { job, attempt, epoch: 1, worker, ago: Span(0), event })
    }

    fn why(&self, job: JobId) -> String {
        let (constraint, _) = self.engine.plan().verdict(job).expect("it waits");
        explain::constraint(constraint, self.engine.now())
    }
}

fn nobody() -> WorkerEvent {
    WorkerEvent::Gone { ranks: BTreeMap::new(), reason: None, last_step: None, next_port: None }
}

/// The orders of a turn in short.
fn said(orders: &[Stamped]) -> Vec<String> {
    let say = |s: &Stamped| match &s.order {
        Order::Reconcile { .. } => "reconcile".to_owned(),
        Order::Prepare { .. } => "prepare".to_owned(),
        Order::Abandon { .. } => "abandon".to_owned(),
        Order::Launch { record, nodes, .. } => format!("launch {} on {}", record.key.name, nodes.join(",")),
        Order::Confirm { .. } => "confirm".to_owned(),
        Order::Stop { job, .. } => format!("stop {}", job.0),
        Order::Remove { job, .. } => format!("remove {}", job.0),
        Order::Keep { node, gpus, whole } => format!("keep {gpus} of {node}{}", if *whole { ", all" } else { "" }),
    };
    orders.iter().map(say).collect()
}

/// Who borrows both nodes, and who has a right to one and a half of them.
fn contest(gpus: u32) -> (World, JobId, JobId) {
    let mut world = World::new();
    world.queue(quota("a", 16, None));
    world.queue(quota("b", 0, None));
    let in_queue = |name: &str, queue: &str, gpus| {
        let mut s = submission(name, 2, gpus);
        (s.spec.queue, s.request.queue) = (queue.to_owned(), queue.to_owned());
        s
    };
    let victim = world.submit(in_queue("b1", "b", 8));
    world.run(victim);
    world.later(3600);
    let submitted = world.turn(&[Input::Submit(Box::new(in_queue("a1", "a", gpus)))]);
    let Answer::Submitted(record) = &submitted.answers[0] else { panic!("{:?}", submitted.answers) };
    let whole = if gpus == 8 { ", all" } else { "" };
    // What is kept is told before anybody leaves.
    assert_eq!(
        said(&submitted.orders),
        [format!("keep {gpus} of n1{whole}"), format!("keep {gpus} of n2{whole}"), "stop 1".to_owned()]
    );
    (world, victim, record.id)
}

#[test]
fn a_claim_is_kept_from_others_until_its_gang_is_launched() {
    for gpus in [8, 6] {
        let (mut world, victim, winner) = contest(gpus);
        assert_eq!(world.phase(victim), "Suspending");
        // One worker is gone: what is kept is the same, though half of it is free now.
        assert_eq!(said(&world.happens(victim, 0, gone(0, true)).orders), Vec::<String>::new());
        // A control plane that begins anew says all of it.
        let (engine, orders) = Engine::open(world.store.handle(), world.now).expect("it opens again");
        world.engine = engine;
        let whole = if gpus == 8 { ", all" } else { "" };
        assert_eq!(
            said(&orders)[..3],
            ["reconcile".to_owned(), format!("keep {gpus} of n1{whole}"), format!("keep {gpus} of n2{whole}")]
        );
        let last = world.happens(victim, 1, gone(1, true));
        assert_eq!(world.phase(winner), "Starting");
        assert_eq!(
            said(&last.orders),
            ["remove 1", "launch a1 on n1,n2", "keep 0 of n1", "keep 0 of n2"],
            "it is handed over: the gang first"
        );
    }
}

#[test]
fn a_claim_that_others_were_faster_for_is_given_up_and_no_longer_kept() {
    let (mut world, victim, winner) = contest(6);
    world.happens(victim, 0, gone(0, true));
    // Its pod there is gone, and the gang holds its GPUs yet. Two fit beside what is promised.
    assert_eq!(said(&world.others("n1", 2).orders), Vec::<String>::new());
    assert_eq!(world.job(winner).claim.as_ref().map(|c| c.placement.gpus().count()), Some(12));
    let lost = said(&world.others("n1", 3).orders);
    assert_eq!((world.job(winner).claim.clone(), lost), (None, vec!["keep 0 of n1".into(), "keep 0 of n2".into()]));
    assert_eq!((world.node("n1").foreign.count(), world.node("n1").overrun()), (0, 3));
    world.happens(victim, 1, gone(1, true));
    assert_eq!((world.node("n1").foreign.count(), world.node("n1").overrun()), (3, 0));
    assert_eq!(world.why(winner), "needs 2 nodes with 6 GPUs free; 1 node has room, 13 GPUs free, 3 used by others");
}

#[test]
fn what_others_use_is_a_book_of_its_own_and_durable() {
    let mut world = World::new();
    let job = world.submit(submission("j", 1, 6));
    world.run(job);
    let states = |world: &World| {
        let open = world.engine.snapshot().ledger.node(NodeId(1));
        let count = |state| open.iter().filter(|o| o.state == state).map(|o| o.slots.count()).sum::<u32>();
        (count(GpuState::Foreign), count(GpuState::Free))
    };
    for (others, expected) in [(1, (1, 1)), (2, (2, 0)), (5, (2, 0)), (1, (1, 1)), (5, (2, 0))] {
        world.others("n1", others);
        assert_eq!((states(&world), world.node("n1").others), (expected, others));
        world.nothing(Input::Observe(Observation::NodeForeign { name: "n1".into(), gpus: others }));
    }
    world.nothing(Input::Observe(Observation::NodeForeign { name: "n9".into(), gpus: 1 }));
    world.restart();
    // What the job leaves is theirs at once, up to what they use.
    world.end(job, false);
    assert_eq!((states(&world), world.node("n1").free().count()), ((5, 3), 3));
    // A node of which nothing is heard is unknown; when it is back, so are they.
    world.observe(Observation::NodeGone { name: "n1".into() });
    assert_eq!(states(&world), (0, 0));
    world.see(1);
    assert_eq!(states(&world), (5, 3));
}

#[test]
fn who_closed_a_node_opens_it() {
    let mut world = World::new();
    let job = world.submit(submission("j", 2, 8));
    world.run(job);
    world.close("n1", Some("cordoned by kubectl"));
    assert_eq!((world.node("n1").condition, world.phase(job)), (NodeCondition::Cordoned, "Running"));
    world.nothing(Input::Observe(Observation::NodeClosed {
        name: "n1".into(),
        reason: Some("cordoned by kubectl".into()),
        vacate: false,
    }));
    let cordon = |cordoned| Input::Cordon { node: "n1".into(), cordoned, by: ops(), reason: None };
    world.ask(cordon(true));
    // Opening one leaves the other, whichever comes first, also over a restart and while the node is away.
    world.close("n1", None);
    world.restart();
    assert_eq!(world.node("n1").condition, NodeCondition::Cordoned);
    world.observe(Observation::NodeGone { name: "n1".into() });
    world.close("n1", Some("tainted maintenance:NoSchedule"));
    world.see(1);
    let Answer::DoneWith(said) = world.ask(cordon(false)) else { panic!("it says that the node stays closed") };
    assert_eq!(
        said,
        ["n1 stays closed to new work by the cluster: tainted maintenance:NoSchedule; it is opened there"]
    );
    assert_eq!((world.node("n1").condition, world.node("n1").cordoned), (NodeCondition::Cordoned, false));
    world.end(job, false);
    let next = world.submit(submission("next", 2, 8));
    assert_eq!(
        world.why(next),
        "needs 2 nodes with 8 GPUs free; 1 node has room, 8 GPUs free, 1 node closed to new work"
    );
    world.close("n1", None);
    assert_eq!((world.node("n1").condition, world.phase(next)), (NodeCondition::Ready, "Starting"));
}

#[test]
fn labels_say_where_a_node_is_and_the_document_where_they_do_not() {
    let mut world = World::with_nodes(3);
    let path = |world: &World, node: &str| world.node(node).path.join("/");
    world.label("n1", "p", 8, &["leaf-7", "spine-2"]);
    assert_eq!(path(&world, "n1"), "", "the pool has no levels yet");
    let domains = [("n1", ["l1", "s1"]), ("n2", ["l1", "s1"])];
    let domains = domains.map(|(n, p)| (n.to_owned(), p.map(str::to_owned).to_vec())).into();
    let pool = Pool { name: "p".into(), levels: vec!["leaf".into(), "spine".into()], domains, ..Pool::default() };
    let apply = |pool: &Pool| Input::ApplyPool { pool: pool.clone(), by: ops(), reason: None };
    world.ask(apply(&pool));
    assert_eq!((path(&world, "n1").as_str(), path(&world, "n2").as_str()), ("leaf-7/spine-2", "l1/s1"));
    assert_eq!(path(&world, "n3"), "unlisted-n3/unlisted-n3");
    world.restart();
    world.label("n1", "p", 8, &["leaf-8", "spine-2"]);
    world.label("n3", "p", 8, &["leaf-8", "spine-2"]);
    assert_eq!(path(&world, "n1"), path(&world, "n3"));
    world.label("n1", "p", 8, &["leaf-8"]);
    assert_eq!(path(&world, "n1"), "l1/s1", "of a number of levels that the pool does not have");
    world.see(3);
    assert_eq!(path(&world, "n3"), "unlisted-n3/unlisted-n3", "its labels were taken away");
    // What is reported waits for a document that it fits.
    world.ask(apply(&Pool { levels: vec!["leaf".into()], domains: BTreeMap::new(), ..pool }));
    assert_eq!(path(&world, "n1"), "leaf-8");
}

#[test]
fn a_node_may_change_its_pool_and_size_and_leave_while_a_job_runs_there() {
    let mut world = World::new();
    let job = world.submit(submission("j", 2, 6));
    world.run(job);
    world.label("n1", "q", 8, &[]);
    world.others("n1", 2);
    assert_eq!((world.phase(job), world.node("n1").pool.as_str()), ("Running", "q"));
    world.label("n1", "q", 4, &[]);
    assert_eq!((world.node("n1").gpus.count(), world.node("n1").leaving.count()), (6, 2), "held ones stay until then");
    world.label("n2", "p", 0, &[]);
    world.observe(Observation::NodeGone { name: "n2".into() });
    assert_eq!((world.phase(job), world.node("n2").gpus.count()), ("Running", 6));
    world.restart();
    world.end(job, false);
    assert_eq!((world.node("n1").gpus.count(), world.node("n1").gpu_type.as_str()), (4, "L40"));
    assert_eq!((world.node("n1").foreign.count(), world.node("n1").free().count()), (2, 2));
    assert_eq!(world.node("n2").gpus, Slots::NONE);
    // It is added again, as another.
    world.label("n2", "q", 4, &[]);
    let next = world.submit(submission("next", 2, 2));
    assert_eq!(world.phase(next), "Starting");
}

#[test]
fn a_refused_start_waits_in_its_old_place_and_says_why() {
    let mut world = World::new();
    let job = world.submit(submission("j", 2, 8));
    let reason = "UnexpectedAdmissionError: 4 GPUs were allocated to others".to_owned();
    let turn = world.happens(job, 1, WorkerEvent::Refused { reason, lasting: false });
    assert_eq!(said(&turn.orders), ["stop 1"]);
    world.others("n2", 4);
    world.happens(job, 1, nobody());
    world.happens(job, 0, nobody());
    assert_eq!((world.phase(job), world.job(job).counters.unready, world.job(job).counters.failures), ("Queued", 1, 0));
    assert_eq!(
        world.why(job),
        "was refused by node n2: UnexpectedAdmissionError: 4 GPUs were allocated to others; tried again in 1s"
    );
    world.restart();
    world.later(1).turn(&[]);
    assert_eq!(world.why(job), "needs 2 nodes with 8 GPUs free; 1 node has room, 12 GPUs free, 4 used by others");
    world.others("n2", 0);
    assert_eq!((world.phase(job), world.workers(job).0), ("Starting", 2));
    // An eviction with a grace: the whole gang saves itself, and waits again.
    world.run(job);
    world.later(600);
    world.close("n2", Some("cordoned by kubectl"));
    let within = Some(Span::seconds(10));
    let turn = world.happens(job, 1, WorkerEvent::Leaving { reason: "node n2 is drained".into(), within });
    let Order::Stop { grace, reason, .. } = &turn.orders[0].order else { panic!("{:?}", turn.orders) };
    assert_eq!(
        (*grace, reason.as_str()),
        (Span::seconds(10), "the cluster asks worker 1 to leave: node n2 is drained")
    );
    world.end(job, true);
    assert_eq!((world.phase(job), world.job(job).counters.suspensions), ("Queued", 1));
    assert_eq!(world.job(job).submitted, Time(1_000));
}

#[test]
fn since_when_others_want_a_node_empty_is_kept() {
    let mut world = World::new();
    let closed = |reason: Option<&str>, vacate| {
        Input::Observe(Observation::NodeClosed { name: "n1".into(), reason: reason.map(str::to_owned), vacate })
    };
    let asked = world.now;
    world.turn(&[closed(Some("a new driver: wait-for-jobs-required"), true)]);
    world.now = world.now + Span::seconds(5);
    world.turn(&[closed(Some("a new driver: pod-restart-required"), true)]);
    world.restart();
    assert_eq!(world.node("n1").vacate, Some(asked), "not anew with each word of it");
    world.turn(&[closed(None, true)]);
    assert_eq!((world.node("n1").vacate, world.node("n1").condition), (None, NodeCondition::Ready));
}
