//! What the attempts of a job ran, as far as they reported it.

use aviflow_api::identity::HASH_FACT;
use aviflow_api::rest::AttemptHash;
use aviflow_core::lifecycle::{Moment, MomentKind};

/// What each attempt ran. The first attempt's is what was submitted, if any worker of it says so.
pub(crate) fn hashes(moments: &[Moment], submitted: &str) -> Vec<AttemptHash> {
    let mut found: Vec<AttemptHash> = Vec::new();
    for moment in moments {
        let MomentKind::Facts { values } = &moment.kind else { continue };
        let Some(hash) = values.get(HASH_FACT) else { continue };
        let told = AttemptHash { attempt: moment.attempt, hash: hash.clone(), differs: false };
        if !found.contains(&told) {
            found.push(told);
        }
    }
    let Some(first) = found.first().map(|f| f.attempt) else { return found };
    let of_first = || found.iter().filter(|f| f.attempt == first);
    let expected = of_first().find(|f| f.hash == submitted).or(of_first().next()).map(|f| f.hash.clone());
    for told in &mut found {
        told.differs = Some(&told.hash) != expected.as_ref();
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use aviflow_core::model::JobId;
    use aviflow_core::time::Time;
    use std::collections::BTreeMap;

    /// What each attempt told, and which of that is said to differ from the first.
    fn check(told: &[(u32, &str)], expected: &[(u32, &str, bool)]) {
        let values = |hash: &str| BTreeMap::from([(HASH_FACT.to_owned(), hash.to_owned())]);
        let moments: Vec<Moment> = told
            .iter()
            .map(|(attempt, hash)| Moment {
                job: JobId(1),
                at: Time(0),
                attempt: *attempt,
                kind: MomentKind::Facts { values: values(hash) },
            })
            .collect();
        let found = hashes(&moments, "a");
        let found: Vec<_> = found.iter().map(|h| (h.attempt, h.hash.as_str(), h.differs)).collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn attempts_are_compared_with_the_first() {
        check(&[], &[]);
        check(&[(1, "a"), (1, "a"), (3, "a")], &[(1, "a", false), (3, "a", false)]);
        check(&[(1, "a"), (2, "b"), (3, "a")], &[(1, "a", false), (2, "b", true), (3, "a", false)]);
        // A form of archive that is not ours has another hash where it is unpacked, the same in each attempt.
        check(&[(1, "x"), (2, "x")], &[(1, "x", false), (2, "x", false)]);
        // One worker of the first found something else.
        check(&[(1, "b"), (1, "a"), (2, "a")], &[(1, "b", true), (1, "a", false), (2, "a", false)]);
    }
}
