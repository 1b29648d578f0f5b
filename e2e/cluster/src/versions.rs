//! The versions of everything that is built: the one place to change them.
//!
//! The modules in `e2e/go` and `e2e/device-plugin` name them once more, with the checksums of all that they
//! depend on; a test compares.

/// Kubernetes: kube-apiserver, kube-controller-manager, kube-scheduler, kubelet, kube-proxy, kubectl.
pub const KUBERNETES: &str = "1.36.3";
/// etcd. Debian's is too old for the streaming lists of a current kube-apiserver.
pub const ETCD: &str = "3.6.8";
/// Helm, which installs charts.
pub const HELM: &str = "3.18.4";
/// kwok, which simulates nodes.
pub const KWOK: &str = "0.8.0";
/// Kueue, beside which the benchmark puts Aviflow.
pub const KUEUE: &str = "0.17.0";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_modules_are_of_these_versions() {
        let kubernetes = include_str!("../../go/kubernetes/go.mod");
        assert!(kubernetes.contains(&format!("require k8s.io/kubernetes v{KUBERNETES}\n")));
        let staging = KUBERNETES.trim_start_matches("1.");
        assert!(kubernetes.contains(&format!("k8s.io/api => k8s.io/api v0.{staging}\n")));
        assert!(include_str!("../../device-plugin/go.mod").contains(&format!("k8s.io/kubelet v0.{staging}\n")));
        assert!(include_str!("../../go/etcd/go.mod").contains(&format!("go.etcd.io/etcd/server/v3 v{ETCD}\n")));
    }
}
