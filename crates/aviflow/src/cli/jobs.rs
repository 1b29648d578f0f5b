//! Commands about jobs.

use super::Output;
use super::admin::Why;
use crate::commands::Ports;
use clap::{ArgGroup, Args};
use std::path::PathBuf;

/// What a submission is made of; the same for `run` and `plan`.
#[derive(Args, Clone, Debug, Default)]
pub struct SubmitArgs {
    /// The document, or the folder with its job.yaml or aviflow.yaml
    #[arg(value_name = "FILE|DIR")]
    pub document: Option<PathBuf>,

    /// Arguments appended to the document's `run`; without a document, the command itself
    #[arg(last = true, value_name = "ARGS")]
    pub arguments: Vec<String>,

    /// Set a field of the document, such as `gpusPerNode=4` or `retry.failures=1` (repeatable)
    #[arg(long = "set", value_name = "FIELD=VALUE")]
    pub set: Vec<String>,

    /// Set an environment variable of the job (repeatable)
    #[arg(short, long = "env", value_name = "NAME=VALUE")]
    pub env: Vec<String>,

    /// The name of the work
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,

    /// The queue
    #[arg(long, value_name = "QUEUE")]
    pub queue: Option<String>,

    /// The priority: low, normal, high or urgent
    #[arg(long, value_name = "PRIORITY")]
    pub priority: Option<String>,

    /// How many nodes, such as `2`, or `2-8`
    #[arg(long, value_name = "N")]
    pub nodes: Option<String>,

    /// How many GPUs on each node
    #[arg(long, value_name = "N")]
    pub gpus_per_node: Option<String>,

    /// The accelerator type; several in order of preference (repeatable)
    #[arg(long, value_name = "TYPE")]
    pub gpu_type: Vec<String>,

    /// The environment, as NAME or NAME@VERSION
    #[arg(long, value_name = "ENVIRONMENT")]
    pub environment: Option<String>,

    /// The folder of the code; without a document, `.` if the command names a file in it
    #[arg(long, value_name = "DIR")]
    pub code: Option<String>,

    /// The greatest time running, such as `24h`
    #[arg(long, value_name = "DURATION")]
    pub time_limit: Option<String>,

    /// How long the GPUs are kept after the job failed for good, for looking around with `aviflow exec`
    #[arg(long, value_name = "DURATION")]
    pub keep_on_failure: Option<String>,

    /// The seed that the training gets; one is drawn if nothing is said
    #[arg(long, value_name = "N")]
    pub seed: Option<String>,

    /// The greatest code snapshot that is taken, such as `300MB`
    #[arg(long, value_name = "SIZE", default_value = "100MB")]
    pub max_snapshot: String,

    /// Take a code snapshot of any size
    #[arg(long, conflicts_with = "max_snapshot")]
    pub allow_large_snapshot: bool,
}

/// `run`
#[derive(Args, Debug)]
#[command(after_help = "\
Follows the job until it ends and exits with the job's own code. Ctrl-C detaches: the job goes
on, and the exit code is 0. Everything that runs is a snapshot taken now; files that are changed
later change nothing.

Examples:
  aviflow run job.yaml
  aviflow run examples/tiny-gpt --set seed=7 -- --steps 200
  aviflow run --nodes 2 --gpus-per-node 8 -- torchrun train.py
  aviflow run job.yaml --detach && aviflow logs -f tiny-gpt")]
pub struct RunArgs {
    /// The submission
    #[command(flatten)]
    pub submit: SubmitArgs,

    /// Submit and return at once
    #[arg(short, long)]
    pub detach: bool,
}

/// `plan`
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  aviflow plan job.yaml
  aviflow plan job.yaml --nodes 4 -o json")]
pub struct PlanArgs {
    /// The submission
    #[command(flatten)]
    pub submit: SubmitArgs,

    /// The form of the answer
    #[command(flatten)]
    pub output: Output,
}

/// `ls`
#[derive(Args, Debug, Default)]
#[command(after_help = "\
Without options: jobs that are live, and those that ended in the last day.

Examples:
  aviflow ls --waiting            what waits, why, and when it will probably start
  aviflow ls --waiting --factors  and what its place follows from
  aviflow ls --all --user ada
  aviflow cancel $(aviflow ls -q --queue nlp)")]
pub struct LsArgs {
    /// Only jobs that wait
    #[arg(short, long, conflicts_with = "all")]
    pub waiting: bool,

    /// Also what the place of each follows from
    #[arg(short, long, requires = "waiting")]
    pub factors: bool,

    /// All jobs that are kept, ended long ago too
    #[arg(short, long)]
    pub all: bool,

    /// Only jobs of this user
    #[arg(short, long, value_name = "USER")]
    pub user: Option<String>,

    /// Only jobs of this queue
    #[arg(long, value_name = "QUEUE")]
    pub queue: Option<String>,

    /// Names only, one a line
    #[arg(short, long)]
    pub quiet: bool,

    /// The form of the answer
    #[command(flatten)]
    pub output: Output,
}

/// `show`
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  aviflow show tiny-gpt
  aviflow show tiny-gpt --file > again.yaml")]
pub struct ShowArgs {
    /// The job
    pub job: String,

    /// Print the document as it was submitted, with every default filled in
    #[arg(long, conflicts_with = "format")]
    pub file: bool,

    /// The form of the answer
    #[command(flatten)]
    pub output: Output,
}

/// `top`
#[derive(Args, Debug)]
#[command(after_help = "\
On a terminal it is shown anew until Ctrl-C, else once. What nobody reports is `-`.

Examples:
  aviflow top
  aviflow top llama3-8b
  aviflow top --once -o json")]
pub struct TopArgs {
    /// One job, rank by rank, as NAME or NAMESPACE/NAME
    pub job: Option<String>,

    /// Seconds between two looks
    #[arg(long, value_name = "SECONDS", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub every: u32,

    /// Look once
    #[arg(long)]
    pub once: bool,

    /// The form of the answer
    #[command(flatten)]
    pub output: Output,
}

/// `logs`
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  aviflow logs -f tiny-gpt
  aviflow logs tiny-gpt --rank 0,2 --grep loss --tail 100
  aviflow logs tiny-gpt --attempt 1 --since 10m")]
pub struct LogsArgs {
    /// The job
    pub job: String,

    /// Go on with new lines until the job ends
    #[arg(short, long)]
    pub follow: bool,

    /// Only these ranks, such as `0` or `0,2`
    #[arg(short, long, value_name = "RANKS", value_delimiter = ',')]
    pub rank: Vec<u32>,

    /// Only lines that contain this text
    #[arg(short, long, value_name = "TEXT")]
    pub grep: Option<String>,

    /// Only lines of the last while, such as `10m`
    #[arg(long, value_name = "DURATION")]
    pub since: Option<String>,

    /// Only this attempt
    #[arg(long, value_name = "N")]
    pub attempt: Option<u32>,

    /// Only the last N lines
    #[arg(long, value_name = "N")]
    pub tail: Option<usize>,

    /// Say when each line was written
    #[arg(short, long)]
    pub timestamps: bool,

    /// The form of the answer; json is one line of output in each line
    #[command(flatten)]
    pub output: Output,
}

/// `cancel`
#[derive(Args, Debug)]
#[command(after_help = "\
Its ranks get SIGTERM and their grace, then SIGKILL. Checkpoints and outputs are kept.

Examples:
  aviflow cancel tiny-gpt
  aviflow cancel tiny-gpt-2 tiny-gpt-3")]
pub struct CancelArgs {
    /// The jobs
    #[arg(required = true, value_name = "JOB")]
    pub jobs: Vec<String>,
}

/// `suspend`
#[derive(Args, Debug)]
#[command(after_help = "\
It saves itself, gives its GPUs up and stays in its queue until `aviflow resume`.

Examples:
  aviflow suspend tiny-gpt --reason 'room for the demo'")]
pub struct SuspendArgs {
    /// The jobs
    #[arg(required = true, value_name = "JOB")]
    pub jobs: Vec<String>,

    /// Why
    #[command(flatten)]
    pub why: Why,
}

/// `hold`, `release` and `resume`
#[derive(Args, Debug)]
pub struct JobsArgs {
    /// The jobs
    #[arg(required = true, value_name = "JOB")]
    pub jobs: Vec<String>,

    /// Why
    #[command(flatten)]
    pub why: Why,
}

/// `update`
#[derive(Args, Debug)]
#[command(group = ArgGroup::new("change").required(true).multiple(true).args(["priority", "time_limit", "queue"]))]
#[command(after_help = "\
The submitted document stays as it is; `aviflow show` says what was changed.

Examples:
  aviflow update tiny-gpt --priority high
  aviflow update tiny-gpt --time-limit 48h --reason 'the data grew'
  aviflow update tiny-gpt --time-limit none
  aviflow update tiny-gpt --queue research")]
pub struct UpdateArgs {
    /// The jobs
    #[arg(required = true, value_name = "JOB")]
    pub jobs: Vec<String>,

    /// The priority: low, normal, high or urgent
    #[arg(long, value_name = "PRIORITY")]
    pub priority: Option<String>,

    /// The greatest time running, such as `24h`; `none` takes the limit away
    #[arg(long, value_name = "DURATION")]
    pub time_limit: Option<String>,

    /// The queue that it goes to
    #[arg(long, value_name = "QUEUE")]
    pub queue: Option<String>,

    /// Why
    #[command(flatten)]
    pub why: Why,
}

/// `rerun`
#[derive(Args, Debug)]
#[command(after_help = "\
Repeats the submitted document with the same code snapshot, environment and seed. With --exact it
first verifies that code, environment, data and machine are what they were, and submits nothing
where they are not.

Examples:
  aviflow rerun tiny-gpt
  aviflow rerun tiny-gpt --set seed=8
  aviflow rerun tiny-gpt --exact")]
pub struct RerunArgs {
    /// The job
    pub job: String,

    /// Refuse if anything would be different, and list what
    #[arg(long, conflicts_with = "set")]
    pub exact: bool,

    /// Change a field of the document (repeatable)
    #[arg(long = "set", value_name = "FIELD=VALUE")]
    pub set: Vec<String>,

    /// Submit and return at once
    #[arg(short, long)]
    pub detach: bool,
}

/// `exec`
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  aviflow exec tiny-gpt -- nvidia-smi
  aviflow exec -it tiny-gpt --rank 3 -- bash")]
pub struct ExecArgs {
    /// The job
    pub job: String,

    /// The rank whose node, folder and variables the command gets
    #[arg(short, long, value_name = "RANK", default_value_t = 0)]
    pub rank: u32,

    /// Pass standard input on, whole
    #[arg(short = 'i', long)]
    pub stdin: bool,

    /// Run it on a terminal: keys go to it as they are typed
    #[arg(short, long)]
    pub tty: bool,

    /// The command
    #[arg(last = true, required = true, value_name = "CMD")]
    pub command: Vec<String>,
}

/// `dev`
#[derive(Args, Debug)]
#[command(after_help = "\
It is a job like others: it waits in its queue, is seen in `ls` and charged. It ends when the shell
does, at its time limit, or once no terminal of it was open for --grace.

Examples:
  aviflow dev --gpus 1
  aviflow dev --gpus 8 --environment torch-2.9 --queue nlp --time-limit 4h
  aviflow dev --gpus 1 --code . -- python")]
pub struct DevArgs {
    /// How many GPUs, of one node
    #[arg(short, long, value_name = "N")]
    pub gpus: u32,

    /// How long the GPUs are kept while no terminal is open
    #[arg(long, value_name = "DURATION", default_value = "1m")]
    pub grace: String,

    /// What is run in place of a shell
    #[arg(last = true, value_name = "CMD")]
    pub shell: Vec<String>,

    /// Where it is, and for how long
    #[command(flatten)]
    pub place: DevPlace,
}

/// Where a shell of `dev` is.
#[derive(Args, Clone, Debug, Default)]
pub struct DevPlace {
    /// The environment, as NAME or NAME@VERSION
    #[arg(long, value_name = "ENVIRONMENT")]
    pub environment: Option<String>,

    /// The queue
    #[arg(long, value_name = "QUEUE")]
    pub queue: Option<String>,

    /// The accelerator type; several in order of preference (repeatable)
    #[arg(long, value_name = "TYPE")]
    pub gpu_type: Vec<String>,

    /// The greatest time running
    #[arg(long, value_name = "DURATION", default_value = "8h")]
    pub time_limit: String,

    /// The name of the job
    #[arg(long, value_name = "NAME", default_value = "dev")]
    pub name: String,

    /// A folder of code of which the shell gets a copy, taken now
    #[arg(long, value_name = "DIR")]
    pub code: Option<String>,

    /// Set a field of the job's document, such as `image=…` (repeatable)
    #[arg(long = "set", value_name = "FIELD=VALUE")]
    pub set: Vec<String>,

    /// Set an environment variable (repeatable)
    #[arg(short, long = "env", value_name = "NAME=VALUE")]
    pub env: Vec<String>,
}

/// `stacks`
#[derive(Args, Debug)]
#[command(after_help = "\
Ranks that do the same are shown together, the odd one out first. Nothing is installed and nothing
is ended for it: Python tells its stacks itself, the kernel says what threads wait for.

Examples:
  aviflow stacks tiny-gpt
  aviflow stacks tiny-gpt --rank 3 --all
  aviflow stacks tiny-gpt --last")]
pub struct StacksArgs {
    /// The job
    pub job: String,

    /// Of the processes of this rank alone
    #[arg(short, long, value_name = "RANK")]
    pub rank: Option<u32>,

    /// All threads of all processes, also of those that ranks have started
    #[arg(short, long)]
    pub all: bool,

    /// Those that were taken when it last stood still, also after it has ended
    #[arg(long, conflicts_with = "rank")]
    pub last: bool,

    /// The form of the answer
    #[command(flatten)]
    pub output: Output,
}

/// `forward`
#[derive(Args, Debug)]
#[command(after_help = "\
Listens on this machine's loopback address until it is ended with Ctrl-C.

Examples:
  aviflow forward tiny-gpt 6006             TensorBoard beside rank 0, at localhost:6006
  aviflow forward tiny-gpt 8080:6006 5678 --rank 3")]
pub struct ForwardArgs {
    /// The job
    pub job: String,

    /// The port beside the rank, and the one here if it is another; `:PORT` takes any that is free
    #[arg(required = true, value_name = "[LOCAL:]PORT")]
    pub ports: Vec<Ports>,

    /// The rank where it listens
    #[arg(short, long, value_name = "RANK", default_value_t = 0)]
    pub rank: u32,
}

/// `cp`
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  aviflow cp tiny-gpt:/out ./results
  aviflow cp tiny-gpt:/checkpoints/step-400 .")]
pub struct CpArgs {
    /// The job and a path of its outputs or checkpoints
    #[arg(value_name = "JOB:PATH")]
    pub source: String,

    /// Where to; a folder that exists gets the copy inside it
    #[arg(value_name = "DEST", default_value = ".")]
    pub destination: PathBuf,
}
