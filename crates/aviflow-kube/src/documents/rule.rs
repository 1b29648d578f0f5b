//! Which of two writers is heard: the object of a queue or pool, or the control plane's own document.
//!
//! A person writes the object with `kubectl`, or the document through the API. Whenever both say the same, the object
//! gets a mark ([`Agreed`]): its generation then, and how long the journal of what people did was. From the mark it
//! follows which of the two changed since. Where both did, the object is heard, as it is the intent.
//!
//! Invariants: a document is given up only for what a person did after the mark, by the journal of this very store. So
//! a control plane with an empty store, or one restored from a backup, takes what the objects say. Once both say the
//! same, no step follows but the mark.

use std::fmt;

/// When an object and the control plane's document last said the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Agreed {
    /// The generation of the object.
    pub generation: i64,
    /// The last row of the journal.
    pub row: u64,
}

impl Agreed {
    /// Reads the annotation; none where a person wrote something else into it.
    #[must_use]
    pub fn parse(text: &str) -> Option<Agreed> {
        let (generation, row) = text.split_once('/')?;
        Some(Agreed { generation: generation.parse().ok()?, row: row.parse().ok()? })
    }
}

/// As it stands in the annotation.
impl fmt::Display for Agreed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.generation, self.row)
    }
}

/// An object, as far as the rule asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Side<'a, T> {
    /// What it says.
    pub document: &'a T,
    /// The generation of its spec.
    pub generation: i64,
    /// Whether somebody deletes it.
    pub deleting: bool,
    /// Its mark.
    pub agreed: Option<Agreed>,
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Nothing.
    Rest,
    /// Both say the same: the object gets the mark.
    Mark,
    /// The object's document is applied.
    Apply,
    /// The control plane's document is written into the object.
    Write,
    /// There is no object yet: it is made.
    Make,
    /// The object is being deleted: so is the control plane's document.
    End,
    /// The control plane's document was deleted: so is the object.
    Delete,
    /// The object is being deleted, and may go.
    Release,
}

/// The next step for one name. `heard` is the last row of the journal about it.
#[must_use]
pub fn step<T: PartialEq>(object: Option<Side<'_, T>>, ours: Option<&T>, heard: Option<u64>) -> Step {
    let Some(object) = object else { return if ours.is_some() { Step::Make } else { Step::Rest } };
    if object.deleting {
        return if ours.is_some() { Step::End } else { Step::Release };
    }
    let unchanged = object.agreed.filter(|a| a.generation == object.generation);
    let newer = unchanged.is_some_and(|a| heard.is_some_and(|row| row > a.row));
    match ours {
        Some(ours) if ours == object.document => {
            if unchanged.is_some() {
                Step::Rest
            } else {
                Step::Mark
            }
        }
        Some(_) if newer => Step::Write,
        None if newer => Step::Delete,
        Some(_) | None => Step::Apply,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An object that says a number, at a generation, with its mark as the annotation has it.
    fn object<'a>(document: &'a u32, generation: i64, mark: &str) -> Option<Side<'a, u32>> {
        Some(Side { document, generation, deleting: false, agreed: Agreed::parse(mark) })
    }

    #[test]
    fn each_change_is_heard_once_and_the_newer_one_wins() {
        #[track_caller]
        fn check(object: Option<Side<'_, u32>>, ours: Option<u32>, heard: Option<u64>, expected: Step) {
            assert_eq!(step(object, ours.as_ref(), heard), expected);
        }
        check(None, None, None, Step::Rest);
        // Through the API alone.
        check(None, Some(1), Some(4), Step::Make);
        // An object alone is the intent.
        check(object(&1, 1, ""), None, None, Step::Apply);
        check(object(&1, 1, ""), Some(2), Some(4), Step::Apply);
        check(object(&1, 1, ""), Some(1), Some(4), Step::Mark);
        check(object(&1, 1, "1/4"), Some(1), Some(4), Step::Rest);
        // `kubectl` changed it.
        check(object(&2, 2, "1/4"), Some(1), Some(4), Step::Apply);
        // It was changed to what is here already, or where decisions do not look.
        check(object(&1, 2, "1/4"), Some(1), Some(4), Step::Mark);
        // The API changed the document, or deleted it.
        check(object(&1, 1, "1/4"), Some(2), Some(5), Step::Write);
        check(object(&1, 1, "1/4"), None, Some(5), Step::Delete);
        // Both changed: the object is the intent.
        check(object(&3, 2, "1/4"), Some(2), Some(5), Step::Apply);
        check(object(&3, 2, "1/4"), None, Some(5), Step::Apply);
    }

    #[test]
    fn a_store_that_did_not_hear_of_a_change_gives_nothing_up() {
        let lost = |heard| step(object(&1, 1, "1/4"), None, heard);
        assert_eq!(lost(None), Step::Apply, "an empty store");
        assert_eq!(lost(Some(4)), Step::Apply, "one from a backup, before the queue was made");
        let old = |heard| step(object(&2, 3, "3/9"), Some(&1), heard);
        assert_eq!(old(Some(4)), Step::Apply, "one from a backup, before its last change");
        // The default queue of a new store was made by nobody.
        assert_eq!(old(None), Step::Apply);
    }

    #[test]
    fn an_object_that_is_being_deleted_waits_for_its_document() {
        let deleting = |ours| step(object(&1, 1, "1/4").map(|o| Side { deleting: true, ..o }), ours, Some(4));
        assert_eq!(deleting(Some(&1)), Step::End);
        assert_eq!(deleting(Some(&2)), Step::End);
        assert_eq!(deleting(None), Step::Release);
    }

    /// Whoever changes what, and in whatever order: both say the same after at most three steps, and then rest.
    #[test]
    fn two_writers_never_go_on_for_ever() {
        #[derive(Clone, Copy)]
        enum Act {
            Kubectl(u32),
            Api(Option<u32>),
        }
        let acts = [Act::Kubectl(1), Act::Kubectl(2), Act::Api(Some(1)), Act::Api(Some(3)), Act::Api(None)];
        let sequences = acts.iter().flat_map(|a| acts.iter().flat_map(|b| acts.iter().map(|c| [*a, *b, *c])));
        let mut checked = 0;
        for sequence in sequences {
            let (mut row, mut heard, mut ours) = (0, None, None);
            let mut there: Option<(u32, i64, Option<Agreed>, bool)> = None;
            for act in sequence {
                match act {
                    Act::Kubectl(document) => {
                        let (generation, mark) = there.map_or((0, None), |(_, g, mark, _)| (g, mark));
                        there = Some((document, generation + 1, mark, false));
                    }
                    Act::Api(document) if document != ours => {
                        row += 1;
                        (ours, heard) = (document, Some(row));
                    }
                    Act::Api(_) => {}
                }
                let mut steps = 0;
                loop {
                    let position = row;
                    let object = there.as_ref().map(|(document, generation, agreed, deleting)| Side {
                        document,
                        generation: *generation,
                        deleting: *deleting,
                        agreed: *agreed,
                    });
                    let marked = |generation| Some(Agreed { generation, row: position });
                    match step(object, ours.as_ref(), heard) {
                        Step::Rest => break,
                        Step::Mark => there = there.map(|(d, g, _, x)| (d, g, marked(g), x)),
                        Step::Apply => {
                            row += 1;
                            (ours, heard) = (there.map(|o| o.0), Some(row));
                        }
                        Step::Write => there = ours.zip(there).map(|(d, (_, g, _, x))| (d, g + 1, marked(g + 1), x)),
                        Step::Make => there = ours.map(|d| (d, 1, marked(1), false)),
                        Step::End => {
                            row += 1;
                            (ours, heard) = (None, Some(row));
                        }
                        Step::Delete => there = there.map(|(d, g, m, _)| (d, g, m, true)),
                        Step::Release => there = None,
                    }
                    steps += 1;
                    assert!(steps <= 3, "they do not come to rest");
                }
                assert_eq!(there.map(|o| o.0), ours);
                checked += 1;
            }
        }
        assert_eq!(checked, 375);
    }
}
