//! Prometheus' text format, both ways, and what GPUs report of themselves.
//!
//! | module | what it is |
//! |---|---|
//! | [`exposition`] | writes the text format |
//! | [`text`] | reads it |
//! | [`gpu`] | what is known of a GPU at an instant |
//! | [`dcgm`] | the same, of what dcgm-exporter says |
//! | [`smi`] | the same, of what `nvidia-smi` says |
//! | [`board`] | the GPUs of all nodes, with a bounded past |
//! | [`scrape`] | asks exporters, a few at a time |
//!
//! Nothing here decides anything, and nothing waits for it. What is absent stays absent: it is never taken for 0.

pub mod board;
pub mod dcgm;
pub mod exposition;
pub mod gpu;
pub mod scrape;
pub mod smi;
pub mod text;
