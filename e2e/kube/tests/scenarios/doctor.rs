//! `aviflow doctor --kube`.

use crate::World;
use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

fn checks(world: &World) -> Result<(Option<i32>, Vec<Value>)> {
    let kubeconfig = world.cluster.kubeconfig().display().to_string();
    let out = world.plane.aviflow(&["doctor", "--kube", "--kubeconfig", &kubeconfig, "-o", "json"])?;
    let said = String::from_utf8_lossy(&out.stdout);
    let checks: Vec<Value> =
        serde_json::from_str(&said).with_context(|| format!("{said}{}", String::from_utf8_lossy(&out.stderr)))?;
    Ok((out.status.code(), checks))
}

pub fn a_cluster_is_checked(world: &mut World) -> Result<()> {
    let (code, found) = checks(world)?;
    let wrong: Vec<&Value> = found.iter().filter(|c| c["ok"] != true).collect();
    ensure!(code == Some(0) && wrong.is_empty(), "{wrong:?}");
    for name in ["kubernetes", "kubelets", "definitions", "admission", "rights", "GPUs", "priority class"] {
        ensure!(found.iter().any(|c| c["name"] == name), "{name} was not looked at: {found:?}");
    }
    let pool = json!({
        "apiVersion": "aviflow.dev/v1alpha1", "kind": "Pool", "metadata": {"name": "main"},
        "spec": {"kubernetes": {"runtimeClass": "missing", "fabric": {"rdmaResources": {"rdma/ib": 1}}}},
    });
    world.cluster.apply(&pool.to_string())?;
    let (code, found) = checks(world)?;
    let wrong = found.iter().filter(|c| c["ok"] != true);
    let wrong: Vec<&str> = wrong.filter_map(|c| c["name"].as_str()).collect();
    ensure!(code == Some(1) && wrong == ["fabric", "runtime class"], "{found:?}");
    world.cluster.kubectl_ok(&["delete", "pool", "main", "--timeout=60s"])?;
    // The account of the control plane may not look at everything, and the answer says so.
    let out = world.plane.aviflow(&["doctor", "--kube"])?;
    let said = String::from_utf8_lossy(&out.stdout);
    ensure!(out.status.code() == Some(1) && said.contains("not to be seen"), "{said}");
    Ok(())
}
