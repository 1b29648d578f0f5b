//! Sets of GPUs: for each node a mask of its slots.

use crate::model::NodeId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// GPU slots of one node; bit `i` is slot `i`. A node has at most 64.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Slots(pub u64);

impl Slots {
    /// No slot.
    pub const NONE: Slots = Slots(0);

    /// The first `n` slots.
    #[must_use]
    pub fn first(n: u32) -> Slots {
        if n >= 64 { Slots(u64::MAX) } else { Slots((1 << n) - 1) }
    }

    /// How many slots are in the set.
    #[must_use]
    pub fn count(self) -> u32 {
        self.0.count_ones()
    }

    /// Whether the set has no slot.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The slots in both sets.
    #[must_use]
    pub fn and(self, other: Slots) -> Slots {
        Slots(self.0 & other.0)
    }

    /// The slots in either set.
    #[must_use]
    pub fn or(self, other: Slots) -> Slots {
        Slots(self.0 | other.0)
    }

    /// The slots of this set that are not in `other`.
    #[must_use]
    pub fn without(self, other: Slots) -> Slots {
        Slots(self.0 & !other.0)
    }

    /// The `n` lowest slots of the set, or `None` if it has fewer.
    #[must_use]
    pub fn lowest(self, n: u32) -> Option<Slots> {
        let mut rest = self.0;
        let mut taken = 0;
        for _ in 0..n {
            if rest == 0 {
                return None;
            }
            let low = rest & rest.wrapping_neg();
            taken |= low;
            rest ^= low;
        }
        Some(Slots(taken))
    }

    /// The slot numbers in order.
    pub fn iter(self) -> impl Iterator<Item = u32> {
        let mut rest = self.0;
        std::iter::from_fn(move || {
            let next = (rest != 0).then(|| rest.trailing_zeros())?;
            rest &= rest - 1;
            Some(next)
        })
    }
}

/// GPUs of several nodes. Holds no empty mask, so equal sets compare equal.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct GpuSet(BTreeMap<NodeId, Slots>);

impl GpuSet {
    /// The set of one node's slots.
    #[must_use]
    pub fn of(node: NodeId, slots: Slots) -> GpuSet {
        let mut set = GpuSet::default();
        set.insert(node, slots);
        set
    }

    /// Adds slots of a node.
    pub fn insert(&mut self, node: NodeId, slots: Slots) {
        if !slots.is_empty() {
            let have = self.0.entry(node).or_default();
            *have = have.or(slots);
        }
    }

    /// The slots of `node` in the set.
    #[must_use]
    pub fn on(&self, node: NodeId) -> Slots {
        self.0.get(&node).copied().unwrap_or_default()
    }

    /// How many GPUs the set has.
    #[must_use]
    pub fn count(&self) -> u32 {
        self.0.values().map(|s| s.count()).sum()
    }

    /// Nodes with their slots, by node.
    pub fn iter(&self) -> impl Iterator<Item = (NodeId, Slots)> {
        self.0.iter().map(|(n, s)| (*n, *s))
    }
}

impl FromIterator<(NodeId, Slots)> for GpuSet {
    fn from_iter<T: IntoIterator<Item = (NodeId, Slots)>>(iter: T) -> GpuSet {
        let mut set = GpuSet::default();
        for (node, slots) in iter {
            set.insert(node, slots);
        }
        set
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lowest_takes_exactly_n_or_nothing() {
        let s = Slots(0b1011_0100);
        assert_eq!(s.lowest(2), Some(Slots(0b0001_0100)));
        assert_eq!(s.lowest(4), Some(s));
        assert_eq!(s.lowest(5), None);
        assert_eq!(s.lowest(0), Some(Slots::NONE));
    }

    #[test]
    fn empty_masks_leave_no_trace() {
        let mut set = GpuSet::of(NodeId(1), Slots::NONE);
        assert_eq!(set, GpuSet::default());
        set.insert(NodeId(1), Slots(1));
        set.insert(NodeId(1), Slots(2));
        assert_eq!(set.count(), 2);
        assert_eq!(set.on(NodeId(2)), Slots::NONE);
    }
}
