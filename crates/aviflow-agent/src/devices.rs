//! Which GPUs this worker's container got, by their UUIDs.
//!
//! NVIDIA's device plugin says it in `NVIDIA_VISIBLE_DEVICES`: as a list of UUIDs, or as a folder whose files are
//! named by them (its strategy `volume-mounts`). Where neither says it, as where a machine is used without containers,
//! nothing is known.

use std::path::Path;

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

#[cfg(test)]
mod tests {
    use super::*;

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
