use super::*;
use serde::de::DeserializeOwned;

#[test]
fn an_end_comes_over_the_wire() {
    let end =
        RankEnd { code: 137, signal: Some(9), stopping: true, before_ms: 3, last_lines: vec!["x".into()], fault: None };
    let ended = Ended {
        epoch: 1,
        at_unix_ms: 2,
        ranks: [(12, end)].into(),
        reason: None,
        last_step: Some(4),
        log_end: 5,
        port: 0,
    };
    let message = FromAgent::Event { seq: 1, ago_ms: 0, epoch: 1, event: Event::Ended { ended: ended.clone() } };
    let line = wire::line(&message);
    assert_eq!(wire::parse::<FromAgent>(line.trim_ascii_end()), Ok(message));
    let file = serde_json::to_vec(&ended).unwrap_or_default();
    assert_eq!(serde_json::from_slice::<Ended>(&file).ok(), Some(ended));
}

/// Lines as version 1 of the protocol had them first.
const OLD_AGENT: [&str; 6] = [
    r#"{"type":"hello","protocol":1,"jobId":7,"attempt":2,"worker":1,"token":"t","pid":9,"epoch":0,"host":"10.0.0.2","port":20000,"up":false,"log":[0,12]}"#,
    r#"{"type":"event","seq":1,"agoMs":5,"epoch":1,"event":{"event":"up"}}"#,
    r#"{"type":"progress","agoMs":5,"epoch":1,"rank":3,"progress":{"step":4,"values":{"loss":1.5}}}"#,
    r#"{"type":"log","offset":0,"text":"1 0 o x\n"}"#,
    r#"{"type":"exec","id":3,"output":{"exit":0}}"#,
    r#"{"type":"pong"}"#,
];
const OLD_CONTROL: [&str; 10] = [
    r#"{"type":"welcome","term":3,"logHave":12}"#,
    r#"{"type":"unknown","reason":"over"}"#,
    r#"{"type":"start","term":3,"epoch":1,"masterHost":"10.0.0.1","masterPort":20000,"bestStep":null}"#,
    r#"{"type":"stop","term":3,"graceMs":30000,"reason":"preempted"}"#,
    r#"{"type":"ack","seq":4}"#,
    r#"{"type":"logAck","offset":12}"#,
    r#"{"type":"exec","id":3,"rank":null,"argv":["ls"],"stdin":""}"#,
    r#"{"type":"execKill","id":3}"#,
    r#"{"type":"release"}"#,
    r#"{"type":"ping"}"#,
];

/// A line, and the same with a field of a version to come.
fn both<T: DeserializeOwned>(line: &str) -> [T; 2] {
    let newer = format!("{},\"later\":[1]}}", &line[..line.len() - 1]);
    [line, &newer].map(|line| wire::parse(line.as_bytes()).expect(line))
}

#[test]
fn earlier_versions_are_understood_and_later_ones_too() {
    for line in OLD_AGENT {
        let [one, other] = both::<FromAgent>(line);
        assert_eq!(one, other);
        match one {
            FromAgent::Hello { peer_port, .. } => assert_eq!(peer_port, 0),
            FromAgent::Pong { n } => assert_eq!(n, 0),
            FromAgent::Event { .. }
            | FromAgent::Progress { .. }
            | FromAgent::Log { .. }
            | FromAgent::Exec { .. }
            | FromAgent::Channel { .. }
            | FromAgent::Sign { .. } => {}
        }
    }
    for line in OLD_CONTROL {
        let [one, other] = both::<ToAgent>(line);
        assert_eq!(one, other);
        match one {
            ToAgent::Welcome { ping_ms, .. } => assert_eq!(ping_ms, 0),
            ToAgent::Start { peers, .. } => assert_eq!(peers, []),
            ToAgent::Ping { n, heard } => assert_eq!((n, heard), (0, 0)),
            _ => {}
        }
    }
}

#[test]
fn a_control_plane_understands_its_own_version_and_those_before() {
    let oldest = PROTOCOL.saturating_sub(OLDER).max(1);
    let understood: Vec<u32> = (0..PROTOCOL + 5).filter(|version| understood(*version)).collect();
    assert_eq!(understood, (oldest..=PROTOCOL).collect::<Vec<_>>());
}

#[test]
fn a_refusal_is_passed_over_by_who_does_not_know_it() {
    let refused = ToAgent::Refused { reason: "another version".into() };
    let line = wire::line(&refused);
    assert_eq!(String::from_utf8_lossy(&line), "{\"type\":\"refused\",\"reason\":\"another version\"}\n");
    assert_eq!(wire::parse::<ToAgent>(line.trim_ascii_end()), Ok(refused));
    assert!(wire::parse::<Old>(line.trim_ascii_end()).is_err(), "an agent drops what it does not understand");
}

/// What an earlier version takes a ping, a pong, a welcome and a start for.
#[derive(Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", tag = "type")]
enum Old {
    #[serde(rename_all = "camelCase")]
    Welcome {
        term: u64,
        log_have: u64,
    },
    #[serde(rename_all = "camelCase")]
    Start {
        term: u64,
        epoch: u32,
        master_host: String,
        master_port: u16,
        best_step: Option<u64>,
    },
    Ping,
    Pong,
}

#[test]
fn earlier_versions_understand_this_one() {
    let understood = |line: Vec<u8>| wire::parse::<Old>(line.trim_ascii_end());
    let welcome = ToAgent::Welcome { term: 3, log_have: 12, ping_ms: 5000 };
    assert_eq!(understood(wire::line(&welcome)), Ok(Old::Welcome { term: 3, log_have: 12 }));
    assert_eq!(understood(wire::line(&ToAgent::Ping { n: 2, heard: 1 })), Ok(Old::Ping));
    assert_eq!(understood(wire::line(&FromAgent::Pong { n: 2 })), Ok(Old::Pong));
    let peers = vec![(0, SocketAddr::from(([10, 0, 0, 1], 4711)))];
    let (master_host, master_port, best_step) = ("10.0.0.1".to_owned(), 20_000, None);
    let start = ToAgent::Start { term: 3, epoch: 1, master_host: master_host.clone(), master_port, best_step, peers };
    let line = wire::line(&start);
    assert!(String::from_utf8_lossy(&line).contains(r#""peers":[[0,"10.0.0.1:4711"]]"#));
    assert_eq!(wire::parse::<ToAgent>(line.trim_ascii_end()), Ok(start));
    assert_eq!(understood(line), Ok(Old::Start { term: 3, epoch: 1, master_host, master_port, best_step }));
}

/// Lines as version 3 of the protocol had them first.
const CHANNEL_AGENT: [&str; 6] = [
    r#"{"type":"channel","id":4,"output":"opened"}"#,
    r#"{"type":"channel","id":4,"output":{"data":"aGk="}}"#,
    r#"{"type":"channel","id":4,"output":"end"}"#,
    r#"{"type":"channel","id":4,"output":{"room":2}}"#,
    r#"{"type":"channel","id":4,"output":{"exit":0}}"#,
    r#"{"type":"channel","id":4,"output":{"failed":"gone"}}"#,
];
const CHANNEL_CONTROL: [&str; 8] = [
    r#"{"type":"open","id":4,"rank":1,"channel":{"kind":"terminal","argv":["sh"],"size":{"columns":80,"rows":24},"term":"xterm"}}"#,
    r#"{"type":"open","id":4,"rank":null,"channel":{"kind":"port","port":6006}}"#,
    r#"{"type":"open","id":4,"rank":null,"channel":{"kind":"stacks","rank":3}}"#,
    r#"{"type":"put","id":4,"input":{"data":"aGk="}}"#,
    r#"{"type":"put","id":4,"input":"end"}"#,
    r#"{"type":"put","id":4,"input":{"size":{"columns":80,"rows":24}}}"#,
    r#"{"type":"put","id":4,"input":{"room":2}}"#,
    r#"{"type":"put","id":4,"input":"close"}"#,
];

#[test]
fn channels_are_said_as_they_were_first() {
    for line in CHANNEL_AGENT {
        let [one, other] = both::<FromAgent>(line);
        assert_eq!(one, other);
        assert_eq!(String::from_utf8_lossy(&wire::line(&one)).trim_end(), line);
    }
    for line in CHANNEL_CONTROL {
        let [one, other] = both::<ToAgent>(line);
        assert_eq!(one, other);
        assert_eq!(String::from_utf8_lossy(&wire::line(&one)).trim_end(), line);
        assert!(wire::parse::<Old>(line.as_bytes()).is_err(), "an agent drops what it does not understand");
    }
}
