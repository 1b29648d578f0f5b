use super::*;
use crate::health::chance::Chance;

const LEAST: u32 = 50;

fn node(rank: u32) -> NodeId {
    NodeId(rank / 8)
}

/// A gang whose ranks need 1 s for their share, with noise of each step for all and of each rank.
struct World {
    chance: Chance,
    ranks: u32,
    noise: f64,
    step: u64,
    watch: Stragglers,
    /// How much longer a rank needs than the others.
    share: Box<dyn Fn(u32) -> f64>,
}

impl World {
    fn new(seed: u64, ranks: u32, noise: f64, share: impl Fn(u32) -> f64 + 'static) -> World {
        let watch = Stragglers::default();
        World { chance: Chance::new(seed), ranks, noise, step: 0, watch, share: Box::new(share) }
    }

    /// Runs windows; who was named in each.
    fn run(&mut self, windows: u64) -> Vec<Vec<Slow>> {
        let mut named = Vec::new();
        // One step more, so that the last window ends.
        let until = (self.step / WINDOW + windows) * WINDOW;
        while self.step <= until {
            // Batches are of different lengths, the same for all ranks.
            let batch = (0.2 * self.chance.normal()).exp();
            let mut found = Vec::new();
            for i in 0..self.ranks {
                // They are not heard in the order of their numbers.
                let rank = (i * 5 + self.step as u32) % self.ranks;
                let mut took = batch * (self.share)(rank) * (self.noise * self.chance.normal()).exp();
                // Once in 500 steps, one takes much longer: a collection of garbage.
                if self.chance.below(500) == 0 {
                    took += 2.0;
                }
                let micros = (took * 1e6) as u64;
                found.extend(self.watch.own_time(rank, self.ranks, self.step, micros, LEAST, node));
            }
            if self.step > 0 && self.step.is_multiple_of(WINDOW) {
                named.push(found);
            } else {
                assert!(found.is_empty(), "named before the end of the window");
            }
            self.step += 1;
        }
        named
    }
}

#[test]
fn a_straggler_of_a_tenth_is_found() {
    let (mut right, mut wrong, cases) = (0, 0, 60);
    for seed in 0..cases {
        let ranks = [4, 8, 16, 64, 256][seed as usize % 5];
        let culprit = (seed * 31 % u64::from(ranks)) as u32;
        let noise = [0.02, 0.05, 0.1][seed as usize / 5 % 3];
        let mut w = World::new(seed, ranks, noise, move |rank| if rank == culprit { 1.1 } else { 1.0 });
        let named: Vec<Slow> = w.run(3).concat();
        right += u64::from(named.iter().any(|s| s.rank == culprit));
        wrong += u64::from(named.iter().any(|s| s.rank != culprit));
    }
    assert!(right * 100 >= cases * 95, "{right} of {cases}");
    assert_eq!(wrong, 0);
}

#[test]
fn nobody_is_named_where_none_is_slow() {
    let (mut windows, mut named) = (0, 0);
    for (seed, ranks, noise, count) in [(1, 4, 0.1, 700), (2, 8, 0.3, 500), (3, 8, 0.02, 500), (4, 64, 0.1, 100)] {
        let found = World::new(seed, ranks, noise, |_| 1.0).run(count);
        windows += found.len();
        named += found.iter().filter(|n| !n.is_empty()).count();
    }
    assert!(windows >= 1800);
    assert!(named * 1000 <= windows, "{named} of {windows} windows");
}

#[test]
fn a_slow_node_is_found_and_a_slow_stage_is_not() {
    let slow_node = World::new(1, 64, 0.05, |rank| if node(rank) == NodeId(3) { 1.1 } else { 1.0 }).run(3).concat();
    assert!((24..32).all(|rank| slow_node.iter().any(|s| s.rank == rank)), "{slow_node:?}");
    assert!(slow_node.iter().all(|s| (70..130).contains(&s.excess)), "{slow_node:?}");
    let stage = World::new(2, 64, 0.05, |rank| if rank % 16 == 15 { 1.3 } else { 1.0 }).run(3).concat();
    assert_eq!(stage, [], "one rank in sixteen, on each second node, has more work");
}

#[test]
fn ranks_are_compared_with_their_like() {
    // One rank in 64 of a role with more work; one of these is slow.
    let mut w = World::new(3, 256, 0.05, |rank| match rank {
        7 => 1.43,
        r if r % 64 == 7 => 1.3,
        _ => 1.0,
    });
    for rank in 0..256 {
        w.watch.role(rank, 256, u16::from(rank % 64 == 7));
    }
    let named: Vec<u32> = w.run(3).concat().iter().map(|s| s.rank).collect();
    assert!(!named.is_empty() && named.iter().all(|r| *r == 7), "{named:?}");
}

#[test]
fn what_is_late_missing_or_absurd_is_harmless() {
    let mut w = World::new(4, 8, 0.02, |_| 1.0);
    w.run(1);
    let before = w.watch.clone();
    assert_eq!(w.watch.own_time(3, 8, 17, 1_000_000, LEAST, node), [], "long ago");
    assert_eq!(w.watch.own_time(99, 8, 17, 1_000_000, LEAST, node), [], "no such rank");
    assert_eq!(w.watch, before);
    // A rank that reports no more does not keep the others from being compared.
    w.ranks = 7;
    w.share = Box::new(|rank| if rank == 2 { 1.2 } else { 1.0 });
    assert!(w.run(4).concat().iter().any(|s| s.rank == 2));
    for step in (u64::MAX - 1000..=u64::MAX).chain([1 << 40, 0, 1]) {
        for rank in 0..8 {
            w.watch.own_time(rank, 8, step, u64::MAX, LEAST, node);
        }
    }
}

#[test]
fn a_straggler_is_found_though_steps_are_counted_anew() {
    let mut w = World::new(6, 8, 0.02, |rank| if rank == 5 { 1.15 } else { 1.0 });
    w.run(1);
    w.run(1);
    for _ in 0..2 {
        w.step = 0;
        assert!(w.run(3).concat().iter().any(|s| s.rank == 5));
    }
}

#[test]
fn memory_is_what_is_said() {
    assert!(size_of::<Lane>() <= 176, "{}", size_of::<Lane>());
}
