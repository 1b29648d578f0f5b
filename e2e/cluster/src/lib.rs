//! A real Kubernetes on one machine, for tests: etcd, the control plane, and nodes with a kubelet and a containerd
//! each, as root on Linux, without Docker.
//!
//! Every node is a machine of its own as far as Kubernetes can see: it has its own network, processes, host name,
//! boot id and disk; its GPUs are offered by a device plugin and may fail; its cable can be cut; it can lose its
//! power. What a test sees is therefore what Kubernetes does, not what a mock believes.
//!
//! Invariants: nothing of a cluster outlives the process that started it, however that ends, but files and empty
//! control groups, which the next start removes. The host gets one network device and no other change.

pub mod binaries;
mod cgroup;
mod control;
pub mod images;
mod instance;
mod node;
mod pki;
mod run;
mod space;
pub mod versions;

use crate::binaries::Binary;
use crate::control::{Control, REGISTRY};
use crate::instance::Instance;
pub use crate::node::Node;
use crate::node::lock;
use crate::pki::Authority;
pub use crate::run::until;
use crate::run::which;
use anyhow::{Context as _, Result, bail};
pub use aviflow_image::{Registry, oci};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Programs that are not built here, and Debian's packages of them.
const PROGRAMS: [(&str, &str); 9] = [
    ("containerd", "containerd"),
    ("ctr", "containerd"),
    ("runc", "runc"),
    ("ip", "iproute2"),
    ("iptables", "iptables"),
    ("openssl", "openssl"),
    ("docker-registry", "docker-registry"),
    ("unshare", "util-linux"),
    ("nsenter", "util-linux"),
];

/// What cluster is started.
#[derive(Clone, Debug)]
pub struct Options {
    /// Its nodes.
    pub nodes: Vec<NodeOptions>,
    /// Images that every node has from the start: archives, see [`images`].
    pub images: Vec<PathBuf>,
    /// Whether the disks of nodes are in this machine's memory. They are faster by far, and images and what pods
    /// write must fit into half of the memory.
    pub in_memory: bool,
    /// Further flags of kube-apiserver.
    pub apiserver_args: Vec<String>,
    /// Further flags of kube-scheduler.
    pub scheduler_args: Vec<String>,
    /// Whether there are kube-controller-manager and kube-scheduler.
    pub controllers: bool,
    /// How long a silent node counts as ready. Kubernetes' own default is 50 s.
    pub node_grace: Duration,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            nodes: ["hgx0", "hgx1"].map(NodeOptions::new).into(),
            images: Vec::new(),
            in_memory: true,
            apiserver_args: Vec::new(),
            scheduler_args: Vec::new(),
            controllers: true,
            // Leases are renewed each second, so this is ten in a row missed by a busy machine.
            node_grace: Duration::from_secs(10),
        }
    }
}

/// A node that a cluster has.
#[derive(Clone, Debug)]
pub struct NodeOptions {
    /// Its name, a DNS label.
    pub name: String,
    /// How many `nvidia.com/gpu` it has.
    pub gpus: u32,
    /// Its labels, beside Kubernetes' own.
    pub labels: BTreeMap<String, String>,
    /// Whether it is there from the start, or only after [`Node::add`].
    pub present: bool,
}

impl NodeOptions {
    /// A node with 8 GPUs that is there from the start.
    pub fn new(name: &str) -> NodeOptions {
        NodeOptions { name: name.to_owned(), gpus: 8, labels: BTreeMap::new(), present: true }
    }
}

/// What the parts of a cluster share.
struct Site {
    options: Options,
    authority: Authority,
    kubectl: Kubectl,
    /// The image of pods' sandboxes.
    pause: PathBuf,
    control: Mutex<Control>,
    // Last: dropped, it removes all that is left, and gives up the lock on it.
    instance: Instance,
}

/// A running cluster. It ends when this is dropped.
pub struct Cluster {
    nodes: Vec<Node>,
    site: Arc<Site>,
}

impl Cluster {
    /// Starts a cluster, and waits until its nodes are ready and offer their GPUs.
    ///
    /// What a cluster left whose process was killed is removed first.
    ///
    /// # Errors
    /// If this is not Linux or the user not root, if a program is missing, or if a part of the cluster fails; the
    /// error quotes the end of its log.
    pub fn start(options: Options) -> Result<Cluster> {
        check_machine()?;
        check_names(&options.nodes)?;
        for binary in Binary::CLUSTER {
            binary.path()?;
        }
        let pause = images::pause()?;
        let instance = Instance::take(options.in_memory)?;
        let authority = Authority::make(&instance.folder().join("pki"))?;
        let server = format!("https://{}", instance.control());
        let config = authority.kubeconfig(&server, "admin", &["system:masters"])?;
        let kubectl = Kubectl::new(config, instance.folder())?;
        let control = Control::start(&instance, &authority, &kubectl.config, &options)?;
        let control = Mutex::new(control);
        let site = Arc::new(Site { options, authority, kubectl, pause, control, instance });
        let nodes = site.options.nodes.iter().enumerate();
        let nodes = nodes.map(|(index, node)| Node::new(Arc::clone(&site), index, node.clone())).collect();
        let cluster = Cluster { nodes, site };
        cluster.bring_up().with_context(|| format!("logs are in {}", cluster.keep_logs().display()))?;
        Ok(cluster)
    }

    /// Everything at once that can be: the nodes' containerd beside the apiserver, then all that needs it.
    fn bring_up(&self) -> Result<()> {
        let present: Vec<&Node> =
            self.nodes.iter().zip(&self.site.options.nodes).filter(|(_, o)| o.present).map(|(node, _)| node).collect();
        std::thread::scope(|scope| {
            let boots: Vec<_> = present.iter().map(|node| scope.spawn(|| node.boot())).collect();
            let ready = self.wait_apiserver();
            joined(boots)?;
            ready
        })?;
        if !self.site.options.controllers {
            return Ok(());
        }
        lock(&self.site.control).start_controllers()?;
        each(&present, |node| {
            node.start_kubelet()?;
            self.site.options.images.iter().try_for_each(|image| node.load(image))?;
            node.wait_ready()
        })?;
        // Without it no pod can be made in the namespace.
        until("the service account `default` is there", Duration::from_secs(60), || {
            lock(&self.site.control).check()?;
            Ok(self.site.kubectl.raw("/api/v1/namespaces/default/serviceaccounts/default").ok().map(|_| ()))
        })
    }

    /// Waits until the apiserver serves, without holding its lock in between: nodes need it to be plugged in.
    fn wait_apiserver(&self) -> Result<()> {
        until("the apiserver is ready", Duration::from_secs(120), || {
            lock(&self.site.control).check()?;
            Ok(self.site.kubectl.raw("/readyz").is_ok().then_some(()))
        })
    }

    /// A kubeconfig of an administrator.
    pub fn kubeconfig(&self) -> &Path {
        &self.site.kubectl.config
    }

    /// A kubeconfig of a user with a client certificate.
    ///
    /// # Errors
    /// If the certificate cannot be made.
    pub fn user(&self, name: &str, groups: &[&str]) -> Result<PathBuf> {
        self.site.authority.kubeconfig(&self.api_url(), name, groups)
    }

    /// A client certificate and its key, of an authority that is called as the cluster's and is not.
    ///
    /// # Errors
    /// If they cannot be made.
    pub fn stranger(&self, name: &str, groups: &[&str]) -> Result<(PathBuf, PathBuf)> {
        let pair = Authority::make(&self.folder().join("stranger"))?.client("stranger", name, groups)?;
        Ok((pair.certificate, pair.key))
    }

    /// The text of a kubeconfig with a context of a user with a token.
    pub fn kubeconfig_with(&self, context: &str, user: &str, token: &str) -> String {
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": context,
            "contexts": [{"name": context, "context": {"cluster": "test", "user": user}}],
            "clusters": [{"name": "test", "cluster": {
                "server": self.api_url(),
                "certificate-authority": self.ca(),
            }}],
            "users": [{"name": user, "user": {"token": token}}],
        });
        config.to_string()
    }

    /// The address of the apiserver.
    pub fn api_url(&self) -> String {
        format!("https://{}", self.site.instance.control())
    }

    /// The certificate authority of the apiserver, a PEM file.
    pub fn ca(&self) -> &Path {
        self.site.authority.certificate()
    }

    /// The address under which pods and nodes reach this machine, on which a test may listen.
    pub fn host_ip(&self) -> String {
        self.site.instance.host()
    }

    /// A folder that ends with the cluster. It has the same path on the host and on every node, so that as a
    /// `hostPath` it is storage that all nodes share.
    pub fn folder(&self) -> &Path {
        self.site.instance.folder()
    }

    /// kubectl as an administrator.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn kubectl(&self, args: &[&str]) -> Result<Output> {
        self.site.kubectl.run(args, None)
    }

    /// kubectl as an administrator, which must succeed; its standard output.
    ///
    /// # Errors
    /// If it ends with another code than 0; the error quotes its standard error.
    pub fn kubectl_ok(&self, args: &[&str]) -> Result<String> {
        self.site.kubectl.ok(args)
    }

    /// kubectl as an administrator, which is given `input` and must succeed; its standard output.
    ///
    /// # Errors
    /// If it ends with another code than 0; the error quotes its standard error.
    pub fn kubectl_with(&self, args: &[&str], input: &str) -> Result<String> {
        self.site.kubectl.checked(args, Some(input))
    }

    /// Applies a document, JSON or YAML.
    ///
    /// # Errors
    /// If the apiserver refuses it.
    pub fn apply(&self, document: &str) -> Result<()> {
        self.site.kubectl.checked(&["apply", "--filename=-"], Some(document)).map(|_| ())
    }

    /// What the apiserver says to GET, such as `/api/v1/pods`.
    ///
    /// # Errors
    /// If it does not answer with 200 and JSON, or text, which becomes a string.
    pub fn get(&self, path: &str) -> Result<Value> {
        self.site.kubectl.raw(path)
    }

    /// A node by its name.
    ///
    /// # Panics
    /// If there is none of that name in the options.
    pub fn node(&self, name: &str) -> &Node {
        let found = self.nodes.iter().find(|node| node.name() == name);
        found.unwrap_or_else(|| panic!("this cluster has no node `{name}`"))
    }

    /// All nodes, also those that are not there.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Imports an image on all nodes that are there, so that pods need not pull it.
    ///
    /// # Errors
    /// If it is no image.
    pub fn load(&self, image: &Path) -> Result<()> {
        let running: Vec<&Node> = self.nodes.iter().filter(|node| node.is_running()).collect();
        each(&running, |node| node.load(image))
    }

    /// The registry from which nodes pull.
    pub fn registry(&self) -> Registry {
        Registry::at(&format!("{}:{REGISTRY}", self.site.instance.control()), true)
    }

    /// Kills the apiserver.
    ///
    /// # Errors
    /// If it cannot be killed.
    pub fn stop_apiserver(&self) -> Result<()> {
        lock(&self.site.control).stop_apiserver()
    }

    /// Starts the apiserver again, and waits until it serves.
    ///
    /// # Errors
    /// If it does not become ready.
    pub fn start_apiserver(&self) -> Result<()> {
        lock(&self.site.control).start_apiserver()?;
        self.wait_apiserver()
    }

    /// Copies the logs to where they outlive the cluster, for who looks into a failure.
    pub fn keep_logs(&self) -> PathBuf {
        let folder = self.site.instance.folder();
        let kept = folder.with_extension("logs");
        let _ = std::fs::remove_dir_all(&kept);
        for from in std::iter::once(folder.join("control")).chain(self.nodes.iter().map(Node::folder)) {
            let to = kept.join(from.file_name().unwrap_or_default());
            let _ = std::fs::create_dir_all(&to);
            for entry in std::fs::read_dir(&from).into_iter().flatten().flatten() {
                if entry.path().extension().is_some_and(|extension| extension == "log") {
                    let _ = std::fs::copy(entry.path(), to.join(entry.file_name()));
                }
            }
        }
        kept
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the logs of the cluster are in {}", self.keep_logs().display());
        }
    }
}

/// kubectl with a kubeconfig.
struct Kubectl {
    program: PathBuf,
    config: PathBuf,
    cache: PathBuf,
}

impl Kubectl {
    fn new(config: PathBuf, folder: &Path) -> Result<Kubectl> {
        Ok(Kubectl { program: Binary::Kubectl.path()?, config, cache: folder.join("kubectl") })
    }

    fn run(&self, args: &[&str], input: Option<&str>) -> Result<Output> {
        use std::io::Write as _;
        use std::process::Stdio;
        let mut kubectl = Command::new(&self.program);
        kubectl.arg("--kubeconfig").arg(&self.config).arg("--cache-dir").arg(&self.cache).args(args);
        kubectl.stdin(if input.is_some() { Stdio::piped() } else { Stdio::null() });
        kubectl.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = kubectl.spawn().context("kubectl could not be started")?;
        if let (Some(input), Some(mut stdin)) = (input, child.stdin.take()) {
            stdin.write_all(input.as_bytes())?;
        }
        Ok(child.wait_with_output()?)
    }

    fn checked(&self, args: &[&str], input: Option<&str>) -> Result<String> {
        let out = self.run(args, input)?;
        if !out.status.success() {
            bail!("kubectl {} ({}): {}", args.join(" "), out.status, String::from_utf8_lossy(&out.stderr).trim());
        }
        Ok(String::from_utf8_lossy(&out.stdout).into_owned())
    }

    fn ok(&self, args: &[&str]) -> Result<String> {
        self.checked(args, None)
    }

    fn raw(&self, path: &str) -> Result<Value> {
        let text = self.ok(&["get", "--request-timeout=10s", "--raw", path])?;
        Ok(serde_json::from_str(&text).unwrap_or(Value::String(text)))
    }
}

/// Whether clusters can run here.
///
/// # Errors
/// Says what is missing and how to get it.
pub fn check_machine() -> Result<()> {
    if !cfg!(target_os = "linux") {
        bail!("clusters for tests need Linux: they are made of its namespaces");
    }
    if !rustix::process::geteuid().is_root() {
        bail!("clusters for tests need root: they make namespaces, network devices and control groups");
    }
    let missing: Vec<_> = PROGRAMS.iter().filter(|(program, _)| which(program).is_none()).collect();
    if !missing.is_empty() {
        let programs: Vec<_> = missing.iter().map(|(program, _)| *program).collect();
        let packages: Vec<_> = missing.iter().map(|(_, package)| *package).collect();
        bail!("this machine lacks {}\n  apt-get install {}", programs.join(", "), packages.join(" "));
    }
    Ok(())
}

/// Whether nodes can be called so: names are parts of paths and scripts, and addresses follow from places.
fn check_names(nodes: &[NodeOptions]) -> Result<()> {
    const MOST: usize = 100;
    anyhow::ensure!(nodes.len() <= MOST, "{} nodes; a cluster has addresses for {MOST}", nodes.len());
    for (at, node) in nodes.iter().enumerate() {
        let label = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        let fits = node.name.starts_with(|c: char| c.is_ascii_lowercase()) && node.name.chars().all(label);
        anyhow::ensure!(fits, "`{}` is no DNS label: use a-z, 0-9 and -", node.name);
        let twice = nodes[..at].iter().any(|other| other.name == node.name);
        anyhow::ensure!(!twice && node.name != "control", "the name `{}` is taken", node.name);
    }
    Ok(())
}

/// Does something on several nodes at once.
fn each(nodes: &[&Node], what: impl Fn(&Node) -> Result<()> + Sync) -> Result<()> {
    std::thread::scope(|scope| joined(nodes.iter().map(|node| scope.spawn(|| what(node))).collect()))
}

/// Waits for all threads, and returns the first error.
fn joined(threads: Vec<std::thread::ScopedJoinHandle<'_, Result<()>>>) -> Result<()> {
    let ends = threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
    ends.collect::<Vec<_>>().into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_have_names_that_fit_everywhere() {
        let check = |names: &[&str], expected: &str| {
            let nodes: Vec<_> = names.iter().map(|name| NodeOptions::new(name)).collect();
            let error = check_names(&nodes).err().map(|error| error.to_string()).unwrap_or_default();
            assert_eq!(error, expected);
        };
        check(&["hgx0", "a-1"], "");
        check(&["a b"], "`a b` is no DNS label: use a-z, 0-9 and -");
        check(&[""], "`` is no DNS label: use a-z, 0-9 and -");
        check(&["a", "b", "a"], "the name `a` is taken");
        check(&["control"], "the name `control` is taken");
    }
}
