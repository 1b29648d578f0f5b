//! What is installed on a cluster is made of what is here: definitions from the descriptions, the
//! manifest from the chart.
//!
//! `cargo xtask deploy` runs these tests with `UPDATE_SCHEMA=1`, which writes what they compare.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use aviflow_api::crd;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A file of `deploy/`.
fn deploy(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy").join(name)
}

fn committed(path: &Path, generated: &str) {
    if std::env::var_os("UPDATE_SCHEMA").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, generated).unwrap();
    }
    let there = std::fs::read_to_string(path).unwrap_or_default();
    assert!(there == generated, "{} is old; run `cargo xtask deploy`", path.display());
}

#[test]
fn the_committed_definitions_are_the_generated_ones() {
    let folder = deploy("helm/aviflow/files/crds");
    let definitions = crd::definitions();
    for (name, definition) in &definitions {
        committed(&folder.join(name), &crd::text(definition));
    }
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), definitions.len(), "a file that no definition makes");
}

/// The words that the control plane goes by are those of the chart.
#[test]
fn the_chart_has_the_words_of_the_program() {
    let chart = |name: &str| std::fs::read_to_string(deploy("helm/aviflow/templates").join(name)).unwrap();
    let (admission, rbac) = (chart("admission.yaml"), chart("rbac.yaml"));
    for word in [crd::SUBMITTER, crd::GROUP, crd::SUBMIT_AS, crd::USE] {
        assert!(admission.contains(&format!("\"{word}\"")), "{word}");
    }
    assert!(rbac.contains(&format!("patch, delete, {}]", crd::SUBMIT_AS)));
    assert!(rbac.contains(&format!("resources: [queues]\n    verbs: [{}]", crd::USE)));
    let label = format!("{}/", crd::GROUP);
    assert!(crd::JOB_LABEL.starts_with(&label) && admission.contains(&format!("key.startsWith(\"{label}\")")));
}

/// What helm makes of the chart with these values.
fn template(values: &str) -> String {
    let helm = std::env::var_os("AVIFLOW_KUBE_BIN").map_or("helm".into(), |bin| PathBuf::from(bin).join("helm"));
    let mut command = Command::new(helm);
    command.args(["template", "aviflow"]).arg(deploy("helm/aviflow"));
    // The version is of the oldest cluster that it is for, not of what helm was built with.
    command.args(["--namespace", "aviflow-system", "--kube-version", "1.36.0", "--set", values]);
    let out = command.output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap()
}

/// Who only looks and speaks no TLS has no authority, and may make none.
#[test]
#[ignore = "needs helm, in the folder AVIFLOW_KUBE_BIN or on the PATH"]
fn the_authority_has_rights_where_there_is_one() {
    for (values, expected) in [
        ("mode=schedule", true),
        ("mode=schedule,tls.enabled=false", true),
        ("mode=observe", true),
        ("mode=observe,tls.enabled=false", false),
    ] {
        let made = template(values);
        for right in ["resources: [secrets, configmaps]\n    verbs: [create]", "[aviflow-authority]", "[aviflow-ca]"] {
            assert_eq!(made.contains(right), expected, "{values}: {right}");
        }
        assert!(made.contains("resources: [leases]"), "{values}");
    }
}

/// The certificates that vouch for a database are where its address names them.
#[test]
#[ignore = "needs helm, in the folder AVIFLOW_KUBE_BIN or on the PATH"]
fn the_authorities_of_a_database_are_mounted() {
    let made = template("store.kind=postgres,store.postgres.caConfigMap=db-ca");
    assert!(made.contains("- {name: store-ca, mountPath: /etc/aviflow/store, readOnly: true}"));
    assert!(made.contains("- name: store-ca\n          configMap: {name: db-ca}"));
    for values in ["store.kind=postgres", "store.kind=sqlite,store.postgres.caConfigMap=db-ca"] {
        assert!(!template(values).contains("store-ca"), "{values}");
    }
}

/// One source for both ways to install.
#[test]
#[ignore = "needs helm, in the folder AVIFLOW_KUBE_BIN or on the PATH"]
fn the_manifest_is_the_chart_with_its_defaults() {
    let text = template("namespace.create=true");
    let head = "# Aviflow on Kubernetes, for `kubectl apply --server-side -f`. Made of deploy/helm/aviflow by\n\
                # `cargo xtask deploy`; what can be chosen is in its values.yaml.\n";
    // Helm leaves blank ends of lines where a template says nothing.
    let lines: Vec<&str> = text.lines().map(str::trim_end).collect();
    committed(&deploy("aviflow.yaml"), &format!("{head}{}\n", lines.join("\n").trim_end()));
}
