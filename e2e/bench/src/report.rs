//! What is printed: each side, and what one is of the other.

use crate::workload::Scenario;
use std::collections::BTreeMap;
use std::time::Duration;

/// What one side did and used.
#[derive(Clone, Debug)]
pub struct Side {
    /// From the first object to the last that says that its work is done.
    pub wall: Duration,
    /// The same by the control plane's own account, where it keeps one apart from the objects.
    pub decided: Option<Duration>,
    /// Mean seconds not running, by class.
    pub waits: BTreeMap<&'static str, f64>,
    /// Processor time of the control plane.
    pub cpu: Duration,
    /// The most memory that it had resident.
    pub memory: u64,
    /// Requests that it sent to the apiserver.
    pub requests: u64,
    /// Jobs that were interrupted and ran again.
    pub interrupted: usize,
}

impl Side {
    /// Its lines.
    #[must_use]
    pub fn lines(&self, name: &str, scenario: &Scenario) -> Vec<String> {
        let jobs = scenario.jobs() as f64;
        let wall = self.wall.as_secs_f64();
        let waits = scenario.classes.iter().rev().map(|c| {
            let wait = self.waits.get(c.name).map_or("none".to_owned(), |s| format!("{s:.1} s"));
            format!("{} {wait}", c.name)
        });
        let mut lines = vec![
            format!("{name} wall: {wall:.1} s"),
            format!("{name} useful use: {:.1}%", 100.0 * scenario.work() / f64::from(scenario.units()) / wall),
            format!("{name} mean wait: {}", waits.collect::<Vec<_>>().join(", ")),
            format!("{name} cpu a job: {:.2} ms", self.cpu.as_secs_f64() * 1000.0 / jobs),
            format!("{name} resident memory: {:.0} MB", self.memory as f64 / 1e6),
            format!("{name} requests a job: {:.2}", self.requests as f64 / jobs),
            format!("{name} interrupted: {}", self.interrupted),
        ];
        if let Some(decided) = self.decided {
            lines.insert(1, format!("{name} wall in its store: {:.1} s", decided.as_secs_f64()));
        }
        lines
    }
}

/// What Aviflow is of Kueue.
#[must_use]
pub fn ratios(aviflow: &Side, kueue: &Side) -> Vec<String> {
    let times = |a: f64, b: f64| format!("{:.1}x", a / b);
    vec![
        format!("throughput: {}", times(kueue.wall.as_secs_f64(), aviflow.wall.as_secs_f64())),
        format!("cpu a job: {:.2} of Kueue's", aviflow.cpu.as_secs_f64() / kueue.cpu.as_secs_f64()),
        format!("memory: {:.2} of Kueue's", aviflow.memory as f64 / kueue.memory as f64),
        format!("requests a job: {:.2} of Kueue's", aviflow.requests as f64 / kueue.requests as f64),
    ]
}
