//! Agents and ranks: how they begin, end and report, as the script has it.

use super::{End, Happening, Key, Worker, World};
use crate::ports::WorkerEvent;
use crate::sim::script::{JobScript, Outcome};
use aviflow_core::gpus::Slots;
use aviflow_core::lifecycle::RankEnd;
use aviflow_core::model::{Address, NodeId};
use aviflow_core::time::{Span, Time};
use std::collections::BTreeMap;

impl World {
    pub(super) fn launch(&mut self, key: Key, node: NodeId, slots: Slots, script: &JobScript) {
        if self.removed.contains(&key) {
            self.wrong.push(format!("{key:?} is launched after it was removed"));
        }
        if let Some(w) = self.workers.get(&key) {
            // Found dead, and nothing tells whether another epoch of it was decided.
            if !w.agent && w.gone {
                self.truth.entry((key.0, key.1)).or_default().lost = true;
                self.after(key, 97, 5, 100, Happening::LostSeen(key, self.now));
            }
            return;
        }
        let workers = u64::from(script.nodes);
        let mute = script.outcome(key.1) == Outcome::NeverReady
            && u64::try_from(self.draw((key.0, key.1, 0), 30, workers)).unwrap_or(0) == u64::from(key.2);
        let dead = self.dead_nodes.contains(&node.0);
        let chosen = self.draw((key.0, key.1, 0), 44, workers) == i64::from(key.2);
        let lasting = chosen && script.outcome(key.1) == Outcome::Impossible;
        let shut_out = !dead && !self.admits(node.0, slots.count());
        let refused = !dead && (shut_out || lasting || chosen && script.outcome(key.1) == Outcome::Refused);
        let truth = self.truth.entry((key.0, key.1)).or_default();
        truth.never_ready |= mute;
        truth.refused |= refused;
        truth.impossible |= refused && lasting;
        self.workers.insert(
            key,
            Worker {
                name: script.name.clone(),
                node,
                slots,
                first_rank: key.2 * script.ranks_per_node,
                ranks: Vec::new(),
                agent: !dead,
                connects: !mute && !refused,
                gone: false,
                epoch: 0,
                waits: false,
                shut_out,
                stopping: false,
                started: false,
                began: None,
                outbox: BTreeMap::new(),
                sent: 0,
                hello: false,
            },
        );
        if dead {
            self.truth.entry((key.0, key.1)).or_default().lost = true;
            self.after(key, 31, 10, 100, Happening::LostSeen(key, self.now));
        } else if refused {
            self.after(key, 45, 5, 200, Happening::Refuse(key, lasting));
        } else if !mute {
            self.after(key, 32, 5, 200, Happening::Hello(key));
        }
    }

    pub(super) fn hello(&mut self, key: Key) {
        let Some(w) = self.workers.get_mut(&key) else { return };
        if !w.agent || (w.gone && !w.waits) || !self.up {
            return;
        }
        w.hello = true;
        let address = Address { host: "127.0.0.1".to_owned(), port: 4000 };
        self.event(key, self.now, WorkerEvent::Ready { address });
    }

    /// Whether a worker obeys the word to start an epoch; where it is not the first, it begins anew.
    pub(super) fn begins(&mut self, key: Key, epoch: u32) -> bool {
        let Some(w) = self.workers.get_mut(&key) else { return false };
        if epoch > 1 && epoch > w.epoch {
            let (living, gone) = (w.agent, w.gone);
            w.epoch = epoch;
            if !living {
                // Nothing is left of it to begin with.
                if gone {
                    self.truth.entry((key.0, key.1)).or_default().lost = true;
                    self.after(key, 96, 5, 100, Happening::LostSeen(key, self.now));
                }
                return false;
            }
            if !gone {
                self.wrong.push(format!("{key:?} is to begin epoch {epoch} before the one before has ended"));
            }
            (w.gone, w.waits, w.stopping, w.started, w.began) = (false, false, false, false, None);
            w.ranks.clear();
            let truth = self.truth.entry((key.0, key.1)).or_default();
            if truth.epoch < epoch {
                truth.epoch = epoch;
                truth.failed_before += usize::from(truth.first_failure.take().is_some() || truth.launch_failed);
                truth.lost_before += usize::from(truth.lost || truth.launch_failed);
                (truth.lost, truth.launch_failed) = (false, false);
                truth.finished.clear();
            }
        }
        w.epoch = w.epoch.max(epoch);
        w.agent && !w.started && !w.stopping && !w.gone
    }

    /// How an epoch goes: the first as the script says, others so or well.
    pub(super) fn outcome(&self, key: Key) -> Outcome {
        let Some(w) = self.workers.get(&key) else { return Outcome::Succeed };
        let again = w.epoch > 1 && self.draw((key.0, key.1, 0), 2000 + u64::from(w.epoch), 2) == 0;
        if again { Outcome::Succeed } else { self.scripts[&w.name].outcome(key.1) }
    }

    pub(super) fn ranks_up(&mut self, key: Key) {
        let Some(w) = self.workers.get(&key) else { return };
        if !w.agent || w.stopping || w.gone || !w.ranks.is_empty() {
            return;
        }
        let (node, slots) = (w.node, w.slots);
        for (other, o) in &self.workers {
            if *other != key && o.node == node && !o.slots.and(slots).is_empty() && o.runs() {
                self.wrong.push(format!("{key:?} starts on GPUs where ranks of {other:?} run"));
            }
            if other.0 == key.0 && other.1 != key.1 && o.runs() {
                self.wrong.push(format!("{key:?} starts while attempt {} of the job runs", other.1));
            }
        }
        let script = self.scripts[&w.name].clone();
        let (now, run) = (self.now, self.left(key));
        let saved = self.saved.get(&key.0).copied().unwrap_or(0);
        if let Some(w) = self.workers.get_mut(&key) {
            w.ranks = vec![None; script.ranks_per_node as usize];
            w.began = Some((now, saved));
        }
        self.event(key, self.now, WorkerEvent::Up);
        let gang = (key.0, key.1, 0);
        let half = run / 2;
        let workers = u64::from(script.nodes);
        let outcome = self.outcome(key);
        let chosen = self.draw(gang, 40, workers) == i64::from(key.2);
        let first = key.2 * script.ranks_per_node;
        for rank in first..first + script.ranks_per_node {
            self.after(
                key,
                41 + u64::from(rank),
                run,
                500,
                Happening::RankEnds { key, rank, code: 0, by_agent: false },
            );
        }
        if chosen {
            let rank = first + u32::try_from(self.draw(gang, 42, u64::from(script.ranks_per_node))).unwrap_or(0);
            match outcome {
                Outcome::Fail => {
                    self.after(gang, 43, half, 100, Happening::RankEnds { key, rank, code: 1, by_agent: false });
                }
                Outcome::Requeue => {
                    self.after(gang, 43, half, 100, Happening::RankEnds { key, rank, code: 75, by_agent: false });
                }
                Outcome::Evicted => {
                    self.truth.entry((key.0, key.1)).or_default().lost = true;
                    self.after(gang, 43, half, 100, Happening::Stop(key, 2000));
                }
                Outcome::Leaves => {
                    self.truth.entry((key.0, key.1)).or_default().lost = true;
                    self.after(gang, 43, half, 100, Happening::AskToLeave(key));
                }
                Outcome::Succeed
                | Outcome::LaunchFails
                | Outcome::NeverReady
                | Outcome::Refused
                | Outcome::Impossible => {}
            }
        }
    }

    /// What the job still has to do, from what it saved.
    pub(super) fn left(&self, key: Key) -> i64 {
        let Some(w) = self.workers.get(&key) else { return 0 };
        let all = self.scripts[&w.name].run_ms;
        (all - self.saved.get(&key.0).copied().unwrap_or(0)).max(500)
    }

    /// Ranks save themselves: they begin, and are done a little later, if they live.
    pub(super) fn save(&mut self, key: Key, number: u64, complete: bool) {
        let Some(w) = self.workers.get(&key).filter(|w| w.agent && w.runs()) else { return };
        let Some((since, before)) = w.began else { return };
        let (name, stopping) = (w.name.clone(), w.stopping);
        let step = 10 + u64::from(key.1) + 5 * number;
        if !complete {
            if !stopping {
                self.event(key, self.now, WorkerEvent::CheckpointBegun { step });
            }
            self.after(key, 39 + 1000 * number, 20, 300, Happening::Save { key, number, complete: true });
            return;
        }
        let done = before + self.now.since(since).0;
        let saved = self.saved.entry(key.0).or_default();
        *saved = done.max(*saved);
        self.event(key, self.now, WorkerEvent::CheckpointComplete { step, path: "/checkpoints/x".to_owned() });
        if let Some(every) = self.scripts[&name].saves_every.filter(|_| !stopping) {
            self.after(
                key,
                38 + 1000 * number,
                every.0,
                10,
                Happening::Save { key, number: number + 1, complete: false },
            );
        }
    }

    pub(super) fn rank_ends(&mut self, key: Key, rank: u32, code: i32, by_agent: bool) {
        let Some(w) = self.workers.get_mut(&key) else { return };
        let index = (rank.saturating_sub(w.first_rank)) as usize;
        if !w.agent || w.ranks.get(index).is_none_or(Option::is_some) {
            return;
        }
        let by_agent = by_agent || w.stopping;
        w.ranks[index] = Some(End { at: self.now, code, stopping: by_agent });
        let signal = (code > 128).then(|| code - 128);
        let last_lines = vec![format!("rank {rank} ends with {code}")];
        self.event(
            key,
            self.now,
            WorkerEvent::RankExited { rank, code, signal, stopping: by_agent, last_lines, last_step: None, why: None },
        );
        let now = self.now;
        let truth = self.truth.entry((key.0, key.1)).or_default();
        if code == 0 && !by_agent {
            truth.finished.insert(rank);
        }
        if code != 0 && !by_agent {
            if code != 75 && truth.first_failure.is_none() {
                truth.first_failure = Some((now, rank));
            }
            // The agent stops its other ranks; peers fail by themselves, some of them.
            self.after(key, 50, 0, 30, Happening::Stop(key, 1000));
            let peers: Vec<(Key, u32)> =
                self.running().filter(|(k, _)| (k.0, k.1) == (key.0, key.1) && *k != key).collect();
            for (peer, rank) in peers {
                if self.draw(peer, 60 + u64::from(rank), 2) == 0 {
                    self.after(
                        peer,
                        70 + u64::from(rank),
                        20,
                        3000,
                        Happening::RankEnds { key: peer, rank, code: 1, by_agent: false },
                    );
                }
            }
        }
        if self.workers.get(&key).is_some_and(|w| !w.runs()) {
            self.after(key, 51, 5, 40, Happening::Empty(key, None));
        }
    }

    /// The agent stops its ranks.
    pub(super) fn stop(&mut self, key: Key, grace: i64) {
        let Some(w) = self.workers.get_mut(&key) else { return };
        if !w.agent || w.gone || w.stopping {
            return;
        }
        w.stopping = true;
        let saves = self.scripts[&w.name].saves_on_request && key.2 == 0;
        let first = w.first_rank;
        let running: Vec<u32> = (first..).zip(&w.ranks).filter(|(_, e)| e.is_none()).map(|(r, _)| r).collect();
        if running.is_empty() {
            let reason = (w.ranks.is_empty()).then(|| "stopped before its ranks started".to_owned());
            self.after(key, 52, 5, 40, Happening::Empty(key, reason));
            return;
        }
        if saves {
            let begin = self.now + Span(self.draw(key, 81, 500));
            self.at(begin, Happening::Save { key, number: 900, complete: false });
        }
        for rank in running {
            let (delay, code) = match self.draw(key, 80 + u64::from(rank), 3) {
                0 => (self.draw(key, 90 + u64::from(rank), u64::try_from(grace.max(1)).unwrap_or(1)), 0),
                1 => (self.draw(key, 90 + u64::from(rank), 50), 143),
                _ => (grace, 137),
            };
            self.at(self.now + Span(delay), Happening::RankEnds { key, rank, code, by_agent: true });
        }
    }

    /// The last process of the worker is gone.
    pub(super) fn empty(&mut self, key: Key, reason: Option<String>) {
        let now = self.now;
        let Some(w) = self.workers.get_mut(&key) else { return };
        if !w.agent || w.gone || w.runs() {
            return;
        }
        w.gone = true;
        let epoch = w.epoch;
        let own_stop = w.stopping.then(|| "the agent stopped its ranks".to_owned());
        let reason = reason.or(own_stop.filter(|_| w.ranks.is_empty()));
        let ranks = (w.first_rank..)
            .zip(&w.ranks)
            .filter_map(|(rank, end)| {
                let End { at, code, stopping } = (*end)?;
                let signal = (code > 128).then(|| code - 128);
                Some((
                    rank,
                    RankEnd { code, signal, stopping, before: now.since(at), last_lines: Vec::new(), why: None },
                ))
            })
            .collect();
        // Some agents are on their way out themselves.
        let waits = epoch > 0 && self.draw(key, 3000 + u64::from(epoch), 4) > 0;
        if let Some(w) = self.workers.get_mut(&key) {
            w.waits = waits;
        }
        self.event(key, now, WorkerEvent::Gone { ranks, reason, last_step: None, next_port: waits.then_some(4001) });
    }

    pub(super) fn agent_dies(&mut self, key: Key) {
        let Some(w) = self.workers.get_mut(&key) else { return };
        w.agent = false;
        for end in w.ranks.iter_mut().filter(|e| e.is_none()) {
            *end = Some(End { at: self.now, code: 137, stopping: true });
        }
        // Its last report is a file on the node; what it had not sent before is lost.
        let last = |e: &(Time, u32, WorkerEvent)| matches!(e.2, WorkerEvent::Gone { .. });
        w.outbox.retain(|_, e| last(e));
        let gone = w.gone;
        let truth = self.truth.entry((key.0, key.1)).or_default();
        truth.disturbed = true;
        if !gone {
            truth.lost = true;
            // While nobody watches, only the age of the agent's file tells.
            let behind = if self.up { 0 } else { self.draw(key, 99, 10_000) };
            let seen = self.now - Span(behind);
            self.after(key, 98, 5, 100, Happening::LostSeen(key, seen));
        }
    }

    pub(super) fn event(&mut self, key: Key, at: Time, event: WorkerEvent) {
        self.event_at(key, at, event);
    }

    /// Puts an event into the outbox and on its way: late, perhaps twice.
    pub(super) fn event_at(&mut self, key: Key, at: Time, event: WorkerEvent) {
        let Some(w) = self.workers.get_mut(&key) else { return };
        w.sent += 1;
        let seq = w.sent;
        let epoch = match event {
            WorkerEvent::Ready { .. } if w.gone => w.epoch + 1,
            WorkerEvent::Ready { .. } | WorkerEvent::Lost { .. } => 0,
            _ => w.epoch.max(1),
        };
        w.outbox.insert(seq, (at, epoch, event.clone()));
        let deliver = Happening::Deliver { key, seq, occurred: at, epoch, event };
        let roll = self.draw(key, 500 + seq, 10);
        let late = if roll < 2 { 3000 } else { 30 };
        self.after(key, 600 + seq, 0, late, deliver.clone());
        if roll < 2 {
            self.disturbed += 1;
        }
        if roll == 9 {
            self.disturbed += 1;
            self.after(key, 700 + seq, 0, 40_000, deliver);
        }
    }
}
