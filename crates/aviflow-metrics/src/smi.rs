//! What `nvidia-smi` says of the GPUs of this machine.
//!
//! It comes with the driver and speaks NVML, so that nothing is linked or loaded here. It has no figures of SMs and
//! tensor cores: those need DCGM.

use crate::gpu::{Reading, Sample};
use std::process::{Command, ExitStatus, Stdio};

/// What is asked, in the order of the columns.
const QUERY: &str = "index,uuid,utilization.gpu,memory.used,memory.total,power.draw";

/// Bytes of a MiB, in which it counts memory.
const MIB: f32 = 1_048_576.0;

/// The most GPUs of a machine.
const DEVICES: usize = 64;

/// Why there are no figures.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no such program, or it cannot be started.
    #[error("nvidia-smi cannot be run: {0}")]
    Start(#[from] std::io::Error),
    /// It says why.
    #[error("nvidia-smi fails ({0}): {1}")]
    Failed(ExitStatus, String),
}

/// Asks `nvidia-smi`. It takes about a second where the driver has to wake up, and for ever where the driver hangs.
///
/// # Errors
/// If there is none, or it fails; then with what it says.
pub fn ask() -> Result<Vec<Reading>, Error> {
    let mut command = Command::new("nvidia-smi");
    command.args([&format!("--query-gpu={QUERY}"), "--format=csv,noheader,nounits"]).stdin(Stdio::null());
    let output = command.output()?;
    if output.status.success() {
        Ok(readings(&String::from_utf8_lossy(&output.stdout)))
    } else {
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8_lossy(&said);
        let first = said.lines().find(|line| !line.trim().is_empty()).unwrap_or_default();
        Err(Error::Failed(output.status, first.trim().to_owned()))
    }
}

/// Reads its answer, one GPU a line. A word in brackets, as `[N/A]`, is no value.
#[must_use]
pub fn readings(answer: &str) -> Vec<Reading> {
    answer.lines().filter_map(reading).take(DEVICES).collect()
}

fn reading(line: &str) -> Option<Reading> {
    let mut columns = line.split(',').map(str::trim);
    let index = columns.next()?.parse().ok()?;
    let uuid = columns.next().filter(|uuid| uuid.starts_with("GPU-"))?.to_owned();
    let mut value = |most: f32| {
        let value: f32 = columns.next()?.parse().ok()?;
        (0.0..=most).contains(&value).then_some(value)
    };
    let sample = Sample {
        utilization: value(100.0).map(|percent| percent / 100.0),
        memory_used: value(1e8).map(|mib| mib * MIB),
        memory_total: value(1e8).map(|mib| mib * MIB),
        power: value(1e5),
        ..Sample::default()
    };
    Some(Reading { uuid, index: Some(index), sample, ..Reading::default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn its_answer_is_read_line_by_line() {
        let answer = "0, GPU-5d9a9b4f-0d4b-7bdd-5c92-3a1b4d3e5f60, 97, 70123, 81559, 655.21\n\
                      1, GPU-9ab6d7c2-1c33-9a05-8d42-7e6f5a4b3c2d, [N/A], 3, 81559, [Unknown Error]\n\
                      Unable to determine the device handle for GPU 0000:3B:00.0: GPU is lost.\n\
                      2, , 5, 5, 5, 5\n";
        let read = readings(answer);
        let uuids: Vec<&str> = read.iter().map(|r| r.uuid.as_str()).collect();
        assert_eq!(uuids, ["GPU-5d9a9b4f-0d4b-7bdd-5c92-3a1b4d3e5f60", "GPU-9ab6d7c2-1c33-9a05-8d42-7e6f5a4b3c2d"]);
        let total = Some(81_559.0 * MIB);
        let busy = Sample {
            utilization: Some(0.97),
            memory_used: Some(70_123.0 * MIB),
            memory_total: total,
            power: Some(655.21),
            ..Sample::default()
        };
        let odd = Sample { memory_used: Some(3.0 * MIB), memory_total: total, ..Sample::default() };
        assert_eq!((read[0].sample, read[0].index), (busy, Some(0)));
        assert_eq!((read[1].sample, read[1].index), (odd, Some(1)));
        for nothing in ["", "No devices were found\n", ",,,,,\n", "\u{0}\n"] {
            assert_eq!(readings(nothing), [], "{nothing:?}");
        }
    }
}
