//! What people do to jobs, and to all starts.

use super::*;
use aviflow_core::lifecycle::Change;

fn hold(job: JobId) -> Input {
    Input::Hold { job, by: ops(), reason: Some("budget".into()) }
}

fn release(job: JobId) -> Input {
    Input::Release { job, by: ops(), reason: None }
}

fn suspend(job: JobId) -> Input {
    Input::Suspend { job, by: ops(), reason: None }
}

fn update(job: JobId, change: Change) -> Input {
    Input::Update { job, change, by: ops(), reason: None }
}

#[test]
fn a_suspended_job_waits_until_it_is_released() {
    let mut world = World::new();
    let job = world.submit(submission("j", 1, 8));
    world.run(job);
    assert_eq!(world.ask(suspend(job)), Answer::Done);
    assert_eq!(world.act(), "ops on job default/j: suspended it until it is released");
    world.nothing(suspend(job));
    world.end(job, true);
    world.later(60).turn(&[]);
    assert_eq!((world.phase(job), world.job(job).held.as_deref()), ("Queued", Some("ops")));
    world.restart();
    world.turn(&[]);
    assert_eq!(world.phase(job), "Queued");
    world.ask(release(job));
    assert_eq!(world.act(), "ops on job default/j: released it");
    assert_eq!((world.phase(job), world.job(job).attempts), ("Starting", 2));
    world.nothing(release(job));
}

#[test]
fn a_job_that_the_plan_suspends_is_held_too_if_a_person_says_so() {
    let mut world = World::new();
    let job = world.submit(submission("j", 1, 8));
    world.run(job);
    let by_plan = Event::Suspend { by: "the plan".into(), hold: false, turned_out: None };
    world.happen(job, &by_plan);
    world.ask(suspend(job));
    world.end(job, true);
    assert_eq!((world.phase(job), world.job(job).held.as_deref()), ("Queued", Some("ops")));
}

#[test]
fn a_held_job_keeps_its_place_and_starts_nothing() {
    let mut world = World::new();
    world.ask(Input::Pause { on: true, by: ops(), reason: None });
    let job = world.submit(submission("j", 1, 8));
    world.ask(hold(job));
    assert_eq!(world.act(), "ops on job default/j: held it until it is released (budget)");
    world.nothing(hold(job));
    world.ask(Input::Pause { on: false, by: ops(), reason: None });
    assert_eq!(world.phase(job), "Queued");
    world.ask(release(job));
    assert_eq!(world.phase(job), "Starting");
    assert!(world.refused(hold(job)).starts_with("`j` is Starting already"));
    assert_eq!(world.refused(hold(JobId(9))), "the job has ended or does not exist");
}

#[test]
fn starts_are_paused_and_go_on() {
    let mut world = World::new();
    let pause = |on| Input::Pause { on, by: ops(), reason: Some("power".into()) };
    world.ask(pause(true));
    assert_eq!(world.act(), "ops on starts : paused all starts (power)");
    world.nothing(pause(true));
    let job = world.submit(submission("j", 1, 8));
    assert_eq!(world.phase(job), "Queued");
    world.ask(pause(false));
    assert_eq!(world.act(), "ops on starts : let starts go on (power)");
    assert_eq!(world.phase(job), "Starting");
}

#[test]
fn a_job_is_changed_within_what_its_queue_allows() {
    let mut world = World::new();
    world.queue(Queue { highest_priority: Some(50), ..Queue::open("nlp") });
    world.queue(Queue { submitters: ["bob".to_owned()].into(), ..Queue::open("closed") });
    let job = world.submit(in_queue("j", "nlp", 1, 8));
    world.run(job);
    world.later(120);
    let change = |priority, queue: Option<&str>, minutes: Option<i64>| Change {
        priority,
        queue: queue.map(str::to_owned),
        time_limit: minutes.map(|m| Some(Span::minutes(m))),
    };
    assert!(world.refused(update(job, change(Some(100), None, None))).contains("up to 50, and 100 was asked"));
    assert!(world.refused(update(job, change(None, Some("closed"), None))).contains("ada may not"));
    assert!(world.refused(update(job, change(None, Some("none"), None))).contains("no queue `none`"));
    assert_eq!(
        world.refused(update(job, change(None, None, Some(1)))),
        "`j` has run for 2m already, which is more than 1m; set more, or cancel it"
    );
    // In the other queue the priority may be higher: both at once.
    world.ask(update(job, change(Some(100), Some("default"), Some(5))));
    assert_eq!(world.act(), "ops on job default/j: set priority 100, queue default, time limit 5m");
    let charged = |q: &str, world: &World| world.engine.snapshot().usage[&(q.to_owned(), "ada".to_owned())].gpus;
    assert_eq!((charged("nlp", &world), charged("default", &world)), (0, 8));
    world.nothing(update(job, change(Some(100), None, None)));
    assert!(world.refused(update(job, change(None, Some("nlp"), None))).contains("up to 50"));
    // The new limit is kept.
    assert_eq!(world.engine.next_wake(), Some(Time(1_000) + Span::minutes(5)));
    world.later(181).turn(&[]);
    assert_eq!(world.phase(job), "Stopping");
}

#[test]
fn who_cancelled_is_recorded() {
    let mut world = World::new();
    let job = world.submit(submission("j", 1, 8));
    world.ask(Input::Cancel { job, by: "ada".into() });
    assert_eq!(world.act(), "ada on job default/j: cancelled it");
    world.nothing(Input::Cancel { job, by: "ada".into() });
}
