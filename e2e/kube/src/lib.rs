//! A control plane on a real cluster, for tests: as a process of this machine, killed and started again at will.

mod local;
mod plane;
mod things;

pub use local::Local;
pub use plane::Plane;
pub use things::{Phase, job};
