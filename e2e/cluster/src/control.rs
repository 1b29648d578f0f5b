//! The control plane: etcd, kube-apiserver, kube-controller-manager, kube-scheduler and a registry of images, in
//! one space with the bridge that joins all nodes.
//!
//! There is no DNS. The address of the service `kubernetes` is one of this space too, and the apiserver listens on its
//! port, so that it is found from this machine; other services have an address on nodes alone.

use crate::Options;
use crate::binaries::Binary;
use crate::instance::Instance;
use crate::pki::Authority;
use crate::run::{output, which};
use crate::space::{Plan, Process, Space};
use anyhow::{Context as _, Result};
use std::path::Path;
use std::process::Command;

/// The port of the registry.
pub(crate) const REGISTRY: u16 = 5000;

/// The bridge of all nodes, in the control plane's space.
pub(crate) const BRIDGE: &str = "nodes";

/// The bridge's own hardware address. Without one it takes that of a port, and another when that port goes: who
/// has it in his ARP cache then talks to nobody.
const MAC: &str = "02:61:76:66:00:02";

/// The running control plane.
pub(crate) struct Control {
    apiserver: Option<Process>,
    /// The others, which stay as long as the cluster.
    others: Vec<Process>,
    arguments: Vec<String>,
    controllers: Vec<String>,
    scheduler: Vec<String>,
    // After the processes: it is dropped last.
    space: Space,
}

impl Control {
    /// Opens the space, joins it with the host, and starts what needs no apiserver, and the apiserver.
    pub(crate) fn start(
        instance: &Instance,
        authority: &Authority,
        admin: &Path,
        options: &Options,
    ) -> Result<Control> {
        let folder = instance.folder();
        let logs = folder.join("control");
        std::fs::create_dir_all(&logs)?;
        let setup = format!(
            "ip link set lo up\nip address add {service}/32 dev lo\n\
             ip link add {BRIDGE} address {MAC} type bridge\nip address add {control}/24 dev {BRIDGE}\nip link set {BRIDGE} up\n\
             echo 1 > /proc/sys/net/ipv4/ip_forward\necho 0 > /proc/sys/net/ipv4/conf/all/send_redirects\n\
             echo 0 > /proc/sys/net/ipv4/conf/{BRIDGE}/send_redirects\n",
            service = instance.service(),
            control = instance.control(),
        );
        let pause = Binary::Pause.path()?;
        let group = instance.group()?.child("control");
        let space = Space::open(&Plan { name: "control", group, pause: &pause, setup: &setup, logs: &logs })?;
        join_host(instance, &space)?;

        let etcd = [
            "--data-dir",
            &text(&folder.join("etcd")),
            "--listen-client-urls=http://127.0.0.1:2379",
            "--advertise-client-urls=http://127.0.0.1:2379",
            "--listen-peer-urls=http://127.0.0.1:2380",
            "--unsafe-no-fsync",
        ];
        let mut others = vec![space.spawn("etcd", &Binary::Etcd.path()?, &owned(&etcd))?];
        others.push(registry(&space, folder)?);

        let (key, public) = authority.service_account_key()?;
        let (key, public) = (text(&key), text(&public));
        let (ca, admin) = (text(authority.certificate()), text(admin));
        let mut control = Control {
            apiserver: None,
            others,
            arguments: apiserver_arguments(instance, authority, [&key, &public], options)?,
            controllers: owned(&[
                "--kubeconfig",
                &admin,
                "--leader-elect=false",
                "--service-account-private-key-file",
                &key,
                "--root-ca-file",
                &ca,
                "--node-monitor-period=500ms",
                &format!("--node-monitor-grace-period={}s", options.node_grace.as_secs()),
            ]),
            scheduler: owned(&["--kubeconfig", &admin, "--leader-elect=false"]),
            space,
        };
        control.scheduler.extend(options.scheduler_args.iter().cloned());
        control.start_apiserver()?;
        Ok(control)
    }

    /// Starts what needs the apiserver.
    pub(crate) fn start_controllers(&mut self) -> Result<()> {
        for (name, binary, args) in [
            ("kube-controller-manager", Binary::ControllerManager, &self.controllers),
            ("kube-scheduler", Binary::Scheduler, &self.scheduler),
        ] {
            self.others.push(self.space.spawn(name, &binary.path()?, args)?);
        }
        Ok(())
    }

    /// Fails if a program has ended that should run.
    pub(crate) fn check(&mut self) -> Result<()> {
        self.others.iter_mut().chain(&mut self.apiserver).try_for_each(Process::check)
    }

    /// Kills the apiserver.
    pub(crate) fn stop_apiserver(&mut self) -> Result<()> {
        self.apiserver.take().map_or(Ok(()), |mut process| process.kill())
    }

    /// Starts the apiserver, which is ready some time later.
    pub(crate) fn start_apiserver(&mut self) -> Result<()> {
        if self.apiserver.is_none() {
            let apiserver = Binary::Apiserver.path()?;
            self.apiserver = Some(self.space.spawn("kube-apiserver", &apiserver, &self.arguments)?);
        }
        Ok(())
    }

    /// The space, which has the bridge.
    pub(crate) fn space(&self) -> &Space {
        &self.space
    }
}

/// A pair of devices from the host to the bridge, and the way to pods and services through it.
fn join_host(instance: &Instance, space: &Space) -> Result<()> {
    let device = instance.device();
    let inside = space.init().as_raw_nonzero().to_string();
    let ip = |args: &[&str]| output(Command::new("ip").args(args));
    ip(&["link", "add", &device, "type", "veth", "peer", "name", "host", "netns", &inside])?;
    output(space.command("ip").args(["link", "set", "host", "up", "master", BRIDGE]))?;
    ip(&["address", "add", &format!("{}/24", instance.host()), "dev", &device])?;
    ip(&["link", "set", &device, "up"])?;
    ip(&["route", "add", &instance.network(), "via", &instance.control()])?;
    Ok(())
}

/// Starts the registry.
fn registry(space: &Space, folder: &Path) -> Result<Process> {
    let config = folder.join("registry.yml");
    let data = folder.join("registry");
    std::fs::write(
        &config,
        format!(
            "version: 0.1\nlog: {{level: warn}}\nstorage: {{filesystem: {{rootdirectory: {}}}}}\n\
             http: {{addr: \":{REGISTRY}\"}}\n",
            data.display()
        ),
    )?;
    let program = which("docker-registry").context("no `docker-registry`")?;
    space.spawn("registry", &program, &owned(&["serve", &text(&config)]))
}

fn apiserver_arguments(
    instance: &Instance,
    authority: &Authority,
    [key, public]: [&str; 2],
    options: &Options,
) -> Result<Vec<String>> {
    let addresses = [
        format!("IP:{}", instance.control()),
        format!("IP:{}", instance.service()),
        "IP:127.0.0.1".to_owned(),
        "DNS:localhost".to_owned(),
        "DNS:kubernetes.default.svc".to_owned(),
    ];
    let server = authority.server("kube-apiserver", &addresses)?;
    let kubelets = authority.client("kubelets", "kube-apiserver", &["system:masters"])?;
    let mut arguments = Vec::new();
    for (flag, value) in [
        ("etcd-servers", "http://127.0.0.1:2379".to_owned()),
        ("bind-address", "0.0.0.0".to_owned()),
        ("secure-port", "443".to_owned()),
        ("advertise-address", instance.control()),
        ("service-cluster-ip-range", instance.services()),
        ("authorization-mode", "Node,RBAC".to_owned()),
        ("allow-privileged", "true".to_owned()),
        ("client-ca-file", text(authority.certificate())),
        ("tls-cert-file", text(&server.certificate)),
        ("tls-private-key-file", text(&server.key)),
        ("service-account-issuer", "https://kubernetes.default.svc".to_owned()),
        ("service-account-key-file", public.to_owned()),
        ("service-account-signing-key-file", key.to_owned()),
        // exec and logs go to the node's address: there is no DNS.
        ("kubelet-preferred-address-types", "InternalIP".to_owned()),
        ("kubelet-certificate-authority", text(authority.certificate())),
        ("kubelet-client-certificate", text(&kubelets.certificate)),
        ("kubelet-client-key", text(&kubelets.key)),
    ] {
        arguments.push(format!("--{flag}={value}"));
    }
    arguments.extend(options.apiserver_args.iter().cloned());
    Ok(arguments)
}

fn owned(args: &[&str]) -> Vec<String> {
    args.iter().map(|&arg| arg.to_owned()).collect()
}

fn text(path: &Path) -> String {
    path.display().to_string()
}
