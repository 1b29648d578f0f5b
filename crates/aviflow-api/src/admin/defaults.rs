//! What a queue says for jobs that do not say it, and which jobs it takes.
//!
//! A job's file is read without the control plane ([`crate::file::Document::read`]). Whoever submits it
//! then looks up its queue, calls [`apply_queue_defaults`] with the places of the fields, which tell
//! what the person wrote, and [`check_queue`] for what comes of it. What is sent has every field
//! filled in: the control plane cannot tell a default from what was said, and only checks.

use super::spec::{QueueDefaults, QueueSpec, QueueState};
use crate::diagnostic::{Diagnostic, DiagnosticCode};
use crate::file::{Places, Priorities};
use crate::spec::JobSpec;
use crate::suggest::one_of;

/// Fills in what the queue says and the person did not, and gives the fields that were filled.
///
/// A field that stands in the file or among the options is left as it is. The queue goes over the
/// configuration: that is only where a document gets its queue and priority from if nobody else says.
pub fn apply_queue_defaults(spec: &mut JobSpec, places: &Places, defaults: &QueueDefaults) -> Vec<&'static str> {
    let mut filled = Vec::new();
    if let (Some(limit), false) = (defaults.time_limit, places.has("timeLimit")) {
        spec.time_limit = Some(limit);
        filled.push("timeLimit");
    }
    if let (Some(priority), false) = (&defaults.priority, places.has("priority")) {
        spec.priority.clone_from(priority);
        filled.push("priority");
    }
    if let (Some(preemptible), false) = (defaults.preemptible, places.has("preemptible")) {
        spec.preemptible = preemptible;
        filled.push("preemptible");
    }
    filled
}

/// Reports why a queue does not take a job of this user. The errors have no place; the fields are
/// named, and [`Places::place`] gives them theirs. Whether the quota ever suffices is the core's.
#[must_use]
pub fn check_queue(spec: &JobSpec, queue: &QueueSpec, user: &str, priorities: &Priorities) -> Vec<Diagnostic> {
    let mut problems = Vec::new();
    let mut error = |code, field: &str, message: String, help: String| {
        problems.push(Diagnostic::error(code, message).field(field).help(help));
    };
    if queue.state == QueueState::Draining {
        error(
            DiagnosticCode::QueueRefuses,
            "queue",
            format!("queue `{}` is draining and takes no new jobs", queue.name),
            "name another; `aviflow queue ls` lists them".to_owned(),
        );
    }
    if !queue.submitters.is_empty() && !queue.submitters.iter().any(|name| name == user) {
        error(
            DiagnosticCode::QueueRefuses,
            "queue",
            format!("`{user}` may not submit to queue `{}`", queue.name),
            "name another, or ask its administrator to add you to `submitters`".to_owned(),
        );
    }
    let limit = queue.highest_priority.as_ref().and_then(|name| Some((name, priorities.get(name)?)));
    if let (Some(asked), Some((highest, most))) = (priorities.get(&spec.priority), limit)
        && asked > most
    {
        let names = priorities.names();
        let possible = names.iter().copied().filter(|name| priorities.get(name) <= Some(most));
        error(
            DiagnosticCode::QueueRefuses,
            "priority",
            format!("priority `{}` is above the highest of queue `{}`, `{highest}`", spec.priority, queue.name),
            format!("write {}", one_of(possible)),
        );
    }
    problems
}
