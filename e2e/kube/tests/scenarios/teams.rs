//! Who may do what through the control plane's own API.

use crate::World;
use anyhow::{Context as _, Result, ensure};
use aviflow_testcluster::until;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

const LONGEST: Duration = Duration::from_secs(60);

/// Two teams with a namespace and a queue each, and each with somebody who may use no other.
const TEAMS: [&str; 2] = ["nlp", "vision"];

/// The accounts and rights of a team, as an administrator declares them.
fn team(name: &str) -> Value {
    let rbac = |kind: &str| json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": kind});
    let with = |mut object: Value, fields: Value| {
        for (key, value) in fields.as_object().into_iter().flatten() {
            object[key] = value.clone();
        }
        object
    };
    let subject = json!([{"kind": "ServiceAccount", "name": "person", "namespace": name}]);
    let role = format!("use-{name}");
    let group = "rbac.authorization.k8s.io";
    json!({"apiVersion": "v1", "kind": "List", "items": [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}},
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "person", "namespace": name}},
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "aviflow-job", "namespace": name}},
        with(rbac("RoleBinding"), json!({
            "metadata": {"name": "edit", "namespace": name},
            "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": "edit"}, "subjects": subject})),
        with(rbac("ClusterRole"), json!({
            "metadata": {"name": role},
            "rules": [{"apiGroups": ["aviflow.dev"], "resources": ["queues"], "resourceNames": [name],
                       "verbs": ["use"]}]})),
        with(rbac("ClusterRoleBinding"), json!({
            "metadata": {"name": role},
            "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": role}, "subjects": subject})),
        // Whatever somebody gives to job pods, their token is nobody's.
        with(rbac("ClusterRoleBinding"), json!({
            "metadata": {"name": format!("job-{name}")},
            "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": "cluster-admin"},
            "subjects": [{"kind": "ServiceAccount", "name": "aviflow-job", "namespace": name}]})),
    ]})
}

/// A person with his own configuration, and nothing of the control plane's folder.
struct Person<'a> {
    folder: &'a Path,
    namespace: &'a str,
}

impl Person<'_> {
    fn aviflow(&self, args: &[&str]) -> Result<Output> {
        let program = std::env::var_os("AVIFLOW_BIN").context("AVIFLOW_BIN is not set: run `cargo xtask test kube`")?;
        let mut command = Command::new(program);
        command.env("AVIFLOW_HOME", self.folder.join("home")).env("AVIFLOW_CONFIG", self.folder.join("config.yaml"));
        Ok(command.env("USER", "root").args(args).output()?)
    }

    fn ok(&self, args: &[&str]) -> Result<String> {
        let out = self.aviflow(args)?;
        let error = String::from_utf8_lossy(&out.stderr);
        ensure!(out.status.success(), "`aviflow {}` of {}: {error}", args.join(" "), self.namespace);
        Ok(String::from_utf8_lossy(&out.stdout).into_owned())
    }

    /// What a command that is to fail says.
    fn refused(&self, args: &[&str]) -> Result<String> {
        let out = self.aviflow(args)?;
        ensure!(!out.status.success(), "`aviflow {}` of {} was to be refused", args.join(" "), self.namespace);
        Ok(String::from_utf8_lossy(&out.stderr).into_owned())
    }
}

pub fn each_team_uses_its_queue_and_sees_its_jobs(world: &mut World) -> Result<()> {
    let server = fs::read_to_string(world.plane.home().join("home/server.json"))?;
    let server: Value = serde_json::from_str(&server)?;
    let url = server["url"].as_str().context("server.json has an address")?;
    let folders = [tempfile::tempdir()?, tempfile::tempdir()?];
    for name in TEAMS {
        world.cluster.apply(&team(name).to_string())?;
        let queue = folders[0].path().join(format!("{name}.yaml"));
        fs::write(&queue, format!("kind: Queue\nname: {name}\n"))?;
        world.plane.ok(&["apply", "--file", &queue.display().to_string()])?;
    }
    let people: Vec<Person<'_>> =
        TEAMS.iter().zip(&folders).map(|(namespace, folder)| Person { folder: folder.path(), namespace }).collect();
    for person in &people {
        let token = world.cluster.kubectl_ok(&["create", "token", "person", "-n", person.namespace])?;
        let file = person.folder.join("token");
        fs::write(&file, token)?;
        let file = file.display().to_string();
        person.ok(&["login", url, "--token-file", &file, "--name", "cluster", "-n", person.namespace])?;
        let job = format!("name: train\nqueue: {}\nimage: {}\nrun: echo hello\n", person.namespace, world.image);
        fs::write(person.folder.join("job.yaml"), job)?;
    }
    let [nlp, vision] = people.as_slice() else { anyhow::bail!("there are two teams") };
    for person in [nlp, vision] {
        let document = person.folder.join("job.yaml").display().to_string();
        // The rights were given a moment ago, and a no is kept for five seconds.
        until("his rights are known", LONGEST, || {
            let out = person.aviflow(&["plan", &document])?;
            let error = String::from_utf8_lossy(&out.stderr);
            ensure!(out.status.success() || error.contains("may not"), "{error}");
            Ok(out.status.success().then_some(()))
        })?;
        let said = person.ok(&["run", &document])?;
        ensure!(said.contains("hello"), "{said}");
        let listed: Value = serde_json::from_str(&person.ok(&["ls", "--all", "-o", "json"])?)?;
        let jobs = listed.as_array().context("a list")?;
        ensure!(jobs.len() == 1 && jobs[0]["namespace"] == person.namespace, "he sees his team's alone: {listed}");
        let submitter = format!("system:serviceaccount:{}:person", person.namespace);
        ensure!(jobs[0]["user"] == submitter.as_str(), "it is his, whatever his client says: {listed}");
        let path = format!("/apis/aviflow.dev/v1alpha1/namespaces/{}/trainingjobs/train", person.namespace);
        let object = world.cluster.get(&path)?;
        ensure!(object["metadata"]["annotations"]["aviflow.dev/submitter"] == submitter.as_str(), "{object}");
    }
    // Neither the other's queue, nor his namespace, nor his jobs.
    let document = nlp.folder.join("job.yaml").display().to_string();
    let said = vision.refused(&["plan", &document])?;
    ensure!(said.contains("use queues.aviflow.dev nlp"), "{said}");
    let said = nlp.refused(&["-n", "vision", "plan", &document])?;
    ensure!(said.contains("create trainingjobs.aviflow.dev in namespace vision"), "{said}");
    for (verb, right) in [
        ("show", "get trainingjobs.aviflow.dev in"),
        ("logs", "get trainingjobs.aviflow.dev/log in"),
        ("cancel", "delete trainingjobs.aviflow.dev in"),
    ] {
        let said = nlp.refused(&[verb, "vision/train"])?;
        ensure!(said.contains(right), "{verb}: {said}");
    }
    let said = nlp.refused(&["node", "cordon", "hgx0", "--reason", "test"])?;
    ensure!(said.contains("update nodes.aviflow.dev hgx0"), "{said}");
    // A job pod's token is nobody's, of either audience, though its account may everything.
    for audience in [&["--audience", "aviflow"][..], &[]] {
        let args = [&["create", "token", "aviflow-job", "-n", "nlp"][..], audience].concat();
        let file = nlp.folder.join("pod");
        fs::write(&file, world.cluster.kubectl_ok(&args)?)?;
        let said = nlp.refused(&["login", url, "--token-file", &file.display().to_string(), "--name", "pod"])?;
        ensure!(said.contains("does not know whose token this is"), "{said}");
    }
    for name in TEAMS {
        world.cluster.kubectl_ok(&["delete", "clusterrolebinding", &format!("use-{name}"), &format!("job-{name}")])?;
        world.cluster.kubectl_ok(&["delete", "clusterrole", &format!("use-{name}")])?;
        world.cluster.kubectl_ok(&["delete", "namespace", name])?;
        world.plane.ok(&["queue", "delete", name, "--reason", "the test is over"])?;
    }
    Ok(())
}
