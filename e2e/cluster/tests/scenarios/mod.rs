//! What is tested.

use anyhow::{Context as _, Result, ensure};
use aviflow_testcluster::binaries::Binary;
use aviflow_testcluster::oci::FileEntry;
use aviflow_testcluster::{Cluster, NodeOptions, Options, images, until};
use serde_json::{Value, json};
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

/// A test on a cluster that others use after it.
pub type Test = fn(&Cluster) -> Result<()>;

/// The cluster of [`ON_ONE_CLUSTER`]: two nodes, and a third that is added later.
pub fn options() -> Result<Options> {
    let mut options = Options { images: vec![images::minimal_python()?], ..Options::default() };
    options.nodes[0].labels.insert("fabric.topograph.run/tier-0".to_owned(), "leaf-a".to_owned());
    options.nodes.push(NodeOptions { gpus: 2, present: false, ..NodeOptions::new("spare") });
    options.apiserver_args.push("--default-unreachable-toleration-seconds=7".to_owned());
    Ok(options)
}

/// The tests on one cluster, in this order: those that harm nodes come last.
pub const ON_ONE_CLUSTER: [(&str, Test); 13] = [
    ("options_are_heeded", options_are_heeded),
    ("a_pod_sees_its_gpus", a_pod_sees_its_gpus),
    ("exec_and_logs_work", exec_and_logs_work),
    ("pods_of_two_nodes_and_the_host_reach_each_other", pods_of_two_nodes_and_the_host_reach_each_other),
    ("a_service_is_reached_from_every_node", a_service_is_reached_from_every_node),
    ("an_image_is_pulled_by_its_digest", an_image_is_pulled_by_its_digest),
    ("users_have_only_their_rights", users_have_only_their_rights),
    ("an_unhealthy_gpu_is_not_offered", an_unhealthy_gpu_is_not_offered),
    ("a_restarted_kubelet_offers_its_gpus_again", a_restarted_kubelet_offers_its_gpus_again),
    ("the_apiserver_comes_back", the_apiserver_comes_back),
    ("a_cut_node_is_lost_and_found", a_cut_node_is_lost_and_found),
    ("a_killed_node_boots_again", a_killed_node_boots_again),
    ("a_node_is_added_and_removed", a_node_is_added_and_removed),
];

/// How long a pod may take. Seconds are usual; this is for a busy machine.
const LONGEST: Duration = Duration::from_secs(90);

/// A pod on a node, of the image with Python.
fn pod(name: &str, node: &str, gpus: u32, command: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
        "spec": {
            "restartPolicy": "Never", "terminationGracePeriodSeconds": 1,
            "nodeSelector": {"kubernetes.io/hostname": node},
            "containers": [{
                "name": "main", "image": images::PYTHON, "imagePullPolicy": "Never", "args": [command],
                "resources": {"limits": {"nvidia.com/gpu": gpus.to_string()}},
            }],
        },
    })
}

fn object(cluster: &Cluster, name: &str) -> Result<Value> {
    cluster.get(&format!("/api/v1/namespaces/default/pods/{name}"))
}

/// Waits until a pod is in a phase; one that ends otherwise is an error.
fn phase(cluster: &Cluster, name: &str, phase: &str) -> Result<Value> {
    until(&format!("the pod {name} is {phase}"), LONGEST, || {
        let pod = object(cluster, name)?;
        let now = pod["status"]["phase"].as_str().unwrap_or_default();
        ensure!(now == phase || !matches!(now, "Succeeded" | "Failed"), "{name} is {now}: {}", pod["status"]);
        Ok((now == phase).then_some(pod))
    })
}

/// Deletes pods and waits until kubelet has ended them: with no grace, they would be gone before their GPUs are free.
fn remove(cluster: &Cluster, names: &[&str]) -> Result<()> {
    let args = [&["delete", "pod"], names].concat();
    cluster.kubectl_ok(&args).map(|_| ())
}

fn options_are_heeded(cluster: &Cluster) -> Result<()> {
    let label = |name: &str| -> Result<Value> {
        let node = cluster.node(name).object()?.with_context(|| format!("{name} is not there"))?;
        Ok(node["metadata"]["labels"]["fabric.topograph.run/tier-0"].clone())
    };
    ensure!(label("hgx0")? == "leaf-a" && label("hgx1")? == Value::Null);
    ensure!(cluster.node("spare").object()?.is_none(), "a node is there that was not asked for");
    cluster.apply(&pod("tolerant", "hgx0", 0, "true").to_string())?;
    let tolerant = object(cluster, "tolerant")?;
    let mut tolerations = tolerant["spec"]["tolerations"].as_array().into_iter().flatten();
    let given = tolerations.find(|t| t["key"] == "node.kubernetes.io/unreachable").context("no toleration")?;
    ensure!(given["tolerationSeconds"] == 7, "the apiserver did not get its flag: {given}");
    remove(cluster, &["tolerant"])
}

fn a_pod_sees_its_gpus(cluster: &Cluster) -> Result<()> {
    cluster.apply(&pod("two", "hgx0", 2, "echo $NVIDIA_VISIBLE_DEVICES").to_string())?;
    phase(cluster, "two", "Succeeded")?;
    let said = cluster.kubectl_ok(&["logs", "two"])?;
    let mut seen: Vec<&str> = said.trim().split(',').collect();
    seen.sort_unstable();
    seen.dedup();
    let all: Vec<String> = (0..8).map(|index| cluster.node("hgx0").gpu_uuid(index)).collect();
    ensure!(seen.len() == 2 && seen.iter().all(|uuid| all.iter().any(|a| a == uuid)), "{said:?} of {all:?}");

    // What it does not have, a node does not give.
    cluster.apply(&pod("nine", "hgx0", 9, "true").to_string())?;
    until("the pod with 9 GPUs is refused", LONGEST, || {
        let pod = object(cluster, "nine")?;
        Ok(pod["status"]["conditions"]
            .as_array()
            .into_iter()
            .flatten()
            .find(|c| c["reason"] == "Unschedulable")
            .cloned())
    })?;
    remove(cluster, &["two", "nine"])
}

fn exec_and_logs_work(cluster: &Cluster) -> Result<()> {
    cluster.apply(&pod("shell", "hgx1", 0, "echo begun; exec sleep infinity").to_string())?;
    phase(cluster, "shell", "Running")?;
    ensure!(cluster.kubectl_ok(&["exec", "shell", "--", "python3", "-c", "print(6 * 7)"])?.trim() == "42");
    let failed = cluster.kubectl(&["exec", "shell", "--", "sh", "-c", "exit 7"])?;
    ensure!(failed.status.code() == Some(7), "{failed:?}");
    ensure!(cluster.kubectl_ok(&["logs", "shell"])?.trim() == "begun");
    remove(cluster, &["shell"])
}

fn pods_of_two_nodes_and_the_host_reach_each_other(cluster: &Cluster) -> Result<()> {
    // A server on the host, as a control plane outside of the cluster is one.
    let host = std::net::TcpListener::bind((cluster.host_ip(), 0))?;
    let port = host.local_addr()?.port();
    let serve = "import socket; s = socket.create_server(('', 9000)); print('up', flush=True)\n\
                 while True: s.accept()[0].sendall(b'hello')";
    cluster.apply(&pod("server", "hgx1", 0, &format!("exec python3 -c \"{serve}\"")).to_string())?;
    let server = phase(cluster, "server", "Running")?;
    until("the server listens", LONGEST, || Ok(cluster.kubectl_ok(&["logs", "server"])?.contains("up").then_some(())))?;
    let address = server["status"]["podIP"].as_str().context("the pod has no address")?;
    let api = cluster.get("/api/v1/namespaces/default/services/kubernetes")?;
    let api = api["spec"]["clusterIP"].as_str().context("the service `kubernetes` has no address")?;
    let ask = format!(
        "import socket; print(socket.create_connection(('{address}', 9000), 20).recv(9).decode()); \
         socket.create_connection(('{}', {port}), 20).sendall(b'from a pod'); \
         socket.create_connection(('{api}', 443), 20)",
        cluster.host_ip()
    );
    cluster.apply(&pod("client", "hgx0", 0, &format!("exec python3 -c \"{ask}\"")).to_string())?;
    phase(cluster, "client", "Succeeded")?;
    ensure!(cluster.kubectl_ok(&["logs", "client"])?.trim() == "hello");
    // It has sent: what it said is waiting here.
    let (mut connection, from) = host.accept()?;
    let client = object(cluster, "client")?;
    ensure!(client["status"]["podIP"] == from.ip().to_string(), "{from} is not the pod's own address");
    ensure!(std::io::read_to_string(&mut connection)? == "from a pod");
    // And the host reaches the pod.
    let direct = std::net::TcpStream::connect((address, 9000))?;
    ensure!(std::io::read_to_string(std::io::Read::take(direct, 5))? == "hello");
    remove(cluster, &["server", "client"])
}

fn a_service_is_reached_from_every_node(cluster: &Cluster) -> Result<()> {
    let serve = "import socket; s = socket.create_server(('', 9000))\nwhile True: s.accept()[0].sendall(b'hello')";
    let mut server = pod("server", "hgx1", 0, &format!("exec python3 -c \"{serve}\""));
    server["metadata"]["labels"] = json!({"app": "server"});
    server["spec"]["containers"][0]["readinessProbe"] = json!({"tcpSocket": {"port": 9000}, "periodSeconds": 1});
    cluster.apply(&server.to_string())?;
    let service = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": "hello"},
        "spec": {"selector": {"app": "server"}, "ports": [{"port": 80, "targetPort": 9000}]},
    });
    cluster.apply(&service.to_string())?;
    let service = cluster.get("/api/v1/namespaces/default/services/hello")?;
    let address = service["spec"]["clusterIP"].as_str().context("the service has no address")?;
    until("the server is ready", LONGEST, || {
        let pod = object(cluster, "server")?;
        Ok(pod["status"]["containerStatuses"][0]["ready"].as_bool().filter(|ready| *ready))
    })?;
    // Until the rules of a node have the server, it refuses.
    let ask = format!(
        "import socket\nwhile True:\n try: print(socket.create_connection(('{address}', 80), 5).recv(9).decode()); \
         break\n except OSError: pass"
    );
    for (name, node) in [("far", "hgx0"), ("near", "hgx1")] {
        cluster.apply(&pod(name, node, 0, &format!("exec python3 -c \"{ask}\"")).to_string())?;
        phase(cluster, name, "Succeeded")?;
        ensure!(cluster.kubectl_ok(&["logs", name])?.trim() == "hello", "{name}");
    }
    cluster.kubectl_ok(&["delete", "service", "hello"])?;
    remove(cluster, &["server", "far", "near"])
}

fn an_image_is_pulled_by_its_digest(cluster: &Cluster) -> Result<()> {
    // No node has anything of it yet.
    let file = |path: &str, content: Vec<u8>| FileEntry { path: path.to_owned(), content, mode: 0o755 };
    let files = [file("/pause", std::fs::read(Binary::Pause.path()?)?), file("/etc/only-in-the-registry", Vec::new())];
    let image = images::scratch("aviflow.test/pulled:1", &files, &["/pause"])?;
    let reference = cluster.registry().push(&image, "tests/pulled")?;
    let mut pulled = pod("pulled", "hgx0", 0, "");
    pulled["spec"]["containers"][0] = json!({"name": "main", "image": reference, "imagePullPolicy": "Always"});
    cluster.apply(&pulled.to_string())?;
    let pod = phase(cluster, "pulled", "Running")?;
    let ran = pod["status"]["containerStatuses"][0]["imageID"].as_str().unwrap_or_default();
    let digest = reference.split('@').nth(1).context("the reference has no digest")?;
    ensure!(ran.ends_with(digest), "{ran} was run, not {digest}");
    remove(cluster, &["pulled"])
}

fn users_have_only_their_rights(cluster: &Cluster) -> Result<()> {
    let config = cluster.user("eva/x", &["oncall", "team:nlp"])?;
    let config = config.to_str().context("the path")?;
    // The later flag counts.
    let list = ["get", "pods", "--kubeconfig", config];
    let refused = cluster.kubectl(&list)?;
    let error = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure!(!refused.status.success() && error.contains("User \"eva/x\" cannot list"), "{error}");
    cluster.kubectl_ok(&["create", "rolebinding", "nlp", "--clusterrole=view", "--group=team:nlp"])?;
    until("the right is known", LONGEST, || Ok(cluster.kubectl(&list)?.status.success().then_some(())))?;
    cluster.kubectl_ok(&["delete", "rolebinding", "nlp"])?;
    Ok(())
}

fn an_unhealthy_gpu_is_not_offered(cluster: &Cluster) -> Result<()> {
    let node = cluster.node("hgx1");
    node.set_gpu_health(3, false)?;
    until("7 GPUs are offered", LONGEST, || Ok((node.allocatable_gpus()? == 7).then_some(())))?;
    cluster.apply(&pod("seven", "hgx1", 7, "echo $NVIDIA_VISIBLE_DEVICES").to_string())?;
    phase(cluster, "seven", "Succeeded")?;
    let seen = cluster.kubectl_ok(&["logs", "seven"])?;
    ensure!(seen.matches("GPU-").count() == 7 && !seen.contains(&node.gpu_uuid(3)), "{seen}");
    ensure!(cluster.node("hgx0").allocatable_gpus()? == 8, "the other node has lost GPUs");
    node.set_gpu_health(3, true)?;
    until("8 GPUs are offered", LONGEST, || Ok((node.allocatable_gpus()? == 8).then_some(())))?;
    remove(cluster, &["seven"])
}

fn a_restarted_kubelet_offers_its_gpus_again(cluster: &Cluster) -> Result<()> {
    let node = cluster.node("hgx0");
    cluster.apply(&pod("stays", "hgx0", 1, "exec sleep infinity").to_string())?;
    let before = phase(cluster, "stays", "Running")?;
    node.stop_kubelet()?;
    until("hgx0 is not ready", LONGEST, || Ok((!node.ready()?).then_some(())))?;
    node.start_kubelet()?;
    until("hgx0 is ready again", LONGEST, || Ok((node.ready()? && node.allocatable_gpus()? == 8).then_some(())))?;
    let after = object(cluster, "stays")?;
    let id = |pod: &Value| pod["status"]["containerStatuses"][0]["containerID"].clone();
    ensure!(id(&before) == id(&after) && after["status"]["phase"] == "Running", "the pod did not go on: {after}");
    remove(cluster, &["stays"])
}

fn the_apiserver_comes_back(cluster: &Cluster) -> Result<()> {
    cluster.stop_apiserver()?;
    ensure!(cluster.get("/readyz").is_err(), "the apiserver still answers");
    cluster.start_apiserver()?;
    until("nodes are ready", LONGEST, || {
        Ok((cluster.node("hgx0").ready()? && cluster.node("hgx1").ready()?).then_some(()))
    })
}

fn a_cut_node_is_lost_and_found(cluster: &Cluster) -> Result<()> {
    let node = cluster.node("hgx1");
    node.cut()?;
    until("hgx1 is not ready", LONGEST, || Ok((!node.ready()?).then_some(())))?;
    ensure!(cluster.node("hgx0").ready()?, "the other node is lost too");
    node.heal()?;
    until("hgx1 is ready again", LONGEST, || Ok(node.ready()?.then_some(())))
}

fn a_killed_node_boots_again(cluster: &Cluster) -> Result<()> {
    let node = cluster.node("hgx1");
    cluster.apply(&pod("lost", "hgx1", 1, "exec sleep 86399").to_string())?;
    phase(cluster, "lost", "Running")?;
    ensure!(running("86399"), "the pod's process is not there");
    node.kill()?;
    ensure!(!running("86399"), "the pod's process has outlived its node");
    until("hgx1 is not ready", LONGEST, || Ok((!node.ready()?).then_some(())))?;
    node.start()?;
    // Its disk is as it was, so the image is there.
    remove(cluster, &["lost"])?;
    cluster.apply(&pod("again", "hgx1", 8, "true").to_string())?;
    phase(cluster, "again", "Succeeded")?;
    remove(cluster, &["again"])?;
    Ok(())
}

fn a_node_is_added_and_removed(cluster: &Cluster) -> Result<()> {
    let node = cluster.node("spare");
    node.add()?;
    ensure!(node.allocatable_gpus()? == 2);
    cluster.apply(&pod("new", "spare", 2, "true").to_string())?;
    phase(cluster, "new", "Succeeded")?;
    remove(cluster, &["new"])?;
    let disk = cluster.folder().join("nodes/spare");
    ensure!(disk.exists());
    node.remove()?;
    ensure!(node.object()?.is_none(), "the node's object is still there");
    ensure!(!disk.exists(), "the disk of a removed node is still there");
    Ok(())
}

/// Whether a process of this machine, in whatever namespace, has this argument.
fn running(argument: &str) -> bool {
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let lines = processes.filter_map(|process| std::fs::read(process.path().join("cmdline")).ok());
    lines.into_iter().any(|line| line.split(|byte| *byte == 0).any(|word| word == argument.as_bytes()))
}

/// The argument under which this binary only starts a cluster and keeps it.
pub const CHILD: &str = "--hold-a-cluster";

/// Starts a cluster of one node, says where it is, and waits to be killed.
pub fn hold_a_cluster() -> ExitCode {
    let mut options = Options::default();
    options.nodes.truncate(1);
    match Cluster::start(options) {
        Ok(cluster) => {
            println!("{}", cluster.folder().display());
            loop {
                std::thread::park();
            }
        }
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

pub fn a_killed_cluster_is_removed_by_the_next_start() -> Result<()> {
    let mut child = Command::new(std::env::current_exe()?).arg(CHILD).stdout(Stdio::piped()).spawn()?;
    let mut line = String::new();
    BufReader::new(child.stdout.take().context("no output")?).read_line(&mut line)?;
    let folder = Path::new(line.trim()).to_owned();
    ensure!(folder.is_absolute(), "the cluster did not start");
    let marker = folder.join("left-behind");
    std::fs::write(&marker, "")?;
    child.kill()?;
    child.wait()?;
    // What it ran ends with it, before anybody cleans up.
    let kubelet = folder.join("nodes/hgx0/kubelet.json");
    let kubelet = format!("--config={}", kubelet.display());
    until("the killed cluster's kubelet has ended", LONGEST, || Ok((!running(&kubelet)).then_some(())))?;
    let mut options = Options::default();
    options.nodes.truncate(1);
    let cluster = Cluster::start(options)?;
    ensure!(cluster.folder() == folder, "the number of the killed cluster was not taken again");
    ensure!(!marker.exists(), "what the killed cluster left was not removed");
    drop(cluster);
    ensure!(!folder.exists(), "a cluster that has ended leaves {}", folder.display());
    Ok(())
}
