//! What must be made before a job can run: made once, given up when nobody wants it, and no failure of the job's.

use super::*;
use aviflow_api::spec::{Layer, ResolvedImage};

fn layer() -> Layer {
    let image = ResolvedImage { pinned: "r/train@sha256:ab".into(), ..ResolvedImage::default() };
    Layer::new("default", &image, "lock", "linux/amd64")
}

/// A job whose packages are layered onto its image.
fn layered(name: &str) -> Submission {
    let mut submission = submission(name, 2, 8);
    submission.provenance.layer = Some(layer());
    submission
}

fn hash() -> EnvironmentHash {
    EnvironmentHash(layer().hash)
}

/// The orders of a turn, but for those of workers.
fn about_layers(turn: &Turn) -> Vec<&'static str> {
    let of = |stamped: &Stamped| match &stamped.order {
        Order::Prepare { .. } => Some("prepare"),
        Order::Abandon { hash: abandoned } => {
            assert_eq!(*abandoned, hash());
            Some("abandon")
        }
        _ => None,
    };
    turn.orders.iter().filter_map(of).collect()
}

fn cancel(job: JobId) -> Input {
    Input::Cancel { job, by: ops() }
}

#[test]
fn a_layer_is_made_once_and_given_up_with_the_last_job_that_wants_it() {
    let mut world = World::new();
    let turn = world.turn(&[Input::Submit(Box::new(layered("a")))]);
    assert_eq!(about_layers(&turn), ["prepare"]);
    let Answer::Submitted(a) = &turn.answers[0] else { panic!("{:?}", turn.answers) };
    let turn = world.turn(&[Input::Submit(Box::new(layered("b")))]);
    assert!(about_layers(&turn).is_empty(), "it is being made");
    let Answer::Submitted(b) = &turn.answers[0] else { panic!("{:?}", turn.answers) };
    assert_eq!((world.phase(a.id), world.phase(b.id)), ("Queued", "Queued"));
    // They hold nothing, and nobody up.
    let other = world.submit(submission("c", 2, 8));
    assert_eq!(world.phase(other), "Starting");
    assert!(about_layers(&world.turn(&[cancel(a.id)])).is_empty(), "another wants it");
    assert_eq!(about_layers(&world.turn(&[cancel(b.id)])), ["abandon"]);
    // One that is there needs nobody to give it up.
    let d = world.submit(layered("d"));
    world.turn(&[Input::Observe(Observation::EnvironmentReady { hash: hash() })]);
    assert!(about_layers(&world.turn(&[cancel(d)])).is_empty());
}

#[test]
fn a_layer_that_cannot_be_made_fails_its_jobs_and_spends_no_retry() {
    let mut world = World::new();
    let job = world.submit(layered("a"));
    let reason = "package x is not what was locked".to_owned();
    let mut turn = world.turn(&[Input::Observe(Observation::EnvironmentFailed { hash: hash(), reason })]);
    let job = turn.ended.pop().filter(|ended| ended.id == job).expect("it has ended");
    assert_eq!((job.phase.name(), job.counters.failures, job.attempts), ("Failed", 0, 0));
    // Who comes later tries again.
    let turn = world.turn(&[Input::Submit(Box::new(layered("b")))]);
    assert_eq!(about_layers(&turn), ["prepare"]);
}
