//! Which job a name means.

use crate::access::Caller;
use crate::app::App;
use crate::error::Failure;
use aviflow_api::suggest::nearest;
use aviflow_core::model::{JobId, JobKey};
use aviflow_store::read::Filter;

/// The namespace of this machine's jobs, and of who names none.
pub(crate) const NAMESPACE: &str = "default";

/// Newest jobs among whose names a similar one is looked for.
const SIMILAR_AMONG: u32 = 200;

/// `namespace/name` means exactly that job. A bare name means, in the caller's namespace, his own
/// latest job whose document has that name, else the job of exactly that name.
pub(crate) fn resolve(app: &App, name: &str, caller: &Caller) -> Result<JobId, Failure> {
    let reader = &app.parts.reader;
    let (namespace, bare) = match name.split_once('/') {
        Some((namespace, bare)) => (namespace, bare),
        None => (caller.namespace.as_str(), name),
    };
    if !name.contains('/')
        && let Some(id) = reader.latest_of(namespace, bare, Some(&caller.user))?
    {
        return Ok(id);
    }
    let key = JobKey { namespace: namespace.to_owned(), name: bare.to_owned() };
    if let Some(id) = reader.find(&key)? {
        return Ok(id);
    }
    let newest = reader.jobs(&Filter {
        namespaces: Some(vec![namespace.to_owned()]),
        limit: SIMILAR_AMONG,
        ..Filter::default()
    })?;
    let similar = nearest(bare, newest.iter().map(|kept| kept.job.key.name.as_str()));
    let failure = Failure::not_found("noSuchJob", format!("there is no job `{name}`"));
    Err(match similar {
        Some(similar) => failure.help(format!("did you mean `{similar}`? `aviflow ls` lists the jobs")),
        None => failure.help("`aviflow ls` lists the jobs"),
    })
}
