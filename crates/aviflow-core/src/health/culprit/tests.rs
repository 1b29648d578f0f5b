use super::*;
use crate::health::chance::Chance;

const PER_NODE: u32 = 8;

fn node(rank: u32) -> NodeId {
    NodeId(rank / PER_NODE)
}

fn end(ms: i64, kind: Kind) -> RankFacts {
    RankFacts { end: Some(End { at: Time(ms), kind, stopping: false }), ..RankFacts::default() }
}

fn stopped(ms: i64) -> RankFacts {
    RankFacts { end: Some(End { at: Time(ms), kind: Kind::Signal, stopping: true }), ..RankFacts::default() }
}

fn failed(ranks: &[RankFacts]) -> Option<(u32, Because)> {
    of_failure(ranks, node).map(|c| (c.rank, c.because))
}

#[test]
fn the_first_that_failed_is_named_and_not_who_noticed() {
    let alive = RankFacts::default();
    let lost = Kind::PeerLost;
    let cases = [
        (vec![alive, alive], None),
        (vec![end(9, Kind::Exit), end(5, Kind::Cuda)], Some((1, Because::FailedFirst))),
        // The reports of those who noticed came first.
        (vec![end(1000, lost), end(1002, lost), end(1900, Kind::GpuOutOfMemory)], Some((2, Because::FailedFirst))),
        (vec![stopped(1), end(900, Kind::Exit), stopped(2)], Some((1, Because::FailedFirst))),
        // Within the skew of clocks, who knows why.
        (vec![end(1000, Kind::Exit), end(1200, Kind::Cuda)], Some((1, Because::FailedFirst))),
        (vec![end(1000, Kind::Exit), end(2000, Kind::Cuda)], Some((0, Because::FailedFirst))),
        // An error of NCCL is a cause where nobody ended before, and else an echo.
        (vec![alive, end(1000, Kind::Nccl), end(2000, lost)], Some((1, Because::FailedFirst))),
        (vec![alive, end(3000, Kind::Nccl), end(1000, lost)], Some((2, Because::EndedFirst))),
        (vec![end(1000, Kind::Nccl), end(1200, Kind::Exit)], Some((1, Because::FailedFirst))),
        (vec![end(9000, Kind::Nccl), end(1000, lost)], Some((0, Because::FailedFirst))),
        // Whom they lost said nothing.
        (vec![alive, end(1010, lost), end(1000, lost)], Some((2, Because::EndedFirst))),
        (vec![stopped(1), stopped(2)], None),
    ];
    for (ranks, named) in cases {
        assert_eq!(failed(&ranks), named, "{ranks:?}");
    }
}

#[test]
fn who_timed_out_waited_for_another() {
    let mut ranks: Vec<RankFacts> =
        (0..16).map(|r| RankFacts { collective: Some(77), ..end(1000 + r, Kind::NcclTimeout) }).collect();
    ranks[5] = RankFacts { collective: Some(76), ..end(1100, Kind::PeerLost) };
    assert_eq!(failed(&ranks), Some((5, Because::BehindInCollectives)));
}

fn hang(change: impl Fn(u32, &mut RankFacts)) -> Option<(u32, u32, Because)> {
    let ranks: Vec<RankFacts> = (0..32)
        .map(|rank| {
            let mut facts =
                RankFacts { step: Some(100), collective: Some(900), stack: Some(1), ..RankFacts::default() };
            change(rank, &mut facts);
            facts
        })
        .collect();
    of_hang(&ranks, node).map(|c| (c.rank, c.ranks, c.because))
}

#[test]
fn who_is_elsewhere_is_named() {
    assert_eq!(hang(|_, _| {}), None, "all alike");
    assert_eq!(hang(|r, f| f.stack = Some(u64::from(r == 9))), Some((9, 1, Because::OtherStack)));
    assert_eq!(hang(|r, f| f.step = Some(100 - u64::from(r == 9))), Some((9, 1, Because::BehindInSteps)));
    let both = hang(|r, f| {
        f.stack = Some(u64::from(r == 2));
        f.collective = Some(900 - u64::from(r == 9));
    });
    assert_eq!(both, Some((9, 1, Because::BehindInCollectives)), "the collective tells more than a stack");
    let of_node = hang(|r, f| f.stack = Some(u64::from(node(r) == NodeId(2))));
    assert_eq!(of_node, Some((16, 8, Because::OtherStack)), "a whole node");
    assert_eq!(hang(|r, f| f.stack = Some(u64::from(r == 2 || r == 30))), None, "two of two nodes are no culprit");
    assert_eq!(hang(|r, f| f.stack = Some(u64::from(r < 16))), None, "half of them is no majority");
    let silent = hang(|r, f| {
        if r == 4 {
            *f = RankFacts::default();
        }
    });
    assert_eq!(silent, Some((4, 1, Because::Silent)));
    assert_eq!(of_hang(&[RankFacts::default(); 2], node), None);
    assert_eq!(of_hang(&[], node), None);
}

/// The shares of injected faults whose culprit is found, with what disturbs the sight: ranks whose stack could not be
/// taken, who are elsewhere in the same collective, whose last step was not heard, whose ends are reported late.
#[test]
fn the_culprit_is_right_in_almost_all_injected_cases() {
    let mut chance = Chance::new(5);
    let (mut right, mut wrong) = (0, 0);
    let cases = 4000;
    for case in 0..cases {
        let n = [4, 8, 64, 512][(chance.below(4)) as usize];
        let culprit = chance.below(n) as u32;
        let mut ranks: Vec<RankFacts> = (0..n as u32)
            .map(|rank| RankFacts {
                // The last step is not heard of all.
                step: (chance.below(10) > 0).then_some(50),
                stack: (chance.below(20) > 0 || rank == culprit).then_some(7),
                ..RankFacts::default()
            })
            .collect();
        let named = if case % 2 == 0 {
            ranks[culprit as usize].stack = Some(8);
            // Some are seen while they poll, elsewhere in the same wait.
            for (rank, facts) in ranks.iter_mut().enumerate() {
                if rank as u32 != culprit && chance.below(2000) == 0 {
                    facts.stack = Some(9);
                }
            }
            of_hang(&ranks, node)
        } else {
            for rank in 0..n as u32 {
                // They notice within seconds; clocks and reports are up to 200 ms off.
                let kind = match chance.below(3) {
                    0 => Kind::NcclTimeout,
                    _ => Kind::PeerLost,
                };
                ranks[rank as usize].end =
                    Some(End { at: Time(10_000 + chance.below(5000) as i64), kind, stopping: chance.below(4) == 0 });
            }
            let kind = [Kind::Exit, Kind::Cuda, Kind::Signal, Kind::HostOutOfMemory][chance.below(4) as usize];
            let at = Time(10_000 + chance.below(400) as i64);
            ranks[culprit as usize].end = Some(End { at, kind, stopping: false });
            of_failure(&ranks, node)
        };
        match named {
            Some(c) if c.rank == culprit => right += 1,
            Some(_) => wrong += 1,
            None => {}
        }
    }
    assert!(right * 100 >= cases * 95, "{right} of {cases}");
    assert!(wrong * 100 <= cases, "{wrong} of {cases} name another");
}
