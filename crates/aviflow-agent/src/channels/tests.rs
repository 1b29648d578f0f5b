use super::*;
use crate::protocol::channel::Size;
use crate::protocol::{ChannelInput as In, ChannelOutput as Out};
use std::net::TcpListener;

/// Channels with what came out of them.
#[derive(Default)]
struct World {
    channels: Channels,
    said: Vec<Out>,
}

impl World {
    /// What was said so far, as text.
    fn text(&self) -> String {
        let data = self.said.iter().filter_map(|out| match out {
            Out::Data(text) => Some(STANDARD.decode(text).expect("base64")),
            _ => None,
        });
        String::from_utf8_lossy(&data.flatten().collect::<Vec<u8>>()).into_owned()
    }

    fn put(&mut self, input: In) {
        let said = &mut self.said;
        self.channels.put(1, input, |_, out| said.push(out));
    }

    fn say(&mut self, text: &str) {
        self.put(In::Data(STANDARD.encode(text)));
    }

    /// One turn of the agent's loop.
    fn turn(&mut self) {
        let mut poll = Poll::default();
        self.channels.watch(&mut poll, false);
        poll.wait(Some(5));
        let said = &mut self.said;
        self.channels.turn(&poll, |_, out| said.push(out));
    }

    fn until(&mut self, what: impl Fn(&World) -> bool) {
        while !what(self) {
            self.turn();
        }
    }

    fn terminal(&mut self, script: &str) -> Pid {
        let argv = ["sh", "-c", script].map(str::to_owned);
        let environment = std::env::vars_os().collect();
        let size = Size { columns: 90, rows: 30 };
        let (pid, shown) =
            crate::process::start_on_terminal(&argv, std::path::Path::new("/"), &environment, size).expect("started");
        let said = &mut self.said;
        self.channels.add_terminal(1, pid, shown, |_, out| said.push(out));
        pid
    }

    fn reap(&mut self, pid: Pid) {
        let exit = sys::reap_one(pid).expect("an end");
        let said = &mut self.said;
        assert!(self.channels.reaped(pid, exit, |_, out| said.push(out)));
    }

    fn port(&mut self, port: u16) {
        let said = &mut self.said;
        self.channels.add_port(1, port, |_, out| said.push(out));
    }
}

#[test]
fn a_terminal_has_a_size_keys_and_an_exit_code() {
    let mut world = World::default();
    let pid = world.terminal(
        "stty size; read line; echo got $line; trap 'stty size; exit 7' WINCH; echo ready; while :; do read x; done",
    );
    assert_eq!(world.channels.terminals(), 1);
    world.until(|w| w.text().contains("30 90"));
    world.say("hello\r");
    world.until(|w| w.text().contains("got hello") && w.text().contains("ready"));
    world.put(In::Size(Size { columns: 50, rows: 10 }));
    // The shell looks at its signals between two lines.
    world.say("\r");
    world.until(|w| w.text().contains("10 50"));
    world.reap(pid);
    world.until(|w| w.channels.open.is_empty());
    assert_eq!(world.said.first(), Some(&Out::Opened));
    assert_eq!(world.said.last(), Some(&Out::Exit(7)));
    assert_eq!(world.channels.terminals(), 0);
}

#[test]
fn ctrl_c_interrupts_and_what_is_closed_is_hung_up_on() {
    let mut world = World::default();
    let pid = world.terminal("trap 'echo interrupted' INT; echo ready; while :; do read x; done");
    world.until(|w| w.text().contains("ready"));
    world.say("\x03");
    world.until(|w| w.text().contains("interrupted"));
    world.put(In::Close);
    assert!(world.channels.open.is_empty());
    assert_eq!(sys::reap_one(pid).and_then(|exit| exit.signal), Some(libc::SIGHUP));
}

#[test]
fn what_nobody_has_room_for_stays_where_it_is() {
    let mut world = World::default();
    let pid = world.terminal("head -c 1000000 /dev/zero | tr '\\0' x");
    world.until(|w| w.channels.open[&1].room == 0);
    assert_eq!(world.text().len(), WINDOW);
    for _ in 0..3 {
        world.turn();
    }
    assert_eq!(world.text().len(), WINDOW, "no more than there is room for");
    while world.text().len() < 1_000_000 {
        world.put(In::Room(WINDOW));
        world.turn();
    }
    world.reap(pid);
    assert_eq!(world.said.last(), Some(&Out::Exit(0)));
}

#[test]
fn a_connection_is_carried_and_half_closed() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let mut world = World::default();
    world.port(listener.local_addr().expect("an address").port());
    let (mut other, _) = listener.accept().expect("a connection");
    world.until(|w| w.said == [Out::Opened]);
    world.say("question");
    world.put(In::End);
    let mut question = String::new();
    other.read_to_string(&mut question).expect("the question, and its end");
    assert_eq!(question, "question");
    other.write_all(b"answer").expect("written");
    drop(other);
    world.until(|w| w.channels.open.is_empty());
    let room = Out::Room("question".len());
    let answer = Out::Data(STANDARD.encode("answer"));
    assert_eq!(world.said, [Out::Opened, room, answer, Out::End, Out::Exit(0)]);
}

#[test]
fn localhost_may_be_of_ipv6() {
    // Where there is no IPv6, there is nothing to connect to.
    let Ok(listener) = TcpListener::bind("[::1]:0") else { return };
    let mut world = World::default();
    world.port(listener.local_addr().expect("an address").port());
    world.until(|w| !w.said.is_empty());
    assert_eq!(world.said, [Out::Opened]);
}

#[test]
fn a_port_on_which_nobody_listens_is_explained() {
    let port = TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("an address").port();
    let mut world = World::default();
    world.port(port);
    world.until(|w| !w.said.is_empty());
    let why = format!("nothing listens on port {port} there: start the program first, and have it listen on localhost");
    assert_eq!(world.said, [Out::Failed(why)]);
    assert!(world.channels.open.is_empty());
}

#[test]
fn what_is_not_as_it_should_be_ends_the_channel() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port();
    for (bad, why) in [("?".to_owned(), "no base64"), (STANDARD.encode(vec![0; WINDOW + 1]), "room for")] {
        let mut world = World::default();
        world.port(port);
        world.until(|w| w.said == [Out::Opened]);
        world.put(In::Data(bad));
        assert!(matches!(world.said.last(), Some(Out::Failed(said)) if said.contains(why)), "{:?}", world.said);
        // What comes after the end of a channel is passed over.
        world.say("x");
        assert_eq!((world.said.len(), world.channels.open.len()), (2, 0));
    }
}

#[test]
fn an_answer_is_told_as_fast_as_it_is_taken() {
    let mut world = World::default();
    world.channels.add_answer(1, vec![b'x'; WINDOW + 10]);
    let said = &mut world.said;
    world.channels.answer(|_, out| said.push(out));
    assert_eq!(world.text().len(), WINDOW);
    world.put(In::Room(100));
    assert_eq!(world.text().len(), WINDOW + 10);
    assert_eq!(world.said.last(), Some(&Out::Exit(0)));
}

#[test]
fn all_have_their_turn_and_none_says_too_much() {
    let mut channels = Channels::default();
    for id in 0..10 {
        channels.add_answer(id, vec![b'x'; WINDOW]);
    }
    let mut turns = Vec::new();
    while channels.contains(9) {
        let mut said = Vec::new();
        channels.answer(|id, out| {
            if let Out::Data(_) = out
                && said.last() != Some(&id)
            {
                said.push(id);
            }
        });
        turns.push(said);
    }
    assert_eq!(turns, [vec![0, 1, 2, 3], vec![4, 5, 6, 7], vec![8, 9]]);
}

#[test]
fn what_is_open_when_the_ranks_end_is_told_so() {
    let mut world = World::default();
    let pid = world.terminal("echo ready; cat");
    world.until(|w| w.text().contains("ready"));
    let said = &mut world.said;
    world.channels.close(|_, out| said.push(out));
    assert_eq!(world.said.last(), Some(&Out::Failed(OVER.to_owned())));
    assert_eq!(sys::reap_one(pid).and_then(|exit| exit.signal), Some(libc::SIGHUP));
}
