//! What a person sees: columns and explanations.

use crate::cluster::Cluster;
use serde_json::json;
use std::path::Path;

/// Compares with what is committed.
pub fn snapshot(name: &str, shown: &str) {
    insta::with_settings!({omit_expression => true, prepend_module_to_snapshot => false}, {
        insta::assert_snapshot!(name, shown);
    });
}

fn patch(cluster: &Cluster, what: &str, status: &serde_json::Value) {
    let patch = json!({"status": status}).to_string();
    let arguments: Vec<&str> = what.split(' ').collect();
    let said = cluster.run(
        "kubectl",
        "admin",
        &[&["patch"], &arguments[..], &["--subresource=status", "--type=merge", "-p", &patch]].concat(),
        "",
    );
    assert!(said.ok, "{}", said.err);
}

/// The age is the one thing that differs.
fn table(cluster: &Cluster, what: &str) -> String {
    let out = cluster.must("admin", &format!("get {what}"), "");
    let blank = |word: &str| {
        let age = word.strip_suffix('s').is_some_and(|n| n.bytes().all(|b| b.is_ascii_digit() || b == b'm'));
        if age && !word.is_empty() { "AGE".to_owned() } else { word.to_owned() }
    };
    let line = |line: &str| {
        let cells: Vec<String> = line.split("  ").map(str::trim).filter(|c| !c.is_empty()).map(blank).collect();
        cells.join(" | ")
    };
    format!("$ kubectl get {what}\n{}\n\n", out.lines().map(line).collect::<Vec<_>>().join("\n"))
}

/// The columns of each kind.
pub fn columns(cluster: &Cluster) {
    for (kind, name, spec) in [
        ("Queue", "language", json!({"parent": "research", "team": "language"})),
        (
            "Pool",
            "small",
            json!({"topology": {"levels": ["leaf"]}, "kubernetes": {"topologyKeys": ["example.com/leaf"]}}),
        ),
    ] {
        cluster.must("admin", "create -f -", &crate::refused::object(kind, name, &spec));
    }
    patch(
        cluster,
        "-n team tj to-nlp",
        &json!({
            "observedGeneration": 1, "phase": "Running", "queue": "nlp", "attempt": 2, "on": ["hgx-1", "hgx-2"], "jobName": "to-nlp-2",
            "jobId": 7, "submittedBy": "ann", "submitted": "2026-01-01T00:00:00Z", "counters": {"failures": 1, "nodeFailures": 0, "suspensions": 0, "unready": 0},
            "estimatedStart": {"p50": "2026-01-01T00:00:00Z"}, "step": 100, "lastCheckpoint": {"step": 90, "at": "2026-01-01T00:00:00Z"},
            "conditions": [{"type": "Running", "status": "True", "reason": "Up", "message": "every rank is up", "lastTransitionTime": "2026-01-01T00:00:00Z"}],
        }),
    );
    patch(
        cluster,
        "-n team tj to-default",
        &json!({"phase": "Queued", "queue": "default", "attempt": 0, "reason": "needs 8 GPUs, 4 are free"}),
    );
    patch(
        cluster,
        "avq language",
        &json!({"waiting": 3, "running": 2, "summary": "H100 12/32", "path": "research/nlp", "quotas": {"H100": {"used": 12, "guarantee": 32}}}),
    );
    patch(cluster, "avp small", &json!({"nodes": 2, "gpus": 16, "free": 4, "gpuTypes": {"H100": 16}}));
    let jobs = "tj -n team to-nlp to-default";
    let what = [jobs, "avq language", "avp small", "avenv a-1"];
    let wide = what.map(|what| table(cluster, &format!("{what} -o wide")));
    snapshot("columns", &format!("{}{}", table(cluster, jobs), wide.concat()));
    assert!(cluster.must("admin", "get aviflow -A", "").contains("trainingjob.aviflow.dev/to-nlp"), "the category");
    cluster.must("admin", "wait --for=condition=Running -n team tj/to-nlp --timeout=10s", "");
}

/// `kubectl explain` says of every key what it is.
pub fn explanations(cluster: &Cluster) {
    let mut shown = String::new();
    for what in
        ["trainingjob.spec.nodes", "trainingjob.spec.timeLimit", "queue.spec.quotas", "pool.spec.kubernetes.fabric"]
    {
        shown.push_str(&cluster.must("admin", &format!("explain {what} --api-version=aviflow.dev/v1alpha1"), ""));
    }
    snapshot("explanations", &shown);
    for kind in ["trainingjob", "queue", "pool", "environment"] {
        let all =
            cluster.must("admin", &format!("explain {kind} --recursive=false --api-version=aviflow.dev/v1alpha1"), "");
        assert!(!all.contains("<no description>"), "{kind}: {all}");
    }
    let spec = cluster.must("admin", "explain trainingjob.spec --api-version=aviflow.dev/v1alpha1", "");
    assert!(!spec.contains("<no description>"), "{spec}");
}

/// What the page for administrators shows is taken as it stands there.
pub fn documents(cluster: &Cluster) {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/admin/kubernetes.md");
    let page = std::fs::read_to_string(page).unwrap();
    cluster.must("admin", "create namespace nlp", "");
    let mut seen = 0;
    for block in page.split("```yaml\n").skip(1) {
        let text = block.split("```").next().unwrap();
        // Others are values of a chart.
        if !text.contains("apiVersion:") {
            continue;
        }
        cluster.must("admin", "apply --server-side --dry-run=server -f -", text);
        cluster.must("admin", "apply --server-side -f -", text);
        seen += 1;
    }
    assert_eq!(seen, 4);
    let may = |user: &str, group: &str| {
        cluster
            .kubectl("admin", &format!("auth can-i use queues.aviflow.dev/nlp --as {user} --as-group {group}"), "")
            .ok
    };
    assert!(may("ann", "team-nlp") && !may("ben", "team-vision"));
}
