//! Proof of the plan: cases in a line each, scenarios, properties over whole histories, exact oracles.

mod cases;
mod check;
mod histories;
mod oracle;
#[allow(dead_code)]
mod spec;
mod verdicts;
#[allow(dead_code)]
mod world;
