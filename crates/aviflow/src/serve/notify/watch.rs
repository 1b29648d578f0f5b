//! What no moment says: GPUs that do nothing, and starts that move away. Pure.

use aviflow_core::model::JobId;
use aviflow_core::time::{Span, Time};
use std::collections::BTreeMap;

/// How long GPUs must have done nothing.
pub const IDLE: Span = Span::minutes(30);

/// The part of the time up to which the busiest GPU of a gang does nothing.
const NOTHING: f32 = 0.01;

/// How much later a start must be expected, at the least.
const LATER: Span = Span::minutes(30);

/// Gangs whose GPUs do nothing.
#[derive(Debug, Default)]
pub struct Idle(BTreeMap<(JobId, u32), (Time, bool)>);

impl Idle {
    /// Takes what the busiest GPU of each gang does, as it is now; gives those that have done nothing for long, each
    /// once until it does something. A gang of which nothing is known counts as one that works.
    pub fn look(&mut self, busiest: &BTreeMap<(JobId, u32), f32>, now: Time) -> Vec<(JobId, u32)> {
        let idle = |gang: &(JobId, u32)| busiest.get(gang).is_some_and(|used| *used <= NOTHING);
        self.0.retain(|gang, _| idle(gang));
        let mut found = Vec::new();
        for gang in busiest.keys().filter(|gang| idle(gang)) {
            let (since, told) = self.0.entry(*gang).or_insert((now, false));
            if now.since(*since) >= IDLE && !*told {
                *told = true;
                found.push(*gang);
            }
        }
        found
    }
}

/// When a start was expected, and when that was said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expected {
    /// As likely before as after.
    pub start: Time,
    /// When.
    pub said: Time,
}

/// Whether a start moved away by so much that it is worth telling: by more than half an hour, and by more than a
/// quarter of the wait.
pub fn slipped(before: Expected, start: Time) -> bool {
    let later = start.since(before.start);
    later > LATER && later.0 > before.start.since(before.said).0 / 4
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_are_idle_once_all_have_done_nothing_for_long() {
        let mut idle = Idle::default();
        let gang = (JobId(1), 2);
        let mut look = |minute: i64, used: Option<f32>| {
            let busiest = used.map(|used| (gang, used)).into_iter().collect();
            idle.look(&busiest, Time(0) + Span::minutes(minute)) == [gang]
        };
        assert!(!look(0, Some(0.0)) && !look(29, Some(0.01)));
        assert!(look(30, Some(0.0)), "half an hour");
        assert!(!look(31, Some(0.0)) && !look(90, Some(0.0)), "once");
        assert!(!look(91, Some(0.5)) && !look(92, Some(0.0)) && !look(121, Some(0.0)));
        assert!(look(122, Some(0.0)), "again, once it has worked");
        assert!(!look(130, None) && !look(131, Some(0.0)) && !look(160, Some(0.0)), "what is not known is no idleness");
        assert!(look(161, Some(0.0)));
    }

    #[test]
    fn a_start_slips_by_half_an_hour_and_a_quarter_of_the_wait() {
        let at = |minute: i64| Time(0) + Span::minutes(minute);
        let check = |wait: i64, later: i64, expected: bool| {
            let before = Expected { start: at(wait), said: at(0) };
            assert_eq!(slipped(before, at(wait + later)), expected, "{wait} {later}");
        };
        check(10, 30, false);
        check(10, 31, true);
        check(120, 30, false);
        check(120, 31, true);
        check(240, 60, false);
        check(240, 61, true);
        check(240, -100, false);
    }
}
