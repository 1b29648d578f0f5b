//! What people changed.

use super::View;
use super::number::instant;
use super::table::{Align, Table};
use super::waiting::bare;
use aviflow_api::rest::Act;

/// `aviflow log`.
pub fn acts(acts: &[Act], view: View) -> String {
    let mut table = Table::new(&[
        ("at (utc)", Align::Left),
        ("who", Align::Left),
        ("on", Align::Left),
        ("what", Align::Left),
        ("why", Align::Left),
    ]);
    for act in acts {
        table.row([
            instant(act.at).into(),
            act.by.as_str().into(),
            // The sentence names no job and not every node.
            act.name.as_ref().map_or_else(|| act.kind.clone(), |name| format!("{} {}", act.kind, bare(name))).into(),
            act.what.as_str().into(),
            act.reason.clone().unwrap_or_default().into(),
        ]);
    }
    table.render(view.width, view.style)
}

#[cfg(test)]
mod tests {
    use super::super::samples::{NOW, view};
    use super::*;

    #[test]
    fn what_people_did() {
        let act = |number: u64, what: &str, kind: &str, name: Option<&str>, reason: Option<&str>| Act {
            number,
            at: NOW - 3_600_000 * (9 - i64::try_from(number).unwrap_or(0)),
            by: "ada".into(),
            what: what.into(),
            kind: kind.into(),
            name: name.map(str::to_owned),
            reason: reason.map(str::to_owned),
        };
        let list = [
            act(8, "held queue nlp", "queue", Some("nlp"), Some("the storage is full")),
            act(7, "released it", "job", Some("default/tiny-gpt"), None),
            act(6, "changed the policy", "policy", None, None),
        ];
        insta::assert_snapshot!(acts(&list, view()));
    }
}
