//! Commands of administrators: documents, queues, pools, the policy, drains, and what people changed.

use super::Output;
use clap::{Args, Subcommand};
use std::path::PathBuf;

/// Why something is done.
#[derive(Args, Clone, Debug, Default)]
pub struct Why {
    /// Why, in your own words; kept with what was done
    #[arg(long, value_name = "TEXT")]
    pub reason: Option<String>,
}

/// `apply`
#[derive(Args, Debug)]
#[command(after_help = "\
A file may hold several documents, separated by `---`. All are checked before the first is applied;
what a document does not say is at its default. What is there and not in the file stays.

Examples:
  aviflow apply -f queues.yaml
  aviflow queue show nlp -o yaml > nlp.yaml    then change it, and
  aviflow apply -f nlp.yaml --reason 'a larger share until the deadline'")]
pub struct ApplyArgs {
    /// The file; `-` reads standard input
    #[arg(short, long = "file", value_name = "FILE", required_unless_present = "path")]
    pub file: Option<PathBuf>,

    /// The same without `-f`
    #[arg(value_name = "FILE", conflicts_with = "file", hide = true)]
    pub path: Option<PathBuf>,

    /// Why
    #[command(flatten)]
    pub why: Why,

    /// The form of the answer
    #[command(flatten)]
    pub output: Output,
}

/// `queue`
#[derive(Debug, Subcommand)]
pub enum QueueCommand {
    /// List queues with their quotas, and what runs and waits in them
    #[command(alias = "list")]
    Ls {
        /// The form of the answer
        #[command(flatten)]
        output: Output,
    },
    /// Show a queue; `-o yaml` prints a document that can be applied
    #[command(
        alias = "describe",
        after_help = "\
Examples:
  aviflow queue show nlp
  aviflow queue show nlp -o yaml > nlp.yaml"
    )]
    Show {
        /// The queue
        queue: String,
        /// The form of the answer
        #[command(flatten)]
        output: Output,
    },
    /// Let a queue take jobs and start none; what runs goes on
    Hold {
        /// The queues
        #[arg(required = true, value_name = "QUEUE")]
        queues: Vec<String>,
        /// Why
        #[command(flatten)]
        why: Why,
    },
    /// Let a queue take and start jobs
    Open {
        /// The queues
        #[arg(required = true, value_name = "QUEUE")]
        queues: Vec<String>,
        /// Why
        #[command(flatten)]
        why: Why,
    },
    /// Let a queue take no more jobs; those that it has may start
    Drain {
        /// The queues
        #[arg(required = true, value_name = "QUEUE")]
        queues: Vec<String>,
        /// Why
        #[command(flatten)]
        why: Why,
    },
    /// Delete a queue
    #[command(
        alias = "rm",
        after_help = "\
Without --move-to and --leave a queue with jobs that have not ended is not deleted.

Examples:
  aviflow queue delete nlp
  aviflow queue delete nlp --move-to research --reason 'merged into research'"
    )]
    Delete {
        /// The queue
        queue: String,
        /// Move its jobs to this queue first
        #[arg(long, value_name = "QUEUE", conflicts_with = "leave")]
        move_to: Option<String>,
        /// Leave its jobs: what runs goes on, what waits starts nothing until it is moved
        #[arg(long)]
        leave: bool,
        /// Why
        #[command(flatten)]
        why: Why,
    },
}

/// `pool`
#[derive(Debug, Subcommand)]
pub enum PoolCommand {
    /// List pools
    #[command(alias = "list")]
    Ls {
        /// The form of the answer
        #[command(flatten)]
        output: Output,
    },
    /// Show a pool with its domains; `-o yaml` prints a document that can be applied
    #[command(
        alias = "describe",
        after_help = "\
Examples:
  aviflow pool show main
  aviflow pool show main -o yaml > main.yaml"
    )]
    Show {
        /// The pool
        pool: String,
        /// The form of the answer
        #[command(flatten)]
        output: Output,
    },
    /// Take a pool's document away; its nodes stay
    #[command(alias = "rm")]
    Delete {
        /// The pool
        pool: String,
        /// Why
        #[command(flatten)]
        why: Why,
    },
}

/// `policy`
#[derive(Debug, Subcommand)]
pub enum PolicyCommand {
    /// Show the policy; `-o yaml` prints a document that can be applied
    #[command(alias = "describe")]
    Show {
        /// The form of the answer
        #[command(flatten)]
        output: Output,
    },
}

/// `node drain`
#[derive(Args, Debug)]
#[command(after_help = "\
Times are `22:00` (the next time that it is so late, UTC), DATE and time (2026-03-01T22:00, UTC unless
it says otherwise), or `+2h` from now.

With --max-unavailable or --by the drain is rolling: each node is taken at the cheapest moment that is
left, and the drain has a number. Without them all nodes are empty from --at on, else from now on.

Examples:
  aviflow node drain node-7 --reason 'a fan is broken'
  aviflow node drain 'node-[1-8]' --at 22:00 --for 2h --reason 'new switch'
  aviflow node drain --selector leaf=leaf-1 --max-unavailable 2 --by +24h --for 30m --reason firmware")]
pub struct DrainArgs {
    /// The nodes; `node-[1-8]` stands for eight
    #[arg(value_name = "NODE", required_unless_present = "selector", conflicts_with = "selector")]
    pub nodes: Vec<String>,

    /// Instead: all nodes of a `pool`, a `gpuType`, or a domain such as `leaf`; all that is said must hold
    #[arg(short = 'l', long, value_name = "KEY=VALUE,…")]
    pub selector: Option<String>,

    /// When the nodes are to be empty [default: now]
    #[arg(long, value_name = "TIME", conflicts_with_all = ["max_unavailable", "by"])]
    pub at: Option<String>,

    /// For how long each node is away [default: until somebody uncordons it]
    #[arg(long = "for", value_name = "DURATION")]
    pub length: Option<String>,

    /// At most so many nodes are away at once
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_unavailable: Option<u32>,

    /// When all nodes must have been taken
    #[arg(long, value_name = "TIME")]
    pub by: Option<String>,

    /// Why, in your own words; the users whose jobs are there read it
    #[arg(long, value_name = "TEXT", required = true)]
    pub reason: String,
}

/// `log`
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  aviflow log
  aviflow log --kind queue --name nlp
  aviflow log --kind drain -o json")]
pub struct LogArgs {
    /// Only what was done to things of this kind
    #[arg(short, long, value_name = "KIND", value_parser = ["queue", "pool", "policy", "starts", "node", "drain", "job"])]
    pub kind: Option<String>,

    /// Only what was done to the thing of this name; a job's is namespace/name
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,

    /// At most so many, the newest first
    #[arg(long, value_name = "N", default_value_t = 50)]
    pub limit: u32,

    /// The form of the answer
    #[command(flatten)]
    pub output: Output,
}
