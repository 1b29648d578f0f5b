//! Aviflow's documents: what a person writes in a file, what the API speaks,
//! and how both become the core's types.
//!
//! - [`spec`]: the canonical job document, the same in REST, in the store and in Kubernetes
//! - [`file`]: a job's file, from text to that document, with every problem at once
//! - [`admin`]: documents of administrators: queues, pools, the policy
//! - [`environment`]: the description of an environment and its lock
//! - [`image`]: names of container images
//! - [`crd`]: the kinds of Kubernetes, made from the same descriptions
//! - [`identity`]: one hash over all that decides what a job runs
//! - [`rights`]: who asks, and what he may do
//! - [`check`]: what cannot be together, and what a pool can never give
//! - [`schema`]: the same file form as JSON Schema, for editors
//! - [`diagnostic`] and [`render`]: problems as data, and as a person reads them
//! - [`secrets`]: what looks like a key, and the mask over it
//! - [`webhook`]: addresses that are posted to, and where none may lead
//! - [`duration`], [`quantity`]: values with a unit

pub mod admin;
pub mod check;
pub mod convert;
pub mod crd;
pub mod diagnostic;
pub mod duration;
pub mod environment;
pub mod file;
pub mod identity;
pub mod image;
pub mod openapi;
pub mod quantity;
pub mod render;
pub mod rest;
pub mod rights;
pub mod schema;
pub mod secrets;
pub mod source;
pub mod spec;
pub mod suggest;
pub mod webhook;
pub mod yaml;
