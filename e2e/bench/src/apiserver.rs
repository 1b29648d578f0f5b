//! What the apiserver was asked, by its own count.

use anyhow::{Context as _, Result};
use aviflow_testcluster::Cluster;
use std::collections::BTreeMap;

/// Requests by API group; watches are counted when they end, and are left out.
#[derive(Clone, Debug, Default)]
pub struct Requests(BTreeMap<String, u64>);

impl Requests {
    /// Those that came since.
    #[must_use]
    pub fn since(&self, before: &Requests) -> Requests {
        let more = |(group, n): (&String, &u64)| (group.clone(), n - before.of_group(group));
        Requests(self.0.iter().map(more).collect())
    }

    /// All of them: what the apiserver asks of itself is among them, and is little.
    #[must_use]
    pub fn all(&self) -> u64 {
        self.0.values().sum()
    }

    /// Those about one group.
    #[must_use]
    pub fn of_group(&self, group: &str) -> u64 {
        self.0.get(group).copied().unwrap_or_default()
    }
}

/// Reads the apiserver's metrics.
///
/// # Errors
/// If it does not answer.
pub fn requests(cluster: &Cluster) -> Result<Requests> {
    let text = cluster.kubectl_ok(&["get", "--raw", "/metrics"])?;
    let mut found = Requests::default();
    for line in text.lines().filter(|line| line.starts_with("apiserver_request_total{")) {
        let (labels, value) = line.rsplit_once(' ').context("a metric without a value")?;
        let label = |name: &str| labels.split(&format!("{name}=\"")).nth(1).and_then(|rest| rest.split('"').next());
        if label("verb") != Some("WATCH") {
            let group = label("group").unwrap_or_default().to_owned();
            *found.0.entry(group).or_default() += value.parse::<f64>()? as u64;
        }
    }
    Ok(found)
}
