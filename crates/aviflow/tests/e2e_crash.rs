//! What survives when something is killed.

mod world;

use world::World;

/// The numbers of `line N` in a job's output.
fn numbers(text: &str) -> Vec<u32> {
    text.lines().filter_map(|l| l.split("line ").nth(1)?.trim().parse().ok()).collect()
}

#[test]
fn a_training_and_its_log_survive_the_death_of_the_control_plane() {
    let world = World::with_pool(1, 1);
    let gate = world.gate("gate");
    let script = format!(
        "i=1; while [ $i -le 100 ]; do echo line $i; i=$((i+1)); done; cat {}; while [ $i -le 200 ]; do echo line $i; i=$((i+1)); done",
        gate.path().display()
    );
    world.ok(&["run", "--detach", "--name", "long", "--", "sh", "-c", &script]);
    world.follow(&["logs", "-f", "long"]).until("line 100");
    World::kill(world.server_pid());
    world.wait_gone();
    // It prints the rest and ends while nobody listens.
    gate.open();
    let no_server = world.run(&["ls"]);
    assert_eq!(no_server.code, 1, "{no_server:?}");
    world.ok(&["server", "start"]);
    let text = world.ok(&["logs", "-f", "long"]);
    assert_eq!(numbers(&text), (1..=200).collect::<Vec<_>>());
    let detail = world.json(&["show", "long"]);
    assert_eq!((&detail["phase"], &detail["attempts"]), (&"Succeeded".into(), &1.into()), "{detail}");
}

#[test]
fn whoever_follows_a_job_comes_back_with_the_control_plane() {
    let world = World::with_pool(1, 1);
    let gate = world.gate("gate");
    let script = format!("echo line 1; echo line 2; cat {}; echo line 3", gate.path().display());
    let mut run = world.follow(&["run", "--name", "long", "--", "sh", "-c", &script]);
    run.until("line 2");
    World::kill(world.server_pid());
    run.until("the job goes on");
    world.ok(&["server", "start"]);
    gate.open();
    assert_eq!(run.end(), 0, "{}", run.text());
    assert_eq!(numbers(&run.text()), [1, 2, 3]);
}

#[test]
fn a_stop_leaves_trainings_running_and_says_so() {
    let world = World::with_pool(1, 1);
    let gate = world.gate("gate");
    let script = format!("echo line 1; cat {}; echo line 2", gate.path().display());
    world.ok(&["run", "--detach", "--name", "long", "--", "sh", "-c", &script]);
    world.follow(&["logs", "-f", "long"]).until("line 1");
    let stopped = world.ok(&["server", "stop"]);
    assert!(stopped.contains("goes on    default/long"), "{stopped}");
    assert_eq!(world.run(&["server", "status"]).code, 1);
    gate.open();
    world.ok(&["server", "start"]);
    assert_eq!(numbers(&world.ok(&["logs", "-f", "long"])), [1, 2]);
    assert_eq!(world.json(&["show", "long"])["phase"], "Succeeded");
}

/// Kills whom `victims` names during a job's first attempt, and gives why that ended.
fn check_death(victims: impl FnOnce(&World) -> Vec<i32>) -> String {
    let world = World::with_pool(1, 1);
    let gate = world.gate("gate");
    let cut = world.gate("cut");
    // What is left in the background has a session of its own, no variable, and nobody alive but who adopts it.
    let script = format!(
        "if [ \"$AVIFLOW_ATTEMPT\" = 1 ]; then (env -i setsid cat {} &); echo held; cat {}; fi",
        cut.path().display(),
        gate.path().display()
    );
    let mut run = world.follow(&["run", "--name", "long", "--", "sh", "-c", &script]);
    run.until("held");
    let cut = cut.path().display().to_string();
    while world.processes(&cut).is_empty() {
        std::thread::yield_now();
    }
    let victims = victims(&world);
    assert_eq!(victims.len(), 1, "{victims:?}");
    World::kill(victims[0]);
    assert_eq!(run.end(), 0, "{}", run.text());
    assert_eq!(world.processes(&cut), [] as [i32; 0], "something is left");
    let detail = world.json(&["show", "long"]);
    assert_eq!((&detail["attempts"], &detail["counters"]["failures"]), (&2.into(), &0.into()), "{detail}");
    world.ok(&["show", "long"])
}

#[test]
fn the_death_of_an_agent_costs_no_retry() {
    let shown = check_death(World::agents);
    assert!(shown.contains("was ended by signal 9"), "{shown}");
}

#[test]
fn the_death_of_a_guardian_costs_no_retry() {
    let shown = check_death(World::guardians);
    assert!(shown.contains("lost its guardian, which was ended by signal 9"), "{shown}");
}

#[test]
fn a_backup_is_restored_and_a_pool_may_change() {
    let world = World::with_pool(2, 2);
    world.ok(&["run", "--name", "kept", "--", "true"]);
    let file = world.work().join("backup.db").display().to_string();
    world.ok(&["store", "backup", &file]);
    world.ok(&["run", "--name", "lost", "--", "true"]);
    let refused = world.run(&["store", "restore", &file]);
    assert_eq!(refused.code, 1, "{refused:?}");
    assert!(refused.err.contains("aviflow server stop"), "{refused:?}");
    world.ok(&["server", "stop"]);
    world.ok(&["store", "restore", &file]);
    world.ok(&["server", "start", "--nodes", "1"]);
    assert_eq!(world.ok(&["ls", "-q"]), "default/kept\n");
    let nodes = world.ok(&["node", "ls"]);
    let conditions: Vec<&str> = nodes.lines().skip(1).filter_map(|l| l.split_whitespace().nth(1)).collect();
    assert_eq!(conditions, ["Ready"], "a node that left the pool is no part of it: {nodes}");
}

#[test]
fn a_second_control_plane_is_refused() {
    let world = World::with_pool(1, 1);
    let said = world.run(&["serve"]);
    assert_eq!(said.code, 1, "{said:?}");
    assert!(said.err.contains("runs in") && said.err.contains("already"), "{said:?}");
    let again = world.ok(&["server", "start"]);
    assert!(again.contains("runs already"), "{again}");
}
