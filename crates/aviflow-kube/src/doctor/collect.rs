//! Asks a cluster for what [`super::judge`] weighs.

use super::{CONTROL_PLANE, Deployed, Facts, NamespaceFact, NodeFact, Place, Right, Seen, rights};
use crate::body::DEFAULT_POOL;
use crate::certified;
use crate::documents::read::Kind;
use crate::names;
use crate::object;
use crate::profile::Profile;
use futures_util::StreamExt;
use futures_util::stream;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::authorization::v1::SubjectAccessReview;
use k8s_openapi::api::core::v1::{Namespace, Node, PersistentVolumeClaim, ServiceAccount};
use k8s_openapi::api::node::v1::RuntimeClass;
use k8s_openapi::api::scheduling::v1::PriorityClass;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::api::{ListParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::core::{ApiResource, DynamicObject, GroupVersionKind};
use kube::{Api, Client, Config};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::path::Path;

/// Questions about rights at a time.
const QUESTIONS: usize = 8;

/// The cluster of a kubeconfig, else that of `KUBECONFIG`, of the home folder or of this pod.
///
/// # Errors
/// If there is none, with the reason.
pub async fn connect(kubeconfig: Option<&Path>) -> Seen<Client> {
    let Some(path) = kubeconfig else { return Client::try_default().await.map_err(|e| e.to_string()) };
    let file = Kubeconfig::read_from(path).map_err(|e| e.to_string())?;
    let config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await;
    Client::try_from(config.map_err(|e| e.to_string())?).map_err(|e| e.to_string())
}

/// Everything that is judged. What cannot be seen says why.
pub async fn collect(client: &Client, namespace: &str, priority_class: &str) -> Facts {
    let (claims, accounts) = (listed::<PersistentVolumeClaim>(client).await, listed::<ServiceAccount>(client).await);
    Facts {
        version: client.apiserver_version().await.map(|v| v.git_version).map_err(|e| e.to_string()),
        definitions: definitions(client).await,
        policies: policies(client).await,
        namespace: namespace.to_owned(),
        rights: rights_held(client, namespace).await,
        pools: pools(client).await,
        nodes: listed::<Node>(client).await.map(|nodes| nodes.iter().map(node).collect()),
        runtime_classes: listed::<RuntimeClass>(client).await.map(called),
        priority_classes: listed::<PriorityClass>(client).await.map(called),
        namespaces: namespaces(client, claims, accounts).await,
        priority_class: priority_class.to_owned(),
    }
}

async fn listed<T>(client: &Client) -> Seen<Vec<T>>
where
    T: kube::Resource<DynamicType = ()> + Clone + Debug + serde::de::DeserializeOwned,
{
    let list = Api::<T>::all(client.clone()).list(&ListParams::default()).await;
    list.map(|list| list.items).map_err(|e| e.to_string())
}

fn called<T: kube::Resource<DynamicType = ()>>(things: Vec<T>) -> BTreeSet<String> {
    things.iter().filter_map(|thing| thing.meta().name.clone()).collect()
}

async fn dynamic(client: &Client, group: &str, version: &str, kind: &str, plural: &str) -> Seen<Vec<DynamicObject>> {
    let resource = ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(group, version, kind), plural);
    let list = Api::<DynamicObject>::all_with(client.clone(), &resource).list(&ListParams::default()).await;
    list.map(|list| list.items).map_err(|e| e.to_string())
}

async fn definitions(client: &Client) -> Seen<BTreeMap<String, Option<serde_json::Value>>> {
    let all = dynamic(client, "apiextensions.k8s.io", "v1", "CustomResourceDefinition", "customresourcedefinitions");
    let ours = all.await?.into_iter().filter(|d| d.data["spec"]["group"] == names::GROUP);
    let one = |d: DynamicObject| {
        let plural = d.data["spec"]["names"]["plural"].as_str()?.to_owned();
        let versions = d.data["spec"]["versions"].as_array()?;
        let served = versions.iter().find(|v| v["name"] == names::VERSION && v["served"] == true);
        Some((plural, served.map(|v| v["schema"]["openAPIV3Schema"].clone())))
    };
    Ok(ours.filter_map(one).collect())
}

async fn policies(client: &Client) -> Seen<BTreeSet<String>> {
    let kinds = [
        ("MutatingAdmissionPolicy", "mutatingadmissionpolicies"),
        ("MutatingAdmissionPolicyBinding", "mutatingadmissionpolicybindings"),
        ("ValidatingAdmissionPolicy", "validatingadmissionpolicies"),
        ("ValidatingAdmissionPolicyBinding", "validatingadmissionpolicybindings"),
    ];
    let mut there = BTreeSet::new();
    for (kind, plural) in kinds {
        let objects = dynamic(client, "admissionregistration.k8s.io", "v1", kind, plural).await?;
        there.extend(objects.into_iter().filter_map(|o| Some(format!("{kind} {}", o.metadata.name?))));
    }
    Ok(there)
}

async fn pools(client: &Client) -> Seen<Vec<Profile>> {
    let objects = Api::<DynamicObject>::all_with(client.clone(), &Kind::Pool.resource());
    let objects = objects.list(&ListParams::default()).await.map_err(|e| e.to_string())?;
    let pools: Vec<Profile> = objects.items.iter().filter_map(object::profile).collect();
    Ok(if pools.is_empty() { vec![Profile::nvidia(DEFAULT_POOL)] } else { pools })
}

fn node(node: &Node) -> NodeFact {
    let whole = |of: Option<&BTreeMap<String, Quantity>>| -> BTreeMap<String, u32> {
        let extended = of.into_iter().flatten().filter(|(name, _)| name.contains('/'));
        extended.filter_map(|(name, amount)| Some((name.clone(), amount.0.parse().ok()?))).collect()
    };
    let status = node.status.as_ref();
    NodeFact {
        name: node.metadata.name.clone().unwrap_or_default(),
        kubelet: status.and_then(|s| s.node_info.as_ref()).map(|i| i.kubelet_version.clone()).unwrap_or_default(),
        labels: node.metadata.labels.clone().unwrap_or_default(),
        capacity: whole(status.and_then(|s| s.capacity.as_ref())),
        allocatable: whole(status.and_then(|s| s.allocatable.as_ref())),
    }
}

/// Namespaces with the account of job pods, which each gets with its first job, or with jobs that wait for theirs.
async fn namespaces(
    client: &Client,
    claims: Seen<Vec<PersistentVolumeClaim>>,
    accounts: Seen<Vec<ServiceAccount>>,
) -> Seen<Vec<NamespaceFact>> {
    let ours = |a: &ServiceAccount| {
        let metadata = &a.metadata;
        (metadata.name.as_deref() == Some(names::JOB_ACCOUNT)).then(|| metadata.namespace.clone()).flatten()
    };
    let mut with_jobs: BTreeSet<String> = accounts?.iter().filter_map(ours).collect();
    let jobs = dynamic(client, names::GROUP, names::VERSION, "TrainingJob", "trainingjobs").await?;
    with_jobs.extend(jobs.into_iter().filter_map(|job| job.metadata.namespace));
    let claims = claims?;
    let one = |namespace: Namespace| {
        let name = namespace.metadata.name.filter(|name| with_jobs.contains(name))?;
        let level = namespace.metadata.labels.unwrap_or_default().remove("pod-security.kubernetes.io/enforce");
        let here = claims.iter().filter(|c| c.metadata.namespace.as_ref() == Some(&name));
        let claim = |c: &PersistentVolumeClaim| {
            let bound = c.status.as_ref().and_then(|s| s.phase.as_deref()) == Some("Bound");
            let modes = c.spec.as_ref().and_then(|s| s.access_modes.clone()).unwrap_or_default();
            Some((c.metadata.name.clone()?, (bound, modes)))
        };
        Some(NamespaceFact { claims: here.filter_map(claim).collect(), name, level })
    };
    Ok(listed::<Namespace>(client).await?.into_iter().filter_map(one).collect())
}

/// The control plane's own Deployment, as its arguments say it.
async fn deployed(client: &Client, namespace: &str) -> Seen<Deployed> {
    let deployments: Api<Deployment> = Api::namespaced(client.clone(), namespace);
    let found = deployments.get_opt(CONTROL_PLANE).await.map_err(|e| e.to_string())?;
    let pod = found.and_then(|found| found.spec?.template.spec);
    let containers = pod.map(|pod| pod.containers).unwrap_or_default();
    let arguments: Vec<String> = containers.into_iter().filter_map(|container| container.args).flatten().collect();
    Ok(said(&arguments))
}

fn said(arguments: &[String]) -> Deployed {
    let tls = arguments.iter().any(|argument| argument == "--tls");
    let secret = arguments.iter().find_map(|argument| argument.strip_prefix("--tls-secret="));
    Deployed { tls, tls_secret: secret.map(str::to_owned) }
}

/// Which rights the control plane's account has. Whoever asks needs the right to ask for others.
async fn rights_held(client: &Client, namespace: &str) -> Seen<Vec<(Right, bool)>> {
    let reviews = Api::<SubjectAccessReview>::all(client.clone());
    let reviews = &reviews;
    let ask = |right: Right| async move {
        let (resource, subresource) = right.resource.split_once('/').unwrap_or((right.resource, ""));
        let place = match right.place {
            Place::Cluster => "",
            Place::Own => namespace,
            Place::System => certified::PUBLISHED.0,
        };
        let review = serde_json::from_value(json!({"spec": {
            "user": format!("system:serviceaccount:{namespace}:{}", CONTROL_PLANE),
            "groups": ["system:serviceaccounts", format!("system:serviceaccounts:{namespace}"), "system:authenticated"],
            "resourceAttributes": {
                "verb": right.verb, "group": right.group, "resource": resource, "subresource": subresource,
                "name": right.name.as_deref().unwrap_or_default(), "namespace": place,
            },
        }}));
        let review: SubjectAccessReview = review.map_err(|e| e.to_string())?;
        let answer = reviews.create(&PostParams::default(), &review).await.map_err(|e| e.to_string())?;
        Ok((right, answer.status.is_some_and(|s| s.allowed)))
    };
    let asked = rights(&deployed(client, namespace).await?);
    let answers: Vec<Seen<(Right, bool)>> =
        stream::iter(asked.into_iter().map(ask)).buffered(QUESTIONS).collect().await;
    answers.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MANIFEST: &str = include_str!("../../../../deploy/aviflow.yaml");

    #[test]
    fn the_arguments_of_the_manifest_are_understood() {
        let mut arguments: Vec<String> =
            MANIFEST.lines().filter_map(|line| line.trim().strip_prefix("- ")).map(str::to_owned).collect();
        assert_eq!(said(&arguments), Deployed { tls: true, tls_secret: None });
        arguments.push("--tls-secret=web".to_owned());
        assert_eq!(said(&arguments).tls_secret.as_deref(), Some("web"));
        assert_eq!(said(&[]), Deployed::default());
    }
}
