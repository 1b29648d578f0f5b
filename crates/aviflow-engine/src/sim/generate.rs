//! The histories: what a seed makes of people, failures and faults.

use super::hash;
use super::script::{Fault, FaultAt, Item, JobScript, Outcome, QueueScript, Script, Step, Write};
use aviflow_core::time::Span;

/// What kinds of things happen in a history. Each is drawn by itself, so that they meet.
#[derive(Clone, Copy, Debug)]
struct Features {
    quotas: bool,
    sharing: bool,
    topology: bool,
    drains: bool,
    people: bool,
    chains: bool,
    shared: bool,
}

/// Numbers of a seed, by what they are for.
#[derive(Clone, Copy)]
struct Draw(u64);

impl Draw {
    fn below(self, what: u64, n: u64, below: u64) -> u64 {
        hash(&[self.0, what, n]) % below.max(1)
    }

    fn small(self, what: u64, n: u64, below: u32) -> u32 {
        u32::try_from(self.below(what, n, u64::from(below))).unwrap_or(0)
    }

    fn ms(self, what: u64, n: u64, below: u64) -> i64 {
        i64::try_from(self.below(what, n, below)).unwrap_or(0)
    }

    fn one_in(self, what: u64, n: u64, parts: u64) -> bool {
        self.below(what, n, parts) == 0
    }
}

impl Features {
    fn draw(draw: Draw) -> Features {
        Features {
            quotas: draw.one_in(301, 0, 2),
            sharing: draw.one_in(302, 0, 4),
            topology: draw.one_in(303, 0, 3),
            drains: draw.one_in(304, 0, 3),
            people: draw.one_in(305, 0, 2),
            chains: draw.one_in(306, 0, 3),
            shared: draw.one_in(307, 0, 3),
        }
    }

    /// With what makes a transition likely.
    #[cfg(test)]
    fn for_transition(self, transition: &str) -> Features {
        let any = |words: &[&str]| words.iter().any(|w| transition.contains(w));
        Features {
            quotas: self.quotas || any(&["reclaim", "queue", "spare", "unclaim"]),
            sharing: self.sharing || any(&["turn"]) && !any(&["turned"]) || any(&["turned out/turn"]),
            topology: self.topology || any(&["pool"]),
            drains: self.drains || any(&["drain", "window", "unclaim"]),
            people: self.people || any(&["hold", "release", "update", "spare", "priority"]),
            chains: self.chains || any(&["dependency"]),
            shared: self.shared || any(&["others", "moved", "leave", "refused"]),
        }
    }
}

impl Script {
    /// The history of a seed.
    #[must_use]
    pub fn generate(seed: u64) -> Script {
        Script::with(seed, Features::draw(Draw(seed)))
    }

    /// A history of a seed in which the first write that holds a transition fails.
    #[cfg(test)]
    pub(super) fn aimed(seed: u64, transition: &str, fault: Fault) -> Script {
        let mut script = Script::with(seed, Features::draw(Draw(seed)).for_transition(transition));
        script.aim(transition, fault);
        script
    }

    fn with(seed: u64, features: Features) -> Script {
        let draw = Draw(seed);
        let nodes = 2 + draw.small(1, 0, 3);
        let mut items = Vec::new();
        documents(draw, nodes, features, &mut items);
        let jobs = 2 + draw.below(2, 0, 6) + if features.quotas || features.sharing { 3 } else { 0 };
        for n in 0..jobs {
            let at = draw.ms(3, n, 60_000);
            items.push(Step { at, item: Item::Submit(job(draw, n, nodes, features)) });
            to_job(draw, n, at, features, &mut items);
        }
        failures(draw, nodes, &mut items);
        if features.shared {
            others(draw, nodes, features, &mut items);
        }
        if features.drains {
            drains(draw, nodes, &mut items);
        }
        if draw.one_in(17, 0, 2) {
            let phases = [
                "Suspending",
                "Stopping/failure",
                "Stopping/node failure",
                "Stopping/requeue",
                "Stopping/time limit",
                "Stopping/refused",
            ];
            let phase = phases[draw.small(18, 0, 6) as usize].to_owned();
            items.push(Step { at: 0, item: Item::CancelWhen { phase } });
        }
        for n in 0..draw.below(12, 0, 9) {
            let write = draw.small(13, n, 60);
            let orders = draw.small(15, n, 4);
            let fault = match draw.below(14, n, 5) {
                0 | 1 => Fault::CrashBefore,
                2 | 3 => Fault::CrashAfter { orders },
                _ => Fault::StoreFull,
            };
            items.push(Step { at: 0, item: Item::Fault(FaultAt { write: Write::Number(write), fault }) });
        }
        items.sort_by_key(|s| s.at);
        Script { seed, nodes, items }
    }
}

/// What is set up at the beginning, and changed later.
fn documents(draw: Draw, nodes: u32, features: Features, items: &mut Vec<Step>) {
    let policy = |n: u64| Item::Policy {
        preemption: !draw.one_in(310, n, 8),
        minimum_run: Span(500 + draw.ms(311, n, 10_000)),
        patience: Span(1000 + draw.ms(312, n, 20_000)),
    };
    items.push(Step { at: 0, item: policy(0) });
    if draw.one_in(313, 0, 6) {
        items.push(Step { at: draw.ms(314, 0, 90_000), item: policy(1) });
    }
    let pool = |n: u64| Item::Pool { levels: features.topology, sharing: features.sharing && draw.one_in(315, n, 2) };
    if features.topology || features.sharing {
        items.push(Step { at: 0, item: pool(0) });
        if draw.one_in(316, 0, 5) {
            items.push(Step { at: draw.ms(317, 0, 90_000), item: pool(1) });
        }
        if draw.one_in(318, 0, 8) {
            items.push(Step { at: draw.ms(319, 0, 120_000), item: Item::DropPool });
        }
    }
    if !features.quotas {
        return;
    }
    for (n, name) in (0..).zip(["a", "b", "c"]) {
        items.push(Step { at: n, item: Item::Queue(queue(draw, name, 0, nodes, features)) });
        let key = u64::try_from(n).unwrap_or(0);
        if draw.one_in(330, key, 3) {
            let at = draw.ms(331, key, 120_000);
            items.push(Step { at, item: Item::Queue(queue(draw, name, 1, nodes, features)) });
        }
        if draw.one_in(332, key, 6) {
            let at = draw.ms(333, key, 120_000);
            let to = draw.one_in(334, key, 2).then(|| "default".to_owned());
            let leave = to.is_none() && draw.one_in(335, key, 2);
            items.push(Step { at, item: Item::DropQueue { name: name.to_owned(), to, leave } });
        }
    }
}

fn queue(draw: Draw, name: &str, version: u64, nodes: u32, features: Features) -> QueueScript {
    let key = version * 100 + name.bytes().next().map_or(0, u64::from);
    let whole = nodes * 8;
    let guarantee = draw.small(340, key, nodes + 1) * 4;
    let limit = draw.one_in(341, key, 3).then(|| (guarantee + 4 * draw.small(342, key, 6)).min(whole).max(4));
    let limit = limit.filter(|l| *l >= guarantee);
    QueueScript {
        name: name.to_owned(),
        parent: (name == "c").then(|| "a".to_owned()),
        guarantee,
        limit,
        keeps: draw.one_in(343, key, 6),
        modest: draw.one_in(344, key, 8),
        patient: draw.one_in(345, key, 8),
        held: version > 0 && draw.one_in(346, key, 3),
        sharing: features.sharing && draw.one_in(347, key, 2),
        highest: draw.one_in(348, key, 6).then_some(50),
    }
}

/// What people do to a job after its submission.
fn to_job(draw: Draw, n: u64, at: i64, features: Features, items: &mut Vec<Step>) {
    let name = format!("j{n}");
    let later = at + draw.ms(4, n, 120_000);
    let soon = later + draw.ms(16, n, 20_000);
    let mut push = |at, item| items.push(Step { at, item });
    match draw.below(5, n, 6) {
        0 => push(later, Item::Cancel { job: name.clone() }),
        1 => {
            push(later, Item::Suspend { job: name.clone() });
            push(soon, Item::Release { job: name.clone() });
        }
        2 => {
            push(later, Item::Suspend { job: name.clone() });
            push(soon, Item::Cancel { job: name.clone() });
        }
        _ => {}
    }
    if !features.people {
        return;
    }
    if draw.one_in(350, n, 3) {
        let begin = at + draw.ms(351, n, 60_000);
        push(begin, Item::Hold { job: name.clone() });
        push(begin + draw.ms(352, n, 60_000), Item::Release { job: name.clone() });
    }
    for k in 0..draw.below(353, n, 3) {
        let key = 10 * n + k;
        let queues = ["a", "b", "c", "default"];
        let queue = (features.quotas && draw.one_in(354, key, 2)).then(|| queues[draw.small(355, key, 4) as usize]);
        push(
            at + draw.ms(356, key, 90_000),
            Item::Update {
                job: name.clone(),
                priority: draw.one_in(357, key, 2).then(|| [-100, 0, 100][draw.small(358, key, 3) as usize]),
                queue: queue.map(str::to_owned),
                time_limit: draw.one_in(359, key, 4).then(|| Span(2_000 + draw.ms(360, key, 90_000))),
            },
        );
    }
}

/// What breaks.
fn failures(draw: Draw, nodes: u32, items: &mut Vec<Step>) {
    for n in 0..draw.below(6, 0, 7) {
        let at = draw.ms(7, n, 200_000);
        let node = 1 + draw.small(8, n, nodes);
        let pick = draw.below(9, n, u64::MAX);
        let for_ms = 1000 + draw.ms(10, n, 60_000);
        let end = at + for_ms;
        match draw.below(11, n, 8) {
            0..=2 => items.push(Step { at, item: Item::KillRank { pick } }),
            3 | 4 => items.push(Step { at, item: Item::KillAgent { pick } }),
            5 => items.push(Step { at, item: Item::LoseNode { node, for_ms } }),
            6 => {
                items.push(Step { at, item: Item::Cordon { node, on: true } });
                items.push(Step { at: end, item: Item::Cordon { node, on: false } });
                items.push(Step { at, item: Item::Pause { on: true } });
                items.push(Step { at: end, item: Item::Pause { on: false } });
            }
            _ => {
                items.push(Step { at, item: Item::Break { node, slots: vec![0, 3] } });
                items.push(Step { at: end, item: Item::Break { node, slots: vec![] } });
            }
        }
    }
}

/// What others do on the nodes.
fn others(draw: Draw, nodes: u32, features: Features, items: &mut Vec<Step>) {
    for n in 0..4 + draw.below(410, 0, 16) {
        let at = draw.ms(411, n, 200_000);
        let node = 1 + draw.small(412, n, nodes);
        match draw.below(413, n, 6) {
            0 => {
                items.push(Step { at, item: Item::Close { node, on: true } });
                let end = at + 1000 + draw.ms(414, n, 60_000);
                items.push(Step { at: end, item: Item::Close { node, on: false } });
            }
            1 if features.topology => {
                let of = draw.small(415, n, 3);
                let path = if of == 0 { Vec::new() } else { vec![format!("l{of}"), "s0".to_owned()] };
                items.push(Step { at, item: Item::Label { node, path } });
            }
            // Mostly more than there is: they take what they get.
            _ => items.push(Step { at, item: Item::Others { node, gpus: draw.small(416, n, 12).saturating_sub(2) } }),
        }
    }
}

fn drains(draw: Draw, nodes: u32, items: &mut Vec<Step>) {
    for n in 0..1 + draw.below(370, 0, 2) {
        let at = draw.ms(371, n, 120_000);
        let node = 1 + draw.small(372, n, nodes);
        let length = Some(Span(2_000 + draw.ms(373, n, 60_000)));
        let one = |ahead, length| Item::Drain { nodes: vec![node], ahead, length, at_once: None, within: None };
        let all = |length, at_once, within| {
            let some = if draw.one_in(374, n, 2) { 1..=nodes } else { 1..=nodes - 1 };
            Item::Drain { nodes: some.collect(), ahead: None, length, at_once, within }
        };
        let within = Some(Span(20_000 + draw.ms(375, n, 200_000)));
        let after = at + 2_000 + draw.ms(376, n, 60_000);
        match draw.below(377, n, 6) {
            0 => {
                items.push(Step { at, item: one(None, None) });
                items.push(Step { at: after, item: Item::Cordon { node, on: false } });
            }
            1 => items.push(Step { at, item: one(None, length) }),
            2 => items.push(Step { at, item: one(Some(Span(1_000 + draw.ms(378, n, 60_000))), length) }),
            3 => items.push(Step { at, item: all(length, Some(1), within) }),
            4 => items.push(Step { at, item: all(length, Some(1 + draw.small(379, n, 2)), None) }),
            _ => {
                items.push(Step { at, item: all(None, None, within) });
                for node in 1..=nodes {
                    let at = after + draw.ms(380, 10 * n + u64::from(node), 200_000);
                    items.push(Step { at, item: Item::Cordon { node, on: false } });
                }
            }
        }
        if draw.one_in(381, n, 4) {
            let node = draw.one_in(382, n, 2).then_some(node);
            items.push(Step { at: after, item: Item::CancelDrain { node } });
        }
    }
}

fn job(draw: Draw, n: u64, nodes: u32, features: Features) -> JobScript {
    let own = |what: u64, below: u64| hash(&[draw.0, 100 + what, n]) % below;
    let small = |what: u64, below: u64| u32::try_from(own(what, below)).unwrap_or(0);
    let outcome = |k: u64| match hash(&[draw.0, 200, n, k]) % 14 {
        0..=2 => Outcome::Fail,
        3 => Outcome::Requeue,
        4 => Outcome::LaunchFails,
        5 => Outcome::NeverReady,
        6 => Outcome::Evicted,
        7 => Outcome::Leaves,
        8 => Outcome::Refused,
        _ => Outcome::Succeed,
    };
    let gpus_per_node = [1, 2, 4, 8][small(0, 4) as usize];
    let levels = ["leaf", "leaf", "leaf", "spine", "spine", "spine", "node", "rack"];
    let level = |what: u64| levels[draw.small(what, n, 8) as usize].to_owned();
    let ends = ["succeeded", "failed", "ended"];
    let waits = features.chains && n > 0 && draw.one_in(390, n, 2);
    let after = (0..=draw.below(391, n, 2)).map(|k| {
        let on = ends[draw.small(392, 10 * n + k, 5).min(2) as usize];
        (format!("j{}", draw.below(393, 10 * n + k, n)), on.to_owned())
    });
    JobScript {
        name: format!("j{n}"),
        nodes: 1 + small(1, u64::from(nodes)),
        gpus_per_node,
        ranks_per_node: if own(2, 2) == 0 { 1 } else { gpus_per_node.min(2) },
        priority: [0, 0, 100][small(3, 3) as usize],
        run_ms: 1000 + i64::try_from(own(4, 60_000)).unwrap_or(0),
        failures_allowed: small(5, 3),
        time_limit: (own(6, 5) == 0).then(|| Span(5_000 + i64::try_from(own(7, 60_000)).unwrap_or(0))),
        environment: (own(8, 3) == 0).then(|| small(9, 2)),
        queue: if features.quotas { ["a", "b", "c", "default"][draw.small(394, n, 4) as usize] } else { "default" }
            .to_owned(),
        user: ["ann", "bob", "cas"][draw.small(395, n, 3) as usize].to_owned(),
        preemptible: !draw.one_in(396, n, 4),
        saves_every: draw.one_in(397, n, 2).then(|| Span(3_000 + draw.ms(398, n, 9_000))),
        saves_on_request: draw.one_in(399, n, 3),
        require: (features.topology && draw.one_in(400, n, 4)).then(|| level(401)),
        prefer: (features.topology && draw.one_in(402, n, 4)).then(|| level(403)),
        after: if waits { after.collect() } else { Vec::new() },
        outcomes: if own(11, 16) == 0 {
            vec![Outcome::Impossible; 5 + small(12, 2) as usize]
        } else {
            (0..own(10, 4)).map(outcome).collect()
        },
    }
}
