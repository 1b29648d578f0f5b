//! The watch over running gangs, through the real binary: a rank that stands still is found and named.

mod world;

use serde_json::Value;
use world::World;

/// Rank 1 never enters the collective of the third step, for which the others wait.
const HANGS: &str = "
import os
def stuck():
    os.read(os.pipe()[0], 1)
def reduce():
    os.read(os.pipe()[0], 1)
for step in (1, 2):
    print(f'step {step} loss {3 - step / 10:.2f}', flush=True)
stuck() if os.environ['RANK'] == '1' else reduce()
";

#[test]
fn a_gang_that_stands_still_is_found_and_the_rank_named() {
    let world = World::new();
    // The first steps are waited for ten times as long: 20 s, after two thirds of which stacks are taken.
    let mut start = world.command(&["server", "start", "--nodes", "1", "--gpus-per-node", "3"]);
    assert!(start.env("AVIFLOW_HANG_AFTER", "2").status().expect("the binary runs").success());
    let args = ["run", "--name", "hangs", "--gpus-per-node", "3", "--set", "processes=perGpu", "--"];
    let mut run = world.follow(&[&args[..], &["python3", "-c", HANGS]].concat());
    run.until("hang of rank 1 (has another stack than the others)");
    assert!(run.text().contains("no step for 20s"), "{}", run.text());
    let timeline = world.json(&["show", "hangs"])["timeline"].to_string();
    assert!(timeline.contains("hang of rank 1"), "{timeline}");
    // Whoever comes in the morning reads the stacks of all ranks, whatever has become of the job.
    world.ok(&["cancel", "hangs"]);
    run.end();
    let taken = world.json(&["stacks", "hangs", "--last"]);
    let groups = taken["stacks"]["groups"].as_array().expect("groups");
    let seen: Vec<(Value, Value)> =
        groups.iter().map(|g| (g["ranks"].clone(), g["frames"][0]["function"].clone())).collect();
    let group = |ranks: &[u32], function: &str| (Value::from(ranks), Value::from(function));
    assert_eq!(seen, [group(&[1], "stuck"), group(&[0, 2], "reduce")], "{taken}");
    let shown = world.ok(&["stacks", "hangs", "--last"]);
    assert!(shown.starts_with("taken ") && shown.contains("as it stood still, attempt 1"), "{shown}");
}

#[test]
fn of_a_job_that_never_stood_still_there_are_no_stacks() {
    let world = World::with_pool(1, 1);
    world.ok(&["run", "--name", "short", "--", "true"]);
    let none = world.run(&["stacks", "short", "--last"]);
    assert_eq!(none.code, 1, "{none:?}");
    assert!(none.err.contains("no stacks of it were taken, as it never stood still for long"), "{none:?}");
}
