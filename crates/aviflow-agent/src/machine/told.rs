//! What is heard of the training: from lines, hooks and files to what is said of it.

use super::{Machine, Output, Phase};
use crate::log::plain;
use crate::output;
use crate::protocol::{Event, FromAgent};
use crate::training::{Said, Training};

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
        if let Some(line) = output::read(&text) {
            let mut said = Vec::new();
            self.training.output(rank, line, now, &mut said);
            self.say(said, now, out);
        }
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
