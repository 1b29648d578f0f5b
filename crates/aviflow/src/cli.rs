//! What may be typed. Words, defaults and examples live here; what they do, in `commands`.

mod admin;
mod jobs;
mod platform;
mod simulate;

pub use admin::{ApplyArgs, DrainArgs, LogArgs, PolicyCommand, PoolCommand, QueueCommand, Why};
pub use jobs::{
    CancelArgs, CpArgs, DevArgs, DevPlace, ExecArgs, ForwardArgs, JobsArgs, LogsArgs, LsArgs, PlanArgs, RerunArgs,
    RunArgs, ShowArgs, StacksArgs, SubmitArgs, SuspendArgs, TopArgs, UpdateArgs,
};
pub use platform::{
    CheckArgs, ContextCommand, DoctorArgs, EnvCommand, KubeArgs, KubeWayArgs, LoginArgs, NodeCommand, ServeArgs,
    ServerCommand, SetArgs, StartArgs, StoreCommand, UsageArgs,
};
pub use simulate::{Preemption, SimulateArgs, TraceFormat};

use clap::{Args, Parser, Subcommand, ValueEnum};
use std::net::SocketAddr;
use std::path::PathBuf;

/// The whole command line.
#[derive(Debug, Parser)]
#[command(
    name = "aviflow",
    version,
    about = "Train large models on a shared pool of GPUs",
    after_help = "Examples:
  aviflow run job.yaml                      submit a training and follow it
  aviflow run --nodes 2 -- torchrun train.py  the same without a file
  aviflow ls                                what runs and what waits, and why
  aviflow logs -f tiny-gpt                  come back to a job

Documents, environments and recipes are described in docs/.",
    disable_help_subcommand = true,
    infer_long_args = true,
    max_term_width = 100
)]
pub struct Cli {
    /// What to do
    #[command(subcommand)]
    pub command: Command,

    /// Options of all commands
    #[command(flatten)]
    pub global: Global,
}

/// Options of all commands.
#[derive(Args, Clone, Debug, Default)]
pub struct Global {
    /// The control plane to speak to, by the name of its context
    #[arg(long, global = true, env = "AVIFLOW_CONTEXT", hide_env = true, value_name = "NAME", help_heading = "Global")]
    pub context: Option<String>,

    /// The namespace of what is submitted and of jobs named without one; `ls` then lists only its jobs
    /// [default: the context's, or default]
    #[arg(short, long, global = true, value_name = "NAME", help_heading = "Global")]
    pub namespace: Option<String>,

    /// Colours: where the output is a terminal, always, or never
    #[arg(
        long,
        global = true,
        value_name = "WHEN",
        default_value = "auto",
        help_heading = "Global",
        hide_possible_values = true,
        hide_default_value = true
    )]
    pub color: ColorChoice,
}

/// When to colour.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum ColorChoice {
    #[default]
    Auto,
    Always,
    Never,
}

/// How an answer is written.
#[derive(Args, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Output {
    /// For programs: `json` or `yaml`, with the fields of the REST API
    #[arg(
        short = 'o',
        long = "output",
        value_name = "FORMAT",
        default_value = "table",
        hide_default_value = true,
        hide_possible_values = true
    )]
    pub format: Format,
}

/// A form of output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// For people.
    #[default]
    Table,
    /// JSON.
    Json,
    /// YAML.
    Yaml,
}

/// The commands, in the order in which a person meets them.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Submit a training and follow it to its end
    #[command(alias = "submit")]
    Run(RunArgs),
    /// Say what would happen to a document, and submit nothing
    Plan(PlanArgs),
    /// List jobs: what runs, what waits and why, what ended lately
    #[command(aliases = ["get", "ps", "list"])]
    Ls(LsArgs),
    /// Show everything about a job
    #[command(aliases = ["describe", "status"])]
    Show(ShowArgs),
    /// Watch what runs: steps, GPUs and nodes, or one job rank by rank
    Top(TopArgs),
    /// Print the output of a job's ranks
    Logs(LogsArgs),
    /// End a job, gracefully
    #[command(aliases = ["stop", "kill", "delete"])]
    Cancel(CancelArgs),
    /// Send a running job back to the queue, with its progress, until it is resumed
    Suspend(SuspendArgs),
    /// Let a suspended job start again
    #[command(after_help = "Examples:
  aviflow resume tiny-gpt")]
    Resume(JobsArgs),
    /// Keep a job that waits from starting
    #[command(after_help = "Examples:
  aviflow hold tiny-gpt --reason 'wrong data'")]
    Hold(JobsArgs),
    /// Let a held job start
    #[command(after_help = "Examples:
  aviflow release tiny-gpt")]
    Release(JobsArgs),
    /// Change a job's priority, time limit or queue
    Update(UpdateArgs),
    /// Submit a job again, as it was
    Rerun(RerunArgs),
    /// Run a command beside a rank of a running job
    Exec(ExecArgs),
    /// Open a shell on the pool, under queue and quota; its GPUs are given back when it closes
    Dev(DevArgs),
    /// Show what the processes of a running job are doing: stacks of all ranks
    Stacks(StacksArgs),
    /// Reach a port beside a rank of a running job from this machine
    #[command(alias = "port-forward")]
    Forward(ForwardArgs),
    /// Copy outputs or checkpoints of a job to this machine
    Cp(CpArgs),
    /// Nodes and their GPUs
    #[command(alias = "nodes", subcommand_required = false)]
    Node {
        /// What about them; `ls` if nothing is said
        #[command(subcommand)]
        command: Option<NodeCommand>,
    },
    /// Create or change queues, pools and the policy, from a file
    Apply(ApplyArgs),
    /// Queues and their quotas
    #[command(alias = "queues")]
    Queue {
        /// What about them; `ls` if nothing is said
        #[command(subcommand)]
        command: Option<QueueCommand>,
    },
    /// Pools and their topology
    #[command(alias = "pools")]
    Pool {
        /// What about them; `ls` if nothing is said
        #[command(subcommand)]
        command: Option<PoolCommand>,
    },
    /// How the platform decides where no queue says so
    Policy {
        /// What about it; `show` if nothing is said
        #[command(subcommand)]
        command: Option<PolicyCommand>,
    },
    /// Start no job anywhere; what runs goes on
    #[command(after_help = "Examples:
  aviflow pause --reason 'the storage is full'
  aviflow unpause")]
    Pause(Why),
    /// Let jobs start again after `pause`
    Unpause(Why),
    /// What people changed: who, when, what and why
    #[command(alias = "acts")]
    Log(LogArgs),
    /// Environments that jobs run in
    #[command(aliases = ["environment", "environments"])]
    Env {
        /// What about them; `ls` if nothing is said
        #[command(subcommand)]
        command: Option<EnvCommand>,
    },
    /// Who holds the GPUs of a cluster, whoever it is, what waits, and how the free ones lie
    Observed {
        /// The form of the answer
        #[command(flatten)]
        output: Output,
    },
    /// Account for GPU time, to the millisecond
    Usage(UsageArgs),
    /// Replay a trace of jobs: what would their waits be on other nodes, or under another policy?
    Simulate(SimulateArgs),
    /// Check that everything a training needs is there
    Doctor(DoctorArgs),
    /// The control plane of this machine: start, stop, status
    Server {
        /// What to do with it
        #[command(subcommand)]
        command: ServerCommand,
    },
    /// Run the control plane in the foreground
    Serve(Box<ServeArgs>),
    /// Back the store up, or restore it
    Store {
        /// What to do with it
        #[command(subcommand)]
        command: StoreCommand,
    },
    /// Remember a control plane and its token, and use it
    Login(LoginArgs),
    /// Control planes that are known here
    #[command(alias = "contexts")]
    Context {
        /// What about them; `ls` if nothing is said
        #[command(subcommand)]
        command: Option<ContextCommand>,
    },
    /// Print the completion script of a shell
    #[command(after_help = "Examples:
  aviflow completion bash > ~/.local/share/bash-completion/completions/aviflow
  aviflow completion zsh > ~/.zfunc/_aviflow")]
    Completion {
        /// bash, zsh, fish, elvish or powershell
        shell: clap_complete::Shell,
    },
    /// Print the version of this program
    Version,
    /// Lay out agent, code and spec of a worker in the volume of its pod
    #[command(hide = true)]
    WorkerPrepare {
        /// Where the volume is mounted
        folder: PathBuf,
    },
    /// Fetch the lock of a layer into the volume of the pod that makes it
    #[command(hide = true)]
    LayerFetch {
        /// Where the volume is mounted
        folder: PathBuf,
    },
    /// Hand up the layer that was made in the volume of this pod
    #[command(hide = true)]
    LayerStore {
        /// Where the volume is mounted
        folder: PathBuf,
    },
    /// Test the node that this runs on
    #[command(hide = true)]
    NodeProbe {
        /// How many GPUs there should be
        #[arg(long)]
        gpus: u32,
        /// What must be reached
        #[arg(long)]
        reach: Vec<SocketAddr>,
        /// Whether the GPUs are virtual
        #[arg(long = "virtual")]
        virtual_gpus: bool,
    },
    /// Hold the resources of a pod until it is ended
    #[command(hide = true)]
    Placeholder,
    /// The supervisor of one worker's ranks
    #[command(hide = true)]
    Agent {
        /// The worker's folder
        folder: PathBuf,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    /// The help of every command, in one place, so that a change of words is seen.
    #[test]
    fn help() {
        fn all(command: &mut clap::Command, path: &str, out: &mut String) {
            let path =
                if path.is_empty() { command.get_name().to_owned() } else { format!("{path} {}", command.get_name()) };
            out.push_str(&format!("$ {path} --help\n{}\n\n", command.render_help()));
            for sub in command.get_subcommands_mut().filter(|c| !c.is_hide_set()) {
                all(sub, &path, out);
            }
        }
        let mut out = String::new();
        let mut command = Cli::command().term_width(100);
        command.build();
        all(&mut command, "", &mut out);
        insta::assert_snapshot!(out);
    }

    fn parse(words: &[&str]) -> Command {
        match Cli::try_parse_from(std::iter::once(&"aviflow").chain(words)) {
            Ok(cli) => cli.command,
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn what_follows_two_dashes_is_the_commands() {
        let Command::Run(run) = parse(&["run", "--nodes", "2", "--", "torchrun", "train.py", "--lr", "1"]) else {
            panic!("another command")
        };
        assert_eq!(run.submit.document, None);
        assert_eq!(run.submit.arguments, ["torchrun", "train.py", "--lr", "1"]);
        let Command::Run(run) = parse(&["run", "job.yaml", "--", "--lr", "1"]) else { panic!("another command") };
        assert_eq!(run.submit.document, Some(PathBuf::from("job.yaml")));
        assert_eq!(run.submit.arguments, ["--lr", "1"]);
    }

    #[test]
    fn words_of_other_tools_are_understood() {
        assert!(matches!(parse(&["ps"]), Command::Ls(_)));
        assert!(matches!(parse(&["describe", "a"]), Command::Show(_)));
        assert!(matches!(parse(&["kill", "a"]), Command::Cancel(_)));
        assert!(matches!(parse(&["nodes"]), Command::Node { command: None }));
        assert!(matches!(parse(&["submit", "a.yaml"]), Command::Run(_)));
    }
}
