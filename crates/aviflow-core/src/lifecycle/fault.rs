//! What is done about a fault: a gang that failed is stopped at once, and judged when its last process is gone.
//!
//! Only then it is known how every rank ended, so that the one is named that failed first and not one that noticed.
//! What the watch over a gang finds while it runs either is told, or stops the gang and is judged in the same way.

use super::resolve::resolve;
use super::worker::{confirm, failing, post};
use super::{Effect, MomentKind, REQUEUE_CODE};
use crate::health::culprit::{self, End, RankFacts};
use crate::health::decide::{Action, Decision, Place, Situation, decide};
use crate::health::fault::{Blame, Kind, Severity};
use crate::health::quarantine::Seen;
use crate::health::xid::Asks;
use crate::health::{Finding, News, Settings};
use crate::ledger::GpuState;
use crate::model::{Cause, Exit, Failure, Gang, Intent, Job, NodeId, Phase, WorkerState, XidSeen};
use crate::time::{Span, Time};

/// How far apart an XID and the end of a rank that it explains may be.
const EXPLAINS: Span = Span::minutes(2);

/// The exit code of a job that was ended for what the watch over its gang found.
const FOUND_CODE: i32 = 1;

/// What was found of a gang that runs.
pub(super) fn found(job: &mut Job, news: &News, now: Time, fx: &mut Vec<Effect>) {
    fx.push(Effect::Moment(MomentKind::Found { news: news.clone() }));
    let News::Found(finding) = news else { return };
    let attempt = job.attempts;
    let Phase::Running(gang) = &mut job.phase else { return };
    if let (Kind::Xid, Some(node), Some(asks)) = (finding.kind, finding.node, finding.asks) {
        if gang.xids.len() >= Gang::XIDS {
            gang.xids.remove(0);
        }
        gang.xids.push(XidSeen { at: finding.at, node, gpu: finding.gpu, asks });
    }
    if matches!(finding.kind, Kind::Hang | Kind::BusyIdle) {
        post(gang, GpuState::Hung, finding.at, fx);
    }
    let settings = Settings::all();
    let decision = decide(&situation(job, finding, true, false, &settings));
    let ends = match finding.kind {
        Kind::Xid => finding.asks.is_some_and(Asks::is_fatal),
        kind => kind.fault().severity == Severity::Fatal,
    };
    if decision.action != Action::Nothing && ends {
        let cause = Cause::Found { attempt, finding: finding.clone() };
        failing(job, Failure { cause, exit_code: FOUND_CODE, at: finding.at.min(now) }, false, now, fx);
    } else if decision.action != Action::Nothing {
        // What runs may go on: the node or GPU takes nothing new.
        blame(job, finding, &decision, fx);
        fx.push(Effect::Moment(MomentKind::Decided { decision }));
    }
}

/// What is done about a gang that failed, and the failure to name.
pub(super) struct Verdict {
    pub(super) failure: Failure,
    pub(super) decision: Decision,
    finding: Finding,
}

/// Judges a gang of which nothing runs any more.
pub(super) fn judge(job: &Job, gang: &Gang, failure: Failure) -> Verdict {
    let (failure, finding, words) = named(gang, failure, job.request.ranks_per_node);
    let decision = decide(&situation(job, &finding, agents_wait(job, gang), words, &Settings::all()));
    Verdict { failure, decision, finding }
}

/// Notes what follows from a verdict for the job, and tells it.
pub(super) fn note(job: &mut Job, gang: &Gang, verdict: &Verdict, now: Time, fx: &mut Vec<Effect>) {
    let Verdict { decision, finding, .. } = verdict;
    let (before, past_faults) = (job.past.summary(now), job.past.failures + job.past.restarts);
    job.past.note(decision, now);
    match decision.action {
        Action::Replace { node: Some(node) } | Action::ResetGpu { node, .. } | Action::Drain { node } => {
            if !job.avoid.contains(&node) {
                job.avoid.push(node);
            }
        }
        Action::Replace { node: None } => job.avoid = gang.nodes().collect(),
        Action::Nothing | Action::RestartInPlace | Action::RestartGang | Action::Stop => {}
    }
    if decision.charged {
        job.counters.failures += 1;
    } else if decision.action != Action::Stop {
        job.counters.node_failures += 1;
    }
    blame(job, finding, decision, fx);
    let mut decision = decision.clone();
    if decision.action == Action::Stop && past_faults > 0 {
        decision.reason += &format!(" (before: {before})");
    }
    fx.push(Effect::Moment(MomentKind::Decided { decision }));
}

/// Starts a gang of which nothing runs any more again where it is, or keeps it for somebody to look around. False
/// where its GPUs are to be given back.
pub(super) fn stays(job: &mut Job, now: Time, fx: &mut Vec<Effect>) -> bool {
    let Phase::Stopping(stopping) = &job.phase else { return false };
    let (Intent::Failure(failure) | Intent::NodeFailure(failure)) = &stopping.intent else { return false };
    if stopping.kept_until.is_some() || !agents_wait(job, &stopping.gang) {
        return false;
    }
    let gang = stopping.gang.clone();
    let verdict = judge(job, &gang, failure.clone());
    let keep = job.request.keep_on_failure.filter(|_| verdict.decision.action == Action::Stop);
    if verdict.decision.action != Action::RestartInPlace && keep.is_none() {
        return false;
    }
    note(job, &gang, &verdict, now, fx);
    let ended = gang.workers.iter().filter_map(|w| w.ended).max().unwrap_or(now);
    if let (Some(keep), Phase::Stopping(stopping)) = (keep, &mut job.phase) {
        let until = now + keep;
        stopping.intent = Intent::Failure(verdict.failure);
        stopping.kept_until = Some(until);
        fx.push(Effect::Moment(MomentKind::Kept { until }));
        post(&gang, GpuState::Idle, ended, fx);
    } else {
        again(job, gang, ended, fx);
    }
    true
}

/// The next epoch of the same workers.
fn again(job: &mut Job, mut gang: Gang, at: Time, fx: &mut Vec<Effect>) {
    gang.epoch += 1;
    gang.again = Some(at);
    (gang.up, gang.stepped, gang.repeating) = (None, false, false);
    gang.xids.clear();
    for worker in &mut gang.workers {
        worker.state = WorkerState::Ready;
        worker.exits.clear();
        worker.ended = None;
        if let (Some(address), Some(port)) = (&mut worker.address, worker.next_port.take()) {
            address.port = port;
        }
    }
    post(&gang, GpuState::Starting, at, fx);
    fx.push(Effect::Moment(MomentKind::Again { epoch: gang.epoch }));
    job.phase = Phase::Starting(gang);
    confirm(job, fx);
}

/// Gives the GPUs of a gang back that were kept after it failed.
pub(super) fn release(job: &mut Job, now: Time, fx: &mut Vec<Effect>) {
    if let Phase::Stopping(stopping) = &mut job.phase
        && stopping.kept_until.is_some()
    {
        for worker in &mut stopping.gang.workers {
            worker.ended = Some(now);
        }
        resolve(job, now, fx);
    }
}

/// Whether each worker's agent waits for another epoch. Whoever holds a job keeps it from starting, also where it is.
fn agents_wait(job: &Job, gang: &Gang) -> bool {
    job.held.is_none() && gang.workers.iter().all(|w| w.next_port.is_some())
}

fn situation<'a>(job: &'a Job, finding: &Finding, agents: bool, words: bool, settings: &'a Settings) -> Situation<'a> {
    Situation {
        kind: finding.kind,
        asks: finding.asks,
        place: Place { rank: finding.rank, node: finding.node, gpu: finding.gpu },
        agents,
        words,
        retry_left: job.counters.failures < job.request.failures_allowed,
        past: &job.past,
        settings,
    }
}

/// Tells a node's or GPU's fault to whoever keeps count of them.
fn blame(job: &Job, finding: &Finding, decision: &Decision, fx: &mut Vec<Effect>) {
    let Some(node) = finding.node.filter(|_| !matches!(decision.blame, Blame::Application | Blame::Platform)) else {
        return;
    };
    // What the cluster says of a device it also takes back; what comes again counts.
    let asked = matches!(decision.action, Action::ResetGpu { .. } | Action::Drain { .. });
    let at_once = asked && finding.kind != Kind::DeviceUnhealthy;
    fx.push(Effect::Blame(Seen {
        kind: finding.kind,
        blame: decision.blame,
        node,
        gpu: finding.gpu,
        job: Some(job.id),
        at: finding.at,
        at_once,
    }));
}

/// The failure to name, what it is, and whether only words of a rank say that hardware failed.
fn named(gang: &Gang, failure: Failure, per_worker: u32) -> (Failure, Finding, bool) {
    match &failure.cause {
        Cause::Rank { node, exit, rank, .. } => {
            let first = (*rank, *node, why(exit));
            by_ends(gang, failure.clone(), first, per_worker)
        }
        Cause::WorkerLost { node, .. } => {
            let finding = Finding { node: Some(*node), ..Finding::new(Kind::NodeLost, failure.at, String::new()) };
            (failure, finding, false)
        }
        Cause::Launch { node, .. } => {
            let finding = Finding { node: Some(*node), ..Finding::new(Kind::Exit, failure.at, String::new()) };
            (failure, finding, false)
        }
        Cause::Found { finding, .. } => {
            let finding = finding.clone();
            (failure, finding, false)
        }
        Cause::TimeLimit { .. } | Cause::Recorded { .. } | Cause::Environment { .. } => {
            let finding = Finding::new(Kind::Exit, failure.at, String::new());
            (failure, finding, false)
        }
    }
}

/// By how all ranks ended: the first that failed of itself, and what the driver said of its GPU.
fn by_ends(gang: &Gang, failure: Failure, first: (u32, NodeId, Kind), per_worker: u32) -> (Failure, Finding, bool) {
    let per_worker = per_worker.max(1) as usize;
    let mut facts = vec![RankFacts::default(); gang.workers.len() * per_worker];
    for worker in &gang.workers {
        // Who asks to be queued again has not failed.
        for (rank, exit) in worker.exits.iter().filter(|(_, exit)| exit.code != 0 && exit.code != REQUEUE_CODE) {
            if let Some(facts) = facts.get_mut(*rank as usize) {
                let kind = why(exit);
                facts.end = Some(End { at: exit.at, kind, stopping: exit.stopping });
            }
        }
    }
    let node = |rank: u32| gang.workers.get(rank as usize / per_worker).map_or(first.1, |w| w.node);
    let culprit = culprit::of_failure(&facts, node);
    let exit = culprit.as_ref().and_then(|c| {
        let (number, worker) = (c.rank as usize / per_worker, gang.workers.get(c.rank as usize / per_worker)?);
        Some((u32::try_from(number).unwrap_or(u32::MAX), worker, worker.exits.get(&c.rank)?))
    });
    // One that lives is named, and the end that was noticed is told.
    let (failure, kind) = match (&culprit, exit) {
        (Some(c), Some((number, worker, exit))) => {
            let cause = Cause::Rank {
                attempt: gang.attempt,
                rank: c.rank,
                worker: number,
                node: worker.node,
                exit: exit.clone(),
            };
            let kind = why(exit);
            (Failure { cause, exit_code: exit.code, at: exit.at }, kind)
        }
        (Some(_) | None, _) => (failure, first.2),
    };
    let (rank, node, because) = culprit.map_or((first.0, first.1, None), |c| (c.rank, c.node, Some(c.because)));
    let explains = |x: &&XidSeen| {
        x.node == node && x.asks.is_fatal() && x.at.since(failure.at).max(failure.at.since(x.at)) <= EXPLAINS
    };
    let xid = gang.xids.iter().filter(explains).max_by_key(|x| x.asks);
    let finding = Finding {
        rank: Some(rank),
        node: Some(node),
        gpu: xid.and_then(|x| x.gpu),
        because,
        asks: xid.map(|x| x.asks),
        ..Finding::new(kind, failure.at, String::new())
    };
    let words = kind == Kind::DeviceUnhealthy && xid.is_none();
    (failure, finding, words)
}

/// The class of an end.
fn why(exit: &Exit) -> Kind {
    let Exit { code, signal, .. } = *exit;
    match &exit.why {
        Some(why) if why.consequence && !matches!(why.kind, Kind::NcclTimeout) => Kind::PeerLost,
        Some(why) => why.kind,
        // SIGTERM that the platform did not send: the launcher's, once another rank of it had failed.
        None if signal == Some(15) || code == 128 + 15 => Kind::PeerLost,
        None if signal.is_some() || (129..=192).contains(&code) => Kind::Signal,
        None => Kind::Exit,
    }
}
