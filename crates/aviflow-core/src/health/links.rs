//! InfiniBand ports: one that went down, and one with too many symbol errors.
//!
//! Counters of the ports, as the kernel has them in `/sys/class/infiniband/…/counters`, rise from the last reset on.
//! `link_downed` that rises is fatal, and so are more than 120 symbol errors within an hour (NVSentinel).

use super::fault::Kind;
use crate::model::NodeId;
use crate::time::{Span, Time};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};

/// Symbol errors within an hour that are too many if there are more.
pub const SYMBOL_ERRORS: u64 = 120;

const HOUR: Span = Span::minutes(60);

/// Between two counts that are kept.
const APART: Span = Span::minutes(5);

/// A count that is lower than one of less than this before is an older one that came later: each agent on a node reads
/// its ports.
const LATE: Span = Span::seconds(60);

/// Ports of which counts are kept; more are not watched.
const PORTS: usize = 262_144;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Port {
    downed: u64,
    /// Its symbol errors, and when it was read last.
    last: (Time, u64),
    /// Symbol errors of the last hour, oldest first: at most 13.
    errors: VecDeque<(Time, u64)>,
    /// When too many were told last.
    told: Option<Time>,
}

/// The ports of all nodes. At most 300 bytes each.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Links {
    /// By node and the port's name there, as `mlx5_0/1`.
    #[serde(with = "crate::health::pairs")]
    ports: BTreeMap<(NodeId, String), Port>,
}

impl Links {
    /// The counters of a port were read. The first reading says nothing, and one that is lower than the one before
    /// only that they were reset.
    pub fn read(&mut self, node: NodeId, port: &str, downed: u64, symbol_errors: u64, at: Time) -> Option<Kind> {
        let key = (node, port.to_owned());
        let last = (at, symbol_errors);
        let Some(known) = self.ports.get_mut(&key) else {
            if self.ports.len() < PORTS {
                self.ports.insert(key, Port { downed, last, errors: [last].into(), told: None });
            }
            return None;
        };
        if (downed < known.downed || symbol_errors < known.last.1) && at.since(known.last.0) < LATE {
            return None;
        }
        known.last = last;
        let down = downed > known.downed;
        known.downed = downed;
        let errors = &mut known.errors;
        if errors.back().is_some_and(|(_, n)| symbol_errors < *n) {
            errors.clear();
        }
        // The oldest that is kept is an hour old or younger.
        while errors.front().is_some_and(|(t, _)| at.since(*t) > HOUR) {
            errors.pop_front();
        }
        let since = errors.front().map_or(symbol_errors, |(_, n)| *n);
        if errors.back().is_none_or(|(t, _)| at.since(*t) >= APART) {
            errors.push_back((at, symbol_errors));
        }
        let many = symbol_errors - since.min(symbol_errors) > SYMBOL_ERRORS;
        if down {
            return Some(Kind::LinkDown);
        }
        if many && known.told.is_none_or(|told| at.since(told) >= HOUR) {
            known.told = Some(at);
            return Some(Kind::LinkErrors);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads (minute, link_downed, symbol errors) of one port; what the last one told.
    fn last(reads: &[(i64, u64, u64)]) -> Option<Kind> {
        let mut links = Links::default();
        reads.iter().map(|(m, d, e)| links.read(NodeId(1), "mlx5_0/1", *d, *e, Time(m * 60_000))).last().flatten()
    }

    #[test]
    fn a_port_that_went_down_is_told_each_time() {
        assert_eq!(last(&[(0, 7, 0)]), None, "it was long ago, before anybody looked");
        assert_eq!(last(&[(0, 7, 0), (1, 7, 0)]), None);
        assert_eq!(last(&[(0, 7, 0), (1, 8, 0)]), Some(Kind::LinkDown));
        assert_eq!(last(&[(0, 7, 0), (1, 8, 0), (2, 8, 0)]), None);
        assert_eq!(last(&[(0, 7, 0), (1, 8, 0), (2, 9, 0)]), Some(Kind::LinkDown));
        assert_eq!(last(&[(0, 7, 0), (1, 0, 0), (2, 1, 0)]), Some(Kind::LinkDown), "after a reset");
    }

    #[test]
    fn what_another_agent_read_before_is_no_reset() {
        let mut links = Links::default();
        let mut read = |s: i64, downed, errors| links.read(NodeId(1), "mlx5_0/1", downed, errors, Time(s * 1000));
        assert_eq!(
            [read(0, 7, 0), read(10, 8, 100), read(11, 7, 90), read(12, 8, 100)],
            [None, Some(Kind::LinkDown), None, None]
        );
        assert_eq!(read(20, 8, 121), Some(Kind::LinkErrors));
    }

    #[test]
    fn symbol_errors_count_by_the_hour() {
        assert_eq!(last(&[(0, 0, 5_000_000), (1, 0, 5_000_120)]), None);
        assert_eq!(last(&[(0, 0, 5_000_000), (1, 0, 5_000_121)]), Some(Kind::LinkErrors));
        assert_eq!(last(&[(0, 0, 500), (1, 0, 3), (2, 0, 90)]), None, "a reset");
        let slowly = |per_minute: u64| {
            let reads: Vec<_> = (0..600).map(|m| (m as i64, 0, m * per_minute)).collect();
            (1..=reads.len()).filter(|n| last(&reads[..*n]).is_some()).count()
        };
        assert_eq!(slowly(2), 0, "120 an hour");
        assert_eq!(slowly(3), 10, "180 an hour, told once in each");
    }

    #[test]
    fn memory_is_bounded_and_survives() {
        let mut links = Links::default();
        for s in 0..100_000 {
            links.read(NodeId(1), "mlx5_0/1", 0, s, Time(s as i64 * 1000));
        }
        assert!(links.ports[&(NodeId(1), "mlx5_0/1".to_owned())].errors.len() <= 13);
        let text = serde_json::to_string(&links).expect("writes");
        assert_eq!(serde_json::from_str::<Links>(&text).expect("reads"), links);
    }
}
