//! Nodes that people take out of work: cordons, drains, and rolling drains.

use super::jobs::Whose;
use super::{Answer, DrainName, DrainOrder, Engine, Refusal, Work};
use crate::ports::{ActKind, Store};
use aviflow_core::health::quarantine::Rules;
use aviflow_core::lifecycle;
use aviflow_core::model::{Drain, NodeId, RollingDrain};
use aviflow_core::time::Span;
use std::collections::BTreeSet;

impl<S: Store> Engine<S> {
    pub(super) fn cordon(&mut self, name: &str, cordoned: bool, whose: Whose<'_>, work: &mut Work) -> Answer {
        let Some(node) = self.node_named(name).and_then(|id| self.snapshot.nodes.get(&id)) else {
            return Answer::Refused(Refusal::NoSuchNode(name.to_owned()));
        };
        let (id, now) = (node.id, self.now);
        let ends = !cordoned && node.drained(now);
        let mut warnings = Vec::new();
        if let Some(drain) = node.drain.as_ref().filter(|d| !cordoned && d.from > now) {
            warnings.push(format!(
                "a drain of {name} is planned to begin in {}; `aviflow node drain --cancel {name}` calls it off",
                drain.from.since(now)
            ));
        }
        if let Some(why) = node.closed.as_ref().filter(|_| !cordoned) {
            warnings.push(format!("{name} stays closed to new work by the cluster: {why}; it is opened there"));
        }
        if node.cordoned != cordoned || ends {
            self.change_node(
                id,
                |n| {
                    n.cordoned = cordoned;
                    if ends {
                        n.drain = None;
                    }
                },
                work,
            );
            let what = match (cordoned, ends) {
                (true, _) => format!("cordoned node {name}"),
                (false, true) => format!("uncordoned node {name}, which ends its drain"),
                (false, false) => format!("uncordoned node {name}"),
            };
            self.act(ActKind::Node, name, what, whose, work);
        }
        Answer::done(warnings)
    }

    /// A node passed its check: only this ends a quarantine. Others that were beyond the budget may begin then.
    pub(super) fn passed(&mut self, name: &str, whose: Whose<'_>, work: &mut Work) -> Answer {
        let Some(id) = self.node_named(name) else { return Answer::Refused(Refusal::NoSuchNode(name.to_owned())) };
        let Some(pool) = self.snapshot.nodes.get(&id).map(|node| node.pool.clone()) else { return Answer::Done };
        let sizes = lifecycle::quarantine_pool(&self.snapshot, &pool);
        let Some(book) = self.snapshot.quarantines.get_mut(&pool) else { return Answer::Done };
        let kept = book.passed(id);
        let others = book.settle(sizes, &Rules::default());
        work.quarantines = true;
        for node in others.into_iter().chain([id]) {
            let entries = lifecycle::set_quarantined(&mut self.snapshot, node, self.now);
            work.entries.extend(entries);
            work.nodes.insert(node);
        }
        if kept {
            self.act(ActKind::Node, name, format!("checked node {name}, which ends its quarantine"), whose, work);
        }
        Answer::Done
    }

    pub(super) fn drain(&mut self, order: &DrainOrder, work: &mut Work) -> Answer {
        let mut nodes = Vec::new();
        for name in order.nodes.iter().collect::<BTreeSet<_>>() {
            match self.node_named(name) {
                Some(id) => nodes.push((id, name.clone())),
                None => return Answer::Refused(Refusal::NoSuchNode(name.clone())),
            }
        }
        if let Some(why) = self.bad_order(order) {
            return Answer::Refused(Refusal::BadDrain(why));
        }
        let is_rolling = is_rolling(order);
        if is_rolling && let Some(same) = self.snapshot.drains.iter().find(|d| is_same(d, order, &nodes)) {
            return Answer::Rolling { drain: same.id, warnings: Vec::new() };
        }
        for (id, name) in &nodes {
            let part = |d: &&RollingDrain| d.nodes.contains(id) || d.taken.contains(id);
            if let Some(drain) = self.snapshot.drains.iter().find(part) {
                return Answer::Refused(Refusal::InDrain { node: name.clone(), drain: drain.id });
            }
        }
        if is_rolling { self.roll(order, nodes, work) } else { self.drain_each(order, &nodes, work) }
    }

    /// What of the order cannot be.
    fn bad_order(&self, order: &DrainOrder) -> Option<String> {
        let why = if order.nodes.is_empty() {
            "no node is named; name those to drain"
        } else if order.length.is_some_and(|l| l.0 <= 0) {
            "the time away is not positive; leave it out to drain until somebody uncordons the node"
        } else if order.max_unavailable == Some(0) {
            "with no node away at once none can be drained; allow 1 at least"
        } else if order.at.is_some() && is_rolling(order) {
            "a rolling drain begins by itself, node by node; say by when all must have been taken, or when one window begins"
        } else if order.by_when.is_some_and(|t| t <= self.now) {
            "the time by which all must have been taken is past; name a later one"
        } else if order.at.is_some_and(|at| order.length.is_some_and(|l| at + l <= self.now)) {
            "the window is over already; name a later one"
        } else {
            return None;
        };
        Some(why.to_owned())
    }

    fn roll(&mut self, order: &DrainOrder, mut nodes: Vec<(NodeId, String)>, work: &mut Work) -> Answer {
        // Whoever drained a node by itself says when it is back.
        let (snapshot, mut warnings) = (&self.snapshot, Vec::new());
        nodes.retain(|(id, name)| {
            let own = snapshot.nodes.get(id).is_some_and(|n| n.drain.is_some());
            if own {
                warnings.push(format!("{name} has a drain of its own and is left out"));
            }
            !own
        });
        if nodes.is_empty() {
            let why = "every node named has a drain of its own; `aviflow node drain --cancel NODE` calls one off";
            return Answer::Refused(Refusal::BadDrain(why.to_owned()));
        }
        self.last_drain += 1;
        let drain = rolling(self.last_drain, order, &nodes);
        let number = drain.id;
        let names: Vec<&str> = nodes.iter().map(|(_, name)| name.as_str()).collect();
        let mut how = format!("at most {} at once", drain.max_unavailable);
        if let Some(by) = drain.by {
            how.push_str(&format!(", all within {}", by.since(self.now)));
        }
        how.push_str(&away(drain.each));
        let what = format!("drains {}, {how}", names.join(", "));
        let whose = (order.by.as_str(), order.reason.as_ref());
        self.act(ActKind::Drain, &number.to_string(), what, whose, work);
        for (_, name) in &nodes {
            let what = format!("drains node {name} as part of drain {number}, {how}");
            self.act(ActKind::Node, name, what, whose, work);
        }
        self.snapshot.drains.push(drain);
        work.drains = true;
        Answer::Rolling { drain: number, warnings }
    }

    fn drain_each(&mut self, order: &DrainOrder, nodes: &[(NodeId, String)], work: &mut Work) -> Answer {
        let now = self.now;
        let from = order.at.map_or(now, |at| at.max(now));
        let end = order.at.unwrap_or(now);
        let asked = Drain {
            from,
            until: order.length.map(|l| end + l),
            by: order.by.clone(),
            reason: order.reason.clone().unwrap_or_default(),
        };
        for (id, name) in nodes {
            let before = self.snapshot.nodes.get(id).and_then(|n| n.drain.clone());
            // Said again, a drain that has begun is the same.
            let same = before.as_ref().is_some_and(|d| {
                let begun = d.covers(now) && asked.covers(now);
                let length = |d: &Drain| d.until.map(|u| u.since(d.from));
                let end = d.until == asked.until || (order.at.is_none() && length(d) == length(&asked));
                (begun || d.from == asked.from) && end
            });
            if same {
                continue;
            }
            let drain = asked.clone();
            self.change_node(*id, |n| n.drain = Some(drain), work);
            let when = if from > now { format!("from in {}", from.since(now)) } else { "from now".to_owned() };
            let instead = if before.is_some() { ", instead of as planned before" } else { "" };
            let what = format!("drains node {name} {when}{}{instead}", away(order.length));
            self.act(ActKind::Node, name, what, (&order.by, order.reason.as_ref()), work);
        }
        Answer::Done
    }

    pub(super) fn cancel_drain(&mut self, drain: &DrainName, whose: Whose<'_>, work: &mut Work) -> Answer {
        match drain {
            DrainName::Node(name) => {
                let Some(node) = self.node_named(name).and_then(|id| self.snapshot.nodes.get(&id)) else {
                    return Answer::Refused(Refusal::NoSuchNode(name.clone()));
                };
                let id = node.id;
                if let Some(drain) = self.snapshot.drains.iter().find(|d| d.nodes.contains(&id)) {
                    return Answer::Refused(Refusal::InDrain { node: name.clone(), drain: drain.id });
                }
                if node.drain.is_none() {
                    return Answer::Refused(Refusal::NotDrained(name.clone()));
                }
                self.change_node(id, |n| n.drain = None, work);
                self.act(ActKind::Node, name, format!("called off the drain of node {name}"), whose, work);
                Answer::Done
            }
            DrainName::Rolling(number) => {
                let Some(index) = self.snapshot.drains.iter().position(|d| d.id == *number) else {
                    return Answer::Refused(Refusal::NoSuchDrain(*number));
                };
                let drain = self.snapshot.drains.remove(index);
                work.drains = true;
                self.act(ActKind::Drain, &number.to_string(), format!("called off drain {number}"), whose, work);
                let away: Vec<&str> =
                    drain.taken.iter().filter_map(|n| self.snapshot.nodes.get(n)).map(|n| n.name.as_str()).collect();
                let stay = drain.each.is_none() && !away.is_empty();
                let warning = || format!("still away until somebody uncordons them: {}", away.join(", "));
                Answer::done(stay.then(warning).into_iter().collect())
            }
        }
    }
}

fn is_rolling(order: &DrainOrder) -> bool {
    order.max_unavailable.is_some() || order.by_when.is_some()
}

/// Whether a drain that goes on is what the order asks for. Nodes that are back were part of it too.
fn is_same(drain: &RollingDrain, order: &DrainOrder, nodes: &[(NodeId, String)]) -> bool {
    let asked = rolling(drain.id, order, nodes);
    let all = order.max_unavailable.is_none();
    drain.nodes.iter().chain(&drain.taken).all(|n| asked.nodes.contains(n))
        && (drain.max_unavailable == asked.max_unavailable || all)
        && (drain.by, drain.each) == (asked.by, asked.each)
        && (&drain.ordered_by, &drain.reason) == (&asked.ordered_by, &asked.reason)
}

fn rolling(id: u64, order: &DrainOrder, nodes: &[(NodeId, String)]) -> RollingDrain {
    RollingDrain {
        id,
        nodes: nodes.iter().map(|(id, _)| *id).collect(),
        taken: Vec::new(),
        max_unavailable: order.max_unavailable.unwrap_or_else(|| u32::try_from(nodes.len()).unwrap_or(u32::MAX)),
        by: order.by_when,
        each: order.length,
        ordered_by: order.by.clone(),
        reason: order.reason.clone().unwrap_or_default(),
    }
}

fn away(length: Option<Span>) -> String {
    match length {
        Some(length) => format!(", each for {length}"),
        None => ", until somebody uncordons it".to_owned(),
    }
}
