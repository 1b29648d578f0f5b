//! What is heard of the training: from lines, hooks and files to what is said of it.

use super::{Machine, Output, Phase};
use crate::log::plain;
use crate::output::{self, Seen};
use crate::protocol::{Event, FromAgent, Sign};
use crate::training::{Said, Training};

/// Between two signs that the training does something that is no step, in milliseconds.
const ACTIVE_MS: u64 = 1000;

impl Machine {
    /// Takes what a hook or a file told.
    pub(super) fn told(&mut self, now: u64, out: &mut Vec<Output>, told: impl FnOnce(&mut Training, &mut Vec<Said>)) {
        // Nobody of the worker is left to speak: the end is the last event.
        if self.phase != Phase::Ended {
            let mut said = Vec::new();
            told(&mut self.training, &mut said);
            self.say(said, now, out);
        }
    }

    pub(super) fn line(&mut self, rank: u32, text: &str, now: u64, out: &mut Vec<Output>) {
        let Some(state) = self.ranks.get_mut(&rank).filter(|state| state.end.is_none()) else { return };
        let text = plain(text);
        if !text.trim().is_empty() {
            state.tail.push(&text);
        }
        let read = output::read(&text);
        let other = match read.as_ref().map(|line| &line.seen) {
            None => !text.trim().is_empty(),
            Some(Seen::Evaluation(..)) => true,
            Some(Seen::Step(_) | Seen::Bar(..) | Seen::Values(..)) => false,
        };
        if other && self.active_at.is_none_or(|at| now >= at + ACTIVE_MS) {
            self.active_at = Some(now);
            self.sign(Sign::Active, 0, out);
        }
        if let Some(line) = read {
            let mut said = Vec::new();
            self.training.output(rank, line, now, &mut said);
            self.say(said, now, out);
        }
    }

    /// Says a sign, if somebody is there to hear it: it is for the present.
    pub(super) fn sign(&self, sign: Sign, ago_ms: u64, out: &mut Vec<Output>) {
        self.send(FromAgent::Sign { ago_ms, epoch: self.epoch, sign }, out);
    }

    fn say(&mut self, said: Vec<Said>, now: u64, out: &mut Vec<Output>) {
        for said in said {
            match said {
                Said::Event(event) => self.emit(event, now, out),
                Said::Earlier(at, event) => {
                    self.events.push(at, self.epoch, event);
                    self.send_events(now, out);
                }
                Said::Note(text) => out.push(Output::Note(text)),
                Said::Sign(at, sign) => self.sign(sign, now.saturating_sub(at), out),
                Said::Progress(rank, at, progress) if self.welcomed => {
                    let ago_ms = now.saturating_sub(at);
                    out.push(Output::Send(FromAgent::Progress { ago_ms, epoch: self.epoch, rank, progress }));
                }
                Said::Progress(rank, at, progress) => {
                    self.unsent.insert(rank, (at, self.epoch, progress));
                }
            }
        }
    }

    pub(super) fn flush(&mut self, now: u64, all: bool, out: &mut Vec<Output>) {
        let mut said = Vec::new();
        self.training.flush(now, all, &mut said);
        self.say(said, now, out);
    }

    pub(super) fn emit(&mut self, event: Event, now: u64, out: &mut Vec<Output>) {
        self.events.push(now, self.epoch, event);
        self.send_events(now, out);
    }
}
