//! The programs that a cluster is made of: found in a cache, or built with Go and put there.
//!
//! The cache is `$AVIFLOW_KUBE_CACHE`, else `$XDG_CACHE_HOME/aviflow-kube`, else `~/.cache/aviflow-kube`, so that
//! it outlives a clone. Each program has a folder named by its version and by a hash of all that it is built of.
//!
//! Invariant: what is in the cache is whole. A program is built beside its place and moved there in one step,
//! under a lock, so that a build that was killed leaves nothing that is used later.

use crate::run::{output, which};
use crate::versions;
use anyhow::{Context as _, Result, bail};
use sha2::{Digest as _, Sha256};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

/// A program that is built here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Binary {
    /// kube-apiserver.
    Apiserver,
    /// kube-controller-manager.
    ControllerManager,
    /// kube-scheduler.
    Scheduler,
    /// kubelet.
    Kubelet,
    /// kube-proxy.
    Proxy,
    /// kubectl.
    Kubectl,
    /// etcd.
    Etcd,
    /// The plugin that offers GPUs which are not there: `e2e/device-plugin`.
    DevicePlugin,
    /// Process 1 of pods' sandboxes and of nodes: `e2e/go/pause`.
    Pause,
    /// helm.
    Helm,
    /// kwok.
    Kwok,
    /// Kueue's scheduler alone, as its own performance test has it.
    MinimalKueue,
    /// What makes the workloads of that test.
    KueueRunner,
}

/// What a program is built of.
enum Source {
    /// A module of this repository: its files by name, and the package in it or in what it depends on.
    Module { files: &'static [(&'static str, &'static str)], package: &'static str },
    /// A published program.
    Published { package: &'static str },
}

const KUBERNETES: &[(&str, &str)] = &[
    ("go.mod", include_str!("../../go/kubernetes/go.mod")),
    ("go.sum", include_str!("../../go/kubernetes/go.sum")),
    ("tools.go", include_str!("../../go/kubernetes/tools.go")),
];
const ETCD: &[(&str, &str)] = &[
    ("go.mod", include_str!("../../go/etcd/go.mod")),
    ("go.sum", include_str!("../../go/etcd/go.sum")),
    ("main.go", include_str!("../../go/etcd/main.go")),
];
const DEVICE_PLUGIN: &[(&str, &str)] = &[
    ("go.mod", include_str!("../../device-plugin/go.mod")),
    ("go.sum", include_str!("../../device-plugin/go.sum")),
    ("main.go", include_str!("../../device-plugin/main.go")),
];
const PAUSE: &[(&str, &str)] =
    &[("go.mod", include_str!("../../go/pause/go.mod")), ("main.go", include_str!("../../go/pause/main.go"))];

impl Binary {
    /// What a cluster needs.
    pub const CLUSTER: [Binary; 9] = [
        Binary::Pause,
        Binary::DevicePlugin,
        Binary::Etcd,
        Binary::Kubectl,
        Binary::Scheduler,
        Binary::ControllerManager,
        Binary::Kubelet,
        Binary::Proxy,
        Binary::Apiserver,
    ];

    /// What tests use beside it.
    pub const TOOLS: [Binary; 2] = [Binary::Helm, Binary::Kwok];

    /// The program's name.
    pub fn name(self) -> &'static str {
        match self {
            Binary::Apiserver => "kube-apiserver",
            Binary::ControllerManager => "kube-controller-manager",
            Binary::Scheduler => "kube-scheduler",
            Binary::Kubelet => "kubelet",
            Binary::Proxy => "kube-proxy",
            Binary::Kubectl => "kubectl",
            Binary::Etcd => "etcd",
            Binary::DevicePlugin => "device-plugin",
            Binary::Pause => "pause",
            Binary::Helm => "helm",
            Binary::Kwok => "kwok",
            Binary::MinimalKueue => "minimalkueue",
            Binary::KueueRunner => "kueue-runner",
        }
    }

    /// Its version; our own programs are of Kubernetes' version.
    pub fn version(self) -> &'static str {
        match self {
            Binary::Etcd => versions::ETCD,
            Binary::Helm => versions::HELM,
            Binary::Kwok => versions::KWOK,
            Binary::MinimalKueue | Binary::KueueRunner => versions::KUEUE,
            Binary::Apiserver
            | Binary::ControllerManager
            | Binary::Scheduler
            | Binary::Kubelet
            | Binary::Proxy
            | Binary::Kubectl
            | Binary::DevicePlugin
            | Binary::Pause => versions::KUBERNETES,
        }
    }

    fn source(self) -> Source {
        match self {
            Binary::Apiserver => Source::kubernetes("k8s.io/kubernetes/cmd/kube-apiserver"),
            Binary::ControllerManager => Source::kubernetes("k8s.io/kubernetes/cmd/kube-controller-manager"),
            Binary::Scheduler => Source::kubernetes("k8s.io/kubernetes/cmd/kube-scheduler"),
            Binary::Kubelet => Source::kubernetes("k8s.io/kubernetes/cmd/kubelet"),
            Binary::Proxy => Source::kubernetes("k8s.io/kubernetes/cmd/kube-proxy"),
            Binary::Kubectl => Source::kubernetes("k8s.io/kubernetes/cmd/kubectl"),
            Binary::Etcd => Source::Module { files: ETCD, package: "." },
            Binary::DevicePlugin => Source::Module { files: DEVICE_PLUGIN, package: "." },
            Binary::Pause => Source::Module { files: PAUSE, package: "." },
            Binary::Helm => Source::Published { package: "helm.sh/helm/v3/cmd/helm" },
            Binary::Kwok => Source::Published { package: "sigs.k8s.io/kwok/cmd/kwok" },
            Binary::MinimalKueue => {
                Source::Published { package: "sigs.k8s.io/kueue/test/performance/scheduler/minimalkueue" }
            }
            Binary::KueueRunner => Source::Published { package: "sigs.k8s.io/kueue/test/performance/scheduler/runner" },
        }
    }

    /// What the linker is told: no symbols, and Kubernetes' version, which its programs do not know by themselves.
    fn linker(self) -> String {
        let mut flags = "-s -w".to_owned();
        if let Source::Module { package, .. } = self.source()
            && package.starts_with("k8s.io/kubernetes/")
        {
            let set = "-X k8s.io/component-base/version";
            let mut parts = self.version().split('.');
            let (major, minor) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
            flags += &format!(" {set}.gitVersion=v{} {set}.gitMajor={major} {set}.gitMinor={minor}", self.version());
        }
        flags
    }

    /// A hash of all that it is built of.
    fn hash(self) -> String {
        let mut hash = Sha256::new();
        let mut add = |text: &str| {
            hash.update(text.len().to_le_bytes());
            hash.update(text);
        };
        add(std::env::consts::ARCH);
        add(self.version());
        add(&self.linker());
        match self.source() {
            Source::Module { files, package } => {
                add(package);
                for (name, text) in files {
                    add(name);
                    add(text);
                }
            }
            Source::Published { package } => add(package),
        }
        crate::oci::hex(&hash.finalize())[..12].to_owned()
    }

    /// Where it is in the cache, whether it is there or not.
    fn place(self, cache: &Path) -> PathBuf {
        cache.join(format!("{}-{}-{}", self.name(), self.version(), self.hash())).join(self.name())
    }

    /// Where it is; built if it is not in the cache.
    ///
    /// # Errors
    /// If Go is missing or the build fails.
    pub fn path(self) -> Result<PathBuf> {
        let cache = cache()?;
        let place = self.place(&cache);
        if place.exists() {
            return Ok(place);
        }
        let lock = File::create(cache.join(format!("{}.lock", self.name())))?;
        lock.lock()?;
        // Another process may have built it while this one waited.
        if !place.exists() {
            self.build(&cache, &place).with_context(|| format!("{} {}", self.name(), self.version()))?;
        }
        Ok(place)
    }

    /// Builds it beside its place and moves it there.
    fn build(self, cache: &Path, place: &Path) -> Result<()> {
        if which("go").is_none() {
            bail!(
                "it is not in {} and cannot be built: there is no `go` on the PATH; install Go 1.26 or newer",
                cache.display()
            );
        }
        eprintln!("building {} {}", self.name(), self.version());
        let begun = Instant::now();
        let work = fresh(cache, &format!(".building-{}", self.name()))?;
        let (module, bin) = (work.join("module"), work.join("bin"));
        fs::create_dir_all(&module)?;
        fs::create_dir_all(&bin)?;
        let mut go = Command::new("go");
        go.current_dir(&module).env("GOWORK", "off");
        if self == Binary::Pause {
            // It is the only file of its image, so it must be static.
            go.env("CGO_ENABLED", "0");
        }
        match self.source() {
            Source::Module { files, package } => {
                for (name, text) in files {
                    fs::write(module.join(name), text)?;
                }
                go.args(["build", "-trimpath", "-ldflags", &self.linker(), "-o"]);
                go.arg(bin.join(self.name())).arg(package);
            }
            Source::Published { package } => {
                go.env("GOBIN", &bin).args(["install", "-trimpath", "-ldflags", &self.linker()]);
                go.arg(format!("{package}@v{}", self.version()));
            }
        }
        output(&mut go)?;
        if let Source::Published { package } = self.source() {
            // Go names a program after its package.
            let named = package.rsplit('/').next().unwrap_or(package);
            fs::rename(bin.join(named), bin.join(self.name()))?;
        }
        // What was built of something else stays: another clone may be of that version.
        let folder = place.parent().context("the cache has no folder")?;
        fs::rename(&bin, folder).with_context(|| format!("{} could not be moved into the cache", folder.display()))?;
        fs::remove_dir_all(&work)?;
        eprintln!("built {} {} in {:.0} s", self.name(), self.version(), begun.elapsed().as_secs_f64());
        Ok(())
    }
}

impl Source {
    const fn kubernetes(package: &'static str) -> Source {
        Source::Module { files: KUBERNETES, package }
    }
}

/// A place in the cache where nothing is yet, for what is being made; the caller holds its lock. What a process left
/// that was killed is removed. The place is another for each process: a compiler that has outlived the one which
/// called it goes on writing where it was told.
pub(crate) fn fresh(folder: &Path, prefix: &str) -> Result<PathBuf> {
    let prefix = format!("{prefix}-at-");
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(&prefix) {
            let path = entry.path();
            let removed = if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
            removed.with_context(|| format!("{} cannot be removed", path.display()))?;
        }
    }
    Ok(folder.join(format!("{prefix}{}", std::process::id())))
}

/// Where programs and images are kept, made if it is not there.
///
/// # Errors
/// If there is neither `$AVIFLOW_KUBE_CACHE`, `$XDG_CACHE_HOME` nor `$HOME`, or it cannot be made.
pub fn cache() -> Result<PathBuf> {
    let var = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = var("AVIFLOW_KUBE_CACHE")
        .or_else(|| Some(var("XDG_CACHE_HOME")?.join("aviflow-kube")))
        .or_else(|| Some(var("HOME")?.join(".cache/aviflow-kube")))
        .context("where to keep what is built? set AVIFLOW_KUBE_CACHE to a folder")?;
    fs::create_dir_all(&cache).with_context(|| format!("{} cannot be made", cache.display()))?;
    fs::canonicalize(&cache).with_context(|| format!("{} cannot be read", cache.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_follows_from_what_it_is_built_of() {
        let cache = Path::new("/cache");
        let place = Binary::Kubelet.place(cache);
        assert!(place.starts_with("/cache") && place.ends_with("kubelet"), "{place:?}");
        assert_eq!(place, Binary::Kubelet.place(cache));
        assert_ne!(Binary::Kubelet.hash(), Binary::Kubectl.hash());
        assert!(Binary::Kubelet.linker().ends_with("gitMajor=1 -X k8s.io/component-base/version.gitMinor=36"));
        assert_eq!(Binary::Etcd.linker(), "-s -w");
    }

    #[test]
    fn what_was_half_made_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join(".building-etcd-at-1/bin")).unwrap();
        fs::write(folder.path().join(".building-etcd-at-2"), "").unwrap();
        fs::write(folder.path().join(".building-etcdctl-at-2"), "").unwrap();
        let place = fresh(folder.path(), ".building-etcd").unwrap();
        assert!(!place.exists());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
