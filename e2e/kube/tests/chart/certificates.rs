//! People with client certificates of the cluster, and no tokens.

use crate::World;
use anyhow::{Context as _, Result, ensure};
use aviflow_e2e_kube::chart::{self, NAMESPACE, Person};
use aviflow_e2e_kube::{LONGEST, tls};
use aviflow_testcluster::{Cluster, until};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

/// The group that may use the queue `nlp`, and what it may, as an administrator declares it.
const TEAM: &str = "team-nlp";

fn rights() -> Value {
    let group = "rbac.authorization.k8s.io";
    let rbac = format!("{group}/v1");
    let subjects = json!([{"apiGroup": group, "kind": "Group", "name": TEAM}]);
    let role = |kind: &str, name: &str| json!({"apiGroup": group, "kind": kind, "name": name});
    json!({"apiVersion": "v1", "kind": "List", "items": [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "nlp"}},
        {"apiVersion": rbac, "kind": "RoleBinding", "metadata": {"name": TEAM, "namespace": "nlp"},
         "roleRef": role("ClusterRole", "edit"), "subjects": subjects},
        {"apiVersion": rbac, "kind": "ClusterRole", "metadata": {"name": "use-nlp"},
         "rules": [{"apiGroups": ["aviflow.dev"], "resources": ["queues"], "resourceNames": ["nlp"],
                    "verbs": ["use"]}]},
        {"apiVersion": rbac, "kind": "ClusterRoleBinding", "metadata": {"name": "use-nlp"},
         "roleRef": role("ClusterRole", "use-nlp"), "subjects": subjects},
        // The way through the apiserver, as the documentation has it.
        {"apiVersion": rbac, "kind": "Role", "metadata": {"name": TEAM, "namespace": NAMESPACE},
         "rules": [{"apiGroups": [""], "resources": ["services"], "verbs": ["get"]},
                   {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]},
                   {"apiGroups": [""], "resources": ["pods/portforward"], "verbs": ["get", "create"]}]},
        {"apiVersion": rbac, "kind": "RoleBinding", "metadata": {"name": TEAM, "namespace": NAMESPACE},
         "roleRef": role("Role", TEAM), "subjects": subjects},
    ]})
}

pub fn people_come_with_certificates_of_the_cluster(world: &World) -> Result<()> {
    let World { person: ann, cluster, image, .. } = world;
    cluster.apply(&rights().to_string())?;
    for queue in ["nlp", "vision"] {
        let file = ann.folder().join(format!("{queue}.yaml"));
        fs::write(&file, format!("kind: Queue\nname: {queue}\n"))?;
        ann.ok(&["apply", "--file", &file.display().to_string()])?;
    }
    let kubeconfig = fs::read_to_string(cluster.user("dora", &[TEAM])?)?;
    ensure!(!kubeconfig.contains("token"), "she has a certificate alone");
    let dora = Person::having(&kubeconfig)?;
    let document = |queue: &str| {
        let file = dora.folder().join(format!("{queue}.yaml"));
        let text = format!("name: certified\nqueue: {queue}\nimage: {image}\nrun: echo hello\n");
        fs::write(&file, text).map(|()| file.display().to_string())
    };
    let (hers, other) = (document("nlp")?, document("vision")?);
    // The rights were given a moment ago, and a no is kept for five seconds.
    until("her rights are known", LONGEST, || {
        let out = dora.aviflow(&["-n", "nlp", "plan", &hers])?;
        let error = String::from_utf8_lossy(&out.stderr);
        ensure!(out.status.success() || error.contains("`dora` may not"), "{error}");
        Ok(out.status.success().then_some(()))
    })?;
    let said = dora.ok(&["-n", "nlp", "run", &hers])?;
    ensure!(said.contains("hello"), "{said}");
    let listed = dora.json(&["ls", "--all"])?;
    ensure!(listed[0]["user"] == "dora" && listed[0]["namespace"] == "nlp", "{listed}");
    let object = cluster.get("/apis/aviflow.dev/v1alpha1/namespaces/nlp/trainingjobs/certified")?;
    ensure!(object["metadata"]["annotations"]["aviflow.dev/submitter"] == "dora", "{object}");
    let out = dora.aviflow(&["-n", "nlp", "plan", &other])?;
    let error = String::from_utf8_lossy(&out.stderr);
    ensure!(!out.status.success() && error.contains("`dora` may not use queues.aviflow.dev vision"), "{error}");
    cluster.kubectl_ok(&["delete", "namespace", "nlp"])?;
    for queue in ["nlp", "vision"] {
        ann.ok(&["queue", "delete", queue, "--reason", "the test is over"])?;
    }
    Ok(())
}

pub fn a_certificate_of_another_authority_is_refused(world: &World) -> Result<()> {
    let World { cluster, .. } = world;
    let authority = tls::authority(cluster)?;
    let pods = chart::pods(cluster)?;
    let address = pods.first().and_then(|pod| pod["status"]["podIP"].as_str()).context("the pod has no address")?;
    let ask = |certificate: Option<(&Path, &Path)>, token: Option<&str>| {
        tls::get(&format!("{address}:8080"), authority.path(), certificate, token, "/v1/server")
    };
    let token = cluster.kubectl_ok(&["create", "token", "ann"])?;
    let (status, _) = ask(None, Some(token.trim()))?;
    ensure!(status == 200, "with a token alone: {status}");
    let (status, body) = ask(None, None)?;
    ensure!(status == 401, "with nothing: {status} {body}");
    // Of the groups of whom the apiserver lets do everything.
    let (certificate, key) = cluster.stranger("root", &["system:masters"])?;
    for token in [None, Some(token.trim())] {
        let (status, body) = ask(Some((&certificate, &key)), token)?;
        let why = "the client certificate is refused: it was not issued by an authority of this cluster's users";
        ensure!(status == 401 && body.contains(why), "token: {}: {status} {body}", token.is_some());
    }
    // One of the cluster that is for servers: that of a kubelet, for example.
    let (certificate, key) = server_certificate(cluster)?;
    let (status, body) = ask(Some((&certificate, &key)), None)?;
    ensure!(status == 401 && body.contains("does not name clientAuth"), "{status} {body}");
    Ok(())
}

fn server_certificate(cluster: &Cluster) -> Result<(std::path::PathBuf, std::path::PathBuf)> {
    let folder = cluster.ca().parent().context("the authority has a folder")?;
    let mut found = fs::read_dir(folder)?.flatten().map(|entry| entry.path());
    let is = |path: &std::path::PathBuf| path.to_string_lossy().ends_with("-server.crt");
    let certificate = found.find(is).context("no certificate of a server")?;
    let key = certificate.with_extension("key");
    Ok((certificate, key))
}
