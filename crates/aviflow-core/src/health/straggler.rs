//! Ranks that need longer than the others for their own share of a step.
//!
//! Ranks of a synchronous training all take as long as the slowest, so the duration of a step says nothing of who it
//! is. What is compared is the time that a rank computed before it entered the collective, over windows of [`WINDOW`]
//! steps that are the same for all ranks: what varies with the batch varies for all, or evens out.
//!
//! A window has 16 groups of steps. In each, a rank's mean is taken as a share of the median of all ranks', and
//! of these shares the median counts, which a few odd steps do not move (a garbage collection, a page fault). A rank is
//! slow if that is above 1 by more than all of
//! - `least`, in thousandths;
//! - four standard errors of it, by the median absolute deviation (MAD) of its groups;
//! - four standard deviations of the ranks' own, by their MAD, where there are enough of them to tell.
//!
//! It is named after [`STRIKES`] such windows in a row. Where more ranks are slow than one node has, and than one in
//! 32, none is named: that is how the work was divided, as for the last stage of a pipeline, and no fault. Ranks of
//! different roles are compared with their like where the training tells the roles.
//!
//! Memory: 176 bytes a rank, 1.4 MB for 8,192; a fact is O(1), and the end of a window O(n) once in 128 steps.

use crate::model::NodeId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Groups of a window.
const GROUPS: usize = 16;

/// Steps of a group.
const GROUP: usize = 8;

/// Steps of a window.
pub const WINDOW: u64 = (GROUPS * GROUP) as u64;

/// Windows in a row after which a rank is named.
pub const STRIKES: u8 = 2;

/// Ranks that are needed for a comparison.
const RANKS: usize = 4;

/// Ranks from which on their deviation from each other says something.
const ENOUGH: usize = 16;

/// 1, in millionths.
const ONE: u32 = 1_000_000;

/// What a rank needed in the present window and in the last. Times in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Lane {
    /// Its window's number + 1; 0 before the first.
    window: u32,
    /// The window of `last`, + 1.
    done: u32,
    /// The last step that was taken in.
    step: u64,
    sums: [u32; GROUPS],
    counts: [u8; GROUPS],
    /// The means of the groups of the window before; 0 where there were too few steps to tell.
    last: [u32; GROUPS],
    /// What it does in the training; equal for ranks with equal work.
    role: u16,
    /// Windows in a row in which it was slow.
    strikes: u8,
}

impl Lane {
    /// The window is over, another begins.
    fn close(&mut self, next: u32) {
        self.done = self.window;
        for ((mean, sum), count) in self.last.iter_mut().zip(self.sums).zip(self.counts) {
            *mean = if usize::from(count) < GROUP / 2 { 0 } else { (sum / u32::from(count)).max(1) };
        }
        self.window = next;
        (self.sums, self.counts) = ([0; GROUPS], [0; GROUPS]);
    }

    fn add(&mut self, step: u64, micros: u64) {
        self.step = step;
        let group = usize::try_from(step % WINDOW).unwrap_or(0) / GROUP;
        self.sums[group] = self.sums[group].saturating_add(u32::try_from(micros).unwrap_or(u32::MAX));
        self.counts[group] = self.counts[group].saturating_add(1);
    }
}

/// A rank that is slower than the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Slow {
    /// The rank.
    pub rank: u32,
    /// By how many thousandths it needs longer than the median of the ranks.
    pub excess: u32,
}

/// The watch over the ranks of one gang.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Stragglers {
    /// Empty before the first timing.
    lanes: Vec<Lane>,
    /// The window in which ranks are compared, + 1; 0 before the first.
    window: u32,
    /// Ranks that have begun it, and that are through with it.
    begun: usize,
    through: usize,
    /// Ranks that have begun the one after it.
    next: usize,
}

impl Stragglers {
    /// Ranks start anew: what was measured before is of other processes, and perhaps of other nodes.
    pub fn started(&mut self) {
        *self = Stragglers::default();
    }

    /// Ranks with equal roles do equal work. All have role 0 until it is said.
    pub fn role(&mut self, rank: u32, ranks: u32, role: u16) {
        if self.known(rank, ranks) {
            self.lanes[rank as usize].role = role;
        }
    }

    /// A rank of `ranks` computed for so many microseconds in a step before it entered the collective. Returns the
    /// ranks that are slow, by more than `least` thousandths, where this ends a window.
    pub fn own_time(
        &mut self,
        rank: u32,
        ranks: u32,
        step: u64,
        micros: u64,
        least: u32,
        node: impl Fn(u32) -> NodeId,
    ) -> Vec<Slow> {
        // Steps beyond 2^32 windows do not come; they would all be in one.
        let window = u32::try_from(step / WINDOW).unwrap_or(u32::MAX - 2).min(u32::MAX - 2) + 1;
        let mut slow = Vec::new();
        if !self.known(rank, ranks) {
            return slow;
        }
        // What is late by more than a window is not late: steps are counted anew.
        if window + 1 < self.window {
            self.anew();
        }
        let lane = &mut self.lanes[rank as usize];
        if lane.window > window || (lane.window == window && step <= lane.step) {
            return slow;
        }
        if self.window == 0 {
            self.window = window;
        }
        if lane.window != window {
            let left = lane.window;
            lane.close(window);
            lane.add(step, micros);
            self.through += usize::from(left == self.window && left > 0);
            let ahead = window > self.window + 1;
            if ahead || (self.through > 0 && self.through >= self.begun) {
                slow = self.compare(least, &node);
                self.begun = self.next;
                (self.through, self.next) = (0, 0);
                self.window += 1;
            }
            if ahead {
                self.window = window;
                self.begun = 0;
            }
            self.begun += usize::from(window == self.window);
            self.next += usize::from(window == self.window + 1);
        } else {
            lane.add(step, micros);
        }
        slow
    }

    /// Steps are counted from the beginning again: only the roles stay.
    fn anew(&mut self) {
        let fresh = |lane: &Lane| Lane { role: lane.role, ..Lane::default() };
        let lanes = self.lanes.iter().map(fresh).collect();
        *self = Stragglers { lanes, ..Stragglers::default() };
    }

    fn known(&mut self, rank: u32, ranks: u32) -> bool {
        if rank < ranks && self.lanes.len() < ranks as usize {
            self.lanes.resize(ranks as usize, Lane::default());
        }
        (rank as usize) < self.lanes.len()
    }

    /// Compares the ranks that are through with the present window, each with those of its role.
    fn compare(&mut self, least: u32, node: &impl Fn(u32) -> NodeId) -> Vec<Slow> {
        let present = self.window;
        let mut roles: BTreeMap<u16, Vec<u32>> = BTreeMap::new();
        for (rank, lane) in (0u32..).zip(&self.lanes).filter(|(_, lane)| lane.done == present) {
            roles.entry(lane.role).or_default().push(rank);
        }
        roles.retain(|_, ranks| ranks.len() >= RANKS);
        let compared: usize = roles.values().map(Vec::len).sum();
        let mut slow: Vec<Slow> = roles.values().flat_map(|ranks| self.slower(ranks, least)).collect();
        slow.sort_unstable_by_key(|s| s.rank);
        let one_node = slow.iter().all(|s| node(s.rank) == node(slow[0].rank)) && 2 * slow.len() < compared;
        if !one_node && slow.len() > 1.max(compared / 32) {
            slow.clear();
        }
        for (rank, lane) in (0u32..).zip(self.lanes.iter_mut()) {
            let again = slow.binary_search_by_key(&rank, |s| s.rank).is_ok();
            lane.strikes = if again { lane.strikes.saturating_add(1) } else { 0 };
        }
        slow.retain(|s| self.lanes[s.rank as usize].strikes >= STRIKES);
        slow
    }

    /// Those of the ranks that are slower than the others.
    fn slower(&self, ranks: &[u32], least: u32) -> Vec<Slow> {
        let last = |rank: u32| &self.lanes[rank as usize].last;
        let mut medians = [0; GROUPS];
        for (group, median) in medians.iter_mut().enumerate() {
            let mut known: Vec<u32> = ranks.iter().map(|r| last(*r)[group]).filter(|mean| *mean > 0).collect();
            if known.len() >= RANKS {
                *median = middle(&mut known).0;
            }
        }
        // Of each rank its share of the median, and four standard errors of it: 4 · 1.4826 · MAD · 1.2533 / √16.
        let share = |rank: u32| {
            let groups = last(rank).iter().zip(medians).filter(|(mean, median)| **mean > 0 && *median > 0);
            let mut shares: Vec<u32> = groups.map(|(mean, median)| scaled(*mean, ONE, median)).collect();
            (shares.len() >= GROUPS / 2)
                .then(|| middle(&mut shares))
                .map(|(share, mad)| (rank, share, scaled(mad, 186, 100)))
        };
        let shares: Vec<(u32, u32, u32)> = ranks.iter().filter_map(|rank| share(*rank)).collect();
        if shares.len() < RANKS {
            return Vec::new();
        }
        let (_, mad) = middle(&mut shares.iter().map(|(_, share, _)| *share).collect::<Vec<_>>());
        // 4 · 1.4826 · MAD.
        let common = if shares.len() >= ENOUGH { scaled(mad, 593, 100) } else { 0 };
        let least = least.saturating_mul(ONE / 1000).max(common);
        shares
            .into_iter()
            .map(|(rank, share, doubt)| (rank, share.saturating_sub(ONE), doubt))
            .filter(|(_, excess, doubt)| *excess > least.max(*doubt))
            .map(|(rank, excess, _)| Slow { rank, excess: excess / (ONE / 1000) })
            .collect()
    }
}

/// The median, and the median of the distances to it. The values come back in another order.
fn middle(values: &mut [u32]) -> (u32, u32) {
    let at = values.len() / 2;
    let median = *values.select_nth_unstable(at).1;
    let mut distances: Vec<u32> = values.iter().map(|v| v.abs_diff(median)).collect();
    (median, *distances.select_nth_unstable(at).1)
}

fn scaled(value: u32, times: u32, of: u32) -> u32 {
    u32::try_from(u64::from(value) * u64::from(times) / u64::from(of)).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests;
