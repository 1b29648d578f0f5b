//! Random documents of administrators, and what follows from them.

use super::world::Rng;
use aviflow_core::health::Kind;
use aviflow_core::health::fault::Blame;
use aviflow_core::health::quarantine::{self, Quarantine, Rules, Seen};
use aviflow_core::model::{
    Decayed, Drain, Estimate, Histogram, History, NodeId, Policy, Pool, Queue, QueueDefaults, QueueState, Quota,
    RollingDrain, TimeSharing,
};
use aviflow_core::time::{Span, Time};
use aviflow_engine::ports::{Act, ActKind};
use std::collections::BTreeMap;

fn span(rng: &mut Rng) -> Span {
    Span(rng.time().0)
}

fn sharing(rng: &mut Rng) -> Option<TimeSharing> {
    let minimum_run = span(rng);
    rng.chance().then(|| TimeSharing { enabled: rng.chance(), minimum_run, ..TimeSharing::on() })
}

pub(super) fn queue(rng: &mut Rng) -> (String, Option<Queue>) {
    let name = format!("q{}", rng.below(3));
    if rng.below(4) == 0 {
        return (name, None);
    }
    let states = [QueueState::Open, QueueState::Held, QueueState::Draining];
    let quota =
        Quota { guarantee: rng.small(99), limit: rng.chance().then(|| rng.small(999)), weight: 1 + rng.small(9) };
    let queue = Queue {
        parent: rng.chance().then(|| rng.text()),
        state: states[rng.index(3)],
        quotas: (0..rng.small(3)).map(|_| (rng.text(), quota)).collect(),
        lend: rng.chance(),
        borrow: rng.chance(),
        reclaim: rng.chance(),
        defaults: QueueDefaults {
            time_limit: rng.chance().then(|| span(rng)),
            priority: rng.chance().then(|| rng.text()),
            preemptible: rng.chance().then(|| rng.chance()),
        },
        highest_priority: rng.chance().then_some(-7),
        submitters: (0..rng.below(3)).map(|_| rng.text()).collect(),
        time_sharing: sharing(rng),
        ..Queue::open(&name)
    };
    (name, Some(queue))
}

pub(super) fn pool(rng: &mut Rng) -> (String, Option<Pool>) {
    let name = format!("p{}", rng.below(3));
    if rng.below(4) == 0 {
        return (name, None);
    }
    let levels: Vec<String> = (0..rng.below(3)).map(|_| rng.text()).collect();
    let domains = (0..rng.below(4)).map(|n| (format!("n{n}"), levels.iter().map(|_| rng.text()).collect())).collect();
    (name.clone(), Some(Pool { name, time_sharing: sharing(rng), domains, levels }))
}

pub(super) fn policy(rng: &mut Rng) -> Policy {
    Policy {
        half_life: span(rng),
        reservations: rng.small(9),
        preemption: rng.chance(),
        minimum_run: span(rng),
        patience: span(rng),
        restart: span(rng),
    }
}

pub(super) fn usage(rng: &mut Rng) -> ((String, String), Option<Decayed>) {
    let key = (["main", "it's \"quoted\""][rng.index(2)].to_owned(), rng.text());
    let (value, at) = (rng.number(), rng.time());
    (key, (rng.below(4) > 0).then(|| Decayed { value, at, gpus: rng.small(99) }))
}

pub(super) fn history(rng: &mut Rng) -> History {
    let histogram = |rng: &mut Rng| Histogram((0..rng.below(40)).map(|_| rng.small(4000)).collect());
    let runs = (0..rng.small(6)).map(|class| (class, histogram(rng))).collect();
    let parts = (0..rng.below(32)).map(|_| rng.small(4000)).collect();
    let mut history = History { runs, parts, ..History::default() };
    if rng.chance() {
        let estimate = estimate(rng);
        history.calibration.learn(&estimate, rng.time());
    }
    history
}

pub(super) fn estimate(rng: &mut Rng) -> Estimate {
    Estimate { made: rng.time(), base: span(rng), class: rng.small(9), p50: rng.time(), p90: rng.time() }
}

pub(super) fn drain(rng: &mut Rng) -> Drain {
    Drain { from: rng.time(), until: rng.chance().then(|| rng.time()), by: rng.text(), reason: rng.text() }
}

/// Drains that go on, of which the last is new.
pub(super) fn quarantines(rng: &mut Rng) -> BTreeMap<String, Quarantine> {
    let mut book = Quarantine::default();
    for _ in 0..rng.below(4) {
        let seen = Seen {
            kind: Kind::Xid,
            blame: Blame::Gpu,
            node: NodeId(rng.small(9)),
            gpu: Some(rng.small(8)),
            job: None,
            at: Time(7),
            at_once: true,
        };
        book.note(&seen, quarantine::Pool { nodes: 40, open: 40, gpus: 8 }, &Rules::default());
    }
    BTreeMap::from([(rng.text(), book)])
}

pub(super) fn drains(rng: &mut Rng, last: u64) -> Vec<RollingDrain> {
    let new = rng.below(2);
    let ids = last.saturating_sub(rng.below(3))..=last + new;
    let nodes = |rng: &mut Rng| (0..rng.below(3)).map(|_| NodeId(rng.small(99))).collect();
    ids.map(|id| RollingDrain {
        id,
        nodes: nodes(rng),
        taken: nodes(rng),
        max_unavailable: rng.small(9),
        by: rng.chance().then(|| rng.time()),
        each: rng.chance().then(|| span(rng)),
        ordered_by: rng.text(),
        reason: rng.text(),
    })
    .collect()
}

pub(super) fn act(rng: &mut Rng, at: Time) -> Act {
    Act {
        at,
        by: rng.text(),
        what: rng.text(),
        kind: ActKind::ALL[rng.index(ActKind::ALL.len() as u64)],
        name: rng.text(),
        reason: rng.chance().then(|| rng.text()),
    }
}
