//! The definitions, policies and roles, tried on a real API server.
//!
//! `AVIFLOW_KUBE_BIN` is a folder with etcd, kube-apiserver, kubectl and helm; `cargo xtask test kube` makes it.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod access;
mod cluster;
mod objects;
mod refused;
mod shown;

use cluster::Cluster;
use std::path::{Path, PathBuf};

/// The plain manifest.
fn manifest() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/aviflow.yaml")
}

/// One API server for everything, as its start is what takes the time.
#[test]
#[ignore = "needs AVIFLOW_KUBE_BIN, a folder with etcd, kube-apiserver, kubectl and helm"]
fn a_real_api_server_takes_it_all() {
    let bin = std::env::var_os("AVIFLOW_KUBE_BIN").map(PathBuf::from);
    let mut cluster = Cluster::start(&bin.expect("AVIFLOW_KUBE_BIN names the folder of the binaries"));
    install(&mut cluster);
    refused::jobs(&cluster);
    refused::administrators(&cluster);
    refused::changes(&cluster);
    objects::what_the_api_makes_is_taken_and_read_again(&cluster);
    objects::what_a_file_may_say_an_object_may(&cluster);
    access::queues(&cluster);
    access::submitters(&cluster);
    access::pods(&cluster);
    access::roles(&cluster);
    shown::columns(&cluster);
    shown::explanations(&cluster);
    shown::documents(&cluster);
    uninstall(&cluster);
}

/// A chart that goes leaves the definitions, every job, and the volume.
fn uninstall(cluster: &Cluster) {
    let chart = manifest().with_file_name("helm/aviflow").display().to_string();
    let helm = |arguments: &[&str]| {
        let said = cluster.run("helm", "admin", &[arguments, &["--namespace", "aviflow-system"]].concat(), "");
        assert!(said.ok, "helm {arguments:?}: {}", said.err);
    };
    let jobs = || cluster.must("admin", "get tj -A -o name", "");
    let before = jobs();
    assert!(before.contains("to-nlp"), "{before}");
    helm(&["install", "aviflow", &chart, "--take-ownership"]);
    helm(&["upgrade", "aviflow", &chart, "--set", "defaultQueue=nlp"]);
    let policy = cluster.get("validatingadmissionpolicy aviflow-trainingjobs").to_string();
    assert!(policy.contains(r#"object.spec.queue : \"nlp\""#), "{policy}");
    helm(&["uninstall", "aviflow"]);
    assert!(!cluster.kubectl("admin", "get clusterrole aviflow-control-plane", "").ok, "nothing was uninstalled");
    assert_eq!(jobs(), before);
    cluster.must("admin", "-n aviflow-system get pvc aviflow", "");
}

/// The manifest is taken as it is, twice, without a warning; and so is the chart.
fn install(cluster: &mut Cluster) {
    let path = manifest().display().to_string();
    for _ in 0..2 {
        let said = cluster.kubectl("admin", &format!("apply --server-side -f {path}"), "");
        assert!(said.ok, "{}\n{}", said.out, said.err);
        assert!(!said.err.to_lowercase().contains("warning"), "{}", said.err);
    }
    for kind in ["trainingjobs", "queues", "pools", "environments"] {
        let found = cluster.get(&format!("crd {kind}.aviflow.dev"));
        let conditions = found["status"]["conditions"].as_array().unwrap();
        let holds = |kind: &str| conditions.iter().any(|c| c["type"] == kind && c["status"] == "True");
        assert!(!holds("NonStructuralSchema"), "{kind}: {conditions:?}");
    }
    cluster.until("the kinds are served", |c| c.kubectl("admin", "get tj,avq,avp,avenv", "").ok);
    cluster.user("nobody", "/CN=nobody");
    cluster.must("admin", "apply -f -", BIND_NOBODY);
    cluster.until("the policies hold", |c| {
        let forged = "apiVersion: aviflow.dev/v1alpha1\nkind: TrainingJob\nmetadata: {name: a, namespace: default, annotations: {aviflow.dev/submitter: x}}\nspec: {run: [a], queue: q}\n";
        let stamped = c.kubectl("admin", "create --dry-run=server -o yaml -f -", &forged.replace(", annotations: {aviflow.dev/submitter: x}", ""));
        stamped.out.contains("aviflow.dev/submitter: admin") && c.kubectl("nobody", "create --dry-run=server -f -", forged).err.contains("may not use queue")
    });
    let chart = manifest().with_file_name("helm/aviflow").display().to_string();
    let said = cluster.run(
        "helm",
        "admin",
        &["install", "again", &chart, "--dry-run=server", "--namespace", "other", "--take-ownership"],
        "",
    );
    assert!(said.ok, "{}", said.err);
    for (values, told) in [
        ("replicas=2", "two replicas cannot share an SQLite file"),
        ("replicas=2,store.kind=postgres", "write storage.accessModes: [ReadWriteMany]"),
        ("mode=observ", "write schedule or observe"),
        ("store.kind=mysql", "write sqlite or postgres"),
    ] {
        let said =
            cluster.run("helm", "admin", &["template", "a", &chart, "--kube-version", "1.36.0", "--set", values], "");
        assert!(!said.ok && said.err.contains(told), "{values}: {}", said.err);
    }
    let observing = cluster.run(
        "helm",
        "admin",
        &["template", "a", &chart, "--kube-version", "1.36.0", "--set", "mode=observe", "-s", "templates/rbac.yaml"],
        "",
    );
    for verb in ["delete", "patch", "submit-as", "update"] {
        let role = observing.out.split("kind: ClusterRoleBinding").next().unwrap();
        assert!(observing.ok && !role.contains(verb), "an observer may {verb}: {role}");
    }
    let two = [
        "template",
        "a",
        &chart,
        "--kube-version",
        "1.36.0",
        "--set",
        "replicas=2,store.kind=postgres,storage.accessModes={ReadWriteMany}",
        "-s",
        "templates/deployment.yaml",
    ];
    let two = cluster.run("helm", "admin", &two, "");
    assert!(
        two.out.contains("topologySpreadConstraints") && two.out.contains("AVIFLOW_STORE"),
        "{}{}",
        two.out,
        two.err
    );
}

/// Somebody who may do everything with jobs in one namespace, and nothing else.
const BIND_NOBODY: &str = "
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: nobody, namespace: default}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: aviflow-user}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: nobody}]
";
