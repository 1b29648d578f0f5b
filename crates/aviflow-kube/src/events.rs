//! What happened to a job, as Events of its object: `kubectl describe trainingjob` tells it.
//!
//! They are made of the job's timeline, which is in the store, by a task of their own: the engine's loop never waits
//! for them. Each has a name that follows from the entry it tells, so that one that is written again, as after a
//! restart, is refused by the apiserver and stands there once.
//!
//! Invariants: a state that stays writes nothing; of several entries of one attempt under one word only the first is
//! told; what is older than the apiserver keeps Events is not told again; a flood of changes is not told whole.

use crate::api::persist;
use crate::mirror::Jobs;
use crate::names;
use aviflow_core::health::News;
use aviflow_core::lifecycle::MomentKind;
use aviflow_core::model::JobId;
use aviflow_core::time::{Span, Time};
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::api::PostParams;
use kube::{Api, Client};
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// How long the apiserver keeps Events, unless it is told otherwise.
const KEPT: Span = Span::minutes(60);
/// Bytes of a note.
const NOTE: usize = 1024;
/// Who writes them.
const CONTROLLER: &str = "aviflow.dev/control-plane";

/// An object, as Events name it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Regarding {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its uid.
    pub uid: String,
}

/// What the task is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tell {
    /// A job has another phase or attempt than its object said.
    Changed(JobId, Regarding),
    /// An object was not taken: why, as a word and a sentence.
    NotTaken(Regarding, String, String),
    /// A job and its object are of no interest any more.
    Forget(JobId),
}

/// An entry of a job's timeline.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its place in the timeline; it never changes.
    pub row: u64,
    /// When.
    pub at: Time,
    /// The attempt.
    pub attempt: u32,
    /// What.
    pub kind: MomentKind,
    /// In a sentence.
    pub text: String,
}

/// The word of an entry and whether it is a warning; none of what is no change of state.
///
/// The words are stable: `docs/admin/kubernetes.md` lists them.
#[must_use]
pub fn word(kind: &MomentKind, attempt: u32) -> Option<(&'static str, bool)> {
    match kind {
        MomentKind::Submitted { .. } => Some(("Queued", false)),
        MomentKind::Placed { .. } => Some(("Starting", false)),
        MomentKind::Running { .. } if attempt > 1 => Some(("Restarted", false)),
        MomentKind::Running { .. } => Some(("Started", false)),
        MomentKind::Failing { .. } => Some(("AttemptFailed", true)),
        MomentKind::Found { news: News::Suspected(_) } => Some(("Suspected", true)),
        MomentKind::Found { news: News::Found(_) } => Some(("FaultFound", true)),
        MomentKind::Decided { .. } => Some(("FaultJudged", true)),
        MomentKind::Again { .. } => Some(("RestartedInPlace", false)),
        MomentKind::Kept { .. } => Some(("KeptOnFailure", true)),
        MomentKind::Quarantined { .. } => Some(("Quarantined", true)),
        MomentKind::NotQuarantined { .. } => Some(("QuarantineExceeded", true)),
        MomentKind::Refused { .. } => Some(("StartRefused", true)),
        MomentKind::NeverReady { .. } => Some(("NeverReady", true)),
        MomentKind::AskedToLeave { .. } => Some(("AskedToLeave", true)),
        MomentKind::Evicting { .. } => Some(("Preempting", false)),
        MomentKind::Suspending { .. } => Some(("Suspended", false)),
        MomentKind::QueuedAgain { .. } => Some(("QueuedAgain", false)),
        MomentKind::DependencyFailed { .. } => Some(("DependencyFailed", true)),
        MomentKind::TimeLimitReached => Some(("TimeLimitReached", true)),
        MomentKind::Succeeded => Some(("Succeeded", false)),
        MomentKind::Failed { .. } => Some(("Failed", true)),
        MomentKind::Cancelled { .. } => Some(("Cancelled", false)),
        MomentKind::FirstStep { .. }
        | MomentKind::CaughtUp { .. }
        | MomentKind::CheckpointComplete { .. }
        | MomentKind::CheckpointFailed { .. }
        | MomentKind::Facts { .. }
        | MomentKind::Claimed { .. }
        | MomentKind::Unclaimed { .. }
        | MomentKind::Spared
        | MomentKind::Held { .. }
        | MomentKind::Released { .. }
        | MomentKind::Updated { .. }
        | MomentKind::DependencyMet { .. }
        | MomentKind::Cancelling { .. }
        | MomentKind::RequeueAsked { .. }
        | MomentKind::Found { news: News::TakeStacks | News::Over(_) }
        // What happened before was told by whoever lost it.
        | MomentKind::Rebuilt => None,
    }
}

/// What was told of a job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Told {
    /// The last entry that was looked at.
    row: u64,
    /// The attempt and word that were told last.
    last: Option<(u32, &'static str)>,
}

/// The Events of entries after those that were told, oldest first.
fn of_entries(job: JobId, regarding: &Regarding, entries: &[Entry], told: &mut Told, now: Time) -> Vec<Event> {
    let mut events = Vec::new();
    for entry in entries.iter().filter(|e| e.row > told.row) {
        let Some((word, warning)) = word(&entry.kind, entry.attempt) else { continue };
        // A gang of which every worker says the same says it once.
        let again = told.last.replace((entry.attempt, word)) == Some((entry.attempt, word));
        if !again && now.since(entry.at) < KEPT {
            let name = format!("{}.{:x}.{:x}", regarding.name, job.0, entry.row);
            events.push(event(name, regarding, word, warning, &entry.text, entry.at));
        }
    }
    told.row = entries.last().map_or(told.row, |last| last.row.max(told.row));
    events
}

/// The Event of an object that was not taken. The same reason has the same name.
fn of_refusal(regarding: &Regarding, word: &str, why: &str, now: Time) -> Event {
    let mut hash = DefaultHasher::new();
    (&regarding.uid, word, why).hash(&mut hash);
    event(format!("{}.{:x}", regarding.name, hash.finish()), regarding, word, true, why, now)
}

fn event(name: String, regarding: &Regarding, word: &str, warning: bool, text: &str, at: Time) -> Event {
    let at = Timestamp::from_millisecond(at.0).unwrap_or(Timestamp::UNIX_EPOCH);
    let instance = std::env::var("AVIFLOW_POD").unwrap_or_else(|_| names::AVIFLOW.to_owned());
    let mut note = text.to_owned();
    if note.len() > NOTE {
        let end = (0..=NOTE - '…'.len_utf8()).rev().find(|i| note.is_char_boundary(*i)).unwrap_or(0);
        note.truncate(end);
        note.push('…');
    }
    Event {
        metadata: ObjectMeta {
            name: Some(name),
            namespace: Some(regarding.namespace.clone()),
            ..ObjectMeta::default()
        },
        event_time: Some(MicroTime(at)),
        reporting_controller: Some(CONTROLLER.to_owned()),
        reporting_instance: Some(instance),
        action: Some(word.to_owned()),
        reason: Some(word.to_owned()),
        regarding: Some(ObjectReference {
            api_version: Some(format!("{}/{}", names::GROUP, names::VERSION)),
            kind: Some("TrainingJob".to_owned()),
            namespace: Some(regarding.namespace.clone()),
            name: Some(regarding.name.clone()),
            uid: Some(regarding.uid.clone()),
            ..ObjectReference::default()
        }),
        type_: Some(if warning { "Warning" } else { "Normal" }.to_owned()),
        note: Some(note),
        ..Event::default()
    }
}

/// Changes whose Events may be written at once.
const BURST: u32 = 200;
/// The time after which one more may.
const EVERY: Duration = Duration::from_millis(100);

/// How many changes may be told. Events are for people who look at a job; where thousands of jobs come and go, the
/// apiserver has better to do, and what is not told here is in the timeline.
#[derive(Debug)]
struct Allowance {
    left: u32,
    since: Instant,
}

impl Allowance {
    fn new(now: Instant) -> Allowance {
        Allowance { left: BURST, since: now }
    }

    fn take(&mut self, now: Instant) -> bool {
        let more = u32::try_from(now.saturating_duration_since(self.since).as_millis() / EVERY.as_millis());
        let more = more.unwrap_or(u32::MAX);
        // A part of a pause counts for the next.
        self.since = if more < BURST { self.since + EVERY * more } else { now };
        self.left = self.left.saturating_add(more).min(BURST);
        let may = self.left > 0;
        self.left = self.left.saturating_sub(1);
        may
    }
}

/// Writes Events until nobody tells it anything any more.
pub(crate) async fn write(client: Client, jobs: Arc<dyn Jobs>, mut tells: mpsc::UnboundedReceiver<Tell>) {
    let mut told: BTreeMap<JobId, Told> = BTreeMap::new();
    let mut allowance = Allowance::new(Instant::now());
    while let Some(tell) = tells.recv().await {
        let now = aviflow_engine::driver::wall_clock();
        let events = match tell {
            Tell::Forget(job) => {
                told.remove(&job);
                continue;
            }
            _ if !allowance.take(Instant::now()) => continue,
            Tell::NotTaken(regarding, word, why) => vec![of_refusal(&regarding, &word, &why, now)],
            Tell::Changed(job, regarding) => {
                let known = told.entry(job).or_default();
                let (jobs, after) = (jobs.clone(), known.row);
                let entries = tokio::task::spawn_blocking(move || jobs.timeline(job, after)).await;
                of_entries(job, &regarding, &entries.unwrap_or_default(), known, now)
            }
        };
        for event in events {
            let namespace = event.metadata.namespace.clone().unwrap_or_default();
            let api = Api::<Event>::namespaced(client.clone(), &namespace);
            // What is refused for good is there already, or its namespace is going.
            let _ = persist(|| async { api.create(&PostParams::default(), &event).await.map(|_| ()) }).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(row: u64, attempt: u32, kind: MomentKind) -> Entry {
        Entry { row, at: Time(i64::try_from(row).unwrap_or(0) * 1000), attempt, kind, text: format!("entry {row}") }
    }

    fn regarding() -> Regarding {
        Regarding { namespace: "nlp".into(), name: "train".into(), uid: "u".into() }
    }

    fn words(entries: &[Entry], told: &mut Told, now: Time) -> Vec<String> {
        let events = of_entries(JobId(26), &regarding(), entries, told, now);
        events.iter().map(|e| format!("{} {}", e.metadata.name.clone().unwrap(), e.reason.clone().unwrap())).collect()
    }

    #[test]
    fn each_change_is_told_once() {
        let refused = |worker| MomentKind::Refused { worker, node: aviflow_core::model::NodeId(0), reason: "x".into() };
        let entries = [
            entry(1, 0, MomentKind::Submitted { by: "ann".into() }),
            entry(2, 1, MomentKind::Placed { nodes: Vec::new(), gpus: 2 }),
            entry(3, 1, refused(0)),
            entry(4, 1, refused(1)),
            entry(5, 1, MomentKind::FirstStep { step: 1 }),
            entry(6, 2, MomentKind::Placed { nodes: Vec::new(), gpus: 2 }),
            entry(7, 2, refused(0)),
            entry(26, 3, MomentKind::Running { ranks: 1 }),
        ];
        let mut told = Told::default();
        let now = Time(30_000);
        let first = words(&entries[..4], &mut told, now);
        assert_eq!(first, ["train.1a.1 Queued", "train.1a.2 Starting", "train.1a.3 StartRefused"]);
        // What was read before is no news, nor is a second worker that says the same.
        let rest = words(&entries, &mut told, now);
        assert_eq!(rest, ["train.1a.6 Starting", "train.1a.7 StartRefused", "train.1a.1a Restarted"]);
        assert_eq!(words(&entries, &mut told, now), [""; 0]);
        // One that knows nothing, as after a restart, gives them the same names.
        let again = words(&entries, &mut Told::default(), now);
        assert_eq!(again, [first, rest].concat());
        let late = Time(KEPT.0 + 10_000);
        assert_eq!(words(&entries, &mut Told::default(), late), ["train.1a.1a Restarted"], "the others are forgotten");
    }

    #[test]
    fn a_flood_of_changes_is_not_told_whole() {
        let mut now = Instant::now();
        let mut allowance = Allowance::new(now);
        let mut told = |now: Instant, changes: u32| (0..changes).filter(|_| allowance.take(now)).count();
        assert_eq!(told(now, 1000), 200);
        assert_eq!(told(now, 10), 0);
        now += Duration::from_millis(350);
        assert_eq!(told(now, 10), 3);
        now += Duration::from_millis(50);
        assert_eq!(told(now, 10), 1, "parts of a pause add up");
        now += Duration::from_secs(3600);
        assert_eq!(told(now, 1000), 200);
        now += Duration::from_millis(100);
        assert_eq!(told(now, 10), 1, "a long silence saves nothing up");
    }

    #[test]
    fn an_event_keeps_the_apiservers_bounds() {
        let event = of_refusal(&regarding(), "NoSuchImage", &"ü".repeat(2000), Time(0));
        let note = event.note.unwrap();
        assert!(note.len() <= NOTE && note.ends_with("ü…"), "{}", note.len());
        let same = of_refusal(&regarding(), "NoSuchImage", &"ü".repeat(2000), Time(9));
        assert_eq!(same.metadata.name, event.metadata.name);
        assert_ne!(of_refusal(&regarding(), "NoSuchImage", "else", Time(0)).metadata.name, event.metadata.name);
    }
}
