//! The cluster port on Kubernetes.
//!
//! An attempt's workers are pods, one a node, pinned to the node that the plan chose and bound by
//! kube-scheduler; their agents connect to the control plane as everywhere. What the cluster does
//! with nodes and pods comes back as observations.
//!
//! | module | what it is |
//! |---|---|
//! | [`names`] | names, labels and annotations |
//! | [`profile`] | what a pool's document says of Kubernetes, and what nodes say of themselves |
//! | [`books`] | nodes and pods as last seen; changes of them as observations |
//! | [`observe`] | who holds the GPUs, whoever it is |
//! | [`pod`] | the pod of a worker |
//! | [`fate`] | what became of a worker's pod |
//! | [`mod@fence`] | when a silent worker's share may be given away |
//! | [`object`] | the TrainingJob object: from a document, and its status |
//! | [`cluster`] | orders in, observations out: `body` takes them, `lookout` sees, `create` makes pods,
//! | | `keep` holds what is promised |
//! | [`mounts`] | why a pod on its node does not begin |
//! | [`mod@check`] | a test of a node before it takes work again |
//! | [`api`] | requests to the apiserver, tried again where that is safe |
//! | [`site`] | who an agent is |
//! | [`identity`] | who asks through the API, and what he may |
//! | [`certified`] | who comes with a client certificate, and the certificate that an administrator gives |
//! | [`authority`] | the control plane's own authority, as the cluster keeps it |
//! | [`lease`] | which of several control planes takes the store |
//! | [`reach`] | the way from a person's machine to the control plane |
//! | [`own`] | the control plane's own pod |
//! | [`depot`] | where pods fetch code and layers, and hand layers up |
//! | [`layer`] | the pod that makes a layer, of a job's own packages |
//! | [`namespace`] | what a namespace needs before job pods can be in it |
//! | [`registry`] | which content a tag stands for |
//! | [`resolve`] | what the containers of a job are to run |
//! | [`mirror`] | objects become jobs, jobs have objects |
//! | [`events`] | what happened to a job, as Events of its object |
//! | [`documents`] | the same for queues and pools |
//! | [`rebuild`] | a store that was lost, from the cluster's objects |
//! | [`pretend`] | workers without pods, for benchmarks alone |
//! | [`exporters`] | where exporters of GPU figures answer |
//! | [`doctor`] | whether a cluster has what jobs need |
//!
//! The first seven are pure. Invariants: a pod is created only for a placed gang, and never a second time for
//! a worker that was heard of; nothing is chosen here.

pub mod api;
pub mod authority;
mod body;
pub mod books;
pub mod certified;
pub mod check;
pub mod cluster;
mod create;
pub mod depot;
pub mod doctor;
pub mod documents;
pub mod events;
pub mod exporters;
pub mod fate;
pub mod fence;
pub mod identity;
mod keep;
pub mod layer;
pub mod lease;
mod lookout;
pub mod mirror;
pub mod mounts;
pub mod names;
pub mod namespace;
pub mod object;
pub mod observe;
pub mod own;
pub mod pod;
pub mod pretend;
pub mod profile;
pub mod reach;
pub mod rebuild;
pub mod registry;
mod remove;
pub mod resolve;
pub mod site;

pub use cluster::{KubeCluster, KubeConfig, KubeHandle, Listeners};
pub use kube::Client;
