//! The keys of administrators' documents, as data.

use super::kubernetes::fields::KUBERNETES;
use super::ranges;
use crate::file::fields::field;
use crate::file::formats::{self as f, text};
use crate::file::shape::Shape::{Bool, Choice, Either, List, Map, Object as Keys, Text, Tree, Whole};
use crate::file::shape::{Fault, Field, Object, Shape, Text as Form};

/// Most GPUs that a quota can have.
pub const MAX_QUOTA: u64 = 10_000_000;
/// Most levels of a topology.
pub const MAX_LEVELS: usize = 8;

const LABEL: Option<&str> = Some("^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$");
const QUEUE_NAME: Form = text("a name", LABEL, queue_name);
const POOL_NAME: Form = text("a name", LABEL, |t| f::label(t, 63));
const LEVEL: Form = Form { what: "the name of a level", literal: true, ..text("", f::WORD.pattern, level) };
const DOMAIN: Form = Form { what: "the name of a domain", literal: true, ..text("", f::WORD.pattern, domain) };
const NODES: Form = Form {
    what: "a node, or several as `node-[1-8]`",
    literal: true,
    ..text("", Some("^[A-Za-z0-9][-_.,A-Za-z0-9\\[\\]]*$"), |t| ranges::expand(t).map(drop))
};
const TYPE: Form = Form { what: "a GPU type", ..text("", f::GPU_TYPE.pattern, gpu_type) };
const USER: Form = Form { what: "the name of a user", literal: true, ..text("", Some("^\\S+$"), user) };

fn queue_name(t: &str) -> Result<(), Fault> {
    match t.trim_matches('/').rsplit_once('/') {
        Some((above, last)) => {
            let parent = above.rsplit('/').next().unwrap_or_default();
            Err(Fault::new(
                "a queue has one name, and its place in the tree from `parent`",
                format!("write `name: {last}` and `parent: {parent}`"),
            ))
        }
        None => f::label(t, 63),
    }
}

fn level(t: &str) -> Result<(), Fault> {
    f::word(t).map_err(|fault| Fault { help: "write for example `leaf`".to_owned(), ..fault })
}

fn domain(t: &str) -> Result<(), Fault> {
    f::word(t).map_err(|fault| Fault { help: "write for example `leaf-1`".to_owned(), ..fault })
}

fn gpu_type(t: &str) -> Result<(), Fault> {
    f::word(t)
        .map_err(|fault| Fault { help: "write it as `aviflow node ls` shows it, such as `H100`".to_owned(), ..fault })
}

fn user(t: &str) -> Result<(), Fault> {
    if !t.is_empty() && !t.contains(char::is_whitespace) {
        return Ok(());
    }
    Err(Fault::new("the name of a user is one word", "give each user an item of the list: `[ann, ben]`"))
}

const TIME_SHARING: Shape =
    Either(&[Choice(&[("on", "with the usual figures"), ("off", "not at all")]), Keys(&SHARING)]);

/// A queue.
pub static QUEUE: Object = Object {
    what: "a queue",
    fields: &[
        field("kind", Choice(&[("Queue", "a node of the quota tree")]), "What this document is.")
            .required()
            .eg(&["\"Queue\""]),
        field("name", Text(&QUEUE_NAME), "The unique name, by which jobs ask for it.").required().eg(&["\"nlp\""]),
        field(
            "parent",
            Text(&f::QUEUE),
            "The queue above it in the tree, by its name. Without it, the queue is a root.",
        )
        .eg(&["\"research\""]),
        field("team", Text(&f::ANY), "The team it belongs to.").eg(&["\"language\""]),
        field(
            "state",
            Choice(&[
                ("open", "takes and starts jobs"),
                ("held", "takes jobs and starts none"),
                ("draining", "takes no jobs; those it has may start"),
            ]),
            "Whether it takes and starts jobs.",
        )
        .default("\"open\""),
        field(
            "quotas",
            Map(&TYPE, &Keys(&QUOTA)),
            "What it has of each GPU type, in GPUs. A type that no queue names is everybody's.",
        )
        .eg(&["{\"H100\": {\"guarantee\": 16, \"limit\": 64, \"weight\": 2}}"]),
        field("lend", Bool, "Whether others may use its guarantee while it does not.").default("true"),
        field("borrow", Bool, "Whether it may use more than its guarantee.").default("true"),
        field(
            "reclaim",
            Bool,
            "Whether it takes its guarantee back from those who borrowed it; else it waits until they end.",
        )
        .default("true"),
        field("defaults", Keys(&DEFAULTS), "What a job gets that does not say it."),
        field("highestPriority", Text(&f::PRIORITY), "The highest priority that its jobs may have. Without it, any.")
            .eg(&["\"high\""]),
        field("submitters", List(&Text(&USER), 0), "Who may submit to it. Without it, everybody.")
            .eg(&["[\"ann\", \"ben\"]"])
            .most(4096),
        field(
            "timeSharing",
            TIME_SHARING,
            "Whether its preemptible jobs of equal priority take turns: `on`, `off`, or with which figures. Without it, as its parent or the pool says.",
        ),
    ],
    synonyms: &[
        ("quota", "quotas"),
        ("guarantees", "quotas"),
        ("resources", "quotas"),
        ("limits", "quotas"),
        ("gpus", "quotas"),
        ("nominalQuota", "quotas"),
        ("cohort", "parent"),
        ("parentQueue", "parent"),
        ("group", "team"),
        ("project", "team"),
        ("owner", "team"),
        ("status", "state"),
        ("stopPolicy", "state"),
        ("lending", "lend"),
        ("borrowing", "borrow"),
        ("preemption", "reclaim"),
        ("default", "defaults"),
        ("maxPriority", "highestPriority"),
        ("priority", "defaults.priority"),
        ("timeLimit", "defaults.timeLimit"),
        ("preemptible", "defaults.preemptible"),
        ("users", "submitters"),
        ("allow", "submitters"),
        ("allowUsers", "submitters"),
        ("acl", "submitters"),
        ("timesharing", "timeSharing"),
        ("timeSlicing", "timeSharing"),
        ("turns", "timeSharing"),
    ],
};

static QUOTA: Object = Object {
    what: "a quota",
    fields: &[
        field("guarantee", Whole(0, MAX_QUOTA), "GPUs that are its own whenever it wants them.")
            .default("0")
            .eg(&["16"]),
        field(
            "limit",
            Whole(0, MAX_QUOTA),
            "GPUs that it never exceeds, with all queues below it. Without it, no limit.",
        )
        .eg(&["64"]),
        field("weight", Whole(1, 1_000_000), "Its share of what is above the guarantees, relative to its siblings.")
            .default("1")
            .eg(&["2"]),
    ],
    synonyms: &[
        ("min", "guarantee"),
        ("guaranteed", "guarantee"),
        ("nominal", "guarantee"),
        ("nominalQuota", "guarantee"),
        ("reserved", "guarantee"),
        ("deserved", "guarantee"),
        ("quota", "guarantee"),
        ("max", "limit"),
        ("maximum", "limit"),
        ("cap", "limit"),
        ("capability", "limit"),
        ("borrowingLimit", "limit"),
        ("share", "weight"),
        ("shares", "weight"),
    ],
};

static DEFAULTS: Object = Object {
    what: "what a job gets that does not say it",
    fields: &[
        field("timeLimit", Text(&f::DURATION), "The time limit.").eg(&["\"24h\""]),
        field("priority", Text(&f::PRIORITY), "The priority.").eg(&["\"normal\""]),
        field("preemptible", Bool, "Whether it may be suspended.").eg(&["true"]),
    ],
    synonyms: &[
        ("timeout", "timeLimit"),
        ("walltime", "timeLimit"),
        ("time", "timeLimit"),
        ("preemptable", "preemptible"),
    ],
};

static SHARING: Object = Object {
    what: "a rule for taking turns",
    fields: &[
        field("enabled", Bool, "Whether jobs take turns.").default("true"),
        field("minimumRun", Text(&f::DURATION), "The shortest turn.").default("\"2h\""),
        field(
            "level",
            Text(&f::DURATION),
            "Time of the whole pool, whose GPU-time is the first level: `15m` are 16 GPU-hours of a pool of 64 GPUs. Each further level is twice the one before; a job of a lower level goes first.",
        )
        .default("\"15m\""),
        field("ageing", Text(&f::DURATION), "Waiting that lowers the level by one.").default("\"40h\""),
    ],
    synonyms: &[
        ("turn", "minimumRun"),
        ("slice", "minimumRun"),
        ("quantum", "minimumRun"),
        ("minRun", "minimumRun"),
        ("minimum", "minimumRun"),
        ("aging", "ageing"),
        ("levels", "level"),
        ("on", "enabled"),
    ],
};

/// A pool.
pub static POOL: Object = Object {
    what: "a pool",
    fields: &[
        field("kind", Choice(&[("Pool", "a pool's topology")]), "What this document is.").required().eg(&["\"Pool\""]),
        field("name", Text(&POOL_NAME), "The pool, by its name; its nodes say to which they belong.")
            .required()
            .eg(&["\"local\""]),
        field(
            "topology",
            Keys(&TOPOLOGY),
            "How its nodes are joined. Without it, every node is as near to every other.",
        ),
        field(
            "timeSharing",
            TIME_SHARING,
            "Whether its preemptible jobs of equal priority take turns: `on`, `off`, or with which figures. Without it, they do not.",
        ),
        field(
            "kubernetes",
            Keys(&KUBERNETES),
            "Which nodes of a Kubernetes cluster it has, and what pods get there. A pool of one machine leaves it alone.",
        ),
    ],
    synonyms: &[
        ("levels", "topology.levels"),
        ("domains", "topology.domains"),
        ("switches", "topology.domains"),
        ("nodes", "topology.domains"),
        ("network", "topology"),
        ("timesharing", "timeSharing"),
        ("timeSlicing", "timeSharing"),
        ("turns", "timeSharing"),
    ],
};

static TOPOLOGY: Object = Object {
    what: "a topology",
    fields: &[
        field("levels", List(&Text(&LEVEL), 1), "The levels above the node, the smallest first.")
            .required()
            .eg(&["[\"leaf\", \"spine\"]"])
            .most(MAX_LEVELS),
        field(
            "domains",
            Tree(&DOMAIN, &Text(&NODES)),
            "The switch tree: domains of the greatest level by name, in each those of the next, and in the smallest its nodes. On Kubernetes, `kubernetes.topologyKeys` may say it instead.",
        ),
    ],
    synonyms: &[
        ("level", "levels"),
        ("tree", "domains"),
        ("switches", "domains"),
        ("nodes", "domains"),
        ("blocks", "domains"),
        ("racks", "domains"),
    ],
};

/// The policy.
pub static POLICY: Object = Object {
    what: "the policy",
    fields: &[
        field(
            "kind",
            Choice(&[("Policy", "how the platform decides where no other document says so")]),
            "What this document is.",
        )
        .required()
        .eg(&["\"Policy\""]),
        field("halfLife", Text(&f::DURATION), "The time after which used GPU-time counts half.").default("\"168h\""),
        field(
            "reservations",
            Whole(0, 1000),
            "How many jobs of each GPU type in a pool get a reservation, so that smaller ones do not delay them.",
        )
        .default("1"),
        field("preemption", Bool, "Whether jobs may be suspended for others at all.").default("true"),
        field(
            "minimumRun",
            Text(&f::DURATION),
            "A job is left alone for this long after its start, except for reclaim.",
        )
        .default("\"10m\""),
        field(
            "patience",
            Text(&f::DURATION),
            "How long a victim may take for its next checkpoint before it is stopped anyhow.",
        )
        .default("\"15m\""),
        field("restart", Text(&f::DURATION), "What a restart costs, in time of its GPUs, where it was never observed.")
            .default("\"5m\""),
    ],
    synonyms: &[
        ("decay", "halfLife"),
        ("priorityDecayHalfLife", "halfLife"),
        ("fairShareDecay", "halfLife"),
        ("reservationDepth", "reservations"),
        ("backfill", "reservations"),
        ("preempt", "preemption"),
        ("minRun", "minimumRun"),
        ("preemptExemptTime", "minimumRun"),
        ("grace", "patience"),
        ("gracePeriod", "patience"),
        ("restartCost", "restart"),
    ],
};

/// The kinds, with what describes each.
pub static KINDS: [(&str, &Object); 3] = [("Queue", &QUEUE), ("Pool", &POOL), ("Policy", &POLICY)];

/// The description of a kind.
#[must_use]
pub fn of_kind(kind: &str) -> Option<&'static Object> {
    KINDS.iter().find(|(name, _)| *name == kind).map(|(_, object)| *object)
}

/// A field by its key, in any kind.
pub(super) fn kinds_with(key: &str) -> impl Iterator<Item = &'static str> + '_ {
    let has = move |fields: &[Field]| fields.iter().any(|f| f.key == key && f.key != "kind" && f.key != "name");
    KINDS.iter().filter(move |(_, object)| has(object.fields)).map(|(name, _)| *name)
}
