//! Signs of life across a network, and since when each end certainly hears the other.

use crate::roster::{Site, Workers};
use aviflow_agent::protocol::ToAgent;
use aviflow_engine::telemetry::StreamKey;
use std::collections::VecDeque;
use std::time::{Duration, Instant};
use tokio::time::MissedTickBehavior;

/// Pings without any message after them, before a connection is closed.
const UNANSWERED: u32 = 3;

/// Pings of a connection, numbered, so that each end knows from when on the other certainly heard it.
pub(crate) struct Pings {
    link: u64,
    due: tokio::time::Interval,
    unanswered: u32,
    /// When each was sent that was not answered yet, and none before it.
    sent: VecDeque<(u64, Instant)>,
    last: u64,
    heard: u64,
}

impl Pings {
    pub(crate) fn new(link: u64, every: Duration) -> Pings {
        let mut due = tokio::time::interval(every);
        // After this process stood still, each agent is asked once, not as often as it would have been.
        due.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Pings { link, due, unanswered: 0, sent: VecDeque::new(), last: 0, heard: 0 }
    }

    /// The next one; none if too many were not answered.
    fn next(&mut self, now: Instant) -> Option<ToAgent> {
        if self.unanswered == UNANSWERED {
            return None;
        }
        self.unanswered += 1;
        self.last += 1;
        self.sent.push_back((self.last, now));
        Some(ToAgent::Ping { n: self.last, heard: self.heard })
    }

    /// When the ping was sent that this answers, if it is the first answer to it.
    fn sent(&mut self, n: u64) -> Option<Instant> {
        if n <= self.heard || n > self.last {
            return None;
        }
        self.heard = n;
        let mut at = None;
        while let Some((_, sent)) = self.sent.front().copied().filter(|(ping, _)| *ping <= n) {
            at = Some(sent);
            self.sent.pop_front();
        }
        at
    }

    /// Any message shows that the other end is there, if not since when.
    pub(crate) fn said_something(&mut self) {
        self.unanswered = 0;
    }

    /// Keeps when the agent was certainly there.
    pub(crate) fn answered<S: Site>(&mut self, shared: &Workers<S>, key: StreamKey, n: u64) {
        let Some(sent) = self.sent(n) else { return };
        let now = Instant::now();
        shared.with(key, |worker| {
            if let Some(link) = worker.link.as_mut().filter(|link| link.id == self.link) {
                link.witness = Some((link.witness.map_or(now, |(first, _)| first), sent));
            }
        });
    }
}

/// The next ping, when it is due; none if too many were not answered.
pub(crate) async fn next_ping(pings: &mut Option<Pings>) -> Option<ToAgent> {
    match pings {
        Some(pings) => {
            pings.due.tick().await;
            pings.next(Instant::now())
        }
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_ping_counts_from_when_it_was_sent_once_it_is_answered() {
        let mut pings = Pings::new(1, Duration::from_secs(5));
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        let at = |n: u32| start + second * n;
        assert_eq!(pings.next(at(0)), Some(ToAgent::Ping { n: 1, heard: 0 }));
        assert_eq!(pings.next(at(1)), Some(ToAgent::Ping { n: 2, heard: 0 }));
        assert_eq!(pings.sent(0), None, "an agent that does not count");
        assert_eq!(pings.sent(3), None, "it was never sent");
        assert_eq!(pings.sent(2), Some(at(1)), "which answers the first too");
        assert_eq!(pings.sent(1), None, "late");
        assert_eq!(pings.next(at(2)), Some(ToAgent::Ping { n: 3, heard: 2 }));
        assert_eq!(pings.next(at(3)), None, "three without a message");
        pings.said_something();
        assert_eq!(pings.next(at(4)), Some(ToAgent::Ping { n: 4, heard: 2 }));
        assert_eq!(pings.sent(4), Some(at(4)));
        assert!(pings.sent.is_empty());
    }
}
