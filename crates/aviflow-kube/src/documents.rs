//! Objects of queues and pools, and the control plane's own documents, say the same.
//!
//! What `kubectl` writes is applied like a file of `aviflow apply`; what comes through the API is written into the
//! object. Which of the two is heard says [`rule`]. A deletion waits in the object until the control plane has let the
//! document go: a finalizer holds it, so that one which happens while nobody watches is not missed.
//!
//! Everything is done by one task, one thing after the other: documents are few, and change seldom. What it holds of
//! an object may be old; so every write to a spec names the version that it goes by, and is left to the next look
//! where that is not the newest.

pub mod read;
pub mod rule;
pub mod standing;

use crate::api::{Refused, insist, persist, watch};
use crate::names;
use crate::object::{condition, conditions};
use aviflow_api::admin::PoolSpec;
use aviflow_api::crd::{Condition, ConditionType, PoolStatus, QueueStatus};
use aviflow_api::file::Priorities;
use aviflow_engine::driver::{Handle, View};
use aviflow_engine::engine::{Answer, Input, QueueJobs};
use aviflow_engine::ports::ActKind;
use futures_util::StreamExt;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::core::DynamicObject;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client};
use read::{Document, Kind};
use rule::{Agreed, Side, Step};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often documents and figures are looked at, at most.
const LOOK: Duration = Duration::from_secs(1);
/// How often an object is written of which only figures changed.
const FIGURES: Duration = Duration::from_secs(5);
/// The pause before what was refused is tried again without a reason to.
const AGAIN: Duration = Duration::from_secs(20);

/// Rounds of one look, of which each does something: more than a tree of queues is deep.
const ROUNDS: usize = 100;

/// The journal of what people did. Calls wait for the disk.
pub trait Journal: Send + Sync + 'static {
    /// The last row about one thing, or of all; none where there is none, or it cannot be read.
    fn last(&self, of: Option<(ActKind, &str)>) -> Option<u64>;
}

/// A queue or pool.
type Name = (Kind, String);

/// What is known of an object.
#[derive(Clone, Debug)]
struct Known {
    object: DynamicObject,
    /// What its spec says.
    document: Result<Document, String>,
    /// Why it is not as it should be, as a word and a sentence, and since when.
    refused: Option<(&'static str, String, Instant)>,
    /// The conditions and figures as they were written last, and when.
    written: Option<(Value, Instant)>,
}

impl Known {
    fn generation(&self) -> i64 {
        self.object.metadata.generation.unwrap_or_default()
    }

    fn deleting(&self) -> bool {
        self.object.metadata.deletion_timestamp.is_some()
    }

    fn version(&self) -> u64 {
        self.object.metadata.resource_version.as_ref().and_then(|v| v.parse().ok()).unwrap_or_default()
    }

    fn marked(&self) -> bool {
        self.object.metadata.finalizers.iter().flatten().any(|f| f == names::DOCUMENT_FINALIZER)
    }
}

/// The control plane's side.
struct Ours {
    documents: BTreeMap<Name, Document>,
    queues: BTreeMap<String, QueueStatus>,
    pools: BTreeMap<String, PoolStatus>,
}

fn ours(view: &View<'_>) -> Ours {
    let queues = view.snapshot.queues.values().map(|q| ((Kind::Queue, q.name.clone()), Document::Queue(q.clone())));
    let pools = view.snapshot.pools.values().map(|p| ((Kind::Pool, p.name.clone()), Document::Pool(p.clone())));
    Ours {
        documents: queues.chain(pools).collect(),
        queues: standing::queues(view.snapshot, view.now),
        pools: standing::pools(view.snapshot),
    }
}

/// Keeps objects and documents alike until it is dropped.
pub struct Documents {
    client: Client,
    engine: Handle,
    journal: Arc<dyn Journal>,
    priorities: Priorities,
    objects: BTreeMap<Name, Known>,
    /// Objects that could not be made, and when.
    unmade: BTreeMap<Name, Instant>,
}

impl Documents {
    /// Runs until the task is aborted.
    pub async fn run(client: Client, engine: Handle, journal: Arc<dyn Journal>, priorities: Priorities) {
        let watched = |kind: Kind| watch(Api::<DynamicObject>::all_with(client.clone(), &kind.resource()), None);
        let (mut queues, mut pools) = (watched(Kind::Queue), watched(Kind::Pool));
        let mut lists: BTreeMap<Kind, BTreeSet<String>> = BTreeMap::new();
        let mut listed = BTreeSet::new();
        let mut changed = engine.changed();
        let mut again = tokio::time::interval(AGAIN);
        let mut documents = Documents {
            client: client.clone(),
            engine,
            journal,
            priorities,
            objects: BTreeMap::new(),
            unmade: BTreeMap::new(),
        };
        loop {
            let (kind, event) = tokio::select! {
                Some(event) = queues.next() => (Kind::Queue, Some(event)),
                Some(event) = pools.next() => (Kind::Pool, Some(event)),
                _ = again.tick() => (Kind::Queue, None),
                Ok(()) = changed.changed() => {
                    // Many turns may follow each other: one look serves all that came meanwhile.
                    tokio::time::sleep(LOOK).await;
                    changed.mark_unchanged();
                    (Kind::Queue, None)
                }
            };
            if let Some(event) = event
                && !documents.event(kind, event, lists.entry(kind).or_default(), &mut listed)
            {
                continue;
            }
            // Before all are known, one that is missing would be made.
            if listed.len() == 2 {
                documents.look().await;
            }
        }
    }

    /// Takes what the watch says; whether it is worth a look.
    fn event(
        &mut self,
        kind: Kind,
        event: watcher::Result<Event<DynamicObject>>,
        list: &mut BTreeSet<String>,
        listed: &mut BTreeSet<Kind>,
    ) -> bool {
        match event {
            Ok(Event::Init) => list.clear(),
            Ok(Event::InitApply(object)) => {
                list.extend(object.metadata.name.clone());
                self.seen(kind, object);
            }
            Ok(Event::InitDone) => {
                self.objects.retain(|(k, name), _| *k != kind || list.contains(name));
                listed.insert(kind);
                return true;
            }
            Ok(Event::Apply(object)) => {
                self.seen(kind, object);
                return true;
            }
            Ok(Event::Delete(object)) => {
                self.objects.remove(&(kind, object.metadata.name.unwrap_or_default()));
                return true;
            }
            // The watch begins again by itself, after a pause.
            Err(_) => {}
        }
        false
    }

    fn seen(&mut self, kind: Kind, object: DynamicObject) {
        let Some(name) = object.metadata.name.clone() else { return };
        let document = read::document(kind, &object, &self.priorities);
        let known = Known { object, document, refused: None, written: None };
        let before =
            self.objects.get(&(kind, name.clone())).filter(|b| b.object.metadata.uid == known.object.metadata.uid);
        let known = match before {
            // An answer to a write may be here before the watch tells what was before it.
            Some(before) if before.version() > known.version() => return,
            Some(before) => Known {
                refused: before.refused.clone().filter(|_| before.generation() == known.generation()),
                written: before.written.clone(),
                ..known
            },
            None => known,
        };
        self.objects.insert((kind, name), known);
    }

    /// Goes through all names until nothing more follows, and shows how things stand.
    async fn look(&mut self) {
        for _ in 0..ROUNDS {
            // Before the documents: what was done since is then rather taken for new.
            let Some(row) = self.asked(|journal, _| Some(journal.last(None).unwrap_or_default())).await else { return };
            let Some(ours) = self.asked(|_, engine| engine.read(ours).ok()).await else { return };
            let mut moved = false;
            for name in self.order(&ours) {
                moved |= self.one(&name, &ours, row).await;
            }
            if !moved {
                return self.show(&ours).await;
            }
            // What became of one may be what another was refused for.
            self.objects.values_mut().for_each(|known| known.refused = None);
        }
    }

    async fn asked<T: Send + 'static>(
        &self,
        ask: impl FnOnce(&dyn Journal, &Handle) -> Option<T> + Send + 'static,
    ) -> Option<T> {
        let (journal, engine) = (self.journal.clone(), self.engine.clone());
        tokio::task::spawn_blocking(move || ask(&*journal, &engine)).await.ok().flatten()
    }

    /// All names: parents before their children.
    fn order(&self, ours: &Ours) -> Vec<Name> {
        let parent = |name: &str| match &self.objects.get(&(Kind::Queue, name.to_owned()))?.document {
            Ok(Document::Queue(queue)) => queue.parent.clone(),
            _ => None,
        };
        let depth = |name: &Name| {
            let (mut depth, mut at) = (0, Some(name.1.clone()));
            while let Some(above) = at.as_deref().and_then(parent).filter(|_| name.0 == Kind::Queue && depth < 64) {
                depth += 1;
                at = Some(above);
            }
            depth
        };
        let names: BTreeSet<&Name> = self.objects.keys().chain(ours.documents.keys()).collect();
        let mut names: Vec<Name> = names.into_iter().cloned().collect();
        names.sort_by_key(depth);
        // Who is deleted goes before those above it.
        let deleting = |name: &Name| self.objects.get(name).is_some_and(Known::deleting);
        let (mut last, first): (Vec<Name>, Vec<Name>) = names.into_iter().partition(deleting);
        last.reverse();
        first.into_iter().chain(last).collect()
    }

    /// Does what is next for one name; whether anything changed by it.
    async fn one(&mut self, name: &Name, ours: &Ours, row: u64) -> bool {
        let mine = ours.documents.get(name);
        let Some(known) = self.objects.get(name).cloned() else {
            return match mine {
                Some(mine) => self.make(name, mine, row).await,
                None => false,
            };
        };
        if known.refused.as_ref().is_some_and(|(_, _, at)| at.elapsed() < AGAIN) {
            return false;
        }
        let document = match (&known.document, known.deleting()) {
            (Ok(document), _) => document.clone(),
            // Whatever it says, it goes.
            (Err(_), true) => match mine {
                Some(mine) => mine.clone(),
                None => return self.release(name, &known).await,
            },
            (Err(why), false) => return self.refuse(name, "Invalid", why.clone()),
        };
        let agreed = known.object.metadata.annotations.as_ref().and_then(|a| Agreed::parse(a.get(names::AGREED)?));
        let side = |document| Side { document, generation: known.generation(), deleting: known.deleting(), agreed };
        let about = name.clone();
        let heard = if mine == Some(&document) {
            None
        } else {
            let kind = |kind| if kind == Kind::Queue { ActKind::Queue } else { ActKind::Pool };
            self.asked(move |journal, _| Some(journal.last(Some((kind(about.0), &about.1))))).await.flatten()
        };
        match rule::step(Some(side(&document)), mine, heard) {
            Step::Rest | Step::Make => false,
            Step::Mark => {
                let mark = Agreed { generation: known.generation(), row };
                self.patch(name, metadata(&known, Some(mark))).await
            }
            Step::Apply => {
                // First of all: from then on its deletion is not missed.
                if !known.marked() && !self.patch(name, metadata(&known, None)).await {
                    return false;
                }
                self.apply(name, document, read::writer(&known.object)).await
            }
            Step::Write => match mine {
                Some(mine) => self.write(name, known, mine, row).await,
                None => false,
            },
            Step::End => self.end(name).await,
            Step::Delete => self.delete(name, &known).await,
            Step::Release => self.release(name, &known).await,
        }
    }

    fn refuse(&mut self, name: &Name, word: &'static str, why: String) -> bool {
        if let Some(known) = self.objects.get_mut(name) {
            known.refused = Some((word, why, Instant::now()));
        }
        false
    }

    /// Asks the engine; whether it was done.
    async fn ask(&mut self, name: &Name, word: &'static str, input: Input) -> bool {
        match self.asked(move |_, engine| engine.ask(input).ok()).await {
            Some(Answer::Refused(refusal)) => self.refuse(name, word, refusal.to_string()),
            Some(_) => true,
            // It is stopping, or its store is away.
            None => false,
        }
    }

    async fn apply(&mut self, name: &Name, document: Document, by: String) -> bool {
        let input = match document {
            Document::Queue(queue) => Input::ApplyQueue { queue, by, reason: None },
            Document::Pool(pool) => Input::ApplyPool { pool, by, reason: None },
        };
        self.ask(name, "Refused", input).await
    }

    async fn end(&mut self, name: &Name) -> bool {
        let (by, reason) = ("the deletion of its object".to_owned(), None);
        let input = match name.0 {
            Kind::Queue => Input::DeleteQueue { name: name.1.clone(), jobs: QueueJobs::Refuse, by, reason },
            Kind::Pool => Input::DeletePool { name: name.1.clone(), by, reason },
        };
        self.ask(name, "NotDeleted", input).await
    }

    fn api(&self, kind: Kind) -> Api<DynamicObject> {
        Api::all_with(self.client.clone(), &kind.resource())
    }

    /// Takes the answer to a write; whether it was done.
    fn answered(&mut self, name: &Name, answer: Result<DynamicObject, Refused>) -> bool {
        match answer {
            Ok(object) => {
                self.seen(name.0, object);
                true
            }
            // It is gone, or newer than is known here: the watch tells.
            Err(refused) if refused.is_absent() || refused.is_conflict() => false,
            Err(refused) => self.refuse(name, "NotWritten", refused.message),
        }
    }

    async fn patch(&mut self, name: &Name, patch: Value) -> bool {
        let (api, patch) = (self.api(name.0), Patch::Merge(&patch));
        let answer = persist(|| async { api.patch(&name.1, &PatchParams::default(), &patch).await }).await;
        self.answered(name, answer)
    }

    async fn write(&mut self, name: &Name, known: Known, mine: &Document, row: u64) -> bool {
        let mut object = known.object.clone();
        object.metadata.managed_fields = None;
        let mark = Agreed { generation: known.generation() + 1, row };
        object.metadata.annotations.get_or_insert_default().insert(names::AGREED.to_owned(), mark.to_string());
        let before = object.data.get("spec").cloned().unwrap_or_default();
        object.data = json!({"spec": read::spec(mine, &before, &self.priorities)});
        let api = self.api(name.0);
        // It names the version that it replaces.
        let answer = persist(|| async { api.replace(&name.1, &PostParams::default(), &object).await }).await;
        self.answered(name, answer)
    }

    /// The object of a document that came through the API.
    async fn make(&mut self, name: &Name, mine: &Document, row: u64) -> bool {
        if self.unmade.get(name).is_some_and(|at| at.elapsed() < AGAIN) {
            return false;
        }
        let mut object = DynamicObject::new(&name.1, &name.0.resource());
        object.metadata.finalizers = Some(vec![names::DOCUMENT_FINALIZER.to_owned()]);
        let mark = Agreed { generation: 1, row };
        object.metadata.annotations = Some([(names::AGREED.to_owned(), mark.to_string())].into());
        object.data = json!({"spec": read::spec(mine, &Value::Null, &self.priorities)});
        let api = self.api(name.0);
        match persist(|| async { api.create(&PostParams::default(), &object).await }).await {
            Ok(object) => {
                self.unmade.remove(name);
                self.seen(name.0, object);
                true
            }
            Err(_) => {
                self.unmade.insert(name.clone(), Instant::now());
                false
            }
        }
    }

    /// Asks for the deletion of an object; the watch tells that it is on its way.
    async fn delete(&mut self, name: &Name, known: &Known) -> bool {
        let metadata = &known.object.metadata;
        let preconditions =
            Some(Preconditions { uid: metadata.uid.clone(), resource_version: metadata.resource_version.clone() });
        let how = DeleteParams { preconditions, ..DeleteParams::default() };
        let api = self.api(name.0);
        let answer = persist(|| async { api.delete(&name.1, &how).await.map(|_| ()) }).await;
        if let Err(refused) = answer.as_ref()
            && !refused.is_absent()
            && !refused.is_conflict()
        {
            self.refuse(name, "NotDeleted", refused.message.clone());
        }
        false
    }

    /// Lets an object go that is being deleted.
    async fn release(&mut self, name: &Name, known: &Known) -> bool {
        let finalizers = known.object.metadata.finalizers.iter().flatten();
        let others: Vec<&String> = finalizers.filter(|f| *f != names::DOCUMENT_FINALIZER).collect();
        let version = &known.object.metadata.resource_version;
        if known.marked() {
            self.patch(name, json!({"metadata": {"finalizers": others, "resourceVersion": version}})).await;
        }
        false
    }

    /// Writes how things stand into the objects that show otherwise.
    async fn show(&mut self, ours: &Ours) {
        for (name, known) in self.objects.clone() {
            let Some(status) = status_of(&name, &known, ours) else { continue };
            let before = known.object.data.get("status").cloned().unwrap_or(Value::Null);
            let last = known.written.as_ref().map_or(&before, |(last, _)| last);
            let standing = |status: &Value| json!([status["conditions"], status["observedGeneration"]]);
            let figures = standing(&status) == standing(last);
            let soon = known.written.as_ref().is_some_and(|(_, at)| at.elapsed() < FIGURES);
            if status == *last || figures && soon {
                continue;
            }
            let (api, how) = (self.api(name.0), PatchParams::default());
            let nulls = with_nulls(last, &status);
            let patch = Patch::Merge(json!({"status": nulls}));
            // What is refused for good is an object that is gone.
            let _ = insist(|| async { api.patch_status(&name.1, &how, &patch).await }).await;
            if let Some(known) = self.objects.get_mut(&name) {
                known.written = Some((status, Instant::now()));
            }
        }
    }
}

/// The finalizer beside those of others, and the mark.
fn metadata(known: &Known, mark: Option<Agreed>) -> Value {
    let finalizers: BTreeSet<&str> = known.object.metadata.finalizers.iter().flatten().map(String::as_str).collect();
    let finalizers: BTreeSet<&str> = finalizers.into_iter().chain([names::DOCUMENT_FINALIZER]).collect();
    let version = &known.object.metadata.resource_version;
    let mut metadata = json!({"finalizers": finalizers, "resourceVersion": version});
    if let Some(mark) = mark {
        metadata["annotations"] = json!({names::AGREED: mark.to_string()});
    }
    json!({"metadata": metadata})
}

/// A merge patch takes away only what it names.
fn with_nulls(before: &Value, after: &Value) -> Value {
    let (Some(old), Some(new)) = (before.as_object(), after.as_object()) else { return after.clone() };
    let mut out: serde_json::Map<String, Value> = old.keys().map(|key| (key.clone(), Value::Null)).collect();
    for (key, value) in new {
        let value = old.get(key).map_or_else(|| value.clone(), |before| with_nulls(before, value));
        out.insert(key.clone(), value);
    }
    Value::Object(out)
}

/// The status of an object.
fn status_of(name: &Name, known: &Known, ours: &Ours) -> Option<Value> {
    let now = k8s_openapi::jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    let before: Vec<Condition> = known
        .object
        .data
        .pointer("/status/conditions")
        .and_then(|c| serde_json::from_value(c.clone()).ok())
        .unwrap_or_default();
    let before = match &known.written {
        Some((status, _)) => serde_json::from_value(status["conditions"].clone()).unwrap_or(before),
        None => before,
    };
    let accepted = match &known.refused {
        Some((word, why, _)) => condition(ConditionType::Accepted, false, word, why, &now),
        None if known.document.as_ref().ok() == ours.documents.get(name) => {
            condition(ConditionType::Accepted, true, "Applied", "", &now)
        }
        // Its turn is yet to come.
        None => return None,
    };
    let generation = known.object.metadata.generation;
    let accepted = Condition { observed_generation: generation, ..accepted };
    let conditions = conditions(&before, vec![accepted]);
    let status = match name.0 {
        Kind::Queue => {
            let standing = ours.queues.get(&name.1).cloned().unwrap_or_default();
            serde_json::to_value(QueueStatus { observed_generation: generation, conditions, ..standing })
        }
        Kind::Pool => {
            let standing = ours.pools.get(&name.1).cloned().unwrap_or_default();
            serde_json::to_value(PoolStatus { observed_generation: generation, conditions, ..standing })
        }
    };
    status.ok()
}

/// Writes a pool's part for Kubernetes, which the control plane does not keep, into its object.
///
/// A document without the part leaves it as it is.
///
/// # Errors
/// With what the apiserver refuses, in its words.
pub async fn describe(client: &Client, pool: &PoolSpec) -> Result<(), String> {
    let Some(kubernetes) = &pool.kubernetes else { return Ok(()) };
    let api = Api::<DynamicObject>::all_with(client.clone(), &Kind::Pool.resource());
    loop {
        let written = match persist(|| async { api.get(&pool.name).await }).await {
            Err(refused) if refused.is_absent() => {
                let object = read::pool_object(pool);
                persist(|| async { api.create(&PostParams::default(), &object).await }).await
            }
            Err(refused) => Err(refused),
            Ok(mut object) => {
                object.metadata.managed_fields = None;
                let mut spec = read::nameless(pool);
                spec["kubernetes"] = serde_json::to_value(kubernetes).unwrap_or_default();
                object.data = json!({"spec": spec});
                persist(|| async { api.replace(&pool.name, &PostParams::default(), &object).await }).await
            }
        };
        match written {
            Ok(_) => return Ok(()),
            // Somebody wrote it meanwhile: once more, from what it is now.
            Err(refused) if refused.is_conflict() => {}
            Err(refused) => return Err(refused.message),
        }
    }
}
