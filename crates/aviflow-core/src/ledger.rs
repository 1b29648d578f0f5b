//! The account of GPU time.
//!
//! At each instant each GPU is in exactly one state. The ledger keeps, for each
//! node, the open intervals that partition its GPUs; a posting closes what it
//! covers and opens what follows. Intervals are half-open, in whole
//! milliseconds. An open interval may be split after the fact (an agent reports
//! late what happened earlier); a closed one never changes.
//!
//! Invariant: the open intervals of a node partition its GPUs, so over any
//! period the closed and open intervals sum to the capacity exactly.

use crate::gpus::{GpuSet, Slots};
use crate::model::{JobId, Node, NodeCondition, NodeId};
use crate::time::{Span, Time};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The state of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum GpuState {
    /// Allocated: processes start, code loads, the first step compiles.
    Starting,
    /// Allocated: trains something that was not trained before.
    Productive,
    /// Allocated: training stands still for a checkpoint.
    Checkpointing,
    /// Allocated: trains again what was lost since the last checkpoint.
    Repeating,
    /// Allocated: makes no progress, by a hang.
    Hung,
    /// Allocated: does nothing.
    Idle,
    /// Allocated: processes are being stopped.
    Stopping,
    /// Not allocated and usable.
    Free,
    /// Promised to a gang while the present holders leave.
    Claimed,
    /// Kept for a reservation.
    Reserved,
    /// Free, and of no use to any shape that waits.
    Stranded,
    /// The node takes no new work.
    Draining,
    /// Broken.
    Unhealthy,
    /// Used by a workload that is not ours.
    Foreign,
    /// Nobody knows: the node's own agent or kubelet was gone.
    Unknown,
}

impl GpuState {
    /// All states, allocated ones first.
    pub const ALL: [GpuState; 15] = [
        GpuState::Starting,
        GpuState::Productive,
        GpuState::Checkpointing,
        GpuState::Repeating,
        GpuState::Hung,
        GpuState::Idle,
        GpuState::Stopping,
        GpuState::Free,
        GpuState::Claimed,
        GpuState::Reserved,
        GpuState::Stranded,
        GpuState::Draining,
        GpuState::Unhealthy,
        GpuState::Foreign,
        GpuState::Unknown,
    ];

    /// The glossary's word.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            GpuState::Starting => "starting",
            GpuState::Productive => "productive",
            GpuState::Checkpointing => "checkpointing",
            GpuState::Repeating => "repeating",
            GpuState::Hung => "hung",
            GpuState::Idle => "idle",
            GpuState::Stopping => "stopping",
            GpuState::Free => "free",
            GpuState::Claimed => "claimed",
            GpuState::Reserved => "reserved",
            GpuState::Stranded => "stranded",
            GpuState::Draining => "draining",
            GpuState::Unhealthy => "unhealthy",
            GpuState::Foreign => "foreign",
            GpuState::Unknown => "unknown",
        }
    }
}

/// Whose time it is: the attempt of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Owner {
    /// The job.
    pub job: JobId,
    /// The attempt.
    pub attempt: u32,
}

/// An open interval of some GPUs of one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Open {
    /// The GPUs.
    pub slots: Slots,
    /// Their state.
    pub state: GpuState,
    /// Whose they are.
    pub owner: Option<Owner>,
    /// Since when.
    pub from: Time,
}

/// A closed interval: `[from, to)`, never empty, never changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// The GPUs.
    pub gpus: GpuSet,
    /// Their state.
    pub state: GpuState,
    /// Whose they were.
    pub owner: Option<Owner>,
    /// The first millisecond.
    pub from: Time,
    /// The millisecond after the last.
    pub to: Time,
}

impl Entry {
    /// GPU-milliseconds of the entry.
    #[must_use]
    pub fn gpu_ms(&self) -> i128 {
        i128::from(self.gpus.count()) * i128::from(self.to.since(self.from).0)
    }
}

/// A change to post: from `at` on, `gpus` are in `state`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Posting {
    /// The GPUs.
    pub gpus: GpuSet,
    /// Their state.
    pub state: GpuState,
    /// Whose they are.
    pub owner: Option<Owner>,
    /// From when; taken as the start of the open interval where that is later.
    pub at: Time,
}

/// The open intervals by node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Ledger(BTreeMap<NodeId, Vec<Open>>);

impl Ledger {
    /// The open intervals of a node.
    #[must_use]
    pub fn node(&self, node: NodeId) -> &[Open] {
        self.0.get(&node).map_or(&[], Vec::as_slice)
    }

    /// All open intervals, by node.
    pub fn iter(&self) -> impl Iterator<Item = (NodeId, &Open)> {
        self.0.iter().flat_map(|(n, open)| open.iter().map(|o| (*n, o)))
    }

    /// Sets the open intervals of a node, as the store read them.
    pub fn restore(&mut self, node: NodeId, open: Vec<Open>) {
        self.0.insert(node, open);
    }

    /// Begins the account of a node at `at`.
    pub fn open_node(&mut self, node: &Node, at: Time) {
        let open = Open { slots: node.gpus, state: GpuState::Free, owner: None, from: at };
        self.0.insert(node.id, vec![open]);
    }

    /// Sets which GPUs a node has: those that are new begin as free, those that
    /// are gone end.
    pub fn resize_node(&mut self, node: NodeId, gpus: Slots, at: Time) -> Vec<Entry> {
        let open = self.0.entry(node).or_default();
        let known = open.iter().fold(Slots::NONE, |a, o| a.or(o.slots));
        let mut closed = Vec::new();
        for o in open.iter_mut() {
            let leaving = o.slots.without(gpus);
            if !leaving.is_empty() && at > o.from {
                let gpus = GpuSet::of(node, leaving);
                closed.push(Entry { gpus, state: o.state, owner: o.owner, from: o.from, to: at });
            }
            o.slots = o.slots.and(gpus);
        }
        open.retain(|o| !o.slots.is_empty());
        let new = gpus.without(known);
        if !new.is_empty() {
            open.push(Open { slots: new, state: GpuState::Free, owner: None, from: at });
        }
        *open = join(std::mem::take(open));
        closed
    }

    /// Posts a change and returns the intervals that it closed, joined over nodes.
    ///
    /// Slots that the ledger does not know are left out: a node's account begins
    /// with [`Ledger::open_node`].
    pub fn post(&mut self, posting: &Posting) -> Vec<Entry> {
        let mut closed: BTreeMap<(Time, Time, GpuState, Option<Owner>), GpuSet> = BTreeMap::new();
        for (node, slots) in posting.gpus.iter() {
            let Some(open) = self.0.get_mut(&node) else { continue };
            let mut next: Vec<Open> = Vec::with_capacity(open.len() + 1);
            for o in open.drain(..) {
                let hit = o.slots.and(slots);
                let rest = o.slots.without(slots);
                if !rest.is_empty() {
                    next.push(Open { slots: rest, ..o });
                }
                if hit.is_empty() {
                    continue;
                }
                if o.state == posting.state && o.owner == posting.owner {
                    next.push(Open { slots: hit, ..o });
                    continue;
                }
                let at = posting.at.max(o.from);
                if at > o.from {
                    closed.entry((o.from, at, o.state, o.owner)).or_default().insert(node, hit);
                }
                next.push(Open { slots: hit, state: posting.state, owner: posting.owner, from: at });
            }
            *open = join(next);
        }
        closed.into_iter().map(|((from, to, state, owner), gpus)| Entry { gpus, state, owner, from, to }).collect()
    }

    /// Ends the open intervals of some GPUs and begins others that are equal, as whom they are charged
    /// to becomes another.
    pub fn cut(&mut self, gpus: &GpuSet, at: Time) -> Vec<Entry> {
        let mut closed: BTreeMap<(Time, GpuState, Option<Owner>), GpuSet> = BTreeMap::new();
        for (node, slots) in gpus.iter() {
            let Some(open) = self.0.get_mut(&node) else { continue };
            let mut next = Vec::with_capacity(open.len() + 1);
            for o in open.drain(..) {
                let (hit, rest) = (o.slots.and(slots), o.slots.without(slots));
                if hit.is_empty() || at <= o.from {
                    next.push(o);
                    continue;
                }
                closed.entry((o.from, o.state, o.owner)).or_default().insert(node, hit);
                next.push(Open { slots: hit, from: at, ..o });
                if !rest.is_empty() {
                    next.push(Open { slots: rest, ..o });
                }
            }
            *open = join(next);
        }
        closed.into_iter().map(|((from, state, owner), gpus)| Entry { gpus, state, owner, from, to: at }).collect()
    }

    /// GPU time of the open intervals up to `now`, by state and owner.
    #[must_use]
    pub fn open_time(&self, now: Time) -> BTreeMap<(GpuState, Option<Owner>), Span> {
        let mut sums = BTreeMap::new();
        for (_, o) in self.iter() {
            let ms = i64::from(o.slots.count()) * now.since(o.from).0;
            *sums.entry((o.state, o.owner)).or_insert(Span(0)) += Span(ms);
        }
        sums
    }
}

/// Joins intervals that differ in nothing but their slots, in the order of their slots.
fn join(mut open: Vec<Open>) -> Vec<Open> {
    open.sort_by_key(|o| (o.state, o.owner, o.from, o.slots));
    let mut out: Vec<Open> = Vec::with_capacity(open.len());
    for o in open {
        match out.last_mut() {
            Some(last) if (last.state, last.owner, last.from) == (o.state, o.owner, o.from) => {
                last.slots = last.slots.or(o.slots);
            }
            _ => out.push(o),
        }
    }
    out
}

/// The state of a node's GPUs that no attempt holds.
#[must_use]
pub fn unallocated(node: &Node) -> [(Slots, GpuState); 4] {
    let loose = node.gpus.without(node.held);
    let rest = match node.condition {
        NodeCondition::Ready => GpuState::Free,
        NodeCondition::Cordoned => GpuState::Draining,
        NodeCondition::Gone => {
            let nothing = Slots::NONE;
            return [
                (loose, GpuState::Unknown),
                (nothing, GpuState::Unhealthy),
                (nothing, GpuState::Claimed),
                (nothing, GpuState::Foreign),
            ];
        }
    };
    let (foreign, loose) = (loose.and(node.foreign), loose.without(node.foreign));
    let whole = loose.without(node.broken());
    [
        (whole.without(node.claimed), rest),
        (loose.and(node.broken()), GpuState::Unhealthy),
        (whole.and(node.claimed), GpuState::Claimed),
        (foreign, GpuState::Foreign),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn node(id: u32, gpus: u32) -> Node {
        Node::new(NodeId(id), &format!("n{id}"), "p", "H100", Slots::first(gpus))
    }

    #[test]
    fn an_open_interval_is_split_after_the_fact_and_a_closed_one_is_not() {
        let mut ledger = Ledger::default();
        ledger.open_node(&node(1, 8), Time(0));
        let gpus = GpuSet::of(NodeId(1), Slots(0b11));
        let owner = Some(Owner { job: JobId(1), attempt: 1 });
        let post =
            |ledger: &mut Ledger, state, at| ledger.post(&Posting { gpus: gpus.clone(), state, owner, at: Time(at) });
        let closed = post(&mut ledger, GpuState::Productive, 100);
        assert_eq!((closed[0].from, closed[0].to, closed[0].state), (Time(0), Time(100), GpuState::Free));
        // At 500 it becomes known that it was hung since 300.
        let closed = post(&mut ledger, GpuState::Hung, 300);
        assert_eq!((closed[0].from, closed[0].to), (Time(100), Time(300)));
        // A report about 200 comes too late: the interval up to 300 is closed.
        assert!(post(&mut ledger, GpuState::Idle, 200).is_empty());
        assert_eq!(ledger.node(NodeId(1)).iter().find(|o| o.state == GpuState::Idle).map(|o| o.from), Some(Time(300)));
    }

    #[test]
    fn a_cut_ends_an_interval_and_begins_its_like() {
        let mut ledger = Ledger::default();
        ledger.open_node(&node(1, 8), Time(0));
        let closed = ledger.cut(&GpuSet::of(NodeId(1), Slots(0b11)), Time(70));
        assert_eq!((closed.len(), closed[0].gpu_ms(), closed[0].state), (1, 140, GpuState::Free));
        assert!(ledger.cut(&GpuSet::of(NodeId(1), Slots(0b11)), Time(70)).is_empty(), "nothing is left to end");
        assert_eq!(ledger.node(NodeId(1)).len(), 2);
    }

    proptest! {
        #[test]
        fn the_states_sum_to_the_capacity(posts in prop::collection::vec(
            (1u32..4, 0u64..256, 0usize..15, 0i64..10_000, 0u64..3, prop::bool::weighted(0.1)), 0..60))
        {
            let mut ledger = Ledger::default();
            for id in 1..4 { ledger.open_node(&node(id, 8), Time(0)); }
            let mut closed = Vec::new();
            for (id, mask, state, at, job, cut) in posts {
                if cut {
                    closed.extend(ledger.cut(&GpuSet::of(NodeId(id), Slots(mask)), Time(at)));
                    continue;
                }
                let owner = (job > 0).then_some(Owner { job: JobId(job), attempt: 1 });
                closed.extend(ledger.post(&Posting {
                    gpus: GpuSet::of(NodeId(id), Slots(mask)),
                    state: GpuState::ALL[state], owner, at: Time(at) }));
            }
            let now = Time(20_000);
            let total: i128 = closed.iter().map(Entry::gpu_ms).sum::<i128>()
                + ledger.open_time(now).values().map(|s| i128::from(s.0)).sum::<i128>();
            prop_assert_eq!(total, 3 * 8 * 20_000);
            // No GPU is in two intervals at once: each node's open slots partition it.
            for id in 1..4 {
                let masks = ledger.node(NodeId(id));
                prop_assert_eq!(masks.iter().map(|o| o.slots.count()).sum::<u32>(), 8);
                prop_assert_eq!(masks.iter().fold(Slots::NONE, |a, o| a.or(o.slots)), Slots::first(8));
            }
            prop_assert!(closed.iter().all(|e| e.to > e.from));
        }
    }
}
