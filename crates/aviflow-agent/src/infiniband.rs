//! Counters of InfiniBand and RoCE ports, as the kernel shows them below `/sys/class/infiniband`.
//!
//! [`ports`] reads, [`Rates`] makes of two and more readings what changed; neither judges. A counter that is not there
//! is not 0. Counters start anew when a driver is loaded or somebody clears them: then all that they show is new.

use std::collections::{BTreeMap, VecDeque};
use std::fs;
use std::path::Path;

/// Counters of errors, and the folder of each: those of the InfiniBand specification (PMA), and mlx5's own.
const COUNTERS: [(&str, &str); 16] = [
    ("counters", "symbol_error"),
    ("counters", "link_downed"),
    ("counters", "link_error_recovery"),
    ("counters", "port_rcv_errors"),
    ("counters", "port_rcv_remote_physical_errors"),
    ("counters", "port_rcv_switch_relay_errors"),
    ("counters", "port_xmit_discards"),
    ("counters", "local_link_integrity_errors"),
    ("counters", "excessive_buffer_overrun_errors"),
    ("counters", "VL15_dropped"),
    ("hw_counters", "local_ack_timeout_err"),
    ("hw_counters", "out_of_sequence"),
    ("hw_counters", "packet_seq_err"),
    ("hw_counters", "rnr_nak_retry_err"),
    ("hw_counters", "req_cqe_error"),
    ("hw_counters", "rx_icrc_encapsulated"),
];

/// Devices and ports that are looked at.
const MOST: usize = 64;

/// Over how long an increase is told, in milliseconds.
pub const WINDOW_MS: u64 = 3_600_000;

/// Readings within a window that are kept.
const KEPT: usize = 60;

/// A port, as it was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// The device, such as `mlx5_0`.
    pub device: String,
    /// The port, from 1.
    pub port: u32,
    /// Whether it is active; none if it does not say.
    pub active: Option<bool>,
    /// Gigabits a second; none if it does not say.
    pub gbps: Option<u32>,
    /// Counters by their names.
    pub counters: BTreeMap<&'static str, u64>,
}

/// All ports below a folder, usually `/sys/class/infiniband`; none where there is no such device.
#[must_use]
pub fn ports(root: &Path) -> Vec<Port> {
    let names = |folder: &Path| {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        let mut names: Vec<String> = entries.filter_map(|e| e.file_name().into_string().ok()).take(MOST).collect();
        names.sort_unstable();
        names
    };
    let mut ports = Vec::new();
    for device in names(root) {
        let folder = root.join(&device).join("ports");
        for name in names(&folder) {
            if let Ok(port) = name.parse() {
                ports.push(read(&folder.join(name), device.clone(), port));
            }
        }
    }
    ports
}

fn read(folder: &Path, device: String, port: u32) -> Port {
    let text = |name: &str| fs::read_to_string(folder.join(name)).ok();
    let counters = COUNTERS.iter().filter_map(|(of, name)| Some((*name, number(&text(&format!("{of}/{name}"))?)?)));
    Port {
        active: text("state").as_deref().and_then(active),
        gbps: text("rate").as_deref().and_then(gbps),
        counters: counters.collect(),
        device,
        port,
    }
}

fn number(text: &str) -> Option<u64> {
    text.trim().parse().ok()
}

/// `4: ACTIVE`
fn active(text: &str) -> Option<bool> {
    let (state, _) = text.split_once(':')?;
    Some(state.trim().parse::<u32>().ok()? == 4)
}

/// `400 Gb/sec (4X NDR)`, `2.5 Gb/sec (1X SDR)`
fn gbps(text: &str) -> Option<u32> {
    text.split_once(" Gb/sec")?.0.split('.').next()?.trim().parse().ok()
}

/// How a counter changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Increase {
    /// Since the reading before.
    pub now: u64,
    /// Within the last hour, or since the first reading if that is later.
    pub hour: u64,
}

/// What changed on a port; counters that did not are left out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// The device.
    pub device: String,
    /// The port.
    pub port: u32,
    /// Whether it went up (true) or down since the reading before.
    pub went: Option<bool>,
    /// Counters that grew within the last hour.
    pub counters: BTreeMap<&'static str, Increase>,
}

#[derive(Debug, Default)]
struct Known {
    active: Option<bool>,
    last: BTreeMap<&'static str, u64>,
    /// What was added in all, and when it was so much; the oldest is before the window.
    history: VecDeque<(u64, BTreeMap<&'static str, u64>)>,
    total: BTreeMap<&'static str, u64>,
}

/// Readings over time.
#[derive(Debug, Default)]
pub struct Rates {
    ports: BTreeMap<(String, u32), Known>,
}

impl Rates {
    /// Takes a reading at `now`, in milliseconds of any monotonic clock, and tells ports on which something changed
    /// since the one before.
    pub fn take(&mut self, ports: Vec<Port>, now: u64) -> Vec<Change> {
        let mut changes = Vec::new();
        for port in ports {
            let first = !self.ports.contains_key(&(port.device.clone(), port.port));
            if first && self.ports.len() >= MOST * 2 {
                continue;
            }
            let known = self.ports.entry((port.device.clone(), port.port)).or_default();
            let went = (known.active.is_some() && port.active != known.active).then_some(port.active).flatten();
            known.active = port.active.or(known.active);
            let mut grown = BTreeMap::new();
            for (name, value) in &port.counters {
                // Of a counter that was not there before, it is not known what is new.
                let Some(last) = known.last.insert(*name, *value) else { continue };
                let by = value.checked_sub(last).unwrap_or(*value);
                if by > 0 {
                    let total = known.total.entry(*name).or_default();
                    *total = total.saturating_add(by);
                    grown.insert(*name, by);
                }
            }
            known.remember(now);
            if !first && (went.is_some() || !grown.is_empty()) {
                let counters = known.within_the_hour(&grown);
                changes.push(Change { device: port.device, port: port.port, went, counters });
            }
        }
        changes
    }
}

impl Known {
    fn remember(&mut self, now: u64) {
        let apart = WINDOW_MS / KEPT as u64;
        if self.history.back().is_none_or(|(at, _)| now >= at + apart) {
            self.history.push_back((now, self.total.clone()));
        }
        while self.history.get(1).is_some_and(|(at, _)| at + WINDOW_MS <= now) {
            self.history.pop_front();
        }
    }

    fn within_the_hour(&self, grown: &BTreeMap<&'static str, u64>) -> BTreeMap<&'static str, Increase> {
        let before = self.history.front().map(|(_, total)| total);
        let hour = |name: &str, total: u64| total - before.and_then(|before| before.get(name)).copied().unwrap_or(0);
        let increases = self.total.iter().map(|(name, total)| {
            (*name, Increase { now: grown.get(name).copied().unwrap_or(0), hour: hour(name, *total) })
        });
        increases.filter(|(_, increase)| increase.hour > 0).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port(active: bool, counters: &[(&'static str, u64)]) -> Port {
        let counters = counters.iter().copied().collect();
        Port { device: "mlx5_0".into(), port: 1, active: Some(active), gbps: Some(400), counters }
    }

    /// Minutes, and what is read then; what changed, as short text.
    fn check(readings: &[(u64, Port, &str)]) {
        let mut rates = Rates::default();
        for (minute, port, expected) in readings {
            let changes = rates.take(vec![port.clone()], minute * 60_000);
            let words: Vec<String> = changes
                .iter()
                .flat_map(|change| {
                    let went = change.went.map(|up| format!("up {up}"));
                    let counters = change.counters.iter().map(|(name, by)| format!("{name} +{} {}/h", by.now, by.hour));
                    went.into_iter().chain(counters).collect::<Vec<_>>()
                })
                .collect();
            assert_eq!(words.join(", "), *expected, "minute {minute}");
        }
    }

    #[test]
    fn increases_are_told_with_the_hour_s() {
        let read = |errors, downed| port(true, &[("symbol_error", errors), ("link_downed", downed)]);
        check(&[
            (0, read(1000, 3), ""),
            (1, read(1000, 3), ""),
            (2, read(1010, 3), "symbol_error +10 10/h"),
            (50, read(1015, 4), "link_downed +1 1/h, symbol_error +5 15/h"),
            (61, read(1016, 4), "link_downed +0 1/h, symbol_error +1 16/h"),
            (63, read(1017, 4), "link_downed +0 1/h, symbol_error +1 7/h"),
            (200, read(1018, 4), "symbol_error +1 1/h"),
        ]);
    }

    #[test]
    fn a_counter_that_starts_anew_and_one_that_appears() {
        let read = |counters: &[(&'static str, u64)]| port(true, counters);
        check(&[
            (0, read(&[("symbol_error", 500)]), ""),
            (1, read(&[("symbol_error", 4)]), "symbol_error +4 4/h"),
            (2, read(&[("symbol_error", 4), ("link_downed", 9)]), ""),
            (3, read(&[("link_downed", 10)]), "link_downed +1 1/h, symbol_error +0 4/h"),
        ]);
    }

    #[test]
    fn a_port_that_goes_down_is_told() {
        let silent = Port { active: None, ..port(true, &[]) };
        check(&[
            (0, port(true, &[]), ""),
            (1, port(false, &[]), "up false"),
            (2, silent, ""),
            (3, port(true, &[]), "up true"),
        ]);
    }

    #[test]
    fn a_tree_of_files_is_read() {
        let root = tempfile::tempdir().expect("a folder");
        let write = |path: &str, text: &[u8]| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
            fs::write(path, text).expect("written");
        };
        write("mlx5_1/ports/1/counters/link_downed", b"7\n");
        write("mlx5_1/ports/1/counters/symbol_error", b"N/A (no PMA)\n");
        write("mlx5_1/ports/1/hw_counters/out_of_sequence", b"18446744073709551615\n");
        write("mlx5_1/ports/1/state", b"4: ACTIVE\n");
        write("mlx5_1/ports/1/rate", b"400 Gb/sec (4X NDR)\n");
        write("mlx5_0/ports/1/state", b"1: DOWN\n");
        write("mlx5_0/ports/1/rate", b"2.5 Gb/sec (1X SDR)\n");
        write("mlx5_0/ports/x/state", b"4: ACTIVE\n");
        write("mlx5_2/ports/1/state", b"\xff\xfe");
        let got = ports(root.path());
        let one = |device: &str, active, gbps, counters: &[(&'static str, u64)]| Port {
            device: device.into(),
            port: 1,
            active,
            gbps,
            counters: counters.iter().copied().collect(),
        };
        let counters = [("link_downed", 7), ("out_of_sequence", u64::MAX)];
        let expected = [
            one("mlx5_0", Some(false), Some(2), &[]),
            one("mlx5_1", Some(true), Some(400), &counters),
            one("mlx5_2", None, None, &[]),
        ];
        assert_eq!(got, expected);
        assert_eq!(ports(&root.path().join("nowhere")), []);
    }

    #[test]
    fn a_counter_may_be_as_large_as_it_can() {
        let read = |n| port(true, &[("symbol_error", n)]);
        check(&[(0, read(0), ""), (1, read(u64::MAX), "symbol_error +18446744073709551615 18446744073709551615/h")]);
    }
}
