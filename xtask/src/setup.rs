//! What the tasks need of the machine: looked for first, installed where that
//! is allowed, else named with the command that installs it.

use crate::proc::{capture, command, must, which};
use anyhow::{Result, bail};
use std::path::{Path, PathBuf};

/// The interpreters that the locks of `environments/` were made for, the preferred one first.
const INTERPRETERS: [&str; 3] = ["python3", "python3.12", "python3.11"];

/// Something that a task needs.
struct Need {
    /// What it is called.
    what: &'static str,
    /// The Debian packages that bring it.
    debian: &'static [&'static str],
    /// Whether it is here.
    here: fn() -> bool,
}

const NEEDS: [Need; 3] = [
    Need {
        what: "Python 3.11 or 3.12 with the modules venv and ensurepip",
        debian: &["python3", "python3-venv"],
        here: || python().is_some(),
    },
    Need { what: "git", debian: &["git"], here: || which("git").is_some() },
    Need {
        what: "a C compiler, for SQLite",
        debian: &["build-essential"],
        here: || which("cc").is_some() || std::env::var_os("CC").is_some(),
    },
];

/// What a cluster for tests needs beside it. Go, of which Debian's is too old, is no package.
const KUBE: [Need; 8] = [
    Need { what: "containerd", debian: &["containerd"], here: || system("containerd") && system("ctr") },
    Need { what: "runc", debian: &["runc"], here: || system("runc") },
    Need {
        what: "the CNI plugins",
        debian: &["containernetworking-plugins"],
        here: || ["/usr/lib/cni", "/opt/cni/bin"].iter().any(|folder| Path::new(folder).join("bridge").exists()),
    },
    Need { what: "ip", debian: &["iproute2"], here: || system("ip") },
    Need { what: "iptables", debian: &["iptables"], here: || system("iptables") },
    Need { what: "openssl", debian: &["openssl"], here: || system("openssl") },
    Need { what: "mmdebstrap, for images", debian: &["mmdebstrap"], here: || system("mmdebstrap") },
    Need { what: "docker-registry", debian: &["docker-registry"], here: || system("docker-registry") },
];

/// What only the tests need.
const TESTS: [Need; 1] =
    [Need { what: "PostgreSQL's server, for the tests of the store", debian: &["postgresql"], here: postgresql }];

/// What the tests of metrics, rules and the dashboard need.
const MONITORING: [Need; 1] = [Need {
    what: "Prometheus, for the tests of metrics and alert rules",
    debian: &["prometheus"],
    here: || which("prometheus").is_some() && which("promtool").is_some(),
}];

/// For which task something is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    /// To run a control plane and a training.
    Demo,
    /// And to test everything.
    Test,
}

/// Makes sure that everything is here.
///
/// # Errors
/// Names what is missing and how to get it.
pub fn check(task: Task) -> Result<()> {
    have(&NEEDS)?;
    if task == Task::Test { have(&TESTS) } else { Ok(()) }
}

/// Makes sure that what clusters for tests need is here; only where they can run at all.
///
/// # Errors
/// Names what is missing and how to get it.
pub fn check_kube() -> Result<()> {
    have(&KUBE)
}

/// Makes sure that Prometheus is here.
///
/// # Errors
/// Names what is missing and how to get it.
pub fn check_monitoring() -> Result<()> {
    have(&MONITORING)
}

/// Why no cluster for tests can run here, whatever is installed.
pub fn no_kube() -> Option<&'static str> {
    if !cfg!(target_os = "linux") {
        Some("clusters for tests are made of Linux's namespaces")
    } else if !is_root() {
        Some("clusters for tests need root")
    } else if which("go").is_none() {
        Some("there is no Go, with which Kubernetes is built; install Go 1.26 or newer")
    } else {
        None
    }
}

/// Whether a program is here, also one that only root has on the PATH.
fn system(program: &str) -> bool {
    which(program).is_some() || ["/usr/sbin", "/sbin"].iter().any(|folder| Path::new(folder).join(program).exists())
}

fn have(needs: &[Need]) -> Result<()> {
    let missing: Vec<&Need> = needs.iter().filter(|need| !(need.here)()).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let packages: Vec<&str> = missing.iter().flat_map(|need| need.debian).copied().collect();
    if is_root() && which("apt-get").is_some() {
        println!("installing {}", packages.join(" "));
        must(command("apt-get").args(["-qq", "update"]))?;
        let mut install = command("apt-get");
        install.args(["-qq", "-y", "install", "--no-install-recommends"]).args(&packages);
        must(install.env("DEBIAN_FRONTEND", "noninteractive"))?;
    }
    let missing: Vec<&str> = needs.iter().filter(|need| !(need.here)()).map(|need| need.what).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let mut message = format!("this machine lacks {}", missing.join("; "));
    if which("apt-get").is_some() {
        message += &format!("\n  sudo apt-get install {}", packages.join(" "));
    } else if which("dnf").is_some() {
        message += "\n  sudo dnf install python3.12 git gcc postgresql-server";
    } else if which("brew").is_some() {
        message += "\n  brew install python@3.12 git postgresql";
    }
    bail!(message)
}

/// A Python that the environments can be made with.
pub fn python() -> Option<PathBuf> {
    INTERPRETERS.iter().filter_map(|name| which(name)).find(|python| fits(python))
}

fn fits(python: &Path) -> bool {
    let test = "import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 13))";
    command(python).args(["-c", test]).output().is_ok_and(|out| out.status.success())
}

/// Whether the server's programs are here: Debian keeps them out of the path, in a folder for each version.
fn postgresql() -> bool {
    let versions = std::fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let installed = versions.map(|version| version.path().join("bin")).any(|bin| bin.join("initdb").exists());
    installed || which("initdb").is_some()
}

fn is_root() -> bool {
    capture(command("id").arg("-u")).is_ok_and(|uid| uid.trim() == "0")
}
