//! What is known of a GPU at an instant.

/// What a GPU does. What the source does not say is none, which is not zero.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sample {
    /// Part of the time, 0 to 1, in which an SM had at least one warp.
    pub sm_active: Option<f32>,
    /// Part of the cycles, 0 to 1, in which the tensor pipe was active.
    pub tensor_active: Option<f32>,
    /// Part of the cycles, 0 to 1, in which the device memory moved data.
    pub dram_active: Option<f32>,
    /// Part of the time, 0 to 1, in which a kernel ran, on however few SMs.
    pub utilization: Option<f32>,
    /// Bytes of the frame buffer in use.
    pub memory_used: Option<f32>,
    /// Bytes of the frame buffer in all.
    pub memory_total: Option<f32>,
    /// Watts.
    pub power: Option<f32>,
}

/// How many values a sample has.
pub(crate) const VALUES: usize = 7;

impl Sample {
    /// The values in a fixed order.
    pub(crate) fn values(&self) -> [Option<f32>; VALUES] {
        [
            self.sm_active,
            self.tensor_active,
            self.dram_active,
            self.utilization,
            self.memory_used,
            self.memory_total,
            self.power,
        ]
    }

    pub(crate) fn of(values: [Option<f32>; VALUES]) -> Sample {
        let [sm_active, tensor_active, dram_active, utilization, memory_used, memory_total, power] = values;
        Sample { sm_active, tensor_active, dram_active, utilization, memory_used, memory_total, power }
    }

    /// Value by value the mean of those samples that have it; none where none has.
    #[must_use]
    pub fn mean<'a>(samples: impl IntoIterator<Item = &'a Sample>) -> Sample {
        let mut totals = Totals::default();
        samples.into_iter().for_each(|sample| totals.add(sample));
        totals.mean()
    }

    /// The sum of a value over samples; none where none has it.
    #[must_use]
    pub fn sum<'a>(
        samples: impl IntoIterator<Item = &'a Sample>,
        value: impl Fn(&Sample) -> Option<f32>,
    ) -> Option<f64> {
        let all = samples.into_iter().filter_map(value).map(f64::from);
        all.fold(None, |sum: Option<f64>, value| Some(sum.unwrap_or(0.0) + value))
    }

    /// Whether it says nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Sample::default()
    }
}

/// Sums of samples, value by value, with how many have it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Totals([(f64, u32); VALUES]);

impl Totals {
    pub(crate) fn add(&mut self, sample: &Sample) {
        for (total, value) in self.0.iter_mut().zip(sample.values()) {
            if let Some(value) = value {
                *total = (total.0 + f64::from(value), total.1 + 1);
            }
        }
    }

    pub(crate) fn mean(&self) -> Sample {
        Sample::of(self.0.map(|(sum, n)| (n > 0).then(|| (sum / f64::from(n)) as f32)))
    }
}

/// A ratio or another small value of a sample, without the digits that its storage adds.
#[must_use]
pub fn rounded(value: f32) -> f64 {
    (f64::from(value) * 1e6).round() / 1e6
}

/// What was read of one GPU, or of one MIG instance of it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reading {
    /// The device's UUID, as `GPU-…`.
    pub uuid: String,
    /// The number of the MIG instance on the device (`GPU_I_ID`), where it is one.
    pub instance: Option<u32>,
    /// The device's number on its node.
    pub index: Option<u32>,
    /// The node, as the source calls it: it may be a pod's name.
    pub host: Option<String>,
    /// What it does.
    pub sample: Sample,
    /// The last XID error. It stays after the error has passed, so only a change of it is news.
    pub xid: Option<u32>,
    /// Whether rows of its memory could not be remapped.
    pub row_remap_failure: Option<bool>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_absent_counts_nothing() {
        let some = |utilization, power| Sample { utilization, power, ..Sample::default() };
        let samples = [some(Some(0.5), None), some(Some(1.0), Some(300.0)), Sample::default()];
        assert_eq!(Sample::mean(&samples), some(Some(0.75), Some(300.0)));
        assert_eq!(Sample::sum(&samples, |s| s.power), Some(300.0));
        assert_eq!(Sample::sum(&samples, |s| s.sm_active), None);
        assert!(Sample::mean(&[]).is_empty());
    }
}
