//! Ports of InfiniBand and RoCE adapters, as the kernel shows them below `/sys/class/infiniband`.
//!
//! [`ports`] reads, [`Changes`] tells those that are not as they were told last; neither judges, nor remembers more: how
//! much is too much within an hour is the control plane's to say. A counter that is not there is not 0.

use crate::protocol::Sign;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// The counters that are told, of the InfiniBand specification (PMA). Each is asked of the adapter's firmware.
const DOWNED: &str = "counters/link_downed";
const SYMBOL_ERRORS: &str = "counters/symbol_error";

/// Devices and ports that are looked at.
const MOST: usize = 64;

/// A port, as it was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// The device, such as `mlx5_0`.
    pub device: String,
    /// The port, from 1.
    pub port: u32,
    /// Whether it is active; none if it does not say.
    pub active: Option<bool>,
    /// How often its link went down; none if it does not say.
    pub downed: Option<u64>,
    /// Its symbol errors; none if it does not say.
    pub symbol_errors: Option<u64>,
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
    let number = |name: &str| text(name)?.trim().parse().ok();
    let active = text("state").as_deref().and_then(active);
    Port { device, port, active, downed: number(DOWNED), symbol_errors: number(SYMBOL_ERRORS) }
}

/// `4: ACTIVE`
fn active(text: &str) -> Option<bool> {
    let (state, _) = text.split_once(':')?;
    Some(state.trim().parse::<u32>().ok()? == 4)
}

/// What was told of each port last.
#[derive(Debug, Default)]
pub struct Changes(BTreeMap<(String, u32), Port>);

impl Changes {
    /// Takes a reading, and gives the ports that are not as they were told last. The first time that is all of them, as
    /// only with it a later one says how much came.
    pub fn take(&mut self, ports: Vec<Port>) -> Vec<Sign> {
        let mut signs = Vec::new();
        for port in ports {
            let key = (port.device.clone(), port.port);
            // Of a port without its counters there is nothing to compare with.
            let (Some(downed), Some(symbol_errors)) = (port.downed, port.symbol_errors) else { continue };
            if self.0.get(&key) != Some(&port) && (self.0.contains_key(&key) || self.0.len() < MOST) {
                let Port { device, port: number, active, .. } = port.clone();
                signs.push(Sign::Port { device, port: number, active, downed, symbol_errors });
                self.0.insert(key, port);
            }
        }
        signs
    }

    /// Nobody knows any more what was told.
    pub fn forget(&mut self) {
        self.0.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port(active: Option<bool>, downed: Option<u64>, symbol_errors: Option<u64>) -> Port {
        Port { device: "mlx5_0".into(), port: 1, active, downed, symbol_errors }
    }

    #[test]
    fn a_port_is_told_when_it_is_not_as_it_was() {
        let mut changes = Changes::default();
        let mut check = |port: Port, told: bool| {
            let Port { device, port: number, active, downed, symbol_errors } = port.clone();
            let signs = changes.take(vec![port]);
            let expected = told.then(|| Sign::Port {
                device,
                port: number,
                active,
                downed: downed.expect("a counter"),
                symbol_errors: symbol_errors.expect("a counter"),
            });
            assert_eq!(signs, expected.into_iter().collect::<Vec<_>>());
        };
        let up = Some(true);
        check(port(up, Some(3), Some(1000)), true);
        check(port(up, Some(3), Some(1000)), false);
        check(port(up, Some(3), Some(1001)), true);
        check(port(Some(false), Some(4), Some(1001)), true);
        // It does not say for a while.
        check(port(up, None, Some(1001)), false);
        check(port(Some(false), Some(4), Some(1001)), false);
        check(port(up, Some(0), Some(u64::MAX)), true);
        changes.forget();
        assert_eq!(changes.take(vec![port(up, Some(0), Some(0))]).len(), 1);
    }

    #[test]
    fn no_number_of_ports_is_too_many() {
        let ports = |errors| (0..1000).map(move |n| Port { port: n, ..port(None, Some(0), Some(errors)) }).collect();
        let mut changes = Changes::default();
        assert_eq!((changes.take(ports(0)).len(), changes.take(ports(1)).len()), (MOST, MOST));
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
        write("mlx5_1/ports/1/counters/symbol_error", b"18446744073709551615\n");
        write("mlx5_1/ports/1/state", b"4: ACTIVE\n");
        write("mlx5_0/ports/1/state", b"1: DOWN\n");
        write("mlx5_0/ports/1/counters/symbol_error", b"N/A (no PMA)\n");
        write("mlx5_0/ports/x/state", b"4: ACTIVE\n");
        write("mlx5_2/ports/1/state", b"\xff\xfe");
        let of = |device: &str, port: Port| Port { device: device.into(), ..port };
        let expected = [
            of("mlx5_0", port(Some(false), None, None)),
            of("mlx5_1", port(Some(true), Some(7), Some(u64::MAX))),
            of("mlx5_2", port(None, None, None)),
        ];
        assert_eq!(ports(root.path()), expected);
        assert_eq!(ports(&root.path().join("nowhere")), []);
    }
}
