//! Two agents of a gang whose control plane goes away, with real processes.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on ends")]

mod world;

use aviflow_agent::protocol::{Ended, WorkerSpec, files};
use aviflow_agent::{read_ended, sweep};
use std::fs::File;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;
use world::{MESSY, World, gone, signal, until};

/// In milliseconds. Rounds of questions are a twelfth of it apart.
const AFTER: u64 = 6000;

fn worker(worker: u32) -> impl FnOnce(&mut WorkerSpec) {
    move |spec| {
        spec.worker = worker;
        spec.workers = 2;
        spec.first_rank = worker;
        spec.world_size = 2;
        spec.fence_after_ms = Some(AFTER);
    }
}

/// Two workers whose ranks run, with the pipes that all of their processes hold.
fn gang() -> [(World, File); 2] {
    let script = format!("{MESSY}\nwhile :; do sleep 1; done");
    let mut worlds = [0, 1].map(|n| World::with(&script, worker(n)));
    let peers = [0, 1].map(|n| (n, SocketAddr::from(([127, 0, 0, 1], worlds[n as usize].peer_port))));
    for world in &mut worlds {
        assert!(world.peer_port > 0);
        world.peers = peers.to_vec();
    }
    worlds.map(|mut world| {
        world.up(1);
        let fifo = world.fifo();
        world.log_has("messy");
        (world, fifo)
    })
}

fn fenced(world: &World) -> Ended {
    let ended = read_ended(world.folder.path()).unwrap();
    assert!(ended.reason.as_ref().unwrap().starts_with("fenced: "), "{ended:?}");
    ended
}

fn processes(world: &World) -> usize {
    sweep::processes(&aviflow_agent::mark(&world.spec), &[], &[]).len()
}

#[test]
fn a_gang_goes_on_without_the_control_plane_and_stops_without_a_peer() {
    let [(mut one, fifo_one), (mut other, fifo_other)] = gang();
    one.hang_up();
    other.hang_up();
    // sleep: nothing must happen, for longer than either would wait for a peer that does not answer
    std::thread::sleep(Duration::from_millis(AFTER + AFTER / 2));
    for world in [&one, &other] {
        assert!(!world.path(files::ENDED).exists() && processes(world) > 5);
    }
    let frozen = other.agent().pid;
    signal(frozen, "STOP");
    gone(fifo_one);
    until(|| one.path(files::ENDED).exists());
    let ended = fenced(&one);
    assert!(ended.reason.as_ref().unwrap().contains("(worker 1 at 127.0.0.1:"), "{ended:?}");
    assert!(!other.path(files::ENDED).exists());
    signal(frozen, "CONT");
    gone(fifo_other);
    until(|| other.path(files::ENDED).exists());
    fenced(&other);
    // The control plane is back.
    for mut world in [one, other] {
        world.accept();
        world.welcome();
        let ended = world.ended();
        assert_eq!(ended, fenced(&world));
        world.release();
    }
}

#[test]
fn a_worker_that_is_cut_off_stops_although_its_peer_answers() {
    let [(mut one, fifo), (mut other, _)] = gang();
    one.hang_up();
    gone(fifo);
    until(|| one.path(files::ENDED).exists());
    let reason = fenced(&one).reason.unwrap();
    assert!(reason.contains("(worker 1 is in touch with the control plane, and this one is not"), "{reason}");
    assert!(processes(&other) > 5);
    other.stop(0);
    other.ended();
    other.release();
}

#[test]
fn only_the_same_attempt_is_answered() {
    let mut world = World::with("sleep 1000", worker(0));
    let ask = |job: &str, attempt: u32, worker: u32| {
        let mut stream = TcpStream::connect(("127.0.0.1", world.peer_port)).unwrap();
        let question = format!(
            "{{\"jobId\":7,\"job\":\"{job}\",\"attempt\":{attempt},\"worker\":{worker},\"nonce\":5,\"later\":0}}\n"
        );
        stream.write_all(question.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    assert_eq!(ask("default/test", 1, 0), "{\"worker\":0,\"nonce\":5,\"control\":true}\n");
    for (job, attempt, worker) in [("other/test", 1, 0), ("default/test", 2, 0), ("default/test", 1, 1), ("\"", 1, 0)] {
        assert_eq!(ask(job, attempt, worker), "");
    }
    // Whoever never asks, or never ends a line, holds up nobody.
    let _idle = TcpStream::connect(("127.0.0.1", world.peer_port)).unwrap();
    let mut endless = TcpStream::connect(("127.0.0.1", world.peer_port)).unwrap();
    while endless.write_all(&[b'x'; 512]).is_ok() {}
    assert_ne!(ask("default/test", 1, 0), "");
    world.stop(0);
    world.ended();
    world.release();
}
