//! What each decision of the plan does to the snapshot.

use super::{Engine, Work};
use crate::ports::Store;
use aviflow_core::explain;
use aviflow_core::lifecycle::Event;
use aviflow_core::schedule::Decision;

impl<S: Store> Engine<S> {
    pub(super) fn carry_out(&mut self, decision: Decision, work: &mut Work) {
        let now = self.now;
        match decision {
            Decision::Start { job, placement } => self.advance(job, &Event::Place { placement }, now, work),
            Decision::Claim { job, claim } => self.advance(job, &Event::Claim { claim }, now, work),
            Decision::Unclaim { job, reason } => self.advance(job, &Event::Unclaim { reason }, now, work),
            Decision::Evict { job, eviction } => self.advance(job, &Event::Evict { eviction }, now, work),
            Decision::Spare { job } => self.advance(job, &Event::Spare, now, work),
            Decision::Suspend { job, turned_out } => {
                let by = explain::suspended_by(&turned_out);
                let event = Event::Suspend { by, hold: false, turned_out: Some(turned_out) };
                self.advance(job, &event, now, work);
            }
            Decision::Window { node, .. } => self.change_node(
                node,
                |n| {
                    if n.drain.as_ref().is_some_and(|d| d.over(now)) {
                        n.drain = None;
                    }
                },
                work,
            ),
            Decision::Take { drain, node, window } => {
                let Some(rolling) = self.snapshot.drains.iter_mut().find(|d| d.id == drain) else { return };
                let Some(index) = rolling.nodes.iter().position(|n| *n == node) else { return };
                rolling.nodes.remove(index);
                rolling.taken.push(node);
                work.drains = true;
                self.change_node(node, |n| n.drain = Some(window), work);
            }
        }
    }

    /// Nodes that are back, or are no more, leave their rolling drains; a drain with nothing left is over.
    pub(super) fn tidy_drains(&mut self, work: &mut Work) {
        let nodes = &self.snapshot.nodes;
        let count = |drains: &[aviflow_core::model::RollingDrain]| -> usize {
            drains.iter().map(|d| 1 + d.nodes.len() + d.taken.len()).sum()
        };
        let before = count(&self.snapshot.drains);
        for drain in &mut self.snapshot.drains {
            drain.nodes.retain(|n| nodes.contains_key(n));
            drain.taken.retain(|n| nodes.get(n).is_some_and(|n| n.drain.is_some()));
        }
        self.snapshot.drains.retain(|d| !d.nodes.is_empty() || !d.taken.is_empty());
        work.drains |= count(&self.snapshot.drains) != before;
    }
}
