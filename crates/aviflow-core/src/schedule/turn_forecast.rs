//! The forecast where jobs take turns: the levelled pass by counts of GPUs, with the run times that jobs of
//! their size had.

use super::Plan;
use super::forecast::expected_run;
use super::pass::{Ask, Pass};
use super::turns;
use crate::model::TimeSharing;
use crate::time::{Span, Time};

/// Passes that are played.
const PASSES: usize = 300;

/// Between two passes at most.
const TICK: Span = Span::minutes(60);

/// A job that takes turns.
struct Player {
    own: bool,
    gpus: u32,
    submitted: Time,
    had: Span,
    left: Span,
    /// Since when it runs.
    turn: Option<Time>,
}

impl Player {
    fn level(&self, pass: &Pass<'_>, sharing: &TimeSharing, now: Time) -> i64 {
        let running = self.turn.map_or(0, |t| now.since(t).0) * i64::from(self.gpus);
        turns::level_at(pass, sharing, self.had + Span(running), self.gpus, self.submitted, now)
    }

    fn stop(&mut self, now: Time) {
        if let Some(turn) = self.turn.take() {
            let ran = now.since(turn);
            self.had += Span(ran.0 * i64::from(self.gpus));
            self.left = Span((self.left.0 - ran.0).max(1000));
        }
    }
}

/// How long the job waits for its first turn.
pub(super) fn forecast(pass: &Pass<'_>, ask: &Ask<'_>, sharing: &TimeSharing, plan: &Plan) -> Option<Span> {
    let mut players = Vec::new();
    for id in pass.index.holders.keys() {
        let job = pass.snapshot.jobs.get(id)?;
        let gang = job.phase.gang()?;
        let ran = job.ran + super::pass::held_for(job, pass.now);
        let gpus = gang.gpu_count();
        let left = Span(pass.snapshot.history.left(gpus, ran).0 + ran.0 - job.ran.0);
        players.push(Player {
            own: false,
            gpus,
            submitted: job.submitted,
            had: job.gpu_time,
            left,
            turn: Some(gang.placed),
        });
    }
    for waiting in &plan.waiting {
        let Some(job) = pass.snapshot.jobs.get(&waiting.job) else { continue };
        players.push(Player {
            own: waiting.job == ask.id,
            gpus: job.request.gpus(),
            submitted: job.submitted,
            had: job.gpu_time,
            left: expected_run(pass.snapshot, job),
            turn: None,
        });
    }
    let all: u32 = pass.quotas.capacity.iter().sum();
    let mut now = pass.now;
    for _ in 0..PASSES {
        play(pass, sharing, &mut players, all, now);
        if players.iter().any(|p| p.own && p.turn.is_some()) {
            return Some(now.since(pass.now));
        }
        let mut next = now + TICK;
        for player in players.iter().filter(|p| p.turn.is_some()) {
            let turn = player.turn.unwrap_or(now);
            let over = turn + sharing.minimum_run;
            next = next.min(turn + player.left);
            if over > now {
                next = next.min(over);
            }
        }
        now = next.max(now + Span(1));
        players.retain(|p| p.turn.is_none_or(|t| t + p.left > now));
    }
    Some(now.since(pass.now))
}

/// One pass, as [`turns`] decides it, by counts.
fn play(pass: &Pass<'_>, sharing: &TimeSharing, players: &mut [Player], all: u32, now: Time) {
    let levels: Vec<i64> = players.iter().map(|p| p.level(pass, sharing, now)).collect();
    let mut order: Vec<usize> = (0..players.len()).filter(|i| players[*i].turn.is_none()).collect();
    order.sort_by_key(|i| (levels[*i], players[*i].submitted, *i));
    let mut free = all.saturating_sub(players.iter().filter(|p| p.turn.is_some()).map(|p| p.gpus).sum());
    let mut started = vec![false; players.len()];
    let mut at = 0;
    while at < order.len() {
        let w = order[at];
        at += 1;
        let need = players[w].gpus;
        if need > free {
            let Some(victims) = victims(players, &levels, &started, sharing, w, free, now) else { continue };
            for v in victims {
                free += players[v].gpus;
                players[v].stop(now);
            }
        }
        free = free.saturating_sub(need);
        players[w].turn = Some(now);
        started[w] = true;
    }
}

fn victims(
    players: &[Player],
    levels: &[i64],
    started: &[bool],
    sharing: &TimeSharing,
    w: usize,
    free: u32,
    now: Time,
) -> Option<Vec<usize>> {
    let over = |i: &usize| players[*i].turn.is_some_and(|t| t + sharing.minimum_run <= now) && !started[*i];
    let mut running: Vec<usize> = (0..players.len()).filter(over).collect();
    running.sort_by_key(|i| std::cmp::Reverse((levels[*i], players[*i].submitted, *i)));
    for (gap, fill) in [(turns::GAP, false), (0, true)] {
        let fits = |i: &&usize| levels[**i] >= levels[w] + gap && (!fill || players[**i].gpus < players[w].gpus);
        let mut set = Vec::new();
        let mut sum = free;
        for i in running.iter().filter(fits) {
            if sum >= players[w].gpus {
                break;
            }
            sum += players[*i].gpus;
            set.push(*i);
        }
        if sum < players[w].gpus {
            continue;
        }
        for n in (0..set.len()).rev() {
            if sum - players[set[n]].gpus >= players[w].gpus {
                sum -= players[set[n]].gpus;
                set.remove(n);
            }
        }
        if !fill || set.iter().map(|i| players[*i].gpus).sum::<u32>() <= players[w].gpus / 2 {
            return Some(set);
        }
    }
    None
}
