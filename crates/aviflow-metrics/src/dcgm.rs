//! What dcgm-exporter says of the GPUs of its node.
//!
//! The names are those of dcgm-exporter 3 and 4. Labels on the pod that uses a GPU are often missing or wrong, so they
//! are not looked at: whose a GPU is follows from its UUID, its node and the time.
//!
//! A value outside of what its field can be is no value: DCGM says "unknown" with numbers near the largest integer.

use crate::gpu::{Reading, Sample};
use crate::text::{self, Sample as Line};
use std::collections::BTreeMap;

/// The most GPUs and MIG instances of one exporter: 16 GPUs of 7 instances, and room.
const DEVICES: usize = 256;

/// Bytes of a MiB, in which DCGM counts frame buffers.
const MIB: f32 = 1_048_576.0;

/// The longest UUID or host name that is kept, in bytes.
const LONGEST: usize = 253;

/// Reads what an exporter answered: its GPUs by their numbers.
#[must_use]
pub fn readings(answer: &str) -> Vec<Reading> {
    let mut devices: BTreeMap<(String, Option<u32>), (Reading, Memory)> = BTreeMap::new();
    for line in text::samples(answer).filter(|line| line.name.starts_with("DCGM_FI_")) {
        let Some(uuid) = line.label("UUID").filter(|uuid| !uuid.is_empty() && uuid.len() <= LONGEST) else { continue };
        let key = (uuid.to_owned(), number(&line, "GPU_I_ID"));
        if !devices.contains_key(&key) && devices.len() == DEVICES {
            continue;
        }
        let (reading, memory) = devices.entry(key).or_insert_with_key(|(uuid, instance)| {
            let host = line.label("Hostname").or_else(|| line.label("hostname"));
            let host = host.filter(|host| !host.is_empty() && host.len() <= LONGEST).map(str::to_owned);
            let index = number(&line, "gpu");
            (Reading { uuid: uuid.clone(), instance: *instance, index, host, ..Reading::default() }, Memory::default())
        });
        take(&line, reading, memory);
    }
    let whole = |(mut reading, memory): (Reading, Memory)| {
        reading.sample.memory_total = memory.total();
        reading
    };
    let mut readings: Vec<Reading> = devices.into_values().map(whole).collect();
    readings.sort_by_key(|reading| (reading.index, reading.instance));
    readings
}

/// Of the frame buffer, the parts that make up the whole where it is not said.
#[derive(Default)]
struct Memory {
    total: Option<f32>,
    used: Option<f32>,
    free: Option<f32>,
    reserved: Option<f32>,
}

impl Memory {
    fn total(&self) -> Option<f32> {
        self.total.or_else(|| Some(self.used? + self.free? + self.reserved.unwrap_or(0.0)))
    }
}

fn take(line: &Line<'_>, reading: &mut Reading, memory: &mut Memory) {
    let Sample { sm_active, tensor_active, dram_active, utilization, memory_used, power, .. } = &mut reading.sample;
    let bytes = within(line.value, 0.0, 1e8).map(|mib| mib * MIB);
    match line.name {
        "DCGM_FI_PROF_SM_ACTIVE" => *sm_active = within(line.value, 0.0, 1.0),
        "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE" => *tensor_active = within(line.value, 0.0, 1.0),
        "DCGM_FI_PROF_DRAM_ACTIVE" => *dram_active = within(line.value, 0.0, 1.0),
        "DCGM_FI_DEV_GPU_UTIL" => *utilization = within(line.value, 0.0, 100.0).map(|percent| percent / 100.0),
        // What a MIG instance has instead.
        "DCGM_FI_PROF_GR_ENGINE_ACTIVE" if utilization.is_none() => *utilization = within(line.value, 0.0, 1.0),
        "DCGM_FI_DEV_POWER_USAGE" => *power = within(line.value, 0.0, 1e5),
        "DCGM_FI_DEV_FB_TOTAL" => memory.total = bytes,
        "DCGM_FI_DEV_FB_FREE" => memory.free = bytes,
        "DCGM_FI_DEV_FB_RESERVED" => memory.reserved = bytes,
        "DCGM_FI_DEV_FB_USED" => {
            memory.used = bytes;
            *memory_used = bytes;
        }
        "DCGM_FI_DEV_XID_ERRORS" => reading.xid = within(line.value, 0.0, 1e5).map(|xid| xid as u32),
        "DCGM_FI_DEV_ROW_REMAP_FAILURE" => {
            reading.row_remap_failure = within(line.value, 0.0, 1e9).map(|failures| failures > 0.0);
        }
        _ => {}
    }
}

fn within(value: f64, least: f64, most: f64) -> Option<f32> {
    (least..=most).contains(&value).then_some(value as f32)
}

fn number(line: &Line<'_>, label: &str) -> Option<u32> {
    line.label(label)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const WHOLE: &str = include_str!("../fixtures/dcgm-exporter-4.txt");
    const MIG: &str = include_str!("../fixtures/dcgm-exporter-mig.txt");

    #[test]
    fn what_an_exporter_says_of_whole_gpus() {
        let read = readings(WHOLE);
        assert_eq!(read.len(), 2);
        let expected = Reading {
            uuid: "GPU-604c7a18-e7d0-02e0-723a-7578be840651".into(),
            instance: None,
            index: Some(0),
            host: Some("gpu-node-17".into()),
            sample: Sample {
                sm_active: None,
                tensor_active: Some(0.412_345),
                dram_active: Some(0.287_11),
                utilization: Some(0.98),
                memory_used: Some(71_234.0 * MIB),
                memory_total: Some((71_234.0 + 9_850.0 + 475.0) * MIB),
                power: Some(612.437),
            },
            xid: Some(0),
            row_remap_failure: Some(false),
        };
        assert_eq!(read[0], expected);
        // Of the other, profiling and memory are blank: absent, and not 0.
        let sample = Sample { utilization: Some(0.0), power: Some(71.025), ..Sample::default() };
        assert_eq!((read[1].sample, read[1].xid), (sample, Some(79)));
    }

    #[test]
    fn instances_of_one_gpu_are_told_apart() {
        let read = readings(MIG);
        let told: Vec<_> = read.iter().map(|r| (r.instance, r.sample.utilization, r.host.as_deref())).collect();
        let host = Some("nvidia-dcgm-exporter-x7k2p");
        assert_eq!(told, [(Some(1), Some(0.75), host), (Some(2), Some(0.125), host)]);
    }

    #[test]
    fn numbers_of_exporters_are_bounded() {
        let many: String = (0..1000).map(|n| format!("DCGM_FI_DEV_GPU_UTIL{{UUID=\"GPU-{n}\"}} 5\n")).collect();
        assert_eq!(readings(&many).len(), DEVICES);
        let long = format!("DCGM_FI_DEV_GPU_UTIL{{UUID=\"{}\"}} 5\n", "x".repeat(300));
        assert_eq!(readings(&long), []);
    }

    proptest! {
        #[test]
        fn a_broken_answer_is_read_without_harm(from in 0usize..4000, cut in 0usize..400, noise in any::<String>()) {
            let chars: Vec<char> = WHOLE.chars().collect();
            let from = from.min(chars.len());
            let rest: String = chars[(from + cut).min(chars.len())..].iter().collect();
            let text = chars[..from].iter().collect::<String>() + &noise + &rest;
            for reading in readings(&text) {
                for value in [reading.sample.utilization, reading.sample.tensor_active].into_iter().flatten() {
                    prop_assert!((0.0..=1.0).contains(&value));
                }
            }
        }
    }
}
