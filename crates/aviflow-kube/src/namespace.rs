//! What a namespace needs before job pods can be in it: an account without rights, a network policy, and a
//! disruption budget.
//!
//! An eviction (`kubectl drain`) of a job that may be suspended needs no budget: its pod has the job's grace, in which
//! the whole gang saves itself, and the drain waits for the pod. One that may not be suspended is not evicted either:
//! the drain waits for the job's end, and says for which budget.

use crate::api::persist;
use crate::names;
use k8s_openapi::api::core::v1::ServiceAccount;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::api::PostParams;
use kube::core::NamespaceResourceScope;
use kube::{Api, Client, Resource, ResourceExt as _};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::json;
use std::collections::BTreeSet;
use std::fmt::Debug;
use std::sync::{Mutex, PoisonError};

/// Namespaces that were prepared.
#[derive(Default)]
pub struct Namespaces(Mutex<BTreeSet<String>>);

impl Namespaces {
    /// Prepares a namespace, where that was not done. What an administrator made of the same names is left alone.
    ///
    /// # Errors
    /// If it cannot be, with the reason.
    pub async fn prepare(&self, client: &Client, namespace: &str) -> Result<(), String> {
        let prepared = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if prepared().contains(namespace) {
            return Ok(());
        }
        let labels = json!({names::MANAGED_BY: names::AVIFLOW});
        let account: ServiceAccount = serde_json::from_value(json!({
            "metadata": {"name": names::JOB_ACCOUNT, "labels": labels},
            "automountServiceAccountToken": false,
        }))
        .map_err(|e| e.to_string())?;
        // Workers of one namespace reach each other; nobody else reaches them. They reach all.
        let policy: NetworkPolicy = serde_json::from_value(json!({
            "metadata": {"name": names::JOB_ACCOUNT, "labels": labels},
            "spec": {
                "podSelector": {"matchLabels": labels},
                "policyTypes": ["Ingress"],
                "ingress": [{"from": [{"podSelector": {"matchLabels": labels}}]}],
            },
        }))
        .map_err(|e| e.to_string())?;
        // Of pods that no controller scales only a number of those that must stay may be asked: more than there are.
        let budget: PodDisruptionBudget = serde_json::from_value(json!({
            "metadata": {"name": names::BUDGET, "labels": labels},
            "spec": {
                "minAvailable": i32::MAX,
                "selector": {"matchLabels": {names::MANAGED_BY: names::AVIFLOW, names::PREEMPTIBLE: "false"}},
            },
        }))
        .map_err(|e| e.to_string())?;
        make(client, namespace, "service account", &account).await?;
        make(client, namespace, "network policy", &policy).await?;
        make(client, namespace, "disruption budget", &budget).await?;
        prepared().insert(namespace.to_owned());
        Ok(())
    }
}

/// Makes an object, unless there is one of its name.
async fn make<K>(client: &Client, namespace: &str, what: &str, object: &K) -> Result<(), String>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + Debug + Serialize + DeserializeOwned,
{
    let api = Api::<K>::namespaced(client.clone(), namespace);
    let how = PostParams::default();
    match persist(|| async { api.create(&how, object).await.map(|_| ()) }).await {
        Err(refused) if !refused.is_conflict() => {
            Err(format!("the {what} {namespace}/{} cannot be made: {}", object.name_any(), refused.message))
        }
        _ => Ok(()),
    }
}
