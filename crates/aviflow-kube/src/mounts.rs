//! Why a pod on its node does not begin: what kubelet says in Events alone.
//!
//! A volume that cannot be mounted stands in no pod's status. kubelet makes the pod's sandbox once all of them are,
//! and says so in a condition; of a pod that stays without it, the Events are asked for, and of no other: in a
//! cluster that works, nobody is asked.

use crate::body::Body;
use crate::cluster::Message;
use aviflow_core::lifecycle::WorkerEvent;
use aviflow_core::model::JobId;
use aviflow_engine::telemetry::StreamKey;
use k8s_openapi::api::core::v1::Event;
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::ListParams;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// How long kubelet may take to mount what a pod has: a disk has to be attached, a server may be slow.
const PATIENCE: Duration = Duration::from_secs(30);
/// The pause before Events of the same pod are asked for again.
const AGAIN: Duration = Duration::from_secs(15);
/// Pods that are asked about in one look.
const AT_ONCE: usize = 4;
/// Events of one pod that are looked at.
const EVENTS: u32 = 50;

/// What keeps a pod from beginning.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trouble {
    /// In words.
    pub reason: String,
    /// Whether that lies in what the job asks for.
    pub lasting: bool,
}

/// What the Events of a pod that does not begin say; none where they say nothing of it.
#[must_use]
pub fn trouble(events: &[Event], node: &str) -> Option<Trouble> {
    let volumes = ["FailedMount", "FailedAttachVolume", "FailedMapVolume"];
    let word = |event: &Event| event.reason.clone().unwrap_or_default();
    let of_volume = |event: &&Event| volumes.contains(&word(event).as_str());
    let said = |event: &Event| event.message.as_deref().unwrap_or("").trim().trim_end_matches('.').to_owned();
    // That it gave up waiting names no cause; what it waited for does.
    let names_cause = |event: &&Event| !said(event).starts_with("Unable to attach or mount volumes");
    let of_volumes: Vec<&Event> = events.iter().filter(of_volume).collect();
    let newest = |of: &[&Event]| of.iter().max_by_key(|e| at(e)).map(|e| said(e));
    let causes: Vec<&Event> = of_volumes.iter().copied().filter(names_cause).collect();
    if let Some(said) = newest(&causes).or_else(|| newest(&of_volumes)) {
        let reason = format!(
            "a volume cannot be mounted on {node}: {said}; put it right, or name another in `data`, or in the pool's `storage` for `checkpoint` and `outputs`"
        );
        return Some(Trouble { reason, lasting: true });
    }
    let sandboxes: Vec<&Event> = events.iter().filter(|e| word(e) == "FailedCreatePodSandBox").collect();
    let said = newest(&sandboxes)?;
    Some(Trouble { reason: format!("kubelet on {node} makes no sandbox for its pod: {said}"), lasting: false })
}

fn at(event: &Event) -> Option<Timestamp> {
    let last = event.last_timestamp.as_ref().map(|t| t.0);
    last.or_else(|| event.series.as_ref()?.last_observed_time.as_ref().map(|t| t.0))
        .or_else(|| Some(event.event_time.as_ref()?.0))
}

impl Body {
    /// Asks for the Events of pods that have been on their nodes for long and do not begin: of one worker of a gang at
    /// a time, since what is wrong with one is reason enough.
    pub(crate) fn ask_kubelet(&self) {
        let mut ask = Vec::new();
        {
            let mut state = self.workers.lock();
            let mut gangs: BTreeSet<(JobId, u32)> = BTreeSet::new();
            for (key, worker) in &mut state.workers {
                let own = &mut worker.own;
                let Some((pod, since)) = own.pod.clone().zip(own.preparing) else { continue };
                let asked = own.asked.is_some_and(|at| at.elapsed() < AGAIN);
                if since.elapsed() < PATIENCE || asked || own.told || own.deleted || worker.remove {
                    continue;
                }
                if ask.len() < AT_ONCE && gangs.insert((key.job, key.attempt)) {
                    own.asked = Some(Instant::now());
                    ask.push((*key, pod, own.node.clone()));
                }
            }
        }
        for (key, pod, node) in ask {
            let (client, messages) = (self.config.client.clone(), self.messages.clone());
            tokio::spawn(async move {
                let about = ListParams::default().fields(&format!("involvedObject.uid={}", pod.uid)).limit(EVENTS);
                // Who does not answer is asked again.
                let Ok(list) = Api::<Event>::namespaced(client, &pod.namespace).list(&about).await else { return };
                if let Some(trouble) = trouble(&list.items, &node) {
                    let _ = messages.send(Message::NotBegun(key, pod, trouble));
                }
            });
        }
    }

    /// Refuses a worker that does not begin, if that is still so.
    pub(crate) fn not_begun(&mut self, key: StreamKey, pod: &crate::site::PodRef, trouble: Trouble) {
        let refused = self.workers.with(key, |worker| {
            let own = &mut worker.own;
            let still = own.pod.as_ref() == Some(pod) && own.preparing.is_some() && !own.deleted && !worker.remove;
            still && !std::mem::replace(&mut own.told, true)
        });
        if refused == Some(true) {
            let Trouble { reason, lasting } = trouble;
            self.event(key, WorkerEvent::Refused { reason, lasting });
            self.end_pod(key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn event(reason: &str, message: &str, second: u32) -> Event {
        serde_json::from_value(json!({
            "metadata": {}, "involvedObject": {}, "reason": reason, "message": message,
            "lastTimestamp": format!("2026-01-01T00:00:{second:02}Z"),
        }))
        .expect("an event")
    }

    #[test]
    fn the_cause_is_told_and_whether_it_stays() {
        let mount =
            |second| event("FailedMount", "MountVolume.SetUp failed for volume \"data-a\" : no such server.", second);
        let waited = event("FailedMount", "Unable to attach or mount volumes: timed out", 50);
        let sandbox = event("FailedCreatePodSandBox", "no address left", 55);
        let pulling = event("Pulling", "Pulling image", 59);
        assert_eq!(trouble(std::slice::from_ref(&pulling), "hgx0"), None);
        let said = trouble(&[waited.clone(), mount(20), sandbox.clone(), pulling], "hgx0").expect("trouble");
        assert!(said.lasting && said.reason.contains("on hgx0: MountVolume.SetUp failed"), "{said:?}");
        assert!(said.reason.contains("no such server; put it right"), "{said:?}");
        assert!(trouble(&[waited], "hgx0").is_some_and(|t| t.reason.contains("timed out")), "better than nothing");
        let said = trouble(&[sandbox], "hgx0").expect("trouble");
        assert!(!said.lasting && said.reason.contains("no address left"), "another node may do: {said:?}");
    }
}
