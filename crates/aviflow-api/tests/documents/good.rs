//! What good documents become.

use aviflow_api::convert::to_request;
use aviflow_api::file::{Defaults, Parsed, Priorities, parse_job};
use serde_json::json;

/// Good documents: name and text.
pub const GOOD: &[(&str, &str)] = &[
    ("least", "name: a\nrun: python train.py\n"),
    ("full", include_str!("good/full.yaml")),
    ("script", include_str!("good/script.yaml")),
    ("one line script", "name: a\nrun: |\n  python train.py | tee log.txt\n"),
    ("folded command", "name: a\nrun: >\n  torchrun train.py\n  --config 8b.yaml\n"),
    ("list command", "name: a\nrun: [python, -c, \"print(1 > 0)\", --lr, 1e-3, --flag, true, 8]\n"),
    ("quotes", "name: a\nrun: python -c 'print(\"$HOME | x\")' \"a b\"\n"),
    (
        "literal variables",
        "name: a\nrun: x\nenv: {PORT: 8080, DEBUG: true, LR: 1e-3, HEX: 0x10, NO: no, EMPTY: \"\", VERSION: 1.10, ON: on}\n",
    ),
    ("elastic", "name: a\nrun: x\nnodes: {min: 2, max: 8}\ngpusPerNode: 8\ngpuType: H100\ntimeLimit: 1-12:00:00\n"),
    ("git", "name: a\nrun: x\ncode: {git: \"https://git.example/x\", ref: 1234567}\n"),
    ("flow", "{name: a, run: [x], outputs: [/out], after: [{job: b}]}\n"),
    (
        "json",
        "{\"name\": \"a\", \"run\": [\"x\", \"\"], \"nodes\": {\"min\": 1, \"max\": 1}, \"preemptible\": false}\n",
    ),
    (
        "anchors",
        "name: a\nrun: x\ndata:\n  - {name: x, source: &s s3://bucket/x, readOnly: false}\n  - {name: y, source: *s}\n",
    ),
    (
        "image",
        "name: a\nrun: x\nimage: host.example:5000/t/train:v1@sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef\n",
    ),
    ("image by tag", "name: a\nrun: x\nimage: host.example:5000/t/train:v1\n"),
    ("image by name", "name: a\nrun: x\nimage: python\n"),
    ("marker", "---\nname: a\nrun: x\n...\n"),
];

pub fn parsed(text: &str) -> Parsed {
    parse_job("job.yaml", text.as_bytes(), &Defaults::default()).unwrap_or_else(|e| panic!("{text}\n{e:#?}"))
}

#[test]
fn good_documents_become_canonical() {
    let mut shown = serde_json::Map::new();
    for (name, text) in GOOD {
        let parsed = parsed(text);
        assert_eq!(parsed.warnings, [], "{name}");
        shown.insert((*name).to_owned(), serde_json::to_value(&parsed.spec).unwrap());
    }
    insta::with_settings!({omit_expression => true, prepend_module_to_snapshot => false}, {
        insta::assert_snapshot!("good", serde_json::to_string_pretty(&shown).unwrap());
    });
}

#[test]
fn places_are_those_of_the_text() {
    let text = "name: a\nrun: x\nenv:\n  PORT: 8080\n";
    let parsed = parsed(text);
    let span = parsed.places.value("env.PORT").unwrap();
    assert_eq!(&text[span.range()], "8080");
    assert_eq!(&text[parsed.places.key("env").unwrap().range()], "env");
    assert!(!parsed.places.has("queue"));
}

#[test]
fn defaults_are_the_configurations() {
    let mut priorities = Priorities::default();
    priorities.0.insert("soon".into(), 150);
    let defaults = Defaults { queue: "nlp".into(), priority: "soon".into(), priorities };
    let parsed = parse_job("job.yaml", b"name: a\nrun: x\n", &defaults).unwrap();
    assert_eq!((parsed.spec.queue.as_str(), parsed.spec.priority.as_str()), ("nlp", "soon"));
    assert_eq!(to_request(&parsed.spec, &defaults.priorities).priority, 150);
    assert_eq!(defaults.priorities.names(), ["low", "normal", "high", "soon", "urgent"]);
}

#[test]
fn the_request_is_what_the_core_decides_by() {
    let text = "name: a\nrun: x\nnodes: {min: 2, max: 4}\ngpusPerNode: 8\nprocesses: perGpu\npriority: low\ntimeLimit: 90s\nretry: {failures: 2}\npreemptible: false\n";
    let request = to_request(&parsed(text).spec, &Priorities::default());
    assert_eq!(
        serde_json::to_value(request).unwrap(),
        json!({
            "queue": "default", "priority": -100, "nodes": {"min": 2, "max": 4}, "gpus_per_node": 8,
            "gpu_types": [], "ranks_per_node": 8, "time_limit": 90_000, "preemptible": false,
            "failures_allowed": 2, "keep_on_failure": null, "grace": 30_000, "checkpoint_every": null,
            "topology": {"require": null, "prefer": null, "maxWait": null},
        })
    );
}
