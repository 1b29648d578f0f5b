//! Replays of traces on a virtual clock: what would have become of these jobs on that cluster,
//! under Aviflow's real plan and under the policies that others use?
//!
//! It is for capacity planning (`aviflow simulate`) and for measuring the plan itself. It starts
//! nothing, speaks to nobody and reads no clock but to say how long a pass took; equal settings
//! and seeds give equal figures, run times of passes aside.
//!
//! - [`trace`]: jobs with their run times, read from files; [`generate`]: made up, fitted to statistics
//! - [`cluster`]: the nodes; [`queues`]: the quota tree
//! - [`sim`]: the virtual cluster, which obeys a [`Scheduler`](sim::Scheduler)
//! - [`baseline`]: FIFO, greedy, EASY backfill; [`brain`]: the core's plan
//! - [`bound`]: how many GPUs jobs could use at most that must be inside a domain
//! - [`run`]: from a [`Scenario`] to a [`Report`]; [`perturb`]: the same over many similar traces
//! - [`svg`]: a replay, drawn

pub mod baseline;
pub mod bound;
pub mod brain;
pub mod cluster;
pub mod error;
pub mod generate;
pub mod meter;
pub mod perturb;
pub mod queues;
pub mod report;
pub mod rng;
pub mod run;
pub mod sim;
pub mod svg;
pub mod trace;

pub use cluster::{Cluster, Topology};
pub use error::{Error, Result};
pub use report::{Figures, Report};
pub use run::{Policy, Scenario};
pub use trace::{Format, Limits, Trace};
