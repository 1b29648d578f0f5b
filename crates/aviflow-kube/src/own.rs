//! The control plane's own pod.

use crate::{Client, names};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;

/// The image that the control plane's pod runs. Workers are prepared with the same, so that their agents are of its
/// version, whichever way the image was named: by a chart, or by `kubectl set image`.
///
/// # Errors
/// If the pod cannot be read, or has no such container.
pub async fn image(client: &Client, namespace: &str, pod: &str) -> Result<String, String> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let found = pods.get(pod).await.map_err(|e| format!("the pod {namespace}/{pod} cannot be read: {e}"))?;
    image_of(&found).ok_or_else(|| format!("the pod {namespace}/{pod} has no container `{}`", names::CONTAINER))
}

fn image_of(pod: &Pod) -> Option<String> {
    let mut containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    containers.find(|container| container.name == names::CONTAINER)?.image.clone()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_image_is_that_of_the_container_and_of_no_other_beside_it() {
        let pod = |containers: serde_json::Value| {
            let pod: Pod = serde_json::from_value(json!({"metadata": {}, "spec": {"containers": containers}})).unwrap();
            image_of(&pod)
        };
        let proxy = json!({"name": "mesh", "image": "mesh:1"});
        let ours = json!({"name": "aviflow", "image": "registry.example/aviflow@sha256:1"});
        assert_eq!(pod(json!([proxy, ours])).as_deref(), Some("registry.example/aviflow@sha256:1"));
        assert_eq!(pod(json!([proxy])), None);
    }
}
