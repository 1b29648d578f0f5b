//! The cluster that a trace is replayed on: nodes of one kind, with or without a topology.

use crate::error::{Error, Result};
use aviflow_core::model::NODE_LEVEL;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

/// The accelerator type of the replayed nodes, where nobody says one.
pub const GPU_TYPE: &str = "gpu";

/// Nodes of one kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cluster {
    /// How many nodes.
    pub nodes: u32,
    /// GPUs on each.
    pub gpus_per_node: u32,
    /// Their accelerator type.
    pub gpu_type: String,
    /// Where they are joined, if it matters.
    pub topology: Option<Topology>,
}

impl Cluster {
    /// A cluster without a topology.
    #[must_use]
    pub fn new(nodes: u32, gpus_per_node: u32) -> Cluster {
        Cluster { nodes, gpus_per_node, gpu_type: GPU_TYPE.to_owned(), topology: None }
    }

    /// All of its GPUs.
    #[must_use]
    pub fn gpus(&self) -> u32 {
        self.nodes * self.gpus_per_node
    }

    /// The nodes of each domain of a level, in order; none if there is no such level.
    #[must_use]
    pub fn domains(&self, level: &str) -> Option<Vec<Range<u32>>> {
        if level == NODE_LEVEL {
            return Some((0..self.nodes).map(|node| node..node + 1).collect());
        }
        let topology = self.topology.as_ref()?;
        let level = topology.levels.iter().position(|l| l == level)?;
        let mut domains: Vec<Range<u32>> = Vec::new();
        let mut before = None;
        for (node, path) in (0..self.nodes).zip(&topology.paths) {
            let domain = &path[level..];
            match domains.last_mut() {
                Some(last) if before == Some(domain) => last.end = node + 1,
                Some(_) | None => domains.push(node..node + 1),
            }
            before = Some(domain);
        }
        Some(domains)
    }

    /// The nodes of the largest domain of a level; none if there is no such level.
    #[must_use]
    pub fn largest(&self, level: &str) -> Option<u32> {
        Some(self.domains(level)?.into_iter().map(|domain| domain.end - domain.start).max().unwrap_or(0))
    }

    /// Checks that there is a cluster, and a place in the topology for each node.
    ///
    /// # Errors
    /// If it has no node, more GPUs on a node than the core can hold, or more nodes than the topology.
    pub fn check(&self) -> Result<()> {
        if self.nodes == 0 || self.nodes > 100_000 {
            return Err(Error::options(format!("a cluster of {} nodes", self.nodes), "give --nodes from 1 to 100000"));
        }
        if self.gpus_per_node == 0 || self.gpus_per_node > 64 {
            let what = format!("nodes of {} GPUs", self.gpus_per_node);
            return Err(Error::options(what, "give --gpus-per-node from 1 to 64"));
        }
        match &self.topology {
            Some(topology) if topology.paths.len() < self.nodes as usize => {
                let what = format!("{} nodes, and the topology has {}", self.nodes, topology.paths.len());
                Err(Error::options(what, "give fewer nodes, or a topology with a line for each node"))
            }
            Some(_) | None => Ok(()),
        }
    }
}

/// A tree of switches: for each node the domains that it is in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    /// The levels, smallest first.
    pub levels: Vec<String>,
    /// For each node its domains, smallest first; nodes of one domain stand together.
    pub paths: Vec<Vec<String>>,
}

impl Topology {
    /// Reads a file, see [`Topology::parse`].
    ///
    /// # Errors
    /// If the file cannot be read or is no topology.
    pub fn read(path: &Path) -> Result<Topology> {
        let file = path.display().to_string();
        let text = std::fs::read_to_string(path)
            .map_err(|e| Error::Unreadable { file: file.clone(), reason: e.to_string() })?;
        Topology::parse(&file, &text)
    }

    /// A header and one line a node: its name, then its domains, the largest first. Names of domains
    /// need only be unique within the domain above, as the Lingjun trace has them.
    ///
    /// # Errors
    /// If it is no topology.
    pub fn parse(file: &str, text: &str) -> Result<Topology> {
        let mut lines = text.trim_start_matches('\u{feff}').lines().zip(1u32..).filter(|(l, _)| !l.trim().is_empty());
        let wrong = |line: u32, what: String| Error::Line {
            file: file.to_owned(),
            line,
            what,
            help: "a topology has a header and one line a node: its name, then its domains, the largest first"
                .to_owned(),
        };
        let (header, _) = lines.next().ok_or_else(|| wrong(1, "the file is empty".to_owned()))?;
        let names: Vec<String> = header.split(',').map(|n| n.trim().to_lowercase()).collect();
        if names.len() < 2 {
            return Err(wrong(1, "the header has no level".to_owned()));
        }
        // A node's name is of no use here; the tree alone is.
        let mut tree: BTreeMap<Vec<String>, u32> = BTreeMap::new();
        for (text, line) in lines {
            let cells: Vec<&str> = text.split(',').map(str::trim).collect();
            if cells.len() != names.len() {
                return Err(wrong(line, format!("{} cells where the header has {}", cells.len(), names.len())));
            }
            if cells.iter().any(|cell| cell.is_empty()) {
                return Err(wrong(line, "an empty cell".to_owned()));
            }
            // The name of a domain with those of all domains around it.
            let path: Vec<String> = (1..cells.len()).map(|level| cells[1..=level].join("/")).collect();
            *tree.entry(path).or_default() += 1;
        }
        if tree.is_empty() {
            return Err(wrong(1, "no node below the header".to_owned()));
        }
        let mut paths = Vec::new();
        for (mut path, nodes) in tree {
            path.reverse();
            paths.extend(std::iter::repeat_n(path, nodes as usize));
        }
        Ok(Topology { levels: names[1..].iter().rev().cloned().collect(), paths })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn domains_are_named_with_those_around_them() {
        let text = "ip,DSW,PSW,ASW\na,G,P1,S1\nb,G,P2,S1\nc,G,P1,S1\n";
        let topology = Topology::parse("t.csv", text).expect("a topology");
        assert_eq!(topology.levels, ["asw", "psw", "dsw"]);
        assert_eq!(topology.paths[0], ["G/P1/S1", "G/P1", "G"]);
        assert_eq!(topology.paths[1], topology.paths[0]);
        assert_eq!(topology.paths[2][0], "G/P2/S1");
        let mut cluster = Cluster { topology: Some(topology), ..Cluster::new(3, 8) };
        assert_eq!(cluster.check(), Ok(()));
        assert_eq!(cluster.domains("asw"), Some(vec![0..2, 2..3]));
        assert_eq!(
            (cluster.largest("dsw"), cluster.largest("node"), cluster.largest("rack")),
            (Some(3), Some(1), None)
        );
        cluster.nodes = 4;
        let error = cluster.check().expect_err("too many");
        assert_eq!(error.to_string(), "4 nodes, and the topology has 3");
    }

    #[test]
    fn what_is_no_topology_is_refused() {
        for (text, expected) in [
            ("", "t.csv:1: the file is empty"),
            ("node\na\n", "t.csv:1: the header has no level"),
            ("node,leaf\na\n", "t.csv:2: 1 cells where the header has 2"),
            ("node,leaf\na,\n", "t.csv:2: an empty cell"),
            ("node,leaf\n", "t.csv:1: no node below the header"),
        ] {
            assert_eq!(Topology::parse("t.csv", text).expect_err(text).to_string(), expected);
        }
    }
}
