//! The election among control planes: a Lease says who shall take the store.
//!
//! It is no fence. That is the store's term, which every commit is checked by (ADR 12): whatever two control
//! planes believe of the Lease, one of them decides. So who holds it and cannot reach the apiserver goes on, and
//! a decision is never held up by it.
//!
//! [`Election`] decides and is pure; [`Lease`] asks the apiserver. Invariants:
//! - a lease that another holds is taken only after it was seen unchanged for as long as it lasts, by one's own
//!   monotonic clock: two machines' clocks are never compared, and what a Lease says of times only has to change;
//! - what is written replaces what was read, or nothing, so that of two that take it at once one does;
//! - who saw another in a lease that he held never takes or renews it again.

mod election;

pub use election::{DURATION, Election, LOOK, Next, RENEW};

use crate::api::refusal;
use election::written;
use k8s_openapi::api::coordination::v1::{Lease as Object, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, ObjectMeta, PostParams};
use kube::{Client, Error};
use std::time::{Duration, Instant};

/// The Lease of control planes that are told no other.
pub const NAME: &str = "aviflow";

/// How long one request may take.
const REQUEST: Duration = Duration::from_secs(2);

/// What became of one look at the Lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// It is held, and was renewed just now.
    Held,
    /// Another holds it.
    Waits {
        /// Who.
        holder: String,
        /// When to look again.
        again: Duration,
    },
    /// Another took it from this one.
    Lost {
        /// Who.
        holder: String,
    },
    /// Somebody wrote it at the same time.
    Again,
    /// The apiserver could not be asked; what was true before may still be.
    Away(String),
    /// The apiserver says that this one may not.
    Refused(String),
}

/// A Lease, as one control plane sees it.
pub struct Lease {
    api: Api<Object>,
    namespace: String,
    name: String,
    election: Election,
}

impl Lease {
    /// The Lease `name` of a namespace, for a control plane that nobody else is called like.
    #[must_use]
    pub fn new(client: Client, namespace: &str, name: &str, me: &str) -> Lease {
        Lease {
            api: Api::namespaced(client, namespace),
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            election: Election::new(me),
        }
    }

    /// Its namespace and name.
    #[must_use]
    pub fn shown(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    /// What its holder is called here.
    #[must_use]
    pub fn me(&self) -> &str {
        self.election.me()
    }

    /// Looks at it once, and takes or renews it where that is this one's to do.
    pub async fn step(&mut self) -> Step {
        match within(self.try_step()).await {
            Ok(step) => step,
            Err(Trouble::Error(error)) => match refusal(&error) {
                Some(refused) if refused.is_conflict() => Step::Again,
                Some(refused) => Step::Refused(refused.message),
                None => Step::Away(error.to_string()),
            },
            Err(Trouble::Late) => Step::Away(format!("no answer within {} s", REQUEST.as_secs())),
        }
    }

    async fn try_step(&mut self) -> kube::Result<Step> {
        let found = self.api.get_opt(&self.name).await?;
        let spec = found.as_ref().and_then(|lease| lease.spec.as_ref());
        match self.election.look(spec, Instant::now()) {
            Next::Wait { holder, again } => Ok(Step::Waits { holder, again }),
            Next::Lost { holder } => Ok(Step::Lost { holder }),
            Next::Write => {
                let wrote = written(spec, self.election.me(), MicroTime(Timestamp::now()));
                self.write(found, wrote).await?;
                self.election.wrote();
                Ok(Step::Held)
            }
        }
    }

    /// Writes over what was read: the apiserver refuses it if that has changed.
    async fn write(&self, found: Option<Object>, spec: LeaseSpec) -> kube::Result<()> {
        let post = PostParams::default();
        match found {
            Some(mut lease) => {
                lease.spec = Some(spec);
                self.api.replace(&self.name, &post, &lease).await.map(drop)
            }
            None => {
                let metadata = ObjectMeta { name: Some(self.name.clone()), ..ObjectMeta::default() };
                self.api.create(&post, &Object { metadata, spec: Some(spec) }).await.map(drop)
            }
        }
    }

    /// Gives it up, so that another need not wait. What cannot be said now the others find out by waiting.
    pub async fn release(self) {
        let release = async {
            let Some(mut lease) = self.api.get_opt(&self.name).await? else { return Ok(()) };
            let Some(spec) = lease.spec.as_mut().filter(|s| s.holder_identity.as_deref() == Some(self.me())) else {
                return Ok(());
            };
            spec.holder_identity = None;
            self.api.replace(&self.name, &PostParams::default(), &lease).await.map(drop)
        };
        let _ = within(release).await;
    }
}

enum Trouble {
    Error(Error),
    Late,
}

async fn within<T>(request: impl Future<Output = kube::Result<T>>) -> Result<T, Trouble> {
    match tokio::time::timeout(REQUEST, request).await {
        Ok(answer) => answer.map_err(Trouble::Error),
        Err(_) => Err(Trouble::Late),
    }
}
