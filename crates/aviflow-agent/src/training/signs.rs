//! What ranks tell of themselves that is for the present alone: what each does in the training, and its collectives.
//!
//! Collectives come many times a second, and only the newest says something; but of a rank that hangs it is the last one
//! that counts, so that it is told a little later and never lost. Who watches may have been started anew: what a rank
//! does is told again from time to time.

use super::{PROGRESS_MS, Said};
use crate::protocol::Sign;
use std::collections::BTreeMap;

/// How often it is told what a rank does, in milliseconds.
const ROLE_MS: u64 = 60_000;

#[derive(Debug, Default)]
struct Rank {
    /// And when it was told last.
    role: Option<(u16, u64)>,
    /// The newest, when it came, and whether it was told.
    collective: Option<(u64, u64, bool)>,
    told_at: Option<u64>,
}

/// The signs of all ranks.
#[derive(Debug, Default)]
pub(super) struct Signs(BTreeMap<u32, Rank>);

impl Signs {
    pub(super) fn role(&mut self, rank: u32, role: u16, now: u64, said: &mut Vec<Said>) {
        self.0.entry(rank).or_default().role = Some((role, now));
        said.push(Said::Sign(now, Sign::Role { rank, role }));
    }

    /// A rank reached a step: an occasion to tell again what it does.
    pub(super) fn step(&mut self, rank: u32, now: u64, said: &mut Vec<Said>) {
        if let Some(Rank { role: Some((role, told)), .. }) = self.0.get_mut(&rank)
            && now >= *told + ROLE_MS
        {
            *told = now;
            said.push(Said::Sign(now, Sign::Role { rank, role: *role }));
        }
    }

    pub(super) fn collective(&mut self, rank: u32, number: u64, now: u64, said: &mut Vec<Said>) {
        let state = self.0.entry(rank).or_default();
        state.collective = Some((number, now, false));
        if state.told_at.is_none_or(|told| now >= told + PROGRESS_MS) {
            state.tell(rank, now, said);
        }
    }

    /// When what was held back is due.
    pub(super) fn due(&self) -> Option<u64> {
        let waits = |rank: &&Rank| matches!(rank.collective, Some((_, _, false)));
        self.0.values().filter(waits).map(|rank| rank.told_at.map_or(0, |told| told + PROGRESS_MS)).min()
    }

    /// Tells what is due, or all that was held back.
    pub(super) fn flush(&mut self, now: u64, all: bool, said: &mut Vec<Said>) {
        for (rank, state) in &mut self.0 {
            if all || state.told_at.is_none_or(|told| now >= told + PROGRESS_MS) {
                state.tell(*rank, now, said);
            }
        }
    }
}

impl Rank {
    fn tell(&mut self, rank: u32, now: u64, said: &mut Vec<Said>) {
        if let Some((number, at, told @ false)) = &mut self.collective {
            *told = true;
            self.told_at = Some(now);
            said.push(Said::Sign(*at, Sign::Collective { rank, number: *number }));
        }
    }
}
