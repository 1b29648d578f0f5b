//! Who asks, and what he may do.
//!
//! A right is named as a rule of Kubernetes' RBAC names it: a verb on a resource of the group
//! `aviflow.dev`. Some resources stand for no object: `nodes` (seeing nodes and what holds their GPUs,
//! cordons and drains), `usage` (reports of GPU time), `platform` (the policy, pause and stop, what
//! people did) and `metrics`. So do the parts of a job: `trainingjobs/log`, `trainingjobs/files`, `trainingjobs/exec`.
//!
//! Invariant: a right on jobs is one on all jobs of a namespace. A job's name is given by the platform
//! and may be another than the one that was asked for, so no right depends on it.

use crate::crd::GROUP;
use std::collections::BTreeMap;
use std::fmt;

/// Who asks, as the cluster knows him.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Identity {
    /// The name.
    pub user: String,
    /// The number, where there is one.
    pub uid: Option<String>,
    /// The groups.
    pub groups: Vec<String>,
    /// What else the cluster's authenticator says; some authorizers decide by it.
    pub extra: BTreeMap<String, Vec<String>>,
}

/// What is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Verb {
    /// Look at one.
    Get,
    /// Look at all.
    List,
    /// Make one.
    Create,
    /// Change one.
    Update,
    /// End one, or take it away.
    Delete,
    /// Submit to it.
    Use,
}

impl Verb {
    /// As a rule names it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Verb::Get => "get",
            Verb::List => "list",
            Verb::Create => "create",
            Verb::Update => "update",
            Verb::Delete => "delete",
            Verb::Use => "use",
        }
    }
}

/// A part of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Part {
    /// Its output.
    Log,
    /// Its outputs and checkpoints.
    Files,
    /// Commands beside its ranks.
    Exec,
}

/// What may be done, if it is given.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Right {
    /// What is done.
    pub verb: Verb,
    /// To what.
    pub resource: &'static str,
    /// To which part of it.
    pub subresource: Option<&'static str>,
    /// In which namespace; all of them if none is named, for what has one.
    pub namespace: Option<String>,
    /// To which one; all of them if none is named.
    pub name: Option<String>,
}

/// The resource of jobs.
const JOBS: &str = "trainingjobs";

impl Right {
    /// Something done to a thing that belongs to no namespace.
    #[must_use]
    pub fn on(verb: Verb, resource: &'static str, name: Option<String>) -> Right {
        Right { verb, resource, subresource: None, namespace: None, name }
    }

    /// Submitting to a queue.
    #[must_use]
    pub fn use_queue(name: &str) -> Right {
        Right::on(Verb::Use, "queues", Some(name.to_owned()))
    }

    /// Something done to jobs of a namespace, or of all.
    #[must_use]
    pub fn jobs(verb: Verb, namespace: Option<&str>) -> Right {
        let namespace = namespace.map(str::to_owned);
        Right { verb, resource: JOBS, subresource: None, namespace, name: None }
    }

    /// Something done to a part of jobs of a namespace.
    #[must_use]
    pub fn part(verb: Verb, part: Part, namespace: &str) -> Right {
        let subresource = match part {
            Part::Log => "log",
            Part::Files => "files",
            Part::Exec => "exec",
        };
        Right { subresource: Some(subresource), ..Right::jobs(verb, Some(namespace)) }
    }
}

impl fmt::Display for Right {
    /// `get trainingjobs.aviflow.dev/log in namespace nlp`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}.{GROUP}", self.verb.name(), self.resource)?;
        if let Some(subresource) = self.subresource {
            write!(f, "/{subresource}")?;
        }
        if let Some(name) = &self.name {
            write!(f, " {name}")?;
        }
        match &self.namespace {
            Some(namespace) => write!(f, " in namespace {namespace}"),
            None if self.resource == JOBS => f.write_str(" in all namespaces"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_read_as_rules_do() {
        let texts = [
            Right::use_queue("nlp"),
            Right::jobs(Verb::List, None),
            Right::part(Verb::Create, Part::Exec, "nlp"),
            Right::on(Verb::Update, "platform", None),
        ]
        .map(|right| right.to_string());
        let expected = [
            "use queues.aviflow.dev nlp",
            "list trainingjobs.aviflow.dev in all namespaces",
            "create trainingjobs.aviflow.dev/exec in namespace nlp",
            "update platform.aviflow.dev",
        ];
        assert_eq!(texts, expected);
    }
}
