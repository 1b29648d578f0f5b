//! What a namespace needs before job pods can be in it: an account without rights, and a network policy.

use crate::api::{Refused, persist};
use crate::names;
use k8s_openapi::api::core::v1::ServiceAccount;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::api::PostParams;
use kube::{Api, Client};
use serde_json::json;
use std::collections::BTreeSet;
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
        let (accounts, policies) =
            (Api::namespaced(client.clone(), namespace), Api::namespaced(client.clone(), namespace));
        let how = PostParams::default();
        let there = |what: &str, made: Result<(), Refused>| match made {
            Err(refused) if !refused.is_conflict() => {
                Err(format!("the {what} {}/{} cannot be made: {}", namespace, names::JOB_ACCOUNT, refused.message))
            }
            _ => Ok(()),
        };
        let made = persist(|| async { accounts.create(&how, &account).await.map(|_| ()) }).await;
        there("service account", made)?;
        let made = persist(|| async { policies.create(&how, &policy).await.map(|_| ()) }).await;
        there("network policy", made)?;
        prepared().insert(namespace.to_owned());
        Ok(())
    }
}
