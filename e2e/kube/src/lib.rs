//! A control plane on a real cluster, for tests: as a process of this machine, killed and started again at will, and in
//! a pod, as administrators install it.

pub mod chart;
mod index;
mod local;
mod plane;
mod said;
mod things;
pub mod tls;
mod writes;

pub use index::Index;
pub use local::Local;
pub use plane::{LONGEST, Plane};
pub use said::{BY_STATE, partitions};
pub use things::{Phase, job, knows_the_kinds};
pub use writes::{Side, Writes};
