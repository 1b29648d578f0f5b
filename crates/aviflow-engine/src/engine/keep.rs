//! Claims against others: from how many GPUs of each node the cluster keeps workloads that are not ours.
//!
//! The level follows from the books of the nodes alone, so that it survives a crash as they do. It is told when
//! it changes, and all of it at the beginning of a term.

use super::{Engine, Work};
use crate::ports::{Order, Store};
use aviflow_core::model::{Node, NodeId};
use std::collections::BTreeMap;

/// How many GPUs are kept, and whether these are all of the node's that work.
pub(super) type Level = (u32, bool);

/// What is kept of a node: what is promised there, whether it is free already or its holders are still leaving.
fn level(node: &Node) -> Level {
    (node.claimed.count(), !node.claimed.is_empty() && node.claimed == node.works())
}

fn order(node: &Node, (gpus, whole): Level) -> Order {
    Order::Keep { node: node.name.clone(), gpus, whole }
}

impl<S: Store> Engine<S> {
    /// What is kept where anything is.
    pub(super) fn kept_now(&self) -> BTreeMap<NodeId, Level> {
        self.snapshot.nodes.values().map(|n| (n.id, level(n))).filter(|(_, l)| l.0 > 0).collect()
    }

    /// The orders for all that is kept.
    pub(super) fn keep_all(&self) -> impl Iterator<Item = Order> + '_ {
        self.kept.iter().filter_map(|(id, level)| Some(order(self.snapshot.nodes.get(id)?, *level)))
    }

    /// Adds what changed of it to the orders of a turn: what rises before all that frees GPUs, and what falls
    /// after the launches of those for whom it was kept.
    pub(super) fn keep(&mut self, work: &mut Work) {
        let mut rising = Vec::new();
        for id in &work.nodes {
            let Some(node) = self.snapshot.nodes.get(id) else { continue };
            let (before, now) = (self.kept.get(id).copied().unwrap_or_default(), level(node));
            if before == now {
                continue;
            }
            if now.0 == 0 {
                self.kept.remove(id);
            } else {
                self.kept.insert(*id, now);
            }
            if now > before { rising.push(order(node, now)) } else { work.orders.push(order(node, now)) }
        }
        work.orders.splice(0..0, rising);
    }
}
