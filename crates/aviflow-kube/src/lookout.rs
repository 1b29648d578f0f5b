//! What nodes and pods do, as the watches tell it, and what that means for workers.

use crate::body::{Body, reference};
use crate::fate::{self, Claim, Fate};
use crate::fence::{witnessed, write_off_for};
use crate::names;
use crate::site::{Worker, heard};
use aviflow_core::lifecycle::WorkerEvent;
use aviflow_core::model::JobId;
use aviflow_core::time::Span;
use aviflow_engine::telemetry::StreamKey;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::runtime::watcher::{self, Event};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long kube-scheduler may take to see that what was in the way is gone.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long a volume claim may stay without a volume: one that is made for it may take its time.
const UNBOUND: Duration = Duration::from_secs(60);

impl Body {
    pub(crate) fn node_event(&mut self, event: watcher::Result<Event<Node>>, list: &mut BTreeSet<String>) {
        let name = |node: &Node| node.metadata.name.clone().unwrap_or_default();
        let said = match event {
            Ok(Event::Init) => {
                list.clear();
                Vec::new()
            }
            Ok(Event::InitApply(node)) => {
                list.insert(name(&node));
                self.kept_node(&node);
                self.books.node(&node)
            }
            Ok(Event::InitDone) => {
                self.listed.nodes.store(true, Ordering::Release);
                self.books.nodes_listed(list)
            }
            Ok(Event::Apply(node)) => {
                self.kept_node(&node);
                self.books.node(&node)
            }
            Ok(Event::Delete(node)) => self.books.node_deleted(&name(&node)),
            // The watch begins again by itself, after a pause.
            Err(_) => Vec::new(),
        };
        self.say(said);
        self.begin();
    }

    pub(crate) fn pod_event(&mut self, event: watcher::Result<Event<Pod>>, list: &mut BTreeSet<String>) {
        match event {
            Ok(Event::Init) => list.clear(),
            Ok(Event::InitApply(pod)) => {
                list.extend(pod.metadata.uid.clone());
                self.pod_seen(pod);
            }
            Ok(Event::InitDone) => {
                self.sightings.listed(list);
                self.exporters.listed(list);
                let said = self.books.pods_listed(list);
                self.say(said);
                self.listed.pods.store(true, Ordering::Release);
                self.pods_missing(list);
                self.begin();
            }
            Ok(Event::Apply(pod)) => self.pod_seen(pod),
            Ok(Event::Delete(pod)) => self.pod_deleted(&pod),
            Err(_) => {}
        }
    }

    pub(crate) fn pod_seen(&mut self, pod: Pod) {
        self.kept_pod(&pod, true);
        self.layer_pod(&pod);
        let live = |key: StreamKey| self.workers.lock().workers.contains_key(&key);
        self.sightings.pod(&pod, &self.books);
        self.exporters.pod(&pod);
        let said = self.books.pod(&pod, live);
        self.say(said);
        let Some(key) = names::worker(pod.metadata.labels.as_ref().unwrap_or(&BTreeMap::new())) else { return };
        let Some(here) = reference(&pod) else { return };
        let ours = self.workers.with(key, |worker| worker.own.pod.as_ref().map(|p| *p == here));
        match ours {
            // Not launched since the start, or left behind: the next reconciliation or launch tells.
            None => {
                let reconciled = self.workers.lock().awaited.as_ref().map(|a| a.contains(&(key.job, key.attempt)));
                if reconciled == Some(false) {
                    self.delete_stray(here);
                } else {
                    self.unseen.insert(key, pod);
                }
            }
            // It is being made, and the answer is on its way; or it is looked for.
            Some(None) => {
                let adopts = self.workers.with(key, |worker| {
                    let adopts = worker.own.heard;
                    if adopts {
                        worker.own.pod = Some(here);
                        worker.own.adrift = false;
                    }
                    adopts
                });
                if adopts == Some(true) {
                    self.workers.notify();
                    self.judge(key, &pod);
                } else {
                    self.unseen.insert(key, pod);
                }
            }
            Some(Some(true)) => self.judge(key, &pod),
            Some(Some(false)) => {}
        }
    }

    /// What a worker's pod says of the worker.
    fn judge(&mut self, key: StreamKey, pod: &Pod) {
        let first = |body: &Body| {
            body.workers.with(key, |w| !w.remove && !w.own.deleted && !std::mem::replace(&mut w.own.told, true))
                == Some(true)
        };
        let fate = fate::fate(pod);
        self.workers.with(key, |w| {
            let since = w.own.unschedulable.take().map_or_else(Instant::now, |(since, _)| since);
            if let Fate::Unschedulable { reason } = &fate {
                w.own.unschedulable = Some((since, reason.clone()));
            }
            w.own.preparing = fate::prepares(pod).then(|| w.own.preparing.unwrap_or_else(Instant::now));
        });
        match fate {
            // Of the second, `look` makes what it is, once nothing of ours is in the way.
            Fate::Alive | Fate::Unschedulable { .. } => {}
            Fate::Stuck { reason, lasting } => {
                if first(self) {
                    self.event(key, WorkerEvent::Refused { reason: reason.clone(), lasting });
                }
                if crate::books::is_over(pod) {
                    self.gone(key, Some(reason));
                } else {
                    self.end_pod(key);
                }
            }
            Fate::Leaving { reason, within } => {
                if first(self) {
                    self.event(key, WorkerEvent::Leaving { reason, within: Some(within) });
                }
            }
            Fate::OutOfMemory { reason } => {
                if first(self) {
                    self.event(key, WorkerEvent::LaunchFailed { reason: reason.clone() });
                }
                self.gone(key, Some(reason));
            }
            Fate::Over { reason, ran } => {
                let heard = self.workers.with(key, |w| heard(w)).unwrap_or(ran);
                if !heard && first(self) {
                    self.event(key, WorkerEvent::Refused { reason: reason.clone(), lasting: false });
                }
                self.gone(key, Some(reason));
            }
        }
    }

    /// Refuses workers for whose pods there is no room, though nothing of ours takes it.
    ///
    /// What leaves, and placeholders, kube-scheduler counts until they are gone; then it looks again.
    fn refuse(&mut self) {
        let mut refused = Vec::new();
        {
            let state = self.workers.lock();
            let leaves = |w: &&Worker| !w.over && (w.remove || w.gone.is_some());
            let leaving: BTreeSet<&str> = state.workers.values().filter(leaves).map(|w| w.own.node.as_str()).collect();
            for (key, worker) in &state.workers {
                let own = &worker.own;
                let Some((since, reason)) = &own.unschedulable else { continue };
                let free = !leaving.contains(own.node.as_str()) && !self.keeping.holds(&own.node);
                let claim = fate::claim(reason);
                let patience = if claim == Some(Claim::Unbound) { UNBOUND } else { PATIENCE };
                if free && since.elapsed() >= patience && !own.told && !own.deleted && !worker.remove {
                    let remedy = claim.map_or("", Claim::remedy);
                    refused.push((*key, format!("{}{remedy}", reason.trim_end_matches('.')), claim.is_some()));
                }
            }
        }
        for (key, reason, lasting) in refused {
            self.workers.with(key, |worker| worker.own.told = true);
            self.event(key, WorkerEvent::Refused { reason, lasting });
            self.end_pod(key);
        }
    }

    fn pod_deleted(&mut self, pod: &Pod) {
        self.kept_pod(pod, false);
        if let Some(uid) = &pod.metadata.uid {
            self.sightings.gone(uid);
            self.exporters.gone(uid);
            self.layer_pod_deleted(uid);
            let said = self.books.pod_deleted(uid);
            self.say(said);
        }
        let Some(key) = names::worker(pod.metadata.labels.as_ref().unwrap_or(&BTreeMap::new())) else { return };
        if self.unseen.get(&key).is_some_and(|p| p.metadata.uid == pod.metadata.uid) {
            self.unseen.remove(&key);
        }
        let here = reference(pod);
        if self.workers.with(key, |w| w.own.pod == here && !w.over) != Some(true) {
            return;
        }
        if fate::quiet(pod) {
            let reason = match fate::fate(pod) {
                Fate::Leaving { reason, .. } | Fate::Over { reason, .. } => reason,
                _ => "its pod was deleted".to_owned(),
            };
            self.gone(key, Some(reason));
        } else {
            self.adrift(key);
        }
    }

    /// After a list of all pods: workers whose pods are not in it.
    fn pods_missing(&mut self, list: &BTreeSet<String>) {
        let missing: Vec<StreamKey> = {
            let state = self.workers.lock();
            let there = |w: &Worker| w.own.pod.as_ref().is_none_or(|p| list.contains(&p.uid));
            let waits = |w: &Worker| w.own.pod.is_none() && w.own.heard;
            state.workers.iter().filter(|(_, w)| !w.over && (!there(w) || waits(w))).map(|(key, _)| *key).collect()
        };
        for key in missing {
            self.adrift(key);
        }
    }

    /// Ends workers that have been silent for so long that their ranks have stopped: where kubelet is there, by its
    /// hand; else they are written off.
    pub(crate) fn look(&mut self) {
        self.refuse();
        self.ask_kubelet();
        let now = Instant::now();
        let limit = write_off_for(self.config.site.fence_after);
        let limit = Duration::from_millis(u64::try_from(limit.0).unwrap_or(u64::MAX));
        let (mut lost, mut cut_off) = (Vec::new(), Vec::new());
        {
            let mut state = self.workers.lock();
            let mut witnesses: BTreeMap<(JobId, u32), Vec<(Instant, Instant)>> = BTreeMap::new();
            for (key, worker) in &state.workers {
                if let Some(witness) = worker.link.as_ref().and_then(aviflow_link::Link::witnessed) {
                    witnesses.entry((key.job, key.attempt)).or_default().push(witness);
                }
            }
            for (key, worker) in &mut state.workers {
                if worker.over || worker.gone.is_some() {
                    continue;
                }
                let own = &mut worker.own;
                if worker.link.is_some() {
                    own.heard = true;
                    own.silent = None;
                    continue;
                }
                if !own.heard && !own.adrift {
                    continue;
                }
                // It may have been here since the last look.
                let noticed = *own.silent.get_or_insert(now);
                let since = worker.heard_until.map_or(noticed, |until| until.max(noticed));
                let silent = now.saturating_duration_since(since);
                if silent < limit {
                    continue;
                }
                // Without a witness a gang may be well, and goes on: only kubelet's word or its nodes' end is its end.
                let witnesses = witnesses.get(&(key.job, key.attempt)).into_iter().flatten().copied();
                let fenced = own.workers > 1 && witnessed(since, witnesses) >= limit;
                let dead = !self.books.is_there(&own.node) && self.listed.pods.load(Ordering::Acquire);
                // Whoever removes a pod by force says that nothing of it runs; what is meanwhile found to run ends.
                if own.adrift || dead || (fenced && !self.books.is_ready(&own.node)) {
                    lost.push((*key, silent, own.node.clone()));
                } else if fenced {
                    cut_off.push(*key);
                }
            }
        }
        for key in cut_off {
            // Its agent reaches nobody here, and kubelet does: it says when nothing is left.
            self.end_pod(key);
        }
        for (key, silent, node) in lost {
            let reason = format!("its agent on {node} has not been heard of for {} s", silent.as_secs());
            self.workers.with(key, |worker| worker.over = true);
            let ago = Span(i64::try_from(silent.as_millis()).unwrap_or(i64::MAX));
            self.workers.report_worker(key, 0, ago, WorkerEvent::Lost { reason }, None);
            if self.workers.with(key, |worker| worker.remove) == Some(true) {
                self.discard(key);
            }
        }
    }
}
