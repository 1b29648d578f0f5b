//! A control plane that only looks.

use crate::World;
use anyhow::{Result, ensure};
use aviflow_e2e_kube::Plane;
use aviflow_testcluster::until;
use serde_json::{Value, json};
use std::time::Duration;

const LONGEST: Duration = Duration::from_secs(90);

/// A pod that is none of Aviflow's.
fn pod(world: &World, name: &str, gpus: u32) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
        "spec": {"restartPolicy": "Never", "terminationGracePeriodSeconds": 0, "containers": [{
            "name": "main", "image": world.image, "command": ["sleep", "600"],
            "resources": {"limits": {"nvidia.com/gpu": gpus.to_string()}},
        }]},
    })
}

pub fn a_control_plane_that_observes_changes_nothing(world: &mut World) -> Result<()> {
    world.plane.kill()?;
    let kubectl = |args: &[&str]| world.cluster.kubectl_ok(args);
    kubectl(&["create", "serviceaccount", "observer", "-n", "aviflow-system"])?;
    let resources = "--resource=nodes,pods,namespaces,pools.aviflow.dev,queues.aviflow.dev,trainingjobs.aviflow.dev";
    kubectl(&["create", "clusterrole", "observer", "--verb=get,list,watch", resources])?;
    let account = "--serviceaccount=aviflow-system:observer";
    kubectl(&["create", "clusterrolebinding", "observer", "--clusterrole=observer", account])?;
    world.cluster.apply(&pod(world, "notebook", 3).to_string())?;
    world.cluster.apply(&pod(world, "too-large", 9).to_string())?;
    let plane = Plane::start_as(&world.cluster, "observer", &["--mode", "observe"])?;
    let seen = until("the pods are seen", LONGEST, || {
        let seen = plane.json(&["observed"])?;
        let reason = seen["pending"][0]["reason"].as_str().unwrap_or_default();
        let all = seen["namespaces"][0]["gpus"] == 3 && reason.contains("Insufficient nvidia.com/gpu");
        Ok(all.then_some(seen))
    })?;
    ensure!(seen["observing"] == true && seen["metrics"] == false, "{seen}");
    ensure!(seen["pending"][0]["pod"] == "too-large" && seen["pending"][0]["gpus"] == 9, "{seen}");
    let free = &seen["free"][0];
    ensure!(free["free"] == 13 && free["wholeNodes"] == 1 && free["scattered"] == 5, "{seen}");
    let said = plane.ok(&["observed"])?;
    ensure!(said.contains("default/notebook (3, ") && said.contains("no metrics"), "{said}");
    // The ledger has it, too.
    let usage = plane.json(&["usage", "--by", "state"])?;
    ensure!(usage["rows"].to_string().contains("foreign"), "{usage}");
    // It takes nothing.
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("job.yaml");
    std::fs::write(&file, format!("name: refused\nimage: {}\nrun: sleep 1\n", world.image))?;
    let refused = plane.aviflow(&["run", &file.display().to_string()])?;
    let error = String::from_utf8_lossy(&refused.stderr);
    ensure!(!refused.status.success() && error.contains("only observes"), "{error}");
    drop(plane);
    for object in ["pod/notebook", "pod/too-large", "clusterrolebinding/observer", "clusterrole/observer"] {
        kubectl(&["delete", object])?;
    }
    kubectl(&["delete", "serviceaccount", "observer", "-n", "aviflow-system"])?;
    world.plane.run()
}
