//! The spec of an Environment as the control plane reads it.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A place to run in, on a cluster: an image with its defaults. The definition's schema is made from the
/// description of its keys; this has the same.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EnvironmentSpec {
    /// The name, by which jobs ask for it.
    pub name: String,
    /// The version, from 1.
    pub version: u32,
    /// What it is for.
    #[serde(default)]
    pub description: String,
    /// Who answers for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// The image by its digest.
    pub image: String,
    /// Default variables.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// How a job's command is started.
    #[serde(default)]
    pub launcher: Launcher,
    /// What to use instead, where it is not to be used any more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deprecated: Option<String>,
}

/// How a job's command is started.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Launcher {
    /// Words before `run`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub prefix: Vec<String>,
}

impl EnvironmentSpec {
    /// `name@version`.
    #[must_use]
    pub fn title(&self) -> String {
        format!("{}@{}", self.name, self.version)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is read is what may be written.
    #[test]
    fn every_key_of_the_definition_is_read() {
        let definition = super::super::environment();
        let schema = &definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"];
        let keys: Vec<&String> = schema["properties"].as_object().unwrap().keys().collect();
        let full = EnvironmentSpec {
            name: "a".into(),
            version: 1,
            description: "b".into(),
            owner: Some("c".into()),
            image: "d".into(),
            env: BTreeMap::from([("E".into(), "f".into())]),
            launcher: Launcher { prefix: vec!["g".into()] },
            deprecated: Some("h".into()),
        };
        let written = serde_json::to_value(&full).unwrap();
        let mut read: Vec<&String> = written.as_object().unwrap().keys().collect();
        let mut keys = keys;
        keys.sort();
        read.sort();
        assert_eq!(read, keys);
    }
}
