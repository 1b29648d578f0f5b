//! What the kernel knows of this process, where it is Linux.

/// Ticks of a second in which the kernel counts CPU time for programs: always 100.
const TICKS: f64 = 100.0;

/// Figures of this process; those that cannot be read are absent.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Process {
    pub(super) cpu_seconds: Option<f64>,
    pub(super) resident_bytes: Option<f64>,
    pub(super) open_files: Option<f64>,
}

pub(super) fn read() -> Process {
    let read = |name: &str| std::fs::read_to_string(format!("/proc/self/{name}")).ok();
    Process {
        cpu_seconds: read("stat").and_then(|stat| cpu(&stat)),
        resident_bytes: read("status").and_then(|status| resident(&status)),
        open_files: std::fs::read_dir("/proc/self/fd").ok().map(|files| files.count() as f64),
    }
}

/// User and system time: the 14th and 15th field, counted behind the name, which may hold anything.
fn cpu(stat: &str) -> Option<f64> {
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_ascii_whitespace().skip(11);
    let mut ticks = || fields.next()?.parse::<f64>().ok();
    Some((ticks()? + ticks()?) / TICKS)
}

fn resident(status: &str) -> Option<f64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(line.trim().strip_suffix(" kB")?.trim().parse::<f64>().ok()? * 1024.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_files_are_read() {
        let stat = "7 (a b) c) S 1 7 7 0 -1 4194560 1 2 3 4 250 50 0 0 20 0 9 0 1 2 3";
        assert_eq!(cpu(stat), Some(3.0));
        assert_eq!(resident("Name:\tx\nVmRSS:\t   12 kB\n"), Some(12288.0));
        for odd in ["", ")", "7 (x) S", "VmRSS:", "VmRSS: 5 MB"] {
            assert_eq!((cpu(odd), resident(odd)), (None, None), "{odd}");
        }
    }
}
