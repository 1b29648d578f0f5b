//! Events that are kept until the control plane has made them durable.
//!
//! They are sent in windows, so that after a long absence of the control plane
//! a connection is never flooded. An event gets its number when it is sent
//! first; until then facts are still merged into one event, and checkpoints
//! that are too many give way to newer ones. From then on it never changes.

use crate::protocol::{Event, FromAgent};
use std::collections::VecDeque;

/// Bytes of events that may be on their way without an acknowledgement.
pub const WINDOW: usize = 256 << 10;

/// Bytes of events that were never sent, from which on old checkpoints are forgotten.
pub const MAX_UNSENT: usize = 4 << 20;

#[derive(Debug)]
struct Kept {
    at: u64,
    epoch: u32,
    bytes: usize,
    event: Event,
}

impl Kept {
    fn new(at: u64, epoch: u32, event: Event) -> Self {
        let bytes = serde_json::to_vec(&event).map_or(0, |bytes| bytes.len());
        Self { at, epoch, bytes, event }
    }
}

/// The events, in order.
#[derive(Debug, Default)]
pub(super) struct Events {
    kept: VecDeque<Kept>,
    /// Events that were acknowledged: the first that is kept has the next number.
    acknowledged: u64,
    /// So many of those kept have been sent, on any connection.
    numbered: usize,
    /// So many of those kept have been sent on this connection, of so many bytes.
    sent: usize,
    outstanding: usize,
    /// Bytes of those that were never sent.
    unsent: usize,
}

impl Events {
    pub(super) fn push(&mut self, at: u64, epoch: u32, mut event: Event) {
        if let Event::Facts { values } = &mut event {
            let earlier = self
                .kept
                .iter()
                .skip(self.numbered)
                .rposition(|kept| kept.epoch == epoch && matches!(kept.event, Event::Facts { .. }));
            let earlier = earlier.and_then(|place| self.kept.remove(self.numbered + place));
            if let Some(Kept { event: Event::Facts { values: mut merged }, bytes, .. }) = earlier {
                self.unsent -= bytes;
                merged.append(values);
                *values = merged;
            }
        }
        let kept = Kept::new(at, epoch, event);
        self.unsent += kept.bytes;
        self.kept.push_back(kept);
        while self.unsent > MAX_UNSENT {
            let checkpoint = |kept: &Kept| {
                matches!(
                    kept.event,
                    Event::CheckpointBegun { .. }
                        | Event::CheckpointGoesOn { .. }
                        | Event::CheckpointComplete { .. }
                        | Event::CheckpointFailed { .. }
                )
            };
            let Some(oldest) = self.kept.iter().skip(self.numbered).position(checkpoint) else { break };
            let forgotten = self.kept.remove(self.numbered + oldest);
            self.unsent -= forgotten.map_or(0, |kept| kept.bytes);
        }
    }

    /// The next event to be sent, if the window has room for it.
    pub(super) fn next(&mut self, now: u64) -> Option<FromAgent> {
        let kept = self.kept.get(self.sent)?;
        if self.outstanding > 0 && self.outstanding + kept.bytes > WINDOW {
            return None;
        }
        self.outstanding += kept.bytes;
        self.sent += 1;
        if self.sent > self.numbered {
            self.numbered = self.sent;
            self.unsent -= kept.bytes;
        }
        Some(FromAgent::Event {
            seq: self.acknowledged + self.sent as u64,
            ago_ms: now.saturating_sub(kept.at),
            epoch: kept.epoch,
            event: kept.event.clone(),
        })
    }

    /// Everything up to and with this number is durable.
    pub(super) fn acknowledge(&mut self, seq: u64) {
        while self.acknowledged < seq && self.numbered > 0 {
            let Some(kept) = self.kept.pop_front() else { return };
            self.acknowledged += 1;
            self.numbered -= 1;
            if self.sent > 0 {
                self.sent -= 1;
                self.outstanding -= kept.bytes;
            }
        }
    }

    /// A new connection: everything that is kept is sent again.
    pub(super) fn again(&mut self) {
        self.sent = 0;
        self.outstanding = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(name: &str, value: &str) -> Event {
        Event::Facts { values: [(name.to_owned(), value.to_owned())].into() }
    }

    fn complete(step: u64, bytes: usize) -> Event {
        Event::CheckpointComplete { step, path: "x".repeat(bytes) }
    }

    fn drain(events: &mut Events) -> Vec<(u64, Event)> {
        let mut sent = Vec::new();
        while let Some(FromAgent::Event { seq, event, .. }) = events.next(0) {
            sent.push((seq, event));
        }
        sent
    }

    #[test]
    fn a_window_is_sent_and_the_rest_after_acknowledgements() {
        let mut events = Events::default();
        for step in 1..=10 {
            events.push(0, 1, complete(step, 100 << 10));
        }
        let numbers = |sent: Vec<(u64, Event)>| sent.into_iter().map(|(seq, _)| seq).collect::<Vec<_>>();
        assert_eq!(numbers(drain(&mut events)), [1, 2]);
        events.acknowledge(1);
        assert_eq!(numbers(drain(&mut events)), [3]);
        events.again();
        assert_eq!(numbers(drain(&mut events)), [2, 3]);
        events.acknowledge(99);
        assert_eq!(numbers(drain(&mut events)), [4, 5], "only what was sent can be durable");
        // One that is larger than the window goes alone.
        let mut events = Events::default();
        events.push(0, 1, complete(1, 2 * WINDOW));
        events.push(0, 1, Event::Up);
        assert_eq!(drain(&mut events).len(), 1);
        events.acknowledge(1);
        assert_eq!(drain(&mut events), [(2, Event::Up)]);
    }

    #[test]
    fn facts_that_wait_are_one_event() {
        let mut events = Events::default();
        events.push(0, 1, facts("a", "1"));
        assert_eq!(drain(&mut events), [(1, facts("a", "1"))]);
        for n in 0..100_000 {
            events.push(n, 1, facts("a", &n.to_string()));
        }
        events.push(0, 1, facts("b", "1"));
        let values = [("a", "99999"), ("b", "1")].map(|(n, v)| (n.to_owned(), v.to_owned())).into();
        events.again();
        assert_eq!(drain(&mut events), [(1, facts("a", "1")), (2, Event::Facts { values })]);
    }

    #[test]
    fn an_endless_row_of_checkpoints_keeps_the_newest_and_every_other_event() {
        let mut events = Events::default();
        events.push(0, 1, Event::Up);
        for step in 0..100 {
            events.push(0, 1, complete(step, 60 << 10));
        }
        assert!(events.unsent <= MAX_UNSENT && events.kept.len() < 75, "{}", events.kept.len());
        let mut sent = Vec::new();
        loop {
            let more = drain(&mut events);
            let Some((seq, _)) = more.last() else { break };
            events.acknowledge(*seq);
            sent.extend(more);
        }
        assert!((1..).zip(&sent).all(|(n, (seq, _))| n == *seq), "no gap");
        assert_eq!(sent[0].1, Event::Up);
        assert_eq!(sent.last().map(|(_, event)| event.clone()), Some(complete(99, 60 << 10)));
        assert_eq!(events.unsent, 0);
    }
}
