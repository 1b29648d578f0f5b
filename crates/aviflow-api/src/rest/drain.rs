//! Drains: nodes that are to be empty, all at once in a window, or a few at a time.

use super::{ApiError, Reason};
use crate::admin::ranges;
use crate::suggest::{nearest, one_of};
use aviflow_core::gpus::Slots;
use aviflow_core::model::{Node, Snapshot};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Asks for nodes to be empty.
///
/// With `maxUnavailable` or `by` the drain is rolling: each node is taken at the cheapest moment that
/// is left, and the drain has a number. Else all are empty from `at` on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DrainRequest {
    /// The nodes by name; `node-[1-8]` stands for eight.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nodes: Vec<String>,
    /// Instead: all nodes of which each of these holds. The keys are `pool`, `gpuType`, and the levels
    /// of the pools, such as `leaf`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub selector: BTreeMap<String, String>,
    /// When it begins; none means now. By then the nodes are to be empty.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at: Option<i64>,
    /// For how many milliseconds each node is away; none until somebody uncordons it.
    #[serde(rename = "for", default, skip_serializing_if = "Option::is_none")]
    pub length: Option<i64>,
    /// How many may be away at once; with `by` alone, all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_unavailable: Option<u32>,
    /// When all must have been taken; with `maxUnavailable` alone each is taken when it is empty.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<i64>,
    /// Why.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Reason,
}

/// A drain that was accepted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DrainAnswer {
    /// The number of a rolling drain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drain: Option<u64>,
    /// The nodes that it is about.
    pub nodes: Vec<String>,
    /// What the person should know of it, a sentence each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// A drain that goes on or is to come: a rolling one, or that of a single node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DrainInfo {
    /// The number of a rolling drain, or the node's name: by it the drain is called off.
    pub name: String,
    /// Its nodes.
    pub nodes: Vec<DrainNode>,
    /// How many nodes of a rolling drain may be away at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_unavailable: Option<u32>,
    /// When all nodes of a rolling drain must have been taken.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<i64>,
    /// For how many milliseconds each node is away; none until somebody uncordons it.
    #[serde(rename = "for", default, skip_serializing_if = "Option::is_none")]
    pub length: Option<i64>,
    /// Who ordered it.
    pub ordered_by: String,
    /// Why.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Reason,
}

/// A node of a drain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DrainNode {
    /// Its name.
    pub name: String,
    /// `waiting` in a rolling drain that has not taken it, `coming` before its window, `leaving` while jobs
    /// are still there, `empty` when none is.
    pub state: String,
    /// When its window begins.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<i64>,
    /// When it ends; none until somebody uncordons the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub until: Option<i64>,
    /// The jobs there, as namespace/name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub jobs: Vec<String>,
}

/// What a person does to a drain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", tag = "action")]
pub enum DrainAction {
    /// Call it off: no more nodes are taken; one that is away comes back as planned.
    Cancel {
        /// Why.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Reason,
    },
}

/// When a node is to be empty.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct WindowInfo {
    /// From when on.
    pub from: i64,
    /// Until when; none until somebody uncordons it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub until: Option<i64>,
    /// Who ordered it.
    pub by: String,
    /// Why.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Reason,
}

/// Reads `leaf=leaf-1,gpuType=H100`.
///
/// # Errors
/// If a part is no `key=value`, or a key is there twice.
pub fn parse_selector(text: &str) -> Result<BTreeMap<String, String>, ApiError> {
    let mut selector = BTreeMap::new();
    for part in text.split(',').map(str::trim) {
        let pair = part.split_once('=').map(|(key, value)| (key.trim(), value.trim()));
        let Some((key, value)) = pair.filter(|(key, value)| !key.is_empty() && !value.is_empty()) else {
            return Err(bad(format!("`{part}` is no `key=value`")).help("write for example `leaf=leaf-1,gpuType=H100`"));
        };
        if selector.insert(key.to_owned(), value.to_owned()).is_some() {
            return Err(
                bad(format!("`{key}` is selected twice")).help("a node has one value of each; select in two drains")
            );
        }
    }
    Ok(selector)
}

fn bad(message: impl Into<String>) -> ApiError {
    ApiError::new("badDrain", message)
}

impl DrainRequest {
    /// Whether its nodes are taken a few at a time.
    #[must_use]
    pub fn is_rolling(&self) -> bool {
        self.max_unavailable.is_some() || self.by.is_some()
    }

    /// The names of the nodes that it is about, in their order.
    ///
    /// # Errors
    /// If it names none, one that is not there, or selects by what no node has; and if what it asks for
    /// cannot be, whatever the nodes.
    pub fn select(&self, snapshot: &Snapshot) -> Result<Vec<String>, ApiError> {
        self.check()?;
        // A node without GPUs has left the pool; only its account is kept.
        let nodes: Vec<&Node> = snapshot.nodes.values().filter(|n| n.gpus != Slots::NONE).collect();
        if self.nodes.is_empty() { self.selected(snapshot, &nodes) } else { self.named(&nodes) }
    }

    fn check(&self) -> Result<(), ApiError> {
        match (self.nodes.is_empty(), self.selector.is_empty()) {
            (true, true) => return Err(bad("no node is named").help("name nodes, or select them by `leaf=…`")),
            (false, false) => return Err(bad("nodes are named and selected").help("do one or the other")),
            _ => {}
        }
        if self.length.is_some_and(|length| length <= 0) {
            return Err(bad("the time away is not positive").help("leave it out until somebody uncordons the node"));
        }
        if self.max_unavailable == Some(0) {
            return Err(bad("with no node away at once none can be drained").help("allow 1 at least"));
        }
        if self.at.is_some() && self.is_rolling() {
            return Err(bad("a rolling drain begins by itself, node by node")
                .help("leave the beginning out, or `maxUnavailable` and `by`"));
        }
        Ok(())
    }

    fn named(&self, nodes: &[&Node]) -> Result<Vec<String>, ApiError> {
        let there: BTreeSet<&str> = nodes.iter().map(|n| n.name.as_str()).collect();
        let mut named = BTreeSet::new();
        for text in &self.nodes {
            let names = ranges::expand(text).map_err(|fault| bad(fault.message).help(fault.help))?;
            if let Some(gone) = names.iter().find(|name| !there.contains(name.as_str())) {
                let error = ApiError::new("noSuchNode", format!("there is no node `{gone}`"));
                return Err(match nearest(gone, there.iter().copied()) {
                    Some(near) => error.help(format!("did you mean `{near}`?")),
                    None => error.help("`aviflow node ls` lists the nodes"),
                });
            }
            named.extend(names);
        }
        Ok(named.into_iter().collect())
    }

    fn selected(&self, snapshot: &Snapshot, nodes: &[&Node]) -> Result<Vec<String>, ApiError> {
        let levels: BTreeSet<&str> = snapshot.pools.values().flat_map(|p| &p.levels).map(String::as_str).collect();
        let keys = || ["pool", "gpuType"].into_iter().chain(levels.iter().copied());
        if let Some(unknown) = self.selector.keys().find(|key| !keys().any(|k| k == *key)) {
            let help = match nearest(unknown, keys()) {
                Some(near) => format!("write `{near}`"),
                None => format!("select by {}", one_of(keys())),
            };
            return Err(bad(format!("nodes are not selected by `{unknown}`")).help(help));
        }
        let value = |node: &Node, key: &str| match key {
            "pool" => Some(node.pool.clone()),
            "gpuType" => Some(node.gpu_type.clone()),
            level => {
                let index = snapshot.pools.get(&node.pool)?.levels.iter().position(|l| l == level)?;
                node.path.get(index).cloned()
            }
        };
        for (key, wanted) in &self.selector {
            let values: BTreeSet<String> = nodes.iter().filter_map(|n| value(n, key)).collect();
            if !values.contains(wanted) {
                let help = match nearest(wanted, values.iter().map(String::as_str)) {
                    Some(near) => format!("write `{near}`"),
                    None => format!("there are {}", one_of(values.iter().map(String::as_str))),
                };
                return Err(bad(format!("no node has {key} `{wanted}`")).help(help));
            }
        }
        let all = |node: &&&Node| self.selector.iter().all(|(key, wanted)| value(node, key).as_ref() == Some(wanted));
        let names: BTreeSet<String> = nodes.iter().filter(all).map(|n| n.name.clone()).collect();
        if names.is_empty() {
            return Err(bad("no node has all that is selected").help("select by less"));
        }
        Ok(names.into_iter().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aviflow_core::model::{NodeId, Pool};

    fn snapshot() -> Snapshot {
        let mut snapshot = Snapshot::default();
        for (n, leaf) in [(1, "a"), (2, "a"), (3, "b")] {
            let mut node = Node::new(NodeId(n), &format!("node-{n}"), "main", "H100", Slots::first(8));
            node.path = vec![leaf.to_owned()];
            snapshot.nodes.insert(NodeId(n), node);
        }
        let other = Node::new(NodeId(4), "other", "old", "L4", Slots::first(4));
        snapshot.nodes.insert(NodeId(4), other);
        snapshot.nodes.insert(NodeId(5), Node::new(NodeId(5), "left", "old", "L4", Slots::NONE));
        let pool = Pool { name: "main".into(), levels: vec!["leaf".into()], ..Pool::default() };
        snapshot.pools.insert("main".into(), pool);
        snapshot
    }

    fn select(nodes: &[&str], selector: &str) -> Result<String, String> {
        let selector = if selector.is_empty() { Ok(BTreeMap::new()) } else { parse_selector(selector) };
        let nodes = nodes.iter().map(|n| (*n).to_owned()).collect();
        let request = DrainRequest { nodes, selector: selector.map_err(|e| e.message)?, ..DrainRequest::default() };
        request
            .select(&snapshot())
            .map(|names| names.join(" "))
            .map_err(|e| format!("{}; {}", e.message, e.help.unwrap_or_default()))
    }

    #[test]
    fn nodes_are_named_or_selected() {
        assert_eq!(select(&["node-[2-3]", "other", "node-2"], "").as_deref(), Ok("node-2 node-3 other"));
        assert_eq!(select(&[], "leaf=a").as_deref(), Ok("node-1 node-2"));
        assert_eq!(select(&[], "pool=old, gpuType=L4").as_deref(), Ok("other"));
        for (nodes, selector, said) in [
            (&[][..], "", "no node is named; name nodes, or select them by `leaf=…`"),
            (&["other"], "leaf=a", "nodes are named and selected; do one or the other"),
            (&["nod-1"], "", "there is no node `nod-1`; did you mean `node-1`?"),
            (&["left"], "", "there is no node `left`; `aviflow node ls` lists the nodes"),
            (&[], "leef=a", "nodes are not selected by `leef`; write `leaf`"),
            (&[], "leaf=c", "no node has leaf `c`; write `a`"),
            (&[], "leaf=a,pool=old", "no node has all that is selected; select by less"),
            (&[], "leaf", "`leaf` is no `key=value`"),
            (&[], "leaf=a,leaf=b", "`leaf` is selected twice"),
        ] {
            assert_eq!(select(nodes, selector), Err(said.to_owned()));
        }
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let one = || DrainRequest { nodes: vec!["other".into()], ..DrainRequest::default() };
        for wrong in [
            DrainRequest { length: Some(0), ..one() },
            DrainRequest { max_unavailable: Some(0), ..one() },
            DrainRequest { at: Some(1), by: Some(2), ..one() },
        ] {
            assert_eq!(wrong.select(&snapshot()).unwrap_err().code, "badDrain");
        }
        assert!(DrainRequest { at: Some(1), length: Some(2), ..one() }.select(&snapshot()).is_ok());
    }
}
