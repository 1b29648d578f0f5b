//! Where a gang goes: the smallest domain that holds it, the fullest of those
//! that do, so that large domains and whole nodes stay whole for the gangs that
//! need them; ranks that ran before stay where they were.

use super::grid::{Domain, Grid, Segment, View};
use crate::model::{NodeId, Placement};
use std::ops::RangeInclusive;

/// What is to be placed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted<'a> {
    pub(super) nodes: (u32, u32),
    pub(super) gpus_per_node: u32,
    /// The largest level of which one domain must hold it.
    pub(super) within: usize,
    /// The nodes of the last attempt.
    pub(super) last: &'a [NodeId],
    /// Nodes to be left where others have room.
    pub(super) avoid: &'a [NodeId],
}

/// The place of a gang on the free GPUs of a segment; none if there is none.
pub(super) fn place(grid: &Grid, segment: &Segment, view: &View, wanted: &Wanted<'_>) -> Option<Placement> {
    let (level, domain, nodes) = choose(grid, segment, view, wanted)?;
    let mut picked: Vec<usize> = Vec::with_capacity(nodes as usize);
    // Where its files are cached and its ranks were; packing matters more for parts of nodes.
    let again = wanted.last.iter().filter(|id| !wanted.avoid.contains(id));
    let again = again.filter_map(|id| grid.index.get(id).copied());
    let again = again.filter(|n| domain.nodes.contains(n) && view.free[*n].count() >= wanted.gpus_per_node);
    let mut again: Vec<usize> = again.take(nodes as usize).collect();
    again.sort_unstable();
    again.dedup();
    if wanted.gpus_per_node == segment.widest {
        picked.clone_from(&again);
    }
    let left = nodes as usize - picked.len();
    pick(grid, segment, view, wanted.gpus_per_node, level, domain, left, &again, &mut picked);
    if picked.len() < nodes as usize {
        return None;
    }
    leave(grid, segment, view, wanted, &mut picked);
    // Neighbours in the topology are neighbours in rank.
    picked.sort_unstable();
    let order = keep_ranks(grid, picked, wanted.last);
    order
        .into_iter()
        .map(|n| Some((grid.ids[n], view.free[n].lowest(wanted.gpus_per_node)?)))
        .collect::<Option<_>>()
        .map(Placement)
}

/// Puts others in the place of nodes that are to be left: the nearest that have room, the fullest of these. Where
/// there are none, they stay.
fn leave(grid: &Grid, segment: &Segment, view: &View, wanted: &Wanted<'_>, picked: &mut [usize]) {
    let avoid: Vec<usize> = wanted.avoid.iter().filter_map(|id| grid.index.get(id).copied()).collect();
    if avoid.is_empty() {
        return;
    }
    for i in 0..picked.len() {
        if !avoid.contains(&picked[i]) {
            continue;
        }
        let others: Vec<usize> = (0..picked.len()).filter(|j| *j != i).map(|j| picked[j]).collect();
        let holds = |d: &&Domain| d.nodes.contains(&picked[i]) && others.iter().all(|n| d.nodes.contains(n));
        let fits =
            |n: &usize| view.free[*n].count() >= wanted.gpus_per_node && !avoid.contains(n) && !picked.contains(n);
        let levels = 0..=wanted.within.min(segment.top());
        let another = levels
            .flat_map(|level| segment.domains[level].iter().filter(holds))
            .find_map(|d| d.nodes.clone().filter(fits).min_by_key(|n| (view.free[*n].count(), *n)));
        if let Some(another) = another {
            picked[i] = another;
        }
    }
}

/// The same, on the given nodes (in order) before others.
pub(super) fn place_preferring(
    grid: &Grid,
    segment: &Segment,
    view: &View,
    wanted: &Wanted<'_>,
    first: &[usize],
) -> Option<Placement> {
    let (_, domain, nodes) = choose(grid, segment, view, wanted)?;
    let rest = domain.nodes.clone().filter(|n| first.binary_search(n).is_err());
    let all = first.iter().copied().filter(|n| domain.nodes.contains(n)).chain(rest);
    let fitting = all.filter(|n| view.free[*n].count() >= wanted.gpus_per_node).take(nodes as usize);
    fitting
        .map(|n| Some((grid.ids[n], view.free[n].lowest(wanted.gpus_per_node)?)))
        .collect::<Option<_>>()
        .map(Placement)
}

/// The most nodes that one domain up to `within` has for it.
pub(super) fn room(grid: &Grid, segment: &Segment, view: &View, gpus: u32, within: usize) -> u32 {
    let domains = &segment.domains[within.min(segment.top())];
    domains.iter().map(|d| view.fits(grid, d.id, gpus)).max().unwrap_or(0)
}

fn choose<'a>(grid: &Grid, segment: &'a Segment, view: &View, wanted: &Wanted<'_>) -> Option<(usize, &'a Domain, u32)> {
    let room = room(grid, segment, view, wanted.gpus_per_node, wanted.within);
    if room < wanted.nodes.0 {
        return None;
    }
    let nodes = room.min(wanted.nodes.1);
    let levels: RangeInclusive<usize> = 0..=wanted.within.min(segment.top());
    for level in levels {
        // The least room that is left, then the one that holds most of the last attempt, then the first.
        let key = |d: &Domain| {
            let fits = view.fits(grid, d.id, wanted.gpus_per_node);
            let held = wanted.last.iter().filter_map(|id| grid.index.get(id)).filter(|n| d.nodes.contains(n)).count();
            (fits >= nodes).then_some((usize::MAX - held, fits, view.free_in(grid, d.id).0, d.id))
        };
        let best = segment.domains[level].iter().filter_map(|d| Some((key(d)?, d))).min_by_key(|(key, _)| *key);
        if let Some((_, domain)) = best {
            return Some((level, domain, nodes));
        }
    }
    None
}

/// Adds nodes of a domain: of as few of its parts as possible, and of the fullest that still have room; among
/// equals those of the last attempt.
#[expect(clippy::too_many_arguments, reason = "one recursion over what place() has found")]
fn pick(
    grid: &Grid,
    segment: &Segment,
    view: &View,
    gpus: u32,
    level: usize,
    domain: &Domain,
    nodes: usize,
    again: &[usize],
    out: &mut Vec<usize>,
) {
    if nodes == 0 {
        return;
    }
    let of_last = |n: usize| again.binary_search(&n).is_ok();
    // Whole nodes of the last attempt are picked before.
    let taken = |n: usize| gpus == segment.widest && of_last(n);
    let fitting = |d: &Domain| d.nodes.clone().filter(|n| view.free[*n].count() >= gpus && !taken(*n)).count();
    if level == 0 || nodes == 1 {
        let mut list: Vec<usize> =
            domain.nodes.clone().filter(|n| view.free[*n].count() >= gpus && !taken(*n)).collect();
        // The fullest that still have room; among them those of the domain with the least room.
        let small = |n: usize| grid.domains_of(n).next().map_or(0, |d| view.fits(grid, d, gpus));
        let key = |n: &usize| (view.free[*n].count(), !of_last(*n), small(*n), *n);
        if list.len() > nodes {
            list.select_nth_unstable_by_key(nodes - 1, key);
            list.truncate(nodes);
        }
        out.extend(list);
        return;
    }
    let inside = |d: &&Domain| domain.nodes.start <= d.nodes.start && d.nodes.end <= domain.nodes.end;
    let mut parts: Vec<(usize, &Domain)> =
        segment.domains[level - 1].iter().filter(inside).map(|d| (fitting(d), d)).filter(|(n, _)| *n > 0).collect();
    // Largest first; the first among equals.
    parts.sort_by_key(|(n, d)| (usize::MAX - *n, d.id));
    let mut left = nodes;
    while left > 0 && !parts.is_empty() {
        let enough = parts.iter().rposition(|(n, _)| *n >= left).unwrap_or(0);
        let (has, part) = parts.remove(enough);
        let from_here = has.min(left);
        pick(grid, segment, view, gpus, level - 1, part, from_here, again, out);
        left -= from_here;
    }
}

/// Puts nodes of the last attempt at their old ranks, and the others in order into the gaps.
fn keep_ranks(grid: &Grid, picked: Vec<usize>, last: &[NodeId]) -> Vec<usize> {
    if last.len() != picked.len() {
        return picked;
    }
    let mut order: Vec<Option<usize>> =
        last.iter().map(|id| grid.index.get(id).copied().filter(|n| picked.binary_search(n).is_ok())).collect();
    let mut rest: Vec<usize> = picked.iter().copied().filter(|n| !order.contains(&Some(*n))).rev().collect();
    for gap in order.iter_mut().filter(|o| o.is_none()) {
        *gap = rest.pop();
    }
    order.into_iter().flatten().collect()
}
