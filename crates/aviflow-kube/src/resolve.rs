//! What the containers of a job are to run: settled once, at submission.
//!
//! An environment is looked up among the cluster's objects, a tag is asked of its registry. Whatever moves or vanishes
//! afterwards changes no job.

use crate::names;
use crate::object;
use crate::profile::Profile;
use crate::registry::{Login, Registries, RegistryError, logins};
use aviflow_api::crd::EnvironmentSpec;
use aviflow_api::environment::{Candidate, choose, hex};
use aviflow_api::image::ImageName;
use aviflow_api::rest::{ApiError, EnvironmentInfo};
use aviflow_api::spec::{JobSpec, ResolvedImage};
use k8s_openapi::api::core::v1::{Secret, ServiceAccount};
use kube::api::ListParams;
use kube::core::{ApiResource, DynamicObject, GroupVersionKind};
use kube::{Api, Client};
use serde_json::json;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// How long the apiserver may take: somebody waits.
const PATIENCE: Duration = Duration::from_secs(10);

/// The ServiceAccounts whose pull secrets count, beside those of pools: where people look for them, and that of the
/// pods themselves.
pub const ACCOUNTS: [&str; 2] = ["default", names::JOB_ACCOUNT];

/// Why it is not known what a job is to run.
#[derive(Clone, Debug, PartialEq)]
pub struct Unresolved {
    /// What happened, and what to do.
    pub error: ApiError,
    /// Whether it lies in who was asked.
    pub passing: bool,
}

/// Resolves what jobs name.
#[derive(Clone)]
pub struct Resolver {
    client: Client,
    registries: Arc<Registries>,
}

impl Resolver {
    /// One for a cluster.
    #[must_use]
    pub fn new(client: Client, registries: Registries) -> Resolver {
        Resolver { client, registries: Arc::new(registries) }
    }

    /// What the containers of a job run; none where its document names neither image nor environment.
    ///
    /// # Errors
    /// If that cannot be told, with what to do.
    pub async fn resolve(&self, namespace: &str, spec: &JobSpec) -> Result<Option<ResolvedImage>, Unresolved> {
        self.buckets(spec).await?;
        if let Some(image) = &spec.image {
            return self.image(namespace, image).await.map(Some);
        }
        let Some(asked) = &spec.environment else { return Ok(None) };
        let all = self.environments().await.map_err(|why| {
            let message = format!("environment `{asked}` cannot be looked up: {why}");
            let error = ApiError::new("clusterUnreachable", message).help("try again once the apiserver answers");
            Unresolved { error, passing: true }
        })?;
        let chosen = choose(&all, asked, candidate).map_err(|error| Unresolved { error, passing: false })?;
        Ok(Some(ResolvedImage {
            reference: chosen.image.clone(),
            pinned: chosen.image.clone(),
            environment: Some(chosen.title()),
            env: chosen.env.clone(),
            prefix: chosen.launcher.prefix.clone(),
            deprecated: chosen.deprecated.clone(),
        }))
    }

    /// The cluster's environments, by name and version.
    ///
    /// # Errors
    /// If the apiserver does not say.
    pub async fn environments(&self) -> Result<Vec<EnvironmentSpec>, String> {
        let kind = GroupVersionKind::gvk(names::GROUP, names::VERSION, "Environment");
        let kind = ApiResource::from_gvk_with_plural(&kind, "environments");
        let api = Api::<DynamicObject>::all_with(self.client.clone(), &kind);
        let list = within(api.list(&ListParams::default())).await?;
        // One that its definition let through and this program cannot read is of a newer one.
        let spec = |object: DynamicObject| serde_json::from_value(object.data.get("spec")?.clone()).ok();
        let mut all: Vec<EnvironmentSpec> = list.items.into_iter().filter_map(spec).collect();
        all.sort_by(|a, b| (&a.name, a.version).cmp(&(&b.name, b.version)));
        Ok(all)
    }

    /// Refuses data in buckets that no pool has.
    async fn buckets(&self, spec: &JobSpec) -> Result<(), Unresolved> {
        let elsewhere = |source: &&str| source.split_once("://").is_some_and(|(s, _)| !["pvc", "file"].contains(&s));
        let sources: Vec<&str> = spec.data.iter().map(|d| d.source.as_str()).filter(elsewhere).collect();
        if sources.is_empty() {
            return Ok(());
        }
        let profiles = self.profiles().await.map_err(|why| {
            let message = format!("data at {} cannot be looked up: {why}", sources[0]);
            let error = ApiError::new("clusterUnreachable", message).help("try again once the apiserver answers");
            Unresolved { error, passing: true }
        })?;
        let has = |source: &str| profiles.iter().any(|p| p.kubernetes.bucket(source).is_some());
        match sources.into_iter().find(|source| !has(source)) {
            None => Ok(()),
            Some(source) => {
                let error = ApiError::new("noSuchBucket", format!("no pool has a claim for {source}")).help(
                    "ask an administrator to name one in a pool's `buckets`, or put the data on a volume and write `pvc://CLAIM/PATH`",
                );
                Err(Unresolved { error, passing: false })
            }
        }
    }

    /// What the pools' documents say of Kubernetes.
    async fn profiles(&self) -> Result<Vec<Profile>, String> {
        let pools = Api::<DynamicObject>::all_with(self.client.clone(), &crate::documents::read::Kind::Pool.resource());
        let list = within(pools.list(&ListParams::default())).await?;
        Ok(list.items.iter().filter_map(object::profile).collect())
    }

    async fn image(&self, namespace: &str, asked: &str) -> Result<ResolvedImage, Unresolved> {
        let image = ImageName::parse(asked).map_err(|e| {
            let error = ApiError::new("badImage", e.to_string()).help("write for example `registry.example/train:v1`");
            Unresolved { error, passing: false }
        })?;
        let resolved =
            |pinned: String| ResolvedImage { reference: asked.to_owned(), pinned, ..ResolvedImage::default() };
        if image.digest.is_some() {
            return Ok(resolved(asked.to_owned()));
        }
        let mut refused = match self.digest(&image, None).await {
            Ok(digest) => return Ok(resolved(image.pinned(&digest))),
            Err(refused) => refused,
        };
        let mut unread = Vec::new();
        // Some registries say of what they do not show that it is not there.
        if !matches!(refused, RegistryError::Unreachable { .. }) {
            let known = self.logins(namespace, &image, &mut unread).await;
            for login in known {
                match self.digest(&image, Some(login)).await {
                    Ok(digest) => return Ok(resolved(image.pinned(&digest))),
                    Err(other) => refused = other,
                }
            }
        }
        Err(told(&refused, &unread))
    }

    async fn digest(&self, image: &ImageName, login: Option<Login>) -> Result<String, RegistryError> {
        let _turn = self.registries.turn().await;
        let (registries, about) = (self.registries.clone(), image.clone());
        let asked = tokio::task::spawn_blocking(move || registries.digest(&about, login.as_ref())).await;
        asked.unwrap_or_else(|_| {
            let why = "the control plane is stopping".to_owned();
            Err(RegistryError::Unreachable { image: image.to_string(), registry: image.registry().to_owned(), why })
        })
    }

    /// The logins for an image that pods of a namespace would pull it with; what could not be read goes into `unread`.
    async fn logins(&self, namespace: &str, image: &ImageName, unread: &mut Vec<String>) -> Vec<Login> {
        let mut names = BTreeSet::new();
        match within(pull_secrets(&self.client, namespace)).await {
            Ok(found) => names.extend(found),
            Err(why) => unread.push(format!("the ServiceAccounts of {namespace} cannot be read: {why}")),
        }
        match self.profiles().await {
            Ok(profiles) => names.extend(profiles.into_iter().flat_map(|p| p.kubernetes.image_pull_secrets)),
            Err(why) => unread.push(format!("the pools cannot be read: {why}")),
        }
        let api = Api::<Secret>::namespaced(self.client.clone(), namespace);
        let mut found = Vec::new();
        for name in names {
            match within(api.get_opt(&name)).await {
                Ok(Some(secret)) => {
                    let data: BTreeMap<String, Vec<u8>> =
                        secret.data.unwrap_or_default().into_iter().map(|(key, value)| (key, value.0)).collect();
                    found.extend(logins(&name, &data, image));
                }
                Ok(None) => unread.push(format!("there is no Secret {namespace}/{name}")),
                Err(why) => unread.push(format!("the Secret {namespace}/{name} cannot be read: {why}")),
            }
        }
        found
    }
}

/// The pull secrets that a namespace's accounts name.
pub(crate) async fn pull_secrets(client: &Client, namespace: &str) -> kube::Result<BTreeSet<String>> {
    let api = Api::<ServiceAccount>::namespaced(client.clone(), namespace);
    let mut names = BTreeSet::new();
    for account in ACCOUNTS {
        let account = api.get_opt(account).await?;
        names.extend(account.and_then(|a| a.image_pull_secrets).unwrap_or_default().into_iter().map(|s| s.name));
    }
    Ok(names)
}

async fn within<T>(asked: impl Future<Output = kube::Result<T>>) -> Result<T, String> {
    match tokio::time::timeout(PATIENCE, asked).await {
        Ok(answer) => answer.map_err(|e| match e {
            kube::Error::Api(status) => status.message.clone(),
            other => other.to_string(),
        }),
        Err(_) => Err(format!("the apiserver has not answered for {} s", PATIENCE.as_secs())),
    }
}

fn candidate(environment: &EnvironmentSpec) -> Candidate<'_> {
    let EnvironmentSpec { name, version, deprecated, .. } = environment;
    Candidate { name, version: *version, deprecated: deprecated.as_deref() }
}

/// What a person is told who named a tag.
fn told(refused: &RegistryError, unread: &[String]) -> Unresolved {
    let digest = "or write the image by its digest, for which no registry is asked";
    let (code, mut help, passing) = match refused {
        RegistryError::NotFound { .. } => ("noSuchImage", "see that name and tag are right".to_owned(), false),
        RegistryError::Denied { .. } => {
            let help = format!(
                "name a pull secret in the namespace's ServiceAccount `{}` or the pool's `imagePullSecrets`, and let the control plane read it (`images.pullSecrets` of the chart), {digest}",
                ACCOUNTS[0]
            );
            ("imageDenied", help, false)
        }
        RegistryError::Unreachable { .. } => {
            let help = format!("see that the control plane reaches it, and submit again, {digest}");
            ("registryUnreachable", help, true)
        }
    };
    if !unread.is_empty() {
        help = format!("{}; {help}", unread.join("; "));
    }
    Unresolved { error: ApiError::new(code, refused.to_string()).help(help), passing }
}

/// An environment as people are shown it.
#[must_use]
pub fn shown(environment: EnvironmentSpec) -> EnvironmentInfo {
    let EnvironmentSpec { name, version, description, owner: _, image, env, launcher, deprecated } = environment;
    let content = json!({"image": image, "env": env, "prefix": launcher.prefix}).to_string();
    EnvironmentInfo {
        name,
        version,
        hash: hex(&Sha256::digest(content)),
        description,
        python: String::new(),
        env,
        image: Some(image),
        prefix: launcher.prefix,
        deprecated,
        lock: None,
        // Images are pulled where they are needed.
        ready: true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_names_image_registry_and_remedy() {
        let (image, registry) = ("reg.example/train:v1".to_owned(), "reg.example".to_owned());
        let cases = [
            (RegistryError::NotFound { image: image.clone(), registry: registry.clone() }, "noSuchImage", false),
            (
                RegistryError::Denied { image: image.clone(), registry: registry.clone(), who: "everybody".into() },
                "imageDenied",
                false,
            ),
            (RegistryError::Unreachable { image, registry, why: "no route".into() }, "registryUnreachable", true),
        ];
        for (refused, code, passing) in cases {
            let told = told(&refused, &["there is no Secret nlp/pull".to_owned()]);
            assert_eq!((told.error.code.as_str(), told.passing), (code, passing));
            let message = &told.error.message;
            assert!(message.contains("reg.example/train:v1") && message.contains("registry reg.example "), "{message}");
            assert!(told.error.help.is_some_and(|h| h.contains("there is no Secret nlp/pull; ")));
        }
    }
}
