//! REST, server-sent events and authentication of the control plane.
//!
//! The server decides nothing: it reads what the engine and the store hold, and
//! hands inputs to the engine. A client is never trusted: what it submits is
//! checked again here, what it uploads is named by its content, and a path it
//! asks for never leads out of the job's own folders.
//!
//! - [`Server`]: the routes, served from [`Parts`];
//! - [`Body`]: what the server asks of the machine or cluster beside the loop;
//! - [`standby`]: what is answered before it is this control plane's turn;
//! - [`Token`] and [`Identities`]: who may ask for what.
//!
//! Invariants: a stream wakes only on changes; jobs that ended are read from the
//! store page by page and never held; secrets are masked in everything that is
//! shown.

mod access;
mod app;
mod attempts;
mod auth;
mod body;
mod changes;
mod channels;
mod check;
mod documents;
mod drains;
mod environments;
mod error;
mod exec;
mod files;
mod follow;
mod history;
mod jobs;
mod list;
mod logs;
mod metrics;
mod names;
mod notified;
mod objects;
mod observed;
mod params;
mod pool;
mod routes;
mod secret;
mod stacks;
mod standby;
mod submit;
mod top;
mod usage;
mod verdict;
mod view;
mod watched;

#[cfg(test)]
mod tests;

pub use access::{Asked, Identities, Unavailable};
pub use app::{Applies, Info, Parts, Server, ServerConfig, ServerError};
pub use auth::{Token, TokenError};
pub use body::{
    Body, BodyAgent, CatalogueEntry, ExecRefusal, ExecTarget, NodeTest, Opening, Resolving, Settling, Telling,
    Unresolved,
};
pub use notified::{Looks, Outcome, Outcomes};
pub use stacks::{ask_stacks, stack_number};
pub use standby::standby;
pub use submit::{Applied, NotTaken};
