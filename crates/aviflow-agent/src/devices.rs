//! Which GPUs this worker's container got, by their UUIDs, and which slot of the node a place on the bus is.
//!
//! NVIDIA's device plugin says it in `NVIDIA_VISIBLE_DEVICES`: as a list of UUIDs, or as a folder whose files are
//! named by them (its strategy `volume-mounts`). Where neither says it, as where a machine is used without containers,
//! nothing is known.

use crate::kernel::pci;
use std::path::Path;

/// Where NVIDIA's driver tells of its GPUs, each in a folder that is named by its place on the bus.
pub const DRIVER: &str = "/proc/driver/nvidia/gpus";

/// The variable of the container toolkit.
const VISIBLE: &str = "NVIDIA_VISIBLE_DEVICES";

/// The most GPUs and MIG instances that are told.
const MOST: usize = 128;

/// The longest name of a device, in bytes.
const LONGEST: usize = 80;

/// The UUIDs, as `GPU-…` and `MIG-…`, sorted; empty where they are not known.
#[must_use]
pub fn uuids() -> Vec<String> {
    std::env::var(VISIBLE).map_or_else(|_| Vec::new(), |visible| of(&visible))
}

fn of(visible: &str) -> Vec<String> {
    let mut found: Vec<String> = if visible.starts_with('/') {
        let files = std::fs::read_dir(Path::new(visible)).into_iter().flatten().flatten();
        files.filter_map(|file| file.file_name().into_string().ok()).collect()
    } else {
        visible.split(',').map(|name| name.trim().to_owned()).collect()
    };
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-/".contains(&b);
    let is_uuid = |name: &String| {
        (name.starts_with("GPU-") || name.starts_with("MIG-")) && name.len() <= LONGEST && name.bytes().all(plain)
    };
    found.retain(is_uuid);
    found.sort_unstable();
    found.dedup();
    found.truncate(MOST);
    found
}

/// The slot of the GPU at a place such as `0000:3b:00`, by the driver's minor numbers, which count the GPUs of the node
/// in the order of the bus, also in a container that has some of them; none where the driver does not tell it here.
#[must_use]
pub fn slot(driver: &Path, place: &str) -> Option<u32> {
    let folders = std::fs::read_dir(driver).into_iter().flatten().flatten().take(MOST);
    let found = folders.map(|entry| entry.path()).find(|path| {
        let name = path.file_name().map(|name| name.to_string_lossy());
        name.and_then(|name| pci(&name)).is_some_and(|of| of == place)
    });
    let text = std::fs::read_to_string(found?.join("information")).ok()?;
    text.lines().find_map(|line| line.strip_prefix("Device Minor:")?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_is_known_by_its_place_on_the_bus() {
        let driver = tempfile::TempDir::new().unwrap();
        let write = |name: &str, text: &str| {
            std::fs::create_dir(driver.path().join(name)).unwrap();
            std::fs::write(driver.path().join(name).join("information"), text).unwrap();
        };
        let information = |minor: &str| {
            format!(
                "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 18\nBus Location: \t 0000:3b:00.0\n{minor}GPU Excluded:\t No\n"
            )
        };
        write("0000:3b:00.0", &information("Device Minor: \t 3\n"));
        write("0000:3B:01.0", &information(""));
        let check = |place: &str, slot: Option<u32>| assert_eq!(super::slot(driver.path(), place), slot, "{place}");
        check("0000:3b:00", Some(3));
        check("0000:3b:01", None);
        check("0000:3c:00", None);
        assert_eq!(slot(Path::new("/nowhere"), "0000:3b:00"), None);
    }

    #[test]
    fn devices_are_known_by_their_uuids_alone() {
        let check = |visible: &str, expected: &[&str]| assert_eq!(of(visible), expected, "{visible}");
        check("GPU-b, GPU-a,GPU-b", &["GPU-a", "GPU-b"]);
        check("MIG-GPU-a/1/0", &["MIG-GPU-a/1/0"]);
        for nothing in ["", "all", "none", "void", "0,1", "nvidia.com/gpu=0", "GPU-a\u{1b}[2J", "/nowhere"] {
            check(nothing, &[]);
        }
        check(&format!("GPU-{}", "a".repeat(LONGEST)), &[]);
        let folder = tempfile::TempDir::new().unwrap();
        for name in ["GPU-c", "GPU-a", "other"] {
            std::fs::write(folder.path().join(name), "").unwrap();
        }
        check(folder.path().to_str().unwrap(), &["GPU-a", "GPU-c"]);
    }
}
