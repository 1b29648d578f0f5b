//! What the mirror asks of the control plane, and an object as it asks it.

use crate::events::Entry;
use crate::names;
use crate::object;
use aviflow_api::spec::{JobSpec, ObjectRef, Provenance, ResolvedImage};
use aviflow_core::model::{Job, JobId, JobKey};
use aviflow_core::time::Time;
use kube::core::DynamicObject;
use std::future::Future;
use std::pin::Pin;

/// A submission that came as an object.
#[derive(Clone, Debug)]
pub struct Applied {
    /// The namespace.
    pub namespace: String,
    /// Who, as stamped at admission.
    pub user: String,
    /// The document.
    pub spec: JobSpec,
    /// What it was resolved to; names the object.
    pub provenance: Provenance,
}

/// Why an object was not taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotTaken {
    /// A stable word for programs.
    pub reason: String,
    /// A sentence for whoever applied the object.
    pub message: String,
}

impl NotTaken {
    /// Without a word of its own.
    pub(super) fn refused(message: String) -> NotTaken {
        NotTaken { reason: "Refused".to_owned(), message }
    }
}

/// A job that has ended.
#[derive(Clone, Debug)]
pub struct Ended {
    /// The job.
    pub job: Job,
    /// When it did, if that is known.
    pub at: Option<Time>,
    /// What it ran in; none where its object says it.
    pub image: Option<ResolvedImage>,
}

/// An answer to [`Jobs::submit`].
pub type Submitting = Pin<Box<dyn Future<Output = Result<(JobId, JobKey), NotTaken>> + Send>>;

/// What the mirror asks of the control plane.
pub trait Jobs: Send + Sync + 'static {
    /// Submits a job, or finds the one that an earlier try has made of the same object.
    fn submit(&self, applied: Applied) -> Submitting;

    /// A job that has ended. May wait for the disk.
    fn ended(&self, job: JobId) -> Option<Ended>;

    /// A job's timeline after a row of it, oldest first; empty where it cannot be read. May wait for the disk.
    fn timeline(&self, job: JobId, after: u64) -> Vec<Entry>;
}

/// Submits what an object says.
pub(super) async fn submit(
    jobs: &dyn Jobs,
    namespace: &str,
    object: DynamicObject,
    queue: &str,
) -> Result<(JobId, JobKey), NotTaken> {
    let applied = applied(namespace, &object, queue);
    // Of many that wait only what is submitted is kept.
    drop(object);
    jobs.submit(applied.map_err(NotTaken::refused)?).await
}

fn applied(namespace: &str, object: &DynamicObject, default_queue: &str) -> Result<Applied, String> {
    let (spec, mut provenance) = object::document(object, default_queue)?;
    let user = object::submitter(object).ok_or_else(|| {
        format!(
            "nobody stamped who submitted it (annotation {}); install Aviflow's admission policies and apply it again",
            names::SUBMITTER
        )
    })?;
    let metadata = &object.metadata;
    provenance.object = metadata.name.clone().zip(metadata.uid.clone()).map(|(name, uid)| ObjectRef { name, uid });
    Ok(Applied { namespace: namespace.to_owned(), user: user.to_owned(), spec, provenance })
}
