//! Documents of administrators: what they become, what is said about bad ones, and that they are read back.

use crate::draw;
use aviflow_api::admin::*;
use aviflow_api::diagnostic::{Diagnostic, DiagnosticCode};
use aviflow_api::duration::Duration;
use aviflow_api::file::{Defaults, Document, Priorities, parse_job};
use aviflow_api::schema;
use aviflow_core::model::{Policy, Pool, TimeSharing};
use aviflow_core::time::Span;
use proptest::collection::{btree_map, btree_set, vec};
use proptest::option::of;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::fmt::Write as _;

const GOOD: &str = include_str!("good/queues.yaml");

/// Bad files by name. Each is what somebody would write in good faith.
const BAD: &[(&str, &str)] = &[
    ("nothing", "# nothing yet\n---\n---\n"),
    ("a list", "- kind: Queue\n- name: a\n"),
    ("a queue without kind", "name: nlp\nquotas: {H100: {guarantee: 8}}\n---\nhalfLife: 7d\n---\nname: a\n"),
    ("a job", "name: a\nrun: python a.py\n---\nkind: Job\nname: a\nrun: x\n"),
    (
        "kinds",
        "kind: queue\nname: a\n---\nkind: ClusterQueue\nname: b\n---\nkind: Topology\n---\nkind: Team\n---\nkind:\n",
    ),
    ("an object of Kubernetes", "apiVersion: aviflow.dev/v1\nkind: Queue\nmetadata: {name: a}\nspec: {parent: b}\n"),
    (
        "keys of a queue",
        "kind: Queue\nname: a\ncohort: all\nquota: {H100: 8}\nusers: [ann]\ntimeLimit: 24h\nmax_priority: high\ncolour: red\n",
    ),
    (
        "quotas",
        "kind: Queue\nname: a\nquotas:\n  H100: 16\n  H200: {min: 8, max: 4}\n  L4: {guarantee: 16, limit: 8, weight: 0}\n  A 100: {guarantee: -1}\n  B200: [8]\n",
    ),
    (
        "values of a queue",
        "kind: Queue\nname: Research\nparent: all/research\nteam:\nstate: closed\nlend: yes\nsubmitters: [ann lee, ben, ben]\nhighestPriority: hihg\ndefaults: {timeLimit: 24, priority: urgentt, preemptible: no}\ntimeSharing: true\n",
    ),
    ("a path as name", "kind: Queue\nname: research/nlp\n"),
    ("its own parent", "kind: Queue\nname: a\nparent: a\n"),
    (
        "priorities",
        "kind: Queue\nname: a\nhighestPriority: normal\ndefaults: {priority: high}\n---\nkind: Queue\nname: b\nhighestPriority: low\n",
    ),
    (
        "no guarantee and not preemptible",
        "kind: Queue\nname: a\nquotas: {H100: {limit: 8}}\ndefaults: {preemptible: false}\n",
    ),
    (
        "time sharing",
        "kind: Queue\nname: a\ntimeSharing: {minimumRun: 2, level: 0s, aging: 48h}\n---\nkind: Pool\nname: p\ntimeSharing: always\n",
    ),
    (
        "twice",
        "kind: Queue\nname: a\n---\nkind: Pool\nname: a\n---\nkind: Queue\nname: a\nlend: false\n---\nkind: Policy\n---\nkind: Policy\npreemption: false\n",
    ),
    (
        "a cycle",
        "kind: Queue\nname: a\nparent: c\n---\nkind: Queue\nname: b\nparent: a\n---\nkind: Queue\nname: c\nparent: b\n",
    ),
    (
        "errors in several documents",
        "kind: Queue\nname: a\nstat: held\n---\nkind: Pool\nname: p\ntopolgy: {}\n---\nkind: Policy\nreservations: -1\nhalfLife: 7\n",
    ),
    (
        "levels",
        "kind: Pool\nname: p\ntopology: {levels: [node, leaf, leaf], domains: {leaf-1: node-1}}\n---\nkind: Pool\nname: q\ntopology: {levels: [], domains: {}}\n---\nkind: Pool\nname: r\ntopology: {domains: {leaf-1: node-1}}\n",
    ),
    (
        "too few levels",
        "kind: Pool\nname: p\ntopology:\n  levels: [leaf]\n  domains:\n    spine-1: {leaf-1: node-1, leaf-2: node-2}\n    leaf-3: node-3\n",
    ),
    (
        "too many levels",
        "kind: Pool\nname: p\ntopology:\n  levels: [leaf, spine]\n  domains:\n    spine-1: node-[1-8]\n    spine-2: {}\n    spine-3:\n      leaf-1:\n---\nkind: Pool\nname: q\ntopology: {levels: [leaf], domains: [node-1]}\n",
    ),
    (
        "nodes twice",
        "kind: Pool\nname: p\ntopology:\n  levels: [leaf]\n  domains:\n    leaf-1: node-[1-4]\n    leaf-2: [\"node-[4-8]\", \"node-[1-2]\", node-9, node-9]\n    leaf-3: [x, \"x,y\"]\n",
    ),
    (
        "domains twice",
        "kind: Pool\nname: p\ntopology:\n  levels: [leaf, spine]\n  domains:\n    spine-1: {leaf-1: a}\n    spine-2: {leaf-1: b}\n",
    ),
    (
        "ranges",
        "kind: Pool\nname: p\ntopology:\n  levels: [leaf]\n  domains:\n    leaf-1: node-[8-1]\n    leaf-2: [\"n[1-3\", \"n[a-b]\", \"a b\", \"m[1-9999999]\"]\n    leaf 3: z\n",
    ),
    (
        "brackets in a list",
        "kind: Pool\nname: p\ntopology:\n  levels: [leaf]\n  domains: {leaf-1: [node-[1-8], node-9]}\n---\nkind: Queue\nname: a\n\n",
    ),
    (
        "policy",
        "kind: Policy\nname: main\nhalfLife: 0s\nreservations: many\npreemption: maybe\nminRun: 5m\npatience: forever\n",
    ),
    (
        "kubernetes",
        "kind: Pool\nname: p\ntopology: {levels: [leaf, spine]}\nkubernetes:\n  nodeSelector: {pool: hgx, \"a b\": c}\n  gpuTypes: {H100: [A, B], H200: [B]}\n  topologyKeys: [example.com/leaf]\n  fabric: {env: {MASTER_ADDR: a}, capabilities: [CAP_IPC_LOCK, ipc], rdmaResources: {rdma/ib: 0}}\n  tolerations: [{value: a}, {operator: Exists, key: a, value: b}]\n  storage: {}\n  hostPaths: [mnt]\n  cpuPerGpu: 0.5\n",
    ),
    (
        "kubernetes and domains",
        "kind: Pool\nname: p\ntopology: {levels: [leaf], domains: {leaf-1: a}}\nkubernetes:\n  topologyKeys: [example.com/leaf]\n  storage: {claim: a, hostPath: /b}\n  runtimeClas: nvidia\n---\nkind: Pool\nname: q\nkubernetes: {topologyKeys: [a]}\n",
    ),
    ("a key of somebody", "kind: Queue\nname: a\nteam: hf_AbCdEfGhIjKlMnOpQrStUvWxYzAbCdEfGh\n"),
];

fn parse(text: &str) -> Result<AdminFile, String> {
    let parsed = parse_admin("queues.yaml", text.as_bytes(), &Priorities::default());
    parsed.map_err(|(sources, list)| draw(&list, &sources))
}

fn good(text: &str) -> AdminFile {
    parse(text).unwrap_or_else(|said| panic!("{text}\n{said}"))
}

fn snapshot(name: &str, shown: &str) {
    insta::with_settings!({omit_expression => true, prepend_module_to_snapshot => false}, {
        insta::assert_snapshot!(name, shown);
    });
}

#[test]
fn good_documents_become_canonical() {
    let file = good(GOOD);
    assert_eq!(file.warnings, []);
    let documents: Vec<&AdminDocument> = file.documents.iter().map(|d| &d.document).collect();
    snapshot("admin", &serde_json::to_string_pretty(&documents).unwrap());
    let ordered: Vec<String> = file.ordered(&Present::default()).iter().map(ToString::to_string).collect();
    assert_eq!(ordered, ["pool main", "the policy", "pool hgx", "queue research", "queue nlp", "queue vision"]);
}

#[test]
fn what_is_printed_is_read_back() {
    let documents: Vec<AdminDocument> = good(GOOD).documents.into_iter().map(|d| d.document).collect();
    let printed = print(&documents);
    snapshot("admin-printed", &printed);
    let again: Vec<AdminDocument> = good(&printed).documents.into_iter().map(|d| d.document).collect();
    assert_eq!(again, documents);
}

#[test]
fn every_bad_file_is_told_what_to_write() {
    let mut shown = String::new();
    for (name, text) in BAD {
        let (list, drawn) = match parse_admin("queues.yaml", text.as_bytes(), &Priorities::default()) {
            Ok(file) => (file.warnings.clone(), draw(&file.warnings, &file.sources)),
            Err((sources, list)) => (list.clone(), draw(&list, &sources)),
        };
        assert!(!list.is_empty(), "{name}: nothing was said");
        for d in &list {
            assert_ne!(d.code, DiagnosticCode::Internal, "{name}: {}", d.message);
            assert!(d.help.as_ref().is_some_and(|h| !h.is_empty()), "{name}: no help: {}", d.message);
            assert!(!d.message.ends_with('.') && !d.message.starts_with(char::is_uppercase), "{name}: {}", d.message);
        }
        assert!(!drawn.to_lowercase().contains("abcdef"), "{drawn}");
        writeln!(shown, "=== {name}\n{drawn}").unwrap();
    }
    snapshot("admin-bad", &shown);
}

#[test]
fn the_usual_figures_are_those_of_the_core() {
    let file =
        good("kind: Queue\nname: a\ntimeSharing: on\n---\nkind: Queue\nname: b\ntimeSharing: {}\n---\nkind: Policy\n");
    let usual = TimeSharingSpec::from(TimeSharing::on());
    for document in &file.documents {
        match &document.document {
            AdminDocument::Queue(queue) => assert_eq!(queue.time_sharing, Some(usual)),
            AdminDocument::Policy(policy) => assert_eq!(to_policy(policy), Policy::default()),
            AdminDocument::Pool(_) => panic!(),
        }
    }
    // What editors show as defaults.
    let schema = schema::admin();
    let policy = serde_json::to_value(from_policy(&Policy::default())).unwrap();
    for (pointer, figures) in [
        ("/allOf/0/then/properties/timeSharing/anyOf/1/properties", serde_json::to_value(usual).unwrap()),
        ("/allOf/2/then/properties", policy),
    ] {
        let properties = schema.pointer(pointer).unwrap();
        for (key, figure) in figures.as_object().unwrap() {
            assert_eq!(properties[key]["default"], *figure, "{pointer}/{key}");
        }
    }
}

#[test]
fn a_pool_becomes_the_domains_of_its_nodes() {
    let text = "kind: Pool\nname: p\ntopology:\n  levels: [leaf, spine]\n  domains:\n    s1: {l1: \"node-[1-2]\", l2: [node-3]}\n    s2: {l3: node-4}\n";
    let file = good(text);
    let AdminDocument::Pool(spec) = &file.documents[0].document else { panic!() };
    let pool = to_pool(spec);
    assert_eq!(pool.path("node-2", &[]), ["l1", "s1"]);
    assert_eq!(pool.path("node-4", &[]), ["l3", "s2"]);
    assert_eq!(pool.domains.len(), 4);
    assert_eq!(from_pool(&pool), *spec);
    let flat = Pool { name: "p".into(), ..Pool::default() };
    assert_eq!(from_pool(&flat).topology, None);
}

#[test]
fn a_queue_becomes_what_the_core_decides_by() {
    let file = good(GOOD);
    for document in &file.documents {
        let AdminDocument::Queue(spec) = &document.document else { continue };
        let queue = to_queue(spec, &Priorities::default());
        assert_eq!(from_queue(&queue, spec.team.as_deref(), &Priorities::default()), *spec);
    }
    let AdminDocument::Queue(nlp) = &file.documents[1].document else { panic!() };
    let queue = to_queue(nlp, &Priorities::default());
    assert_eq!((queue.highest_priority, queue.quotas["H100"].limit), (Some(100), Some(64)));
}

fn present() -> Present {
    let node = |name: &str, gpu_type: &str| PresentNode {
        name: name.into(),
        pool: "main".into(),
        gpu_type: gpu_type.into(),
        gpus: 8,
    };
    let AdminDocument::Queue(old) =
        &good("kind: Queue\nname: old\nquotas: {H100: {guarantee: 16, limit: 24}}\n").documents[0].document
    else {
        panic!()
    };
    Present {
        queues: vec![old.clone(), QueueSpec { name: "below".into(), parent: Some("old".into()), ..old.clone() }],
        nodes: ["node-1", "node-2", "node-3"]
            .map(|n| node(n, "H100"))
            .into_iter()
            .chain([node("l4-1", "L4")])
            .collect(),
        kubernetes: false,
    }
}

#[test]
fn documents_are_compared_with_what_there_is() {
    let mut shown = String::new();
    for text in [
        "kind: Queue\nname: child\nparent: new\n---\nkind: Queue\nname: new\n",
        "kind: Queue\nname: child\nparent: odl\n",
        "kind: Pool\nname: main\ntopology: {levels: [leaf]}\nkubernetes: {topologyKeys: [example.com/leaf]}\n",
        "kind: Queue\nname: old\nparent: below\n",
        "kind: Queue\nname: a\nquotas:\n  H10: {guarantee: 8}\n  H100: {guarantee: 16}\n",
        "kind: Queue\nname: a\nparent: below\nquotas: {H100: {guarantee: 32}, L4: {guarantee: 8, limit: 8}}\n",
        "kind: Queue\nname: a\nparent: old\nquotas: {H100: {limit: 32}}\n",
        "kind: Queue\nname: a\nparent: old\nquotas: {H100: {guarantee: 8}}\n---\nkind: Queue\nname: old\nquotas: {H100: {guarantee: 16, limit: 24}}\n",
        "kind: Queue\nname: below\nparent: old\nquotas: {H100: {limit: 8}}\n---\nkind: Queue\nname: c\nparent: below\nquotas: {H100: {guarantee: 12}}\n",
        "kind: Pool\nname: mian\n",
        "kind: Pool\nname: main\ntopology: {levels: [leaf], domains: {a: \"node-[1-5]\", b: [l4-1]}}\n",
        "kind: Pool\nname: main\ntopology: {levels: [leaf], domains: {a: node-1, b: [l4-1]}}\n",
    ] {
        let file = good(text);
        let said = file.check(&present());
        let (word, list) = match &said {
            Ok(list) => ("taken", list),
            Err(list) => ("refused", list),
        };
        writeln!(shown, "=== {word}\n{}\n{}", text.trim_end(), draw(list, &file.sources)).unwrap();
    }
    snapshot("admin-present", &shown);
}

/// What pages for administrators show as files is taken, and says what the page says.
#[test]
fn the_documents_of_the_pages_are_good() {
    let mut seen = 0;
    for page in ["queues", "topology", "maintenance"] {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../docs/admin/{page}.md"));
        let text = std::fs::read_to_string(&path).unwrap();
        for block in text.split("```yaml file=").skip(1) {
            let (name, rest) = block.split_once('\n').unwrap();
            let file = good(rest.split("```").next().unwrap());
            assert_eq!(file.warnings, [], "{page}: {name}");
            seen += 1;
            for document in &file.documents {
                if let AdminDocument::Policy(policy) = &document.document {
                    assert_eq!(to_policy(policy), Policy::default(), "{page}: {name}");
                }
            }
            if name == "queues.yaml" {
                let node = |n: u32| PresentNode {
                    name: format!("node-{n}"),
                    pool: "main".into(),
                    gpu_type: "H100".into(),
                    gpus: 8,
                };
                let present = Present {
                    queues: vec![QueueSpec::open("default")],
                    nodes: (1..=8).map(node).collect(),
                    kubernetes: false,
                };
                assert_eq!(file.check(&present), Ok(Vec::new()), "{page}");
            }
        }
    }
    assert_eq!(seen, 4);
}

#[test]
fn guarantees_are_given_up_before_they_are_got() {
    let order = |text: &str, present: &Present| -> Vec<String> {
        good(text).ordered(present).iter().filter_map(|d| d.name().map(str::to_owned)).collect()
    };
    let tree = |root: u32, a: u32, b: u32| {
        let queue = |name: &str, n: u32, parent: &str| {
            format!("kind: Queue\nname: {name}\n{parent}quotas: {{H100: {{guarantee: {n}}}}}\n---\n")
        };
        format!("{}{}{}", queue("b", b, "parent: root\n"), queue("a", a, "parent: root\n"), queue("root", root, ""))
    };
    let present = |text: &str| Present {
        queues: good(text)
            .documents
            .into_iter()
            .map(|d| match d.document {
                AdminDocument::Queue(queue) => queue,
                AdminDocument::Pool(_) | AdminDocument::Policy(_) => panic!(),
            })
            .collect(),
        ..Present::default()
    };
    let before = present(&tree(32, 16, 16));
    assert_eq!(order(&tree(32, 16, 16), &Present::default()), ["root", "b", "a"]);
    assert_eq!(order(&tree(64, 32, 32), &before), ["root", "b", "a"]);
    assert_eq!(order(&tree(16, 8, 8), &before), ["b", "a", "root"]);
    assert_eq!(order(&tree(32, 8, 24), &before), ["root", "a", "b"]);
}

#[test]
fn a_document_without_a_file_is_checked_by_the_same_rules() {
    let mut policy = from_policy(&Policy::default());
    assert_eq!(check_document(&AdminDocument::Policy(policy), &Priorities::default()), Ok(Vec::new()));
    policy.patience = Duration(Span(0));
    let said = check_document(&AdminDocument::Policy(policy), &Priorities::default()).unwrap_err();
    assert_eq!(said[0].field, "patience");
    let wrong = serde_json::json!({"kind": "Policy", "halfLive": "7d"});
    assert!(serde_json::from_value::<AdminDocument>(wrong).is_err());
}

#[test]
fn a_queue_fills_in_what_the_person_did_not_say() {
    let defaults = QueueDefaults {
        time_limit: Some(Duration(Span::minutes(60))),
        priority: Some("low".into()),
        preemptible: Some(false),
    };
    let mut parsed = parse_job("job.yaml", b"name: a\nrun: x\n", &Defaults::default()).unwrap();
    let filled = apply_queue_defaults(&mut parsed.spec, &parsed.places, &defaults);
    assert_eq!(filled, ["timeLimit", "priority", "preemptible"]);
    let spec = &parsed.spec;
    assert_eq!((spec.time_limit, spec.priority.as_str(), spec.preemptible), (defaults.time_limit, "low", false));
    // What stands in the file or among the options stays, also where it is the usual value.
    let mut document = Document::parse("job.yaml", b"name: a\nrun: x\npriority: normal\npreemptible: true\n").unwrap();
    document.apply_set("timeLimit=2h").unwrap();
    let mut parsed = document.read(&Defaults::default()).unwrap();
    let before = parsed.spec.clone();
    assert_eq!(apply_queue_defaults(&mut parsed.spec, &parsed.places, &defaults), [""; 0]);
    assert_eq!(parsed.spec, before);
}

#[test]
fn a_queue_says_whom_it_does_not_take() {
    let text = b"name: a\nrun: x\nqueue: nlp\npriority: urgent\n";
    let document = Document::parse("job.yaml", text).unwrap();
    let parsed = document.read(&Defaults::default()).unwrap();
    let queue = "kind: Queue\nname: nlp\nstate: draining\nsubmitters: [ann]\nhighestPriority: high\n";
    let AdminDocument::Queue(queue) = good(queue).documents[0].document.clone() else { panic!() };
    let said = check_queue(&parsed.spec, &queue, "ben", &Priorities::default());
    let placed: Vec<Diagnostic> = said.into_iter().map(|d| parsed.places.place(d, document.sources())).collect();
    snapshot("admin-refuses", &draw(&placed, document.sources()));
    let open = QueueSpec { state: QueueState::Open, highest_priority: None, ..queue };
    assert_eq!(check_queue(&parsed.spec, &open, "ann", &Priorities::default()), []);
}

fn structural(d: &Diagnostic) -> bool {
    use DiagnosticCode as Code;
    let by_schema =
        matches!(d.code, Code::UnknownKey | Code::MissingKey | Code::NoValue | Code::WrongType | Code::Unit);
    d.is_error() && by_schema
}

#[test]
fn the_schema_says_what_the_reader_says() {
    let schema = schema::admin();
    let validator = jsonschema::validator_for(&schema).unwrap();
    let each = |text: &str| -> Option<Vec<bool>> {
        let mut sources = aviflow_api::source::Sources::default();
        let roots = aviflow_api::yaml::parse_stream(&mut sources, "x", text.as_bytes()).ok()?;
        Some(roots.iter().map(|root| validator.is_valid(&root.to_json())).collect())
    };
    assert_eq!(each(GOOD), Some(vec![true; 6]));
    let mut seen = 0;
    for (name, text) in BAD {
        let Some(valid) = each(text) else { continue };
        match parse_admin("queues.yaml", text.as_bytes(), &Priorities::default()) {
            Ok(_) => assert!(valid.iter().all(|v| *v), "{name}: the schema is stricter"),
            Err((_, list)) if list.iter().any(structural) => {
                seen += 1;
                assert!(valid.iter().any(|v| !v), "{name}: the schema takes it");
            }
            Err(_) => {}
        }
    }
    assert!(seen > 8, "{seen}");
}

prop_compose! {
    fn sharing()(enabled in any::<bool>(), a in 1..1_000_000_000_i64, b in 1..1_000_000_000_i64, c in 1..1_000_000_000_i64) -> TimeSharingSpec {
        TimeSharingSpec { enabled, minimum_run: Duration(Span(a)), level: Duration(Span(b)), ageing: Duration(Span(c)) }
    }
}

prop_compose! {
    fn queue()(
        name in "[a-z0-9]([-a-z0-9]{0,20}[a-z0-9])?", parent in of("p-[a-z]{1,5}"), team in of("\\PC{0,10}[a-zA-Z]"),
        state in prop_oneof![Just(QueueState::Open), Just(QueueState::Held), Just(QueueState::Draining)],
        quotas in btree_map("[A-Z0-9]{1,6}", (0..1000_u32, of(0..1000_u32), 1..1000_u32), 0..4),
        bools in any::<(bool, bool, bool)>(), limit in of(1..1_000_000_000_i64), preemptible in of(any::<bool>()),
        priority in of(0..4_usize), submitters in btree_set("[a-z0-9@.:]{1,8}", 0..4), time_sharing in of(sharing()),
    ) -> QueueSpec {
        let names = ["low", "normal", "high", "urgent"];
        let quota = |(guarantee, more, weight): (u32, Option<u32>, u32)| {
            QuotaSpec { guarantee, limit: more.map(|m| guarantee + m), weight }
        };
        QueueSpec {
            name, parent, team, state,
            quotas: quotas.into_iter().map(|(k, q)| (k, quota(q))).collect(),
            lend: bools.0, borrow: bools.1, reclaim: bools.2,
            defaults: QueueDefaults {
                time_limit: limit.map(|l| Duration(Span(l))),
                priority: priority.map(|p| names[p].into()),
                preemptible,
            },
            highest_priority: priority.map(|p| names[(p + 1).min(3)].into()),
            submitters: submitters.into_iter().collect(),
            time_sharing,
        }
    }
}

prop_compose! {
    fn pool()(tree in btree_map("s[0-9]{1,3}", btree_set("[a-z]{1,3}-[0-9]{1,3}", 1..6), 0..5), time_sharing in of(sharing())) -> PoolSpec {
        let mut taken = std::collections::BTreeSet::new();
        let mut domains = BTreeMap::new();
        for (i, (spine, nodes)) in tree.into_iter().enumerate() {
            let own: Vec<String> = nodes.into_iter().filter(|n| taken.insert(n.clone())).collect();
            if !own.is_empty() {
                let short = ranges::compress(own.iter().map(String::as_str));
                let leaf = BTreeMap::from([(format!("l{i}"), Domain::Nodes(short))]);
                domains.insert(spine, Domain::Domains(leaf));
            }
        }
        let levels = vec!["leaf".to_owned(), "spine".to_owned()];
        let topology = (!domains.is_empty()).then_some(TopologySpec { levels, domains });
        PoolSpec { name: "p".into(), topology, time_sharing, kubernetes: None }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn documents_are_read_back_from_their_files(queue in queue(), pool in pool()) {
        let documents = [AdminDocument::Queue(queue.clone()), AdminDocument::Pool(pool.clone())];
        let text = print(&documents);
        let file = parse_admin("x.yaml", text.as_bytes(), &Priorities::default());
        let file = file.map_err(|(s, e)| TestCaseError::fail(format!("{text}\n{}", draw(&e, &s))))?;
        let again: Vec<AdminDocument> = file.documents.into_iter().map(|d| d.document).collect();
        prop_assert_eq!(&again[..], &documents[..]);
        prop_assert!(check_document(&documents[0], &Priorities::default()).is_ok());
        // What the core keeps of it is enough to write it again.
        let core = to_queue(&queue, &Priorities::default());
        prop_assert_eq!(from_queue(&core, queue.team.as_deref(), &Priorities::default()), queue);
        prop_assert_eq!(from_pool(&to_pool(&pool)), pool);
        prop_assert!(documents.iter().all(|d| jsonschema::is_valid(&schema::admin(), &serde_json::to_value(d).unwrap())));
    }

    #[test]
    fn no_text_breaks_the_reader(text in "((kind: (Queue|Pool|Policy)|name: a|topology:|levels|domains|quotas|---|\\PC{1,3})[-:,\\[\\]{} \n]{0,3}){0,20}") {
        let _ = parse_admin("x", text.as_bytes(), &Priorities::default());
    }

    #[test]
    fn expanding_ends(text in "[a-z0-9,\\[\\]-]{0,30}") {
        let _ = ranges::expand(&text);
    }

    #[test]
    fn any_list_of_texts_is_no_matter(names in vec("[a-z0-9.-]{0,12}", 0..20)) {
        let _ = ranges::compress(names.iter().map(String::as_str));
    }
}
