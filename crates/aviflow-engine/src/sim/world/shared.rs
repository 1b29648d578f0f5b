//! What others do on the nodes: they take GPUs, close nodes and label them. And what a cluster checks by itself,
//! whatever the control plane believes: no more GPUs than a node has, and what is kept from others.

use super::{GPUS, Happening, Key, World};
use crate::ports::{Observation, Order, Stamped, WorkerEvent};
use aviflow_core::model::{Node, Snapshot};
use aviflow_core::time::Span;
use std::collections::{BTreeMap, BTreeSet};

/// What others do with a node.
#[derive(Clone, Debug, Default)]
pub(super) struct Site {
    /// GPUs that they use.
    pub(super) others: u32,
    /// Whether they keep new work away.
    pub(super) closed: bool,
    /// Where its labels say that it is.
    pub(super) path: Vec<String>,
    /// GPUs that are kept from them, and whether these are all.
    pub(super) kept: (u32, bool),
}

/// What the control plane was told last of nodes, by name.
#[derive(Debug, Default)]
pub(in crate::sim) struct Said {
    pub(in crate::sim) others: BTreeMap<String, u32>,
    pub(in crate::sim) closed: BTreeMap<String, (Option<String>, bool)>,
    pub(in crate::sim) path: BTreeMap<String, Vec<String>>,
}

impl Said {
    pub(in crate::sim) fn hear(&mut self, observation: &Observation) {
        match observation {
            Observation::NodeSeen { name, path, .. } => {
                self.path.insert(name.clone(), path.clone());
            }
            Observation::NodeForeign { name, gpus } => {
                self.others.insert(name.clone(), *gpus);
            }
            Observation::NodeClosed { name, reason, vacate } => {
                self.closed.insert(name.clone(), (reason.clone(), *vacate));
            }
            Observation::NodeGone { .. }
            | Observation::NodeHealth { .. }
            | Observation::EnvironmentReady { .. }
            | Observation::EnvironmentFailed { .. }
            | Observation::Worker { .. }
            | Observation::Found { .. } => {}
        }
    }
}

fn number(name: &str) -> u32 {
    name.trim_start_matches('n').parse().unwrap_or(0)
}

impl World {
    pub(super) fn site(&mut self, node: u32) -> &mut Site {
        self.sites.entry(node).or_default()
    }

    /// GPUs of a node that workers of ours occupy, as the cluster counts them.
    fn ours(&self, node: u32) -> u32 {
        let there = self.workers.values().filter(|w| w.node.0 == node && w.agent && !w.gone && !w.shut_out);
        there.map(|w| w.slots.count()).sum()
    }

    /// Whether there is room for one more worker of ours. Others may have been faster; what is kept is kept for it.
    pub(super) fn admits(&self, node: u32, gpus: u32) -> bool {
        let others = self.sites.get(&node).map_or(0, |s| s.others);
        self.ours(node) + others + gpus <= GPUS
    }

    /// Others want so many GPUs: they get what is there and not kept from them.
    pub(super) fn others_want(&mut self, node: u32, gpus: u32) {
        let ours = self.ours(node);
        let site = self.site(node);
        let more = GPUS.saturating_sub(ours + site.others + site.kept.0);
        site.others = gpus.min(site.others + more);
        let (name, gpus) = (format!("n{node}"), site.others);
        self.at(self.now + Span(50), Happening::Say(Observation::NodeForeign { name, gpus }));
    }

    /// What others say of a node.
    pub(super) fn site_seen(&self, node: u32) -> [Observation; 2] {
        let (name, site) = (format!("n{node}"), self.sites.get(&node).cloned().unwrap_or_default());
        let reason = site.closed.then(|| "cordoned by others".to_owned());
        // Every other node is closed for something that needs it empty.
        let vacate = site.closed && node.is_multiple_of(2);
        [
            Observation::NodeForeign { name: name.clone(), gpus: site.others },
            Observation::NodeClosed { name, reason, vacate },
        ]
    }

    /// The cluster does not take a worker, or cannot make it.
    pub(super) fn refuse(&mut self, key: Key, lasting: bool) {
        if self.workers.get(&key).is_none_or(|w| w.gone || w.stopping) {
            return;
        }
        let reason = if lasting { "no such image" } else { "the node has too few GPUs" }.to_owned();
        self.event(key, self.now, WorkerEvent::Refused { reason, lasting });
        self.after(key, 46, 5, 40, Happening::Empty(key, Some("it was refused".to_owned())));
    }

    /// The cluster asks a worker to leave, and ends it when its time is over.
    pub(super) fn ask_to_leave(&mut self, key: Key) {
        if self.workers.get(&key).is_none_or(|w| !w.agent || w.gone || w.stopping) {
            return;
        }
        let within = Span(1000 + self.draw(key, 47, 4000));
        let reason = "its node is drained".to_owned();
        self.event(key, self.now, WorkerEvent::Leaving { reason, within: Some(within) });
        self.at(self.now + within, Happening::Stop(key, 0));
    }

    /// What a batch of orders says of what is kept, and in which order it says it.
    pub(super) fn keep(&mut self, orders: &[Stamped]) {
        let mut fell = BTreeSet::new();
        let (mut freed, term) = (false, self.term);
        for order in orders.iter().filter(|s| s.term >= term).map(|s| &s.order) {
            match order {
                Order::Reconcile { .. } => self.sites.values_mut().for_each(|s| s.kept = (0, false)),
                Order::Keep { node, gpus, whole } => {
                    let site = self.site(number(node));
                    let before = std::mem::replace(&mut site.kept, (*gpus, *whole)).0;
                    if *gpus < before {
                        fell.insert(node.clone());
                    }
                    if *gpus > before && freed {
                        self.wrong.push(format!("GPUs of {node} are kept only after their holders were told to leave"));
                    }
                }
                Order::Launch { nodes, .. } => {
                    if let Some(node) = nodes.iter().find(|n| fell.contains(*n)) {
                        self.wrong.push(format!("GPUs of {node} are not kept until the gang for them is launched"));
                    }
                }
                Order::Stop { .. } => freed = true,
                Order::Prepare { .. } | Order::Abandon { .. } | Order::Confirm { .. } | Order::Remove { .. } => {}
            }
        }
    }

    /// Whether what is kept is what is promised.
    pub(in crate::sim) fn keeps(&self, snapshot: &Snapshot) -> Vec<String> {
        let wrong = |node: &Node| {
            let kept = self.sites.get(&number(&node.name)).map_or((0, false), |s| s.kept);
            let promised = (node.claimed.count(), !node.claimed.is_empty() && node.claimed == node.works());
            (kept != promised).then(|| format!("of {} {kept:?} is kept and {promised:?} promised", node.name))
        };
        snapshot.nodes.values().filter_map(wrong).collect()
    }

    /// Whether the control plane believes what it was told last of each node.
    pub(in crate::sim) fn believed(said: &Said, snapshot: &Snapshot) -> Vec<String> {
        let wrong = |node: &Node| {
            let others = said.others.get(&node.name).is_some_and(|o| *o != node.others);
            let closed = said
                .closed
                .get(&node.name)
                .is_some_and(|(reason, vacate)| *reason != node.closed || *vacate != node.vacate.is_some());
            let path = said.path.get(&node.name).is_some_and(|p| *p != node.reported);
            (others || closed || path).then(|| format!("of {} {said:?} was said, and it is {node:?}", node.name))
        };
        snapshot.nodes.values().filter_map(wrong).collect()
    }
}
