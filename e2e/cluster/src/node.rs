//! A node: containerd, kubelet, kube-proxy and the plugin of its GPUs in a space of their own, like a machine.
//!
//! Its disk is a folder that outlives its death; what a machine keeps in memory (`/run`, the addresses of pods,
//! control groups) is gone with it. Each start has a boot id of its own.

use crate::binaries::Binary;
use crate::cgroup::Group;
use crate::control::{BRIDGE, REGISTRY};
use crate::run::{output, until, which};
use crate::space::{Plan, Process, Space};
use crate::{NodeOptions, Site};
use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// How long containerd, or a node, may take to be there. Seconds are usual; this is for a busy machine.
const LONGEST: Duration = Duration::from_secs(120);

/// The image of pods' sandboxes.
pub(crate) const PAUSE: &str = "aviflow.test/pause:1";

/// Settings of the kernel that kubelet changes. It gets copies: the machine's own stay as they are.
const TUNABLES: &str = "vm/overcommit_memory vm/panic_on_oom kernel/panic kernel/panic_on_oops \
                        kernel/keys/root_maxkeys kernel/keys/root_maxbytes";

/// One node of a cluster.
pub struct Node {
    options: NodeOptions,
    index: usize,
    // Before the site, which is removed with its last node.
    state: Mutex<State>,
    site: Arc<Site>,
}

#[derive(Default)]
struct State {
    running: Option<Running>,
    boot: u32,
}

struct Running {
    containerd: Process,
    plugin: Option<Process>,
    kubelet: Option<Process>,
    proxy: Option<Process>,
    boot_id: String,
    // Last: it ends all that is above.
    space: Space,
}

impl Node {
    pub(crate) fn new(site: Arc<Site>, index: usize, options: NodeOptions) -> Node {
        Node { options, index, site, state: Mutex::default() }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.options.name
    }

    /// Its address.
    pub fn address(&self) -> String {
        self.site.instance.node(self.index)
    }

    /// The UUID of one of its GPUs: always the same for a node's name and an index.
    pub fn gpu_uuid(&self, index: u32) -> String {
        gpu_uuid(self.name(), index)
    }

    /// Takes its network cable out: a partition. What runs on it goes on running.
    ///
    /// # Errors
    /// If the node is not running.
    pub fn cut(&self) -> Result<()> {
        self.cable("down")
    }

    /// Puts the cable back.
    ///
    /// # Errors
    /// If the node is not running.
    pub fn heal(&self) -> Result<()> {
        self.cable("up")
    }

    fn cable(&self, state: &str) -> Result<()> {
        let control = lock(&self.site.control);
        output(control.space().command("ip").args(["link", "set", &self.device(), state]))
            .with_context(|| format!("the cable of {} cannot be set {state}; is the node running?", self.name()))?;
        Ok(())
    }

    /// Kills the kubelet; pods go on running.
    ///
    /// # Errors
    /// If it cannot be killed.
    pub fn stop_kubelet(&self) -> Result<()> {
        let mut state = lock(&self.state);
        match state.running.as_mut().and_then(|running| running.kubelet.take()) {
            Some(mut kubelet) => kubelet.kill(),
            None => Ok(()),
        }
    }

    /// Starts the kubelet again.
    ///
    /// # Errors
    /// If the node is not running.
    pub fn start_kubelet(&self) -> Result<()> {
        let mut state = lock(&self.state);
        let Some(running) = state.running.as_mut() else { bail!("{} is not running; `start` it", self.name()) };
        if running.kubelet.is_none() {
            running.kubelet = Some(self.spawn_kubelet(&running.space)?);
        }
        if running.proxy.is_none() {
            running.proxy = Some(self.spawn_proxy(&running.space)?);
        }
        Ok(())
    }

    /// Kills the whole node at one instant, as a lost power supply does: kubelet, containerd, all containers.
    ///
    /// # Errors
    /// If something of it cannot be removed.
    pub fn kill(&self) -> Result<()> {
        let mut state = lock(&self.state);
        if let Some(mut running) = state.running.take() {
            running.space.end();
        }
        self.group()?.remove()
    }

    /// Boots the node after [`Node::kill`], with its disk as it was, and waits until it is ready.
    ///
    /// # Errors
    /// If it does not become ready.
    pub fn start(&self) -> Result<()> {
        self.boot()?;
        self.start_kubelet()?;
        self.wait_ready()
    }

    /// Kills the node, and takes it and its disk away for good: its object is deleted.
    ///
    /// # Errors
    /// If something of it cannot be removed.
    pub fn remove(&self) -> Result<()> {
        self.kill()?;
        self.site.kubectl.ok(&["delete", "node", self.name(), "--ignore-not-found"])?;
        let folder = self.folder();
        if folder.exists() {
            fs::remove_dir_all(&folder).with_context(|| format!("{} cannot be removed", folder.display()))?;
        }
        Ok(())
    }

    /// Adds the node after [`Node::remove`], or for the first time, with an empty disk but for the cluster's images;
    /// waits until it is ready.
    ///
    /// # Errors
    /// If it does not become ready.
    pub fn add(&self) -> Result<()> {
        self.boot()?;
        self.start_kubelet()?;
        self.site.options.images.iter().try_for_each(|image| self.load(image))?;
        self.wait_ready()
    }

    /// Makes a GPU healthy or unhealthy, as its plugin tells kubelet.
    ///
    /// # Errors
    /// If there is no such GPU.
    pub fn set_gpu_health(&self, index: u32, healthy: bool) -> Result<()> {
        anyhow::ensure!(index < self.options.gpus, "{} has {} GPUs, and no {index}", self.name(), self.options.gpus);
        let _state = lock(&self.state);
        let file = self.unhealthy();
        let text = fs::read_to_string(&file).unwrap_or_default();
        let uuid = self.gpu_uuid(index);
        let mut bad: Vec<&str> = text.lines().filter(|line| *line != uuid).collect();
        if !healthy {
            bad.push(&uuid);
        }
        // In one step: the plugin reads at any time.
        let new = file.with_extension("new");
        fs::write(&new, bad.iter().map(|line| format!("{line}\n")).collect::<String>())
            .with_context(|| format!("{} has no GPUs before it is added", self.name()))?;
        fs::rename(&new, &file)?;
        Ok(())
    }

    /// Its object, if it is there.
    ///
    /// # Errors
    /// If the apiserver does not answer.
    pub fn object(&self) -> Result<Option<Value>> {
        let nodes = self.site.kubectl.raw("/api/v1/nodes")?;
        let items = nodes["items"].as_array().cloned().unwrap_or_default();
        Ok(items.into_iter().find(|node| node["metadata"]["name"] == self.name()))
    }

    /// Whether its condition `Ready` is true.
    ///
    /// # Errors
    /// If the apiserver does not answer.
    pub fn ready(&self) -> Result<bool> {
        Ok(self.object()?.is_some_and(|node| is_ready(&node)))
    }

    /// How many GPUs it offers; unhealthy ones are not offered.
    ///
    /// # Errors
    /// If the apiserver does not answer.
    pub fn allocatable_gpus(&self) -> Result<u32> {
        Ok(self.object()?.map_or(0, |node| gpus(&node)))
    }

    /// Imports an image, so that pods need not pull it; all nodes at once: [`crate::Cluster::load`].
    ///
    /// # Errors
    /// If it is no image, or the node is not running.
    pub fn load(&self, image: &Path) -> Result<()> {
        let begin = self.ctr();
        let mut import = Command::new(begin.get_program());
        import.args(begin.get_args()).args(["images", "import"]).arg(image);
        output(&mut import).with_context(|| format!("{} on {}", image.display(), self.name()))?;
        Ok(())
    }

    /// A program that will run on the node, in its namespaces, outside of any pod.
    ///
    /// # Errors
    /// If the node is not running.
    pub fn command(&self, program: &str) -> Result<Command> {
        let state = lock(&self.state);
        let running = state.running.as_ref().with_context(|| format!("{} is not running", self.name()))?;
        Ok(running.space.command(program))
    }

    /// Whether its containerd runs, and images can be imported.
    pub(crate) fn is_running(&self) -> bool {
        lock(&self.state).running.is_some()
    }

    /// Everything but what needs the apiserver: kubelet and kube-proxy.
    pub(crate) fn boot(&self) -> Result<()> {
        let mut state = lock(&self.state);
        if state.running.is_some() {
            return Ok(());
        }
        state.boot += 1;
        let boot_id = uuid(&format!("boot/{}/{}/{}", std::process::id(), self.name(), state.boot));
        self.write_files(&boot_id)?;
        let setup = format!(
            "mount --make-rshared /\n\
             for f in {TUNABLES}; do t={folder}/tunables/$f; mkdir -p ${{t%/*}}; cat /proc/sys/$f > $t; \
             mount --bind $t /proc/sys/$f; done\n\
             mount --bind {folder}/boot-id /proc/sys/kernel/random/boot_id\n\
             for d in /run /var/lib /var/log; do mount -t tmpfs -o mode=755 node $d; done\n\
             mkdir /var/lib/kubelet /var/lib/cni /run/netns\n\
             mount --bind {folder}/kubelet /var/lib/kubelet\nmount --bind {folder}/log /var/log\n\
             echo 1 > /proc/sys/net/ipv4/ip_forward\nip link set lo up\n\
             # Answers of a pod on the same node go back through the address that was asked.\n\
             echo 1 > /proc/sys/net/bridge/bridge-nf-call-iptables\n",
            folder = self.folder().display(),
        );
        let pause = Binary::Pause.path()?;
        let group = self.group()?.child("system");
        let logs = self.folder();
        let space = Space::open(&Plan { name: self.name(), group, pause: &pause, setup: &setup, logs: &logs })?;
        self.plug(&space)?;

        let (socket, config) = (PathBuf::from(self.socket()), self.file("containerd.toml"));
        let containerd = which("containerd").context("no `containerd`")?;
        let mut containerd = space.spawn("containerd", &containerd, &["--config".to_owned(), config])?;
        until(&format!("containerd of {} answers", self.name()), LONGEST, || {
            containerd.check()?;
            Ok((socket.exists() && output(self.ctr().arg("version")).is_ok()).then_some(()))
        })?;
        self.load(&self.site.pause)?;
        let plugin = if self.options.gpus > 0 { Some(self.spawn_plugin(&space)?) } else { None };
        state.running = Some(Running { containerd, plugin, kubelet: None, proxy: None, boot_id, space });
        Ok(())
    }

    /// Waits until this boot's kubelet has said that the node is ready and offers its GPUs.
    pub(crate) fn wait_ready(&self) -> Result<()> {
        let healthy = self.options.gpus - u32::try_from(self.bad().lines().count())?;
        until(&format!("{} is ready with {healthy} GPUs", self.name()), LONGEST, || {
            let mut state = lock(&self.state);
            let running = state.running.as_mut().with_context(|| format!("{} was killed", self.name()))?;
            running.containerd.check()?;
            running
                .plugin
                .iter_mut()
                .chain(&mut running.kubelet)
                .chain(&mut running.proxy)
                .try_for_each(Process::check)?;
            let booted = |node: &Value| node["status"]["nodeInfo"]["bootID"] == running.boot_id.as_str();
            let node = self.object()?.filter(|node| booted(node) && is_ready(node) && gpus(node) == healthy);
            Ok(node.map(|_| ()))
        })
    }

    /// A cable from the control plane's bridge, with the node's address at its end.
    fn plug(&self, space: &Space) -> Result<()> {
        let device = self.device();
        let control = lock(&self.site.control);
        // The end of a node that died may still be there: the kernel removes it some time later.
        let _ = output(control.space().command("ip").args(["link", "delete", &device]));
        let (bridge, own) = (control.space().init().as_raw_nonzero(), space.init().as_raw_nonzero());
        output(
            Command::new("ip")
                .args(["link", "add", &device, "netns", &bridge.to_string(), "type", "veth"])
                // The same after each boot, as a network card's.
                .args(["peer", "name", "eth0", "address", &format!("02:61:76:66:01:{:02x}", self.index)])
                .args(["netns", &own.to_string()]),
        )?;
        output(control.space().command("ip").args(["link", "set", &device, "up", "master", BRIDGE]))?;
        let (pods, address) = (self.site.instance.pods(self.index), self.address());
        output(control.space().command("ip").args(["route", "replace", &pods, "via", &address]))?;
        let gateway = self.site.instance.control();
        let lines = format!(
            "ip address add {address}/24 dev eth0 && ip link set eth0 up && ip route add default via {gateway}"
        );
        output(space.command("sh").args(["-c", &lines]))?;
        Ok(())
    }

    fn spawn_plugin(&self, space: &Space) -> Result<Process> {
        let uuids: Vec<String> = (0..self.options.gpus).map(|index| self.gpu_uuid(index)).collect();
        let args =
            ["-devices".to_owned(), uuids.join(","), "-unhealthy".to_owned(), self.unhealthy().display().to_string()];
        space.spawn("device-plugin", &Binary::DevicePlugin.path()?, &args)
    }

    fn spawn_kubelet(&self, space: &Space) -> Result<Process> {
        let server = format!("https://{}", self.site.instance.control());
        let user = format!("system:node:{}", self.name());
        let kubeconfig = self.site.authority.kubeconfig(&server, &user, &["system:nodes"])?;
        let mut args = vec![
            format!("--config={}", self.file("kubelet.json")),
            format!("--kubeconfig={}", kubeconfig.display()),
            format!("--hostname-override={}", self.name()),
            format!("--node-ip={}", self.address()),
            "--root-dir=/var/lib/kubelet".to_owned(),
        ];
        let labels: Vec<String> = self.options.labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
        if !labels.is_empty() {
            args.push(format!("--node-labels={}", labels.join(",")));
        }
        space.spawn("kubelet", &Binary::Kubelet.path()?, &args)
    }

    /// Gives services their addresses on this node.
    fn spawn_proxy(&self, space: &Space) -> Result<Process> {
        let server = format!("https://{}", self.site.instance.control());
        let kubeconfig = self.site.authority.kubeconfig(&server, "system:kube-proxy", &[])?;
        let config = self.folder().join("kube-proxy.json");
        let text = json!({
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration",
            "clientConnection": {"kubeconfig": kubeconfig},
            "hostnameOverride": self.name(), "mode": "iptables",
            // Every 30 s it would look at all rules again; changes come at once.
            "iptables": {"minSyncPeriod": "0s", "localhostNodePorts": false},
            "detectLocalMode": "ClusterCIDR", "clusterCIDR": self.site.instance.network(),
            // The machine's own limits stay.
            "conntrack": {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
            "healthzBindAddress": "", "metricsBindAddress": "",
        });
        fs::write(&config, format!("{text:#}"))?;
        space.spawn("kube-proxy", &Binary::Proxy.path()?, &[format!("--config={}", config.display())])
    }

    /// Writes all configuration, and what a boot makes anew.
    fn write_files(&self, boot_id: &str) -> Result<()> {
        let folder = self.folder();
        let registry = format!("{}:{REGISTRY}", self.site.instance.control());
        let hosts = folder.join("registries").join(&registry);
        for part in ["kubelet", "log", "cni", "containerd"] {
            fs::create_dir_all(folder.join(part))?;
        }
        fs::create_dir_all(&hosts)?;
        // The one of a containerd that died, at which nobody listens.
        let _ = fs::remove_file(self.socket());
        fs::write(folder.join("boot-id"), format!("{boot_id}\n"))?;
        fs::write(folder.join("resolv.conf"), "")?;
        fs::write(hosts.join("hosts.toml"), format!("server = \"http://{registry}\"\n[host.\"http://{registry}\"]\n"))?;
        let network = json!({"cniVersion": "0.4.0", "name": "pods", "plugins": [{
            "type": "bridge", "bridge": "pods", "isGateway": true, "ipMasq": false,
            // In memory: after a boot no pod has an address.
            "ipam": {"type": "host-local", "dataDir": "/run/cni", "routes": [{"dst": "0.0.0.0/0"}],
                     "ranges": [[{"subnet": self.site.instance.pods(self.index)}]]},
        }]});
        fs::write(folder.join("cni/pods.conflist"), format!("{network:#}"))?;
        fs::write(folder.join("containerd.toml"), self.containerd()?)?;
        let addresses = [format!("IP:{}", self.address()), format!("DNS:{}", self.name())];
        let server = self.site.authority.server(self.name(), &addresses)?;
        let kubelet = json!({
            "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
            "authentication": {"anonymous": {"enabled": false}, "webhook": {"enabled": true},
                               "x509": {"clientCAFile": self.site.authority.certificate()}},
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": server.certificate, "tlsPrivateKeyFile": server.key,
            "cgroupDriver": "cgroupfs", "cgroupRoot": self.group()?.path(), "enforceNodeAllocatable": [],
            "failCgroupV1": false, "failSwapOn": false, "makeIPTablesUtilChains": false,
            "containerRuntimeEndpoint": format!("unix://{}", self.socket()),
            "resolvConf": folder.join("resolv.conf"),
            // Other programs fill this machine too; no image and no pod leaves for it.
            "evictionHard": {"memory.available": "50Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
            "imageGCHighThresholdPercent": 100, "imageGCLowThresholdPercent": 99,
            "serializeImagePulls": false, "healthzPort": 0,
            "nodeStatusUpdateFrequency": "1s", "nodeLeaseDurationSeconds": 4,
        });
        fs::write(folder.join("kubelet.json"), format!("{kubelet:#}"))?;
        Ok(())
    }

    fn containerd(&self) -> Result<String> {
        let plugins = ["/usr/lib/cni", "/opt/cni/bin"];
        let plugins = plugins
            .iter()
            .find(|folder| Path::new(folder).join("bridge").exists())
            .with_context(|| format!("there are no CNI plugins in {}", plugins.join(" or ")))?;
        let folder = self.folder();
        let folder = folder.display();
        Ok(format!(
            "version = 2\nroot = \"{folder}/containerd\"\nstate = \"/run/containerd\"\n\
             disabled_plugins = [\"io.containerd.snapshotter.v1.btrfs\", \"io.containerd.snapshotter.v1.devmapper\", \
             \"io.containerd.snapshotter.v1.zfs\", \"io.containerd.internal.v1.opt\"]\n\
             [grpc]\naddress = \"{socket}\"\n\
             [plugins.\"io.containerd.grpc.v1.cri\"]\nsandbox_image = \"{PAUSE}\"\n\
             # Lowering a score needs CAP_SYS_RESOURCE, which a machine inside another may lack.\n\
             restrict_oom_score_adj = true\ndisable_hugetlb_controller = true\n\
             [plugins.\"io.containerd.grpc.v1.cri\".cni]\nbin_dir = \"{plugins}\"\nconf_dir = \"{folder}/cni\"\n\
             [plugins.\"io.containerd.grpc.v1.cri\".registry]\nconfig_path = \"{folder}/registries\"\n",
            socket = self.socket(),
        ))
    }

    fn ctr(&self) -> Command {
        let mut ctr = Command::new("ctr");
        ctr.args(["--address", &self.socket(), "--namespace", "k8s.io"]);
        ctr
    }

    fn group(&self) -> Result<Group> {
        Ok(self.site.instance.group()?.child(self.name()))
    }

    /// Its cable's end at the bridge.
    fn device(&self) -> String {
        format!("node{}", self.index)
    }

    pub(crate) fn folder(&self) -> PathBuf {
        self.site.instance.folder().join("nodes").join(self.name())
    }

    fn file(&self, name: &str) -> String {
        self.folder().join(name).display().to_string()
    }

    fn socket(&self) -> String {
        self.file("containerd.sock")
    }

    fn unhealthy(&self) -> PathBuf {
        self.folder().join("unhealthy-gpus")
    }

    fn bad(&self) -> String {
        fs::read_to_string(self.unhealthy()).unwrap_or_default()
    }
}

/// The UUID of a GPU.
fn gpu_uuid(node: &str, index: u32) -> String {
    format!("GPU-{}", uuid(&format!("gpu/{node}/{index}")))
}

/// A UUID that follows from a text (version 8, RFC 9562).
fn uuid(of: &str) -> String {
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&Sha256::digest(of)[..16]);
    bytes[6] = bytes[6] & 0x0f | 0x80;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let hex = crate::oci::hex(&bytes);
    format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

fn is_ready(node: &Value) -> bool {
    let conditions = node["status"]["conditions"].as_array();
    conditions.into_iter().flatten().any(|c| c["type"] == "Ready" && c["status"] == "True")
}

fn gpus(node: &Value) -> u32 {
    let number = node["status"]["allocatable"]["nvidia.com/gpu"].as_str();
    number.and_then(|number| number.parse().ok()).unwrap_or(0)
}

/// A panic of another test leaves nothing half-changed here.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuids_are_stable_and_differ() {
        assert_eq!(gpu_uuid("hgx0", 0), gpu_uuid("hgx0", 0));
        assert_ne!(gpu_uuid("hgx0", 0), gpu_uuid("hgx0", 1));
        assert_ne!(gpu_uuid("hgx0", 0), gpu_uuid("hgx1", 0));
        let uuid = gpu_uuid("hgx0", 0);
        assert_eq!((uuid.len(), &uuid[18..19]), (40, "8"), "{uuid}");
    }
}
