//! What this machine offers as nodes.
//!
//! Only virtual nodes with numbered slots so far; real GPUs are a second source
//! of [`NodeConfig`]s here, and nothing outside this module will see a difference.

use crate::{LocalConfig, LocalError, plain_component};
use aviflow_engine::ports::Observation;
use std::collections::BTreeSet;

/// A node that this machine plays.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeConfig {
    /// The name.
    pub name: String,
    /// How many GPU slots it has, at most 64.
    pub gpus: u32,
}

/// Refuses nodes that nobody could schedule on.
pub(crate) fn check(nodes: &[NodeConfig]) -> Result<(), LocalError> {
    let mut names = BTreeSet::new();
    for node in nodes {
        let problem = if !plain_component(&node.name) {
            "has no usable name; use letters, digits and dashes"
        } else if node.gpus == 0 || node.gpus > 64 {
            "must have 1 to 64 GPU slots"
        } else if !names.insert(&node.name) {
            "is named twice"
        } else {
            continue;
        };
        return Err(LocalError::Config(format!("node `{}` {problem}", node.name)));
    }
    Ok(())
}

/// The nodes as the engine is told of them.
pub(crate) fn seen(config: &LocalConfig) -> impl Iterator<Item = Observation> {
    config.nodes.iter().map(|node| Observation::NodeSeen {
        name: node.name.clone(),
        pool: config.pool.clone(),
        gpu_type: config.gpu_type.clone(),
        gpus: node.gpus,
        path: Vec::new(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_have_a_name_of_their_own_and_slots() {
        let node = |name: &str, gpus| NodeConfig { name: name.to_owned(), gpus };
        assert!(check(&[node("a", 8), node("b", 64)]).is_ok());
        for wrong in [vec![node("", 8)], vec![node("a", 0)], vec![node("a", 65)], vec![node("a", 1), node("a", 1)]] {
            assert!(check(&wrong).is_err(), "{wrong:?}");
        }
    }
}
