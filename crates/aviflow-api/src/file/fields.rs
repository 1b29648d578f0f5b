//! The keys of a job's file and of an environment's, as data.

use super::formats as f;
use super::shape::Shape::{Above, Bool, Choice, Either, List, Map, Object as Keys, Text, Whole};
use super::shape::{Field, Object, Shape};

pub(crate) const fn field(key: &'static str, shape: Shape, doc: &'static str) -> Field {
    Field { key, doc, shape, required: false, examples: &[], default: None, most: 256 }
}

impl Field {
    pub(crate) const fn required(mut self) -> Field {
        self.required = true;
        self
    }

    pub(crate) const fn eg(mut self, examples: &'static [&'static str]) -> Field {
        self.examples = examples;
        self
    }

    pub(crate) const fn most(mut self, most: usize) -> Field {
        self.most = most;
        self
    }

    pub(crate) const fn default(mut self, default: &'static str) -> Field {
        self.default = Some(default);
        self
    }
}

/// Most GPUs that a node can have.
pub const MAX_GPUS: u64 = 64;
/// Most nodes that a gang can have.
pub const MAX_NODES: u64 = 100_000;

/// A job.
pub static JOB: Object = Object {
    what: "a job",
    fields: &[
        field("name", Text(&f::NAME), "The name of the work: lowercase letters, digits and `-`, at most 40. A submission that finds it taken becomes `name-2`.")
            .required()
            .eg(&["\"llama3-8b-sft\""]),
        field("queue", Text(&f::QUEUE), "The queue, by its name. Without it, the one of your configuration.").eg(&["\"nlp\""]),
        field("priority", Text(&f::PRIORITY), "`low`, `normal`, `high`, `urgent`, or one that the administrator defined. It orders the jobs of one queue.")
            .eg(&["\"normal\"", "\"low\"", "\"high\"", "\"urgent\""])
            .default("\"normal\""),
        field("environment", Text(&f::ENVIRONMENT), "The environment to run in, as `name` or `name@version`. Without it, the machine's own programs.").eg(&["\"torch-2.9@3\""]),
        field("image", Text(&f::IMAGE), "A container image, by tag or digest, instead of an environment. A tag is resolved once, at submission, and every attempt runs that content.").eg(&["\"registry.example/team/train:v1\""]),
        field("requirements", Text(&f::RELATIVE), "A hash-locked requirements file, relative to this file, that is layered onto the environment.").eg(&["\"extra.lock\""]),
        field("code", Either(&[Text(&f::FOLDER), Keys(&GIT)]), "The folder whose content is taken along, uncommitted changes included, relative to this file; or a commit of a git repository. Without it, the job needs no code.")
            .eg(&["\".\"", "{\"git\": \"https://git.example/team/train\", \"ref\": \"main\"}"]),
        field("nodes", Either(&[Whole(1, MAX_NODES), Keys(&NODES)]), "How many nodes work together, or the least and the greatest number. They start and stop together.")
            .eg(&["4", "{\"min\": 2, \"max\": 8}"])
            .default("1"),
        field("gpusPerNode", Whole(1, MAX_GPUS), "GPUs on each node. Without it one: whole nodes are asked for, never assumed.").eg(&["8"]).default("1"),
        field("gpuType", Either(&[Text(&f::GPU_TYPE), List(&Text(&f::GPU_TYPE), 1)]), "The GPU type, or several in order of preference. Without it, any.").eg(&["\"H100\"", "[\"H100\", \"H200\"]"])
            .most(16),
        field("run", Either(&[Text(&f::COMMAND), List(&Text(&f::FREE), 1)]), "What to run. One line, or a list, is a program and its arguments, taken literally: no shell reads it. Several lines (`run: |`) are a bash script that stops at the first error.")
            .required()
            .eg(&["\"torchrun train.py --config 8b.yaml\"", "[\"python\", \"train.py\"]"])
            .most(4096),
        field("processes", Choice(&[("perNode", "once a node, as torchrun and accelerate expect"), ("perGpu", "once for each GPU, with RANK, LOCAL_RANK and WORLD_SIZE set")]), "How often `run` is started.").default("\"perNode\""),
        field("env", Map(&f::VARIABLE, &Text(&f::FREE)), "Environment variables. Numbers and `true` are taken as they are written.").eg(&["{\"WANDB_PROJECT\": \"sft\"}"]),
        field("secrets", Map(&f::VARIABLE, &Text(&f::SECRET)), "Environment variables from secrets, as `secret/key`: references, never values.").eg(&["{\"HF_TOKEN\": \"hf-token/token\"}"]),
        field("data", List(&Keys(&DATA), 0), "Data that the job reads or writes.").most(32),
        field("outputs", List(&Text(&f::ABSOLUTE), 0), "Folders that are kept after the end, and fetched with `aviflow cp`.").eg(&["[\"/out\"]"]).most(32),
        field("checkpoint", Keys(&CHECKPOINT), "Where and how often the training saves itself."),
        field("resources", Keys(&RESOURCES), "CPUs and memory, for each GPU."),
        field("topology", Keys(&TOPOLOGY), "Where in the network the nodes may lie. The levels are those of the pool, and `node`."),
        field("timeLimit", Text(&f::DURATION), "The greatest time in Running, over all attempts. With it the job can also start early, in a gap.").eg(&["\"24h\"", "\"1-00:00:00\""]),
        field("preemptible", Bool, "Whether the platform may suspend the job and continue it later.").default("true"),
        field("retry", Keys(&RETRY), "When the job is run again."),
        field("keepOnFailure", Text(&f::DURATION), "How long the GPUs are kept after the job failed for good, for somebody to look around with `aviflow exec`. They count as used, and `aviflow cancel` gives them back.").eg(&["\"30m\""]),
        field("after", List(&Keys(&AFTER), 0), "Jobs that must have ended, each as asked, before this one starts.").most(32),
        field("seed", Whole(0, (1 << 63) - 1), "The seed, given to the training in `AVIFLOW_SEED`.").eg(&["42"]),
        field("notify", List(&Keys(&NOTIFY), 0), "Whom to tell of what.").most(16),
    ],
    synonyms: &[
        ("command", "run"), ("cmd", "run"), ("args", "run"), ("script", "run"), ("entrypoint", "run"), ("setup", "run"),
        ("gpus", "gpusPerNode"), ("gpu", "gpusPerNode"), ("gpuCount", "gpusPerNode"), ("num_gpus", "gpusPerNode"),
        ("nproc_per_node", "gpusPerNode"), ("accelerators", "gpusPerNode"), ("gresPerNode", "gpusPerNode"),
        ("num_nodes", "nodes"), ("nnodes", "nodes"), ("replicas", "nodes"), ("workers", "nodes"), ("parallelism", "nodes"),
        ("accelerator", "gpuType"), ("acceleratorType", "gpuType"), ("gpuTypes", "gpuType"),
        ("image_name", "image"), ("container", "image"), ("container_image", "image"),
        ("timeout", "timeLimit"), ("time", "timeLimit"), ("walltime", "timeLimit"), ("maxRunTime", "timeLimit"),
        ("environment_variables", "env"), ("envs", "env"), ("envVars", "env"), ("variables", "env"),
        ("retries", "retry.failures"), ("maxRetries", "retry.failures"), ("backoffLimit", "retry.failures"),
        ("volumes", "data"), ("mounts", "data"), ("datasets", "data"),
        ("workdir", "code"), ("working_dir", "code"), ("source", "code"), ("repo", "code"), ("git", "code"),
        ("partition", "queue"), ("team", "queue"), ("project", "queue"),
        ("depends_on", "after"), ("dependencies", "after"), ("dependency", "after"), ("needs", "after"),
        ("priorityClass", "priority"), ("qos", "priority"),
        ("checkpoints", "checkpoint"), ("checkpointing", "checkpoint"), ("output", "outputs"), ("artifacts", "outputs"),
        ("memory", "resources.memoryPerGpu"), ("mem", "resources.memoryPerGpu"), ("cpus", "resources.cpuPerGpu"),
        ("cpu", "resources.cpuPerGpu"), ("shm", "resources.shm"), ("shmSize", "resources.shm"), ("shm_size", "resources.shm"),
        ("notifications", "notify"), ("webhook", "notify"), ("pip", "requirements"), ("title", "name"), ("job_name", "name"),
        ("conda", "environment"), ("venv", "environment"),
    ],
};

static GIT: Object = Object {
    what: "a commit of a git repository",
    fields: &[
        field("git", Text(&f::ANY), "The repository.").required(),
        field("ref", Text(&f::ANY), "The branch, tag or commit; the commit is fixed at submission.")
            .required()
            .eg(&["\"main\""]),
    ],
    synonyms: &[
        ("url", "git"),
        ("repo", "git"),
        ("repository", "git"),
        ("branch", "ref"),
        ("tag", "ref"),
        ("commit", "ref"),
        ("revision", "ref"),
    ],
};

static NODES: Object = Object {
    what: "a number of nodes",
    fields: &[
        field("min", Whole(1, MAX_NODES), "The least number that the job can use.").required(),
        field("max", Whole(1, MAX_NODES), "The greatest number that the job can use.").required(),
    ],
    synonyms: &[("minimum", "min"), ("maximum", "max"), ("minNodes", "min"), ("maxNodes", "max")],
};

static DATA: Object = Object {
    what: "a data volume",
    fields: &[
        field("name", Text(&f::DATA_NAME), "The name; the process finds the path in `AVIFLOW_DATA_<NAME>`.")
            .required()
            .eg(&["\"corpus\""]),
        field("source", Text(&f::ANY), "A path or address.").required().eg(&["\"s3://bucket/corpus\""]),
        field("mount", Text(&f::ABSOLUTE), "Where it is in the job.").eg(&["\"/data\""]),
        field("readOnly", Bool, "Whether the job may only read it.").default("true"),
    ],
    synonyms: &[
        ("path", "source"),
        ("url", "source"),
        ("uri", "source"),
        ("hostPath", "source"),
        ("mountPath", "mount"),
        ("target", "mount"),
        ("ro", "readOnly"),
    ],
};

static CHECKPOINT: Object = Object {
    what: "a checkpoint policy",
    fields: &[
        field("path", Text(&f::ABSOLUTE), "The folder; the process finds it in `AVIFLOW_CHECKPOINT_DIR`.")
            .required()
            .eg(&["\"/checkpoints\""]),
        field("every", Text(&f::DURATION), "How often the training saves, as far as the platform should expect.")
            .eg(&["\"15m\""]),
        field("keep", Whole(1, 10_000), "How many checkpoints are kept. Without it, all.").eg(&["3"]),
    ],
    synonyms: &[
        ("dir", "path"),
        ("directory", "path"),
        ("folder", "path"),
        ("interval", "every"),
        ("frequency", "every"),
        ("retain", "keep"),
        ("max", "keep"),
    ],
};

static RESOURCES: Object = Object {
    what: "what a job needs beside GPUs",
    fields: &[
        field("cpuPerGpu", Above(0.0), "CPUs for each GPU.").eg(&["12"]),
        field("memoryPerGpu", Text(&f::QUANTITY), "Memory for each GPU.").eg(&["\"200Gi\""]),
        field("shm", Text(&f::QUANTITY), "Shared memory (`/dev/shm`) of a node's share. It counts as memory.")
            .eg(&["\"64Gi\""]),
    ],
    synonyms: &[
        ("cpu", "cpuPerGpu"),
        ("cpus", "cpuPerGpu"),
        ("memory", "memoryPerGpu"),
        ("mem", "memoryPerGpu"),
        ("ram", "memoryPerGpu"),
        ("shmSize", "shm"),
    ],
};

static TOPOLOGY: Object = Object {
    what: "a place in the network",
    fields: &[
        field("require", Text(&f::WORD), "The level of which one domain must hold all nodes.").eg(&["\"spine\""]),
        field("prefer", Text(&f::WORD), "The level of which one domain should hold all nodes.").eg(&["\"leaf\""]),
        field("maxWait", Text(&f::DURATION), "How long to wait for what is preferred. Without it, not at all.")
            .eg(&["\"20m\""]),
    ],
    synonyms: &[("required", "require"), ("preferred", "prefer"), ("wait", "maxWait"), ("timeout", "maxWait")],
};

static RETRY: Object = Object {
    what: "a rule for running again",
    fields: &[
        field("failures", Whole(0, 1000), "Failures of the application after which it is still run again. Suspensions and failures of nodes do not count.").default("0").eg(&["3"]),
    ],
    synonyms: &[("limit", "failures"), ("max", "failures"), ("count", "failures"), ("attempts", "failures"), ("retries", "failures")],
};

const ENDINGS: Shape =
    Choice(&[("succeeded", "every rank ended with 0"), ("failed", "it failed"), ("ended", "it ended in any way")]);

static AFTER: Object = Object {
    what: "a job to wait for",
    fields: &[
        field(
            "job",
            Text(&f::JOB),
            "Its name: your own latest job of that name, else anybody's; `namespace/name` is exact.",
        )
        .required()
        .eg(&["\"tokenize\""]),
        field("on", ENDINGS, "How it must end.").default("\"succeeded\""),
    ],
    synonyms: &[("name", "job"), ("status", "on"), ("when", "on"), ("condition", "on")],
};

static NOTIFY: Object = Object {
    what: "whom to tell of what",
    fields: &[
        field(
            "webhook",
            Text(&f::WEBHOOK),
            "The address that gets a POST. It is a secret, and shown with its host alone.",
        )
        .required()
        .eg(&["\"https://chat.example/hook\""]),
        field(
            "on",
            List(
                &Choice(&[
                    ("started", "every rank is up"),
                    ("suspended", "the platform suspended it"),
                    ("restarted", "it runs again"),
                    ("idle", "its GPUs have done nothing for 30 minutes"),
                    ("failed", "it failed"),
                    ("succeeded", "every rank ended with 0"),
                    ("estimateSlipped", "it waits, and will start much later than was expected"),
                ]),
                1,
            ),
            "On what.",
        )
        .required()
        .eg(&["[\"failed\", \"succeeded\"]"]),
        field(
            "format",
            Choice(&[("json", "everything, field by field"), ("slack", "the text alone, as chats take it")]),
            "The form of what is posted. An address of Slack's or Google Chat's gets `slack`, any other `json`.",
        ),
    ],
    synonyms: &[("url", "webhook"), ("slack", "webhook"), ("events", "on"), ("when", "on"), ("type", "format")],
};

/// An environment.
pub static ENVIRONMENT: Object = Object {
    what: "an environment",
    fields: &[
        field("name", Text(&f::ENVIRONMENT_NAME), "The name, the same as its folder's.")
            .required()
            .eg(&["\"torch-2.9\""]),
        field(
            "version",
            Whole(1, 999_999_999),
            "The version. What it contains never changes; a change is the next version.",
        )
        .required()
        .eg(&["3"]),
        field("description", Text(&f::ANY), "What it is for, in a sentence.").required(),
        field("owner", Text(&f::ANY), "Who answers for it.").eg(&["\"platform\""]),
        field("python", Text(&f::PYTHON), "The versions of Python that it is locked for.")
            .required()
            .eg(&["\">=3.11,<3.13\""]),
        field(
            "requirements",
            Text(&f::RELATIVE),
            "The lock: every package with its version and hashes, relative to this file.",
        )
        .eg(&["\"requirements.lock\""])
        .default("\"requirements.lock\""),
        field("env", Map(&f::VARIABLE, &Text(&f::FREE)), "Default variables; what a job declares wins.")
            .eg(&["{\"PYTHONUNBUFFERED\": \"1\"}"]),
    ],
    synonyms: &[
        ("packages", "requirements"),
        ("pip", "requirements"),
        ("lock", "requirements"),
        ("dependencies", "requirements"),
        ("python_version", "python"),
        ("envs", "env"),
        ("variables", "env"),
        ("environment", "env"),
        ("maintainer", "owner"),
        ("team", "owner"),
        ("summary", "description"),
    ],
};
