//! Proof of the plan: cases in a line each, scenarios, properties over whole histories, exact oracles.

mod cases;
mod check;
mod histories;
mod oracle;
mod promises;
mod scenarios;
mod spec;
mod verdicts;
mod world;
