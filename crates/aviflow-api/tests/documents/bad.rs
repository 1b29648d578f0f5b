//! What is said about bad documents.

use crate::cases::GROUPS;
use crate::{draw, said};
use aviflow_api::diagnostic::DiagnosticCode;
use aviflow_api::environment::parse_environment;
use aviflow_api::file::{Defaults, check_spec, parse_job};
use aviflow_api::source::Sources;
use std::fmt::Write as _;
use std::time::{Duration, Instant};

#[test]
fn every_bad_document_is_told_what_to_write() {
    for (group, cases) in GROUPS {
        let mut shown = String::new();
        for (name, text) in *cases {
            let (diagnostics, drawn) = said(text.as_bytes());
            assert!(!diagnostics.is_empty(), "{group}, {name}: nothing was said");
            for d in &diagnostics {
                let words = &d.message;
                assert_ne!(d.code, DiagnosticCode::Internal, "{group}, {name}: {words}");
                assert!(d.help.as_ref().is_some_and(|h| !h.is_empty()), "{group}, {name}: no help: {words}");
                assert!(!words.ends_with('.') && !words.starts_with(char::is_uppercase), "{group}, {name}: {words}");
            }
            writeln!(shown, "=== {name}\n{drawn}").unwrap();
        }
        insta::with_settings!({omit_expression => true, prepend_module_to_snapshot => false}, {
            insta::assert_snapshot!(*group, shown);
        });
    }
}

#[test]
fn there_are_enough_of_them() {
    assert!(GROUPS.iter().map(|g| g.1.len()).sum::<usize>() >= 40);
}

#[test]
fn files_that_are_none_are_told_so() {
    let mut deep = "name: a\nrun: x\nenv: ".to_owned();
    deep.push_str(&"[".repeat(100));
    let mut laughs = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
    for i in 1..12 {
        let inner = vec![format!("*a{}", i - 1); 10].join(", ");
        writeln!(laughs, "a{i}: &a{i} [{inner}]").unwrap();
    }
    let cases: [(&str, Vec<u8>); 8] = [
        ("a program", b"\x7fELF\x02\x01\x01\x00".to_vec()),
        ("zero bytes", b"name: a\x00\n".to_vec()),
        ("UTF-16", b"\xff\xfen\x00a\x00".to_vec()),
        ("Latin-1", b"name: a\nrun: echo gr\xfc\xdfe\n".to_vec()),
        ("large", vec![b'a'; 100 << 20]),
        ("deep", deep.into_bytes()),
        ("billion laughs", laughs.into_bytes()),
        ("nothing", Vec::new()),
    ];
    let mut shown = String::new();
    for (name, bytes) in cases {
        let start = Instant::now();
        let (diagnostics, drawn) = said(&bytes);
        assert_eq!(diagnostics.len(), 1, "{name}");
        assert!(start.elapsed() < Duration::from_secs(2), "{name} took {:?}", start.elapsed());
        writeln!(shown, "=== {name}\n{drawn}").unwrap();
    }
    insta::with_settings!({omit_expression => true, prepend_module_to_snapshot => false}, {
        insta::assert_snapshot!("no-documents", shown);
    });
}

#[test]
fn hostile_texts_end_soon() {
    for pattern in [
        "[", "{", "{a: ", "- ", "? ", "a: ", "&a ", "\"", "'", "!", "|\n", "\n ", "a\n", "- - ", "*a ", "\t", ": ",
        "}", "x,",
    ] {
        let text = pattern.repeat((1 << 18) / pattern.len());
        let start = Instant::now();
        let _ = said(text.as_bytes());
        // Debug builds of the parser on a busy machine; a quadratic one would take minutes.
        assert!(start.elapsed() < Duration::from_secs(20), "{pattern:?} took {:?}", start.elapsed());
    }
}

#[test]
fn a_byte_order_mark_is_no_matter() {
    let (diagnostics, drawn) = said(b"\xef\xbb\xbfname: a\nrun: python a.py\n");
    assert!(diagnostics.is_empty(), "{drawn}");
    let (diagnostics, _) = said(b"\xef\xbb\xbfnaem: a\nrun: python a.py\n");
    let place = diagnostics[0].place.as_ref().unwrap();
    assert_eq!((place.line, place.column), (1, 1));
}

#[test]
fn diagnostics_are_data() {
    let diagnostics = parse_job("job.yaml", b"name: a\nrun: x\ngpus: 8\n", &Defaults::default()).unwrap_err();
    let json = serde_json::to_value(&diagnostics).unwrap();
    assert_eq!(
        json,
        serde_json::json!([{
            "severity": "error", "code": "unknown-key", "message": "a job has no key `gpus`", "field": "gpus",
            "place": {"source": "job.yaml", "line": 3, "column": 1, "length": 4, "offset": 15, "bytes": 4},
            "text": "gpus", "help": "write `gpusPerNode`",
        }])
    );
    let json = serde_json::to_string(&diagnostics).unwrap();
    let back: Vec<aviflow_api::diagnostic::Diagnostic> = serde_json::from_str(&json).unwrap();
    assert_eq!(back, diagnostics);
}

#[test]
fn secrets_never_leave_a_document() {
    let token = "hf_AbCdEfGhIjKlMnOpQrStUvWxYzAbCdEfGh";
    for text in [
        format!("name: a\nrun: x\nsecrets: {{T: {token}}}\n"),
        format!("name: {token}\nrun: x {token}\npriority: {token}\nqueue: {token}\nenv: {{{token}-: 1}}\n{token}: 1\n"),
        format!("name: a\nrun: x '{token}\n# {token}\n"),
    ] {
        let (diagnostics, drawn) = said(text.as_bytes());
        assert!(!diagnostics.is_empty());
        let json = serde_json::to_string(&diagnostics).unwrap();
        assert!(!drawn.to_lowercase().contains("abcdef") && !json.to_lowercase().contains("abcdef"), "{drawn}\n{json}");
    }
}

#[test]
fn a_canonical_document_is_checked_by_the_same_rules() {
    let mut spec = parse_job("job.yaml", b"name: a\nrun: python a.py\n", &Defaults::default()).unwrap().spec;
    assert_eq!(check_spec(&spec, &Defaults::default()), Ok(Vec::new()));
    spec.name = "A".into();
    spec.nodes.max = 0;
    let errors = check_spec(&spec, &Defaults::default()).unwrap_err();
    let fields: Vec<&str> = errors.iter().map(|d| d.field.as_str()).collect();
    assert_eq!(fields, ["name", "nodes.max"]);
}

#[test]
fn environments_are_read_by_the_same_rules() {
    let bad = "name: Torch\nversion: latest\npython: 3.11\nenv: {PET_X: 1, A: 2}\nrequirments: a.lock\n";
    let diagnostics = parse_environment("environment.yaml", bad.as_bytes(), Some("torch")).unwrap_err();
    let drawn = draw(&diagnostics, &Sources::single("environment.yaml", bad.as_bytes()));
    insta::with_settings!({omit_expression => true, prepend_module_to_snapshot => false}, {
        insta::assert_snapshot!("environment", drawn);
    });
    let good = "name: torch\nversion: 2\ndescription: x\npython: \">=3.11\"\nenv: {A: 1, B: \"\"}\n";
    let parsed = parse_environment("environment.yaml", good.as_bytes(), Some("torch")).unwrap();
    assert_eq!(parsed.description.requirements, "requirements.lock");
    assert_eq!(parsed.description.env["A"], "1");
    let renamed = parse_environment("environment.yaml", good.as_bytes(), Some("other")).unwrap_err();
    assert_eq!(renamed[0].code, DiagnosticCode::Conflict);
}
