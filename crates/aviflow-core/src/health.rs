//! From facts to findings to actions: what is wrong with a running gang, who is the culprit, and what is done about it.
//!
//! ```text
//! facts of ranks, nodes, GPUs ──▶ Watch ──▶ News (findings) ──▶ decide(&Situation) ──▶ Decision
//!                                  │ next_deadline()             ▲      │
//!                                  ▼                             │      ▼
//!                             Watch::tick      ends of ranks ────┘    Quarantine::note, the job's Past
//! ```
//!
//! The engine's `watcher` keeps one [`Watch`] for each job with a running gang, tells it each [`Fact`], and asks it
//! again at its [`Watch::next_deadline`]; there is no polling. What belongs to a pool and outlives jobs is in
//! [`xid::Xids`], [`links::Links`] and [`quarantine::Quarantine`]; what outlives attempts of one job is its
//! [`decide::Past`], and how often it should save itself follows from [`interval`]. Ends of ranks are no matter of the
//! watch: the lifecycle judges them by [`culprit::of_failure`] once the whole gang is gone.
//!
//! Nothing here does anything, knows a clock or reads a text.
//!
//! | file | holds |
//! |---|---|
//! | `fault.rs` | the classes of faults as a table: whose, how bad, what next |
//! | `xid.rs`, `links.rs` | what GPUs and ports report, and what its repetition says |
//! | `hang.rs`, `sketch.rs`, `power.rs` | no step for longer than the steps explain; GPUs that only wait |
//! | `numbers.rs`, `straggler.rs` | losses that are none, or jump; slow ranks |
//! | `culprit.rs` | the rank to name |
//! | `watch.rs` | all of these for one gang |
//! | `decide.rs`, `quarantine.rs`, `interval.rs` | what is done; what is kept from work; how often to save |
//!
//! Invariants: a fact costs O(1), apart from the comparison of all ranks at the end of a window of 128 steps and once
//! at a hang; memory is bounded by the number of ranks, see [`Watch`]; the same facts give the same findings.

#[cfg(test)]
mod chance;
pub mod culprit;
pub mod decide;
pub mod fault;
pub mod hang;
pub mod interval;
pub mod links;
pub mod numbers;
mod pairs;
pub mod power;
pub mod quarantine;
pub mod sketch;
pub mod straggler;
mod watch;
pub mod xid;

pub use fault::Kind;
pub use watch::{Fact, Finding, News, Watch};

use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// What is detected, and from when on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Settings {
    /// Classes that are not detected.
    pub off: BTreeSet<Kind>,
    /// How long a gang may be quiet.
    pub hang: hang::Limits,
    /// When GPUs only wait.
    pub power: power::Limits,
    /// By how many thousandths a straggler is slower than the others, at least.
    pub straggler: u32,
}

impl Settings {
    /// Everything is detected.
    #[must_use]
    pub const fn all() -> Settings {
        Settings {
            off: BTreeSet::new(),
            hang: hang::Limits::standard(),
            power: power::Limits::standard(),
            straggler: 50,
        }
    }

    /// Whether a class is detected.
    #[must_use]
    pub fn on(&self, kind: Kind) -> bool {
        !self.off.contains(&kind)
    }
}

impl Default for Settings {
    fn default() -> Settings {
        Settings::all()
    }
}
