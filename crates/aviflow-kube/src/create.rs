//! Making the pods of an attempt.

use crate::api::{Refused, persist};
use crate::body::reference;
use crate::cluster::Message;
use crate::mirror;
use crate::names;
use crate::namespace::Namespaces;
use crate::pod::{self, Share};
use crate::profile::Profile;
use crate::resolve::pull_secrets;
use crate::site::{PodRef, Pods};
use aviflow_engine::ports::JobRecord;
use aviflow_engine::telemetry::StreamKey;
use aviflow_link::Workers;
use k8s_openapi::api::core::v1::Pod;
use kube::api::PostParams;
use kube::{Api, Client};
use std::sync::Arc;
use tokio::sync::{Semaphore, mpsc};

/// Makes an attempt's pods, after its object.
pub(crate) async fn create_all(
    client: Client,
    requests: Arc<Semaphore>,
    messages: mpsc::UnboundedSender<Message>,
    (workers, namespaces): (Arc<Workers<Pods>>, Arc<Namespaces>),
    (record, shares, mut profile, site): (Arc<JobRecord>, Vec<Share>, Profile, pod::Site),
) {
    let owner = match namespaces.prepare(&client, &record.key.namespace).await {
        Ok(()) => mirror::ensure(&client, &record).await,
        Err(reason) => Err(reason),
    };
    let owner = match owner {
        Ok(owner) => owner,
        Err(reason) => {
            for share in shares {
                let _ = messages.send(Message::NotCreated(share.key, reason.clone()));
            }
            return;
        }
    };
    // Where they cannot be read, kubelet says what it cannot pull.
    let found = persist(|| pull_secrets(&client, &record.key.namespace)).await.unwrap_or_default();
    let secrets = &mut profile.kubernetes.image_pull_secrets;
    secrets.extend(found);
    secrets.sort_unstable();
    secrets.dedup();
    for share in shares {
        // Pods of a large gang are made side by side, and none of an attempt that is over by now.
        let Ok(turn) = requests.clone().acquire_owned().await else { return };
        let (client, messages, workers) = (client.clone(), messages.clone(), workers.clone());
        let made = pod::pod(&record, &share, &profile, &site, &owner);
        tokio::spawn(async move {
            let _turn = turn;
            if workers.with(share.key, |w| w.remove || w.stop.is_some()) != Some(false) {
                let _ = messages.send(Message::NotCreated(share.key, "it was stopped before it began".to_owned()));
                return;
            }
            let created = match made {
                Ok(pod) => create(&client, &pod, share.key).await,
                Err(reason) => Err(reason),
            };
            let _ = messages.send(match created {
                Ok(pod) => Message::Created(share.key, pod),
                Err(reason) => Message::NotCreated(share.key, reason),
            });
        });
    }
}

/// Makes a pod, or finds the one that an earlier try has made.
async fn create(client: &Client, pod: &Pod, key: StreamKey) -> Result<PodRef, String> {
    let namespace = pod.metadata.namespace.clone().unwrap_or_default();
    let name = pod.metadata.name.clone().unwrap_or_default();
    let api = Api::<Pod>::namespaced(client.clone(), &namespace);
    let found = match persist(|| async { api.create(&PostParams::default(), pod).await }).await {
        Ok(made) => made,
        Err(refused) if refused.is_conflict() => persist(|| async { api.get(&name).await })
            .await
            .map_err(|e| format!("its pod {namespace}/{name} cannot be read: {}", e.message))?,
        Err(Refused { message, .. }) => return Err(format!("its pod was refused by the apiserver: {message}")),
    };
    let labels = found.metadata.labels.clone().unwrap_or_default();
    if names::worker(&labels) != Some(key) {
        return Err(format!("there is another pod {namespace}/{name} already, which is not Aviflow's; delete it"));
    }
    reference(&found).ok_or_else(|| format!("its pod {namespace}/{name} has no uid"))
}
