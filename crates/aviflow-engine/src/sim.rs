//! The engine on a virtual clock, with a cluster and a control plane that fail.

/// Bugs that can be switched on to show that the simulator finds them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Planted(Option<Bug>);

/// One planted bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {}
