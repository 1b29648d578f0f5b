//! The GPUs of all nodes, with a bounded past, and which of them an attempt held.
//!
//! Whose a GPU is follows from its node, its UUID and the time, never from what an exporter believes. Where an agent
//! has said which GPUs its container got, these count; else the GPUs of a node belong to an attempt that holds all of
//! them, or those of its slots where slots are the devices' numbers. Otherwise nobody knows, and nothing is said.
//!
//! Memory is bounded: a GPU takes about 5 KiB, whatever is read of it and for how long.
//!
//! Instants are milliseconds since the Unix epoch, as their reader's clock has them.

use crate::gpu::{Reading, Sample, Totals, VALUES};
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Samples that are kept as they came: ten minutes of one each 15 seconds.
const RECENT: usize = 40;
/// Milliseconds over which later ones are one: their mean.
const COARSE: i64 = 300_000;
/// Of those, how many are kept: six hours.
const MEANS: usize = 72;
/// The most GPUs and instances of a node that are kept.
const DEVICES: usize = 256;
/// The most numbers of XID errors that are told apart on a GPU.
const XIDS: usize = 32;
/// Milliseconds after which a GPU that is read of no more is forgotten.
const FORGET: i64 = 3_600_000;

/// GPUs of nodes. Shared by who reads them and who shows them; every call is short.
#[derive(Debug)]
pub struct Board {
    stale_after: i64,
    nodes: Mutex<BTreeMap<String, Node>>,
}

#[derive(Debug, Default)]
struct Node {
    devices: BTreeMap<(String, Option<u32>), Device>,
    /// When it was read last.
    read: Option<i64>,
    /// Why it could not be read since.
    trouble: Option<String>,
}

#[derive(Debug, Default)]
struct Device {
    index: Option<u32>,
    at: i64,
    now: Sample,
    xid: Option<u32>,
    xids: BTreeMap<u32, u64>,
    row_remap_failure: Option<bool>,
    past: Past,
}

/// A sample as it is kept: what is absent is not a number.
#[derive(Clone, Copy, Debug)]
struct Kept {
    at: i64,
    values: [f32; VALUES],
}

impl Kept {
    fn new(at: i64, sample: &Sample) -> Kept {
        Kept { at, values: sample.values().map(|value| value.unwrap_or(f32::NAN)) }
    }

    fn sample(&self) -> Sample {
        Sample::of(self.values.map(|value| (!value.is_nan()).then_some(value)))
    }
}

/// What was read before: the last minutes as they came, and what is older in means.
#[derive(Debug, Default)]
struct Past {
    recent: VecDeque<Kept>,
    /// Of the stretch that is not over, if anything was read in it: its beginning and its samples.
    open: Option<(i64, Totals)>,
    means: VecDeque<Kept>,
}

impl Past {
    fn add(&mut self, at: i64, sample: &Sample) {
        self.recent.push_back(Kept::new(at, sample));
        if self.recent.len() > RECENT {
            self.recent.pop_front();
        }
        let begun = at.div_euclid(COARSE) * COARSE;
        if let Some((before, totals)) = self.open.take_if(|(before, _)| *before != begun) {
            self.means.push_back(Kept::new(before, &totals.mean()));
            if self.means.len() > MEANS {
                self.means.pop_front();
            }
        }
        self.open.get_or_insert_with(|| (begun, Totals::default())).1.add(sample);
    }

    fn since(&self, since: i64) -> Vec<(i64, Sample)> {
        let first = self.recent.front().map_or(i64::MAX, |kept| kept.at);
        let older = self.means.iter().filter(|kept| kept.at + COARSE <= first);
        let all = older.chain(&self.recent).filter(|kept| kept.at >= since);
        all.map(|kept| (kept.at, kept.sample())).collect()
    }
}

/// A GPU as it was read last.
#[derive(Clone, Debug, PartialEq)]
pub struct Seen {
    /// Its UUID.
    pub uuid: String,
    /// The number of the MIG instance, where it is one.
    pub instance: Option<u32>,
    /// Its number on the node.
    pub index: Option<u32>,
    /// When.
    pub at: i64,
    /// What it did.
    pub sample: Sample,
    /// The last XID error that it had at any time, where it is known; 0 is none.
    pub xid: Option<u32>,
    /// Whether rows of its memory could not be remapped.
    pub row_remap_failure: Option<bool>,
}

/// What of a node an attempt holds, as far as it is known.
#[derive(Clone, Copy, Debug)]
pub struct Share<'a> {
    /// The node.
    pub node: &'a str,
    /// The UUIDs of the GPUs that its container got, where its agent said them.
    pub uuids: &'a [String],
    /// Whether it holds all GPUs of the node.
    pub whole: bool,
    /// Its slots, where these are the numbers of the devices.
    pub slots: Option<&'a [u32]>,
    /// Since when; what was read before was another's.
    pub since: i64,
}

impl Share<'_> {
    fn has(&self, uuid: &str, instance: Option<u32>, index: Option<u32>) -> bool {
        if !self.uuids.is_empty() {
            return self.uuids.iter().any(|held| match held.strip_prefix("MIG-") {
                // `MIG-GPU-UUID/INSTANCE/COMPUTE`, as drivers before 470 write it; the newer form names no device.
                Some(mig) => {
                    let mut parts = mig.split('/');
                    parts.next() == Some(uuid) && parts.next().and_then(|n| n.parse().ok()) == instance
                }
                None => held == uuid,
            });
        }
        self.whole || self.slots.zip(index).is_some_and(|(slots, index)| slots.contains(&index))
    }
}

/// How the sources of nodes stand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sources {
    /// Nodes whose GPUs were read lately.
    pub fresh: u64,
    /// Nodes whose GPUs are not read any more, or were never.
    pub stale: u64,
}

impl Board {
    /// An empty board. What was read more than `stale_after` milliseconds ago is not shown.
    #[must_use]
    pub fn new(stale_after: i64) -> Board {
        Board { stale_after, nodes: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Node>> {
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What was read of a node's GPUs at an instant.
    pub fn read(&self, node: &str, at: i64, readings: Vec<Reading>) {
        let mut nodes = self.lock();
        let node = nodes.entry(node.to_owned()).or_default();
        node.read = Some(at);
        node.trouble = None;
        for reading in readings {
            let key = (reading.uuid, reading.instance);
            if node.devices.len() == DEVICES && !node.devices.contains_key(&key) {
                continue;
            }
            let device = node.devices.entry(key).or_default();
            device.index = reading.index;
            device.at = at;
            device.now = reading.sample;
            device.row_remap_failure = reading.row_remap_failure;
            device.past.add(at, &reading.sample);
            // The first that is seen may be of any age.
            if let (Some(before), Some(xid)) = (device.xid, reading.xid)
                && xid != before
                && xid != 0
                && (device.xids.len() < XIDS || device.xids.contains_key(&xid))
            {
                *device.xids.entry(xid).or_default() += 1;
            }
            device.xid = reading.xid.or(device.xid);
        }
        node.devices.retain(|_, device| at - device.at < FORGET);
    }

    /// That a node's GPUs could not be read. What was known of them stays until it is stale.
    pub fn failed(&self, node: &str, why: String) {
        self.lock().entry(node.to_owned()).or_default().trouble = Some(why);
    }

    /// Forgets nodes that are not asked any more.
    pub fn retain(&self, asked: impl Fn(&str) -> bool) {
        self.lock().retain(|node, _| asked(node));
    }

    /// Why a node's GPUs cannot be read, if so.
    #[must_use]
    pub fn trouble(&self, node: &str) -> Option<String> {
        self.lock().get(node)?.trouble.clone()
    }

    fn fresh(&self, device: &Device, now: i64) -> bool {
        now - device.at <= self.stale_after
    }

    /// The GPUs of a node that were read lately.
    #[must_use]
    pub fn node(&self, node: &str, now: i64) -> Vec<Seen> {
        let nodes = self.lock();
        let devices = nodes.get(node).into_iter().flat_map(|node| &node.devices);
        devices.filter(|(_, device)| self.fresh(device, now)).map(|(key, device)| seen(key, device)).collect()
    }

    /// The GPUs of a share that were read lately, and since it is held. None are said where it is not known which.
    #[must_use]
    pub fn held(&self, share: Share<'_>, now: i64) -> Vec<Seen> {
        let nodes = self.lock();
        let devices = nodes.get(share.node).into_iter().flat_map(|node| &node.devices);
        devices
            .filter(|((uuid, instance), device)| share.has(uuid, *instance, device.index))
            .filter(|(_, device)| device.at >= share.since && self.fresh(device, now))
            .map(|(key, device)| seen(key, device))
            .collect()
    }

    /// What a GPU did since an instant, oldest first: the last ten minutes as they were read, and what is older in
    /// means over five minutes, for six hours.
    #[must_use]
    pub fn past(&self, node: &str, uuid: &str, instance: Option<u32>, since: i64) -> Vec<(i64, Sample)> {
        let nodes = self.lock();
        let device = nodes.get(node).and_then(|node| node.devices.get(&(uuid.to_owned(), instance)));
        device.map(|device| device.past.since(since)).unwrap_or_default()
    }

    /// How many XID errors were seen to come, by node and number. One that comes twice in a row looks like one.
    #[must_use]
    pub fn xids(&self) -> BTreeMap<(String, u32), u64> {
        let mut all = BTreeMap::new();
        for (name, node) in self.lock().iter() {
            for (xid, n) in node.devices.values().flat_map(|device| &device.xids) {
                *all.entry((name.clone(), *xid)).or_default() += n;
            }
        }
        all
    }

    /// How the sources stand.
    #[must_use]
    pub fn sources(&self, now: i64) -> Sources {
        let mut sources = Sources::default();
        for node in self.lock().values() {
            match node.read {
                Some(at) if now - at <= self.stale_after => sources.fresh += 1,
                _ => sources.stale += 1,
            }
        }
        sources
    }
}

fn seen((uuid, instance): &(String, Option<u32>), device: &Device) -> Seen {
    Seen {
        uuid: uuid.clone(),
        instance: *instance,
        index: device.index,
        at: device.at,
        sample: device.now,
        xid: device.xid,
        row_remap_failure: device.row_remap_failure,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STALE: i64 = 60_000;

    fn reading(uuid: &str, index: u32, utilization: f32, xid: u32) -> Reading {
        Reading {
            uuid: uuid.into(),
            index: Some(index),
            sample: Sample { utilization: Some(utilization), ..Sample::default() },
            xid: Some(xid),
            ..Reading::default()
        }
    }

    fn share<'a>(uuids: &'a [String], whole: bool, slots: Option<&'a [u32]>, since: i64) -> Share<'a> {
        Share { node: "n1", uuids, whole, slots, since }
    }

    fn uuids(seen: &[Seen]) -> Vec<&str> {
        seen.iter().map(|s| s.uuid.as_str()).collect()
    }

    #[test]
    fn a_gpu_belongs_to_who_holds_it_at_that_time() {
        let board = Board::new(STALE);
        board.read("n1", 1000, vec![reading("GPU-a", 0, 0.5, 0), reading("GPU-b", 1, 0.25, 0)]);
        let check = |share: Share<'_>, now: i64, expected: &[&str]| {
            assert_eq!(uuids(&board.held(share, now)), expected, "{share:?} at {now}");
        };
        let b = ["GPU-b".to_owned(), "GPU-z".to_owned()];
        check(share(&b, false, None, 0), 1000, &["GPU-b"]);
        check(share(&b, true, Some(&[0]), 0), 1000, &["GPU-b"]);
        check(share(&[], true, None, 0), 1000, &["GPU-a", "GPU-b"]);
        check(share(&[], false, Some(&[0, 7]), 0), 1000, &["GPU-a"]);
        // Part of a node, and nobody knows which.
        check(share(&[], false, None, 0), 1000, &[]);
        // It was another's then, or it is not read any more.
        check(share(&[], true, None, 1001), 1001, &[]);
        check(share(&[], true, None, 0), 1000 + STALE, &["GPU-a", "GPU-b"]);
        check(share(&[], true, None, 0), 1001 + STALE, &[]);
        check(Share { node: "n2", ..share(&[], true, None, 0) }, 1000, &[]);
    }

    #[test]
    fn instances_are_held_apart() {
        let board = Board::new(STALE);
        let instance = |n| Reading { instance: Some(n), ..reading("GPU-a", 0, 0.5, 0) };
        board.read("n1", 0, vec![instance(1), instance(2)]);
        let held = ["MIG-GPU-a/2/0".to_owned()];
        let seen = board.held(share(&held, false, None, 0), 0);
        assert_eq!(seen.iter().map(|s| s.instance).collect::<Vec<_>>(), [Some(2)]);
    }

    #[test]
    fn an_xid_that_stays_is_counted_once() {
        let board = Board::new(STALE);
        // The first was there before this looked.
        for (at, xid) in [(0, 31), (1, 31), (2, 79), (3, 79), (4, 79), (5, 31), (6, 0), (7, 31)] {
            board.read("n1", at, vec![reading("GPU-a", 0, 0.5, xid)]);
        }
        let of = |xid| ("n1".to_owned(), xid);
        assert_eq!(board.xids(), [(of(31), 2), (of(79), 1)].into());
    }

    #[test]
    fn a_dead_exporter_is_a_stale_mark() {
        let board = Board::new(STALE);
        board.read("n1", 0, vec![reading("GPU-a", 0, 0.5, 0)]);
        board.failed("n1", "connection refused".into());
        board.failed("n2", "connection refused".into());
        assert_eq!(board.sources(0), Sources { fresh: 1, stale: 1 });
        assert_eq!(uuids(&board.node("n1", 0)), ["GPU-a"]);
        assert_eq!(board.sources(STALE + 1), Sources { fresh: 0, stale: 2 });
        assert!(board.node("n1", STALE + 1).is_empty());
        assert_eq!(board.trouble("n1").as_deref(), Some("connection refused"));
        board.read("n1", STALE, Vec::new());
        assert_eq!(board.trouble("n1"), None);
        board.retain(|node| node == "n1");
        assert_eq!(board.sources(STALE), Sources { fresh: 1, stale: 0 });
    }

    #[test]
    fn the_past_is_bounded_and_thinned() {
        let board = Board::new(STALE);
        let every = 15_000;
        // A day, in which every value is known from its time.
        let last = 24 * 3600 * 1000;
        for at in (0..=last).step_by(15_000) {
            board.read("n1", at, vec![reading("GPU-a", 0, (at / COARSE % 2) as f32, 0)]);
        }
        let past = board.past("n1", "GPU-a", None, 0);
        assert!(past.len() <= RECENT + MEANS, "{}", past.len());
        assert!(past.is_sorted_by(|a, b| a.0 < b.0));
        assert_eq!(past.last().map(|p| p.0), Some(last));
        assert!(last - past[0].0 >= 5 * 3600 * 1000);
        for (at, sample) in &past {
            assert_eq!(sample.utilization, Some((at / COARSE % 2) as f32), "{at}");
        }
        assert_eq!(board.past("n1", "GPU-a", None, last - every).len(), 2);
        // One that changes its clock, or answers without end, takes no more.
        for _ in 0..10_000 {
            board.read("n1", last, vec![reading("GPU-a", 0, 0.0, 0)]);
        }
        assert!(board.past("n1", "GPU-a", None, 0).len() <= RECENT + MEANS);
        board.read("n1", last, (0..10_000).map(|n| reading(&format!("GPU-{n}"), n, 0.0, 0)).collect());
        assert_eq!(board.node("n1", last).len(), DEVICES);
    }
}
