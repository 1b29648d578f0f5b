//! Images in the OCI layout, made and pushed without a container tool; Aviflow's own among them.
//!
//! `cargo xtask image` makes the image that is installed, and the tests on clusters the ones that they run: both by
//! what is here.
//!
//! | module | what it is |
//! |---|---|
//! | [`aviflow`] | the image of the control plane and the agent: what is in it, and why |
//! | [`libraries`] | the shared libraries that a program is linked to |
//! | [`oci`] | images as archives or folders of the OCI layout |
//! | [`registry`] | pushing one into a registry |
//! | [`login`] | what a registry asks of who pushes |
//!
//! Invariant: the same files and configuration give the same bytes, hence the same digest.

pub mod aviflow;
pub mod libraries;
mod login;
pub mod oci;
pub mod registry;

pub use oci::{FileEntry, Image};
pub use registry::Registry;
