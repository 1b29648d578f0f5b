//! Objects that the API makes of documents.

use crate::cluster::Cluster;
use aviflow_api::crd::{from_object, to_object};
use aviflow_api::file::{Defaults, parse_job};
use aviflow_api::spec::{CodeSnapshot, Layer, Provenance};
use aviflow_api::yaml::to_yaml;
use std::path::Path;

/// An object is taken with everything in it, and the job is read from it as it was.
pub fn what_the_api_makes_is_taken_and_read_again(cluster: &Cluster) {
    let text =
        "name: sft\nqueue: nlp\ncode: .\nnodes: 2\nrun: |\n  echo a\n  echo b\ntimeLimit: 24h\nafter: [{job: other}]\n";
    let spec = parse_job("job.yaml", text.as_bytes(), &Defaults::default()).unwrap().spec;
    let code = CodeSnapshot { sha256: "0".repeat(64), bytes: 10, files: 1, commit: None, dirty: true };
    let provenance = Provenance { code: Some(code), file: Some("job.yaml".into()), ..Provenance::default() };
    // The name was taken, and the number makes it longer than people may write it.
    let name = format!("{}-2", "a".repeat(40));
    let object = to_object("default", &name, &spec, &provenance);
    cluster.must("admin", "create -f -", &to_yaml(&object));
    let there = cluster.get(&format!("tj {name}"));
    let (read, with) = from_object(&there, "none").unwrap();
    assert_eq!(read, aviflow_api::spec::JobSpec { name, ..spec });
    assert_eq!(with, Some(provenance));
}

/// What the reader of files takes without a folder or file beside it, the API server takes as an object.
pub fn what_a_file_may_say_an_object_may(cluster: &Cluster) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/documents/good");
    let mut tried = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let Ok(parsed) = parse_job(&name, &std::fs::read(&path).unwrap(), &Defaults::default()) else { continue };
        let code = CodeSnapshot { sha256: "0".repeat(64), bytes: 10, files: 1, commit: None, dirty: false };
        let environment = aviflow_api::spec::ResolvedEnvironment {
            name: "a".into(),
            version: 1,
            hash: "0".repeat(64),
            python: ">=3.11".into(),
            locks: Vec::new(),
            env: std::collections::BTreeMap::new(),
        };
        let layer = Layer { lock: "0".repeat(64), platform: "linux/amd64".into(), hash: "1".repeat(64) };
        let layer = parsed.spec.requirements.is_some().then_some(layer);
        let provenance =
            Provenance { code: Some(code), environment: Some(environment), layer, ..Provenance::default() };
        let object = to_object("default", &parsed.spec.name, &parsed.spec, &provenance);
        let said = cluster.kubectl("admin", "create --dry-run=server -f -", &to_yaml(&object));
        assert!(said.ok, "{name}: {}", said.err);
        tried.push(name);
    }
    tried.sort();
    assert_eq!(tried, ["full.yaml", "script.yaml"]);
}
