//! The control plane on a store in PostgreSQL.

mod world;

use aviflow_store::contract::server::Server;
use world::World;

/// A database whose address has a password, which the server does not ask for.
fn database() -> String {
    Server::shared().database().replace("user=aviflow", "user=aviflow&password=s3cret")
}

#[test]
fn a_training_survives_the_death_of_a_control_plane_whose_store_is_a_database() {
    let world = World::on_database(&database());
    world.ok(&["server", "start", "--nodes", "1", "--gpus-per-node", "1"]);
    let gate = world.gate("gate");
    // Jobs get nothing of what the control plane was told.
    let script = format!("env | grep -c AVIFLOW_STORE; echo line 1; cat {}; echo line 2", gate.path().display());
    world.ok(&["run", "--detach", "--name", "long", "--", "sh", "-c", &script]);
    world.follow(&["logs", "-f", "long"]).until("line 1");
    World::kill(world.server_pid());
    world.wait_gone();
    gate.open();
    world.ok(&["server", "start"]);
    let text = world.ok(&["logs", "-f", "long"]);
    assert!(text.lines().any(|l| l.ends_with(" 0") || l == "0") && text.contains("line 2"), "{text}");
    let detail = world.json(&["show", "long"]);
    assert_eq!((&detail["phase"], &detail["attempts"]), (&"Succeeded".into(), &1.into()), "{detail}");
    assert!(!world.home().join("store.db").exists());

    for args in [["store", "backup", "b.db"], ["store", "restore", "b.db"]] {
        let refused = world.run(&args);
        assert!(refused.code == 1 && refused.err.contains("is in PostgreSQL, at postgres://aviflow@"), "{refused:?}");
        assert!(refused.err.contains("backup.md") && !refused.err.contains("s3cret"), "{refused:?}");
    }
    let log = std::fs::read_to_string(world.home().join("server.log")).expect("log");
    assert!(log.contains("the store is postgres://aviflow@") && !log.contains("s3cret"), "{log}");
}

#[test]
fn a_second_control_plane_takes_over_and_the_first_one_stops() {
    let url = database();
    let (first, second) = (World::on_database(&url), World::on_database(&url));
    let mut serving = first.follow(&["serve", "--nodes", "1", "--gpus-per-node", "1"]);
    serving.until("serves at");
    second.ok(&["server", "start", "--nodes", "1", "--gpus-per-node", "1"]);
    let refused = first.run(&["run", "--detach", "--name", "late", "--", "true"]);
    assert!(refused.code != 0 && refused.err.contains("took over the store"), "{refused:?}");
    assert_eq!(serving.end(), 125);
    second.ok(&["run", "--name", "there", "--", "true"]);
    assert_eq!(second.ok(&["ls", "--all", "-q"]).trim(), "default/there");
}

#[test]
fn a_home_folder_on_a_database_does_not_begin_with_an_empty_file() {
    let world = World::on_database(&database());
    world.ok(&["server", "start"]);
    world.ok(&["server", "stop"]);
    let forgetful = world.command(&["server", "start"]).env_remove("AVIFLOW_STORE").output().expect("the binary runs");
    let said = String::from_utf8_lossy(&forgetful.stderr);
    assert!(!forgetful.status.success() && said.contains("set AVIFLOW_STORE"), "{said}");
    assert!(!world.home().join("store.db").exists());
}
