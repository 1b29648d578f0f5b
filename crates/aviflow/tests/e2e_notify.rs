//! People are told of their jobs, by a control plane that may be killed, at receivers that are really there.

mod world;

use serde_json::Value;
use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, channel};
use world::World;

/// Who takes notifications.
struct Chat {
    address: String,
    bodies: Receiver<Value>,
}

impl Chat {
    fn new() -> Chat {
        let listener = TcpListener::bind("127.0.0.1:0").expect("listener");
        let address = format!("http://{}/hook/geheim", listener.local_addr().expect("address"));
        let (say, bodies) = channel();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if let Some(body) = taken(stream)
                    && say.send(serde_json::from_str(&body).expect("JSON")).is_err()
                {
                    return;
                }
            }
        });
        Chat { address, bodies }
    }

    /// The next that it is told.
    fn next(&self) -> Value {
        self.bodies.recv().expect("it listens for as long as this")
    }

    /// The next events.
    fn events(&self, n: usize) -> Vec<String> {
        (0..n).map(|_| self.next()["event"].as_str().expect("an event").to_owned()).collect()
    }
}

fn taken(mut stream: TcpStream) -> Option<String> {
    let mut bytes = Vec::new();
    let mut chunk = [0; 4096];
    loop {
        let n = stream.read(&mut chunk).ok().filter(|n| *n > 0)?;
        bytes.extend(&chunk[..n]);
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
        let length = head.lines().find_map(|l| l.to_ascii_lowercase().strip_prefix("content-length: ")?.parse().ok());
        if length.is_some_and(|length: usize| body.len() >= length) {
            let answered = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
            return answered.ok().map(|()| body.to_owned());
        }
    }
}

/// A document that tells a chat of everything.
fn document(world: &World, name: &str, chat: &Chat, more: &str) -> String {
    let text = format!(
        "name: {name}\ngpusPerNode: 1\n\
         notify: [{{webhook: '{}', on: [started, suspended, restarted, failed, succeeded]}}]\n{more}",
        chat.address
    );
    world.document(name, &text)
}

/// Waits until so many notifications were delivered, and no other has come to its end.
fn delivered(world: &World, n: u64) {
    // Whoever took one is answered before it is counted.
    let counts = loop {
        let counts = counts(world);
        if counts["delivered"] >= n {
            break counts;
        }
    };
    let others: u64 = counts.iter().filter(|(outcome, _)| *outcome != "delivered").map(|(_, n)| n).sum();
    assert_eq!((counts["delivered"], others), (n, 0), "{counts:?}");
}

/// The counts of notifications at `/metrics`.
fn counts(world: &World) -> BTreeMap<String, u64> {
    let read = |name: &str| std::fs::read_to_string(world.home().join(name)).expect("a file");
    let server: Value = serde_json::from_str(&read("server.json")).expect("JSON");
    let url = format!("{}/metrics", server["url"].as_str().expect("an address"));
    let asked = ureq::get(url).header("authorization", format!("Bearer {}", read("token").trim())).call();
    let text = asked.expect("an answer").body_mut().read_to_string().expect("text");
    let count = |line: &str| {
        let (outcome, n) = line.strip_prefix("aviflow_notifications_total{outcome=\"")?.split_once("\"} ")?;
        Some((outcome.to_owned(), n.parse().ok()?))
    };
    text.lines().filter_map(count).collect()
}

#[test]
fn a_job_tells_how_it_fares() {
    let world = World::with_pool(1, 1);
    let chat = Chat::new();
    let script = "retry: {failures: 1}\noutputs: [/out]\nrun: |\n  [ $AVIFLOW_EPOCH = 2 ] || exit 3\n";
    world.ok(&["run", &document(&world, "again", &chat, script)]);
    let told: Vec<Value> = (0..3).map(|_| chat.next()).collect();
    let part = |name: &str| told.iter().map(|t| t[name].clone()).collect::<Vec<_>>();
    assert_eq!(part("event"), ["started", "restarted", "succeeded"]);
    assert_eq!(part("attempt"), [1, 1, 1]);
    assert_eq!(part("phase"), ["Running", "Running", "Succeeded"]);
    for (name, value) in [("job", "again"), ("namespace", "default"), ("user", "ada"), ("queue", "default")] {
        assert_eq!(part(name), [value; 3], "{name}");
    }
    assert_eq!(told[0]["what"], "its rank is up");
    let reason = told[1]["reason"].as_str().expect("a reason");
    assert!(reason.starts_with("rank 0 (worker 0 on local-0) exited with 3"), "{reason}");
    assert!(reason.contains("the ranks start again where they are"), "{reason}");
    assert!(told[2]["next"].as_str().is_some_and(|next| next.contains("aviflow cp default/again:/out .")), "{told:?}");
    for message in &told {
        let text = message["text"].as_str().expect("a text");
        assert!(
            text.contains("default/again of ada") && text.contains(message["what"].as_str().expect("what")),
            "{text}"
        );
    }
    let ids: std::collections::BTreeSet<String> = part("id").iter().map(Value::to_string).collect();
    assert_eq!(ids.len(), 3, "{told:?}");

    let failing = world.run(&["run", &document(&world, "failing", &chat, "run: sh -c 'exit 3'\n")]);
    assert_eq!(failing.code, 3, "{failing:?}");
    assert_eq!(chat.events(1), ["started"]);
    let failed = chat.next();
    assert_eq!((&failed["event"], &failed["phase"]), (&"failed".into(), &"Failed".into()));
    assert!(failed["what"].as_str().is_some_and(|what| what.contains("exited with 3")), "{failed}");
    delivered(&world, 5);

    // Who has the address may write there.
    let shown = world.ok(&["show", "again", "--file"]);
    assert!(!shown.contains("geheim") && shown.contains("/***"), "{shown}");
    world.ok(&["rerun", "again"]);
    assert_eq!(chat.events(3), ["started", "restarted", "succeeded"], "a repetition tells the same chat");
}

#[test]
fn nothing_is_told_twice_after_the_control_plane_was_killed() {
    let world = World::with_pool(1, 1);
    let chat = Chat::new();
    let gate = world.gate("gate");
    let script = format!("run: |\n  echo begun in attempt $AVIFLOW_ATTEMPT\n  cat {}\n", gate.path().display());
    let mut run = world.follow(&["run", &document(&world, "long", &chat, &script)]);
    run.until("begun in attempt 1");
    world.ok(&["suspend", "long"]);
    world.ok(&["resume", "long"]);
    run.until("begun in attempt 2");
    assert_eq!(chat.events(3), ["started", "suspended", "restarted"]);
    // It knows by then what it told.
    let rows = || {
        let text = std::fs::read(world.home().join("notified.json")).unwrap_or_default();
        let cursor: Value = serde_json::from_slice(&text).unwrap_or_default();
        cursor["jobs"]["1"][0].as_u64().unwrap_or_default()
    };
    let all = world.json(&["show", "long"])["timeline"].as_array().expect("a timeline").len();
    let running = u64::try_from(all).expect("few");
    while rows() < running {
        world.ok(&["ls", "-q"]);
    }
    World::kill(world.server_pid());
    world.wait_gone();
    world.ok(&["server", "start"]);
    gate.open();
    assert_eq!(chat.events(1), ["succeeded"], "and nothing of what was told");
    delivered(&world, 1);
}

#[test]
fn an_address_that_leads_inside_is_refused() {
    let world = World::with_pool(1, 1);
    for (host, why) in [("169.254.169.254", "link-local"), ("[fe80::1]", "link-local"), ("0.0.0.0", "no address")] {
        let name = world.document(
            "job",
            &format!("name: a\nrun: 'true'\nnotify: [{{webhook: 'http://{host}/x', on: [failed]}}]\n"),
        );
        let said = world.run(&["plan", &name]);
        assert!(said.code == 2 && said.err.contains(why), "{host}: {said:?}");
    }
}
