//! The canonical job document: every default filled in, every shorthand resolved.
//!
//! Files have shorthand (`nodes: 4`, `run` as text); objects and REST have this form.

use crate::duration::Duration;
use crate::environment::hex;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;

/// A declared training.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct JobSpec {
    /// The name of the work: a DNS label of at most 40 characters.
    pub name: String,
    /// The queue, by its name.
    pub queue: String,
    /// The priority, by its name: low, normal, high, urgent, or one the administrator defined.
    pub priority: String,
    /// The environment as `name` or `name@version`; none means the machine's own PATH.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub environment: Option<String>,
    /// A container image by tag or digest, instead of an environment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// A hash-locked requirements file that is layered onto the environment, relative to the document.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requirements: Option<String>,
    /// Where the code comes from; none means that the job needs no code. Not even the document's
    /// folder is taken along without being named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<Code>,
    /// How many nodes the gang has. A file that does not say it means one.
    pub nodes: Nodes,
    /// GPUs on each node. A file that does not say it means 1, also with several nodes: whole
    /// nodes are asked for, never assumed.
    pub gpus_per_node: u32,
    /// Accelerator types in order of preference; empty means any.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpu_type: Vec<String>,
    /// The program and its arguments, taken literally; a script of several lines is `bash` with it.
    pub run: Vec<String>,
    /// How many processes the platform starts on a node.
    pub processes: Processes,
    /// Environment variables.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Environment variables from secrets: variable to `secret/key`. References, never values.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub secrets: BTreeMap<String, String>,
    /// Data volumes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub data: Vec<Data>,
    /// Paths that are kept after the end, and fetched with `aviflow cp`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub outputs: Vec<String>,
    /// Where the training saves itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<CheckpointPolicy>,
    /// Host resources.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resources: Option<Resources>,
    /// Where in the topology the gang may be placed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub topology: Option<Topology>,
    /// The greatest time in Running, over all attempts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_limit: Option<Duration>,
    /// Whether the platform may suspend it. A file that does not say it means yes.
    pub preemptible: bool,
    /// When it is run again. A file that does not say it means never.
    pub retry: Retry,
    /// How long its GPUs are kept after it failed for good, for somebody to look around.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep_on_failure: Option<Duration>,
    /// Jobs it waits for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub after: Vec<After>,
    /// The seed given to the training.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
    /// Whom to tell.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notify: Vec<Notify>,
}

/// Where the code comes from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum Code {
    /// A folder, relative to the document; a content-hashed snapshot is taken at submission.
    Folder(String),
    /// A commit of a git repository.
    Git {
        /// The repository.
        git: String,
        /// The branch, tag or commit, resolved to a commit at submission.
        #[serde(rename = "ref")]
        reference: String,
    },
}

/// How many nodes the gang has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Nodes {
    /// The least number.
    pub min: u32,
    /// The greatest number.
    pub max: u32,
}

/// How many processes the platform starts on a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum Processes {
    /// One, as torchrun and accelerate expect.
    #[default]
    PerNode,
    /// One for each GPU.
    PerGpu,
}

/// A data volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Data {
    /// The name; the process finds the path in `AVIFLOW_DATA_<NAME>`.
    pub name: String,
    /// A path or URL.
    pub source: String,
    /// Where it is mounted in a container.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mount: Option<String>,
    /// Whether the job may only read it.
    #[serde(default = "yes")]
    pub read_only: bool,
}

fn yes() -> bool {
    true
}

/// Where the training saves itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CheckpointPolicy {
    /// The folder; the process finds it in `AVIFLOW_CHECKPOINT_DIR`.
    pub path: String,
    /// How often the training saves, as far as the platform should expect.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub every: Option<Duration>,
    /// How many checkpoints are kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep: Option<u32>,
}

/// Host resources.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Resources {
    /// CPUs for each GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_per_gpu: Option<f64>,
    /// Memory for each GPU, such as `200Gi`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_per_gpu: Option<String>,
    /// Shared memory (`/dev/shm`) of a worker, such as `64Gi`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shm: Option<String>,
}

/// Where in the topology the gang may be placed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Topology {
    /// The level that must hold the whole gang.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub require: Option<String>,
    /// The level that should.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefer: Option<String>,
    /// How long to wait for what is preferred.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_wait: Option<Duration>,
}

/// When a job is run again. Suspensions and node failures do not count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Retry {
    /// Application failures after which it is still run again.
    pub failures: u32,
}

/// A job to wait for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct After {
    /// Its name.
    pub job: String,
    /// How it must end.
    pub on: Ending,
}

/// How a job ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum Ending {
    /// Every rank ended with 0.
    Succeeded,
    /// It failed.
    Failed,
    /// It ended in any way.
    Ended,
}

/// Whom to tell of what.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Notify {
    /// The address that gets a POST. Who has it may write there, so it is shown with its host alone.
    pub webhook: String,
    /// On what.
    pub on: Vec<NotifyOn>,
    /// The form of what is posted; by the address, where it is not said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<NotifyFormat>,
}

/// The form of a notification.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum NotifyFormat {
    /// Everything, field by field.
    Json,
    /// The text alone, as chats take it.
    Slack,
}

/// What a person is told of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[expect(missing_docs, reason = "the names say it")]
pub enum NotifyOn {
    Started,
    Suspended,
    Restarted,
    Idle,
    Failed,
    Succeeded,
    EstimateSlipped,
}

/// What a submission brings beside the document: everything resolved, by content.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Provenance {
    /// SHA-256 of the code snapshot (an object of the store), if there is code.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<CodeSnapshot>,
    /// The environment, resolved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub environment: Option<ResolvedEnvironment>,
    /// The image, resolved: where a cluster runs it, and not this machine. Told by the control plane alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<ResolvedImage>,
    /// Packages of the job's own that are layered onto the image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layer: Option<Layer>,
    /// SHA-256 of each data source that can be hashed, by its name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub data: BTreeMap<String, String>,
    /// Facts of the machine that submitted: operating system, architecture, versions.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub client: BTreeMap<String, String>,
    /// The job that this one repeats, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rerun_of: Option<String>,
    /// The object of the cluster that it was submitted as, if it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub object: Option<ObjectRef>,
    /// The file it was submitted from, as a person would name it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
}

impl Provenance {
    /// The hash of what must be made before the job can run: an environment of this machine, or a layer of a cluster.
    #[must_use]
    pub fn made_first(&self) -> Option<&str> {
        let environment = self.environment.as_ref().map(|environment| &environment.hash);
        environment.or(self.layer.as_ref().map(|layer| &layer.hash)).map(String::as_str)
    }

    /// SHA-256 of each lock that it refers to.
    pub fn locks(&self) -> impl Iterator<Item = &String> {
        let environment = self.environment.iter().flat_map(|environment| &environment.locks);
        environment.chain(self.layer.iter().map(|layer| &layer.lock))
    }

    /// Everything by which the store finds what is kept for it: objects by their content, and the layer by its hash.
    pub fn objects(&self) -> impl Iterator<Item = &String> {
        let code = self.code.iter().map(|code| &code.sha256);
        code.chain(self.locks()).chain(self.layer.iter().map(|layer| &layer.hash))
    }
}

/// An object of a cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ObjectRef {
    /// Its name.
    pub name: String,
    /// Its uid, which no other object ever has.
    pub uid: String,
}

/// A code snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CodeSnapshot {
    /// SHA-256 of the archive, hexadecimal.
    pub sha256: String,
    /// Bytes of the archive.
    pub bytes: u64,
    /// Number of files.
    pub files: u64,
    /// The git commit beneath it, if the folder is in a repository.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
    /// Whether there were uncommitted changes.
    #[serde(default)]
    pub dirty: bool,
}

/// What the containers of a job run, settled at submission: neither a tag that moves nor an environment that
/// changes or vanishes makes another job of it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ResolvedImage {
    /// As the document, or the environment that it names, has it.
    pub reference: String,
    /// By its content, `NAME@sha256:…`: what runs.
    pub pinned: String,
    /// The environment that has it, as `name@version`, if the document names one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub environment: Option<String>,
    /// The environment's default variables.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// The environment's words before `run`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub prefix: Vec<String>,
    /// What was to be used instead, where the environment was deprecated then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deprecated: Option<String>,
}

/// Packages of a job's own, which are layered onto the image that it runs in. A client tells the lock alone.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Layer {
    /// SHA-256 of the lock (an object of the store).
    pub lock: String,
    /// What its packages are made for, `linux/amd64`.
    #[serde(default)]
    pub platform: String,
    /// By what it is found: the hash over the namespace, the image, the lock and the platform.
    #[serde(default)]
    pub hash: String,
}

impl Layer {
    /// A lock's layer for an image, which is named by its digest.
    ///
    /// Which of an image's Pythons installs it, and what is taken as there already, follows from the variables and the
    /// prefix of its environment too.
    ///
    /// The namespace enters, as who may run commands in its pods may change what is built there, and harms his own
    /// team alone. Content that is the same is kept once all the same.
    #[must_use]
    pub fn new(namespace: &str, image: &ResolvedImage, lock: &str, platform: &str) -> Layer {
        // Where it is pulled from makes no other image of it.
        let content = image.pinned.split_once('@').map_or(image.pinned.as_str(), |(_, digest)| digest);
        let mut hasher = Sha256::new();
        let mut add = |part: &str| {
            hasher.update((part.len() as u64).to_be_bytes());
            hasher.update(part);
        };
        ["aviflow-layer-2", namespace, content, lock, platform].into_iter().for_each(&mut add);
        add(&image.env.len().to_string());
        image.env.iter().flat_map(|(name, value)| [name, value]).for_each(|part| add(part));
        image.prefix.iter().for_each(|part| add(part));
        Layer { lock: lock.to_owned(), platform: platform.to_owned(), hash: hex(&hasher.finalize()) }
    }
}

/// An environment by its content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ResolvedEnvironment {
    /// The name.
    pub name: String,
    /// The version.
    pub version: u32,
    /// The content hash over everything below; the key of the cache.
    pub hash: String,
    /// Versions of Python that it is locked for, such as `>=3.11,<3.13`.
    pub python: String,
    /// SHA-256 of each lock (objects of the store), the environment's own first, then the job's.
    pub locks: Vec<String>,
    /// Default variables.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_is_found_by_what_it_is_made_of() {
        let hash = |namespace: &str, pinned: &str, lock: &str, platform: &str| {
            Layer::new(namespace, &image(pinned), lock, platform).hash
        };
        let one = hash("nlp", "r/a@sha256:1", "l", "linux/amd64");
        assert_eq!(one, hash("nlp", "mirror/a@sha256:1", "l", "linux/amd64"), "the same content from elsewhere");
        for other in [
            hash("vision", "r/a@sha256:1", "l", "linux/amd64"),
            hash("nlp", "r/a@sha256:2", "l", "linux/amd64"),
            hash("nlp", "r/a@sha256:1", "m", "linux/amd64"),
            hash("nlp", "r/a@sha256:1", "l", "linux/arm64"),
        ] {
            assert_ne!(one, other);
        }
        let with = |env: &[(&str, &str)], prefix: &[&str]| {
            let mut image = image("r/a@sha256:1");
            image.env = env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
            image.prefix = prefix.iter().map(|word| (*word).to_owned()).collect();
            Layer::new("nlp", &image, "l", "linux/amd64").hash
        };
        assert_eq!(with(&[], &[]), one);
        let others = [
            with(&[("PATH", "/opt/conda/bin")], &[]),
            with(&[("PATH", "/opt/other/bin")], &[]),
            with(&[], &["PATH", "/opt/conda/bin"]),
            with(&[], &["/entry.sh"]),
        ];
        let all: std::collections::BTreeSet<&String> = others.iter().chain([&one]).collect();
        assert_eq!(all.len(), 5, "another Python may be found by each");
    }

    fn image(pinned: &str) -> ResolvedImage {
        ResolvedImage { pinned: pinned.to_owned(), ..ResolvedImage::default() }
    }

    #[test]
    fn what_a_job_refers_to_is_kept() {
        let layer = Layer::new("nlp", &image("r/a@sha256:1"), "lock", "linux/amd64");
        let code = CodeSnapshot { sha256: "code".into(), bytes: 1, files: 1, commit: None, dirty: false };
        let provenance = Provenance { layer: Some(layer.clone()), code: Some(code), ..Provenance::default() };
        assert_eq!(provenance.objects().collect::<Vec<_>>(), ["code", "lock", layer.hash.as_str()]);
        assert_eq!(provenance.made_first(), Some(layer.hash.as_str()));
        assert_eq!(Provenance::default().made_first(), None);
    }
}
