//! Queues, pools and the policy.

use super::*;
use aviflow_core::model::{Policy, Pool, QueueState, TimeSharing};

fn below(name: &str, parent: &str, guarantee: u32) -> Queue {
    Queue { parent: Some(parent.to_owned()), ..quota(name, guarantee, None) }
}

#[track_caller]
fn warnings(answer: Answer) -> String {
    match answer {
        Answer::DoneWith(warnings) => warnings.join("; "),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_queue_is_made_changed_and_recorded_once() {
    let mut world = World::new();
    assert_eq!(world.queue(quota("nlp", 8, None)), Answer::Done);
    assert_eq!(world.act(), "ops on queue nlp: made queue nlp (growth)");
    let names: Vec<&String> = world.engine.snapshot().queues.keys().collect();
    assert_eq!(names, ["default", "nlp"], "the one that was there from the beginning stays");
    assert_eq!(world.nothing(apply(quota("nlp", 8, None))), Answer::Done);
    world.queue(Queue { time_sharing: Some(TimeSharing::on()), lend: false, ..quota("nlp", 12, Some(16)) });
    assert_eq!(
        world.act(),
        "ops on queue nlp: changed queue nlp: guarantee of H100 8 → 12, limit of H100 none → 16, lend yes → no, \
         time sharing not said → turns of 2h with levels of 15m and 1d 16h of ageing (growth)"
    );
    world.restart();
    assert_eq!(world.engine.snapshot().queues["nlp"].quotas["H100"].guarantee, 12);
}

#[test]
fn the_default_queue_changes_like_any_other() {
    let mut world = World::new();
    assert_eq!(world.nothing(apply(default_queue())), Answer::Done);
    world.queue(Queue { state: QueueState::Held, ..default_queue() });
    assert_eq!(world.act(), "ops on queue default: changed queue default: state open → held (growth)");
}

#[test]
fn a_tree_that_makes_no_sense_is_refused() {
    let mut world = World::with_nodes(4);
    let mut say = |queue: Queue| world.refused(apply(queue));
    assert_eq!(say(below("a", "b", 0)), "queue `a` is to be below `b`, which does not exist; make that one first");
    assert_eq!(
        say(quota("a", 8, Some(4))),
        "queue `a` has a limit of 4 GPUs of H100, below its guarantee of 8; raise the limit, or lower the guarantee"
    );
    assert_eq!(say(Queue::open("")), "queue : a queue needs a name");
    let mut weightless = quota("a", 8, None);
    weightless.quotas.values_mut().for_each(|q| q.weight = 0);
    assert_eq!(say(weightless), "queue a: the weight for H100 is 0; a weight is at least 1");
    assert!(say(Queue { parent: Some("a".into()), ..Queue::open("a") }).contains("cannot be below `a`"));

    world.queue(quota("a", 16, Some(24)));
    world.queue(below("b", "a", 8));
    world.queue(below("c", "b", 8));
    let mut say = |queue: Queue| world.refused(apply(queue));
    assert_eq!(
        say(Queue { parent: Some("c".into()), ..quota("a", 16, None) }),
        "queue `a` cannot be below `c`, which is below `a` itself; name another parent"
    );
    assert_eq!(
        say(below("d", "a", 12)),
        "the queues below `a` would be guaranteed 20 GPUs of H100, and `a` itself only 16; raise that, or lower theirs"
    );
    assert_eq!(
        say(quota("a", 4, Some(24))),
        "the queues below `a` would be guaranteed 8 GPUs of H100, and `a` itself only 4; raise that, or lower theirs"
    );
    // One that guarantees nothing itself takes what its children say, up to its limit.
    world.queue(quota("a", 0, Some(24)));
    world.queue(below("d", "a", 16));
    assert_eq!(
        world.refused(apply(below("e", "a", 1))),
        "the queues below `a` would be guaranteed 25 GPUs of H100, above its limit of 24; raise the limit, or lower theirs"
    );
}

#[test]
fn what_is_probably_not_meant_is_said_beside_done() {
    let mut world = World::new();
    assert_eq!(
        warnings(world.queue(quota("nlp", 24, None))),
        "the queues are guaranteed 24 GPUs of H100, and 16 work; each guarantee counts in proportion"
    );
    world.queue(quota("nlp", 0, None));
    let job = world.submit(in_queue("j", "nlp", 2, 8));
    world.run(job);
    assert_eq!(
        warnings(world.queue(quota("nlp", 0, Some(8)))),
        "queue nlp uses 16 GPUs of H100, above its limit of 8; nothing is stopped for it, and nothing starts until it \
         is below"
    );
    assert_eq!(world.phase(job), "Running");
    let mut typo = Queue::open("vision");
    typo.quotas = [("H1OO".to_owned(), Quota { guarantee: 0, limit: None, weight: 1 })].into();
    assert_eq!(warnings(world.queue(typo)), "no node has GPUs of type H1OO; there are H100");
    assert_eq!(
        warnings(world.queue(Queue { highest_priority: Some(-1), ..quota("nlp", 0, None) })),
        "1 jobs in it have a higher priority than -1, and keep it"
    );
}

fn delete(name: &str, jobs: QueueJobs) -> Input {
    Input::DeleteQueue { name: name.into(), jobs, by: ops(), reason: None }
}

#[test]
fn a_queue_with_jobs_or_children_is_not_deleted_by_mistake() {
    let mut world = World::new();
    assert_eq!(world.refused(delete("nlp", QueueJobs::Refuse)), "there is no queue `nlp`; there are: ");
    world.queue(quota("nlp", 8, None));
    world.queue(below("speech", "nlp", 4));
    world.queue(Queue { submitters: ["bob".to_owned()].into(), ..Queue::open("closed") });
    assert_eq!(
        world.refused(delete("nlp", QueueJobs::Refuse)),
        "queue `nlp` has others below it (speech); delete them first, or give them another parent"
    );
    let runs = world.submit(in_queue("runs", "speech", 2, 8));
    world.run(runs);
    let waits = world.submit(in_queue("waits", "speech", 2, 8));
    let refused = world.refused(delete("speech", QueueJobs::Refuse));
    assert!(refused.contains("2 jobs that have not ended (default/runs, default/waits)"), "{refused}");
    assert!(refused.contains("`--move-to QUEUE`") && refused.contains("`--leave`"), "{refused}");
    let to = |queue: &str| QueueJobs::Move { to: queue.into() };
    assert!(world.refused(delete("speech", to("speech"))).contains("there is no queue `speech`"));
    assert!(world.refused(delete("speech", to("closed"))).contains("ada may not submit to queue `closed`"));

    // Moved, they go on where they are, and are charged to the other queue from now on.
    world.later(10);
    let used = |world: &World, queue: &str| {
        let usage = &world.engine.snapshot().usage;
        usage.get(&(queue.to_owned(), "ada".to_owned())).map(|u| u.gpus)
    };
    assert_eq!(world.ask(delete("speech", to("default"))), Answer::Done);
    assert_eq!(world.act(), "ops on queue speech: deleted queue speech and moved its 2 jobs to default");
    assert_eq!((world.job(waits).request.queue.as_str(), world.phase(runs)), ("default", "Running"));
    assert_eq!((used(&world, "speech"), used(&world, "default")), (None, Some(16)));
    let cut = world.store.entries().iter().filter(|e| e.owner.is_some()).map(|e| e.to).max();
    assert_eq!(cut, Some(world.now), "the ledger's interval ended with the move");

    // Left, what runs goes on, and what waits starts nothing.
    world.ask(delete("closed", QueueJobs::Refuse));
    world.ask(delete("nlp", QueueJobs::Refuse));
    assert_eq!(world.refused(delete("default", QueueJobs::Leave)), "`default` is the only queue; make another first");
    world.queue(Queue::open("other"));
    assert!(warnings(world.ask(delete("default", QueueJobs::Leave))).starts_with("2 jobs have no queue now"));
    assert_eq!(world.act(), "ops on queue default: deleted queue default, and left 2 jobs without one");
    world.end(runs, false);
    assert_eq!(world.phase(waits), "Queued");
    let change = lifecycle::Change { queue: Some("other".into()), ..lifecycle::Change::default() };
    world.ask(Input::Update { job: waits, change, by: ops(), reason: None });
    assert_eq!(world.phase(waits), "Starting");
}

#[test]
fn who_may_submit_and_how_high_is_the_queues_word() {
    let mut world = World::new();
    let closed = Queue { submitters: ["bob".to_owned()].into(), ..Queue::open("closed") };
    world.queue(Queue { highest_priority: Some(0), ..closed });
    let submit = |submission: &Submission| Input::Submit(Box::new(submission.clone()));
    let mut own = in_queue("j", "closed", 1, 1);
    assert!(world.refused(submit(&own)).contains("ada may not submit to queue `closed`"));
    own.user = "bob".into();
    own.request.priority = 1;
    assert!(world.refused(submit(&own)).contains("allows priorities up to 0, and 1 was asked"));
    own.request.priority = 0;
    world.submit(own.clone());
    world.queue(Queue { state: QueueState::Draining, ..Queue::open("closed") });
    assert!(world.refused(submit(&own)).contains("is draining"));
}

fn pool(levels: &[&str], domains: &[(&str, &[&str])]) -> Pool {
    let text = |list: &[&str]| list.iter().map(|s| (*s).to_owned()).collect::<Vec<String>>();
    Pool {
        name: "p".into(),
        levels: text(levels),
        time_sharing: None,
        domains: domains.iter().map(|(n, path)| ((*n).to_owned(), text(path))).collect(),
    }
}

fn describe(pool: Pool) -> Input {
    Input::ApplyPool { pool, by: ops(), reason: None }
}

#[test]
fn nodes_are_where_their_pool_says_also_those_that_come_later() {
    let mut world = World::new();
    let document = pool(&["leaf", "spine"], &[("n1", &["l1", "s1"]), ("n3", &["l1", "s1"])]);
    assert_eq!(
        warnings(world.ask(describe(document.clone()))),
        "not in the pool, or not yet: n3; no domain is named for n2; each counts as far from every other node"
    );
    assert_eq!(world.act(), "ops on pool p: described pool p: levels leaf, spine, domains of 2 nodes");
    assert_eq!(world.node("n1").path, ["l1", "s1"]);
    assert_eq!(world.node("n2").path, ["unlisted-n2", "unlisted-n2"]);
    world.see(3);
    assert_eq!(world.node("n3").path, ["l1", "s1"]);
    world.nothing(describe(document));
    world.restart();
    world.see(1);
    assert_eq!(world.node("n1").path, ["l1", "s1"]);
    world.ask(describe(pool(&["rack"], &[("n2", &["r1"])])));
    let what = "changed pool p: levels leaf, spine → levels rack, 3 nodes have other domains";
    assert_eq!(world.act(), format!("ops on pool p: {what}"));
    assert_eq!((world.node("n1").path.len(), world.node("n2").path[0].as_str()), (1, "r1"));
    let delete = || Input::DeletePool { name: "p".into(), by: ops(), reason: None };
    assert_eq!(world.ask(delete()), Answer::Done);
    assert!(world.node("n1").path.is_empty());
    assert_eq!(world.refused(delete()), "pool `p` has no document");
}

#[test]
fn a_pool_that_makes_no_sense_is_refused() {
    let mut world = World::new();
    let mut say = |pool: Pool| world.refused(describe(pool));
    assert!(say(pool(&["node"], &[])).contains("`node` is there without being named"));
    assert!(say(pool(&["leaf", "leaf"], &[])).contains("two levels have one name"));
    assert_eq!(
        say(pool(&["leaf", "spine"], &[("n1", &["l1"])])),
        "pool p: node n1 has 1 domains for 2 levels; name one for each, smallest first"
    );
    let sharing = TimeSharing { level: Span(0), ..TimeSharing::on() };
    assert!(say(Pool { time_sharing: Some(sharing), ..pool(&[], &[]) }).contains("the level of time sharing"));
}

#[test]
fn the_policy_is_set_and_use_before_decays_as_it_did() {
    let mut world = World::new();
    world.submit(submission("j", 2, 8));
    let set = |policy: Policy| Input::SetPolicy { policy, by: ops(), reason: None };
    assert_eq!(world.nothing(set(Policy::default())), Answer::Done);
    world.later(3600);
    let usage = |world: &World| {
        let usage = world.engine.snapshot().usage[&("default".to_owned(), "ada".to_owned())];
        usage.at(world.now, world.engine.snapshot().policy.half_life)
    };
    let before = usage(&world);
    world.ask(set(Policy { half_life: Span::minutes(60), preemption: false, ..Policy::default() }));
    assert_eq!(world.act(), "ops on policy : changed the policy: half-life 7d → 1h, preemption on → off");
    assert_eq!(usage(&world), before);
    world.restart();
    assert!(!world.engine.snapshot().policy.preemption);
    assert!(world.refused(set(Policy { half_life: Span(0), ..Policy::default() })).contains("half-life"));
}
