//! What an XID of the NVIDIA driver asks for, and what its repetition says.
//!
//! The actions are those of NVIDIA's catalogue as `leptonai/gpud` has them; the rules of repetition are those of
//! NVSentinel. An XID is counted when its line comes: the gauge of dcgm-exporter keeps its last value and says nothing
//! of when (dcgm-exporter#500).

use super::fault::Blame;
use crate::model::NodeId;
use crate::time::{Span, Time};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// What an XID asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Asks {
    /// Nothing but to be seen: a remap comes at the next idle moment, or the number is unknown.
    Watch,
    /// What the XID that comes with it asks for.
    Companion,
    /// The application is run again; the GPU is fine.
    RestartApplication,
    /// The GPU is reset before anything else runs on it.
    ResetGpu,
    /// The attempt is over, the node takes nothing new until it was checked.
    Cordon,
    /// The node is drained and started anew, as a machine.
    RestartNode,
    /// People of the vendor.
    Support,
}

impl Asks {
    /// Whether a gang on that GPU cannot go on.
    #[must_use]
    pub fn is_fatal(self) -> bool {
        match self {
            Asks::Watch | Asks::Companion => false,
            Asks::RestartApplication | Asks::ResetGpu | Asks::Cordon | Asks::RestartNode | Asks::Support => true,
        }
    }

    /// Whom it blames.
    #[must_use]
    pub fn blame(self) -> Blame {
        match self {
            Asks::Watch | Asks::Companion => Blame::Unknown,
            Asks::RestartApplication => Blame::Application,
            Asks::ResetGpu => Blame::Gpu,
            Asks::Cordon | Asks::RestartNode | Asks::Support => Blame::Node,
        }
    }

    /// What to do, in a few words.
    #[must_use]
    pub fn words(self) -> &'static str {
        match self {
            Asks::Watch => "watch it",
            Asks::Companion => "follow the XID that came with it",
            Asks::RestartApplication => "restart the application",
            Asks::ResetGpu => "reset the GPU",
            Asks::Cordon => "cordon the node and check it",
            Asks::RestartNode => "drain the node and restart the machine",
            Asks::Support => "ask the vendor's support, the GPU fails again and again",
        }
    }
}

/// The XID that has the driver's own verdict in its line, see [`verdict`].
pub const VERDICT: u32 = 154;

/// What an XID asks for by itself. 154 is the driver's own verdict, see [`verdict`]; without its words it cordons.
#[must_use]
pub fn asks(number: u32) -> Asks {
    match number {
        13 | 31 | 43 | 69 | 94 => Asks::RestartApplication,
        45 => Asks::Companion,
        63 | 92 => Asks::Watch,
        46 | 62 | 64 | 95 | 109 | 119 | 120 | 136 | 140 | 143 => Asks::ResetGpu,
        48 | 74 | 144..=150 | 154 => Asks::Cordon,
        79 => Asks::RestartNode,
        // A number that nobody wrote down stops no training and empties no node: what dies of it is seen to die.
        _ => Asks::Watch,
    }
}

/// What an XID means, in a few words; none where the table has none.
#[must_use]
pub fn means(number: u32) -> Option<&'static str> {
    Some(match number {
        13 => "graphics engine exception",
        31 => "GPU memory page fault",
        43 => "GPU stopped processing",
        45 => "preemptive cleanup, due to previous errors",
        46 => "GPU stopped processing",
        48 => "double bit ECC error",
        62 => "internal micro-controller halt",
        63 => "row remapping recorded",
        64 => "row remapping failed",
        69 => "graphics engine class error",
        74 => "NVLink error",
        79 => "GPU has fallen off the bus",
        92 => "high single-bit ECC error rate",
        94 => "contained memory error",
        95 => "uncontained memory error",
        109 => "context switch timeout",
        119 => "GSP RPC timeout",
        120 => "GSP error",
        140 => "unrecovered ECC error",
        144..=150 => "NVLink error",
        154 => "GPU recovery action changed",
        _ => return None,
    })
}

/// What the driver itself asks for in the line of an XID 154, such as `GPU recovery action changed from 0x0 (None) to
/// 0x1 (GPU Reset Required)`. The numbers are NVML's; the words differ between drivers. None if the line does not say so.
#[must_use]
pub fn verdict(line: &str) -> Option<Asks> {
    let (_, change) = line.split_once("recovery action changed from ")?;
    let (_, to) = change.split_once(" to ")?;
    let (code, _) = to.split_once(' ').unwrap_or((to, ""));
    match code.trim_end_matches(',') {
        "0x0" => Some(Asks::Watch),
        "0x1" => Some(Asks::ResetGpu),
        "0x2" => Some(Asks::RestartNode),
        // Drain P2P: what runs on several GPUs ends, as NVLink is no longer to be used.
        "0x3" => Some(Asks::Cordon),
        // Drain and reset.
        "0x4" => Some(Asks::ResetGpu),
        _ => None,
    }
}

/// One XID, as an agent or a cluster reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Xid {
    /// The number.
    pub number: u32,
    /// The node.
    pub node: NodeId,
    /// The GPU's slot there; none if the line's PCI address fits none.
    pub gpu: Option<u32>,
    /// What the driver itself said, of an XID 154.
    pub verdict: Option<Asks>,
}

/// What an XID asks for in the light of those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Judged {
    /// What it asks for.
    pub asks: Asks,
    /// Whom it blames.
    pub blame: Blame,
    /// Whether that follows from its repetition.
    pub repeated: bool,
}

/// Over how long repetitions are counted.
const WINDOW: Span = Span::minutes(24 * 60);

/// Fatal XIDs of one GPU within the window that go to support.
const SUPPORT: usize = 5;

/// Lines with one number of one GPU that come within this time of each other are one event: the driver prints one for
/// each engine or page, and each agent on a node reads them all.
const EVENT: Span = Span::seconds(5);

/// XIDs that are kept of a GPU: more decide nothing.
const KEPT: usize = 16;

/// GPUs of which XIDs are kept; of more, the one heard of least recently is forgotten.
const GPUS: usize = 65_536;

/// The XIDs of the last 24 hours by GPU; state that survives a restart.
///
/// At most 16 of a GPU, 16 bytes each.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Xids {
    /// GPUs as (node, slot + 1), 0 for one that is not known.
    #[serde(with = "crate::health::pairs")]
    seen: BTreeMap<(NodeId, u32), VecDeque<(Time, u32)>>,
}

impl Xids {
    /// Takes one in, and says what it asks for. `job` are the GPUs of the gang that ran there, if one did.
    pub fn judge(&mut self, xid: &Xid, at: Time, job: &BTreeSet<(NodeId, u32)>) -> Judged {
        self.forget(at);
        let key = (xid.node, xid.gpu.map_or(0, |slot| slot + 1));
        let own = self.seen.entry(key).or_default();
        let event = own.iter().rposition(|(last, n)| *n == xid.number && at.since(*last) <= EVENT);
        if let Some((last, _)) = event.and_then(|event| own.get_mut(event)) {
            *last = at.max(*last);
        } else {
            own.push_back((at, xid.number));
            if own.len() > KEPT {
                own.pop_front();
            }
        }
        let twice = xid.number == 31 && own.iter().filter(|(_, n)| *n == 31).count() > 1;
        let fatal = own.iter().filter(|(_, n)| asks(*n).is_fatal()).count();
        if let Some(asks) = xid.verdict {
            return Judged { asks, blame: asks.blame(), repeated: false };
        }
        let elsewhere = xid.number == 31
            && job.iter().any(|(node, slot)| {
                (*node, slot + 1) != key
                    && self.seen.get(&(*node, slot + 1)).is_some_and(|x| x.iter().any(|(_, n)| *n == 31))
            });
        let asks = asks(xid.number);
        if elsewhere {
            // The same page fault on several GPUs of a job: they have the program in common, and nothing else.
            return Judged { asks: Asks::RestartApplication, blame: Blame::Application, repeated: true };
        }
        if fatal >= SUPPORT && asks.is_fatal() {
            return Judged { asks: Asks::Support, blame: Blame::Gpu, repeated: true };
        }
        if twice {
            return Judged { asks: Asks::ResetGpu, blame: Blame::Gpu, repeated: true };
        }
        Judged { asks, blame: asks.blame(), repeated: false }
    }

    /// The XIDs of a GPU within the last 24 hours, oldest first.
    pub fn of(&self, node: NodeId, gpu: u32) -> impl Iterator<Item = (Time, u32)> + '_ {
        self.seen.get(&(node, gpu + 1)).into_iter().flatten().copied()
    }

    fn forget(&mut self, now: Time) {
        if self.seen.len() >= GPUS {
            let oldest = self.seen.iter().min_by_key(|(_, x)| x.back().map(|(at, _)| *at)).map(|(key, _)| *key);
            oldest.map(|key| self.seen.remove(&key));
        }
        for xids in self.seen.values_mut() {
            xids.retain(|(at, _)| now.since(*at) <= WINDOW);
        }
        self.seen.retain(|_, xids| !xids.is_empty());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: i64 = 3_600_000;

    fn xid(number: u32, node: u32, gpu: u32) -> Xid {
        Xid { number, node: NodeId(node), gpu: Some(gpu), verdict: None }
    }

    /// Judges XIDs (hour, number, node, GPU) that come one after the other; the last one's verdict.
    fn last(xids: &[(i64, u32, u32, u32)]) -> Judged {
        let job: BTreeSet<_> = (0..2).flat_map(|node| (0..8).map(move |gpu| (NodeId(node), gpu))).collect();
        let mut seen = Xids::default();
        let judged = xids.iter().map(|(h, n, node, gpu)| seen.judge(&xid(*n, *node, *gpu), Time(h * HOUR), &job));
        judged.last().expect("one")
    }

    #[test]
    fn the_table_is_that_of_the_catalogue() {
        let of = |what: Asks| (0..1000).filter(|n| asks(*n) == what).collect::<Vec<_>>();
        assert_eq!(of(Asks::RestartApplication), [13, 31, 43, 69, 94]);
        assert_eq!(of(Asks::Companion), [45]);
        assert_eq!(of(Asks::ResetGpu), [46, 62, 64, 95, 109, 119, 120, 136, 140, 143]);
        assert_eq!(of(Asks::Cordon), [48, 74, 144, 145, 146, 147, 148, 149, 150, 154]);
        assert_eq!(of(Asks::RestartNode), [79]);
        assert_eq!(asks(63), Asks::Watch);
        assert_eq!((asks(4_000_000_000), asks(0)), (Asks::Watch, Asks::Watch), "what is unknown stops nothing");
    }

    #[test]
    fn an_application_s_xid_blames_no_machine() {
        for number in [13, 31, 43, 69, 94] {
            assert_eq!(last(&[(0, number, 0, 3)]).blame, Blame::Application, "{number}");
        }
    }

    #[test]
    fn a_page_fault_that_comes_again_points_to_where_it_comes() {
        let twice = last(&[(0, 31, 0, 3), (23, 31, 0, 3)]);
        assert_eq!((twice.asks, twice.blame), (Asks::ResetGpu, Blame::Gpu));
        assert_eq!(last(&[(0, 31, 0, 3), (25, 31, 0, 3)]).blame, Blame::Application, "a day has passed");
        let several = last(&[(0, 31, 0, 3), (1, 31, 0, 3), (1, 31, 1, 5)]);
        assert_eq!(several.blame, Blame::Application, "on several GPUs of the job");
        let other = last(&[(0, 31, 7, 3), (1, 31, 0, 3), (2, 31, 0, 3)]);
        assert_eq!(other.blame, Blame::Gpu, "on a node of another job it says nothing");
    }

    #[test]
    fn five_fatal_ones_in_a_day_are_for_support() {
        let xids = [(0, 13, 0, 3), (1, 94, 0, 3), (2, 13, 0, 3), (3, 69, 0, 3), (4, 63, 0, 3), (5, 13, 0, 3)];
        assert_eq!(last(&xids[..5]).asks, Asks::Watch);
        assert_eq!((last(&xids).asks, last(&xids).repeated), (Asks::Support, true));
        assert!(!last(&[(0, 13, 0, 1), (0, 13, 0, 2), (0, 13, 0, 3), (0, 13, 0, 4), (0, 13, 0, 5)]).repeated);
    }

    #[test]
    fn an_event_of_many_lines_counts_once() {
        let mut seen = Xids::default();
        let job: BTreeSet<_> = [(NodeId(0), 3)].into();
        let mut judge = |number, ms| seen.judge(&xid(number, 0, 3), Time(ms), &job);
        for line in 0..20 {
            let judged = judge(31, line * 400);
            assert_eq!((judged.asks, judged.repeated), (Asks::RestartApplication, false), "line {line}");
            assert!(!judge(13, line * 400).repeated, "another number is an event of its own, line {line}");
        }
        assert_eq!(judge(31, 7_600 + 5_001).blame, Blame::Gpu, "another event");
    }

    #[test]
    fn the_driver_s_verdict_wins() {
        let cases = [
            ("154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)", Some(Asks::ResetGpu)),
            ("154, GPU recovery action changed from 0x0 (None) to 0x1 (PF FLR)", Some(Asks::ResetGpu)),
            ("154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)", Some(Asks::RestartNode)),
            ("154, GPU recovery action changed from 0x0 (None) to 0x3 (Drain P2P)", Some(Asks::Cordon)),
            ("154, GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)", Some(Asks::ResetGpu)),
            ("154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)", Some(Asks::Watch)),
            ("154, GPU recovery action changed from 0x0 (None) to 0x77 (?)", None),
            ("154, GPU recovery action changed from", None),
            ("79, GPU has fallen off the bus.", None),
            ("", None),
        ];
        for (line, asks) in cases {
            assert_eq!(verdict(line), asks, "{line}");
        }
        let mut seen = Xids::default();
        let reset = Xid { verdict: Some(Asks::ResetGpu), ..xid(154, 0, 1) };
        assert_eq!(seen.judge(&reset, Time(0), &BTreeSet::new()).asks, Asks::ResetGpu);
        assert_eq!(seen.judge(&xid(154, 0, 1), Time(0), &BTreeSet::new()).asks, Asks::Cordon);
    }

    #[test]
    fn memory_is_bounded_and_survives() {
        let mut seen = Xids::default();
        for i in 0..10_000 {
            seen.judge(&xid(13, 0, 1), Time(i * 6000), &BTreeSet::new());
        }
        assert_eq!(seen.of(NodeId(0), 1).count(), KEPT);
        let text = serde_json::to_string(&seen).expect("writes");
        assert_eq!(serde_json::from_str::<Xids>(&text).expect("reads"), seen);
        seen.judge(&xid(13, 1, 1), Time(42 * HOUR), &BTreeSet::new());
        assert_eq!(seen.of(NodeId(0), 1).count(), 0, "yesterday's are forgotten");
    }
}
