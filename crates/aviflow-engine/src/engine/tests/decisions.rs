//! What the plan decides, carried out step by step, whether it would decide so today or not.

use super::*;
use aviflow_core::gpus::Slots;
use aviflow_core::ledger::GpuState;
use aviflow_core::model::{Beneficiary, Claim, Drain, Eviction, EvictionCause, NodeCondition, TurnedOut};
use aviflow_core::schedule::Decision;

impl World {
    /// Does something outside of a turn, and makes it durable.
    fn work(&mut self, what: impl FnOnce(&mut Engine<MemoryStore>, &mut Work)) {
        self.engine.now = self.now;
        let mut work = Work::default();
        what(&mut self.engine, &mut work);
        let batch = self.engine.batch(work);
        self.engine.store.commit(&batch).expect("it is taken");
        self.engine.generation = batch.generation;
        self.is_durable();
    }

    /// Something happens to a job, and nothing is planned.
    pub(super) fn happen(&mut self, job: JobId, event: &Event) {
        let now = self.now;
        self.work(|engine, work| engine.advance(job, event, now, work));
    }

    fn decide(&mut self, decision: Decision) {
        self.work(|engine, work| {
            engine.carry_out(decision, work);
            engine.tidy_drains(work);
        });
    }

    fn wrong(&self) -> Vec<String> {
        lint(self.engine.snapshot())
    }

    fn states(&self, node: u32) -> Vec<GpuState> {
        self.engine.snapshot().ledger.node(NodeId(node)).iter().map(|o| o.state).collect()
    }
}

/// A job that runs on both nodes, and one that is to have the second of them.
fn contest() -> (World, JobId, JobId, Claim) {
    let mut world = World::new();
    let victim = world.submit(submission("victim", 2, 8));
    world.run(victim);
    let winner = world.submit(submission("winner", 1, 8));
    assert_eq!(world.phase(winner), "Queued");
    let placement = Placement(vec![(NodeId(2), Slots::first(8))]);
    let claim = Claim { placement, victims: vec![(victim, 1)], cause: EvictionCause::Reclaim, since: world.now };
    (world, victim, winner, claim)
}

fn eviction(world: &World, winner: JobId) -> Eviction {
    let beneficiary = Some(Beneficiary { job: winner, key: world.job(winner).key.clone() });
    Eviction { cause: EvictionCause::Reclaim, beneficiary, since: world.now, deadline: world.now + Span::minutes(5) }
}

#[test]
fn a_claim_is_kept_through_evictions_and_ends_with_the_start() {
    let (mut world, victim, winner, claim) = contest();
    world.decide(Decision::Claim { job: winner, claim: claim.clone() });
    assert_eq!(world.node("n2").claimed, Slots::first(8));
    let eviction = eviction(&world, winner);
    world.decide(Decision::Evict { job: victim, eviction });
    assert_eq!(world.wrong(), Vec::<String>::new());
    // It is there after a crash between two steps, too.
    world.restart();
    assert_eq!((world.job(winner).claim.clone(), world.job(victim).eviction.is_some()), (Some(claim.clone()), true));
    let beneficiary = Some(world.job(winner).key.clone());
    let turned_out = TurnedOut { cause: EvictionCause::Reclaim, beneficiary, at: world.now };
    world.decide(Decision::Suspend { job: victim, turned_out: turned_out.clone() });
    assert_eq!((world.phase(victim), world.job(victim).preempted), ("Suspending", 1));
    assert_eq!((world.job(victim).turned_out.as_ref(), &world.job(victim).eviction), (Some(&turned_out), &None));
    for worker in 0..2 {
        world.happen(victim, &Event::Worker { attempt: 1, epoch: 1, worker, event: gone(worker, true) });
    }
    assert_eq!((world.states(1), world.states(2)), (vec![GpuState::Free], vec![GpuState::Claimed]));
    assert_eq!(world.node("n2").free(), Slots::NONE);
    world.decide(Decision::Start { job: winner, placement: claim.placement });
    assert_eq!((world.node("n2").claimed, world.states(2)), (Slots::NONE, vec![GpuState::Starting]));
    assert_eq!(world.wrong(), Vec::<String>::new());
}

#[test]
fn a_claim_that_is_taken_back_leaves_nothing_behind() {
    let (mut world, victim, winner, claim) = contest();
    world.decide(Decision::Claim { job: winner, claim: claim.clone() });
    let eviction = eviction(&world, winner);
    world.decide(Decision::Evict { job: victim, eviction });
    world.decide(Decision::Unclaim { job: winner, reason: "its nodes are gone".into() });
    // Until the victim is spared, it leaves for nobody.
    assert!(world.wrong()[0].contains("whose claim does not name it"), "{:?}", world.wrong());
    world.decide(Decision::Spare { job: victim });
    assert_eq!((world.wrong(), world.node("n2").claimed), (Vec::new(), Slots::NONE));
    assert_eq!(world.phase(victim), "Running");
    // Whoever is held, changed or cancelled gives it back at once.
    let change = lifecycle::Change { priority: Some(-5), ..lifecycle::Change::default() };
    let acts = [
        Input::Hold { job: winner, by: ops(), reason: None },
        Input::Update { job: winner, change, by: ops(), reason: None },
        Input::Cancel { job: winner, by: ops() },
    ];
    for act in acts {
        world.ask(Input::Release { job: winner, by: ops(), reason: None });
        world.decide(Decision::Claim { job: winner, claim: claim.clone() });
        assert_eq!(world.node("n2").claimed, Slots::first(8));
        world.ask(act);
        assert_eq!(world.node("n2").claimed, Slots::NONE);
    }
}

#[test]
fn a_claim_on_a_node_that_is_lost_is_taken_back_and_the_victim_spared() {
    let (mut world, victim, winner, claim) = contest();
    world.decide(Decision::Claim { job: winner, claim });
    let eviction = eviction(&world, winner);
    world.decide(Decision::Evict { job: victim, eviction });
    world.restart();
    world.turn(&[Input::Observe(Observation::NodeGone { name: "n2".into() })]);
    assert_eq!((world.job(winner).claim.clone(), world.node("n2").claimed), (None, Slots::NONE));
    assert_eq!(world.job(victim).eviction, None);
}

#[test]
fn a_window_is_what_time_says() {
    let mut world = World::new();
    let length = Some(Span::seconds(60));
    let order = DrainOrder {
        nodes: vec!["n1".into(), "n2".into()],
        at: None,
        length,
        max_unavailable: Some(1),
        by_when: None,
        by: ops(),
        reason: None,
    };
    let Answer::Rolling { drain, .. } = world.ask(Input::Drain(order)) else { panic!("no number") };
    assert_eq!(world.engine.snapshot().drains[0].taken, [NodeId(1)]);
    // Said twice, or too early, it changes nothing.
    let until = Some(world.now + Span::seconds(60));
    let window = Drain { from: world.now, until, by: ops(), reason: String::new() };
    let before = world.engine.snapshot().clone();
    world.decide(Decision::Take { drain, node: NodeId(1), window: window.clone() });
    world.decide(Decision::Take { drain: 99, node: NodeId(2), window: window.clone() });
    world.decide(Decision::Window { node: NodeId(1), closed: true });
    world.decide(Decision::Window { node: NodeId(1), closed: false });
    assert_eq!(world.engine.snapshot(), &before);
    world.decide(Decision::Take { drain, node: NodeId(2), window });
    assert_eq!(world.engine.snapshot().drains[0].taken, [NodeId(1), NodeId(2)]);
    world.later(60);
    world.decide(Decision::Window { node: NodeId(1), closed: false });
    assert_eq!(world.node("n1").condition, NodeCondition::Ready);
    assert_eq!(world.engine.snapshot().drains[0].taken, [NodeId(2)]);
    world.decide(Decision::Window { node: NodeId(2), closed: false });
    assert!(world.engine.snapshot().drains.is_empty());
}
