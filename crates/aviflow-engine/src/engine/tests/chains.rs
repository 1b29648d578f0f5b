//! Jobs that wait for others.

use super::*;
use aviflow_api::spec::{After, Ending};

fn after(name: &str, others: &[(&str, Ending)]) -> Submission {
    let mut submission = submission(name, 1, 8);
    submission.spec.after = others.iter().map(|(job, on)| After { job: (*job).to_owned(), on: *on }).collect();
    submission
}

fn met(world: &World, job: JobId) -> Vec<Option<bool>> {
    world.job(job).after.iter().map(|d| d.met).collect()
}

#[test]
fn a_job_starts_once_those_before_it_have_ended_as_asked() {
    let mut world = World::new();
    let first = world.submit(submission("first", 1, 8));
    world.run(first);
    let second = world.submit(after("second", &[("first", Ending::Succeeded)]));
    let third = world.submit(after("third", &[("first", Ending::Failed), ("second", Ending::Ended)]));
    assert_eq!((met(&world, second), met(&world, third)), (vec![None], vec![None, None]));
    world.restart();
    world.turn(&[]);
    assert_eq!(world.phase(second), "Queued");
    world.end(first, false);
    // Told in the transaction that ended it.
    assert_eq!((met(&world, second), met(&world, third)), (vec![Some(true)], vec![Some(false), None]));
    assert_eq!((world.phase(second), world.phase(third)), ("Starting", "Queued"));
    let history = world.store.history();
    let ends = history.iter().find(|b| b.jobs.iter().any(|j| j.id == first && j.phase.is_terminal()));
    let told: Vec<JobId> = ends.map(|b| b.jobs.iter().map(|j| j.id).collect()).unwrap_or_default();
    assert_eq!(told, [first, second, third]);
    // One that is cancelled waits no more, and is told nothing.
    world.ask(Input::Cancel { job: third, by: ops() });
    world.ask(Input::Cancel { job: second, by: ops() });
}

#[test]
fn an_ended_job_is_found_in_the_store() {
    let mut world = World::new();
    let first = world.submit(submission("first", 1, 8));
    world.run(first);
    world.end(first, false);
    world.restart();
    world.turn(&[]);
    let second = world.submit(after("second", &[("first", Ending::Succeeded)]));
    assert_eq!((met(&world, second), world.phase(second)), (vec![Some(true)], "Starting"));
    let never = Input::Submit(Box::new(after("third", &[("first", Ending::Failed)])));
    assert_eq!(
        world.refused(never),
        "the job can never start: it waits for `first` to fail, which ended otherwise; run `first` again first"
    );
    let unknown = Input::Submit(Box::new(after("third", &[("frist", Ending::Ended)])));
    assert_eq!(world.refused(unknown), "`after` names the job `frist`, which does not exist; submit that one first");
}

#[test]
fn a_name_means_ones_own_latest_then_anybodys_then_exactly_that_one() {
    let mut world = World::new();
    let mut by = |name: &str, user: &str| {
        let submission = Submission { user: user.into(), ..submission(name, 1, 8) };
        world.submit(submission)
    };
    let ids = [by("data", "ada"), by("data", "bob"), by("data", "ada"), by("data", "bob")];
    let mut meant = |name: &str, user: &str| {
        let submission = Submission { user: user.into(), ..after("x", &[(name, Ending::Ended)]) };
        let id = world.submit(submission);
        let dependency = world.job(id).after[0].clone();
        (dependency.job, dependency.name)
    };
    assert_eq!(meant("data", "ada"), (ids[2], "data-3".into()));
    assert_eq!(meant("data", "bob"), (ids[3], "data-4".into()));
    assert_eq!(meant("data", "cas"), (ids[3], "data-4".into()));
    assert_eq!(meant("data-2", "ada"), (ids[1], "data-2".into()));
    assert_eq!(meant("default/data", "bob"), (ids[0], "data".into()));
}

#[test]
fn a_chain_may_be_submitted_in_one_turn() {
    let mut world = World::new();
    let inputs = [
        Input::Submit(Box::new(submission("first", 1, 8))),
        Input::Submit(Box::new(after("second", &[("first", Ending::Succeeded)]))),
        Input::Submit(Box::new(after("third", &[("default/first", Ending::Ended)]))),
    ];
    let turn = world.turn(&inputs);
    assert!(turn.answers.iter().all(|a| matches!(a, Answer::Submitted(_))), "{:?}", turn.answers);
    assert_eq!((met(&world, JobId(2)), met(&world, JobId(3))), (vec![None], vec![None]));
    // One that ends in the turn of the submission is known to have ended.
    let inputs = [
        Input::Cancel { job: JobId(2), by: ops() },
        Input::Submit(Box::new(after("fourth", &[("second", Ending::Failed)]))),
    ];
    world.turn(&inputs);
    assert_eq!(met(&world, JobId(4)), [Some(true)]);
}
