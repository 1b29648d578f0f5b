//! The watch over one job's gang: facts in, news out.

use super::Settings;
use super::culprit::{self, Because, Culprit, RankFacts};
use super::fault::Kind;
use super::hang::{Hang, Stage};
use super::numbers::{Numbers, Reading, Shows};
use super::power::Power;
use super::straggler::{Slow, Stragglers};
use super::xid::{Asks, Judged, Xid};
use crate::model::NodeId;
use crate::time::{Span, Time};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Stacks that are kept: those of more ranks than any gang has.
const STACKS: usize = 65_536;

/// Findings of an epoch that are known to have been told; more are told again.
const TOLD: usize = 1024;

/// Something that was seen of a gang.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Fact {
    /// A rank made a step.
    Step {
        /// The rank.
        rank: u32,
        /// The step.
        step: u64,
        /// How many steps there will be, where it is known.
        total: Option<u64>,
        /// The loss, where it was told.
        loss: Option<Reading>,
        /// Microseconds that the rank computed in this step before it entered the collective, where it was told.
        own_micros: Option<u64>,
    },
    /// Something that is no step was printed or seen: data is loaded, weights are, an evaluation goes on.
    Active,
    /// What a rank does in the training, as a number: equal for equal work, such as the stage of a pipeline.
    Role {
        /// The rank.
        rank: u32,
        /// The number.
        role: u16,
    },
    /// The training stands still for a checkpoint.
    CheckpointBegun,
    /// A checkpoint is over.
    CheckpointOver {
        /// Whether it is complete; else it will not be.
        complete: bool,
    },
    /// A sample of a rank's GPU.
    Gpu {
        /// The rank.
        rank: u32,
        /// Utilization in percent.
        utilization: u32,
        /// Power in percent of the board's limit.
        power: u32,
    },
    /// A rank entered a collective.
    Collective {
        /// The rank.
        rank: u32,
        /// Its number, counted by the process group.
        number: u64,
    },
    /// A rank's stack was taken.
    Stack {
        /// Its worker.
        worker: u32,
        /// The rank, as its processes know it: of a launcher that starts several, it is their own.
        rank: u32,
        /// A number that is equal for equal stacks.
        stack: u64,
    },
    /// A rank ended. Who was the first, and of what, is judged by the lifecycle once all are gone.
    Ended {
        /// The rank.
        rank: u32,
        /// Whether it did what it had to: then the others may still, and else the gang stops.
        ok: bool,
    },
    /// A step is the first of the epoch, of whatever rank.
    FirstStep {
        /// The step.
        step: u64,
    },
    /// A worker's disk is full.
    DiskFull {
        /// The worker.
        worker: u32,
    },
    /// An XID on one of the gang's nodes, as the pool's [`super::xid::Xids`] judged it.
    Xid {
        /// The XID.
        xid: Xid,
        /// What it asks for.
        judged: Judged,
    },
    /// A port of one of the gang's nodes, as the pool's [`super::links::Links`] judged it.
    Link {
        /// The node.
        node: NodeId,
        /// [`Kind::LinkDown`] or [`Kind::LinkErrors`].
        kind: Kind,
    },
    /// A device of one of the gang's nodes is reported as broken.
    DeviceUnhealthy {
        /// The node.
        node: NodeId,
        /// The GPU's slot, if it is one of these.
        gpu: Option<u32>,
    },
    /// Whether a worker's agent is heard.
    Heard {
        /// The worker.
        worker: u32,
        /// Whether it is.
        heard: bool,
    },
    /// The ranks are being stopped.
    Stopping,
}

/// What the watch has to say.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum News {
    /// The gang is quiet: take the stacks of all ranks, and tell them as facts.
    TakeStacks,
    /// Something looks wrong, and is not acted on yet.
    Suspected(Finding),
    /// Something is wrong: decide.
    Found(Finding),
    /// What was suspected or found is over.
    Over(Kind),
}

/// Something that is wrong with a gang.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Finding {
    /// The class.
    pub kind: Kind,
    /// When it happened, as far as it is known; of a hang, the last step.
    pub at: Time,
    /// The rank, or the culprit's.
    pub rank: Option<u32>,
    /// Its node.
    pub node: Option<NodeId>,
    /// The GPU's slot there.
    pub gpu: Option<u32>,
    /// What tells the culprit, where one is named.
    pub because: Option<Because>,
    /// What an XID asks for that explains it.
    pub asks: Option<Asks>,
    /// What was seen, in a few words.
    pub detail: String,
}

impl Finding {
    pub(crate) fn new(kind: Kind, at: Time, detail: String) -> Finding {
        Finding { kind, at, rank: None, node: None, gpu: None, because: None, asks: None, detail }
    }

    fn of(mut self, culprit: Option<&Culprit>) -> Finding {
        if let Some(c) = culprit {
            (self.rank, self.node, self.because) = (Some(c.rank), Some(c.node), Some(c.because));
        }
        self
    }
}

/// The watch over one gang, for the life of its job: what is learned of the steps is kept over epochs and attempts.
///
/// 64 bytes a rank, 241 where ranks tell what they need for their own share of a step, and 3 kB: 2 MB for 8,192 ranks.
/// It may be stored; one that is lost is made anew, and forgets only how long steps take, for the first of which it
/// then waits longer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Watch {
    /// The nodes of the workers, and ranks of each.
    nodes: Vec<NodeId>,
    per_worker: u32,
    ranks: Vec<RankFacts>,
    hang: Hang,
    power: Power,
    stragglers: Stragglers,
    numbers: Numbers,
    /// Stacks by rank, with the worker, since they were asked for.
    stacks: BTreeMap<u32, (u32, u64)>,
    unheard: BTreeSet<u32>,
    told: BTreeSet<(Kind, u32, u32)>,
    /// What of the hang was told.
    stage: Stage,
    /// Whether a hang was told in this epoch that has no culprit, and is not over.
    unexplained: bool,
}

impl Watch {
    /// Ranks of an epoch have started: worker i on the ith node, each with as many ranks. `tells_steps` is whether the
    /// job ever told a step.
    pub fn started(&mut self, nodes: Vec<NodeId>, per_worker: u32, tells_steps: bool, at: Time) {
        let ranks = nodes.len().saturating_mul(per_worker as usize);
        if std::mem::take(&mut self.unexplained) {
            self.hang.doubt();
        }
        (self.nodes, self.per_worker) = (nodes, per_worker);
        self.ranks = vec![RankFacts::default(); ranks];
        self.hang.started(at);
        if tells_steps {
            self.hang.tells_steps();
        }
        self.power.started();
        self.stragglers.started();
        self.numbers.started();
        self.unheard.clear();
        self.stacks.clear();
        self.hang.heard(true, at);
        self.told.clear();
        self.stage = Stage::Fine;
    }

    /// The ranks are gone, or being stopped: nothing is told of them any more, and only what is learned of the job is
    /// kept.
    pub fn stopped(&mut self) {
        self.hang.stopped();
        (self.nodes, self.ranks) = (Vec::new(), Vec::new());
        self.power.started();
        self.stragglers.started();
        self.unheard.clear();
        self.stacks.clear();
        self.told.clear();
    }

    /// After [`Watch::started`], that the ranks had made steps before this control plane looked.
    pub fn resumed(&mut self, now: Time) {
        self.hang.resumed(now);
    }

    /// Takes a fact in that happened at `at` and is known since `now`.
    pub fn fact(&mut self, fact: &Fact, at: Time, now: Time, settings: &Settings) -> Vec<News> {
        let mut news = Vec::new();
        let at = at.min(now);
        match fact {
            Fact::Step { rank, .. } if *rank >= self.size() => {}
            Fact::Step { rank, step, total, loss, own_micros } => {
                self.step(*rank, *step, at, settings, &mut news);
                if let Some(reading) = loss {
                    self.loss(*rank, *step, *reading, at, settings, &mut news);
                }
                if let Some(micros) = own_micros {
                    self.own_time(*rank, *step, *micros, at, settings, &mut news);
                }
                if total.is_some_and(|total| *step >= total) {
                    self.hang.finishing(at);
                }
            }
            Fact::Active => {
                self.hang.active(at);
                self.power.step(at);
                self.calm(&mut news);
            }
            Fact::Role { rank, role } => self.stragglers.role(*rank, self.size(), *role),
            Fact::CheckpointBegun => {
                self.hang.checkpoint_begun(at);
                self.calm(&mut news);
            }
            Fact::CheckpointOver { complete } => {
                self.hang.checkpoint_over(at);
                if *complete {
                    self.hang.trust();
                }
                self.power.step(at);
                self.calm(&mut news);
            }
            Fact::Gpu { rank, utilization, power } => {
                let (ranks, limits) = (self.size(), &settings.power);
                self.power.sample(*rank, ranks, *utilization, *power, at, limits);
            }
            Fact::Collective { rank, number } => {
                if let Some(known) = self.ranks.get_mut(*rank as usize) {
                    known.collective = known.collective.max(Some(*number));
                }
            }
            Fact::Stack { worker, rank, stack } => {
                if (*worker as usize) < self.nodes.len() && self.stacks.len() < STACKS {
                    self.stacks.insert(*rank, (*worker, *stack));
                }
            }
            Fact::Ended { ok: true, .. } => self.hang.finishing(at),
            Fact::Ended { ok: false, .. } => self.hang.stopped(),
            Fact::FirstStep { step } => {
                if self.hang.step(*step, at) {
                    self.power.step(at);
                    self.calm(&mut news);
                }
            }
            Fact::DiskFull { worker } => {
                let finding = Finding::new(Kind::DiskFull, at, String::new());
                let node = self.nodes.get(*worker as usize).copied();
                self.found(Finding { node, ..finding }, *worker, settings, &mut news);
            }
            Fact::Xid { xid, judged } => self.xid(xid, judged, at, settings, &mut news),
            Fact::Link { node, kind } => {
                let finding = Finding { node: Some(*node), ..Finding::new(*kind, at, String::new()) };
                self.on_node(finding, settings, &mut news);
            }
            Fact::DeviceUnhealthy { node, gpu } => {
                let finding = Finding::new(Kind::DeviceUnhealthy, at, String::new());
                self.on_node(Finding { node: Some(*node), gpu: *gpu, ..finding }, settings, &mut news);
            }
            Fact::Heard { worker, heard } => {
                let known = (*worker as usize) < self.nodes.len();
                if known && if *heard { self.unheard.remove(worker) } else { self.unheard.insert(*worker) } {
                    self.hang.heard(self.unheard.is_empty(), now);
                    self.power.step(now);
                    self.calm(&mut news);
                }
            }
            Fact::Stopping => self.hang.stopped(),
        }
        news.extend(self.tick(now, settings));
        news
    }

    /// When [`Watch::tick`] would have something to say if no fact comes before.
    #[must_use]
    pub fn next_deadline(&self, settings: &Settings) -> Option<Time> {
        let hang = self.hang.next(&settings.hang).filter(|_| settings.on(Kind::Hang));
        [hang, self.waits_in_vain(settings)].into_iter().flatten().min()
    }

    /// What has become true by the passing of time.
    pub fn tick(&mut self, now: Time, settings: &Settings) -> Vec<News> {
        let mut news = Vec::new();
        let hangs = settings.on(Kind::Hang);
        let mut stage = if hangs { self.hang.ask(now, &settings.hang) } else { Stage::Fine };
        if self.waits_in_vain(settings).is_some_and(|due| due <= now) {
            let quiet = self.hang.quiet(now);
            let detail = format!("most GPUs only wait, and no step for {quiet}");
            let finding = Finding::new(Kind::BusyIdle, now - quiet, detail);
            let finding = finding.of(self.culprit().as_ref());
            self.unexplained = finding.rank.is_none();
            self.found(finding, 0, settings, &mut news);
            if hangs && self.hang.confirm() {
                stage = Stage::Hung;
            }
        }
        self.hung(stage, now, settings, &mut news);
        news
    }

    /// The rank that is to be named for a hang: that which is not where all others wait. To be asked again once stacks
    /// have come.
    #[must_use]
    pub fn culprit(&self) -> Option<Culprit> {
        let node = |rank| self.node_of(rank).unwrap_or(NodeId(u32::MAX));
        let of = |worker: u32| self.nodes.get(worker as usize).copied().unwrap_or(NodeId(u32::MAX));
        let each = self.per_worker.max(1);
        if self.stacks.iter().all(|(rank, (worker, _))| *rank < self.size() && rank / each == *worker) {
            let mut ranks = self.ranks.clone();
            for (rank, (_, stack)) in &self.stacks {
                ranks[*rank as usize].stack = Some(*stack);
            }
            return culprit::of_hang(&ranks, node);
        }
        // A launcher counts the ranks that it started, of which only stacks are known.
        culprit::of_hang(&self.ranks, node).or_else(|| {
            let stacks: Vec<(u32, u32, u64)> =
                self.stacks.iter().map(|(rank, (w, stack))| (*rank, *w, *stack)).collect();
            let facts = |(_, _, stack): &(u32, u32, u64)| RankFacts { stack: Some(*stack), ..RankFacts::default() };
            let ranks: Vec<RankFacts> = stacks.iter().map(facts).collect();
            let named = culprit::of_hang(&ranks, |index| of(stacks[index as usize].1))?;
            Some(Culprit { rank: stacks[named.rank as usize].0, ..named })
        })
    }

    /// The p99 of the time between two reports of steps.
    #[must_use]
    pub fn step_p99(&self) -> Option<Span> {
        self.hang.p99()
    }

    fn size(&self) -> u32 {
        u32::try_from(self.ranks.len()).unwrap_or(u32::MAX)
    }

    fn node_of(&self, rank: u32) -> Option<NodeId> {
        self.nodes.get((rank / self.per_worker.max(1)) as usize).copied()
    }

    fn step(&mut self, rank: u32, step: u64, at: Time, settings: &Settings, news: &mut Vec<News>) {
        let Some(known) = self.ranks.get_mut(rank as usize) else { return };
        if known.step.replace(step).is_some_and(|last| step < last) {
            self.hang.counts_anew(at);
        }
        if self.hang.step(step, at) {
            // What the stacks were says nothing of where ranks are now.
            self.stacks.clear();
            self.power.step(at);
            self.calm(news);
            if self.told.remove(&(Kind::BusyIdle, 0, 0)) && settings.on(Kind::BusyIdle) {
                news.push(News::Over(Kind::BusyIdle));
            }
        }
    }

    /// Where the gang goes on, what was told of it is over.
    fn calm(&mut self, news: &mut Vec<News>) {
        if self.hang.stage() != Stage::Fine {
            return;
        }
        if self.stage >= Stage::Suspected {
            news.push(News::Over(Kind::Hang));
        }
        (self.stage, self.unexplained) = (Stage::Fine, false);
    }

    fn hung(&mut self, stage: Stage, now: Time, settings: &Settings, news: &mut Vec<News>) {
        if stage <= self.stage {
            return;
        }
        if self.stage < Stage::Quiet {
            // Of an earlier pause: they say nothing of this one.
            self.stacks.clear();
            news.push(News::TakeStacks);
        }
        self.stage = stage;
        if stage < Stage::Suspected {
            return;
        }
        let quiet = self.hang.quiet(now);
        let told = self.hang.doubled(self.hang.limits(&settings.hang).0);
        let usual = match self.hang.p99() {
            Some(p99) if self.hang.between_steps() => {
                format!("99 of 100 steps take at most {p99}, and {told} is waited")
            }
            _ => "longer than is waited for what it does".to_owned(),
        };
        let finding = Finding::new(Kind::Hang, now - quiet, format!("no step for {quiet}: {usual}"));
        let finding = finding.of(self.culprit().as_ref());
        self.unexplained = finding.rank.is_none();
        news.push(if stage == Stage::Hung { News::Found(finding) } else { News::Suspected(finding) });
    }

    /// When GPUs have only waited for so long that it is told: not before a step is missed, as in a long one they may
    /// wait for data.
    fn waits_in_vain(&self, settings: &Settings) -> Option<Time> {
        if !settings.on(Kind::BusyIdle) || self.told.contains(&(Kind::BusyIdle, 0, 0)) {
            return None;
        }
        Some(self.power.due(&settings.power)?.max(self.hang.missed(&settings.hang)?))
    }

    fn loss(&mut self, rank: u32, step: u64, reading: Reading, at: Time, settings: &Settings, news: &mut Vec<News>) {
        match self.numbers.loss(rank, step, reading) {
            Some(Shows::NotANumber { step }) => {
                let finding = Finding::new(Kind::NotANumber, at, format!("since step {step}"));
                self.found(Finding { rank: Some(rank), node: self.node_of(rank), ..finding }, 0, settings, news);
            }
            Some(Shows::Spike { step, before, loss }) => {
                let detail = format!("{} → {} since step {step}", decimal(before), decimal(loss));
                self.found(Finding::new(Kind::LossSpike, at, detail), 0, settings, news);
            }
            Some(Shows::Over) => {
                for kind in [Kind::NotANumber, Kind::LossSpike] {
                    if self.told.remove(&(kind, 0, 0)) {
                        news.push(News::Over(kind));
                    }
                }
            }
            None => {}
        }
    }

    fn own_time(&mut self, rank: u32, step: u64, micros: u64, at: Time, settings: &Settings, news: &mut Vec<News>) {
        let (ranks, per_worker, nodes) = (self.size(), self.per_worker.max(1), &self.nodes);
        let node = |rank: u32| nodes.get((rank / per_worker) as usize).copied().unwrap_or(NodeId(u32::MAX));
        let slow = self.stragglers.own_time(rank, ranks, step, micros, settings.straggler, node);
        for Slow { rank, excess } in slow {
            let detail = format!("needs {} % longer for its own share of a step", decimal(i64::from(excess) * 100_000));
            let finding = Finding::new(Kind::Straggler, at, detail);
            self.found(Finding { rank: Some(rank), node: self.node_of(rank), ..finding }, rank, settings, news);
        }
    }

    fn xid(&mut self, xid: &Xid, judged: &Judged, at: Time, settings: &Settings, news: &mut Vec<News>) {
        if !self.nodes.contains(&xid.node) {
            return;
        }
        let means = super::xid::means(xid.number).map(|m| format!(", {m}")).unwrap_or_default();
        let again = if judged.repeated { ", not for the first time" } else { "" };
        let detail = format!("XID {}{means}{again}: {}", xid.number, judged.asks.words());
        let finding = Finding::new(Kind::Xid, at, detail);
        let finding = Finding { node: Some(xid.node), gpu: xid.gpu, asks: Some(judged.asks), ..finding };
        let of = xid.node.0.wrapping_mul(64).wrapping_add(xid.gpu.map_or(63, |slot| slot % 63));
        self.once(finding, (Kind::Xid, of, xid.number), settings, news);
    }

    fn on_node(&mut self, finding: Finding, settings: &Settings, news: &mut Vec<News>) {
        if let Some(node) = finding.node.filter(|node| self.nodes.contains(node)) {
            self.found(finding, node.0, settings, news);
        }
    }

    fn found(&mut self, finding: Finding, of: u32, settings: &Settings, news: &mut Vec<News>) {
        let key = (finding.kind, of, 0);
        self.once(finding, key, settings, news);
    }

    fn once(&mut self, finding: Finding, key: (Kind, u32, u32), settings: &Settings, news: &mut Vec<News>) {
        if !settings.on(finding.kind) || self.told.contains(&key) {
            return;
        }
        if self.told.len() < TOLD {
            self.told.insert(key);
        }
        news.push(News::Found(finding));
    }
}

/// Millionths as a number with two places.
fn decimal(micro: i64) -> String {
    let (sign, n) = (if micro < 0 { "-" } else { "" }, micro.unsigned_abs());
    format!("{sign}{}.{:02}", n / 1_000_000, n % 1_000_000 / 10_000)
}

#[cfg(test)]
mod tests;
