//! Rules about crates: which may know which, and what the core never touches.

use super::Offence;
use serde_json::Value;
use std::collections::BTreeMap;

/// What each crate may depend on of this workspace: the arrows of the architecture.
const ARROWS: [(&str, &[&str]); 18] = [
    ("aviflow-core", &[]),
    ("aviflow-replay", &["aviflow-core"]),
    ("aviflow-agent", &[]),
    ("aviflow-api", &["aviflow-core"]),
    ("aviflow-engine", &["aviflow-core", "aviflow-api"]),
    ("aviflow-store", &["aviflow-core", "aviflow-api", "aviflow-engine"]),
    ("aviflow-link", &["aviflow-core", "aviflow-engine", "aviflow-agent"]),
    ("aviflow-local", &["aviflow-core", "aviflow-api", "aviflow-engine", "aviflow-agent", "aviflow-link"]),
    // Formats and what GPUs say of themselves; it knows no jobs.
    ("aviflow-metrics", &[]),
    // Certificates and connections alone.
    ("aviflow-tls", &[]),
    (
        "aviflow-kube",
        &["aviflow-core", "aviflow-api", "aviflow-engine", "aviflow-agent", "aviflow-link", "aviflow-tls"],
    ),
    // The server reads the store, and never writes it: ended jobs are in no snapshot.
    (
        "aviflow-server",
        &["aviflow-core", "aviflow-api", "aviflow-engine", "aviflow-store", "aviflow-metrics", "aviflow-tls"],
    ),
    (
        "aviflow",
        &[
            "aviflow-core",
            "aviflow-replay",
            "aviflow-api",
            "aviflow-engine",
            "aviflow-store",
            "aviflow-link",
            "aviflow-local",
            "aviflow-kube",
            "aviflow-server",
            "aviflow-agent",
            "aviflow-metrics",
            "aviflow-tls",
        ],
    ),
    ("xtask", &["aviflow-image"]),
    // It knows the programs as files.
    ("aviflow-image", &[]),
    // Tests drive clusters with it; it knows Kubernetes and nothing of Aviflow.
    ("aviflow-testcluster", &["aviflow-image"]),
    ("aviflow-e2e-kube", &["aviflow-testcluster", "aviflow-image"]),
    ("aviflow-bench-kube", &["aviflow-testcluster"]),
];

/// All that the core may depend on.
const CORE_MAY: [&str; 2] = ["serde", "thiserror"];

/// What the core's source never names: clocks, the environment, input and output, threads, chance.
const CORE_NEVER: [&str; 13] = [
    "SystemTime",
    "Instant::",
    "std::env",
    "std::fs",
    "std::net",
    "std::thread",
    "std::process",
    "println!",
    "dbg!",
    "HashMap",
    "HashSet",
    "rand::",
    "RandomState",
];

/// Checks `cargo metadata`: the arrows, and the core's few dependencies.
pub fn check_dependencies(metadata: &Value) -> Vec<Offence> {
    let mut offences = Vec::new();
    for package in list(&metadata["packages"]) {
        let name = text(&package["name"]);
        let file = format!("crates/{name}/Cargo.toml");
        let known = ARROWS.iter().find(|(krate, _)| *krate == name);
        let Some((_, may)) = known else {
            let what = format!("the crate {name} has no arrows; add it to xtask's tidy/crates.rs and ARCHITECTURE.md");
            offences.push(Offence::new(&file, 0, what));
            continue;
        };
        for dependency in list(&package["dependencies"]) {
            // What only tests use may point anywhere: it never reaches a binary.
            if dependency["kind"] == "dev" {
                continue;
            }
            let on = text(&dependency["name"]);
            let ours = ARROWS.iter().any(|(krate, _)| *krate == on);
            if ours && !may.contains(&on) {
                offences.push(Offence::new(&file, 0, format!("{name} may not depend on {on}, see ARCHITECTURE.md")));
            }
            if name == "aviflow-core" && !CORE_MAY.contains(&on) {
                let what = format!("the core depends on {}, not on {on}", CORE_MAY.join(" and "));
                offences.push(Offence::new(&file, 0, what));
            }
        }
    }
    offences
}

/// Checks a source file of the core for what it never touches.
pub fn check_core_source(name: &str, source: &str) -> Vec<Offence> {
    let mut offences = Vec::new();
    if !name.starts_with("crates/aviflow-core/src/") || !name.ends_with(".rs") {
        return offences;
    }
    for (number, line) in source.lines().enumerate() {
        let code = line.split("//").next().unwrap_or_default();
        for word in CORE_NEVER.iter().filter(|word| names(code, word)) {
            let what = format!("the core has no `{word}`: the same snapshot must give the same answer everywhere");
            offences.push(Offence::new(name, number + 1, what));
        }
    }
    offences
}

/// Whether the code has the word, and not as the end of a longer one.
fn names(code: &str, word: &str) -> bool {
    let longer = |before: &str| before.ends_with(|c: char| c.is_alphanumeric() || c == '_');
    code.match_indices(word).any(|(at, _)| !longer(&code[..at]))
}

/// Every crate takes the workspace's lints and says what it is for.
pub fn check_manifests(files: &BTreeMap<String, String>) -> Vec<Offence> {
    let mut offences = Vec::new();
    for (name, manifest) in files {
        let Some(folder) = name.strip_suffix("/Cargo.toml") else { continue };
        // The agent has a copy: it needs `unsafe` in one module, which the workspace forbids.
        let own_lints = folder == "crates/aviflow-agent" && manifest.contains("[lints.rust]");
        if !manifest.contains("[lints]\nworkspace = true") && !own_lints {
            offences.push(Offence::new(name, 0, "add `[lints]` with `workspace = true`"));
        }
        for root in ["lib.rs", "main.rs"] {
            let root = format!("{folder}/src/{root}");
            if let Some(source) = files.get(&root)
                && !source.starts_with("//!")
            {
                offences.push(Offence::new(&root, 1, "a crate opens with what it is for (`//!`)"));
            }
        }
    }
    offences
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn arrows_point_one_way() {
        let check = |name: &str, on: &str, kind: Option<&str>, expected: usize| {
            let metadata = json!({"packages": [{"name": name, "dependencies": [{"name": on, "kind": kind}]}]});
            assert_eq!(check_dependencies(&metadata).len(), expected, "{name} -> {on}");
        };
        check("aviflow-engine", "aviflow-core", None, 0);
        check("aviflow-engine", "aviflow-store", None, 1);
        check("aviflow-engine", "aviflow-store", Some("dev"), 0);
        check("aviflow-engine", "tokio", None, 0);
        check("aviflow-agent", "aviflow-core", None, 1);
        check("aviflow-core", "serde", None, 0);
        check("aviflow-core", "serde_json", None, 1);
        check("aviflow-core", "serde_json", Some("dev"), 0);
        check("aviflow-new", "serde", None, 1);
    }

    #[test]
    fn the_core_has_no_clock() {
        let check = |line: &str, expected: usize| {
            assert_eq!(check_core_source("crates/aviflow-core/src/x.rs", line).len(), expected, "{line}");
        };
        check("let now = std::time::Instant::now();", 1);
        check("use std::collections::HashMap;", 1);
        check("// a HashMap would give another order", 0);
        check("let operand::Kind = kind;", 0);
        assert!(check_core_source("crates/aviflow/src/main.rs", "std::env::args()").is_empty());
    }

    #[test]
    fn a_crate_says_what_it_is_for() {
        let check = |manifest: &str, source: &str, expected: usize| {
            let files = BTreeMap::from([
                ("crates/x/Cargo.toml".to_owned(), manifest.to_owned()),
                ("crates/x/src/lib.rs".to_owned(), source.to_owned()),
            ]);
            assert_eq!(check_manifests(&files).len(), expected, "{manifest} {source}");
        };
        check("[lints]\nworkspace = true\n", "//! X.\n", 0);
        check("", "//! X.\n", 1);
        check("[lints]\nworkspace = true\n", "fn x() {}\n", 1);
    }
}
