//! The control plane as administrators run it: in a pod, installed by the chart or the manifest.

use crate::plane::{LONGEST, program};
use crate::said::{BY_STATE, partitions, printed};
use anyhow::{Context as _, Result, bail};
use aviflow_image::aviflow::Parts;
use aviflow_testcluster::binaries::Binary;
use aviflow_testcluster::{Cluster, until};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// Aviflow's own namespace.
pub const NAMESPACE: &str = "aviflow-system";

/// A file of `deploy/`.
pub fn deploy(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy").join(name)
}

/// Pushes the image of this project as one version of it; returns the reference by digest.
///
/// # Errors
/// If it cannot be made or pushed.
pub fn push(cluster: &Cluster, version: &str) -> Result<String> {
    push_programs(cluster, version, &program("AVIFLOW_BIN")?, &program("AVIFLOW_AGENT_BIN")?)
}

/// Pushes an image of other programs.
///
/// # Errors
/// If it cannot be made or pushed.
pub fn push_programs(cluster: &Cluster, version: &str, aviflow: &Path, agent: &Path) -> Result<String> {
    let folder = tempfile::tempdir()?;
    let archive = folder.path().join("aviflow.tar");
    let parts = Parts { aviflow, agent, version, revision: None, small: true };
    aviflow_image::aviflow::image(&parts)?.write(&format!("aviflow:{version}"), &archive)?;
    cluster.registry().push_tagged(&archive, "aviflow", version)
}

/// helm, which must succeed.
///
/// # Errors
/// If it ends with another code than 0; the error quotes what it said.
pub fn helm(cluster: &Cluster, args: &[&str]) -> Result<String> {
    let mut helm = Command::new(Binary::Helm.path()?);
    // What a person has set up for himself is not to be used here.
    let own = cluster.folder().join("helm");
    helm.env("HELM_CACHE_HOME", &own).env("HELM_CONFIG_HOME", &own).env("HELM_DATA_HOME", &own);
    helm.arg("--kubeconfig").arg(cluster.kubeconfig()).args(["--namespace", NAMESPACE]).args(args);
    let out = helm.stdin(Stdio::null()).output().context("helm could not be started")?;
    if !out.status.success() {
        bail!("`helm {}` ended with {}: {}", args.join(" "), out.status, String::from_utf8_lossy(&out.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&out.stdout).into_owned())
}

/// Installs the chart, or upgrades it, with an image by its digest and further values; waits until the Deployment is
/// available.
///
/// # Errors
/// If it does not become so; the error quotes what the control plane said.
pub fn install(cluster: &Cluster, image: &str, values: &[&str]) -> Result<()> {
    install_chart(cluster, &deploy("helm/aviflow"), image, values)
}

/// The same with the chart in another folder.
///
/// # Errors
/// If it does not become so; the error quotes what the control plane said.
pub fn install_chart(cluster: &Cluster, chart: &Path, image: &str, values: &[&str]) -> Result<()> {
    let (repository, digest) = image.split_once('@').context("the image has no digest")?;
    let chart = chart.display().to_string();
    let (repository, digest) = (format!("image.repository={repository}"), format!("image.digest={digest}"));
    let mut args = vec!["upgrade", "--install", "aviflow", &chart, "--set", &repository, "--set", &digest];
    args.extend(values.iter().flat_map(|value| ["--set", value]));
    helm(cluster, &args)?;
    rolled_out(cluster)
}

/// Waits until the Deployment has one pod, of its newest version, that is ready.
///
/// # Errors
/// If it does not become so; the error quotes what the control plane said.
pub fn rolled_out(cluster: &Cluster) -> Result<()> {
    let wait = ["rollout", "status", "deployment/aviflow", "-n", NAMESPACE, "--timeout=120s"];
    cluster.kubectl_ok(&wait).map(|_| ()).with_context(|| {
        let of = |args: &[&str]| cluster.kubectl(args).map(|out| String::from_utf8_lossy(&out.stdout).into_owned());
        let log = of(&["logs", "deployment/aviflow", "-n", NAMESPACE, "--all-containers"]);
        let pods = of(&["describe", "pods", "-n", NAMESPACE]);
        format!("{}\n{}", pods.unwrap_or_default(), log.unwrap_or_default())
    })?;
    // One that is ending is not counted.
    until("the pod before is gone", LONGEST, || Ok((pods(cluster)?.len() == 1).then_some(())))
}

/// The control plane's pods.
///
/// # Errors
/// If they cannot be read.
pub fn pods(cluster: &Cluster) -> Result<Vec<Value>> {
    let list = cluster.get(&format!("/api/v1/namespaces/{NAMESPACE}/pods"))?;
    Ok(list["items"].as_array().cloned().unwrap_or_default())
}

/// What the control plane in the pod has said.
///
/// # Errors
/// If it cannot be read.
pub fn log(cluster: &Cluster) -> Result<String> {
    cluster.kubectl_ok(&["logs", "deployment/aviflow", "-n", NAMESPACE])
}

/// A volume for the control plane, which keeps what is on it.
///
/// # Errors
/// If it cannot be made.
pub fn volume(cluster: &Cluster) -> Result<()> {
    let folder = cluster.folder().join("control-plane");
    fs::create_dir_all(&folder)?;
    let nodes: Vec<&str> = cluster.nodes().iter().map(aviflow_testcluster::Node::name).collect();
    let volume = json!({
        "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "aviflow"},
        "spec": {
            "capacity": {"storage": "50Gi"}, "accessModes": ["ReadWriteOnce"],
            "persistentVolumeReclaimPolicy": "Retain",
            // Unlike a hostPath, it is given to the group of the pod. All nodes see the same folder.
            "local": {"path": folder},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [
                {"key": "kubernetes.io/hostname", "operator": "In", "values": nodes},
            ]}]}},
        },
    });
    cluster.apply(&volume.to_string())
}

/// What the apiserver notes of the requests of the control plane in its pod.
pub struct Audit {
    folder: tempfile::TempDir,
}

impl Audit {
    /// Says what is to be noted.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn new() -> Result<Audit> {
        let audit = Audit { folder: tempfile::tempdir()? };
        let policy = json!({
            "apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"],
            "rules": [
                {"level": "Metadata", "users": [format!("system:serviceaccount:{NAMESPACE}:aviflow")]},
                {"level": "None"},
            ],
        });
        fs::write(audit.file("policy.json"), policy.to_string())?;
        Ok(audit)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The apiserver's flags for it.
    pub fn arguments(&self) -> Vec<String> {
        let (policy, log) = (self.file("policy.json"), self.file("log"));
        vec![
            format!("--audit-policy-file={}", policy.display()),
            format!("--audit-log-path={}", log.display()),
            "--audit-log-mode=blocking".to_owned(),
        ]
    }

    /// The requests since an instant, in whole seconds as objects have it.
    ///
    /// # Errors
    /// If the notes cannot be read.
    pub fn since(&self, instant: &str) -> Result<Vec<Value>> {
        let log = fs::read_to_string(self.file("log"))?;
        // The last line may be half written.
        let whole = log.rsplit_once('\n').map_or("", |(whole, _)| whole);
        let requests: Vec<Value> = whole.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
        let seconds = instant.trim_end_matches('Z');
        let late = |request: &Value| request["requestReceivedTimestamp"].as_str().is_some_and(|at| at >= seconds);
        Ok(requests.into_iter().filter(late).collect())
    }
}

/// Somebody with a ServiceAccount of a namespace, at a machine of his own.
pub struct Person {
    folder: tempfile::TempDir,
}

impl Person {
    /// Gives the account the rights of a member of the team and of who runs the platform, and a context that leads to
    /// the control plane through the apiserver.
    ///
    /// # Errors
    /// If something of it cannot be made.
    pub fn new(cluster: &Cluster, account: &str) -> Result<Person> {
        let subject = format!("--serviceaccount=default:{account}");
        cluster.kubectl_ok(&["create", "serviceaccount", account])?;
        cluster.kubectl_ok(&["create", "rolebinding", account, "--clusterrole=edit", &subject])?;
        cluster.kubectl_ok(&["create", "clusterrolebinding", account, "--clusterrole=aviflow-admin", &subject])?;
        let way = ["--verb=get,list", "--resource=services,pods"];
        cluster.kubectl_ok(&[&["create", "role", account, "-n", NAMESPACE], &way[..]].concat())?;
        let forward = json!([{"op": "add", "path": "/rules/-", "value": {
            "apiGroups": [""], "resources": ["pods/portforward"], "verbs": ["get", "create"]}}]);
        cluster.kubectl_ok(&["patch", "role", account, "-n", NAMESPACE, "--type=json", "-p", &forward.to_string()])?;
        cluster.kubectl_ok(&[
            "create",
            "rolebinding",
            account,
            "-n",
            NAMESPACE,
            &format!("--role={account}"),
            &subject,
        ])?;
        let token = cluster.kubectl_ok(&["create", "token", account, "--duration=24h"])?;
        Person::having(&cluster.kubeconfig_with("prod", account, token.trim()))
    }

    /// Somebody with this kubeconfig, whose current context leads to the control plane through the apiserver.
    ///
    /// # Errors
    /// If something of it cannot be made.
    pub fn having(kubeconfig: &str) -> Result<Person> {
        let person = Person { folder: tempfile::tempdir()? };
        let path = person.folder().join("kubeconfig");
        fs::write(&path, kubeconfig)?;
        person.ok(&["context", "set", "prod", "--kube", "--kubeconfig", &path.display().to_string()])?;
        person.ok(&["context", "use", "prod"])?;
        Ok(person)
    }

    /// A folder of his.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Runs a command of his.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn aviflow(&self, args: &[&str]) -> Result<Output> {
        let mut command = Command::new(program("AVIFLOW_BIN")?);
        command.env("AVIFLOW_HOME", self.folder().join("home"));
        command.env("AVIFLOW_CONFIG", self.folder().join("config.yaml")).env_remove("KUBECONFIG");
        Ok(command.args(args).stdin(Stdio::null()).output()?)
    }

    /// Runs a command that is to succeed, and returns what it printed.
    ///
    /// # Errors
    /// If it fails; the error quotes it.
    pub fn ok(&self, args: &[&str]) -> Result<String> {
        printed(args, &self.aviflow(args)?)
    }

    /// What a command says as JSON.
    ///
    /// # Errors
    /// If it fails or says something else.
    pub fn json(&self, args: &[&str]) -> Result<Value> {
        Ok(serde_json::from_str(&self.ok(&[args, &["-o", "json"]].concat())?)?)
    }

    /// The ledger sums to the capacity, to the millisecond.
    ///
    /// # Errors
    /// If it does not.
    pub fn balanced(&self) -> Result<()> {
        partitions(&self.json(&BY_STATE)?)
    }
}
