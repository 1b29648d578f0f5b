//! Queues from a file of JSON: a list of the core's own type, for as long as a replay needs it.

use crate::error::{Error, Result};
use aviflow_core::model::Queue;
use std::collections::BTreeSet;

/// Reads a list of queues. `file` is what errors call it.
///
/// # Errors
/// If it is no such list, or the queues are no tree.
pub fn from_json(file: &str, text: &str) -> Result<Vec<Queue>> {
    let queues: Vec<Queue> = serde_json::from_str(text).map_err(|e| Error::Line {
        file: file.to_owned(),
        line: u32::try_from(e.line().max(1)).unwrap_or(u32::MAX),
        what: e.to_string(),
        help: "a list of queues, as [{\"name\": \"nlp\", \"parent\": null, \"state\": \"open\", \
               \"quotas\": {\"gpu\": {\"guarantee\": 64}}}]"
            .to_owned(),
    })?;
    check(file, &queues)?;
    Ok(queues)
}

/// Checks that the queues are a tree with unique names.
///
/// # Errors
/// If they are not.
pub fn check(file: &str, queues: &[Queue]) -> Result<()> {
    let wrong = |what: String, help: &str| Error::File { file: file.to_owned(), what, help: help.to_owned() };
    if queues.is_empty() {
        return Err(wrong("no queue".to_owned(), "name at least one, or leave --queues out"));
    }
    let mut names = BTreeSet::new();
    for queue in queues {
        if !names.insert(queue.name.as_str()) {
            return Err(wrong(
                format!("the queue {} is there twice", queue.name),
                "names are unique in the whole tree",
            ));
        }
    }
    for queue in queues {
        let mut above = queue;
        let mut steps = 0;
        while let Some(parent) = &above.parent {
            let Some(next) = queues.iter().find(|q| q.name == *parent) else {
                let what = format!("the queue {} has the parent {parent}, which is not there", above.name);
                return Err(wrong(what, "add it, or take `parent` out"));
            };
            above = next;
            steps += 1;
            if steps > queues.len() {
                return Err(wrong(format!("the queue {} is above itself", queue.name), "parents form a tree"));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_are_a_tree() {
        let check = |text: &str, expected: &str| match from_json("q.json", text) {
            Ok(_) => assert_eq!(expected, "", "{text}"),
            Err(error) => assert!(error.to_string().starts_with(expected) && !expected.is_empty(), "{error}"),
        };
        let queue = |name: &str, parent: &str| format!(r#"{{"name":"{name}","parent":{parent},"state":"open"}}"#);
        check(&format!("[{},{}]", queue("a", "null"), queue("b", "\"a\"")), "");
        check("[]", "q.json: no queue");
        check(&format!("[{},{}]", queue("a", "null"), queue("a", "null")), "q.json: the queue a is there twice");
        check(&format!("[{}]", queue("b", "\"a\"")), "q.json: the queue b has the parent a");
        check(&format!("[{},{}]", queue("a", "\"b\""), queue("b", "\"a\"")), "q.json: the queue a is above itself");
        check("[\n{\"name\": 5}]", "q.json:2: invalid type");
    }
}
