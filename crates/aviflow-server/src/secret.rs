//! Documents without their secrets, and the way back for whoever submits one again.

use crate::error::Failure;
use aviflow_api::secrets::{mask, named_secret};
use aviflow_api::spec::JobSpec;
use aviflow_api::webhook;
use serde_json::Value;

/// A text with everything masked that looks like a secret.
pub(crate) fn masked(text: &str) -> String {
    mask(text).into_owned()
}

/// The document as it may be shown.
pub(crate) fn shown(spec: &JobSpec) -> JobSpec {
    let masked = to_value(spec).and_then(|mut value| {
        hide(&mut value);
        serde_json::from_value(value).ok()
    });
    // A document that cannot be masked is shown without the parts where secrets are.
    masked.unwrap_or_else(|| JobSpec { env: Default::default(), run: Vec::new(), notify: Vec::new(), ..spec.clone() })
}

fn to_value(spec: &JobSpec) -> Option<Value> {
    serde_json::to_value(spec).ok()
}

fn hide(document: &mut Value) {
    if let Some(env) = document.get_mut("env").and_then(Value::as_object_mut) {
        for (variable, value) in env.iter_mut() {
            if let Value::String(text) = value
                && named_secret(variable)
            {
                *text = "*".repeat(text.chars().count());
            }
        }
    }
    for notify in document.get_mut("notify").and_then(Value::as_array_mut).into_iter().flatten() {
        if let Some(Value::String(address)) = notify.get_mut("webhook") {
            *address = webhook::masked(address);
        }
    }
    hide_texts(document);
}

fn hide_texts(value: &mut Value) {
    match value {
        Value::String(text) => *text = masked(text),
        Value::Array(items) => items.iter_mut().for_each(hide_texts),
        Value::Object(fields) => fields.values_mut().for_each(hide_texts),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// What a client saw masked and submits again becomes what it was. `mine` says
/// whether the job that is repeated is the submitter's own.
pub(crate) fn restored(spec: JobSpec, original: &JobSpec, mine: bool) -> Result<JobSpec, Failure> {
    let (Some(mut value), Some(before)) = (to_value(&spec), to_value(original)) else { return Ok(spec) };
    let mut hidden = before.clone();
    hide(&mut hidden);
    if !put_back(&mut value, &hidden, &before) {
        return Ok(spec);
    }
    if !mine {
        return Err(Failure::refused("maskedSecrets", "the document holds secrets of another user, which are masked")
            .help("write your own, as `secrets:` and not as values"));
    }
    serde_json::from_value(value).map_err(|e| Failure::internal(format!("the document could not be restored: {e}")))
}

/// Whether anything was put back.
fn put_back(value: &mut Value, hidden: &Value, before: &Value) -> bool {
    match (value, hidden, before) {
        (Value::String(text), Value::String(hidden), Value::String(before)) => {
            let masked = text == hidden && hidden != before;
            if masked {
                text.clone_from(before);
            }
            masked
        }
        (Value::Array(items), Value::Array(hidden), Value::Array(before)) => {
            let same = items.iter_mut().zip(hidden).zip(before);
            same.fold(false, |any, ((v, h), b)| put_back(v, h, b) | any)
        }
        (Value::Object(fields), Value::Object(hidden), Value::Object(before)) => {
            fields.iter_mut().fold(false, |any, (key, v)| match (hidden.get(key), before.get(key)) {
                (Some(h), Some(b)) => put_back(v, h, b) | any,
                _ => any,
            })
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::support::spec;
    use aviflow_api::spec::{Notify, NotifyOn};

    #[test]
    fn a_secret_is_shown_masked_and_comes_back_for_its_owner() {
        let key = ["hf_", &"a1".repeat(17)].concat();
        let mut original = spec("train");
        original.env.insert("ADDRESS".into(), format!("https://me:geheim@host/{key}"));
        original.env.insert("WANDB_API_KEY".into(), "plain-looking".into());
        let webhook = "https://chat.example/hook/streng-geheim".to_owned();
        original.notify = vec![Notify { webhook: webhook.clone(), on: vec![NotifyOn::Failed], format: None }];
        let seen = shown(&original);
        assert_eq!(seen.notify[0].webhook, "https://chat.example/***");
        let text = serde_json::to_string(&seen).unwrap();
        assert!(!text.contains("geheim") && !text.contains(&key) && !text.contains("plain-looking"), "{text}");
        let mut again = seen.clone();
        again.env.insert("NEW".into(), "1".into());
        let restored_spec = restored(again.clone(), &original, true).unwrap();
        assert_eq!(restored_spec.env["WANDB_API_KEY"], "plain-looking");
        assert_eq!(restored_spec.env["ADDRESS"], original.env["ADDRESS"]);
        assert_eq!(restored_spec.env["NEW"], "1");
        assert_eq!(restored_spec.notify[0].webhook, webhook);
        assert_eq!(restored(again, &original, false).unwrap_err().error.code, "maskedSecrets");
        let plain = spec("train");
        assert_eq!(restored(plain.clone(), &plain, false).unwrap(), plain);
    }
}
