use super::*;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};

/// What a receiver does with a request.
#[derive(Clone, Debug)]
pub enum Answer {
    Status(u16),
    Redirect(String),
    /// It reads, and says nothing for as long as it is asked.
    Silence,
}

/// A receiver on this machine; it gives each request the next of its answers, and the last one from then on.
pub fn receiver(answers: Vec<Answer>) -> (String, Receiver<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("listener");
    let address = format!("http://{}/hook/secret", listener.local_addr().expect("address"));
    let (say, said) = channel();
    std::thread::spawn(move || {
        let last = answers.last().cloned().expect("an answer");
        let mut answers = answers.into_iter().chain(std::iter::repeat(last));
        for stream in listener.incoming() {
            let Ok(stream) = stream else { return };
            let answer = answers.next().expect("one more");
            let say = say.clone();
            std::thread::spawn(move || serve(stream, &answer, &say));
        }
    });
    (address, said)
}

fn serve(mut stream: TcpStream, answer: &Answer, say: &Sender<String>) {
    let mut bytes = Vec::new();
    let mut chunk = [0; 4096];
    let body = loop {
        let n = stream.read(&mut chunk).unwrap_or(0);
        if n == 0 {
            return;
        }
        bytes.extend(&chunk[..n]);
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
        let length = head.lines().find_map(|l| l.to_ascii_lowercase().strip_prefix("content-length: ")?.parse().ok());
        if length.is_some_and(|length: usize| body.len() >= length) {
            break body.to_owned();
        }
    };
    let _ = say.send(body);
    let (status, more) = match answer {
        Answer::Status(status) => (*status, String::new()),
        Answer::Redirect(to) => (302, format!("location: {to}\r\n")),
        Answer::Silence => {
            // Until whoever asked has gone.
            let _ = stream.read(&mut chunk);
            return;
        }
    };
    let _ = write!(stream, "HTTP/1.1 {status} x\r\n{more}content-length: 0\r\nconnection: close\r\n\r\n");
}

type Ended = Receiver<(u64, Outcome, String)>;

fn sender(rules: Rules, patience: Patience) -> (Post, Ended, Arc<Outcomes>) {
    let (say, ended) = channel();
    let say = Mutex::new(say);
    let outcomes = Arc::new(Outcomes::default());
    let done: Done = Box::new(move |note, outcome, why| {
        let say = say.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = say.send((note.row.unwrap_or_default(), outcome, why.to_owned()));
    });
    (Post::new(rules, patience, outcomes.clone(), done), ended, outcomes)
}

/// Pauses that a test can wait for.
fn quick() -> Patience {
    Patience { pauses: [Duration::from_millis(1); 2], ..Patience::default() }
}

fn local() -> Rules {
    Rules { hosts: Vec::new(), loopback: true }
}

fn note(address: &str, row: u64) -> Note {
    Note { job: JobId(1), entry: 0, row: Some(row), address: address.to_owned(), body: format!("{{\"n\":{row}}}") }
}

/// Puts one note to a receiver with these answers; how it ended, and how often it was asked.
fn tried(rules: Rules, patience: Patience, answers: Vec<Answer>) -> (Outcome, String, usize) {
    let (address, said) = receiver(answers);
    let (post, ended, outcomes) = sender(rules, patience);
    post.put(note(&address, 1));
    let (_, outcome, why) = ended.recv().expect("an end");
    assert_eq!(outcomes.of(outcome), 1);
    assert!(!why.contains("secret"), "{why}");
    (outcome, why, said.try_iter().inspect(|body| assert_eq!(body, "{\"n\":1}")).count())
}

#[test]
fn what_is_not_taken_is_tried_again_and_then_given_up() {
    use Answer::Status;
    let check = |answers: Vec<Answer>, expected: (Outcome, &str, usize)| {
        let (outcome, why, asked) = tried(local(), quick(), answers.clone());
        assert_eq!((outcome, why.as_str(), asked), expected, "{answers:?}");
    };
    check(vec![Status(204)], (Outcome::Delivered, "", 1));
    check(vec![Status(500), Status(429), Status(200)], (Outcome::Delivered, "", 3));
    check(vec![Status(503)], (Outcome::Failed, "it answers 503 Service Unavailable", 3));
    check(vec![Status(404)], (Outcome::Failed, "it answers 404 Not Found", 1));
}

#[test]
fn a_receiver_that_is_silent_or_not_there_is_given_up() {
    let patience = Patience { answer: Duration::from_millis(100), ..quick() };
    let (outcome, why, asked) = tried(local(), patience, vec![Answer::Silence]);
    assert_eq!((outcome, asked), (Outcome::Failed, 3), "{why}");
    let gone = TcpListener::bind("127.0.0.1:0").expect("listener").local_addr().expect("address");
    let (post, ended, _) = sender(local(), quick());
    post.put(note(&format!("http://{gone}/secret"), 1));
    let (_, outcome, why) = ended.recv().expect("an end");
    assert!(outcome == Outcome::Failed && !why.contains("secret"), "{why}");
}

#[test]
fn nothing_is_posted_where_nothing_may_be() {
    let check = |rules: Rules, expected: Outcome, part: &str| {
        let (outcome, why, asked) = tried(rules.clone(), quick(), vec![Answer::Status(200)]);
        assert_eq!((outcome, asked), (expected, usize::from(expected == Outcome::Delivered)), "{rules:?}: {why}");
        assert!(why.contains(part), "{why}");
    };
    let rules = |hosts: &[&str], loopback| Rules { hosts: hosts.iter().map(|&h| h.to_owned()).collect(), loopback };
    check(rules(&[], false), Outcome::Refused, "127.0.0.1 is at 127.0.0.1: it is the control plane's own machine");
    check(rules(&["chat.example"], true), Outcome::Refused, "not among the hosts");
    check(rules(&["127.0.0.1"], false), Outcome::Delivered, "");
    // A name counts for what it leads to.
    let (post, ended, _) = sender(rules(&[], false), quick());
    for (row, address) in (0..).zip(["http://localhost:1/x", "http://169.254.169.254/x", "http://[fe80::1]/x"]) {
        post.put(note(address, row));
        let (_, outcome, why) = ended.recv().expect("an end");
        assert_eq!(outcome, Outcome::Refused, "{address}: {why}");
    }
    // Whoever is posted to leads nowhere else.
    let (target, reached) = receiver(vec![Answer::Status(200)]);
    let (outcome, why, asked) = tried(local(), quick(), vec![Answer::Redirect(target)]);
    assert_eq!((outcome, why.as_str(), asked), (Outcome::Failed, "it answers 302 Found", 1));
    assert_eq!(reached.try_iter().count(), 0);
}

#[test]
fn a_listed_host_is_itself_or_below_its_star() {
    let rules = Rules { hosts: vec!["Chat.example".into(), "*.corp.example".into()], loopback: false };
    for (host, listed) in [
        ("chat.example", true),
        ("CHAT.EXAMPLE", true),
        ("a.chat.example", false),
        ("a.b.corp.example", true),
        ("corp.example", false),
        ("evilcorp.example", false),
    ] {
        assert_eq!(rules.lists(host), listed, "{host}");
    }
}

#[test]
fn a_slow_receiver_drops_its_own_and_holds_up_no_other() {
    let (slow, began) = receiver(vec![Answer::Silence]);
    let (quickly, said) = receiver(vec![Answer::Status(200)]);
    // It says nothing for as long as this test takes.
    let (post, ended, outcomes) = sender(local(), Patience { room: 3, answer: Duration::from_secs(600), ..quick() });
    for row in 1..=5 {
        post.put(note(&slow, row));
    }
    began.recv().expect("the first is being posted");
    let dropped: Vec<_> =
        (0..2).map(|_| ended.recv().expect("an end")).map(|(row, outcome, _)| (row, outcome)).collect();
    assert_eq!(dropped, [(4, Outcome::Dropped), (5, Outcome::Dropped)]);
    for row in 11..=13 {
        post.put(note(&quickly, row));
    }
    let delivered: std::collections::BTreeSet<u64> = (0..3).map(|_| ended.recv().expect("an end").0).collect();
    assert_eq!(delivered, [11, 12, 13].into());
    let bodies: Vec<String> = said.try_iter().collect();
    assert_eq!(bodies, [11, 12, 13].map(|row| format!("{{\"n\":{row}}}")), "in their order");
    assert_eq!((outcomes.of(Outcome::Delivered), outcomes.of(Outcome::Dropped)), (3, 2));
    assert_eq!(began.try_iter().count(), 0, "one at a time");
}
