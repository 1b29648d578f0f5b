//! Options of the command line.

use crate::draw;
use aviflow_api::file::{Defaults, Document, Options};
use serde_json::Value as Json;
use std::fmt::Write as _;

const FILE: &str =
    "name: a\nrun: python a.py\nnodes: 2\ngpusPerNode: 8\ncheckpoint: {path: /c}\ndata: [{name: x, source: /x}]\n";

fn strings(words: &[&str]) -> Vec<String> {
    words.iter().map(|w| (*w).to_owned()).collect()
}

/// The canonical document after options; or what is said about them.
fn with(set: &[&str]) -> Result<Json, String> {
    let options = Options { set: strings(set), ..Options::default() };
    let mut document = Document::parse("job.yaml", FILE.as_bytes()).unwrap();
    if let Err(diagnostics) = document.apply(&options) {
        return Err(draw(&diagnostics, document.sources()));
    }
    match document.read(&Defaults::default()) {
        Ok(parsed) => Ok(serde_json::to_value(parsed.spec).unwrap()),
        Err(diagnostics) => Err(draw(&diagnostics, document.sources())),
    }
}

#[test]
fn every_field_can_be_set() {
    for (set, pointer, expected) in [
        ("nodes=4", "/nodes/max", "4"),
        ("nodes={min: 2, max: 8}", "/nodes/max", "8"),
        ("env.LR=1e-3", "/env/LR", "\"1e-3\""),
        ("env.MSG=a: b # c", "/env/MSG", "\"a: b # c\""),
        ("env.MSG=a=b", "/env/MSG", "\"a=b\""),
        ("checkpoint.every=5m", "/checkpoint/every", "\"5m\""),
        ("gpuType=[H100, H200]", "/gpuType/1", "\"H200\""),
        ("gpuType=H100", "/gpuType/0", "\"H100\""),
        ("topology.require=leaf", "/topology/require", "\"leaf\""),
        ("data.0.mount=/data", "/data/0/mount", "\"/data\""),
        ("data.1={name: y, source: /y}", "/data/1/name", "\"y\""),
        ("run=python b.py 'x y'", "/run/2", "\"x y\""),
        ("env.EMPTY=\"\"", "/env/EMPTY", "\"\""),
        ("gpusPerNode=", "/gpusPerNode", "1"),
        ("data.0=", "/name", "\"a\""),
        ("seed=9223372036854775807", "/seed", "9223372036854775807"),
    ] {
        let json = with(&[set]).unwrap_or_else(|e| panic!("{set}\n{e}"));
        assert_eq!(json.pointer(pointer), Some(&serde_json::from_str(expected).unwrap()), "{set}");
    }
    // The last wins.
    assert_eq!(with(&["nodes=4", "nodes=6"]).unwrap()["nodes"]["min"], 6);
}

#[test]
fn an_option_that_is_wrong_is_shown_by_itself() {
    let mut shown = String::new();
    for set in [
        &["nodes"][..],
        &["=4"],
        &["nodes=four", "colour=blue"],
        &["gpuType=[H100"],
        &["nodes.min=2"],
        &["checkpoint.evry=5m", "timeLimit=24", "env.PORT="],
        &["env.MASTER_ADDR=localhost"],
        &["data.7.mount=/x"],
        &["topology.maxWait=5m"],
    ] {
        let said = with(set).map_or_else(|e| e, |json| format!("{json:#}\n"));
        writeln!(shown, "=== --set {}\n{said}", set.join(" --set ")).unwrap();
    }
    insta::with_settings!({omit_expression => true, prepend_module_to_snapshot => false}, {
        insta::assert_snapshot!("set", shown);
    });
}

#[test]
fn a_job_needs_no_file() {
    let options = Options {
        nodes: Some("2-8".into()),
        gpus_per_node: Some("8".into()),
        gpu_type: strings(&["H100,H200"]),
        env: strings(&["LR=1e-3", "EMPTY="]),
        time_limit: Some("2h".into()),
        retries: Some("3".into()),
        set: strings(&["priority=high"]),
        command: strings(&["torchrun", "src/Train_SFT.py", "--note", "a b", "$HOME | x"]),
        ..Options::default()
    };
    let document = Document::from_command(&options).unwrap();
    let parsed = document.read(&Defaults::default()).unwrap_or_else(|e| panic!("{}", draw(&e, document.sources())));
    assert_eq!(parsed.warnings, []);
    insta::with_settings!({omit_expression => true, prepend_module_to_snapshot => false}, {
        insta::assert_snapshot!("command", serde_json::to_string_pretty(&parsed.spec).unwrap());
    });
    // The least that works, as on a laptop.
    let least = Options { nodes: Some("2".into()), command: strings(&["torchrun", "train.py"]), ..Options::default() };
    let parsed = Document::from_command(&least).unwrap().read(&Defaults::default()).unwrap();
    assert_eq!((parsed.spec.name.as_str(), parsed.spec.gpus_per_node, parsed.warnings.len()), ("train", 1, 0));
}

#[test]
fn a_command_without_a_file_is_told_what_is_wrong() {
    let mut shown = String::new();
    for options in [
        Options::default(),
        Options {
            nodes: Some("x".into()),
            gpus_per_node: Some("0".into()),
            command: strings(&["a"]),
            ..Options::default()
        },
        Options { name: Some("My Job".into()), env: strings(&["X"]), command: strings(&["a"]), ..Options::default() },
        Options {
            nodes: Some("8-2".into()),
            time_limit: Some("60".into()),
            command: strings(&["torchrun", "--standalone", "x"]),
            ..Options::default()
        },
    ] {
        let drawn = match Document::from_command(&options) {
            Err((sources, diagnostics)) => draw(&diagnostics, &sources),
            Ok(document) => draw(&document.read(&Defaults::default()).unwrap_err(), document.sources()),
        };
        writeln!(shown, "=== {}\n{drawn}", options.command.join(" ")).unwrap();
    }
    insta::with_settings!({omit_expression => true, prepend_module_to_snapshot => false}, {
        insta::assert_snapshot!("command-wrong", shown);
    });
}
